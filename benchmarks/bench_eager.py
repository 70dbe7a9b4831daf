"""Operations one by one

`loss = sum(exp(-(x * x)) * y + x * y); loss.backward()`, where x and y are variables of 4 million float64 elements.
Memory is the peak resident size above that before the arrays were made, over several iterations, each contender in a
process of its own.
"""

import importlib
import json
import sys
from functools import partial

import numpy as np

from benchmarks.measure import Comparison, each, process
from benchmarks.memory import peak, resident

SIZE = 4_000_000
ITERATIONS = 5
MODULES = {"sweepgrad": "sweepgrad", "PyTorch": "torch"}


def loss_and_gradients(module):
    """The work, in the library of this name."""
    library = importlib.import_module(module)
    x, y = (variable(library, seed) for seed in range(2))

    def run():
        x.grad = y.grad = None
        loss = library.sum(library.exp(-(x * x)) * y + x * y)
        loss.backward()
        return [loss.detach(), x.grad, y.grad]

    return run


def variable(library, seed):
    """A variable that shares the memory of a NumPy array, as both libraries let it."""
    array = np.random.default_rng(seed).random(SIZE)
    if hasattr(library, "from_numpy"):
        return library.from_numpy(array).requires_grad_()
    array.flags.writeable = False
    return library.asarray(array, requires_grad=True)


def peak_memory(module):
    """What the work takes in this process, which has not done it before: `python -m benchmarks.bench_eager MODULE`."""
    importlib.import_module(module)
    before = resident()
    run = loss_and_gradients(module)
    for _ in range(ITERATIONS):
        run()
    return {"memory": peak() - before}


@each(
    Comparison(
        "loss and gradients",
        {name: partial(loss_and_gradients, module) for name, module in MODULES.items()},
        targets={"PyTorch": 0.6},
    ),
    Comparison(
        "loss and gradients",
        {
            name: partial(process, "-m", "benchmarks.bench_eager", module, needs=[module])
            for name, module in MODULES.items()
        },
        targets={"PyTorch": 0.8},
        rounds=5,
        warm_ups=1,  # that one may compile
    ),
)
def bench_eager(comparison, contender, measure):
    measure(comparison, contender)


if __name__ == "__main__":
    print(json.dumps(peak_memory(sys.argv[1])))
