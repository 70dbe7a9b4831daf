"""Runs a reduction: one kernel for any axes, of any strides, in a form that the kernel can walk."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from sweepgrad.kernels import emit
from sweepgrad.kernels.cpu import compile_kernel
from sweepgrad.kernels.expr import Expr, Scalar, symbol
from sweepgrad.ops.plan import LARGE
from sweepgrad.tensor import DTYPES, Array, DType

ELEMENT, LEFT, RIGHT, COUNT = (symbol(name) for name in "xabn")
"""What a reduction's expressions read: an element, two partial results, the number of elements."""


class Reducer:
    """The kernel of one reduction: how it maps an element, combines two partial results and finishes."""

    def __init__(
        self,
        name: str,
        *,
        identity: Scalar | None,
        combine: Expr,
        mapped: Expr = ELEMENT,
        finish: Expr = LEFT,
    ) -> None:
        """`identity` None means the extreme value of the dtype: -inf or the least integer for a maximum."""
        self.name = name
        self.identity = identity
        self.combine = combine
        self.mapped = mapped
        self.finish = finish

    def __call__(self, x: Array, axes: tuple[int, ...], keepdims: bool, dtype: DType | None = None) -> Array:
        """`x` reduced over `axes`; `dtype` is the result's, by default x's."""
        kept = tuple(k for k in range(x.ndim) if k not in axes)
        outer, inner = _groups(axes, x.ndim)
        if outer is None:  # the axes are not neighbours: bring them to the end
            x_moved = np.transpose(x, kept + axes)
            outer, inner = kept, ()
        else:
            x_moved = x
        n = math.prod(x.shape[k] for k in axes)
        result = x.dtype if dtype is None else dtype
        out = np.empty(math.prod(x.shape[k] for k in kept), result)
        flat = np.ascontiguousarray(x_moved).reshape(-1)
        if out.size:
            kernel = self.kernel(x.dtype.name, result.name, nogil=flat.size >= LARGE)
            kernel(flat, math.prod(x.shape[k] for k in outer), n, math.prod(x.shape[k] for k in inner), out)
        return out.reshape([1 if k in axes else m for k, m in enumerate(x.shape) if keepdims or k not in axes])

    @functools.cache  # noqa: B019  # the reducers live as long as the module
    def kernel(self, dtype: str, result: str, *, nogil: bool) -> Callable[..., None]:
        """The compiled kernel from `dtype` to `result`."""
        accumulator = "float64" if result == "float32" else result
        identity = self.identity
        if identity is None:
            kind = DTYPES[dtype].kind
            least = self.name == "max"
            bound = np.iinfo(dtype) if kind in "iu" else None
            identity = (bound.min if least else bound.max) if bound else (-math.inf if least else math.inf)
        source = emit.header(self.name, dtype, accumulator) + emit.reduction(
            self.mapped, identity, self.combine, self.finish
        )
        return compile_kernel(source, [f"{dtype}:1C", "int64", "int64", "int64", f"{result}:1C"], nogil=nogil)


def _groups(axes: tuple[int, ...], ndim: int) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """The axes before and after `axes` if those are neighbours in ascending order; (None, ()) if not."""
    if not axes:
        return tuple(range(ndim)), ()
    low, high = min(axes), max(axes)
    if tuple(sorted(axes)) != tuple(range(low, high + 1)):
        return None, ()
    return tuple(range(low)), tuple(range(high + 1, ndim))
