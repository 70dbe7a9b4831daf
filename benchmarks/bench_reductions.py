"""Reductions

Of float32 arrays without a gradient. NumPy's column holds SciPy where NumPy lacks the function.
"""

import importlib
from functools import partial

import numpy as np

import sweepgrad as sg
from benchmarks.measure import BEST, Comparison, each


def in_sweepgrad(call, shape):
    x = sg.asarray(data(shape))
    return lambda: [call(sg, x)]


def in_numpy(call, shape, module="numpy"):
    x, library = data(shape), importlib.import_module(module)
    return lambda: [call(library, x)]


def in_torch(call, shape):
    import torch

    x = torch.from_numpy(data(shape))
    return lambda: [call(torch, x)]


def data(shape):
    return np.random.default_rng(0).random(shape, dtype="float32")


def comparison(title, call, shape, *, target, torch=None, module="numpy"):
    """A reduction in all libraries; `torch` is PyTorch's where that one is called otherwise."""
    contenders = {
        "sweepgrad": partial(in_sweepgrad, call, shape),
        "NumPy": partial(in_numpy, call, shape, module),
        "PyTorch": partial(in_torch, torch or call, shape),
    }
    return Comparison(title, contenders, targets={BEST: target})


@each(
    comparison("sum of 10M", lambda lib, x: lib.sum(x), 10_000_000, target=1.0),
    comparison("sum over axis 0 of 4096 x 4096", lambda lib, x: lib.sum(x, axis=0), (4096, 4096), target=1.0),
    comparison("sum over axis 1 of 4096 x 4096", lambda lib, x: lib.sum(x, axis=1), (4096, 4096), target=1.0),
    comparison(
        "max over axis 1 of 4096 x 4096",
        lambda lib, x: lib.max(x, axis=1),
        (4096, 4096),
        torch=lambda lib, x: lib.amax(x, 1),
        target=1.0,
    ),
    comparison(
        "mean over axes 0 and 2 of 64 x 128 x 256", lambda lib, x: lib.mean(x, axis=(0, 2)), (64, 128, 256), target=1.0
    ),
    comparison(
        "logsumexp over axis 1 of 4096 x 1024",
        lambda lib, x: lib.logsumexp(x, axis=1),
        (4096, 1024),
        module="scipy.special",
        target=0.7,
    ),
    comparison(
        "softmax over axis 1 of 4096 x 1024",
        lambda lib, x: lib.softmax(x, axis=1),
        (4096, 1024),
        module="scipy.special",
        target=0.7,
    ),
    comparison(
        "var over axis 0 of 4096 x 4096",
        lambda lib, x: lib.var(x, axis=0),
        (4096, 4096),
        torch=lambda lib, x: lib.var(x, 0, correction=0),
        target=0.15,
    ),
)
def bench_reductions(comparison, contender, measure):
    measure(comparison, contender)
