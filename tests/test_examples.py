"""The examples, as their users run them."""

import re
from pathlib import Path

import pytest

from launch import python

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

DIGITS = Path(__file__).parents[1] / "examples" / "digits.py"


def numbers(done):
    """The accuracy in percent, and the node counts after the first and the last epoch."""
    accuracy = float(re.search(r"test accuracy: ([\d.]+)%", done.stdout)[1])
    return accuracy, *map(int, re.search(r"nodes: (\d+) after the first epoch, (\d+) after", done.stdout).groups())


def test_digits_are_read_and_the_graph_stays_flat():
    done = python(DIGITS)
    assert done.returncode == 0, done.stderr
    accuracy, first, last = numbers(done)
    assert accuracy >= 97
    # Each of the 40 * 21 steps leaves 25 nodes that no backward pass meets; those of one step are alive at a time.
    assert first == last < 50
    assert f"nodes={last}" in done.stderr
    assert "saved=" in done.stderr
    if Path("/proc/self/statm").exists():
        assert float(re.search(r"memory: ([+-][\d.]+) MiB", done.stdout)[1]) < 64


def test_digits_under_the_runner():
    done = python("-m", "sweepgrad", "run", "--sweep", "5ms", DIGITS, "--no-progress", "--seed", "3")
    assert done.returncode == 0, done.stderr
    accuracy, first, last = numbers(done)
    assert accuracy >= 97
    assert first == last < 50
    summary = done.stderr.splitlines()
    assert len(summary) == 2
    registered, consumed, swept, live = (
        int(text.replace(",", ""))
        for text in re.match(
            r"sweepgrad: ([\d,]+) nodes registered: ([\d,]+) consumed, ([\d,]+) swept, ([\d,]+) still live", summary[0]
        ).groups()
    )
    assert registered == consumed + swept + live
    assert swept > 40 * 21 * 20


def test_digits_say_when_they_fail():
    done = python(DIGITS, "--no-progress", "--epochs", "1")
    assert done.returncode == 1
    assert done.stderr.strip() == "digits.py: the accuracy is below 97%; train longer (--epochs)"


def test_digits_say_when_the_graph_grows():
    code = """
import runpy, sys
import sweepgrad as sg

kept, step = [], sg.optim.Adam.step

def leak(self):
    kept.append(self.params[0] * 2.0)
    step(self)

sg.optim.Adam.step = leak
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    done = python("-c", code, DIGITS, "--no-progress")
    _, first, last = numbers(done)
    assert last - first == 39 * 21
    assert done.returncode == 1
    assert done.stderr.strip() == "digits.py: the graph grew, which is a fault in sweepgrad; please report it"
