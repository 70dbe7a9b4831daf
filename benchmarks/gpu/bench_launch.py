"""Small operations on a GPU

16 elements: what Python, and the launch of a kernel, take for one operation. Many are launched before one wait.
"""

from functools import partial

import numpy as np

from benchmarks.gpu.libraries import REPEATS, CuPy, Sweepgrad, Torch, repeated
from benchmarks.measure import Comparison, each

LENGTH = 50
LAUNCHES = 1000


def data(k):
    return np.random.default_rng(k).random(16, dtype="float32") + 0.5


def multiplications(make, launches=LAUNCHES):
    library = make()
    x, y = library.array(data(0)), library.array(data(1))

    def once():
        for _ in range(launches // REPEATS):
            z = x * y
        return [z]

    return repeated(library, once)


def training(make, length=LENGTH):
    library = make()
    x, y = library.array(data(0), tracked=True), library.array(data(1))

    def once():
        x.grad = None
        z = x
        for _ in range(length):
            z = z * y
        z.sum().backward()
        return [z, x.grad]

    return repeated(library, once)


PEERS = {"sweepgrad": Sweepgrad, "PyTorch": Torch, "CuPy": CuPy}


@each(
    Comparison(
        "x * y",
        {name: partial(multiplications, make) for name, make in PEERS.items()},
        targets={"PyTorch": 1.5},
        parts=LAUNCHES,
    ),
    Comparison(
        f"{LENGTH} multiplications, forward and backward",
        {name: partial(training, make) for name, make in PEERS.items() if name != "CuPy"},
        targets={"PyTorch": 1.5},
        parts=REPEATS,
    ),
)
def bench_launch(comparison, contender, measure):
    measure(comparison, contender)
