"""Pauses

What operations on one thread notice of a sweep that removes 1,000,000 orphans on the daemon thread meanwhile: how long
each multiplication of two elements takes, with nothing to sweep and during the sweep, and how long the registry's lock
is held.
"""

import gc
import json
import time

import numpy as np

import sweepgrad as sg
from benchmarks.measure import process, table
from sweepgrad.graph.process import registry

ORPHANS, ROUNDS, ALONE = 1_000_000, 3, 100_000
SHARES = {"median": 50, "p99": 99, "p99.9": 99.9, "max": 100}


class TimedLock:
    """The registry's lock, and for how long it was held: by the clock, and by the processor time of its thread."""

    def __init__(self, lock):
        self._lock = lock
        self._is_owned = lock._is_owned
        self._depth = 0
        self.held = []

    def __enter__(self):
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._began = time.perf_counter(), time.thread_time()

    def __exit__(self, *exception):
        if self._depth == 1:
            wall, cpu = self._began
            self.held.append((time.perf_counter() - wall, time.thread_time() - cpu))
        self._depth -= 1
        self._lock.release()


def latencies(go_on):
    """Seconds of each of a row of operations, for as long as `go_on()` holds; each result is dropped."""
    x = sg.ones((2,), requires_grad=True)
    found, now = [], time.perf_counter
    while go_on():
        for _ in range(100):
            began = now()
            x * 2.0
            found.append(now() - began)
    return found


def build():
    """Make what will be orphans, still held."""
    x = sg.ones((), requires_grad=True)
    held = [x * 1.0 for _ in range(ORPHANS)]
    gc.collect()
    gc.freeze()  # so that the collector does not measure the graph
    return held


def run():
    """Latencies alone and during the sweep, and holds of the lock, of all rounds in this process."""
    lock = registry.lock = TimedLock(registry.lock)
    alone, during, holds, sweeping = [], [], [], []
    for _ in range(ROUNDS):
        sg.graph.set_threshold(nodes=2 * ORPHANS)  # so that building does not sweep
        held = build()
        left = iter(range(ALONE // 100))
        alone += latencies(lambda left=left: next(left, None) is not None)
        sg.graph.set_threshold(nodes=2000)
        held.clear()
        lock.held.clear()
        before, began = sg.graph.stats().swept, time.perf_counter()
        sg.sweeper.start("1ms")
        during += latencies(lambda before=before: registry.swept - before < ORPHANS)
        sweeping.append(time.perf_counter() - began)
        sg.sweeper.stop()
        holds += lock.held
        gc.unfreeze()
        sg.sweep()
    wall, cpu = zip(*holds, strict=True)
    columns = {"alone": alone, "during": during, "wall": wall, "cpu": cpu}
    found = {
        name: {share: float(np.percentile(values, at)) for share, at in SHARES.items()}
        for name, values in columns.items()
    }
    return found | {"operations": len(during), "holds": len(holds), "seconds": sweeping}


def bench_pauses(benchmark, section):
    found = benchmark.pedantic(process("-m", "benchmarks.bench_pauses"))
    rows = [
        [label, *(f"{found[name][share] * 1e6:,.1f}" for share in SHARES)]
        for name, label in (
            ("alone", "an operation, with nothing to sweep"),
            ("during", "an operation, during the sweep"),
            ("wall", "the lock held, by the clock"),
            ("cpu", "the lock held, processor time"),
        )
    ]
    above = found["during"]["p99.9"] - found["alone"]["p99.9"]
    rows.append(["p99.9 of an operation above its own", "", "", f"{above * 1e6:,.1f}", ""])
    section.tables.append(table(rows, ["microseconds", *SHARES]))


if __name__ == "__main__":
    print(json.dumps(run()))
