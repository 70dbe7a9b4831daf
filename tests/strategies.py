"""What several test files draw from: arrays of every memory layout, and the sum over what was broadcast."""

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

LAYOUTS = ("contiguous", "transposed", "reversed", "every other", "repeated")

# Kernels are compiled on the way, so an example may take a second.
SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


def examples(count):
    return settings(max_examples=count, **SLOW)


layouts = st.sampled_from(LAYOUTS)
seeds = st.integers(0, 2**32 - 1)


def frozen(array):
    """The array with the strides that it has, over bytes, which nobody can write to, so that `asarray` shares it."""
    array = np.asarray(array)
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    offset = array.ctypes.data - owner.ctypes.data
    return np.ndarray(array.shape, array.dtype, owner.tobytes("A"), offset, array.strides)


def laid_out(array, layout):
    """The values of `array` in memory as `layout` says; "repeated" repeats the first element of the last axis."""
    array = np.asarray(array)
    if layout == "transposed":
        array = np.array(array.T, order="C").T
    elif layout == "reversed":
        array = np.flip(np.array(np.flip(array), order="C"))
    elif layout == "every other" and array.ndim:
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        wide[..., ::2] = array
        array = wide[..., ::2]
    elif layout == "repeated" and array.size:
        array = np.broadcast_to(array[..., :1], array.shape) if array.ndim else array
    return frozen(array)


def summed_to(array, shape):
    """`array` summed over the axes along which something of `shape` was repeated."""
    array = array.sum(axis=tuple(range(array.ndim - len(shape))))
    return array.sum(axis=tuple(k for k, n in enumerate(shape) if n == 1), keepdims=True)
