"""Passes, sweeps and registrations on several threads, in schedules that a rule, a sum or the lock dictates."""

import itertools
import threading
from contextlib import ExitStack, contextmanager

import pytest
from graph_toys import (
    MULTIPLY,
    TIMEOUT,
    Handle,
    add_hook,
    chain_of,
    handles_of,
    passing,
    retain_grad,
    run_backward,
    run_gradients,
    thread,
    variable,
)

from sweepgrad.errors import GraphConsumedError
from sweepgrad.graph import backward as backward_module
from sweepgrad.graph import registry as registry_module
from sweepgrad.graph.node import Node
from sweepgrad.graph.registry import BATCH
from sweepgrad.graph.report import audit, stats


def elsewhere(function, *args):
    """Run `function` to its end on another thread."""
    with thread(function, *args):
        pass


def once(function, *args):
    """A function that calls `function` when it is first called, on another thread."""
    calls = [function]

    def action(*_):
        if calls:
            elsewhere(calls.pop(), *args)

    return action


# --- two passes -------------------------------------------------------------------------------------------------------


def test_node_that_another_pass_consumes_before_this_one_reaches_it(registry):
    x, w = variable(registry, 2.0), variable(registry, 3.0)
    shared = x * x
    other = shared * w
    root = passing(shared, once(run_backward, other))
    with pytest.raises(GraphConsumedError, match=rf"`multiply` \(node {shared.node.id}\) was consumed by an earlier"):
        run_backward(root)
    assert (x._grad, w._grad) == (12.0, 4.0)  # what the other pass gave


def test_node_that_another_pass_consumes_after_this_one_used_it(registry):
    x = variable(registry, 2.0)
    calls = []
    root = passing(x, once(lambda: run_backward(calls.pop()))) * x
    calls.append(root)
    with pytest.raises(GraphConsumedError, match=rf"`multiply` \(node {root.node.id}\)"):
        run_backward(root)
    assert x._grad == 4.0


def test_node_that_another_pass_consumes_while_this_one_retains(registry):
    x, w = variable(registry, 2.0), variable(registry, 3.0)
    shared = x * w
    root = passing(shared, int)
    add_hook(w, once(run_backward, shared))
    retain_grad(root)
    with pytest.raises(GraphConsumedError):
        run_backward(root, retain_graph=True)
    assert (x._grad, w._grad, root._grad) == (3.0, 2.0, None)


def test_pass_for_given_targets_notices_too(registry):
    x, w = variable(registry, 2.0), variable(registry, 3.0)
    shared = x * w
    add_hook(w, once(run_backward, shared))
    with pytest.raises(GraphConsumedError):
        run_gradients(passing(shared, int), [x, w])
    assert (x._grad, w._grad) == (3.0, 2.0)


def test_node_consumed_while_it_waits_to_be_released_is_counted_once(registry, monkeypatch):
    """For given targets, a pass does not mind that another one consumed a node that leads to none of them."""
    x, w = variable(registry, 2.0), variable(registry, 3.0)
    shared = x * x
    root = shared * w

    def interrupt(phase, info):
        raise KeyboardInterrupt  # after the other pass removed `shared`, before it releases `root`

    def other(ct):
        registry.callbacks.append(interrupt)
        monkeypatch.setattr(registry_module, "BATCH", 1)
        with pytest.raises(KeyboardInterrupt):
            run_gradients(shared, [x])
        registry.callbacks.clear()
        assert registry.stranded == [root.node]

    add_hook(w, other)
    assert run_gradients(root, [w]) == [4.0]
    assert (stats(registry).nodes, stats(registry).consumed) == (2, 2)


def test_passes_that_retain_do_not_disturb_each_other(registry):
    x, w = variable(registry, 2.0), variable(registry, 3.0)
    shared = x * w
    other = shared * shared
    root = passing(shared, once(lambda: run_backward(other, retain_graph=True)))
    run_backward(root, retain_graph=True)
    assert (x._grad, w._grad) == (3.0 + 36.0, 2.0 + 24.0)


class Slow(float):
    """A gradient whose sum with another one takes so long that `meanwhile` happens first."""

    def __new__(cls, v, meanwhile):
        made = super().__new__(cls, v)
        made.meanwhile = meanwhile
        return made

    def __add__(self, other):
        self.meanwhile()
        return float(self) + float(other)


def test_gradient_that_another_pass_changes_before_the_commit_is_not_lost(registry):
    x = variable(registry, 2.0)
    y, z = x * x, x * x
    x._grad = Slow(100.0, once(run_backward, z))
    run_backward(y)
    assert x._grad == 108.0


