"""How everything here is measured: in rounds in which every contender runs once, compared round by round.

Machines are shared and noisy, so a contender's figure is the median over the rounds, and a ratio is the median of the
ratios within rounds. The collector runs between measurements, not by chance during them.
"""

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from tabulate import tabulate


@dataclass(frozen=True)
class Result:
    """One contender's median time in seconds."""

    name: str
    seconds: float
    ratio: float
    """sweepgrad's time divided by this contender's."""


def compare(contenders: dict[str, Callable[[], object]], *, rounds: int = 15, calls: int = 1) -> list[Result]:
    """Time each contender in every round; the first is sweepgrad, to which the ratios relate."""
    for function in contenders.values():  # compile, fill caches
        for _ in range(3):
            function()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, function in contenders.items():
            gc.collect()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            times[name].append((time.perf_counter() - start) / calls)
    own = next(iter(times.values()))
    return [
        Result(name, median(found), median(a / b for a, b in zip(own, found, strict=True)))
        for name, found in times.items()
    ]


def compare_processes(modules: dict[str, list[str]], *, rounds: int = 5) -> dict[str, dict[str, list[float]]]:
    """Run each contender in a process of its own, in turn; each prints one JSON object of figures as its last line."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in modules}
    for _ in range(rounds):
        for name, arguments in modules.items():
            output = subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout
            for key, value in json.loads(output.splitlines()[-1]).items():
                found[name].setdefault(key, []).append(value)
    return found


def table(rows: list[list[object]], headers: list[str]) -> str:
    """A Markdown table."""
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def times(results: list[Result], unit: str, scale: float) -> str:
    """The table of a comparison of times."""
    rows: list[list[object]] = [[r.name, f"{r.seconds * scale:.2f}", f"{r.ratio:.2f}"] for r in results]
    return table(rows, ["", unit, "sweepgrad's time / this"])
