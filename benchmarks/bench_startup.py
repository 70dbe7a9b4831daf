"""Starting

Every time is that of a process of its own, with the interpreter's start where nothing else is said. In the first
comparison sweepgrad's figure is the difference of two: the time of `import sweepgrad` less that of `import numba`.
"""

import json
import sys
import tempfile
import time
from functools import partial

from benchmarks.measure import OWN, ROOT, Comparison, each, process

FIRST_GRADIENT = """
import sweepgrad as sg
x = sg.asarray([1.0, 2.0], requires_grad=True)
(x * x).sum().backward()
"""


def beyond_numba():
    """The difference of two imports."""
    imports = [process("-c", f"import {package}") for package in ("sweepgrad", "numba")]

    def run():
        times = [time.perf_counter()]
        for one in imports:
            one()
            times.append(time.perf_counter())
        start, between, end = times
        return {"time": (between - start) - (end - between)}

    return run


def cold_step():
    """The first training step in a new process with an empty cache."""
    step = process("-m", "benchmarks.bench_startup", needs=["sklearn", "tqdm"])

    def run():
        with tempfile.TemporaryDirectory() as folder:
            return step(SWEEPGRAD_CACHE_DIR=folder)

    return run


def first_step():
    """Time of the first step of `examples/digits.py` in this process: `python -m benchmarks.bench_startup`."""
    sys.path.insert(0, str(ROOT / "examples"))
    import digits
    import numpy as np
    from sklearn.datasets import load_digits

    import sweepgrad as sg

    scans, labels = load_digits(return_X_y=True)
    x, y = scans[: digits.BATCH].astype("float32") / 16, labels[: digits.BATCH]
    rng = np.random.default_rng(0)
    start = time.perf_counter()
    parameters = digits.layer(rng, 64, 128) + digits.layer(rng, 128, 10)
    optimizer = sg.optim.Adam(parameters, lr=2e-3)
    loss = digits.cross_entropy(digits.logits(parameters, x), y)
    digits.statistics(parameters)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"time": time.perf_counter() - start}


@each(
    Comparison("import, beyond that of Numba", {OWN: beyond_numba}, targets={OWN: 0.1}, warm_ups=1),
    Comparison(
        "import and a first gradient, beside the import of PyTorch",
        {
            OWN: partial(process, "-c", FIRST_GRADIENT),
            "PyTorch": partial(process, "-c", "import torch", needs=["torch"]),
        },
        targets={"PyTorch": 0.8},
        warm_ups=1,
    ),
    Comparison(
        "first training step of the digits, nothing cached", {OWN: cold_step}, targets={OWN: 5.0}, rounds=3, warm_ups=0
    ),
)
def bench_startup(comparison, contender, measure):
    measure(comparison, contender)


if __name__ == "__main__":
    print(json.dumps(first_step()))