def test_gradient_that_is_reset_before_the_commit_stays_reset(registry):
    x = variable(registry, 2.0)
    y = x * x

    x._grad = Slow(100.0, once(registry.set_gradients, [x], None))
    run_backward(y)
    assert x._grad == 4.0


def test_retried_commit_still_notices_a_consumed_node(registry):
    x = variable(registry, 2.0)
    y = x * x
    second = Slow(10.0, once(run_backward, y))
    x._grad = Slow(100.0, once(registry.set_gradients, [x], second))
    with pytest.raises(GraphConsumedError):
        run_backward(y)
    assert x._grad == 14.0


@contextmanager
def paused(lock, releases, function, *args):
    """Run `function` on a thread up to its release number `releases` of the lock, and to its end after the block."""
    ident, reached, go_on = [], threading.Event(), threading.Event()
    counter = itertools.count(1)

    def run():
        ident.append(threading.get_ident())
        function(*args)

    def released():
        if ident == [threading.get_ident()] and next(counter) == releases:
            reached.set()
            assert go_on.wait(TIMEOUT)

    lock.released = released
    with thread(run):
        assert reached.wait(TIMEOUT)
        try:
            yield
        finally:
            go_on.set()


@contextmanager
def halfway(registry, lock):
    """A root, and how another pass removes a node below it, just before it tells the descendants.

    The root also leads to a dead variable: so not all is wanted, and the pass reads the edges twice.
    """
    x, dead = variable(registry, 2.0), variable(registry, 3.0)
    shared = x * x
    root = shared * dead + passing(x, int)
    del dead
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(registry_module, "BATCH", 1)
        yield x, root, lambda: stack.enter_context(paused(lock, 2, run_backward, shared))
    assert x._grad == 4.0


def test_node_that_loses_its_edges_before_they_are_read_again_is_noticed(locked, lock):
    with halfway(locked, lock) as (x, root, consume):
        locked.extra(root.node).owner = consume  # the pass asks for it between its two readings
        with pytest.raises(GraphConsumedError):
            run_backward(root)
        assert x._grad == 4.0
        locked.extra(root.node).owner = lambda: None


def test_node_that_loses_its_edges_while_the_targets_are_read_is_noticed(locked, lock):
    with halfway(locked, lock) as (x, root, consume):

        def targets():
            consume()
            yield x.node

        with pytest.raises(GraphConsumedError):
            backward_module.gradients(locked, root.node, 1.0, targets())


class Watched(Node):
    """A node that acts when its saved values are read."""

    __slots__ = ("_saved", "read")

    @property
    def saved(self):
        saved = self._saved
        self.read()
        return saved

    @saved.setter
    def saved(self, value):
        self._saved = value


@pytest.mark.parametrize("reading", [1, 2])
def test_node_consumed_right_after_a_reading_of_its_saved_values(locked, lock, reading):
    x = variable(locked, 2.0)
    node = Watched.__new__(Watched)
    node.read = int
    node.__init__(MULTIPLY, (2.0, 2.0), (x.node, x.node))
    y = Handle(locked, node, 4.0)
    locked.register(node)
    readings = itertools.count(1)

    def read():
        if not lock.held() and next(readings) == reading:
            node.read = int
            elsewhere(run_backward, y)

    root = passing(y, int)
    node.read = read
    with pytest.raises(GraphConsumedError, match=r"`multiply`.* an earlier backward pass"):
        run_backward(root)
    node.read = int
    assert x._grad == 4.0


class Paused:
    """An owner of which reading the gradient waits until another thread has done something."""

    def __init__(self, node):
        self.node, self.value, self.read = node, None, int

    @property
    def _grad(self):
        self.read()
        return self.value

    @_grad.setter
    def _grad(self, value):
        self.value = value


def test_gradients_that_are_reset_together_are_added_to_together_or_not_at_all(registry):
    """The other pass begins while this thread is half-way through what it sets."""
    xs = [variable(registry, 2.0), variable(registry, 3.0)]
    run_backward(xs[0] * xs[1])
    again = xs[0] * xs[1]
    owners = [Paused(x.node) for x in xs]
    for owner, x in zip(owners, xs, strict=True):
        owner.value = x._grad
        registry.extra(x.node).owner = lambda owner=owner: owner
    owners[1].read = once(run_backward, again)  # read while the set is made ready
    registry.set_gradients(owners, None)
    found = [owner.value for owner in owners]
    assert found in ([None, None], [3.0, 2.0])


