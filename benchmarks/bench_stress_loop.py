"""Memory over the stress loop

Tracked tensors are dropped without a backward pass, and resident memory must stay flat. Growth is the highest resident
size seen at 100 points of the loop, above that after 10,000 iterations.
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import sweepgrad as sg
from benchmarks.measure import process, table
from benchmarks.memory import resident

MODES = ("default", "daemon", "explicit", "forward")
ITERATIONS = 10_000_000
WARM_UP = 10_000


def iterate(mode, count):
    """The loop itself."""
    for k in range(count):
        sg.zeros((2, 2), requires_grad=True)
        if mode != "forward":
            b = sg.zeros((2, 2), requires_grad=True)
            b.sum().backward()
        if mode == "explicit" and k % 1000 == 999:
            sg.sweep()


def run(mode, iterations):
    """Growth of memory, most nodes at once and time of one mode in this process.

    `python -m benchmarks.bench_stress_loop MODE [ITERATIONS]` prints them as JSON:

        default    nothing configured           daemon    the sweeper every 100 ms
        explicit   sweep() every 1,000 times    forward   no backward pass at all, nothing configured
    """
    if mode == "daemon":
        sg.sweeper.start("100ms")
    iterate(mode, WARM_UP)
    before, start = resident(), time.perf_counter()
    highest = before
    for _ in range(100):
        iterate(mode, iterations // 100)
        highest = max(highest, resident())
    seconds = time.perf_counter() - start
    sg.sweeper.stop()
    sg.graph.audit()
    stats = sg.graph.stats()
    return {
        "iterations": iterations,
        "growth": highest - before,
        "peak": stats.peak,
        "swept": stats.swept,
        "indexed": sum(stats.indexes.values()),
        "seconds": seconds,
        "sweep_seconds": stats.sweep_seconds,
    }


def bench_stress_loop(benchmark, section):
    def measure(mode):
        return process("-m", "benchmarks.bench_stress_loop", mode)()

    def measure_all():  # memory is measured, not time, so they may run side by side
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return dict(zip(MODES, pool.map(measure, MODES), strict=True))

    rows = [
        [
            mode,
            f"{found['iterations']:,}",
            f"{found['growth'] / 1e6:.2f}",
            f"{found['peak']:,}",
            f"{found['sweep_seconds'] / found['seconds']:.1%}",
        ]
        for mode, found in benchmark.pedantic(measure_all).items()
    ]
    section.tables.append(table(rows, ["mode", "iterations", "growth, MB", "peak nodes", "time in sweeps"]))


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else ITERATIONS)))
