"""All that is promised of devices, on a GPU: `python -m pytest tests/gpu`. Where there is none, it is skipped.

Processes of their own, one after the other, so that each has the device's memory for itself.
"""

import re
import sys
from pathlib import Path

import pytest

import sweepgrad as sg
from launch import python, quiet

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "cuda"
sys.path.append(str(TESTS))
import modes  # noqa: E402

pytestmark = [
    pytest.mark.skipif(len(sg.devices()) == 1, reason="no NVIDIA GPU can be used here"),
    pytest.mark.xdist_group("gpu"),
    pytest.mark.timeout(1000),
]


def test_the_whole_table():
    assert modes.run([TESTS / "table.py"], "device", "-o", "timeout=300", limit=900) > 300


def test_behaviour():
    assert modes.run([TESTS / "behaviour.py"], "device", limit=600) > 50


@pytest.mark.parametrize("backward", [True, False])
def test_the_stress_loop_leaves_the_memory_of_the_device_flat(backward):
    """Of the device as a whole, not of what CuPy counts."""
    found = quiet(
        f"""
        import cupy
        import sweepgrad as sg

        def used():
            free, total = cupy.cuda.runtime.memGetInfo()
            return total - free

        def iterate(count):
            for k in range(count):
                sg.zeros((2, 2), device="cuda", requires_grad=True)
                if {backward}:
                    sg.zeros((2, 2), device="cuda", requires_grad=True).sum().backward()

        iterate(10_000)
        before = used()
        iterate(200_000)
        print(used() - before)
        sg.graph.audit()
        """,
        limit=600,
    )
    assert int(found) < 10e6


def test_digits():
    done = python(ROOT / "examples" / "digits.py", "--device", "cuda", "--no-progress", limit=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(re.search(r"test accuracy: ([\d.]+)%", done.stdout)[1]) > 97
