"""What the registry keeps, what a sweep removes, in which order, and what it reports."""

import gc
import itertools
import random

import pytest
from graph_toys import (
    NBYTES,
    Handle,
    add,
    add_hook,
    attach,
    chain_of,
    handles_of,
    multiply,
    record,
    run_backward,
    variable,
)

from sweepgrad.errors import GraphConsumedError
from sweepgrad.graph import registry as registry_module
from sweepgrad.graph.node import VARIABLE, Node
from sweepgrad.graph.registry import BATCH, Registry
from sweepgrad.graph.report import audit, node_infos, stats
from sweepgrad.shards import PIECE, Shards


def ops(registry):
    return [info.op for info in node_infos(registry)]


def ids(registry):
    return [info.id for info in node_infos(registry)]


# --- registering ------------------------------------------------------------------------------------------------------


def test_ids_ascend_and_parents_have_smaller_ones(registry):
    x, y = variable(registry, 2.0), variable(registry, 3.0)
    z = x * y + x
    infos = node_infos(registry)
    assert [info.id for info in infos] == [1, 2, 3, 4]
    assert [info.parents for info in infos] == [(), (), (1, 2), (3, 1)]
    assert z.node.id == 4


def test_children_are_none_then_one_then_a_set(registry):
    x = variable(registry, 2.0)
    assert x.node.children is None
    y = add(x, variable(registry, 1.0))
    assert x.node.children is y.node
    z = add(x, y)
    assert x.node.children == {y.node, z.node}
    u = add(x, y)
    assert x.node.children == {y.node, z.node, u.node}


def test_two_edges_of_one_child_are_one_child(registry):
    x = variable(registry, 2.0)
    y = x * x
    assert x.node.children is y.node
    assert stats(registry).childless == 1


def test_counts_follow_registering(registry):
    x, y = variable(registry, 2.0), variable(registry, 3.0)
    z = multiply(x, y, nbytes=100)
    u = multiply(z, z, nbytes=10)
    found = stats(registry)
    assert (found.nodes, found.variables, found.childless, found.saved_bytes) == (4, 2, 1, 110)
    assert (found.registered, found.consumed, found.swept, found.peak) == (4, 0, 0, 4)
    assert found.indexes == {"nodes": 4, "born": 0, "dropped": 0, "ready": 0, "retiring": 0, "stranded": 0}
    del u


def test_extra_is_made_once(registry):
    x = variable(registry, 1.0)
    y = x * x
    assert y.node.extra is None
    extra = registry.extra(y.node)
    assert extra.owner() is None
    assert extra.hooks == {}
    assert registry.extra(y.node) is extra


def test_node_shows_its_id_and_operation(registry):
    x = variable(registry, 1.0)
    assert repr((x * x).node) == "<Node 2 multiply>"


def test_variables_rule_returns_no_cotangents():
    node = Node(VARIABLE, (), ())
    assert VARIABLE.pullback(node, (), 1.0) == VARIABLE.replay(node, (), 1.0) == ()


# --- leaf first -------------------------------------------------------------------------------------------------------


def test_dropped_chain_goes_from_the_newest_node_to_the_variable(registry):
    x = variable(registry, 1.0)
    y = chain_of(x, 10)
    registered = ids(registry)
    assert registered == list(range(1, 12))
    registry.sweep()  # the intermediates were dropped, but the chain's end is alive
    assert ids(registry) == registered
    del x, y
    gone = []
    while registry.nodes:
        report = registry.sweep(max_nodes=1)
        assert report.nodes == 1
        gone += set(registered) - set(ids(registry)) - set(gone)
    assert gone == list(range(11, 0, -1))


def test_no_node_goes_before_its_children(registry):
    x = variable(registry, 1.0)
    y = x * x
    z, u = y + x, y * x
    w = z * u
    del y, z, u, w, x
    while registry.nodes:
        before = set(registry.nodes)
        registry.sweep(max_nodes=1)
        (gone,) = before - set(registry.nodes)
        assert not any(gone in node.parents for node in registry.nodes)
        audit(registry, handles_of(registry))


def test_node_with_a_living_descendant_stays(registry):
    x = variable(registry, 1.0)
    y = x * x
    z = y + y
    del x, y
    assert registry.sweep().nodes == 0
    assert ops(registry) == ["variable", "multiply", "add"]
    run_backward(z)


def test_branch_of_a_living_variable_goes_and_the_variable_stays(registry):
    x = variable(registry, 1.0)
    for _ in range(5):
        (x * x) + x
    assert stats(registry).nodes == 11
    assert registry.sweep().nodes == 10
    assert x.node.children is None
    assert stats(registry).childless == 1


def test_second_handle_keeps_a_node(registry):
    x = variable(registry, 1.0)
    y = x * x
    again = attach(registry, y.node, y.v)
    del y
    assert registry.sweep().nodes == 0
    run_backward(again, retain_graph=True)
    del again
    assert registry.sweep().nodes == 1


