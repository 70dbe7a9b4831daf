"""What the benchmarks on a GPU run of this library gives what it gives on the CPU; run on simulated devices, small."""

import sys
from functools import partial
from pathlib import Path

import modes
import numpy as np
import pytest

modes.enter()
sys.path.append(str(Path(__file__).parents[2]))
bandwidth = pytest.importorskip("benchmarks.gpu.bench_bandwidth")
from benchmarks.gpu import bench_launch, libraries  # noqa: E402


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(libraries, "REPEATS", 2)


def agree(prepare):
    found, expected = ([np.array(one) for one in prepare(device)()] for device in ("cuda", "cpu"))
    assert found
    for one, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-5)


@pytest.mark.parametrize("case", bandwidth.CASES, ids=lambda case: case.title)
def test_bandwidth(case):
    agree(lambda device: bandwidth.in_sweepgrad(case, 400, device))


@pytest.mark.parametrize("work", [bench_launch.multiplications, bench_launch.training])
def test_launches(work):
    agree(lambda device: work(partial(libraries.Sweepgrad, device), 20))


@pytest.mark.parametrize("case", [case for case in bandwidth.CASES if case.cupy], ids=lambda case: case.title)
def test_bandwidth_in_cupy(case):
    """NumPy stands for CuPy."""
    xs = [bandwidth.data(400, k) for k in range(case.inputs)]
    expected = bandwidth.in_sweepgrad(case, 400, "cpu")()
    for one, right in zip(case.cupy(np, *xs), expected, strict=True):
        np.testing.assert_allclose(one, np.array(right), rtol=1e-5)
