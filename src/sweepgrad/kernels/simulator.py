"""A GPU that is simulated in main memory, by Numba's simulator: for tests, and for a look where there is no GPU.

Serves instead of a real one if `NUMBA_ENABLE_CUDASIM=1` was set when the process began. There are two devices. It is as
strict as a real one, and more so: an array is not an array of NumPy and takes no part in what one takes part in; a
kernel that reads or writes outside of an array's memory raises; memory is full of NaN until it is written to; and there
is as little of it as a test asks for.
"""

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from sweepgrad.dtypes import Array, DType
from sweepgrad.kernels.assembly import function_of

_lock = threading.RLock()  # guards the memory of all devices
_running = threading.RLock()  # held while a kernel runs: Numba's simulator runs one at a time


class _Current(threading.local):
    device = 0


_current = _Current()


class SimulatedOutOfMemoryError(MemoryError):
    """A device has no room."""


class _Memory:
    """The memory of one device: blocks in use and idle, of which the idle ones are lent again."""

    def __init__(self) -> None:
        self.capacity = 1 << 40
        self.used = 0
        self.idle: dict[int, list[Array]] = {}

    def idle_bytes(self) -> int:
        return sum(size * len(blocks) for size, blocks in self.idle.items())

    def take(self, nbytes: int) -> Array:
        size = max(1, -(-nbytes // 512)) * 512
        with _lock:
            blocks = self.idle.get(size)
            if blocks:
                block = blocks.pop()
            else:
                if self.used + self.idle_bytes() + size > self.capacity:
                    self.idle.clear()
                if self.used + size > self.capacity:
                    raise SimulatedOutOfMemoryError(f"out of memory on the device: {size} bytes")
                block = np.empty(size, np.uint8)
            self.used += size
        block.fill(0xFF)
        return block

    def give(self, block: Array) -> None:
        with _lock:
            self.used -= block.size
            self.idle.setdefault(block.size, []).append(block)


MEMORIES = [_Memory(), _Memory()]


class _Lease:
    """A block of memory, given back when neither an array made of this object nor a view of one is alive."""

    __slots__ = ("block", "device")

    @property
    def __array_interface__(self) -> Any:
        assert self.block is not None
        return self.block.__array_interface__

    def __init__(self, nbytes: int, device: int) -> None:
        self.device = device
        self.block: Array | None = None
        self.block = MEMORIES[device].take(nbytes)

    def __del__(self) -> None:
        if self.block is not None:
            MEMORIES[self.device].give(self.block)


_FUNCTIONS = {np.concatenate, np.flip, np.roll, np.take, np.broadcast_to, np.argmax, np.argmin}
"""Those of NumPy that are called for arrays on a device; `tests/cuda` looks whether CuPy has them."""


class SimulatedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array on a simulated device; it has of CuPy's arrays what this library uses."""

    __slots__ = ("__weakref__", "_host", "_lease")

    def __init__(self, host: Array, lease: Any) -> None:
        self._host = host
        self._lease = lease  # a block of the device's, or the owner of memory that came from elsewhere

    device = property(lambda self: SimpleNamespace(id=getattr(self._lease, "device", 0)))
    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    strides = property(lambda self: self._host.strides)
    flags = property(lambda self: self._host.flags)
    __cuda_array_interface__ = property(
        lambda self: {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "strides": self.strides,
            "data": (self._host.ctypes.data, False),
            "version": 3,
        }
    )

    def __dlpack__(self, **options: Any) -> Any:
        return self._host.__dlpack__(**{name: value for name, value in options.items() if name != "stream"})

    def __dlpack_device__(self) -> Any:
        return self._host.__dlpack_device__()

    def __array__(self, *args: Any, **kwargs: Any) -> Array:
        raise TypeError("an array on a device is not converted to an array of NumPy implicitly")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__" or any(isinstance(one, np.ndarray) for one in inputs):
            raise TypeError(f"`{ufunc.__name__}` takes arrays on the device")
        with np.errstate(all="ignore"):
            return self._kept(ufunc(*map(_host, inputs), **{k: _host(v) for k, v in kwargs.items()}))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func not in _FUNCTIONS:
            raise TypeError(f"`{func.__name__}` is not among what is called for arrays on a device")
        if func is np.concatenate and not all(isinstance(one, SimulatedArray) for one in args[0]):
            raise TypeError("`concatenate` takes arrays on the device")
        return self._kept(func(*map(_host, args), **{name: _host(value) for name, value in kwargs.items()}))

    def __getitem__(self, key: Any) -> Any:
        return self._kept(self._host[_host(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray):
            raise TypeError("an array of NumPy is not written to a device implicitly")
        self._host[_host(key)] = _host(value)

    def __matmul__(self, other: Any) -> Any:
        return self.__array_ufunc__(np.matmul, "__call__", self, other)

    def reshape(self, *shape: Any) -> Any:
        return self._kept(self._host.reshape(*shape))

    def transpose(self, *axes: Any) -> Any:
        return self._kept(self._host.transpose(*axes))

    def astype(self, dtype: Any) -> Any:
        with np.errstate(all="ignore"):
            return self._kept(self._host.astype(dtype))

    def copy(self) -> Any:
        found = made(self.shape, self.dtype)
        found._host[...] = self._host
        return found

    def fill(self, value: Any) -> None:
        self._host.fill(value)

    def __reduce__(self) -> Any:
        return _restored, (self._host.copy(), self.device.id)

    def _kept(self, host: Any) -> Any:
        """A result: a view of this memory as such, anything new in memory of the device."""
        array = np.asarray(host)
        if np.may_share_memory(array, self._host):
            return SimulatedArray(array, self._lease)
        found = made(array.shape, array.dtype, self.device.id)
        found._host[...] = array
        return found


def _host(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_host, value))
    return value._host if isinstance(value, SimulatedArray) else value


def _restored(host: Array, device: int) -> SimulatedArray:
    found = made(host.shape, host.dtype, device)
    found._host[...] = host
    return found


def made(shape: int | tuple[int, ...], dtype: DType, device: int | None = None) -> SimulatedArray:
    """A new array of anything on a device, by default the current one."""
    lengths = (shape,) if isinstance(shape, int) else shape
    nbytes = math.prod(lengths) * np.dtype(dtype).itemsize
    lease = _Lease(nbytes, _current.device if device is None else device)
    return SimulatedArray(np.asarray(lease)[:nbytes].view(dtype).reshape(lengths), lease)


class Pointer:
    """What a kernel is handed for an array: it knows where the memory ends, which a GPU does not."""

    __slots__ = ("memory", "start")

    def __init__(self, array: SimulatedArray) -> None:
        host = array._host
        whole: Any = array._lease.block if isinstance(array._lease, _Lease) else host.reshape(-1).view(np.uint8)
        dtype = np.dtype(np.uint8) if host.dtype == np.bool_ else host.dtype
        self.memory = whole[: whole.size // dtype.itemsize * dtype.itemsize].view(dtype)
        self.start = (host.ctypes.data - whole.ctypes.data) // dtype.itemsize if host.size else 0

    def __getitem__(self, index: Any) -> Any:
        return self.memory[self._at(index)]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.memory[self._at(index)] = value

    def _at(self, index: Any) -> int:
        at = self.start + int(index)
        if not 0 <= at < self.memory.size:
            raise IndexError(f"a kernel is outside of its array's memory: element {index}")
        return at


class Simulator:
    """The driver of the simulated devices: see `kernels.gpu.Driver`."""

    array = SimulatedArray
    warp = 4
    threads = 8
    per_thread = 8
    most_chunks = 2
    most_tiles = 2
    count = len(MEMORIES)

    def current(self) -> int:
        return _current.device

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        before, _current.device = _current.device, device
        try:
            yield
        finally:
            _current.device = before

    def describe(self, device: int) -> str:
        return "simulated by Numba"

    def empty(self, size: int, dtype: DType) -> SimulatedArray:
        return made(size, dtype)

    def upload(self, array: Array) -> SimulatedArray:
        return _restored(array, _current.device)

    def download(self, array: Any) -> Array:
        return np.array(array._host, order="C")

    def copy(self, array: Any) -> SimulatedArray:
        return _restored(array._host, _current.device)

    def adopt(self, obj: Any) -> SimulatedArray:
        if isinstance(obj, SimulatedArray):
            return obj
        return SimulatedArray(np.from_dlpack(obj), obj)

    def add_at(self, total: Any, key: Any, part: Any) -> None:
        np.add.at(total._host, _host(key), part._host)

    def memory(self, device: int) -> tuple[int, int]:
        return MEMORIES[device].used, MEMORIES[device].idle_bytes()

    def free_idle(self) -> int:
        freed = sum(memory.idle_bytes() for memory in MEMORIES)
        for memory in MEMORIES:
            memory.idle.clear()
        return freed

    def synchronize(self) -> None:
        """Nothing is under way."""

    def compile(self, source: str, signature: Sequence[str], dtype: str) -> Callable[..., None]:
        """A function of blocks, threads and arguments that runs the kernel."""
        from numba import cuda

        jit: Any = cuda.jit
        kernel = jit(function_of(source, dtype, _mathematics(), np.rint))

        def launch(blocks: tuple[int, int], threads: int, arguments: Sequence[Any]) -> None:
            assert len(arguments) == len(signature)
            own = [_argument(one, name) for one, name in zip(arguments, signature, strict=True)]
            with _running:
                kernel[blocks, threads](*own)

        return launch


def _argument(value: Any, name: str) -> Any:
    if not name.startswith("*"):
        assert np.dtype(type(value)).name == name, f"{value!r} for {name}"
        return value
    assert type(value) is SimulatedArray, f"{value!r} for {name}"
    assert value.dtype.name == name[1:], f"{value.dtype} for {name}"
    return Pointer(value)


# --- what Numba's simulator lacks -------------------------------------------------------------------------------------


@functools.cache
def _mathematics() -> Any:
    """The module `math`, with functions that keep float32, and raise nothing."""
    _teach_simulator()
    names = "isnan isinf isfinite floor ceil trunc sqrt exp expm1 log log1p log2 log10 sin cos tan sinh cosh tanh"
    names += " hypot fmod copysign"
    found = {name: getattr(np, name) for name in names.split()}
    found |= {f"a{name}": getattr(np, f"arc{name}") for name in ["sin", "cos", "tan", "sinh", "cosh", "tanh", "tan2"]}
    found |= {name: functools.partial(_typed, getattr(math, name)) for name in ("erf", "erfc")}
    return SimpleNamespace(pow=np.power, **found)


def _typed(function: Any, x: Any) -> Any:
    return type(x)(function(x))


def _teach_simulator() -> None:
    """Give it shuffles between the threads of a warp, which it lacks, and one shared array for all who ask at once."""
    from numba.cuda.simulator import kernelapi

    module: Any = kernelapi.FakeCUDAModule
    shared: Any = kernelapi.FakeCUDAShared
    lock = threading.Lock()
    warp = Simulator.warp

    def allocate_once(self: Any, shape: Any, dtype: Any) -> Any:
        with lock:
            arrays = vars(self).setdefault("_by_dtype", {})
            if dtype not in arrays:
                arrays[dtype] = np.empty(shape, dtype)
            return arrays[dtype]

    def exchange(self: Any, value: Any, distance: int | None, source: int) -> Any:
        own = self.threadIdx.x
        lanes = vars(self).setdefault("_lanes", {})
        lanes[own] = value
        self.syncthreads()
        found = lanes.get(own + distance if distance is not None else own // warp * warp + source, value)
        self.syncthreads()
        return found

    shared.array = allocate_once
    module.shfl_down_sync = lambda self, mask, value, distance: exchange(self, value, distance, 0)
    module.shfl_sync = lambda self, mask, value, source: exchange(self, value, None, source)
