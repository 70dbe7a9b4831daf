"""Several threads on one kernel: every chunk once, whoever comes, and no waiting for those who do not."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import types

import numpy as np
import pytest

import sweepgrad as sg
from sweepgrad.kernels import workers
from sweepgrad.kernels.expr import call, reduce, symbol
from sweepgrad.ops.loop import Loop

SIZE = 1 << 18


@pytest.fixture
def threads(monkeypatch):
    """Sets the number of threads for any size, and puts it back."""
    before = sg.get_num_threads()
    monkeypatch.setattr(workers, "PARALLEL", 1)
    yield sg.set_num_threads
    sg.set_num_threads(before)


@pytest.fixture(scope="module")
def loop():
    x = symbol("x")
    double = call("multiply", x, 2.0)
    total = reduce("sum", call("sin", x), "IJ")
    return Loop([double, total], [("x", "v", "float64")], "float64", [("v", "float64"), ("s", "float64")])


@pytest.fixture(scope="module")
def data():
    return np.random.default_rng(0).standard_normal(SIZE + 123)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_element_once_and_the_same_sum_for_any_number_of_threads(loop, data, threads, count):
    threads(1)
    _, (alone,) = loop.over([data], data.size)
    threads(count)
    for _ in range(5):
        doubled, (total,) = loop.over([data], data.size)
        np.testing.assert_array_equal(doubled, 2 * data)
        assert total == alone
    np.testing.assert_allclose(alone, np.sin(data).sum(), rtol=1e-12)


def test_helpers_that_never_come_are_not_waited_for(loop, data, threads, monkeypatch):
    threads(4)
    monkeypatch.setattr(workers._Team, "call", lambda self, job, count: None)
    doubled, _ = loop.over([data], data.size)
    np.testing.assert_array_equal(doubled, 2 * data)


@pytest.mark.parametrize(("where", "error"), [("start", RuntimeError), ("start", MemoryError), ("put", MemoryError)])
def test_helpers_that_cannot_be_had_are_done_without(loop, data, threads, monkeypatch, where, error):
    def refuse(*args, **options):
        raise error

    team = workers._Team()
    monkeypatch.setitem(workers._state, "team", team)
    if where == "start":
        monkeypatch.setattr(threading, "Thread", refuse)
    else:
        monkeypatch.setattr(team, "jobs", types.SimpleNamespace(get=team.jobs.get, put=refuse))
    threads(4)
    doubled, _ = loop.over([data], data.size)
    np.testing.assert_array_equal(doubled, 2 * data)
    assert not team.lock.locked()


def test_helpers_that_come_when_all_is_done_find_nothing_and_hold_nothing(loop, data, threads, monkeypatch):
    threads(3)
    late = []
    monkeypatch.setattr(workers._Team, "call", lambda self, job, count: late.extend([job] * count))
    doubled, _ = loop.over([data], data.size)
    assert late == [[], []]
    team = workers._Team()
    for job in late:
        team.jobs.put(job)
    done = threading.Event()
    team.jobs.put([done.set, ()])
    thread = threading.Thread(target=team._help, daemon=True)
    thread.start()
    assert done.wait(60)
    np.testing.assert_array_equal(doubled, 2 * data)


@pytest.mark.timeout(120)
def test_many_threads_call_kernels_at_once(loop, data, threads):
    threads(3)
    _, (right,) = loop.over([data], data.size)
    wrong = []

    def work():
        for _ in range(20):
            doubled, (total,) = loop.over([data], data.size)
            if total != right or not np.array_equal(doubled, 2 * data):
                wrong.append(total)

    pool = [threading.Thread(target=work) for _ in range(6)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.timeout(120)
def test_forked_children_have_helpers_of_their_own(loop, data, threads):
    threads(2)
    loop.over([data], data.size)
    children = []
    for _ in range(5):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(60)
                doubled, _ = loop.over([data], data.size)
                helpers = [t for t in threading.enumerate() if t.name.startswith("sweepgrad-")]
                status = 0 if np.array_equal(doubled, 2 * data) and len(helpers) == 1 else 2
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 5


def test_exit_while_helpers_wait_is_quiet():
    code = """
        import numpy as np, sweepgrad as sg
        sg.set_num_threads(3)
        x = sg.asarray(np.ones(1 << 20), requires_grad=True)
        sg.sum(sg.exp(x)).backward()
        print(x.grad.numpy()[0])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2.71828")


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2", None])
def test_set_num_threads_refuses(bad):
    with pytest.raises(ValueError, match="set_num_threads"):
        sg.set_num_threads(bad)


@pytest.mark.parametrize(("text", "count"), [("1", 1), (" 3 ", 3), ("", len(os.sched_getaffinity(0)))])
def test_the_environment_sets_the_number(text, count, monkeypatch):
    monkeypatch.setenv("SWEEPGRAD_NUM_THREADS", text)
    monkeypatch.setitem(workers._state, "threads", None)
    assert sg.get_num_threads() == count


@pytest.mark.parametrize("text", ["0", "-2", "many", "1.5", "²"])
def test_the_environment_is_checked(text, monkeypatch):
    monkeypatch.setenv("SWEEPGRAD_NUM_THREADS", text)
    monkeypatch.setitem(workers._state, "threads", None)
    with pytest.raises(ValueError, match="SWEEPGRAD_NUM_THREADS"):
        sg.get_num_threads()
