"""A chain of 1,000,000 additions to a scalar: built, run backward, dropped. Time, and peak memory above the start."""

import json
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.harness import compare_processes, table

LENGTH = 1_000_000


def peak():
    """Highest resident size so far, in bytes; getrusage would count that of the process which started this one."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def run(library):
    """Build, run backward and drop the chain in this process."""
    if library == "sweepgrad":
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
    if library == "sweepgrad":
        sweepgrad.sweep()
    dropped = time.perf_counter()
    assert x.grad.item() == 1.0
    figures = {"build": built - start, "backward": ran - built, "drop": dropped - ran, "total": dropped - start}
    print(json.dumps({**figures, "bytes": peak() - before}))


def report():
    """The section of this module."""
    contenders = {name: ["-m", "benchmarks.long_chain", name] for name in ("sweepgrad", "torch")}
    found = compare_processes(contenders, rounds=7)
    rows = []
    for key, unit, scale in [
        ("build", "s", 1),
        ("backward", "s", 1),
        ("drop", "s", 1),
        ("total", "s", 1),
        ("bytes", "MB at the peak", 1e-6),
    ]:
        own, other = found["sweepgrad"][key], found["torch"][key]
        ratio = median(a / b for a, b in zip(own, other, strict=True))
        rows.append([key, unit, f"{median(own) * scale:.2f}", f"{median(other) * scale:.2f}", f"{ratio:.2f}"])
    return "\n\n".join(
        [
            "## A chain of 1,000,000 additions to a scalar",
            "Each in a process of its own; memory is the growth of the peak resident size over that before the chain.",
            table(rows, ["", "unit", "sweepgrad", "PyTorch", "ratio"]),
        ]
    )


if __name__ == "__main__":
    run(sys.argv[1])
