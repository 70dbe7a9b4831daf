"""Functions that make tensors, as in the Python array API standard, each with `requires_grad`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sweepgrad.arrays import CPU, adopted_from_device, device_of, filled_on, moved, resolved
from sweepgrad.dtypes import CANONICAL, DTYPES, Array, DType, as_dtype, refused_dtype
from sweepgrad.errors import ArgumentError, DTypeError
from sweepgrad.ops.shape import as_integer, as_number, as_shape, astype, to_device
from sweepgrad.sharing import adopted, as_array, copied, is_constant
from sweepgrad.shortage import again, attempt
from sweepgrad.tensor import Tensor, make, make_here, make_variable, variable, wrap

_FLOAT64 = DTYPES["float64"]


def asarray(
    obj: Any,
    /,
    *,
    dtype: Any = None,
    device: str | None = None,
    requires_grad: bool = False,
    copy: bool | None = None,
) -> Tensor:
    """A tensor from an array, a number, nested lists of numbers, or another tensor.

    An array is copied, so that the tensor never changes, unless nobody can write to it: a large `t.numpy()` and arrays
    over bytes are shared. A tensor is returned as it is unless dtype, device, `requires_grad` or `copy` asks for
    another one; what is made from a tracked tensor is tracked, as by `astype`. An array on a GPU, of CuPy, PyTorch or
    whoever else has `__cuda_array_interface__`, is copied there.

    Args:
        obj: what to convert; float64, int64 or bool by default for Python numbers, as in NumPy.
        dtype: of the result; by default that of `obj`.
        device: of the result, `"cpu"`, `"cuda"` or `"cuda:0"` and so on; by default where `obj` is.
        requires_grad: make the result a variable, unless it is tracked already.
        copy: True always copies; False shares an array that is read-only (`array.flags.writeable = False`), and raises
            ValueError where a copy would be needed. If its owner makes it writable again, `backward` raises TypeError.
            On a GPU, where nothing is read-only, False shares any array; see `from_dlpack`.

    Raises:
        TypeError: for a dtype that tensors cannot have, or `requires_grad` with a dtype that is not a float.
        ValueError: if `copy` is False and a copy is needed, or nested lists are ragged, or for an unknown device.
        RuntimeError: if there is no such device (`DeviceError`).
        ImportError: if there is no package for devices (`MissingDependencyError`).

    Example:
        >>> import sweepgrad as sg
        >>> sg.asarray([[1, 2], [3, 4]], dtype="float32", requires_grad=True)
        Tensor([[1., 2.],
                [3., 4.]], dtype=float32, requires_grad=True)
    """
    target = None if dtype is None else as_dtype("asarray", dtype)
    place = None if device is None else resolved("asarray", device)
    if isinstance(obj, Tensor):
        return _from_tensor(obj, obj.dtype if target is None else target, place, requires_grad, copy)
    if hasattr(obj, "__cuda_array_interface__"):
        return _from_device(obj, target, place, requires_grad, copy)
    if copy is False and place not in (None, CPU):
        raise ArgumentError(f"`asarray` with copy=False cannot move an array to {place}: leave out `copy`")
    if copy is False and not isinstance(obj, np.ndarray):
        raise ArgumentError(
            f"`asarray` with copy=False needs an array; {type(obj).__name__} has to be copied: leave out `copy`"
        )
    array = as_array("asarray", obj)
    native = array.dtype.newbyteorder("=")
    if target is None and native not in CANONICAL:
        raise refused_dtype("asarray", array.dtype)
    target = CANONICAL[native] if target is None else target
    if not isinstance(obj, np.ndarray) and target.kind in "iu" and array.size:
        bounds, low, high = np.iinfo(target), attempt("asarray", array.min), attempt("asarray", array.max)
        if not (bounds.min <= low and high <= bounds.max):
            raise DTypeError(f"`asarray` got numbers from {low} to {high}, which do not all fit into {target}")
    shared = None
    if copy is not True and array.dtype == target and array.dtype.isnative and array.flags.aligned:
        if copy is False:
            shared = adopted(array)
        elif is_constant(array):
            shared = array.view()
    if copy is False and shared is None:
        raise ArgumentError(
            "`asarray` with copy=False needs a read-only, aligned array of the result's dtype "
            f"({target}); found {array.dtype}, {'writable' if array.flags.writeable else 'read-only'}: set "
            "`array.flags.writeable = False` to share it"
        )
    if shared is None:
        shared = copied("asarray", array, target)
    return _made(shared, requires_grad, place)


def _from_tensor(tensor: Tensor, dtype: DType, device: str | None, requires_grad: bool, copy: bool | None) -> Tensor:
    moves = device is not None and device != tensor.device
    if copy is False and (dtype is not tensor.dtype or moves):
        what = f"move a tensor from {tensor.device} to {device}" if moves else f"convert {tensor.dtype} to {dtype}"
        raise ArgumentError(f"`asarray` with copy=False cannot {what}: leave out `copy`, `dtype` or `device`")
    result = astype(tensor, dtype, copy=copy is True and not moves)
    if device is not None:
        result = to_device(result, device)
    return variable(result) if requires_grad and not result.requires_grad else result


def _from_device(obj: Any, dtype: DType | None, device: str | None, requires_grad: bool, copy: bool | None) -> Tensor:
    """A tensor from an array of another library on a GPU."""
    array = attempt("asarray", adopted_from_device, "asarray", obj)
    own = device_of(array)
    target = CANONICAL[array.dtype] if dtype is None else dtype
    if copy is False and (array.dtype != target or device not in (None, own) or not array.flags.c_contiguous):
        raise ArgumentError(
            f"`asarray` with copy=False cannot move or convert an array on {own} ({array.dtype}), or make it "
            "contiguous: leave out `copy`"
        )
    if copy is not False:
        array = copied("asarray", array, target)
    return _made(array, requires_grad, device)


def from_dlpack(x: Any, /, *, device: str | None = None, copy: bool | None = None) -> Tensor:
    """A tensor from an array of any library that speaks DLPack (PyTorch, CuPy, JAX, NumPy), without a copy on a GPU.

    In main memory `asarray` decides whether it is copied: whatever somebody can write to is. On a GPU nobody can be
    kept from writing, so the memory is shared: do not write to it while a graph needs it, or pass `copy=True`.

    Args:
        x: an object with `__dlpack__`, such as a tensor of PyTorch.
        device: of the result; by default where `x` is.
        copy: True always copies; False raises ValueError where a copy would be needed.

    Raises:
        TypeError: if x has no `__dlpack__`, or a dtype that tensors cannot have.
        ValueError: if `copy` is False and a copy is needed.

    Example:
        >>> import numpy as np
        >>> import sweepgrad as sg
        >>> sg.from_dlpack(np.arange(3.0))
        Tensor([0., 1., 2.])
    """
    if isinstance(x, Tensor):
        return asarray(x, device=device, copy=copy)
    if not hasattr(x, "__dlpack__"):
        raise DTypeError(f"`from_dlpack` needs an object with `__dlpack__`; found {type(x).__name__}: use `asarray`")
    if x.__dlpack_device__()[0] in _IN_MAIN_MEMORY and not hasattr(x, "__cuda_array_interface__"):
        return asarray(x if isinstance(x, np.ndarray) else np.from_dlpack(x), device=device, copy=copy)
    array = attempt("from_dlpack", adopted_from_device, "from_dlpack", x)
    shared = copy is not True and array.flags.c_contiguous
    if copy is False and not (shared and device in (None, device_of(array))):
        raise ArgumentError(
            f"`from_dlpack` with copy=False needs a contiguous array on the device asked for; found one on "
            f"{device_of(array)} with strides {array.strides}: leave out `copy`"
        )
    return _made(array if shared else copied("from_dlpack", array, array.dtype), False, device)


_IN_MAIN_MEMORY = (1, 3, 11)
"""DLPack's numbers of devices whose memory is the processor's: its own, and pinned for CUDA and for ROCm."""


def _made(array: Array, requires_grad: bool, device: str | None = None) -> Tensor:
    if device is not None and (place := resolved("asarray", device)) != device_of(array):
        array = attempt("asarray", moved, array, place)
    tensor = wrap(array)
    return make_variable(tensor) if requires_grad else tensor


def _uniform(
    op: str, element: Any, shape: tuple[int, ...], dtype: DType, requires_grad: bool, device: str | None = None
) -> Tensor:
    """A tensor of equal elements; None stands for 0, of which the system has pages ready."""
    try:
        if device is not None and (place := resolved(op, device)) != CPU:
            tensor = make(filled_on(place, math.prod(shape), element or 0, dtype), None, shape, dtype, None)
        else:
            if element is None:
                flat = np.zeros(math.prod(shape), dtype)
            else:
                flat = np.empty(math.prod(shape), dtype)
                flat.fill(element)  # `np.full` and `np.ones` take 1 us longer
            tensor = make_here(flat, None, shape, dtype, None)
        return make_variable(tensor) if requires_grad else tensor
    except MemoryError as error:
        return again(error, op, _uniform, op, element, shape, dtype, requires_grad, device)


def _dtype(op: str, dtype: Any, default: DType = _FLOAT64) -> DType:
    return default if dtype is None else as_dtype(op, dtype)


def zeros(
    shape: int | tuple[int, ...], *, dtype: Any = None, device: str | None = None, requires_grad: bool = False
) -> Tensor:
    """A tensor of zeros, float64 and in main memory by default."""
    return _uniform("zeros", None, as_shape("zeros", shape), _dtype("zeros", dtype), requires_grad, device)


def ones(
    shape: int | tuple[int, ...], *, dtype: Any = None, device: str | None = None, requires_grad: bool = False
) -> Tensor:
    """A tensor of ones, float64 and in main memory by default."""
    return _uniform("ones", 1, as_shape("ones", shape), _dtype("ones", dtype), requires_grad, device)


def full(
    shape: int | tuple[int, ...],
    fill_value: float,
    *,
    dtype: Any = None,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor of `fill_value`; by default float64, or int64 or bool for a Python int or bool.

    Raises:
        TypeError: if `fill_value` is not a number.
        ValueError: if the dtype cannot hold it.
    """
    value = _fill_value("full", fill_value)
    target = as_dtype("full", attempt("full", np.asarray, value).dtype if dtype is None else dtype)
    return _uniform("full", _element("full", value, target), as_shape("full", shape), target, requires_grad, device)