def test_handle_in_a_reference_cycle_is_swept_after_the_collector_ran(registry):
    x = variable(registry, 1.0)
    y = x * x
    y._grad = y
    del y
    assert registry.sweep().nodes == 0
    gc.collect()
    assert registry.sweep().nodes == 1


def test_node_with_two_edges_to_one_parent_frees_the_parent_once(registry):
    x = variable(registry, 1.0)
    y = x * x
    del x, y
    report = registry.sweep(max_nodes=1)
    assert (report.nodes, report.remaining) == (1, 1)
    report = registry.sweep(max_nodes=1)
    assert (report.nodes, report.remaining) == (1, 0)


def test_sweeping_leaves_the_live_part_alone(registry):
    x = variable(registry, 1.0)
    live = [x * x for _ in range(3)]
    before = [(y.node.parents, y.node.saved, y.node.handles) for y in live]
    chain_of(x, 20)
    registry.sweep()
    assert [(y.node.parents, y.node.saved, y.node.handles) for y in live] == before
    assert x.node.children == {y.node for y in live}


def test_sweep_looks_at_orphans_only():
    class Counting(Shards):
        removed = 0

        def discard(self, number):
            self.removed += 1
            super().discard(number)

        def __iter__(self):
            raise AssertionError("the sweep walks the live graph")

        items = __iter__

    registry = Registry()
    registry.nodes = Counting()
    x = variable(registry, 1.0)
    live = [x * x for _ in range(1000)]
    chain_of(x, 5)
    assert registry.sweep().nodes == 5
    assert registry.nodes.removed == 5
    del live


@pytest.mark.parametrize("order", ["first to last", "last to first", "random"])
def test_very_many_children_go_one_by_one(registry, order):
    x = variable(registry, 1.0)
    y = x * x
    children = [y + y for _ in range(3 * PIECE)]
    if order == "last to first":
        children.reverse()
    elif order == "random":
        random.Random(0).shuffle(children)
    for left in (2 * PIECE, 1, 0):
        del children[left:]
        assert registry.sweep().remaining == 0
        audit(registry, handles_of(registry))
        assert stats(registry).nodes == 2 + left
    assert y.node.children is None


def test_very_many_children_of_a_consumed_node_are_released_in_batches(locked, lock):
    x = variable(locked, 1.0)
    y = x * x
    children = [y * y for _ in range(2 * PIECE)]
    locked.sweep()
    held = stats(locked).saved_bytes
    saved = [held]
    lock.released = lambda: saved.append(locked.saved_bytes)
    run_backward(children[0])
    locked.sweep()
    lock.released = int
    assert stats(locked).saved_bytes == 0
    assert max(before - after for before, after in itertools.pairwise(saved)) <= BATCH * NBYTES
    audit(locked, handles_of(locked))
    with pytest.raises(GraphConsumedError):
        run_backward(children[1])


def test_the_daemon_lets_go_of_the_interpreter_after_each_batch(registry, monkeypatch):
    pauses = []
    monkeypatch.setattr(registry_module.time, "sleep", pauses.append)
    x = variable(registry, 1.0)
    held = [x * x for _ in range(3 * BATCH)]
    held.clear()
    assert registry.sweep(trigger="sweeper").nodes == 3 * BATCH
    assert len(pauses) >= 2
    assert set(pauses) == {registry_module.PAUSE}


# --- limits and reports -----------------------------------------------------------------------------------------------


def test_max_nodes_bounds_a_sweep_and_remaining_says_what_is_left(registry):
    x = variable(registry, 1.0)
    for _ in range(5):
        multiply(x, x, nbytes=10)
    report = registry.sweep(max_nodes=2)
    assert (report.nodes, report.bytes, report.remaining) == (2, 20, 3)
    report = registry.sweep(max_nodes=0)
    assert (report.nodes, report.bytes, report.remaining) == (0, 0, 3)
    report = registry.sweep(max_nodes=9)
    assert (report.nodes, report.bytes, report.remaining) == (3, 30, 0)
    assert registry.sweep().nodes == 0


def test_max_nodes_may_exceed_a_batch(registry):
    x = variable(registry, 1.0)
    for _ in range(3 * BATCH):
        x * x
    assert registry.sweep(max_nodes=BATCH + 7).nodes == BATCH + 7
    assert registry.sweep().nodes == 2 * BATCH - 7


def test_remaining_counts_orphans_that_were_found_but_not_removed(registry):
    x = variable(registry, 1.0)
    y = x * x
    z = y * y
    registry.sweep()
    del y
    registry.sweep()
    del z
    report = registry.sweep(max_nodes=1)
    assert report.remaining == 1
    assert stats(registry).indexes["ready"] == 1
    assert stats(registry).dropped == 0


