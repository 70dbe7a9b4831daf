"""Functions that make tensors, as in the Python array API standard, each with `requires_grad`."""

from __future__ import annotations

from typing import Any

import numpy as np

from sweepgrad.errors import ArgumentError, DTypeError, ShapeError, VariableError
from sweepgrad.ops.shape import as_dtype, as_shape, astype
from sweepgrad.tensor import CANONICAL, DTYPES, FLOATS, Array, Tensor, variable, wrap

_FLOAT64 = DTYPES["float64"]


def asarray(obj: Any, /, *, dtype: Any = None, requires_grad: bool = False, copy: bool | None = None) -> Tensor:
    """A tensor from an array, a number, nested lists of numbers, or another tensor.

    An array that its owner could still write to is copied, so that the tensor never changes; one that is read-only
    (`array.flags.writeable = False`) is shared. A tensor is returned as it is unless dtype or `requires_grad` asks for
    another one.

    Args:
        obj: what to convert; float64, int64 or bool by default for Python numbers, as in NumPy.
        dtype: of the result; by default that of `obj`.
        requires_grad: make the result a variable.
        copy: True always copies; False raises ValueError where a copy would be needed.

    Raises:
        TypeError: for a dtype that tensors cannot have, or `requires_grad` with a dtype that is not a float.
        ValueError: if `copy` is False and a copy is needed, or nested lists are ragged.

    Example:
        >>> import sweepgrad as sg
        >>> sg.asarray([[1, 2], [3, 4]], dtype="float32", requires_grad=True)
        Tensor([[1., 2.],
                [3., 4.]], dtype=float32, requires_grad=True)
    """
    target = None if dtype is None else as_dtype("asarray", dtype)
    _check_float(target, requires_grad)
    if isinstance(obj, Tensor):
        return _from_tensor(obj, target, requires_grad, copy)
    if not isinstance(obj, np.ndarray):
        if copy is False:
            raise ArgumentError(f"`asarray` with copy=False needs an array; {type(obj).__name__} has to be copied")
        try:
            obj = np.asarray(obj)
        except VariableError:
            raise VariableError(
                "`asarray` of a list that holds tensors which require a gradient would cut them from the graph; join "
                "them with `stack` or `concat`"
            ) from None
        except ValueError as error:
            raise ShapeError(f"`asarray` cannot make a regular array: {error}") from None
    native = obj.dtype.newbyteorder("=")
    if native not in CANONICAL and target is None:
        raise DTypeError(f"`asarray` got dtype {obj.dtype}; accepted are {', '.join(DTYPES)}")
    if obj.dtype.kind not in "biuf":
        raise DTypeError(f"`asarray` got dtype {obj.dtype}; accepted are {', '.join(DTYPES)}")
    target = CANONICAL[native] if target is None else target
    shared = copy is not True and obj.dtype == target and obj.dtype.isnative and obj.flags.aligned and _is_frozen(obj)
    if copy is False and not shared:
        raise ArgumentError(
            "`asarray` with copy=False needs a read-only, aligned array of the result's dtype "
            f"({target}); found {obj.dtype}, {'writable' if obj.flags.writeable else 'read-only'}: set "
            "`array.flags.writeable = False` to share it"
        )
    tensor = wrap(np.asarray(obj) if shared else np.array(obj, dtype=target, order="C", subok=False))
    return variable(tensor) if requires_grad else tensor


def _from_tensor(tensor: Tensor, dtype: Any, requires_grad: bool, copy: bool | None) -> Tensor:
    if dtype is not None and dtype is not tensor.dtype:
        if copy is False:
            raise ArgumentError(f"`asarray` with copy=False cannot convert {tensor.dtype} to {dtype}")
        tensor = astype(tensor, dtype)
    if requires_grad and not tensor.requires_grad:
        return variable(tensor)
    if copy and not tensor.requires_grad:
        return tensor.detach()
    return tensor


