"""The stress loop: tracked tensors dropped without a backward pass. Resident memory must stay flat.

`python -m benchmarks.stress_loop MODE [ITERATIONS]` runs one mode and prints its figures as JSON:

    default    nothing configured           daemon    the sweeper every 100 ms
    explicit   sweep() every 1,000 times    forward   no backward pass at all, nothing configured
"""

import json
import os
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import sweepgrad as sg

MODES = ("default", "daemon", "explicit", "forward")
ITERATIONS = 10_000_000
WARM_UP = 10_000


def resident():
    """Bytes of memory that this process has resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


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
    """One mode in this process; returns the growth of memory, the most nodes at once and the time."""
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


def report():
    """The section of this module."""
    from benchmarks.harness import compare_processes, table  # here, since the tests run the loop without its needs

    def measure(mode):
        return compare_processes({mode: ["-m", "benchmarks.stress_loop", mode]}, rounds=1)[mode]

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # memory is measured, not time, so they may run side by side
        found = dict(zip(MODES, pool.map(measure, MODES), strict=True))
    rows = [
        [
            mode,
            f"{figures['iterations'][0]:,}",
            f"{figures['growth'][0] / 1e6:.2f}",
            f"{figures['peak'][0]:,}",
            f"{figures['sweep_seconds'][0] / figures['seconds'][0]:.1%}",
        ]
        for mode, figures in found.items()
    ]
    return "\n\n".join(
        [
            "## Memory over the stress loop",
            "Growth is the highest resident size seen at 100 points of the loop, above that after 10,000 iterations.",
            table(rows, ["mode", "iterations", "growth, MB", "peak nodes", "time in sweeps"]),
        ]
    )


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else ITERATIONS)))
