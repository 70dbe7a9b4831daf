"""Reading elements: basic, integer and mask indexing, and `take`. Writing is not possible: tensors are immutable."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from sweepgrad.arrays import add_at, filled, is_on_device
from sweepgrad.dtypes import CANONICAL, Array
from sweepgrad.elements import dense
from sweepgrad.errors import ArgumentError, AxisError, DTypeError, ShapeError
from sweepgrad.ops.structural import Call, argument, normal_axis, run, structural
from sweepgrad.shortage import attempt
from sweepgrad.tensor import Tensor


def _scatter(ct: Array, key: Any, shape: tuple[int, ...], basic: bool) -> Array:
    """Zeros of `shape` with `ct` added at `key`: what reading at `key` is differentiated to."""
    out: Array = filled(math.prod(shape), 0, CANONICAL[ct.dtype], ct).reshape(shape)
    if basic:  # no element is named twice, so plain assignment does, many times faster than `np.add.at`
        out[key] = ct
    else:
        add_at(out, key, ct)
    return out


def _add(total: Array, ct: Array, key: Any, basic: bool) -> None:
    """The same, added to what is there."""
    if basic:
        total[key] += ct
    else:
        add_at(total, key, ct)


def _scatter_vjp(ct: Tensor, call: Call) -> list[Tensor]:
    return [run("getitem", [ct], key=call.params["key"], basic=call.params["basic"])]


def _getitem_vjp(ct: Tensor, call: Call) -> list[Tensor]:
    params = {"key": call.params["key"], "shape": call.inputs[0].shape, "basic": call.params["basic"]}
    return [run("scatter", [ct], **params)]


@structural(
    forward=_scatter,
    vjp=_scatter_vjp,
    like="scatter(x, key, shape)",
    cases=[
        ([(2,)], {"key": (np.array([1, 1]),), "shape": (3,)}),
        ([(2,)], {"key": (slice(2, None, -2),), "shape": (4,)}),
    ],
)
def scatter(x: Any, /, key: Any, shape: tuple[int, ...]) -> Tensor:
    """Zeros of `shape` with the elements of x added at the index `key`: the transpose of reading there."""
    arrays, basic = _normal_key("scatter", key)
    return run("scatter", [argument("scatter", x)], key=arrays, shape=tuple(shape), basic=basic)


def _getitem(x: Array, key: Any, basic: bool) -> Any:
    if not basic and is_on_device(x):
        _check_bounds(x.shape, key)
    return x[key]


def _check_bounds(shape: tuple[int, ...], key: tuple[Any, ...]) -> None:
    """Raise IndexError as NumPy does, where an index in main memory is out of range: a GPU would not say so."""
    if not any(map(is_on_device, key)):
        np.broadcast_to(np.zeros((), np.int8), shape)[key]  # without elements of its own


@structural(
    forward=_getitem,
    vjp=_getitem_vjp,
    onto=_add,
    like="x[key]",
    cases=[
        ([(4, 3)], {"key": (slice(None, None, -2), 1)}),
        ([(4, 3)], {"key": (Ellipsis, None, 0)}),
        ([(4, 3)], {"key": np.array([0, 2, 2])}),
        ([(4, 3)], {"key": (np.array([0, 2, 2]), np.array([1, 1, 1]))}),
        ([(2, 3)], {"key": np.array([[True, False, True], [False, False, True]])}),
        ([(4, 3)], {"key": (np.array([1, -1]), slice(1, 3))}),
    ],
)
def getitem(x: Any, /, key: Any) -> Tensor:
    """The elements at `key`: integers, slices, None, `...`, integer arrays and masks, as in NumPy; written `x[key]`.

    Raises:
        IndexError: if an index is out of range or there are too many.
    """
    x = argument("getitem", x)
    arrays, basic = _normal_key("getitem", key)
    try:
        return run("getitem", [x], key=arrays, basic=basic)
    except IndexError as error:
        raise AxisError(f"`getitem` on shape {x._shape}: {error}") from None


def _normal_key(op: str, key: Any) -> tuple[tuple[Any, ...], bool]:
    """`key` as a tuple that NumPy takes and nobody else can change, and whether it is basic."""
    parts = key if isinstance(key, tuple) else (key,)
    normal: list[Any] = []
    basic = True
    for part in parts:
        if part is None or part is Ellipsis:
            normal.append(part)
        elif isinstance(part, slice):
            ends = (part.start, part.stop, part.step)
            normal.append(slice(*(None if end is None else _integer(op, end) for end in ends)))
            if normal[-1].step == 0:
                raise ArgumentError(f"`{op}` needs a slice with a step other than 0; found {part}")
        elif isinstance(part, (Tensor, np.ndarray, list, bool, np.bool_)):
            if isinstance(part, Tensor) and is_on_device(dense(part)):
                array: Any = dense(part)  # which nobody writes to
            else:
                array = attempt(op, np.asarray, dense(part) if isinstance(part, Tensor) else part)
                array = attempt(op, np.array, array)  # of an object, it takes what its `__array__` gives for a copy
            if array.size == 0 and isinstance(part, list):
                array = array.astype(np.intp)
            if array.dtype.kind not in "iub":
                raise DTypeError(f"`{op}` takes integer and bool arrays as an index; found dtype {array.dtype}")
            normal.append(array)
            basic = False
        else:
            normal.append(_integer(op, part))
    return tuple(normal), basic


def _integer(op: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise DTypeError(
            f"`{op}` takes integers, slices, None, `...` and arrays as an index; found {type(value).__name__}"
        ) from None


def _take(x: Array, indices: Any, axis: int) -> Any:
    if is_on_device(x):
        _check_bounds(x.shape, (slice(None),) * axis + (indices,))
    return np.take(x, indices, axis)


@structural(
    forward=_take,
    vjp=lambda ct, call: [
        run(
            "scatter",
            [ct],
            key=(slice(None),) * call.params["axis"] + (call.params["indices"],),
            shape=call.inputs[0].shape,
            basic=False,
        )
    ],
    onto=lambda total, ct, indices, axis: _add(total, ct, (slice(None),) * axis + (indices,), False),
    like="np.take(x, indices, axis)",
    cases=[
        ([(4, 3)], {"indices": np.array([0, 2, 2]), "axis": 0}),
        ([(4, 3)], {"indices": np.array([1, -1]), "axis": 1}),
    ],
)
def take(x: Any, /, indices: Any, *, axis: int | None = None) -> Tensor:
    """The slices of x at the positions `indices` along `axis`, which may be left out for one dimension.

    Raises:
        IndexError: if an index is out of range.
    """
    x = argument("take", x)
    # An array first: of an object, `np.array` takes what its `__array__` gives for a copy.
    if isinstance(indices, Tensor) and is_on_device(dense(indices)):
        positions: Any = dense(indices)
    else:
        positions = attempt("take", np.asarray, dense(indices) if isinstance(indices, Tensor) else indices)
        positions = attempt("take", np.array, positions)
    if positions.size == 0 and isinstance(indices, (list, tuple)):
        positions = positions.astype(np.intp)  # of no number, NumPy makes floats
    if positions.dtype.kind not in "iu":
        raise DTypeError(f"`take` needs integer indices; found dtype {positions.dtype}")
    if axis is None and x.ndim != 1:
        raise ShapeError(f"`take` needs an axis for shape {x._shape}; only one dimension has a default")
    k = normal_axis("take", 0 if axis is None else axis, x.ndim)
    try:
        return run("take", [x], indices=positions, axis=k)
    except IndexError:
        raise AxisError(
            f"`take` got indices from {positions.min()} to {positions.max()} for an axis of length {x._shape[k]}"
        ) from None