def test_batches_between_two_pieces_of_a_pass_sweep_nothing_of_it(locked, lock):
    x = variable(locked, 1.0)
    root = chain_of(x, 8 * BATCH)
    locked.sweep()
    between = []

    def released():
        if locked.decided is not None and locked.decided.done:
            lock.released = int
            for _ in range(3):
                elsewhere(locked._batch, BATCH, 0)
            between.append(True)
            lock.released = released

    lock.released = released
    run_backward(root)
    lock.released = int
    assert between
    found = stats(locked)
    assert (found.nodes, found.consumed, found.swept) == (1, 8 * BATCH, 0)
    audit(locked, handles_of(locked))


def test_node_released_between_the_check_and_the_decision_is_counted_once(registry):
    """For given targets a pass does not mind that another one consumed a node that leads to none of them."""
    x, w = variable(registry, 2.0), variable(registry, 3.0)
    shared = w * w
    root = (shared * x) * x
    decide = registry._decide

    def second(one, version):
        registry._decide = decide
        elsewhere(run_gradients, shared, [w])
        assert registry.swept == 1
        registry.version = version  # as if that pass had been decided before this one looked, and retired after
        return decide(one, version)

    def first(one, version):
        registry._decide = second
        return False

    registry._decide = first
    assert run_gradients(root, [x]) == [36.0]
    assert registry._decide is decide
    audit(registry, handles_of(registry))
    del registry._decide


def test_small_passes_do_not_hold_a_large_one_up(locked, lock):
    """Another pass is decided whenever this one has looked at its nodes, as long as it does so without the lock."""
    x, w = variable(locked, 2.0), variable(locked, 3.0)
    root = chain_of(x, 10)
    check, rounds = locked.check, []

    def checked(order):
        check(order)
        if order[0] is root.node:
            rounds.append(lock.held())
            if not lock.held():
                elsewhere(lambda: run_backward(w * w))

    locked.check = checked
    run_backward(root)
    assert rounds == [False] * 4 + [True]
    assert x._grad == 11 * 2.0**10
    assert w._grad == 4 * 6.0
    del locked.check


# --- passes and sweeps ------------------------------------------------------------------------------------------------


def test_sweep_in_the_middle_of_a_pass_takes_nothing_from_it(registry):
    x, w = variable(registry, 2.0), variable(registry, 3.0)
    y = passing(x * w, once(registry.sweep))
    z = y * x
    del y
    run_backward(z)
    assert (x._grad, w._grad) == (12.0, 4.0)


def test_sweep_at_every_release_of_the_lock_takes_nothing_from_what_is_being_built(locked, lock):
    sweeping = []

    def sweep():
        if not sweeping:
            sweeping.append(True)
            locked.sweep()
            sweeping.pop()

    lock.released = sweep
    x, w = variable(locked, 2.0), variable(locked, 3.0)
    y = chain_of(x, 3) * w
    add_hook(y, lambda ct: ct)
    x * w
    run_backward(y)
    lock.released = int
    assert (x._grad, w._grad) == (4 * 8.0 * 3.0, 16.0)
    assert stats(locked).nodes == 2


def test_sweeps_on_two_threads_share_the_work(locked, lock):
    x = variable(locked, 1.0)
    for _ in range(2000):
        x * x
    removed = []

    def other():
        lock.released = int
        elsewhere(lambda: removed.append(locked.sweep(max_nodes=500).nodes))

    lock.released = other
    removed.append(locked.sweep().nodes)
    assert removed[0] == 500
    assert sum(removed) == 2000
    audit(locked, handles_of(locked))


def test_node_registered_while_its_parent_is_consumed_is_unavailable(locked, lock):
    x = variable(locked, 2.0)
    y = x * x
    late = []

    def compute():
        lock.released = int
        elsewhere(lambda: late.append(y * x))
        lock.released = compute

    lock.released = compute  # so after the commit, and after the removal
    run_backward(y)
    lock.released = int
    assert len(late) >= 2
    locked.sweep()
    assert stats(locked).saved_bytes == 0
    for z in late:
        with pytest.raises(GraphConsumedError):
            run_backward(z)
    assert x._grad == 4.0


# --- many threads at once ---------------------------------------------------------------------------------------------


def test_threads_that_compute_and_sweep_together_get_their_own_gradients(registry):
    registry.set_threshold(nodes=20)
    shared = variable(registry, 2.0)
    start = threading.Barrier(4)
    results = []

    def work():
        start.wait(TIMEOUT)
        for _ in range(30):
            x = variable(registry, 3.0)
            y = x * shared
            z = y * y
            x * y
            run_backward(z)
            results.append(x._grad)

    def sweep():
        start.wait(TIMEOUT)
        for _ in range(100):
            registry.sweep(max_nodes=3)

    with thread(work), thread(work), thread(work), thread(sweep):
        pass
    assert results == [2 * 6.0 * 2.0] * 90
    assert shared._grad == 90 * 2 * 6.0 * 3.0
    audit(registry, handles_of(registry))
