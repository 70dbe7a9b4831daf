"""Runs a reduction: one kernel for any axes, of any strides, in a form that the kernel can walk."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from sweepgrad.dtypes import Array, DType
from sweepgrad.kernels import emit
from sweepgrad.kernels.cpu import Kernel, compile_kernel
from sweepgrad.kernels.expr import Expr, Scalar, symbol
from sweepgrad.ops.loop import LARGE

_element, _left, _right, _count = (symbol(name) for name in "xabn")


def lowest(dtype: str) -> Scalar:
    """What is not greater than anything in `dtype`."""
    return -math.inf if dtype.startswith("float") else int(np.iinfo(dtype).min)


def highest(dtype: str) -> Scalar:
    """What is not less than anything in `dtype`."""
    return math.inf if dtype.startswith("float") else int(np.iinfo(dtype).max)


class Reducer:
    """The kernel of one reduction: how it maps an element, combines two partial results and finishes."""

    def __init__(
        self,
        name: str,
        *,
        identity: Scalar | Callable[[str], Scalar],
        combine: Callable[[Any, Any], Any],
        mapped: Callable[[Any], Any] = lambda x: x,
        finish: Callable[[Any, Any], Any] = lambda total, count: total,
    ) -> None:
        """The functions are of symbolic scalars, as in a row; `identity` may depend on the dtype."""
        self.name = name
        self.identity = identity
        self.combine: Expr = combine(_left, _right)
        self.mapped: Expr = mapped(_element)
        self.finish: Expr = finish(_left, _count)
        self._kernels: dict[tuple[DType, DType, bool], Kernel] = {}

    def __call__(self, x: Array, axes: tuple[int, ...], keepdims: bool, dtype: DType | None = None) -> Array:
        """`x` reduced over `axes`; `dtype` is the result's, by default x's."""
        shape = x.shape
        result = x.dtype if dtype is None else dtype
        if len(axes) == len(shape):
            out = np.empty(1, result)
            flat = np.ascontiguousarray(x).reshape(-1)
            self.kernel(x.dtype, result, nogil=flat.size >= LARGE)(flat, 1, flat.size, 1, out)
            return out.reshape((1,) * len(shape) if keepdims else ())
        kept = tuple(k for k in range(len(shape)) if k not in axes)
        outer, inner = _groups(axes, len(shape))
        if outer is None:  # the axes are not neighbours: bring them to the end
            x = np.transpose(x, kept + axes)
            outer, inner = kept, ()
        lengths = [math.prod([shape[k] for k in group]) for group in (outer, axes, inner)]
        out = np.empty(lengths[0] * lengths[2], result)
        if out.size:
            flat = np.ascontiguousarray(x).reshape(-1)
            self.kernel(x.dtype, result, nogil=flat.size >= LARGE)(flat, *lengths, out)
        return out.reshape([1 if k in axes else m for k, m in enumerate(shape) if keepdims or k not in axes])

    def kernel(self, dtype: DType, result: DType, *, nogil: bool) -> Kernel:
        """The compiled kernel from `dtype` to `result`."""
        key = (dtype, result, nogil)
        found = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = self._compile(dtype.name, result.name, nogil)
        return found

    def _compile(self, dtype: str, result: str, nogil: bool) -> Kernel:
        accumulator = "float64" if result == "float32" else result
        identity = self.identity(dtype) if callable(self.identity) else self.identity
        head = emit.header(self.name, dtype, accumulator)
        source = head + emit.reduction(self.mapped, identity, self.combine, self.finish)
        return compile_kernel(source, [f"{dtype}:1C", "int64", "int64", "int64", f"{result}:1C"], nogil=nogil)


def _groups(axes: tuple[int, ...], ndim: int) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """The axes before and after `axes` if those are neighbours in ascending order; (None, ()) if not."""
    if not axes:
        return tuple(range(ndim)), ()
    low, high = min(axes), max(axes)
    if tuple(sorted(axes)) != tuple(range(low, high + 1)):
        return None, ()
    return tuple(range(low)), tuple(range(high + 1, ndim))
