"""Devices, and what is done with arrays wherever they are: in main memory, or on a GPU.

An array is NumPy's, or that of the driver (`kernels.gpu`), which has the attributes and methods of NumPy's that are
used in this package. Where NumPy's functions are not called for both alike, they are here.
"""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from sweepgrad.dtypes import CANONICAL, Array, DType, refused_dtype
from sweepgrad.errors import ArgumentError, DeviceError, MissingDependencyError
from sweepgrad.graph import report
from sweepgrad.kernels import buffers, gpu

CPU = "cpu"

_NAME = re.compile(r"cuda(?::(\d{1,4}))?", re.ASCII)


def devices() -> list[str]:
    """The devices that tensors can be on: `"cpu"`, and `"cuda:0"` and so on, one for each GPU that can be used.

    Example:
        >>> import sweepgrad as sg
        >>> sg.devices()[0]
        'cpu'
    """
    try:
        count = gpu.driver().count
    except (MissingDependencyError, DeviceError):
        count = 0
    return [CPU, *(f"cuda:{k}" for k in range(count))]


def resolved(op: str, device: Any) -> str:
    """`device`, as users write it, as the name of one that is there; `"cuda"` means the current one."""
    if device == CPU:
        return CPU
    found = _NAME.fullmatch(device) if isinstance(device, str) else None
    if found is None:
        raise ArgumentError(f'`{op}` got device {device!r}; accepted are "cpu", "cuda", and "cuda:0" and so on')
    driver = gpu.driver()
    number = driver.current() if found[1] is None else int(found[1])
    if number >= driver.count:
        raise DeviceError(f"`{op}` got device {device!r}; those that are there: {', '.join(devices())}")
    return f"cuda:{number}"


def adopted_from_device(op: str, obj: Any) -> Any:
    """An array over the memory on a GPU that another library's object has."""
    array = gpu.driver().adopt(obj)
    if array.dtype not in CANONICAL:
        raise refused_dtype(op, array.dtype)
    return array


def is_on_device(value: Any) -> bool:
    """Whether `value` is an array on a GPU."""
    return gpu.loaded is not None and isinstance(value, gpu.loaded.array)


def is_array(value: Any) -> bool:
    """Whether `value` is an array, wherever it is."""
    return isinstance(value, np.ndarray) or is_on_device(value)


def device_of(array: Any) -> str:
    """The device of an array, by its name."""
    return f"cuda:{array.device.id}" if is_on_device(array) else CPU


def on(device: str) -> AbstractContextManager[Any]:
    """Within it, arrays on a GPU are made on `device`."""
    if device == CPU or (number := int(device[5:])) == gpu.driver().current():
        return nullcontext()
    return gpu.driver().on(number)


def together(op: str, arrays: Sequence[Any]) -> AbstractContextManager[Any]:
    """Raise DeviceError unless all `arrays` are on one device; within the result, it is the current one."""
    if gpu.loaded is None:
        return nullcontext()
    found = list(dict.fromkeys(map(device_of, arrays)))
    if len(found) > 1:
        raise mixed(op, found)
    return on(found[0]) if found else nullcontext()


def mixed(op: str, found: Sequence[str]) -> DeviceError:
    """The error for tensors or arrays on several devices."""
    target = next((device for device in found if device != CPU), found[0])
    return DeviceError(
        f"`{op}` got tensors on {' and '.join(found)}; needed is one device: move the others there, for example with "
        f'`t.to_device("{target}")`'
    )


# --- arrays -----------------------------------------------------------------------------------------------------------


def empty(size: int, dtype: DType, like: Any) -> Any:
    """A flat array, uninitialised, where `like` is."""
    if type(like) is np.ndarray:
        return buffers.empty(size, dtype)
    with on(device_of(like)):
        return gpu.driver().empty(size, dtype)


def filled_on(device: str, size: int, value: Any, dtype: DType) -> Any:
    """A flat array of `value` on a GPU."""
    with on(device):
        found = gpu.driver().empty(size, dtype)
        found.fill(value)
        return found


def filled(size: int, value: Any, dtype: DType, like: Any) -> Any:
    """A flat array of `value`, where `like` is."""
    if type(like) is np.ndarray:
        return np.zeros(size, dtype) if value == 0 else np.full(size, value, dtype)
    return filled_on(device_of(like), size, value, dtype)


def contiguous(array: Any) -> Any:
    """The elements in C order, flat; copied only if they are not."""
    if type(array) is np.ndarray:
        return np.ascontiguousarray(array).reshape(-1)
    if not array.flags.c_contiguous:
        with on(device_of(array)):
            array = gpu.driver().copy(array)
    return array.reshape(-1)


def host(array: Any) -> Array:
    """The elements in main memory; waits for a GPU to compute them."""
    return gpu.driver().download(array) if is_on_device(array) else array


def moved(array: Any, device: str) -> Any:
    """The elements on `device`: a copy, unless they are in main memory and shall be."""
    if device == CPU:
        return host(array)
    with on(device):
        return gpu.driver().copy(array) if is_on_device(array) else gpu.driver().upload(array)


def copied(array: Any, dtype: DType) -> Any:
    """A contiguous copy in `dtype`, on the same device."""
    if not is_on_device(array):
        return np.array(array, dtype=dtype, order="C")
    with on(device_of(array)):
        return gpu.driver().copy(array if array.dtype == dtype else array.astype(dtype))


def add_at(total: Any, key: Any, part: Any) -> None:
    """`total[key] += part`, also where `key` names an element several times; on a GPU in no fixed order."""
    if is_on_device(total):
        with on(device_of(total)):
            gpu.driver().add_at(total, key, part)
    else:
        np.add.at(total, key, part)


def as_number(array: Any) -> Any:
    """What a kernel takes for one number: a number, or on a GPU, so that nobody waits for it, the array that has it."""
    return array.reshape(-1)[0].item() if type(array) is np.ndarray else array.reshape(-1)


def empty_idle() -> int:
    """Free the memory that is idle on all GPUs; the bytes."""
    return 0 if gpu.loaded is None else gpu.loaded.free_idle()


def memory() -> tuple[int, int]:
    """Bytes that arrays on all GPUs have, and bytes idle there."""
    if gpu.loaded is None:
        return 0, 0
    used, idle = zip(*map(gpu.loaded.memory, range(gpu.loaded.count)), strict=True)
    return sum(used), sum(idle)


report.device_pool_bytes = lambda: memory()[1]
