"""Nodes between their birth and their entry in the registry, and what may happen to them meanwhile."""

import threading
from collections import deque

import pytest
from graph_toys import (
    TIMEOUT,
    PlainLock,
    Witness,
    add_hook,
    attach,
    handles_of,
    multiply,
    run_backward,
    run_gradients,
    thread,
    variable,
)

from sweepgrad.errors import GraphConsumedError
from sweepgrad.graph.registry import BATCH, BIG, SETTLE, Registry
from sweepgrad.graph.report import audit, node_infos, stats


@pytest.fixture
def deferred(lock):
    """A registry that enters nodes as late as the process's does, with the scripted lock."""
    made = Registry(lock=lock)
    yield made
    made.callbacks.clear()
    audit(made, handles_of(made))
    while made.sweep().remaining:
        pass
    audit(made, handles_of(made))
    assert not made.nodes
    assert not made.born


def entered(registry):
    return [node.id for node in registry.snapshot()]


# --- when they enter --------------------------------------------------------------------------------------------------


def test_making_a_node_takes_no_lock(unchecked):
    unchecked.lock = PlainLock()
    unchecked.settle_at = SETTLE
    x = variable(unchecked, 2.0)
    with unchecked.lock:
        y = x * x
        z = y * x
    assert [node.id for node in unchecked.born] == [1, 2, 3]
    run_backward(z)
    assert x._grad == 12.0


def test_nodes_enter_together_once_there_are_enough(deferred):
    x = variable(deferred, 2.0)
    live = [x * x for _ in range(SETTLE - 2)]
    assert entered(deferred) == []
    live.append(x * x)
    assert entered(deferred) == list(range(1, SETTLE + 1))
    live.append(x * x)
    assert len(deferred.nodes) == SETTLE


def test_node_that_saves_much_enters_at_once(deferred):
    x = variable(deferred, 2.0)
    y = multiply(x, x, nbytes=BIG - 1)
    assert entered(deferred) == []
    z = multiply(x, y, nbytes=BIG)
    assert entered(deferred) == [1, 2, 3]
    del z


def test_low_threshold_brings_nodes_in_as_early(deferred):
    deferred.set_threshold(nodes=3)
    x = variable(deferred, 2.0)
    sizes = []
    for _ in range(12):
        x * x
        sizes.append(len(deferred.nodes) + len(deferred.born))
    assert max(sizes) <= 3 + 3 + 1
    deferred.set_threshold(nodes=10 * SETTLE)
    assert deferred.settle_at == SETTLE


def test_thresholds_are_looked_at_although_another_thread_enters_the_nodes(deferred):
    deferred.set_threshold(nodes=10)
    x = variable(deferred, 2.0)
    for _ in range(50):
        x * x
        deferred.settle()
    assert len(deferred.nodes) <= 1 + 10 + 10


@pytest.mark.parametrize(
    "ask",
    [
        stats,
        node_infos,
        lambda registry: registry.sweep(),
        lambda registry: registry.settle(),
        lambda registry: audit(registry, handles_of(registry)),
    ],
    ids=["stats", "nodes", "sweep", "settle", "audit"],
)
def test_whoever_asks_sees_them_entered(deferred, ask):
    x = variable(deferred, 2.0)
    y = x * x
    assert entered(deferred) == []
    ask(deferred)
    assert entered(deferred) == [1, 2]
    assert x.node.children is y.node
    found = stats(deferred)
    assert (found.variables, found.childless, found.registered, found.peak) == (1, 1, 2, 2)


def test_entering_holds_the_lock_for_a_batch_at_a_time(deferred, lock):
    deferred.settle_at = 10 * BATCH
    x = variable(deferred, 2.0)
    live = [x * x for _ in range(3 * BATCH)]
    sizes = []
    lock.released = lambda: sizes.append(len(deferred.nodes))
    deferred.settle()
    lock.released = int
    assert sizes == [BATCH, 2 * BATCH, 3 * BATCH, 3 * BATCH + 1]
    del live


