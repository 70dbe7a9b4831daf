"""The stress loop of `benchmarks/bench_stress_loop.py`, shorter, in each mode: the graph and memory stay flat."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import sweepgrad as sg

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc")
@pytest.mark.parametrize("mode", ["default", "daemon", "explicit", "forward"])
def test_stress_loop_stays_flat(mode):
    command = [sys.executable, "-m", "benchmarks.bench_stress_loop", mode, "100000"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    most = sg.graph.get_threshold().nodes + 300
    assert found["peak"] <= (4 * most if mode == "daemon" else most)
    assert found["indexed"] <= 2 * most
    assert found["growth"] < 10e6


@pytest.fixture
def empty_graph():
    """The test starts and ends with a swept graph, whatever other tests still hold."""
    sg.sweep(collect_cycles=True)
    before = sg.graph.stats().nodes
    yield before
    sg.sweep(collect_cycles=True)
    assert sg.graph.stats().nodes == before
    sg.graph.audit()


def test_leaf_first(empty_graph):
    y = sg.ones((), requires_grad=True)
    first = sg.graph.nodes()[-1].id
    for _ in range(9):
        y = y * 2.0
    del y
    left = [node.id for node in sg.graph.nodes()][-10:]
    assert left == list(range(first, first + 10))
    while left:
        assert sg.sweep(max_nodes=1).nodes == 1
        newest = left.pop()
        ids = {node.id for node in sg.graph.nodes()}
        assert newest not in ids
        assert set(left) <= ids
    assert sg.sweep().nodes == 0


def test_orphans_hold_no_memory_after_a_sweep_of_bytes(empty_graph):
    x = sg.ones((1000,), requires_grad=True)
    kept = sg.exp(x)
    before = sg.graph.stats().saved_bytes
    dropped = sg.exp(sg.exp(x))
    assert sg.graph.stats().saved_bytes == before + 16_000
    del dropped
    assert sg.sweep().bytes == 16_000
    assert sg.graph.stats().saved_bytes == before
    kept.sum().backward()


def test_byte_threshold_bounds_large_orphans(empty_graph):
    old = sg.graph.get_threshold()
    sg.graph.set_threshold(bytes=10_000_000)
    try:
        x = sg.ones((100_000,), requires_grad=True)
        for _ in range(100):
            sg.exp(x)
            assert sg.graph.stats().saved_bytes <= 11_600_000
    finally:
        sg.graph.set_threshold(nodes=old.nodes, bytes=old.bytes)


def test_a_million_operations_without_recursion():
    program = """
        import sys
        import sweepgrad as sg

        def run():
            sys.setrecursionlimit(200)
            x = sg.asarray(1.0, requires_grad=True)
            y = x
            for _ in range(1_000_000):
                y = y + 1.0
            y.backward()
            assert x.grad.item() == 1.0
            for _ in range(1_000_000):
                y = y + 1.0
            del y
            y = x
            for _ in range(1_000_000):
                y = y + 1.0
            del y
            sg.sweep()
            assert sg.graph.stats().nodes == 1

        (x := sg.asarray(1.0, requires_grad=True)) + 1.0  # compiled before the limit
        ((x + 1.0) + 1.0).backward()
        del x
        run()
        print("done")
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=200, check=False
    )
    assert (result.stdout, result.stderr) == ("done\n", "")
