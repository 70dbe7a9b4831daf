"""Functions

Time per element of arrays of 100,000 elements between 0.1 and 3, which stay in the cache, without a gradient. NumPy's
column holds SciPy where NumPy lacks the function.
"""

from functools import partial

import numpy as np

import sweepgrad as sg
from benchmarks.measure import Comparison, each

SIZE = 100_000
NAMES = ("exp", "log", "log1p", "sqrt", "sin", "tanh", "erf", "pow")
DTYPES = ("float32", "float64")


def in_sweepgrad(name, dtype):
    inputs = [sg.asarray(array) for array in data(name, dtype)]
    return apply(getattr(sg, name), inputs)


def in_numpy(name, dtype):
    if not hasattr(np, name):
        from scipy import special

    return apply(getattr(np, name, None) or getattr(special, name), data(name, dtype))


def in_torch(name, dtype):
    import torch

    return apply(getattr(torch, name), [torch.from_numpy(array) for array in data(name, dtype)])


def data(name, dtype):
    rng = np.random.default_rng(0)
    return [rng.uniform(0.1, 3, SIZE).astype(dtype) for _ in range(1 + (name == "pow"))]


def apply(function, inputs):
    return lambda: [function(*inputs)]


CONTENDERS = {"sweepgrad": in_sweepgrad, "NumPy": in_numpy, "PyTorch": in_torch}
COMPARISONS = [
    Comparison(f"{name}, {dtype}", {library: partial(f, name, dtype) for library, f in CONTENDERS.items()}, parts=SIZE)
    for name in NAMES
    for dtype in DTYPES
]


@each(*COMPARISONS)
def bench_functions(comparison, contender, measure):
    measure(comparison, contender)
