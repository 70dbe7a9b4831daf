"""Sweeping

What one `sweep()` costs that removes 10,000 orphans, in chains of ten, and whether that depends on the size of the live
graph.
"""

import gc
import json
import time
from statistics import median

import sweepgrad as sg
from benchmarks.measure import process, table

ORPHANS, LIVE, ROUNDS = 10_000, 1_000_000, 21


def sweep_orphans():
    """Seconds to sweep `ORPHANS` dropped results, in chains of ten."""
    sg.sweep()
    start = sg.ones((), requires_grad=True)
    for _ in range(ORPHANS // 10):
        y = start
        for _ in range(10):
            y = y * 2.0
    del y
    gc.collect()
    began = time.perf_counter()
    report = sg.sweep()
    seconds = time.perf_counter() - began
    assert report.nodes == ORPHANS
    return seconds


def run():
    """Seconds of both kinds of sweep, by round, in this process."""
    sg.graph.set_threshold(nodes=10 * ORPHANS)  # so that building does not sweep
    held = []

    def grow():
        x = sg.ones((), requires_grad=True)
        held.extend([x, [x * 1.0 for _ in range(LIVE)]])
        gc.collect()
        gc.freeze()  # so that the collector does not measure the live graph instead of the sweep

    sweep_orphans()
    with_none, with_many = [], []
    for _ in range(3):  # in alternation, since the machine's speed drifts
        held.clear()
        gc.unfreeze()
        sg.sweep()
        with_none += [sweep_orphans() for _ in range(ROUNDS // 3)]
        grow()
        with_many += [sweep_orphans() for _ in range(ROUNDS // 3)]
    return {"none": with_none, "many": with_many}


def bench_sweeping(benchmark, section):
    found = benchmark.pedantic(process("-m", "benchmarks.bench_sweeping"))
    with_none, with_many = found["none"], found["many"]
    ratio = median(b / a for a, b in zip(with_none, with_many, strict=True))
    rows = [
        ["none", f"{median(with_none) * 1e3:.2f}", f"{median(with_none) / ORPHANS * 1e6:.2f}", ""],
        [f"{LIVE:,}", f"{median(with_many) * 1e3:.2f}", f"{median(with_many) / ORPHANS * 1e6:.2f}", f"{ratio:.2f}"],
    ]
    section.tables.append(table(rows, ["live nodes besides", "ms", "us per orphan", "ratio"]))


if __name__ == "__main__":
    print(json.dumps(run()))