def test_max_seconds_ends_a_sweep_after_the_batch_that_passed_it():
    now = iter(range(100))
    registry = Registry(clock=lambda: next(now), settle_at=1)
    x = variable(registry, 1.0)
    for _ in range(5 * BATCH):
        x * x
    report = registry.sweep(max_seconds=3)  # starts at 0; looks after each batch, at 1, 2, 3; ends at 4
    assert report.nodes == 3 * BATCH
    assert report.remaining == 2 * BATCH
    assert report.seconds == 4
    report = registry.sweep(max_seconds=0)
    assert report.nodes == BATCH
    report = registry.sweep(max_seconds=1000)
    assert (report.nodes, report.remaining) == (BATCH, 0)
    found = stats(registry)
    assert found.sweeps == 3
    assert found.sweep_seconds == 4 + 2 + report.seconds


def test_lock_is_let_go_after_each_batch(locked, lock):
    x = variable(locked, 1.0)
    for _ in range(4 * BATCH):
        x * x
    sizes = []
    lock.released = lambda: sizes.append(len(locked.nodes))
    locked.sweep()
    lock.released = int
    assert sizes == [1 + 3 * BATCH, 1 + 2 * BATCH, 1 + BATCH, 1, 1]


def test_sweep_ends_although_others_go_on_dropping(registry):
    x = variable(registry, 1.0)

    class Dropper:
        def __del__(self):
            x * x

    record(x.node.rule, 1.0, (Dropper(), Dropper()), x)
    report = registry.sweep()
    assert (report.nodes, report.remaining) == (1, 2)
    assert registry.sweep().nodes == 2


def test_drops_that_another_sweep_took_do_not_keep_this_one_waiting(locked, lock):
    x = variable(locked, 1.0)
    for _ in range(3 * BATCH):
        x * x

    def other():
        lock.released = int
        assert locked.sweep().nodes == 2 * BATCH

    lock.released = other
    assert locked.sweep().nodes == BATCH


def test_peak_is_the_most_nodes_at_once(registry):
    x = variable(registry, 1.0)
    for _ in range(9):
        x * x
    registry.sweep()
    x * x
    registry.sweep()
    found = stats(registry)
    assert (found.peak, found.nodes, found.swept, found.registered) == (10, 1, 10, 11)


def test_saved_bytes_fall_with_what_is_swept(registry):
    x = variable(registry, 1.0)
    y = multiply(x, x, nbytes=1000)
    z = multiply(x, x, nbytes=24)
    del z
    assert registry.sweep().bytes == 24
    assert stats(registry).saved_bytes == 1000
    del y


# --- handles that come back to life -----------------------------------------------------------------------------------


class Phoenix(Handle):
    """A handle that its own finaliser brings back to life."""

    __slots__ = ("ashes",)

    def __del__(self):
        super().__del__()
        self.ashes.append(self)


def dropped_and_back(registry, node, v):
    handle = Phoenix(registry, node, v)
    handle.ashes = ashes = []
    del handle
    registry.sweep()
    return ashes.pop()


def resurrected(registry, make):
    node, v = make(registry)
    handle = dropped_and_back(registry, node, v)
    assert node.id not in registry.nodes
    return handle


def operation(registry):
    x = variable(registry, 2.0)
    node = Node((x * x).node.rule, (2.0, 2.0), (x.node,) * 2, NBYTES)
    registry.register(node)
    return node, 4.0


def new_variable(registry):
    node = Node(VARIABLE, (), ())
    registry.register(node)
    return node, 2.0


@pytest.mark.parametrize("make", [operation, new_variable])
def test_swept_handle_that_came_back_says_so(registry, make):
    again = resurrected(registry, make)
    with pytest.raises(GraphConsumedError, match=r"finalised.*brought back to life.*compute the result anew"):
        run_backward(again)


@pytest.mark.parametrize("make", [operation, new_variable])
@pytest.mark.parametrize("swept", [False, True], ids=["before a sweep", "after a sweep"])
def test_result_computed_from_a_swept_handle_says_so_and_gives_no_gradient(registry, make, swept):
    again = resurrected(registry, make)
    x = variable(registry, 3.0)
    y = multiply(again, x, nbytes=50)
    z = multiply(y, x, nbytes=7)
    if swept:
        assert registry.sweep().bytes == 57  # neither can run any more
        assert stats(registry).saved_bytes == 0
    for root in (y, z):
        with pytest.raises(GraphConsumedError, match=r"finalised.*brought back to life"):
            run_backward(root)
    assert x._grad is None


def test_handle_that_came_back_before_the_sweep_works_while_something_living_needs_its_node(registry):
    x = variable(registry, 2.0)
    y = x * x
    y.node.handles += 1
    again = dropped_and_back(registry, y.node, y.v)
    run_backward(again)
    assert x._grad == 4.0


def test_dead_hooks_and_values_of_a_removed_node_do_not_come_back(registry):
    x = variable(registry, 2.0)
    y = x * x
    add_hook(y, lambda ct: None)
    node = y.node
    del y
    registry.sweep()
    assert node.parents == ()
    assert not isinstance(node.saved, tuple)
    assert not node.children
