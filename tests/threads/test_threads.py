"""Threads that build, run backward and sweep. A sweep at each release of the registry's lock makes the races happen."""

import gc
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

    def _is_owned(self):
        return self.lock._is_owned()


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


def runs(root, **options):
    """1.0 if a backward pass from `root` ran, 0.0 if it said that another had consumed what it needs."""
    try:
        root.backward(**options)
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


# --- large temporaries ------------------------------------------------------------------------------------------------

LARGE = 40_000
"""Elements whose 320 kB the pool lends: a block taken back too early would be another result's by then."""


def test_large_temporaries_keep_their_elements_while_others_sweep(registry):
    """Nothing but the graph holds what backward reads; every block that comes back is written to at once."""
    done = threading.Event()
    before = sg.pool.stats()

    def build(seed):
        rng = np.random.default_rng(seed)
        cases = []
        for _ in range(3):
            values = rng.uniform(0.5, 1.5, LARGE)
            cases.append((values, np.exp(2 * values) * (2 * np.sin(values) + np.cos(values)) - np.sin(values)))
        for k in range(12):
            values, expected = cases[k % 3]
            x = sg.asarray(values, requires_grad=True)
            sg.exp(x)  # dropped at once
            y = sg.exp(x * 2.0) * sg.sin(x)
            sg.sum(y + sg.cos(x) + 1.0).backward()
            del y
            np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-12)

    def sweep():
        while not done.is_set():
            sg.sweep()
            sg.full((LARGE,), np.nan) * 1.0

    def sweep_in_steps():
        while not done.is_set():
            sg.sweep(max_nodes=1)
            sg.pool.empty()

    build(9)  # compiles the kernels, which would take long beside the others
    sweepers = [threading.Thread(target=target) for target in (sweep, sweep_in_steps)]
    for thread in sweepers:
        thread.start()
    try:
        together(*(partial(build, seed) for seed in range(3)))
    finally:
        done.set()
        for thread in sweepers:
            thread.join(TIMEOUT)
    assert not any(thread.is_alive() for thread in sweepers)
    assert sg.pool.stats().hits > before.hits + 50


# --- passes that meet -------------------------------------------------------------------------------------------------


def total(seen, k):
    """What variable k's gradient is, as a number."""
    return 0.0 if seen[k].grad is None else seen[k].grad.numpy()


@pytest.mark.parametrize("retain", [True, False, "some"])
def test_passes_over_a_shared_trunk(registry, retain):
    """Four heads on one trunk, each with a variable of its own: a pass adds all of its gradients, or none."""
    count = 4
    before = sg.graph.stats()
    operations = consumed = 0
    for turn in range(25):
        w, b = sg.asarray([1.0, 2.0], requires_grad=True), sg.asarray([3.0, 4.0], requires_grad=True)
        trunk = w * b + w
        own = [sg.asarray([1.0, 1.0], requires_grad=True) for _ in range(count)]
        roots = [sg.sum((trunk * trunk + own[k]) * float(k + 1)) for k in range(count)]
        keeps = [retain is True or (retain == "some" and (k + turn) % 2 == 0) for k in range(count)]
        ran = together(*(partial(runs, root, retain_graph=keep) for root, keep in zip(roots, keeps, strict=True)))
        operations += 2 + 4 * count
        finishing = [k for k in range(count) if ran[k] and not keeps[k]]
        assert len(finishing) == (retain is not True)  # the first to commit has the trunk, and no other
        assert retain is not True or all(ran)
        consumed += 6 * len(finishing)
        scale = sum((k + 1) * ran[k] for k in range(count))
        at = np.array([4.0, 10.0])  # w * b + w
        np.testing.assert_array_equal(total([w], 0), scale * 2 * at * [4.0, 5.0])
        np.testing.assert_array_equal(total([b], 0), scale * 2 * at * [1.0, 2.0])
        for k in range(count):
            np.testing.assert_array_equal(total(own, k), (k + 1) * ran[k] * np.ones(2) if ran[k] else 0.0)
    del w, b, trunk, own, roots
    gc.collect()  # the exceptions' frames
    sg.sweep()
    stats = sg.graph.stats()
    assert stats.nodes == before.nodes
    assert stats.consumed - before.consumed == consumed
    assert stats.registered - before.registered == operations + 25 * (2 + count)
    assert stats.registered == stats.nodes + stats.consumed + stats.swept


@pytest.mark.parametrize("past_the_trunk", [False, True])
def test_a_pass_that_finds_a_node_consumed_on_its_way_changes_nothing(registry, past_the_trunk):
    """Another pass consumes the trunk while this one is still in its own part, or has gone through the trunk."""
    x, own = (sg.asarray([1.0, 2.0], requires_grad=True) for _ in range(2))
    trunk = x * x
    head = trunk * own
    root, other = sg.sum(head), sg.sum(trunk * 3.0)
    on_the_way, go_on = threading.Event(), threading.Event()
    first = iter([True])

    def wait(ct):
        if next(first, False):
            on_the_way.set()
            assert go_on.wait(TIMEOUT)

    (x if past_the_trunk else head).register_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(root.backward)
        assert on_the_way.wait(TIMEOUT)
        other.backward()
        go_on.set()
        with pytest.raises(sg.GraphConsumedError):
            slow.result(TIMEOUT)
    np.testing.assert_array_equal(x.grad.numpy(), 6.0 * np.array([1.0, 2.0]))
    assert own.grad is None


def test_gradients_that_another_pass_changes_meanwhile_add_up(registry):
    """Two passes over graphs of their own meet in one variable: the sum holds both, whoever is first to set it."""
    x = sg.asarray([1.0, 2.0], requires_grad=True)
    rounds = 200

    def add(factor):
        for _ in range(rounds):
            sg.sum(x * factor).backward()

    together(*(partial(add, float(k)) for k in range(1, 5)))
    np.testing.assert_array_equal(x.grad.numpy(), np.full(2, rounds * (1.0 + 2.0 + 3.0 + 4.0)))


def test_higher_order_passes_at_the_same_time(registry):
    """Gradients that are tracked themselves, of graphs that share their trunk."""
    x = sg.asarray([1.0, 2.0], requires_grad=True)
    trunk = x * x * x

    def curvature(factor):
        def value(t):
            return sg.sum(t * t * t * factor)

        (sg.sum(trunk) * factor).backward(retain_graph=True)
        return sg.grad(lambda t: sg.sum(sg.grad(value)(t)))(x.detach()).numpy()

    found = together(*(partial(curvature, float(k)) for k in range(1, 5)))
    for k, one in enumerate(found, 1):
        np.testing.assert_allclose(one, 6.0 * k * np.array([1.0, 2.0]), rtol=1e-14)
    np.testing.assert_array_equal(x.grad.numpy(), 10.0 * 3.0 * np.array([1.0, 4.0]))
