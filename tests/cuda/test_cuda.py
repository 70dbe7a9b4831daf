"""Devices, where there is none: on Numba's simulator, and as far as the assembly.

Numba has to know from the start of a process whether it is to simulate. Nothing has been run on a GPU by these tests:
`tests/gpu` runs the same on one.
"""

import importlib
import sys
import types
from pathlib import Path

import modes
import numpy as np
import pytest

import sweepgrad as sg
from launch import quiet
from sweepgrad import arrays
from sweepgrad.kernels import gpu

HERE = Path(__file__).parent
PARTS = {
    "operations": "test_others or elementwise or whole_numbers",
    "reductions": "not (test_others or elementwise or whole_numbers)",
}


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("mode", ["simulator", "assembler"])
def test_every_kernel_of_the_table(mode, part):
    """On the simulator all comes out as on the CPU; and all is compiled to assembly."""
    assert modes.run([HERE / "table.py"], mode, "-o", "timeout=300", "-k", PARTS[part], limit=900) > 50


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_behaviour_on_the_simulator():
    assert modes.run([HERE / "behaviour.py", HERE / "benchmarks_on_devices.py"], "simulator", limit=350) > 50


@pytest.fixture
def nothing_loaded(monkeypatch):
    monkeypatch.setattr(gpu, "loaded", None)
    monkeypatch.delenv(gpu.SIMULATE, raising=False)
    for name in ("assembly", "nvidia"):
        monkeypatch.delitem(sys.modules, f"sweepgrad.kernels.{name}", raising=False)


@pytest.mark.parametrize(("package", "module"), [("cupy", "nvidia"), ("numba_cuda", "assembly")])
def test_without_its_packages_the_error_names_the_extra(package, module):
    quiet(
        f"""
        import importlib
        import sys
        import sweepgrad as sg

        sys.modules[{package!r}] = None
        for ask in (lambda: importlib.import_module("sweepgrad.kernels.{module}"), lambda: sg.zeros((), device="cuda")):
            try:
                ask()
            except sg.MissingDependencyError as error:
                assert '`pip install "sweepgrad[cu12]"`, or `[cu13]` for CUDA 13' in str(error), error
            except sg.DeviceError:
                assert {package!r} == "numba_cuda"  # where there is no GPU, that comes first
            else:
                raise AssertionError("it is not needed")
        assert sg.devices() == ["cpu"]
        assert sg.asarray([1.0], device="cpu").device == "cpu"
        """
    )


@pytest.mark.usefixtures("nothing_loaded")
def test_without_a_gpu_the_error_says_so():
    import cupy

    try:
        if cupy.cuda.runtime.getDeviceCount():
            pytest.skip("there is a GPU")
    except cupy.cuda.runtime.CUDARuntimeError:
        pass
    with pytest.raises(sg.DeviceError, match=r"no NVIDIA GPU can be used here: .*nvidia-smi"):
        sg.asarray([1.0], device="cuda")
    assert sg.devices() == ["cpu"]


def test_main_memory_needs_no_package_for_gpus():
    """A program that uses no device imports none of them."""
    quiet(
        """
        import sys
        import sweepgrad as sg
        x = sg.asarray([1.0], requires_grad=True)
        sg.sum(sg.softmax(x * x)).backward()
        assert not {"cupy", "numba_cuda", "numba.cuda", "cuda.core"} & set(sys.modules)
        """
    )


def test_cupy_has_what_its_arrays_are_asked_for():
    """The simulated arrays stand for CuPy's, so what they have, CuPy's must have as well."""
    import cupy
    import cupyx

    from sweepgrad.kernels import simulator

    wanted = {name for name in vars(simulator.SimulatedArray) if not name.startswith("_")} - {"mixin"}
    assert wanted >= {"reshape", "transpose", "astype", "copy", "fill", "device", "flags"}
    wanted |= {
        "__cuda_array_interface__",
        "__dlpack__",
        "__dlpack_device__",
        "__getitem__",
        "__setitem__",
        "__matmul__",
    }
    assert not {name for name in wanted if not hasattr(cupy.ndarray, name)}
    assert not {f.__name__ for f in simulator._FUNCTIONS if not hasattr(cupy, f.__name__)}
    assert callable(cupyx.scatter_add)
    pool = cupy.get_default_memory_pool()
    assert all(callable(getattr(pool, name)) for name in ("used_bytes", "free_bytes", "free_all_blocks"))
    assert issubclass(cupy.cuda.memory.OutOfMemoryError, MemoryError)


class FakeFunction:
    """Stands for a function that was loaded: keeps what it is launched with."""

    def __init__(self, launches, name):
        self.launches, self.name = launches, name

    def __call__(self, grid, block, args):
        self.launches.append((self.name, grid, block, tuple(args)))


@pytest.mark.usefixtures("nothing_loaded")
def test_what_is_launched_through_cupy(monkeypatch):
    """CuPy's runtime and arrays are replaced: code is loaded once for each device, and launched as CuPy wants."""
    import cupy

    nvidia = importlib.import_module("sweepgrad.kernels.nvidia")
    launches, loads, device = [], [], [0]

    class Module:
        def load(self, code):
            loads.append(code)

        def get_function(self, name):
            return FakeFunction(launches, name)

    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: 2,
        getDevice=lambda: device[0],
        getDeviceProperties=lambda k: {"major": 8 + k, "minor": 0, "name": b"GPU", "totalGlobalMem": 1 << 36},
        CUDARuntimeError=cupy.cuda.runtime.CUDARuntimeError,
    )

    class Array(np.ndarray):
        device = property(lambda self: types.SimpleNamespace(id=device[0]))

    fake = types.SimpleNamespace(
        cuda=types.SimpleNamespace(runtime=runtime, Module=Module, Device=None),
        empty=lambda size, dtype: np.empty(size, dtype).view(Array),
    )
    monkeypatch.setattr(nvidia, "cupy", fake)
    monkeypatch.setattr(nvidia.Nvidia, "array", Array)
    gpu.loaded = nvidia.Nvidia()
    assert gpu.loaded.describe(1) == "GPU, 64 GiB, compute capability 9.0"
    from sweepgrad.kernels.expr import symbol
    from sweepgrad.ops.loop import Loop

    loop = Loop(
        [symbol("x") * symbol("y")], [("x", "v", "float32"), ("y", "s", "float32")], "float32", [("v", "float32")]
    )
    x = np.ones(1000, "float32").view(Array)
    for _ in range(2):
        (out,) = loop.launcher().over([x, 2.0], 1000)
    device[0] = 1
    loop.launcher().over([x, 2.0], 1000)
    assert len(loads) == 2
    assert loads[0] != loads[1]
    assert all(code[:4] == b"\x7fELF" for code in loads)
    (name, grid, block, args), *others = launches
    assert len(others) == 2
    assert name.encode() in loads[0]
    assert (grid, block) == ((1, 1), (256,))
    assert args[0] is x
    assert (out.shape, out.dtype) == ((1000,), np.float32)
    # CuPy takes numbers of NumPy in their own width.
    assert [type(one) for one in args[1:-1]] == [np.float32, *[np.int64] * 5]
    assert [int(one) for one in args[2:-1]] == [1, 1, 1000, 1, 1]
    assert arrays.device_of(x) == "cuda:1"
