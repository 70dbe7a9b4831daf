"""Reductions. How each goes over elements stands in `kernels.scalars`; here are the rules.

Every public function takes `axis` (None for all, an int, or a tuple) and `keepdims`. Integers are summed and multiplied
in int64 or uint64; float32 is accumulated in float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sweepgrad.arrays import empty, filled, is_on_device
from sweepgrad.dtypes import CANONICAL, DTYPES, Array, DType, as_dtype
from sweepgrad.elements import dense
from sweepgrad.errors import DTypeError, ShapeError
from sweepgrad.fusion import Fused, fuse, in_float64
from sweepgrad.ops.elementwise import (
    equal,
    exp,
    isfinite,
    log,
    reciprocal,
    sqrt,
    square,
    where,
)
from sweepgrad.ops.reducer import Reducer
from sweepgrad.ops.shape import astype, concat, permute_dims, reshape
from sweepgrad.ops.structural import Call, argument, composed, normal_axes, normal_axis, run, structural
from sweepgrad.tensor import Tensor, make, wrap

Axis = int | tuple[int, ...] | None

_INT64, _UINT64, _FLOAT32, _FLOAT64, _BOOL = (
    DTYPES[name] for name in ("int64", "uint64", "float32", "float64", "bool")
)


_sum = Reducer("sum")
_mean = Reducer("mean")
_prod = Reducer("prod")
_all = Reducer("all")
_any = Reducer("any")
_max = Reducer("max")
_min = Reducer("min")


def _repeat(reduced: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Tensor:
    """`reduced` repeated along `axes` to `shape`; its own axes of length 1 there are there or not.

    Written out, since most consumers want contiguous data, and `np.broadcast_to` alone takes 5 us.
    """
    flat = empty(math.prod(shape), CANONICAL[reduced.dtype], reduced)
    if reduced.size == 1 and not is_on_device(reduced):
        flat.fill(reduced.item())
    else:
        flat.reshape(shape)[...] = reduced.reshape([1 if k in axes else n for k, n in enumerate(shape)])
    return make(flat, None, shape, CANONICAL[reduced.dtype], None)


@structural(
    forward=_repeat,
    vjp=lambda ct, call: [reshape(sum(ct, axis=call.params["axes"]), call.inputs[0].shape)],
    like="np.broadcast_to(np.expand_dims(x, axes), shape)",
    cases=[([(3,)], {"shape": (2, 3, 4), "axes": (0, 2)}), ([()], {"shape": (2, 3), "axes": (0, 1)})],
)
def expand(x: Any, /, shape: tuple[int, ...], axes: tuple[int, ...]) -> Tensor:
    """x, the result of a reduction over `axes`, repeated along them to `shape`: the transpose of a sum."""
    return run("expand", [argument("expand", x)], shape=shape, axes=axes)


def _expanded(reduced: Tensor, call: Call) -> Tensor:
    """A reduced tensor with the reduced axes as axes of length 1 again."""
    shape = call.inputs[0].shape
    return reshape(reduced, tuple(1 if k in call.params["axes"] else n for k, n in enumerate(shape)))


def _full(reduced: Tensor, call: Call) -> Tensor:
    """A reduced tensor repeated to the shape from which it was reduced."""
    return run("expand", [reduced], shape=call.inputs[0].shape, axes=call.params["axes"])


def _accumulated(op: str, x: Tensor, dtype: Any) -> DType:
    """The dtype of a sum or product."""
    if dtype is not None:
        return as_dtype(op, dtype)
    return _WIDE.get(x._dtype.kind, x._dtype)


_WIDE = {"b": _INT64, "i": _INT64, "u": _UINT64}


_CASES = [
    ([(2, 3)], {"axis": None, "keepdims": False}),
    ([(2, 3, 4)], {"axis": 1, "keepdims": True}),
    ([(2, 3, 4)], {"axis": (0, 2), "keepdims": False}),
    ([(3, 2)], {"axis": -1, "keepdims": False}),
    ([()], {"axis": None, "keepdims": False}),
]


@structural(
    forward=_sum,
    vjp=lambda ct, call: [_full(ct, call)],
    like="np.sum(x, axis=axis, keepdims=keepdims)",
    cases=_CASES,
)
def sum(x: Any, /, axis: Axis = None, *, dtype: Any = None, keepdims: bool = False) -> Tensor:
    """Sum over `axis`, in float64 for float32, else about as precise as pairwise. The sum of nothing is 0.

    Args:
        x: tensor of any dtype.
        axis: None for all axes, an int, or a tuple.
        dtype: of the result; by default x's, and int64 or uint64 for smaller integers and truth values.
        keepdims: keep the reduced axes with length 1.
    """
    x = argument("sum", x)
    target = _accumulated("sum", x, dtype)
    x = x if x._dtype is target else astype(x, target)
    return run("sum", [x], axes=normal_axes("sum", axis, x.ndim), keepdims=keepdims)


def _mean_vjp(ct: Tensor, call: Call) -> list[Tensor]:
    shape = call.inputs[0].shape
    count = math.prod(shape[k] for k in call.params["axes"])
    return [_full(ct / count, call)]


@structural(forward=_mean, vjp=_mean_vjp, like="np.mean(x, axis=axis, keepdims=keepdims)", cases=_CASES)
def mean(x: Any, /, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """Arithmetic mean over `axis`; of integers and truth values in float64. The mean of nothing is NaN."""
    x = _as_float("mean", x)
    return run("mean", [x], axes=normal_axes("mean", axis, x.ndim), keepdims=keepdims)


def _prod_vjp(ct: Tensor, call: Call) -> list[Tensor]:
    (x,) = call.inputs
    axes = call.params["axes"]
    kept = tuple(k for k in range(x.ndim) if k not in axes)
    moved = permute_dims(x if x.dtype is _FLOAT64 else astype(x, _FLOAT64), kept + axes)  # as the product itself
    lead = tuple(x.shape[k] for k in kept)
    others = _products_of_others(reshape(moved, (*lead, math.prod(x.shape[k] for k in axes))))
    back = np.argsort(kept + axes).tolist()
    others = permute_dims(reshape(others, moved.shape), back)
    return [_expanded(ct, call) * (others if x.dtype is _FLOAT64 else astype(others, x.dtype))]


def _products_of_others(x: Tensor) -> Tensor:
    """For each element along the last axis the product of all others, exact where elements are zero.

    Halves are multiplied pairwise until one is left, and the products handed back down, each times its partner:
    2n multiplications, and only operations that can be differentiated again.
    """
    levels = []
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        levels.append((left, right))
        x = concat([left * right, rest], axis=-1)
    others = wrap(filled(x.size, 1, x.dtype, dense(x)).reshape(x.shape))
    for left, right in reversed(levels):
        half = left.shape[-1]
        pair, rest = others[..., :half], others[..., half:]
        others = concat([pair * right, pair * left, rest], axis=-1)
    return others


@structural(forward=_prod, vjp=_prod_vjp, like="np.prod(x, axis=axis, keepdims=keepdims)", cases=_CASES, saves=(0,))
def prod(x: Any, /, axis: Axis = None, *, dtype: Any = None, keepdims: bool = False) -> Tensor:
    """Product over `axis`, in the dtypes of `sum`; its derivative is exact where elements are 0. 1 for nothing."""
    x = argument("prod", x)
    target = _accumulated("prod", x, dtype)
    x = x if x._dtype is target else astype(x, target)
    return run("prod", [x], axes=normal_axes("prod", axis, x.ndim), keepdims=keepdims)


def _extreme_vjp(ct: Tensor, call: Call) -> list[Tensor]:
    (x,), y = call.inputs, call.output
    # Which elements are extreme does not change under differentiation, so the mask has no place in the graph.
    mask = equal(x.detach(), _expanded(y.detach(), call))
    count = sum(mask, axis=call.params["axes"], keepdims=True)
    return [where(mask, _expanded(ct, call) / astype(count, x.dtype), 0.0)]


def _extreme(name: str, x: Any, axis: Axis, keepdims: bool) -> Tensor:
    x = argument(name, x)
    if x._dtype is _BOOL:
        raise DTypeError(f"`{name}` takes numbers; found bool: use `any` or `all`")
    axes = normal_axes(name, axis, x.ndim)
    if any_length_zero(x, axes):
        raise ShapeError(f"`{name}` of nothing: the reduced axes of shape {x._shape} have length 0")
    return run(name, [x], axes=axes, keepdims=keepdims)


@structural(
    forward=_max,
    vjp=_extreme_vjp,
    like="np.max(x, axis=axis, keepdims=keepdims)",
    cases=_CASES,
    saves=(0,),
    saves_output=True,
)
def max(x: Any, /, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """Greatest element over `axis`, NaN if any is; equal greatest elements share the derivative equally.

    Raises:
        ValueError: if there is nothing to compare.
    """
    return _extreme("max", x, axis, keepdims)


@structural(
    forward=_min,
    vjp=_extreme_vjp,
    like="np.min(x, axis=axis, keepdims=keepdims)",
    cases=_CASES,
    saves=(0,),
    saves_output=True,
)
def min(x: Any, /, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """Least element over `axis`, NaN if any is; equal least elements share the derivative equally.

    Raises:
        ValueError: if there is nothing to compare.
    """
    return _extreme("min", x, axis, keepdims)


def _as_operation(fused: Fused) -> Fused:
    """`fused`, in reports and errors by the name of the operation that it does the work of."""
    fused.__name__ = fused.__name__.removeprefix("_").removesuffix("_from")
    return fused


_SPREAD_CASES = [
    ([(2, 3)], {"axis": None, "correction": 0, "keepdims": False}),
    ([(4, 3)], {"axis": 0, "correction": 1, "keepdims": True}),
    ([(2, 3, 4)], {"axis": (0, 2), "correction": 0.5, "keepdims": False}),
]


@composed(like="np.var(x, axis=axis, ddof=correction, keepdims=keepdims)", cases=_SPREAD_CASES)
def var(x: Any, /, axis: Axis = None, *, correction: float = 0.0, keepdims: bool = False) -> Tensor:
    """Variance over `axis`: the squared distances from the mean, summed and divided by (count - correction).

    The mean is subtracted first, so nothing cancels. NaN where count - correction is not positive.
    """
    x = _as_float("var", x)
    axes = normal_axes("var", axis, x.ndim)
    length = math.prod(x._shape[k] for k in axes)
    count = float(length - correction)
    if count <= 0.0:
        return sum(x, axis=axes, keepdims=keepdims) * 0.0 / 0.0
    if x._dtype is _FLOAT32 and type(x) is Tensor and x.size and _at_an_end(x, axes):
        first: Tensor = x.detach()[tuple(slice(1) if k in axes else slice(None) for k in range(x.ndim))]
        return _var_from(x, first, axes, keepdims=keepdims, length=float(length), count=count)  # type: ignore[no-any-return]
    return _at_once(_var, x, axes, keepdims=keepdims, count=count)


@_as_operation
@fuse
def _var(x: Tensor, axes: tuple[int, ...], *, keepdims: bool, count: float) -> Tensor:
    return sum(square(x - mean(x, axis=axes, keepdims=True)), axis=axes, keepdims=keepdims) / count


@_as_operation
@in_float64
def _var_from(
    x: Tensor, start: Tensor, axes: tuple[int, ...], *, keepdims: bool, length: float, count: float
) -> Tensor:
    """The same in one pass over x, by sums of the distances from one of its elements and of their squares.

    Their difference loses at most as many digits as the number of elements has: in float64, none that float32 has.
    """
    distance = x - start
    total = sum(distance, axis=axes, keepdims=keepdims)
    return (sum(square(distance), axis=axes, keepdims=keepdims) - total * total / length) / count


@composed(like="np.std(x, axis=axis, ddof=correction, keepdims=keepdims)", cases=_SPREAD_CASES)
def std(x: Any, /, axis: Axis = None, *, correction: float = 0.0, keepdims: bool = False) -> Tensor:
    """Standard deviation over `axis`: the square root of `var`; its derivative where all are equal is 0."""
    variance = var(x, axis=axis, correction=correction, keepdims=keepdims)
    constant = equal(variance, 0.0)
    return where(constant, 0.0, sqrt(where(constant, 1.0, variance)))


def _truth(name: str, x: Any, axis: Axis, keepdims: bool) -> Tensor:
    x = argument(name, x)
    return run(name, [x], axes=normal_axes(name, axis, x.ndim), keepdims=keepdims, dtype=_BOOL)


@structural(forward=_all, vjp=None, like="np.all(x > 0, axis=axis, keepdims=keepdims)", cases=_CASES)
def all(x: Any, /, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """Whether every element over `axis` is nonzero; True for nothing."""
    return _truth("all", x, axis, keepdims)


@structural(forward=_any, vjp=None, like="np.any(x > 0, axis=axis, keepdims=keepdims)", cases=_CASES)
def any(x: Any, /, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """Whether at least one element over `axis` is nonzero; False for nothing."""
    return _truth("any", x, axis, keepdims)


_ARG_CASES = [
    ([(2, 3)], {"axis": None, "keepdims": False}),
    ([(2, 3, 4)], {"axis": 1, "keepdims": True}),
    ([(3, 2)], {"axis": -1, "keepdims": False}),
]


def _position(name: str, x: Any, axis: int | None, keepdims: bool) -> Tensor:
    x = argument(name, x)
    chosen = None if axis is None else normal_axis(name, axis, x.ndim)
    if (x.size if chosen is None else x._shape[chosen]) == 0:
        raise ShapeError(f"`{name}` of nothing: shape {x._shape}, axis {axis}")
    return run(name, [x], axis=chosen, keepdims=keepdims)


def _argmax(x: Any, axis: int | None, keepdims: bool) -> Any:
    return np.argmax(x, axis=axis, keepdims=keepdims)


def _argmin(x: Any, axis: int | None, keepdims: bool) -> Any:
    return np.argmin(x, axis=axis, keepdims=keepdims)


@structural(
    forward=_argmax,
    vjp=None,
    like="np.argmax(x, axis=axis, keepdims=keepdims)",
    cases=_ARG_CASES,
)
def argmax(x: Any, /, axis: int | None = None, *, keepdims: bool = False) -> Tensor:
    """Position of the greatest element along `axis`, the first if several are; None counts in the flattened tensor.

    Raises:
        ValueError: if there is nothing to compare.
    """
    return _position("argmax", x, axis, keepdims)


@structural(
    forward=_argmin,
    vjp=None,
    like="np.argmin(x, axis=axis, keepdims=keepdims)",
    cases=_ARG_CASES,
)
def argmin(x: Any, /, axis: int | None = None, *, keepdims: bool = False) -> Tensor:
    """Position of the least element along `axis`, the first if several are; None counts in the flattened tensor.

    Raises:
        ValueError: if there is nothing to compare.
    """
    return _position("argmin", x, axis, keepdims)


@composed(like="special.logsumexp(x, axis=axis, keepdims=keepdims)", cases=_CASES)
def logsumexp(x: Any, /, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """log(sum(exp(x))) over `axis`, without overflow; -inf for nothing."""
    x = _as_float("logsumexp", x)
    axes = normal_axes("logsumexp", axis, x.ndim)
    return _at_once(_logsumexp, x, axes, keepdims=keepdims)


@_as_operation
@fuse
def _logsumexp(x: Tensor, axes: tuple[int, ...], *, keepdims: bool) -> Tensor:
    top = _top(x, axes)
    result = log(sum(exp(x - top), axis=axes, keepdims=True)) + top
    return reshape(result, tuple(1 if k in axes else n for k, n in enumerate(x.shape) if keepdims or k not in axes))


_SOFTMAX_CASES = [([(2, 3)], {"axis": -1}), ([(2, 3, 2)], {"axis": 1}), ([(2, 3)], {"axis": (0, 1)})]


@composed(like="special.softmax(x, axis=axis)", cases=_SOFTMAX_CASES)
def softmax(x: Any, /, axis: Axis = -1) -> Tensor:
    """exp(x) divided by its sum over `axis`, without overflow; of the shape of x."""
    x = _as_float("softmax", x)
    axes = normal_axes("softmax", axis, x.ndim)
    return _at_once(_softmax, x, axes)


@_as_operation
@fuse
def _softmax(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    weights = exp(x - _top(x, axes))
    return weights * reciprocal(sum(weights, axis=axes, keepdims=True))  # one division in a row rather than n


@composed(like="special.log_softmax(x, axis=axis)", cases=_SOFTMAX_CASES)
def log_softmax(x: Any, /, axis: Axis = -1) -> Tensor:
    """log(softmax(x)) over `axis`, precise where the softmax is tiny; of the shape of x."""
    x = _as_float("log_softmax", x)
    axes = normal_axes("log_softmax", axis, x.ndim)
    return _at_once(_log_softmax, x, axes)


@_as_operation
@fuse
def _log_softmax(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    shifted: Tensor = x - _top(x, axes)
    return shifted - log(sum(exp(shifted), axis=axes, keepdims=True))


def _at_once(f: Fused, x: Tensor, axes: tuple[int, ...], **params: Any) -> Tensor:
    """`f` as one kernel where it can be: over the last axes, or the first; else as it is."""
    result: Tensor = (f if _at_an_end(x, axes) else f.plain)(x, axes, **params)
    return result


def _at_an_end(x: Tensor, axes: tuple[int, ...]) -> bool:
    """Whether `axes` are the first of x's, or the last."""
    return sorted(axes) in (list(range(len(axes))), list(range(x.ndim - len(axes), x.ndim)))


def _top(x: Tensor, axes: tuple[int, ...]) -> Tensor | float:
    """The finite part of x's maximum, as a constant: shifting by it changes no result, so no derivative either."""
    if any_length_zero(x, axes):
        return 0.0
    top = max(x.detach(), axis=axes, keepdims=True)
    return where(isfinite(top), top, 0.0)


def any_length_zero(x: Tensor, axes: tuple[int, ...]) -> bool:
    """Whether one of the axes has length 0."""
    return 0 in [x._shape[k] for k in axes]


def _as_float(op: str, x: Any) -> Tensor:
    """`x` as a tensor of a float dtype; integers and truth values become float64."""
    x = argument(op, x)
    return x if x._dtype.kind == "f" else astype(x, _FLOAT64)
