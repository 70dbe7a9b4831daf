"""Products of matrices and vectors, through NumPy's BLAS, with their rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sweepgrad.arrays import is_on_device
from sweepgrad.dtypes import Array, as_dtype
from sweepgrad.errors import AxisError, DTypeError, ShapeError
from sweepgrad.ops.plan import broadcast_shape, unbroadcast
from sweepgrad.ops.reductions import sum as sum_
from sweepgrad.ops.shape import astype, expand_dims, permute_dims, reshape
from sweepgrad.ops.structural import Call, argument, composed, normal_axes, normal_axis, run, structural
from sweepgrad.tensor import Tensor


def _pair(op: str, x1: Any, x2: Any) -> tuple[Tensor, Tensor]:
    """Both arguments as tensors of their common dtype."""
    a, b = argument(op, x1), argument(op, x2)
    dtype = a._dtype if a._dtype is b._dtype else as_dtype(op, np.result_type(a._dtype, b._dtype))
    if dtype.kind == "b":
        raise DTypeError(f"`{op}` takes numbers; found bool and bool")
    return (a if a._dtype is dtype else astype(a, dtype)), (b if b._dtype is dtype else astype(b, dtype))


def _matmul_vjp(ct: Tensor, call: Call) -> list[Tensor | None]:
    """For y = a b: ct bT and aT ct, where vectors are seen as matrices of one row or one column."""
    a, b = call.inputs
    wide = ct
    if a.ndim == 1:
        wide = expand_dims(wide, axis=-2 if b.ndim > 1 else -1)
    if b.ndim == 1:
        wide = expand_dims(wide, axis=-1)
    by_a = by_b = None
    if 0 in call.needed:
        right = _turned(b if b.ndim > 1 else expand_dims(b, axis=-1))
        by_a = _shaped(run("matmul", [wide, right]), a)
    if 1 in call.needed:
        left = _turned(a if a.ndim > 1 else expand_dims(a, axis=0))
        by_b = _shaped(run("matmul", [left, wide]), b)
    return [by_a, by_b]


def _turned(x: Tensor) -> Tensor:
    """`matrix_transpose` of what is known to be a matrix or several; checking it again takes 2 us."""
    n = len(x._shape)
    return run("permute_dims", [x], axes=(1, 0) if n == 2 else (*range(n - 2), n - 1, n - 2))


def _shaped(ct: Tensor, like: Any) -> Tensor:
    """A matrix cotangent as one of `like`, a stack of matrices or a vector."""
    if like.ndim > 1:
        return unbroadcast(ct, like.shape)
    return reshape(unbroadcast(ct, ct.shape[-2:]), like.shape)


@np.errstate(all="ignore")  # as the kernels, which do not warn of infinities either
def _matmul(x1: Array, x2: Array) -> Array:
    if is_on_device(x1):
        return x1 @ x2
    # `dot` is 0.5 us faster where they are the same: it takes a matrix of one element for a number, and whatever is
    # scaled by the number 0 for 0, infinity and NaN, too.
    same = x1.ndim <= 2 and x2.ndim <= 2 and x1.size != 1 != x2.size
    return np.asarray((np.dot if same else np.matmul)(x1, x2))


@structural(
    forward=_matmul,
    vjp=_matmul_vjp,
    like="np.matmul(x1, x2)",
    cases=[
        ([(2, 3), (3, 4)], {}),
        ([(3,), (3,)], {}),
        ([(3,), (3, 2)], {}),
        ([(2, 3), (3,)], {}),
        ([(2, 2, 3), (3, 2)], {}),
        ([(3,), (2, 3, 2)], {}),
        ([(2, 2, 3), (3,)], {}),
        ([(2, 1, 2, 3), (4, 3, 2)], {}),
    ],
    saves=(0, 1),
)
def matmul(x1: Any, x2: Any, /) -> Tensor:
    """Matrix product. 1-d arguments are vectors; axes before the last two are stacks of matrices and broadcast.

    Raises:
        ValueError: if the inner lengths differ, or an argument has 0 dimensions.
    """
    a, b = _pair("matmul", x1, x2)
    if a.ndim == 0 or b.ndim == 0:
        raise ShapeError(f"`matmul` needs at least 1 dimension each; found shapes {a._shape} and {b._shape}: use `*`")
    if a._shape[-1] != b._shape[-2 if b.ndim > 1 else 0]:
        raise ShapeError(
            f"`matmul` needs the last axis of x1 as long as the {'second to last' if b.ndim > 1 else 'only'} axis of "
            f"x2; found shapes {a._shape} and {b._shape}"
        )
    if a.ndim > 2 or b.ndim > 2:
        broadcast_shape("matmul", [a._shape[:-2], b._shape[:-2]])
    return run("matmul", [a, b])


@composed(
    like="np.tensordot(x1, x2, axes)",
    cases=[
        ([(2, 3, 4), (3, 4, 2)], {"axes": 2}),
        ([(2, 3), (2,)], {"axes": 0}),
        ([(2, 3, 4), (4, 2)], {"axes": ((0, 2), (1, 0))}),
    ],
)
def tensordot(x1: Any, x2: Any, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Tensor:
    """Products summed over several axes: the last `axes` of x1 with the first of x2, or the two lists of axes given.

    Raises:
        ValueError: if the axes' lengths differ.
    """
    a, b = _pair("tensordot", x1, x2)
    if isinstance(axes, (tuple, list)):
        first, second = (normal_axes("tensordot", tuple(one), t.ndim) for one, t in zip(axes, (a, b), strict=True))
    else:
        count = axes
        if not 0 <= count <= min(a.ndim, b.ndim):
            raise AxisError(f"`tensordot` got axes={axes} for shapes {a._shape} and {b._shape}")
        first, second = tuple(range(a.ndim - count, a.ndim)), tuple(range(count))
    lengths = [a._shape[k] for k in first]
    if lengths != [b._shape[k] for k in second]:
        raise ShapeError(f"`tensordot` needs equal lengths; found shapes {a._shape} and {b._shape}, axes {axes}")
    free_a = tuple(k for k in range(a.ndim) if k not in first)
    free_b = tuple(k for k in range(b.ndim) if k not in second)
    shape_a, shape_b = tuple(a._shape[k] for k in free_a), tuple(b._shape[k] for k in free_b)
    inner = math.prod(lengths)
    left = reshape(permute_dims(a, free_a + first), (math.prod(shape_a), inner))
    right = reshape(permute_dims(b, second + free_b), (inner, math.prod(shape_b)))
    return reshape(matmul(left, right), shape_a + shape_b)


@composed(
    like="np.sum(np.moveaxis(x1 + 0 * x2, axis, -1) * np.moveaxis(x2 + 0 * x1, axis, -1), -1)",
    cases=[
        ([(2, 3), (2, 3)], {"axis": -1}),
        ([(2, 3), (1, 3)], {"axis": -1}),
        ([(3, 2), (3, 2)], {"axis": -2}),
    ],
)
def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Tensor:
    """Dot products of the vectors along `axis`, a negative number where the dimensions differ; other axes broadcast.

    Raises:
        ValueError: if the vectors' lengths differ, or `axis` could mean another one in each (also an `IndexError`).
    """
    a, b = _pair("vecdot", x1, x2)
    if a.ndim == 0 or b.ndim == 0:
        raise ShapeError(f"`vecdot` needs at least 1 dimension each; found shapes {a._shape} and {b._shape}")
    k, m = normal_axis("vecdot", axis, a.ndim), normal_axis("vecdot", axis, b.ndim)
    if k - a.ndim != m - b.ndim:
        raise AxisError(
            f"`vecdot` got axis {axis} for shapes {a._shape} and {b._shape}, which broadcast from the last axis: "
            "give it as a negative number"
        )
    if a._shape[k] != b._shape[m]:
        raise ShapeError(f"`vecdot` needs vectors of one length; found shapes {a._shape} and {b._shape}, axis {axis}")
    return sum_(a * b, axis=k - a.ndim)
