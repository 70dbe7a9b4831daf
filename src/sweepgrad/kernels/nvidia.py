"""NVIDIA's GPUs, through CuPy: memory, copies, and the launch of kernels. Imported where a device is first asked for.

CuPy, rather than nvmath-python, since what is neither elementwise nor a reduction here is all of NumPy's kind
(indexing, joining, products of matrices), of which nvmath-python has products only. And since it brings what a library
on GPUs needs besides: a pool of memory that is ordered by streams, the current stream and device of each thread,
DLPack.

Guarantees
- Work goes to CuPy's current stream of the calling thread. Nothing waits for the device but `download` and
  `synchronize`, and what CuPy itself waits for: the size of what a mask selects.
- An array that dies, on whatever thread, gives its memory back to CuPy's pool, which calls nothing of CUDA and waits
  for no stream. Memory is freed by `free_idle` alone.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from sweepgrad.dtypes import Array, DType
from sweepgrad.errors import DeviceError, MissingDependencyError
from sweepgrad.kernels.cpu import kept

try:
    import cupy
    import cupyx
except ImportError as error:
    raise MissingDependencyError(
        f'tensors on a GPU need CuPy and numba-cuda: `pip install "sweepgrad[cu12]"`, or `[cu13]` for CUDA 13 ({error})'
    ) from error


class Nvidia:
    """The driver of NVIDIA's GPUs: see `kernels.gpu.Driver`."""

    array = cupy.ndarray
    warp = 32
    threads = 256
    per_thread = 8
    most_chunks = 1024
    most_tiles = 65535

    def __init__(self) -> None:
        try:
            self.count: int = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceError(
                f"no NVIDIA GPU can be used here: {error}. `nvidia-smi` tells whether the system sees one, and the "
                "CUDA version up to which its driver goes"
            ) from error

    def current(self) -> int:
        """The current device of this thread."""
        return cupy.cuda.runtime.getDevice()  # type: ignore[no-any-return]

    def on(self, device: int) -> AbstractContextManager[Any]:
        """Within it, `device` is the current one of this thread."""
        return cupy.cuda.Device(device)  # type: ignore[no-any-return]

    def describe(self, device: int) -> str:
        """The device's name, memory and compute capability."""
        found = cupy.cuda.runtime.getDeviceProperties(device)
        memory = found["totalGlobalMem"] / (1 << 30)
        return f"{found['name'].decode()}, {memory:.0f} GiB, compute capability {found['major']}.{found['minor']}"

    def empty(self, size: int, dtype: DType) -> Any:
        """A flat array on the current device, uninitialised."""
        return cupy.empty(size, dtype)

    def upload(self, array: Array) -> Any:
        """A copy on the current device, contiguous."""
        return cupy.array(array, order="C")

    def download(self, array: Any) -> Array:
        """A copy in main memory, contiguous; waits for the current stream."""
        with self.on(array.device.id):
            return cupy.asnumpy(array, order="C")  # type: ignore[no-any-return]

    def copy(self, array: Any) -> Any:
        """A copy, contiguous, of an array of any device on the current one."""
        return array.copy(order="C")

    def adopt(self, obj: Any) -> Any:
        """An array over the memory of an object with `__cuda_array_interface__` or `__dlpack__`."""
        if isinstance(obj, cupy.ndarray):
            return obj
        return cupy.asarray(obj) if hasattr(obj, "__cuda_array_interface__") else cupy.from_dlpack(obj)

    def add_at(self, total: Any, key: Any, part: Any) -> None:
        """`total[key] += part`, also where `key` names an element several times."""
        cupyx.scatter_add(total, key, part)

    def memory(self, device: int) -> tuple[int, int]:
        """Bytes that arrays have, and bytes idle in the pool."""
        with self.on(device):
            pool = cupy.get_default_memory_pool()
            return pool.used_bytes(), pool.free_bytes()

    def free_idle(self) -> int:
        """Give what is idle in the pools back to the devices; the bytes."""
        freed = 0
        for device in range(self.count):
            freed += self.memory(device)[1]
            with self.on(device):
                cupy.get_default_memory_pool().free_all_blocks()
        return freed

    def synchronize(self) -> None:
        """Wait for the current stream."""
        cupy.cuda.get_current_stream().synchronize()

    def compile(self, source: str, signature: Sequence[str], dtype: str) -> Callable[..., None]:
        """A function of blocks, threads and arguments that launches the kernel on the current device and stream."""
        return _Kernel(source, tuple(signature), dtype)


class _Kernel:
    """A kernel, compiled and loaded where each device first needs it."""

    __slots__ = ("_functions", "_of")

    def __init__(self, source: str, signature: tuple[str, ...], dtype: str) -> None:
        self._of = source, signature, dtype
        self._functions: dict[int, Any] = {}

    def __call__(self, blocks: tuple[int, int], threads: int, arguments: Sequence[Any]) -> None:
        device = cupy.cuda.runtime.getDevice()
        function = self._functions.get(device) or self._load(device)
        function(blocks, (threads,), arguments)

    def _load(self, device: int) -> Any:
        found = cupy.cuda.runtime.getDeviceProperties(device)
        capability = found["major"], found["minor"]
        with _compiling:
            name, code = _code(*self._of, capability)
        module = cupy.cuda.Module()
        module.load(code)
        function = self._functions[device] = module.get_function(name)
        return function


_compiling = threading.RLock()


def _code(source: str, signature: tuple[str, ...], dtype: str, capability: tuple[int, int]) -> tuple[str, bytes]:
    """The entry's name and the code for a compute capability, from the cache folder if it is there."""
    from importlib.metadata import version

    def make() -> bytes:
        from sweepgrad.kernels.assembly import cubin, entry_of, ptx

        text = ptx(source, signature, dtype, capability)
        return entry_of(text).encode() + b"\0" + cubin(text, capability)

    name, code = kept((version("numba-cuda"), capability, source, signature, dtype), make).split(b"\0", 1)
    return name.decode(), code
