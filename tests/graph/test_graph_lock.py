"""What runs while the registry's lock is held: nothing of the user's, and no death of a saved value."""

import gc
import itertools
from collections import Counter

import pytest
from graph_toys import (
    NBYTES,
    PlainLock,
    Rule,
    ScriptedLock,
    Witness,
    add_hook,
    chain_of,
    multiply,
    passing,
    record,
    run_backward,
    run_gradients,
    thread,
    variable,
)

from sweepgrad.errors import GraphConsumedError
from sweepgrad.graph.registry import BATCH, SETTLE, Registry
from sweepgrad.graph.report import audit, node_infos, stats


@pytest.fixture
def seen():
    """Whether the lock was held, noted by each witness that died and each function that ran."""
    return []


def holding(x, seen):
    """An operation on `x` that saved a witness."""
    return record(Rule("holding", lambda ct: (ct,)), x.v, (Witness(x.registry.lock, seen),), x)


def test_scripted_lock_knows_its_holder(lock):
    seen = []
    note = lambda: seen.append(lock.held())  # noqa: E731
    note()
    with lock:
        with lock:
            note()
            with thread(note):
                pass
        note()
    note()
    assert seen == [False, True, False, True, False]


# --- saved values die outside it --------------------------------------------------------------------------------------


def test_saved_values_of_swept_nodes_die_outside_the_lock(locked, seen):
    x = variable(locked, 1.0)
    for _ in range(2 * BATCH):
        holding(x, seen)
    assert not seen
    locked.sweep()
    assert seen == [False] * (2 * BATCH)


def test_saved_values_of_consumed_nodes_die_outside_the_lock(locked, seen):
    x = variable(locked, 1.0)
    y = holding(holding(x, seen), seen)
    run_backward(y)
    assert seen == [False, False]


def test_saved_values_of_released_nodes_die_outside_the_lock(locked, seen):
    x = variable(locked, 1.0)
    y = x * x
    late = [holding(y, seen), holding(holding(y, seen), seen)]
    run_backward(y)
    assert seen == [False] * 3
    late.append(holding(y, seen))
    locked.sweep()
    assert seen == [False] * 4


def test_replaced_gradients_die_outside_the_lock(locked, lock, seen):
    class Gradient(Witness):
        def __add__(self, other):
            return 7.0 + other

    x = variable(locked, 1.0)
    x._grad = Gradient(lock, seen)
    run_backward(x * x)
    assert x._grad == 9.0
    assert seen == [False]


def hooked_by_witness(x, seen):
    y = x * x
    witness = Witness(x.registry.lock, seen)
    add_hook(y, lambda ct, witness=witness: None)
    return y


def test_hooks_of_swept_nodes_die_outside_the_lock(locked, seen):
    x = variable(locked, 1.0)
    for _ in range(3):
        hooked_by_witness(x, seen)
    locked.sweep()
    assert seen == [False] * 3


def test_hooks_of_nodes_that_left_before_their_tensor_died_do_so_outside_the_lock(locked, seen):
    x = variable(locked, 1.0)
    live = [hooked_by_witness(x, seen) for _ in range(3)]
    for y in live:
        run_backward(y)
    assert len(locked.nodes) == 1
    assert not seen
    live.clear()
    del y
    locked.sweep()
    assert seen == [False] * 3


# --- it is held for a batch at a time ---------------------------------------------------------------------------------


@pytest.fixture
def left(locked, lock):
    """What was registered, and what was dropped and waiting, whenever the lock was let go."""
    seen = []
    yield seen
    lock.released = int


def watch(registry, left):
    registry.lock.released = lambda: left.append((len(registry.nodes), len(registry.dropped), registry.saved_bytes))


def largest_step(left, k):
    values = [entry[k] for entry in left]
    return max(abs(b - a) for a, b in itertools.pairwise(values))


def test_orphans_are_swept_a_batch_at_a_time(locked, left):
    x = variable(locked, 1.0)
    for _ in range(3 * BATCH):
        x * x
    watch(locked, left)
    locked.sweep()
    assert largest_step(left, 0) == BATCH


def test_drops_of_nodes_that_stay_are_looked_at_a_batch_at_a_time(locked, left):
    x = variable(locked, 1.0)
    y = chain_of(x, 3 * BATCH)
    watch(locked, left)
    locked.sweep()
    assert largest_step(left, 1) == BATCH
    del y


def test_consumed_nodes_are_removed_a_batch_at_a_time(locked, left):
    x = variable(locked, 1.0)
    y = chain_of(x, 3 * BATCH)
    watch(locked, left)
    run_backward(y)
    assert largest_step(left, 0) == BATCH