def _fill_value(op: str, value: Any) -> Any:
    return value if isinstance(value, (bool, np.bool_)) else as_number(op, "fill_value", value)


def _element(op: str, value: Any, dtype: DType) -> Any:
    """The number `value` in `dtype`, where NumPy itself would wrap integers that `dtype` cannot hold."""
    try:
        return dtype.type(np.asarray(value).item())
    except (OverflowError, ValueError):
        raise ArgumentError(f"`{op}` got {value!r}, which {dtype} cannot hold: choose another dtype") from None
    except MemoryError as error:
        return again(error, op, _element, op, value, dtype)


def arange(
    start: float,
    /,
    stop: float | None = None,
    step: float = 1,
    *,
    dtype: Any = None,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Evenly spaced numbers from `start` up to but without `stop`; with one argument, from 0 up to it.

    float64, or int64 if every argument is an int and no gradient is required.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if the step is 0, or a number is not finite or too large.
    """
    ends = {"start": start} if stop is None else {"start": start, "stop": stop}
    numbers = [as_number("arange", name, value) for name, value in (ends | {"step": step}).items()]
    low, high, stride = numbers if len(numbers) == 3 else (0, *numbers)
    if stride == 0:
        raise ArgumentError("`arange` needs a step other than 0; found 0")
    integers = all(isinstance(value, (int, np.integer)) for value in numbers)
    target = _dtype("arange", dtype, DTYPES["int64"] if integers and not requires_grad else _FLOAT64)
    try:
        array = attempt("arange", lambda: np.arange(low, high, stride).astype(target))
    except (OverflowError, ValueError):  # not finite, or too large
        raise ArgumentError(
            f"`arange` from {low} to {high} by {stride} is no array: pass finite numbers, fewer or smaller ones"
        ) from None
    return _made(array, requires_grad, device)


def linspace(
    start: float,
    stop: float,
    /,
    num: int,
    *,
    dtype: Any = None,
    endpoint: bool = True,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """`num` evenly spaced numbers from `start` to `stop`, which is left out unless `endpoint`."""
    low, high = as_number("linspace", "start", start), as_number("linspace", "stop", stop)
    count = as_integer("linspace", "num", num)
    if count < 0:
        raise ArgumentError(f"`linspace` needs a count of numbers that is not negative; found {count}")
    target = _dtype("linspace", dtype)
    array = attempt("linspace", np.linspace, low, high, count, endpoint=endpoint, dtype=target)
    return _made(array, requires_grad, device)


def eye(
    n_rows: int,
    n_cols: int | None = None,
    /,
    *,
    k: int = 0,
    dtype: Any = None,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """A matrix with ones on the diagonal `k` (0 is the main one) and zeros elsewhere."""
    rows, columns = as_shape("eye", (n_rows, n_rows if n_cols is None else n_cols))
    array = attempt("eye", np.eye, rows, columns, as_integer("eye", "k", k), dtype=_dtype("eye", dtype))
    return _made(array, requires_grad, device)


def _like(op: str, x: Any, value: Any, dtype: Any, requires_grad: bool, device: str | None) -> Tensor:
    like = asarray(x)
    target = _dtype(op, dtype, like._dtype)
    place = like.device if device is None else device
    return _uniform(op, _element(op, _fill_value(op, value), target), like._shape, target, requires_grad, place)


def zeros_like(x: Any, /, *, dtype: Any = None, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """Zeros of the shape and, unless given, the dtype and the device of x."""
    return _like("zeros_like", x, 0, dtype, requires_grad, device)


def ones_like(x: Any, /, *, dtype: Any = None, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """Ones of the shape and, unless given, the dtype and the device of x."""
    return _like("ones_like", x, 1, dtype, requires_grad, device)


def full_like(
    x: Any, /, fill_value: float, *, dtype: Any = None, device: str | None = None, requires_grad: bool = False
) -> Tensor:
    """`fill_value` in the shape and, unless given, the dtype and the device of x."""
    return _like("full_like", x, fill_value, dtype, requires_grad, device)
