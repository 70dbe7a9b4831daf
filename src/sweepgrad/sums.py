"""Sums of cotangents, as flat arrays: what a first-order pass adds itself, where no rule's kernel does."""

import functools

from sweepgrad.dtypes import Array, DType
from sweepgrad.kernels.buffers import empty
from sweepgrad.kernels.cpu import Kernel, compile_kernel
from sweepgrad.kernels.emit import Slot, elementwise
from sweepgrad.kernels.expr import symbol
from sweepgrad.shortage import again


def add(total: Array, part: Array) -> Array:
    """The sum, as a new array."""
    try:
        out = empty(total.size, total.dtype)
        _adder(total.dtype, "x1")(total, part, out)
        return out
    except MemoryError as error:
        return again(error, "add", add, total, part)


def accumulate(total: Array, part: Array) -> Array:
    """The sum, in the place of `total`."""
    _adder(total.dtype, "o0")(part, total)
    return total


@functools.cache
def _adder(dtype: DType, other: str) -> Kernel:
    """Adds x0 to `other`: x1, for the sum as an output, or o0, the output itself.

    Takes as long as `np.add`, which would warn where a sum overflows or infinities cancel, as no other kernel does.
    """
    inputs = [Slot(name, "v", dtype.name) for name in ("x0", "x1") if other == "x1" or name == "x0"]
    total = symbol(other) + symbol("x0")
    return compile_kernel(*elementwise([(total, Slot("o0", "v", dtype.name))], inputs, dtype.name), nogil=True)
