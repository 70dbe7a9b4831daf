"""Changes of shape and dtype, and joining: structural operations, mostly views."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from sweepgrad.arrays import moved, resolved
from sweepgrad.dtypes import Array, DType, as_dtype
from sweepgrad.errors import ArgumentError, DTypeError, ShapeError
from sweepgrad.ops.plan import unbroadcast
from sweepgrad.ops.structural import Call, argument, composed, normal_axes, normal_axis, run, structural
from sweepgrad.tensor import Tensor


def as_integer(op: str, name: str, value: Any) -> int:
    """`value` of the parameter `name`, an integer of Python or NumPy, as an int; a bool is none."""
    if not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise DTypeError(f"`{op}` takes integers as `{name}`; found {type(value).__name__} {value!r}")


def as_number(op: str, name: str, value: Any) -> Any:
    """`value` of the parameter `name`, a real number of Python or NumPy other than a bool, as it is or as a float."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise DTypeError(f"`{op}` takes a number as `{name}`; found {type(value).__name__}: pass an int or a float")
    try:
        number = float(value)
    except OverflowError:
        raise ArgumentError(f"`{op}` got a `{name}` that float64 cannot hold: pass a smaller number") from None
    return value if isinstance(value, (int, np.number)) else number


def as_shape(op: str, shape: Any) -> tuple[int, ...]:
    """`shape`, an int or a sequence of ints that are not negative, as a tuple."""
    if type(shape) is tuple and all([type(n) is int and n >= 0 for n in shape]):  # noqa: C419  # a generator takes longer
        return shape
    values = shape if isinstance(shape, (tuple, list)) else (shape,)
    found = tuple(as_integer(op, "shape", value) for value in values)
    if any(n < 0 for n in found):
        raise ShapeError(f"`{op}` needs a shape without negative lengths; found {found}")
    return found


def _astype(x: Array, dtype: DType) -> Array:
    if x.dtype.kind == "f" == dtype.kind and dtype.itemsize < x.dtype.itemsize:
        return _narrowed(x, dtype)
    return x.astype(dtype)


@np.errstate(over="ignore", under="ignore")  # as the kernels, which do not warn of infinities either; it takes 2 us
def _narrowed(x: Array, dtype: DType) -> Array:
    return x.astype(dtype)


@structural(
    forward=_astype,
    vjp=lambda ct, call: [astype(ct, call.inputs[0].dtype)],
    like="x.astype(dtype)",
    cases=[([(2, 3)], {"dtype": "float64"})],
)
def astype(x: Any, /, dtype: Any, *, copy: bool = True) -> Tensor:
    """x converted to `dtype`; differentiable between float dtypes. Nothing is copied if `dtype` is x's and not `copy`.

    Raises:
        TypeError: for a dtype that tensors cannot have.
    """
    x = argument("astype", x)
    target = as_dtype("astype", dtype)
    return x if target is x._dtype and not copy else run("astype", [x], dtype=target)


@structural(
    forward=lambda x, device, source: moved(x, device),
    vjp=lambda ct, call: [to_device(ct, call.params["source"])],
    like="x",
    cases=[([(2, 3)], {"device": "cpu"})],
)
def to_device(x: Any, /, device: str, *, stream: None = None) -> Tensor:
    """x on `device`, `"cpu"`, `"cuda"` or `"cuda:0"` and so on; x itself if it is there. Differentiable.

    Args:
        x: tensor of any shape and dtype.
        device: where the result is to be; `"cuda"` is the current GPU.
        stream: None: the copy is part of the current stream.

    Raises:
        ValueError: for an unknown device.
        RuntimeError: if there is no such device (`DeviceError`).
        ImportError: if there is no package for devices (`MissingDependencyError`).
    """
    x = argument("to_device", x)
    if stream is not None:
        raise ArgumentError("`to_device` takes no stream: make yours the current one, and the copy is part of it")
    target = resolved("to_device", device)
    return x if target == x.device else run("to_device", [x], device=target, source=x.device)