def test_saved_values_are_released_a_batch_at_a_time(locked, left):
    x = variable(locked, 1.0)
    y = x * x
    live = [multiply(y, x, nbytes=1) for _ in range(3 * BATCH)]
    watch(locked, left)
    run_backward(y)
    assert largest_step(left, 2) == BATCH - 1 + NBYTES  # a batch removes `y` and releases what others saved
    assert locked.saved_bytes == 0
    del live


# --- and so runs all that is the user's -------------------------------------------------------------------------------


def test_rules_hooks_additions_and_callbacks_run_without_the_lock(locked, lock, seen):
    def note(*_):
        seen.append(lock.held())

    class Noting(float):
        def __add__(self, other):
            note()
            return Noting(float(self) + float(other))

    x = variable(locked, 1.0)
    x._grad = Noting(0.0)
    y = passing(x, note) + passing(x, note)
    add_hook(x, note)
    x * x
    locked.callbacks.append(note)
    run_backward(y, Noting(1.0))
    # two rules, one sum of x's parts, one hook, one sum with the gradient before, start and stop of the sweep
    assert seen == [False] * 7


def test_no_lock_is_held_while_a_pass_for_given_targets_runs(locked, lock, seen):
    x = variable(locked, 1.0)
    y = passing(x, lambda: seen.append(lock.held()))
    assert run_gradients(y, [x]) == [1.0]
    assert seen == [False]


def test_library_takes_the_lock_once_at_a_time(locked, lock):
    def alone():
        assert not lock.held()

    lock.waiting = alone
    x = variable(locked, 2.0)
    y = x * x
    add_hook(y, lambda ct: None)
    z = y * x
    x * x
    locked.set_threshold(nodes=1)
    for _ in range(5):
        x * x
    run_backward(z)
    with pytest.raises(GraphConsumedError):
        run_backward(z)
    locked.sweep()
    stats(locked)
    node_infos(locked)
    assert x._grad == 12.0


# --- finalisers -------------------------------------------------------------------------------------------------------


def test_dropping_takes_no_lock(unchecked):
    unchecked.lock = PlainLock()
    x = variable(unchecked, 1.0)
    y = x * x
    z = x * x
    z._grad = z
    with unchecked.lock:
        del y
        del z
        gc.collect()
        assert [node.id for node in unchecked.dropped] == [2, 3]
    assert unchecked.sweep().nodes == 2


def at_collection(point, lock, action):
    """A `gc` callback that calls `action()` at the `point`-th collection that finds the lock held, and the count."""
    count = [0]

    def callback(phase, info):
        if phase == "start" and lock.held() and count[0] < point:
            count[0] += 1
            if count[0] == point:
                action()

    return callback, count


def computing(x, y, kept):
    kept.append(x * y)


def dropping(x, y, kept):
    x * y


def sweeping(x, y, kept):
    x.registry.sweep()


def all_of_them(x, y, kept):
    kept.append(y * x)
    x * x
    kept[0].registry.sweep()
    kept.append(y * y)


def exercise(registry, kept):
    """Steps that take the lock at every place where a node is registered, consumed, released or swept."""
    x, w = kept
    y = x * w
    kept.append(y)
    w * y
    z = y * y
    kept += [z, z + y, x * y]
    registry.sweep(max_nodes=1)
    z * w
    run_backward(z)
    kept.append(y * w)
    registry.sweep()
    del y, z
    kept.clear()
    kept += [x, w]
    registry.sweep()
    run_backward(x * w)


def run_with_finaliser(action, point, padding, settle_at):
    """One run of `exercise` with `action` at the `point`-th collection under the lock; False if there were fewer."""
    lock = ScriptedLock()
    registry = Registry(lock=lock, settle_at=settle_at)
    kept = [variable(registry, 2.0), variable(registry, 3.0)]
    more = []
    callback, count = at_collection(point, lock, lambda: action(*kept[:2], more))
    thresholds = gc.get_threshold()
    gc.callbacks.append(callback)
    pad = [[] for _ in range(padding)]
    gc.set_threshold(1, 1_000_000, 1_000_000)
    try:
        exercise(registry, kept)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(callback)
    del pad
    audit(registry, lambda: Counter(handle.node for handle in (*kept, *more)))
    gradients = [handle._grad for handle in kept]
    kept.clear()
    more.clear()
    registry.sweep()
    audit(registry, dict)
    assert not registry.nodes
    assert gradients == [2 * 2.0 * 9.0 + 3.0, 2 * 4.0 * 3.0 + 2.0]
    return count[0] == point


@pytest.mark.parametrize("settle_at", [1, 3, SETTLE])
@pytest.mark.parametrize("action", [computing, dropping, sweeping, all_of_them])
def test_finaliser_that_computes_while_its_thread_holds_the_lock_harms_nothing(action, settle_at):
    """The collector may run at any allocation; every second one is tried in turn, from either of the first two."""
    for padding in (0, 1):
        point = 1
        while run_with_finaliser(action, point, padding, settle_at):
            point += 1
        assert point < 1000
