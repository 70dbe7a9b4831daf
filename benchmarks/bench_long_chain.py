"""A chain of 1,000,000 additions to a scalar

Built, run backward and dropped, by each contender in a process of its own. Memory is the growth of the peak resident
size over that before the chain.
"""

import json
import sys
import time
from functools import partial

from benchmarks.measure import Comparison, each, process
from benchmarks.memory import peak

LENGTH = 1_000_000
MODULES = {"sweepgrad": "sweepgrad", "PyTorch": "torch"}


def run(module):
    """Build, run backward and drop the chain in this process: `python -m benchmarks.bench_long_chain MODULE`."""
    if module == "sweepgrad":
        import sweepgrad

        def variable():
            return sweepgrad.asarray(1.0, requires_grad=True)

    else:
        import torch

        def variable():
            return torch.tensor(1.0, dtype=torch.float64, requires_grad=True)

    warm = variable()
    for _ in range(3):
        (warm + 1.0).backward()
    before, start = peak(), time.perf_counter()
    x = variable()
    y = x
    for _ in range(LENGTH):
        y = y + 1.0
    built = time.perf_counter()
    y.backward()
    ran = time.perf_counter()
    del y
    if module == "sweepgrad":
        sweepgrad.sweep()
    dropped = time.perf_counter()
    assert x.grad.item() == 1.0
    figures = {"build": built - start, "backward": ran - built, "drop": dropped - ran, "total": dropped - start}
    return {**figures, "memory": peak() - before}


@each(
    Comparison(
        "chain",
        {
            name: partial(process, "-m", "benchmarks.bench_long_chain", module, needs=[module])
            for name, module in MODULES.items()
        },
        rounds=5,
        warm_ups=1,
    )
)
def bench_long_chain(comparison, contender, measure):
    measure(comparison, contender)


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