def _is_frozen(array: Array) -> bool:
    """Whether neither the array nor what it is a view of can be written to."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return False
        base = base.base
    return base is None or isinstance(base.obj if isinstance(base, memoryview) else base, bytes)


def _check_float(dtype: Any, requires_grad: bool) -> None:
    if requires_grad and dtype is not None and dtype not in FLOATS:
        raise DTypeError(
            f"`requires_grad` needs a float dtype; found {dtype}: only float32 and float64 have derivatives"
        )


def _made(op: str, array: Array, dtype: Any, requires_grad: bool) -> Tensor:
    target = _FLOAT64 if dtype is None else as_dtype(op, dtype)
    _check_float(target, requires_grad)
    tensor = wrap(np.asarray(array, dtype=target))
    return variable(tensor) if requires_grad else tensor


def zeros(shape: int | tuple[int, ...], *, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """A tensor of zeros, float64 by default."""
    return _made("zeros", np.zeros(as_shape("zeros", shape), _dtype("zeros", dtype)), dtype, requires_grad)


def ones(shape: int | tuple[int, ...], *, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """A tensor of ones, float64 by default."""
    return _made("ones", np.ones(as_shape("ones", shape), _dtype("ones", dtype)), dtype, requires_grad)


def _dtype(op: str, dtype: Any) -> Any:
    return _FLOAT64 if dtype is None else as_dtype(op, dtype)


def full(shape: int | tuple[int, ...], fill_value: float, *, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """A tensor of `fill_value`; by default float64, or int64 or bool for a Python int or bool."""
    if isinstance(fill_value, Tensor) or not isinstance(fill_value, (bool, int, float, np.generic)):
        raise DTypeError(f"`full` needs a number; found {type(fill_value).__name__}: use `broadcast_to`")
    array = np.full(as_shape("full", shape), fill_value, None if dtype is None else as_dtype("full", dtype))
    return _made("full", array, array.dtype, requires_grad)


def arange(
    start: float,
    /,
    stop: float | None = None,
    step: float = 1,
    *,
    dtype: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """Evenly spaced numbers from `start` up to but without `stop`; with one argument, from 0 up to it.

    float64, or int64 if every argument is an int and no gradient is required.
    """
    low, high = (0, start) if stop is None else (start, stop)
    if step == 0:
        raise ArgumentError("`arange` needs a step other than 0")
    integers = all(isinstance(value, (int, np.integer)) for value in (low, high, step))
    target = dtype if dtype is not None else "int64" if integers and not requires_grad else "float64"
    return _made("arange", np.arange(low, high, step), target, requires_grad)


def linspace(
    start: float,
    stop: float,
    /,
    num: int,
    *,
    dtype: Any = None,
    endpoint: bool = True,
    requires_grad: bool = False,
) -> Tensor:
    """`num` evenly spaced numbers from `start` to `stop`, which is left out unless `endpoint`."""
    if not isinstance(num, int) or num < 0:
        raise ArgumentError(f"`linspace` needs a count of numbers that is not negative; found {num!r}")
    array = np.linspace(start, stop, num, endpoint=endpoint, dtype=_dtype("linspace", dtype))
    return _made("linspace", array, dtype, requires_grad)


def eye(
    n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = None, requires_grad: bool = False
) -> Tensor:
    """A matrix with ones on the diagonal `k` (0 is the main one) and zeros elsewhere."""
    rows, columns = as_shape("eye", (n_rows, n_rows if n_cols is None else n_cols))
    return _made("eye", np.eye(rows, columns, k), dtype, requires_grad)


def _like(op: str, x: Any, value: Any, dtype: Any, requires_grad: bool) -> Tensor:
    if not isinstance(x, Tensor):
        x = asarray(x)
    return _made(
        op,
        np.full(x.shape, value, x.dtype if dtype is None else as_dtype(op, dtype)),
        dtype or x.dtype,
        requires_grad,
    )


def zeros_like(x: Any, /, *, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Zeros of the shape and, unless given, the dtype of x."""
    return _like("zeros_like", x, 0, dtype, requires_grad)


def ones_like(x: Any, /, *, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Ones of the shape and, unless given, the dtype of x."""
    return _like("ones_like", x, 1, dtype, requires_grad)


def full_like(x: Any, /, fill_value: float, *, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """`fill_value` in the shape and, unless given, the dtype of x."""
    return _like("full_like", x, fill_value, dtype, requires_grad)