@structural(
    forward=lambda x, shape: x.reshape(shape),
    vjp=lambda ct, call: [reshape(ct, call.inputs[0].shape)],
    like="np.reshape(x, shape)",
    cases=[([(2, 3)], {"shape": (3, 2)}), ([(4,)], {"shape": (2, -1)}), ([(1, 1)], {"shape": ()})],
)
def reshape(x: Any, /, shape: Any, *, copy: bool | None = None) -> Tensor:
    """The elements of x, in C order, in another shape of the same size; one length may be -1, meaning what is left.

    Args:
        x: tensor of any shape.
        shape: the new shape.
        copy: False raises ValueError where a copy would be needed; tensors are immutable, so True changes nothing.

    Raises:
        ValueError: if the sizes differ.
    """
    x = argument("reshape", x)
    values = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if values.count(-1) == 1:
        known = -math.prod(values)
        values = tuple(x.size // known if n == -1 and known > 0 else n for n in values)
    values = as_shape("reshape", values)
    if math.prod(values) != x.size:
        raise ShapeError(f"`reshape` cannot give shape {shape} to {x.size} elements of shape {x._shape}")
    if copy is False and x._flat is None:
        raise ArgumentError("`reshape` with copy=False needs a contiguous tensor; found a strided view: leave it out")
    return run("reshape", [x], shape=values)


@structural(
    forward=lambda x, axes: x.transpose(axes),
    vjp=lambda ct, call: [permute_dims(ct, tuple(np.argsort(call.params["axes"]).tolist()))],
    like="np.transpose(x, axes)",
    cases=[([(2, 3, 4)], {"axes": (2, 0, 1)}), ([(2, 3)], {"axes": (1, 0)})],
)
def permute_dims(x: Any, /, axes: Sequence[int]) -> Tensor:
    """x with its axes in the order `axes`; a view.

    Raises:
        ValueError: if `axes` does not name each axis once.
    """
    x = argument("permute_dims", x)
    order = normal_axes("permute_dims", tuple(axes) if isinstance(axes, Sequence) else axes, x.ndim)
    if len(order) != x.ndim:
        raise ShapeError(f"`permute_dims` needs each of {x.ndim} axes once; found {axes}")
    return run("permute_dims", [x], axes=order)


@composed(like="np.swapaxes(x, -1, -2)", cases=[([(2, 3)], {}), ([(2, 3, 4)], {})])
def matrix_transpose(x: Any, /) -> Tensor:
    """x with its last two axes exchanged; a view.

    Raises:
        ValueError: if x has fewer than two dimensions.
    """
    x = argument("matrix_transpose", x)
    if x.ndim < 2:
        raise ShapeError(f"`matrix_transpose` needs at least 2 dimensions; found shape {x._shape}")
    return permute_dims(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


@composed(
    like="np.moveaxis(x, source, destination)",
    cases=[
        ([(2, 3, 4)], {"source": 0, "destination": -1}),
        ([(2, 3, 4)], {"source": (0, 1), "destination": (2, 0)}),
    ],
)
def moveaxis(x: Any, /, source: int | tuple[int, ...], destination: int | tuple[int, ...]) -> Tensor:
    """x with the axes `source` moved to the positions `destination`; the others keep their order."""
    x = argument("moveaxis", x)
    old = normal_axes("moveaxis", source, x.ndim)
    new = normal_axes("moveaxis", destination, x.ndim)
    if len(old) != len(new):
        raise ShapeError(f"`moveaxis` got {len(old)} source and {len(new)} destination axes; needed is as many of each")
    order = [axis for axis in range(x.ndim) if axis not in old]
    for to, axis in sorted(zip(new, old, strict=True)):
        order.insert(to, axis)
    return permute_dims(x, tuple(order))


@composed(like="np.expand_dims(x, axis)", cases=[([(2, 3)], {"axis": 1}), ([(3,)], {"axis": (0, -1)})])
def expand_dims(x: Any, /, *, axis: int | tuple[int, ...] = 0) -> Tensor:
    """x with axes of length 1 inserted, at the positions `axis` of the result.

    Raises:
        ValueError: if an axis is out of range (also an `IndexError`).
    """
    x = argument("expand_dims", x)
    count = len(axis) if isinstance(axis, (tuple, list)) else 1
    axes = normal_axes("expand_dims", axis, x.ndim + count)
    lengths = iter(x._shape)
    return run("reshape", [x], shape=tuple(1 if k in axes else next(lengths) for k in range(x.ndim + count)))


@composed(like="np.squeeze(x, axis)", cases=[([(1, 3, 1)], {"axis": None}), ([(1, 3, 1)], {"axis": 0})])
def squeeze(x: Any, /, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """x without the axes `axis`, which must have length 1; None means all such axes.

    Raises:
        ValueError: if one of the axes has another length.
    """
    x = argument("squeeze", x)
    if axis is None:
        axes = tuple(k for k, length in enumerate(x._shape) if length == 1)
    else:
        axes = normal_axes("squeeze", axis, x.ndim)
    if any(x._shape[k] != 1 for k in axes):
        raise ShapeError(f"`squeeze` needs axes of length 1; found shape {x._shape}, axis {axis}")
    return run("reshape", [x], shape=tuple(length for k, length in enumerate(x._shape) if k not in axes))


@structural(
    forward=np.broadcast_to,
    vjp=lambda ct, call: [unbroadcast(ct, call.inputs[0].shape)],
    like="np.broadcast_to(x, shape)",
    cases=[([(3,)], {"shape": (2, 3)}), ([(2, 1)], {"shape": (4, 2, 3)}), ([()], {"shape": (2, 2)})],
)
def broadcast_to(x: Any, /, shape: Any) -> Tensor:
    """x repeated along new axes and axes of length 1 until it has `shape`; a view.

    Raises:
        ValueError: if x does not broadcast to `shape`.
    """
    tensor = argument("broadcast_to", x)
    target = as_shape("broadcast_to", shape)
    lead = len(target) - tensor.ndim
    if lead < 0 or any(n not in (1, m) for n, m in zip(tensor.shape, target[lead:], strict=True)):
        raise ShapeError(f"`broadcast_to` cannot broadcast shape {tensor.shape} to {target}")
    return run("broadcast_to", [tensor], shape=target)


def _split(ct: Tensor, call: Call) -> list[Tensor]:
    axis, start, parts = call.params["axis"], 0, []
    for one in call.inputs:
        stop = start + one.shape[axis]
        parts.append(ct[(slice(None),) * axis + (slice(start, stop),)])
        start = stop
    return parts


@structural(
    forward=lambda *xs, axis: np.concatenate(xs, axis=axis),
    vjp=_split,
    like="np.concatenate(xs, axis=axis)",
    cases=[
        ([(2, 3), (1, 3)], {"axis": 0}),
        ([(2, 3), (2, 2), (2, 1)], {"axis": -1}),
        ([(2,), (2, 2)], {"axis": None}),
    ],
    listed=True,
)
def concat(arrays: Sequence[Any], /, *, axis: int | None = 0) -> Tensor:
    """The tensors joined along an existing axis; None joins them flattened. dtypes are promoted.

    Raises:
        ValueError: if there is none, or shapes differ outside `axis`.
    """
    tensors = _alike("concat", arrays)
    if axis is None:
        tensors = [reshape(tensor, (-1,)) for tensor in tensors]
        axis = 0
    first = tensors[0]
    if first.ndim == 0:
        raise ShapeError("`concat` needs at least 1 dimension; found 0-d tensors (use `stack`)")
    k = normal_axis("concat", axis, first.ndim)
    shapes = [tensor._shape for tensor in tensors]
    if any(len(s) != first.ndim or s[:k] + s[k + 1 :] != first._shape[:k] + first._shape[k + 1 :] for s in shapes):
        raise ShapeError(f"`concat` along axis {k} needs equal lengths on the other axes; found shapes {shapes}")
    return run("concat", tensors, axis=k)


@composed(
    like="np.stack(xs, axis=axis)",
    cases=[([(2, 3), (2, 3)], {"axis": 0}), ([(2,), (2,), (2,)], {"axis": -1})],
    listed=True,
)
def stack(arrays: Sequence[Any], /, *, axis: int = 0) -> Tensor:
    """The tensors, of equal shape, joined along a new axis at position `axis` of the result. dtypes are promoted.

    Raises:
        ValueError: if there is none, or shapes differ.
    """
    tensors = _alike("stack", arrays)
    shapes = [tensor._shape for tensor in tensors]
    if len(set(shapes)) != 1:
        raise ShapeError(f"`stack` needs equal shapes; found {shapes}")
    k = normal_axis("stack", axis, len(shapes[0]) + 1)
    return concat([expand_dims(tensor, axis=k) for tensor in tensors], axis=k)


def _alike(op: str, arrays: Any) -> list[Tensor]:
    """The arguments of a joining operation, at least one, in their common dtype."""
    if isinstance(arrays, Tensor) or not isinstance(arrays, (tuple, list)):
        raise DTypeError(f"`{op}` needs a list or tuple of tensors; found {type(arrays).__name__}")
    if not arrays:
        raise ArgumentError(f"`{op}` needs at least one tensor; found none")
    tensors = [argument(op, one) for one in arrays]
    dtype = as_dtype(op, np.result_type(*(tensor._dtype for tensor in tensors)))
    return [tensor if tensor._dtype is dtype else astype(tensor, dtype) for tensor in tensors]


@structural(
    forward=np.flip,
    vjp=lambda ct, call: [flip(ct, **call.params)],
    like="np.flip(x, axis)",
    cases=[([(2, 3)], {"axis": None}), ([(2, 3)], {"axis": -1}), ([(2, 3, 2)], {"axis": (0, 2)})],
)
def flip(x: Any, /, *, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """x with the order of elements reversed along `axis` (None: along every axis); a view."""
    x = argument("flip", x)
    return run("flip", [x], axis=normal_axes("flip", axis, x.ndim))


@structural(
    forward=np.roll,
    vjp=lambda ct, call: [roll(ct, tuple(-n for n in call.params["shift"]), axis=call.params["axis"])],
    like="np.roll(x, shift, axis)",
    cases=[
        ([(5,)], {"shift": 2, "axis": 0}),
        ([(2, 3)], {"shift": -1, "axis": None}),
        ([(2, 3)], {"shift": (1, 2), "axis": (0, 1)}),
    ],
)
def roll(x: Any, /, shift: int | tuple[int, ...], *, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """x with its elements shifted along `axis`, those pushed out coming in again; None rolls it flattened."""
    x = argument("roll", x)
    if axis is None:
        return reshape(roll(reshape(x, (x.size,)), shift, axis=0), x._shape)
    axes = normal_axes("roll", axis, x.ndim)
    given = shift if isinstance(shift, (tuple, list)) else (shift,) * len(axes)
    shifts = tuple(as_integer("roll", "shift", n) for n in given)
    if len(shifts) != len(axes):
        raise ShapeError(f"`roll` got {len(shifts)} shifts for {len(axes)} axes; needed is one for each")
    return run("roll", [x], shift=shifts, axis=axes) if axes else x  # NumPy refuses to roll along none
