"""Runs a reduction over any axes of data with any strides, as loop nests over three axes at most."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from sweepgrad.arrays import contiguous, is_on_device
from sweepgrad.dtypes import CANONICAL, DTYPES, Array, DType
from sweepgrad.kernels.expr import reduce, symbol
from sweepgrad.kernels.scalars import REDUCTIONS
from sweepgrad.ops.loop import Loop
from sweepgrad.tensor import Tensor, make

_FEW, _LONG = 512, 1 << 14
"""On a GPU, rows that are so few and so long have many blocks each; else a block has rows of its own."""


@dataclass(frozen=True, slots=True)
class _Way:
    """How arrays of one shape, strides and dtype are reduced over some axes."""

    order: list[int] | None
    """The axes in the order in which they lie in memory, so that a transposed array is not copied; None for C order."""
    steps: list[tuple[Loop, int, int, int]]
    """Loops, and the elements, rows and groups of each."""
    count: int | None
    """By what the last step's sum is divided, for a mean that takes several."""
    remaining: list[int]
    """Lengths of the axes that are left, in that order."""
    back: list[int] | None
    """Their positions in the result; None if they are in order."""
    kept: tuple[int, ...]


class Reducer:
    """The loops of one kind of reduction (`kernels.scalars.REDUCTIONS`)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._loops: dict[tuple[str, DType, DType], Loop] = {}
        # Found once for each form of argument: on small arrays this takes five times as long as the reduction itself.
        self._way = functools.lru_cache(maxsize=1024)(self._find_way)

    def __call__(self, x: Array, axes: tuple[int, ...], keepdims: bool, dtype: DType | None = None) -> Tensor:
        """`x` reduced over `axes`; `dtype` is the result's, by default x's."""
        result = CANONICAL[x.dtype if dtype is None else dtype]
        way = self._way(x.shape, x.strides, axes, keepdims, x.dtype, result, is_on_device(x))
        flat = contiguous(x if way.order is None else x.transpose(way.order))
        for loop, n, rows, groups in way.steps:
            (flat,) = loop.over([flat], n, rows=rows, groups=groups)
        if way.count is not None:
            flat = _divided(flat, way.count).astype(result)
        if way.back is not None:
            flat = contiguous(flat.reshape(way.remaining).transpose(way.back))
        return make(flat, None, way.kept, result, None)

    def _find_way(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        axes: tuple[int, ...],
        keepdims: bool,
        dtype: DType,
        result: DType,
        on_device: bool,
    ) -> _Way:
        kept = tuple([1 if k in axes else length for k, length in enumerate(shape) if keepdims or k not in axes])
        order = sorted(range(len(shape)), key=lambda k: -abs(strides[k]) if shape[k] != 1 else 0)
        lengths, reduced = [shape[k] for k in order], [k in axes for k in order]
        steps, count = self._steps(lengths, reduced, dtype, result, on_device)
        remaining = [k for k in order if k not in axes]
        back = None if remaining == sorted(remaining) else np.argsort(remaining).tolist()
        plain = order == sorted(order)
        return _Way(None if plain else order, steps, count, [shape[k] for k in remaining], back, kept)

    def _steps(
        self, lengths: list[int], reduced: list[bool], dtype: DType, result: DType, on_device: bool
    ) -> tuple[list[tuple[Loop, int, int, int]], int | None]:
        """From the last group of neighbouring axes that are reduced to the first; and by what to divide at the end."""
        groups = _groups(lengths, reduced)
        left = sum(gone for _, gone in groups)
        kind = "sum" if self.kind == "mean" and left > 1 else self.kind
        if not left:
            groups, left = [*groups, (1, True)], 1
        inner = 1
        widened = REDUCTIONS[kind].accumulator == "A" and dtype == np.float32
        wide = DTYPES["float64"] if widened else result  # between two steps
        steps = []
        while groups:
            length, gone = groups.pop()
            if not gone:
                inner *= length
                continue
            left -= 1
            to = result if not left and kind == self.kind else wide
            outer = math.prod(length for length, _ in groups)
            apart = outer == 1 or (on_device and outer < _FEW and length >= _LONG)
            over = "I" if inner != 1 else "IJ" if apart else "J"
            sizes = {"IJ": (length, 1, outer), "J": (length, outer, 1), "I": (inner, length, outer)}[over]
            steps.append((self._loop(kind, over, dtype, to), *sizes))
            dtype = to
        if kind == self.kind:
            return steps, None
        return steps, math.prod(length for length, gone in zip(lengths, reduced, strict=True) if gone)

    def _loop(self, kind: str, over: str, dtype: DType, result: DType) -> Loop:
        key = (kind + over, dtype, result)
        found = self._loops.get(key)
        if found is None:
            expr = reduce(kind, symbol("x"), over)
            slot = {"IJ": "s", "J": "c", "I": "r"}[over]
            found = self._loops[key] = Loop(
                [expr], [("x", "v", dtype.name)], _computed(dtype, result), [(slot, result.name)]
            )
        return found


@np.errstate(all="ignore")  # as the kernels, which do not warn of a mean of nothing either
def _divided(total: Array, count: int) -> Array:
    return total / count


def _computed(dtype: DType, result: DType) -> str:
    """The dtype of the loop: the elements', unless what comes out is a wider float, for a further step."""
    return result.name if dtype == np.float32 and result == np.float64 else dtype.name


def _groups(lengths: list[int], reduced: list[bool]) -> list[tuple[int, bool]]:
    """Neighbouring axes that are all reduced, or all kept, as one; axes of length 1 are left out."""
    groups: list[tuple[int, bool]] = []
    for length, gone in zip(lengths, reduced, strict=True):
        if length == 1:
            continue
        if groups and groups[-1][1] is gone:
            groups[-1] = (groups[-1][0] * length, gone)
        else:
            groups.append((length, gone))
    return groups
