"""Holds and runs compiled loops: kernels for few and for many elements, and the forms in which they take inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from sweepgrad.dtypes import DTYPES, Array
from sweepgrad.kernels import emit
from sweepgrad.kernels.cpu import Kernel, compile_kernel
from sweepgrad.kernels.expr import Expr
from sweepgrad.tensor import Tensor

LARGE = 1 << 15
"""Elements from which a kernel releases the interpreter's lock: below, handing it over costs more than the loop."""


class Loop:
    """A kernel for one set of expressions, compiled when first needed, once with and once without the lock."""

    __slots__ = ("_held", "_outputs", "_released", "_result", "_signature", "_source", "rows")

    def __init__(
        self,
        title: str,
        outputs: Sequence[Expr],
        inputs: Sequence[tuple[str, str, str]],
        dtype: str,
        result: str,
    ) -> None:
        """`inputs` are (name, kind, dtype); every output has the dtype `result`."""
        kinds = "".join(kind for _, kind, _ in inputs)
        ndim = emit.STRIDED_NDIM
        layouts = {"s": "", "x": f":{ndim}A"}
        signature = [name + layouts.get(kind, ":1C") for _, kind, name in inputs]
        layout = ndim if "x" in kinds else 1
        self.rows = "r" in kinds or "c" in kinds  # then the kernel takes the rows' length
        if self.rows:
            signature.append("int64")
        self._signature = [*signature, *[f"{result}:{layout}C"] * len(outputs)]
        self._source = emit.header(title, dtype) + emit.elementwise(
            outputs, [name for name, _, _ in inputs], kinds, dtype
        )
        self._outputs = len(outputs)
        self._result = DTYPES[result]
        self._held: Kernel | None = None
        self._released: Kernel | None = None

    def kernel(self, size: int) -> Kernel:
        """The entry point to use for `size` elements."""
        if size < LARGE:
            if self._held is None:
                self._held = compile_kernel(self._source, self._signature)
            return self._held
        if self._released is None:
            self._released = compile_kernel(self._source, self._signature, nogil=True)
        return self._released

    def new(self, size: int) -> list[Array]:
        """Arrays for the outputs."""
        return [np.empty(size, self._result) for _ in range(self._outputs)]

    def run(self, size: int, *inputs: Any, row: int = 0) -> list[Array]:
        """The outputs, new flat arrays of `size` elements, from inputs in the form of their kinds."""
        outs = self.new(size)
        self.kernel(size)(*inputs, *((row,) if self.rows else ()), *outs)
        return outs


def _kind(tensor: Tensor, shape: tuple[int, ...], size: int) -> tuple[str, int]:
    """How a kernel can read `tensor` within a result of `shape`: kind, and for r and c the row's length."""
    if math.prod(tensor._shape) == 1 and size != 1:
        return "s", 0
    if tensor._flat is None:
        return "x", 0
    if tensor._shape == shape or size == 1:
        return "v", 0
    # Axes of length 1 in the result carry no information; without them, what is left is a row or a column.
    lead = len(shape) - len(tensor._shape)
    have = (1,) * lead + tensor._shape
    own = [length for length, full in zip(have, shape, strict=True) if full != 1]
    full = [length for length in shape if length != 1]
    split = next((k for k, length in enumerate(own) if length != 1), len(own))
    if own[split:] == full[split:]:
        return ("r", math.prod(full[split:])) if split else ("v", 0)
    split = len(own) - next((k for k, length in enumerate(reversed(own)) if length != 1), len(own))
    if own[:split] == full[:split]:
        return "c", math.prod(full[split:])
    return "x", 0


def kinds_of(args: Sequence[Any], shape: tuple[int, ...]) -> tuple[str, int]:
    """The kinds of all inputs together, and the row length where there are rows or columns."""
    size = math.prod(shape)
    found = [_kind(arg, shape, size) if isinstance(arg, Tensor) else ("s", 0) for arg in args]
    lengths = {length for _, length in found if length}
    kinds = "".join(kind for kind, _ in found)
    if "x" in kinds or len(lengths) > 1 or size == 0:
        return "".join("s" if kind == "s" else "x" for kind in kinds), 0
    return kinds, lengths.pop() if lengths else 0


def run_strided(loop: Loop, values: Sequence[Any], shape: tuple[int, ...]) -> list[Array]:
    """The outputs, flat, of a kernel of strided inputs: arrays that broadcast to `shape`, or numbers."""
    outs = loop.new(math.prod(shape))
    views = [np.broadcast_to(value, shape) if isinstance(value, np.ndarray) else value for value in values]
    arrays = [view for view in views if isinstance(view, np.ndarray)]
    lengths, strides = _coalesce(shape, [array.strides for array in arrays])
    missing = emit.STRIDED_NDIM - len(lengths)
    lengths = [1] * missing + lengths
    strides = [[0] * missing + list(own) for own in strides]
    arrays = [as_strided(array, lengths, own) for array, own in zip(arrays, strides, strict=True)]
    targets = [out.reshape(lengths) for out in outs]
    kernel = loop.kernel(outs[0].size)
    lead = len(lengths) - emit.STRIDED_NDIM
    for index in np.ndindex(*lengths[:lead]):  # a single pass unless more axes are left than the kernel has loops
        rest = iter(arrays)
        kernel(
            *[next(rest)[index] if isinstance(view, np.ndarray) else view for view in views],
            *[target[index] for target in targets],
        )
    return outs


def _coalesce(shape: tuple[int, ...], strides: Sequence[tuple[int, ...]]) -> tuple[list[int], list[list[int]]]:
    """`shape` with neighbouring axes joined wherever every array walks both in one stride, and the new strides."""
    lengths: list[int] = []
    joined: list[list[int]] = [[] for _ in strides]
    for axis, length in enumerate(shape):
        if length == 1:
            continue
        if lengths and all(new[-1] == own[axis] * length for new, own in zip(joined, strides, strict=True)):
            lengths[-1] *= length
            for new, own in zip(joined, strides, strict=True):
                new[-1] = own[axis]
        else:
            lengths.append(length)
            for new, own in zip(joined, strides, strict=True):
                new.append(own[axis])
    return lengths, joined