def test_sweep_brings_in_all_that_was_born_in_batches(deferred):
    deferred.settle_at = 10 * BATCH
    x = variable(deferred, 2.0)
    live = [x * x for _ in range(3 * BATCH)]
    deferred.sweep()
    assert len(deferred.nodes) == len(live) + 1


def test_births_that_another_thread_enters_first_are_entered_once(deferred, lock):
    x = variable(deferred, 2.0)
    y = x * x

    def settle_first():
        lock.waiting = int
        with thread(deferred.settle):
            pass

    lock.waiting = settle_first
    deferred.settle()
    assert entered(deferred) == [1, 2]
    assert deferred.registered == 2
    del y


# --- dropped, consumed or replaced before they enter ------------------------------------------------------------------


def test_node_dropped_before_it_enters_is_swept(deferred):
    x = variable(deferred, 2.0)
    y = x * x
    y * y
    del y
    assert deferred.sweep().nodes == 2
    assert entered(deferred) == [1]
    assert stats(deferred).registered == 3


def test_node_consumed_before_it_enters_never_does(deferred):
    x = variable(deferred, 2.0)
    y = x * x
    z = y * x
    run_backward(z)
    assert x._grad == 12.0
    assert entered(deferred) == [1]
    assert y.node.parents == ()
    found = stats(deferred)
    assert (found.registered, found.consumed, found.saved_bytes) == (3, 2, 0)
    assert x.node.children is None


def test_child_of_a_node_consumed_before_it_entered_is_released(deferred):
    x = variable(deferred, 2.0)
    y = x * x
    z = y * x
    u = z * x
    run_backward(y)
    assert stats(deferred).saved_bytes == 0
    assert entered(deferred) == [1, 3, 4]
    for root in (z, u):
        with pytest.raises(GraphConsumedError, match="was computed from `multiply`"):
            run_backward(root)


def test_orphan_whose_only_child_was_consumed_before_it_entered_goes(deferred):
    x, w = variable(deferred, 2.0), variable(deferred, 3.0)
    inner = w * w
    z = x * inner
    assert run_gradients(z, [x]) == [9.0]  # consumes z alone
    del inner
    deferred.sweep()
    assert entered(deferred) == [1, 2]


def test_root_made_and_kept_through_several_passes_enters(deferred):
    x = variable(deferred, 2.0)
    y = x * x
    run_backward(y, retain_graph=True)
    assert entered(deferred) == [1, 2]
    run_backward(y)
    assert entered(deferred) == [1]
    assert x._grad == 8.0


def test_hooks_of_a_node_consumed_before_it_entered_die_outside_the_lock(deferred, lock):
    seen = []
    x = variable(deferred, 2.0)
    y = x * x
    witness = Witness(lock, seen)
    add_hook(y, lambda ct, witness=witness: None)
    run_backward(y)
    del y, witness
    deferred.sweep()
    assert seen == [False]


def test_second_handle_on_a_node_that_has_not_entered_keeps_it(deferred):
    x = variable(deferred, 2.0)
    y = x * x
    again = attach(deferred, y.node, y.v)
    del y
    assert deferred.sweep().nodes == 0
    run_backward(again)
    assert x._grad == 4.0


# --- births and drops while a sweep waits for the lock ----------------------------------------------------------------


def late_to_the_lock(registry, lock, action):
    """A sweep that has counted its drops when another one takes them, and `action` makes and drops others."""

    def meanwhile():
        lock.waiting = int
        with thread(registry.sweep):
            pass
        action()

    stats(registry)  # nothing is born and waiting when the sweep looks
    lock.waiting = meanwhile
    return registry.sweep()


def test_sweep_that_finds_later_drops_than_it_counted_takes_no_parent_from_a_newborn(deferred, lock):
    x = variable(deferred, 2.0)
    handles = [x * x]
    x * x

    def compute():
        handles.append(handles.pop() * x)  # the child is in `born`, and its parent's drop where the sweep will look

    late_to_the_lock(deferred, lock, compute)
    run_backward(handles[0])
    assert x._grad == 12.0


