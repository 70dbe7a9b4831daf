"""Sums of cotangents, as flat arrays: what a first-order pass adds itself, where no rule's kernel does."""

import functools

import numpy as np

from sweepgrad.dtypes import Array, DType
from sweepgrad.kernels.buffers import empty
from sweepgrad.kernels.cpu import Kernel, compile_kernel
from sweepgrad.kernels.emit import Slot, elementwise
from sweepgrad.kernels.expr import Expr, symbol
from sweepgrad.kernels.gpu import Launcher
from sweepgrad.shortage import again


def add(total: Array, part: Array) -> Array:
    """The sum, as a new array."""
    try:
        if type(total) is not np.ndarray:
            (out,) = _launcher(total.dtype, "x1").over([part, total], total.size)
            return out  # type: ignore[no-any-return]
        out = empty(total.size, total.dtype)
        _adder(total.dtype, "x1")(part, total, out)
        return out
    except MemoryError as error:
        return again(error, "add", add, total, part)


def accumulate(total: Array, part: Array) -> Array:
    """The sum, in the place of `total`."""
    if type(total) is not np.ndarray:
        _launcher(total.dtype, "o0").over([part], total.size, outs=[total])
    else:
        _adder(total.dtype, "o0")(part, total)
    return total


def _terms(dtype: DType, other: str) -> tuple[list[tuple[Expr, Slot]], list[Slot], str]:
    """Adds x0 to `other`: x1, for the sum as an output, or o0, the output itself."""
    inputs = [Slot(name, "v", dtype.name) for name in ("x0", "x1") if other == "x1" or name == "x0"]
    return [(symbol(other) + symbol("x0"), Slot("o0", "v", dtype.name))], inputs, dtype.name


@functools.cache
def _adder(dtype: DType, other: str) -> Kernel:
    """Takes as long as `np.add`, which would warn where a sum overflows or infinities cancel, as no kernel does."""
    return compile_kernel(*elementwise(*_terms(dtype, other)), nogil=True)


@functools.cache
def _launcher(dtype: DType, other: str) -> Launcher:
    return Launcher(*_terms(dtype, other))
