"""How everything here is measured: in rounds in which sweepgrad and one peer run in turn, compared round by round.

Machines are shared and noisy, so a time is the median over the rounds and a ratio the median of the ratios within
rounds. pytest-benchmark runs the rounds of each peer, and its `setup` the round of sweepgrad just before. Both get a
pause first, in which the collector runs and the other's worker threads stop spinning.
"""

import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
OWN = "sweepgrad"
BEST = "best of them"
LAP = 0.02
"""Seconds that a lap lasts at least: what is faster is called several times."""
PAUSE = 0.01
"""Seconds before a lap. OpenMP's threads spin for some milliseconds after their work, on cores that the next needs."""
TOLERANCE = 1e-3
"""By how much results may differ, as a share of the largest element: float32 sums in any order, but the same sums."""


@dataclass(frozen=True)
class Row:
    """What was found about one contender."""

    comparison: str
    figure: str
    contender: str
    value: float
    ratio: float | None
    """Median over the rounds of sweepgrad's value divided by this one; None where there is no such pair."""
    target: float | None
    """What the ratio, or sweepgrad's value itself, should be at most."""
    best: float | None
    """What the ratio to the best of the peers should be at most."""


class Laps:
    """A contender that is ready to run, and what its laps found."""

    def __init__(self, run, warm_ups):
        self.run = run
        self.calls = 1
        self.figures = {}
        self.first = None
        for k in range(warm_ups):  # compile, fill caches
            start = time.perf_counter()
            result = run()
            self.calls = max(1, round(LAP / (time.perf_counter() - start)))
            if k == 0 and not isinstance(result, dict):
                self.first = [np.array(one) for one in result or ()]
            del result

    def lap(self):
        """The figures of one round: those that a call returns as a dictionary, or its time."""
        start = time.perf_counter()
        for _ in range(self.calls - 1):
            self.run()
        result = self.run()
        seconds = (time.perf_counter() - start) / self.calls
        for name, value in (result if isinstance(result, dict) else {"time": seconds}).items():
            self.figures.setdefault(name, []).append(value)


@dataclass(frozen=True)
class Comparison:
    """Contenders that do the same work.

    Each is a function without arguments that prepares the work and returns another, which does it once. That one
    returns its results as a sequence of arrays, or a dictionary of figures that it measured itself. An ImportError
    while preparing leaves the contender out, with a note.
    """

    title: str
    contenders: Mapping[str, Callable[[], Callable[[], object]]]
    targets: Mapping[str, float] = field(default_factory=dict)
    """The ratio that is wanted to each peer, or to the `BEST` of them; for sweepgrad itself, the value."""
    parts: int = 1
    """Of how many parts a call consists: the time is that of one."""
    rounds: int = 15
    warm_ups: int = 3

    def measure(self, name, benchmark, section):
        """Run one contender, in turn with sweepgrad, and add to the section what was found."""
        benchmark.group = self.title
        try:
            laps = self._prepared(name)
        except ImportError as error:
            note = f"{name}, {str(error).partition(' (')[0]}"  # without the path
            if note not in section.notes:
                section.notes.append(note)
            pytest.skip(note)
        own = None if name == OWN else self._own()
        if own:
            self._check_agreement(name, laps, own)

        def setup():
            if own:
                _pause()
                own.lap()
            _pause()

        gc.collect()
        gc.freeze()  # so that collecting takes no time
        try:
            benchmark.pedantic(laps.lap, setup=setup, rounds=self.rounds)
        finally:
            gc.unfreeze()
        section.rows += [self._row(name, figure, laps, own) for figure in laps.figures]

    def _prepared(self, name):
        return Laps(self.contenders[name](), self.warm_ups)

    def _own(self):
        """Sweepgrad's side of a pair, or None where it is left out."""
        try:
            return self._prepared(OWN) if OWN in self.contenders else None
        except ImportError:
            return None

    def _check_agreement(self, name, laps, own):
        if not (own.first and laps.first):
            return  # one of them returns nothing that could be compared
        for ours, theirs in zip(own.first, laps.first, strict=True):
            assert ours.shape == theirs.shape, f"{name}'s result has another shape"
            most = np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs))
            assert most <= TOLERANCE, f"{name}'s result differs by {most:.1e}"

    def _row(self, name, figure, laps, own):
        values = laps.figures[figure]
        ratio = median(a / b for a, b in zip(own.figures[figure], values, strict=True)) if own else None
        targets = self.targets
        return Row(self.title, figure, name, median(values) / self.parts, ratio, targets.get(name), targets.get(BEST))


def each(*comparisons):
    """Decorate a benchmark with every contender of the comparisons."""
    pairs = [pytest.param(one, name, id=f"{one.title}: {name}") for one in comparisons for name in one.contenders]
    return pytest.mark.parametrize(("comparison", "contender"), pairs)


def process(*arguments, needs=()):
    """Prepare a function that runs Python with the arguments in a process of its own, where `needs` are installed.

    It takes changes to the environment, and returns the figures that the process prints as JSON; if that prints
    nothing, its time is the figure.
    """
    for package in needs:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}")

    def run(**environment):
        command, environment = [sys.executable, *arguments], os.environ | environment
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        return json.loads(done.stdout) if done.stdout else None

    return run


def table(rows, headers):
    """A Markdown table."""
    from tabulate import tabulate  # here, since the tests run the stress loop without it

    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _pause():
    gc.collect()
    time.sleep(PAUSE)