def test_sweep_that_finds_later_drops_than_it_counted_loses_no_newborn(deferred, lock):
    x = variable(deferred, 2.0)
    x * x
    late_to_the_lock(deferred, lock, lambda: x * x)
    deferred.sweep()
    assert entered(deferred) == [1]


def test_drops_that_come_after_the_births_were_counted_wait_for_the_next_batch(deferred, lock):
    class Born(deque):
        then = None

        def __len__(self):
            count = super().__len__()
            then, self.then = self.then, None
            if then is not None:
                then()
            return count

    deferred.born = Born()
    x = variable(deferred, 2.0)
    handles = [x * x]
    x * x

    def compute():
        handles.append(handles.pop() * x)

    late_to_the_lock(deferred, lock, lambda: setattr(deferred.born, "then", compute))
    run_backward(handles[0])
    assert x._grad == 12.0


def test_drops_wait_until_all_that_was_born_before_them_has_entered(deferred, lock):
    deferred.settle_at = 10 * BATCH
    x = variable(deferred, 2.0)
    y = x * x
    live = [x * x for _ in range(2 * BATCH)]
    live.append(y * x)
    del y  # the first drop, whose node has a child that only the third batch enters
    deferred.sweep()
    run_backward(live[-1])
    assert x._grad == 12.0


def test_pass_removes_what_it_consumed_though_another_thread_is_in_a_sweep(deferred, lock):
    x = variable(deferred, 2.0)
    y = x * x
    stats(deferred)
    inside, waits = threading.Event(), threading.Event()

    def other():
        with lock:
            deferred.busy = True  # as during a batch
            inside.set()
            assert waits.wait(TIMEOUT)
            deferred.busy = False

    def after_commit():
        lock.released = int
        worker.start()
        assert inside.wait(TIMEOUT)
        lock.waiting = waits.set

    worker = threading.Thread(target=other, daemon=True)
    lock.released = after_commit
    run_backward(y)
    lock.waiting = int
    waits.set()
    worker.join(TIMEOUT)
    assert entered(deferred) == [1]


# --- finalisers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["settle", "sweep", "pass"])
def test_finaliser_within_a_batch_leaves_the_work_to_it(deferred, lock, step):
    """As the collector could run it: on the thread that is in the batch, which `busy` tells."""
    x = variable(deferred, 2.0)
    y, z = x * x, x * x
    x * x
    with lock:
        deferred.busy = True
        if step == "settle":
            deferred.settle()
        elif step == "sweep":
            assert deferred.sweep().nodes == 0
        else:
            run_backward(z)
            assert x._grad == 4.0
        assert entered(deferred) == []
        deferred.busy = False
    del z
    run_backward(y)
    deferred.sweep()
    assert entered(deferred) == [1]
    assert stats(deferred).consumed == (2 if step == "pass" else 1)


def test_pass_of_a_finaliser_that_consumes_a_node_which_is_being_entered(deferred):
    """As the collector could run it: in the midst of an entry, which then goes on with the consumed node."""

    class Piece(dict):
        then = None

        def __setitem__(self, number, node):
            then, self.then = self.then, None
            if then is not None:
                then()
            super().__setitem__(number, node)

    piece = deferred.nodes.pieces[0] = Piece()
    x = variable(deferred, 2.0)
    deferred.settle()
    y = x * x
    piece.then = lambda: run_backward(y)
    deferred.settle()
    assert x._grad == 4.0
    deferred.sweep()
    assert entered(deferred) == [1]
    assert stats(deferred).consumed == 1


def test_hooks_of_a_node_that_never_enters_die_without_the_lock(deferred, lock):
    class Hook:
        def __call__(self, ct):
            return ct

        def __del__(self):
            owned.append(lock._is_owned())

    owned = []
    x = variable(deferred, 2.0)
    y = x * x
    add_hook(y, Hook())
    run_backward(y)
    del y
    deferred.settle()
    deferred.sweep()
    assert owned == [False]
