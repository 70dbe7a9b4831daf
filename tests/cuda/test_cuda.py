"""Kernels for GPUs, where there is no GPU: on Numba's simulator, and as far as the assembly.

Numba has to know from the start of a process whether it is to simulate. No kernel has been run on a GPU by these tests.
"""

import importlib
import re
import sys
from pathlib import Path

import pytest

from launch import python
from sweepgrad.errors import MissingDependencyError

TABLE = Path(__file__).with_name("table.py")
CLEAN = {"PYTEST_ADDOPTS": "", "PYTEST_XDIST_WORKER": "", "PYTEST_PLUGINS": ""}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"NUMBA_ENABLE_CUDASIM": "1"}, id="runs on the simulator as on the CPU"),
        pytest.param({"NUMBA_ENABLE_CUDASIM": "0"}, id="compiles to assembly"),
    ],
)
@pytest.mark.parametrize("part", ["elementwise", "whole_numbers", "not elementwise and not whole_numbers"])
def test_every_kernel_of_the_table(settings, part):
    # NumPy's numbers warn in a simulated kernel where a GPU's say nothing.
    options = ["-n0", "-q", "-W", "ignore", "-o", "filterwarnings=", "-o", "timeout=300", "-p", "no:cacheprovider"]
    done = python("-m", "pytest", *options, "-k", part, TABLE, settings=settings | CLEAN, limit=1400)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 30


def test_without_its_packages_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba_cuda", None)
    monkeypatch.delitem(sys.modules, "sweepgrad.kernels.cuda", raising=False)
    with pytest.raises(MissingDependencyError, match=r"sweepgrad\[cu12\]"):
        importlib.import_module("sweepgrad.kernels.cuda")
