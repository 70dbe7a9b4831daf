"""Threads that build, run backward and sweep. A sweep at each release of the registry's lock makes the races happen."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

import sweepgrad as sg
from sweepgrad.graph import process

TIMEOUT = 120


class SweepingLock:
    """The registry's lock, which sweeps whenever it is let go."""

    def __init__(self, lock, registry):
        self.lock = lock
        self.registry = registry
        self.inside = threading.local()

    def __enter__(self):
        self.lock.acquire()

    def __exit__(self, *exception):
        self.lock.release()
        if not getattr(self.inside, "now", False):
            self.inside.now = True
            try:
                self.registry.sweep()
            finally:
                self.inside.now = False

    def acquire(self, *args, **kwargs):
        return self.lock.acquire(*args, **kwargs)

    def release(self):
        self.lock.release()


@pytest.fixture(params=["sweeps at each release", "plain"])
def registry(request, monkeypatch):
    registry = process.registry
    sg.sweep(collect_cycles=True)
    before = sg.graph.stats().nodes
    if request.param != "plain":
        monkeypatch.setattr(registry, "settle_at", 1)
        monkeypatch.setattr(registry, "lock", SweepingLock(registry.lock, registry))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield registry
    sys.setswitchinterval(interval)
    monkeypatch.undo()
    sg.sweep(collect_cycles=True)
    assert sg.graph.stats().nodes == before
    sg.graph.audit()


def together(*functions):
    """Run the functions at the same time, each on a thread of its own; what they return or raise."""
    barrier = threading.Barrier(len(functions))

    def run(function):
        barrier.wait(TIMEOUT)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(TIMEOUT) for future in [pool.submit(run, function) for function in functions]]


def test_no_gradient_is_lost_while_others_sweep(registry):
    """Temporaries are dropped while the operation that uses them is still under construction."""
    done = threading.Event()
    rounds = 60

    def build(seed):
        values = np.random.default_rng(seed).uniform(0.5, 1.5, (8, 5))
        for _ in range(rounds):
            x = sg.asarray(values, requires_grad=True)
            sg.sum(sg.exp(x * 2.0) * sg.sin(x) + sg.sum(x, axis=0)).backward()
            expected = np.exp(2 * values) * (2 * np.sin(values) + np.cos(values)) + 8
            np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-12)

    def sweep():
        while not done.is_set():
            sg.sweep()
            sg.graph.nodes()

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        together(*(lambda seed=seed: build(seed) for seed in range(3)))
    finally:
        done.set()
        sweeper.join(TIMEOUT)
    assert not sweeper.is_alive()


def runs(root):
    """1.0 if a backward pass from `root` ran, 0.0 if it said that another had consumed what it needs."""
    try:
        root.backward()
    except sg.GraphConsumedError:
        return 0.0
    return 1.0


def test_passes_over_shared_nodes_add_up_or_say_that_they_cannot(registry):
    """Two graphs share `y`: a variable gets both gradients, or one pass finds `y` consumed and adds nothing."""
    for _ in range(40):
        x = sg.asarray([1.0, 2.0], requires_grad=True)
        y = x * x
        roots = [sg.sum(y * 3.0), sg.sum(y * 5.0)]
        ran = together(*(partial(runs, root) for root in roots))
        assert 1.0 in ran
        np.testing.assert_array_equal(x.grad.numpy(), (3.0 * ran[0] + 5.0 * ran[1]) * 2.0 * np.array([1.0, 2.0]))


def test_retaining_passes_on_shared_nodes_add_up(registry):
    x = sg.asarray([1.0, 2.0], requires_grad=True)
    y = x * x
    roots = [sg.sum(y * float(k)) for k in range(4)]
    for _ in range(10):
        together(*(lambda root=root: root.backward(retain_graph=True) for root in roots))
    np.testing.assert_array_equal(x.grad.numpy(), 10 * (0 + 1 + 2 + 3) * 2.0 * np.array([1.0, 2.0]))


def test_grad_mode_is_each_threads_own(registry):
    x = sg.ones((2,), requires_grad=True)
    inside = threading.Event()
    checked = threading.Event()

    def without():
        with sg.no_grad():
            inside.set()
            assert checked.wait(TIMEOUT)
            return (x * 2.0).requires_grad

    def with_grad():
        assert inside.wait(TIMEOUT)
        try:
            return (x * 2.0).requires_grad
        finally:
            checked.set()

    assert together(without, with_grad) == [False, True]


def test_statistics_and_snapshots_at_any_moment(registry):
    done = threading.Event()

    def look():
        while not done.is_set():
            stats = sg.graph.stats()
            assert stats.nodes >= stats.variables
            assert stats.nodes >= stats.childless
            assert stats.registered == stats.nodes + stats.consumed + stats.swept
            assert all(node.id for node in sg.graph.nodes())

    def work():
        try:
            for _ in range(100):
                x = sg.ones((3,), requires_grad=True)
                (x * x).sum().backward()
                x + 1.0
        finally:
            done.set()

    together(look, work)


def test_first_calls_from_many_threads_compile_once_and_agree(registry):
    """Kernels that nobody has compiled yet, wanted by four threads at once."""
    values = np.linspace(0.1, 0.9, 7, dtype=np.float32)

    def run():
        x = sg.asarray(values, requires_grad=True)
        sg.sum(sg.acosh(sg.erfc(x) + 1.5)).backward()
        return x.grad.numpy()

    results = together(run, run, run, run)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
