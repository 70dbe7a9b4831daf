"""An exception may come on any line: a pass does all or nothing, and the registry loses count of nothing."""

import functools
import sys

import pytest
from graph_toys import NBYTES, add_hook, handles_of, retain_grad, run_backward, state, variable

from raising import Raising
from sweepgrad import shards
from sweepgrad.errors import GraphConsumedError
from sweepgrad.graph import backward as backward_module
from sweepgrad.graph import registry as registry_module
from sweepgrad.graph.registry import BATCH, SETTLE, Registry
from sweepgrad.graph.report import audit, stats

WHERE = (backward_module.__file__, registry_module.__file__, shards.__file__)


by_lines, by_calls = Raising.by_lines, Raising.by_calls
both = pytest.mark.parametrize("way", [by_lines, by_calls], ids=["lines", "calls"])
errors = pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])


def assert_free(lock):
    assert not lock._is_owned()


def raised_in_a_pass(way, point, error):
    """A pass that is interrupted at one point does all or nothing; where it was, or None if it ended before."""
    registry = Registry(settle_at=1)
    x, w = variable(registry, 2.0), variable(registry, 3.0)
    y = x * w
    z = y * x + y
    retain_grad(y)
    add_hook(x, lambda ct: ct * 2)
    handles, before = (x, w, y), state(registry)
    where = way(Raising(WHERE, point, error), lambda: run_backward(z))
    assert_free(registry.lock)
    registry.finish()
    if x._grad is None:
        assert [handle._grad for handle in handles] == [None] * 3
        assert state(registry) == before
        run_backward(z)
    assert [handle._grad for handle in handles] == [30.0, 6.0, 3.0]
    with pytest.raises(GraphConsumedError):
        run_backward(z)
    audit(registry, handles_of(registry))
    return where


@both
@errors
def test_exception_anywhere_in_a_pass_leaves_all_or_nothing(way, error):
    point, places = 1, set()
    while where := raised_in_a_pass(way, point, error):
        places.add(where)
        point += 1
    assert {"backward", "reachable", "run", "call_hooks", "commit", "finish", "_carry_out", "retire"} <= places


def finish(registry):
    while registry.sweep().remaining:
        pass
    audit(registry, handles_of(registry))


def raised_in_bookkeeping(way, point, settle_at, error):
    """Nodes are born, enter, are consumed, released and swept; with one exception nothing is lost, and all goes on."""
    registry = Registry(settle_at=settle_at)
    x, w = kept = [variable(registry, 2.0), variable(registry, 3.0)]
    y = x * w
    kept += [y, y * x + y, x * x, y * y]
    kept += [kept[-1] * kept[-1], kept[-2] * y]
    y + w

    def work(z, other):
        registry.settle()
        run_backward(z)
        registry.sweep()
        other * other
        registry.sweep(max_nodes=1)
        other * other * other

    where = way(Raising(WHERE, point, error), lambda: work(*kept[3:5]))
    assert_free(registry.lock)
    audit(registry, handles_of(registry))
    if x._grad is None:
        run_backward(kept[3])
    assert (x._grad, w._grad) == (15.0, 6.0)
    finish(registry)
    assert stats(registry).nodes == 2 + 1 + 3
    assert stats(registry).consumed == 3
    assert stats(registry).saved_bytes == NBYTES  # of the one operation that can still run
    del x, w, y
    kept.clear()
    finish(registry)
    assert stats(registry).nodes == 0
    return where


@both
@errors
@pytest.mark.parametrize(("settle_at", "many"), [(1, shards.MANY), (1, 2), (3, 2), (SETTLE, shards.MANY)])
def test_exception_anywhere_in_the_bookkeeping_loses_no_node_and_no_count(way, settle_at, many, error, monkeypatch):
    """A node has one child, several, or so many that they are in pieces."""
    monkeypatch.setattr(shards, "MANY", many)
    monkeypatch.setattr(shards, "BITS", 1)
    point, places = 1, set()
    while where := raised_in_bookkeeping(way, point, settle_at, error):
        places.add(where)
        point += 1
    assert {"register", "settle", "_begin", "_enter", "sweep", "_batch", "_reap", "_remove", "_strand"} <= places
    assert {"_unlink", "_release", "commit", "_carry_out", "retire"} <= places


@both
def test_exception_while_counts_are_taken_anew(way):
    """A batch was interrupted; so is the one that mends it, at each of its points."""
    point = 1
    while True:
        registry = Registry(settle_at=100)
        x = variable(registry, 2.0)
        live = [x * x for _ in range(3)]
        x * x
        by_lines(Raising(WHERE, 40), registry.sweep)
        assert registry.busy
        where = way(Raising(WHERE, point), registry.sweep)
        assert_free(registry.lock)
        finish(registry)
        assert (stats(registry).nodes, stats(registry).swept) == (4, 1)
        live.clear()
        if where is None:
            break
        point += 1


@pytest.mark.parametrize("step", ["settle", "sweep"])
def test_long_work_goes_on_after_an_interrupt(step):
    registry = Registry(settle_at=10 * BATCH)
    x = variable(registry, 2.0)
    for _ in range(2 * BATCH):
        x * x
    where = by_calls(Raising(WHERE, BATCH), getattr(registry, step))
    assert where is not None
    finish(registry)
    assert stats(registry).nodes == 1
    assert stats(registry).swept == 2 * BATCH


def test_pass_of_many_pieces_that_is_interrupted_between_them_is_carried_out_by_whoever_asks_next():
    registry = Registry(settle_at=10**6)
    xs = [variable(registry, 2.0) for _ in range(20 * BATCH)]
    root = functools.reduce(lambda total, x: total + x, xs)

    def pieces(registry):
        return registry.decided and registry.decided.done

    class Stop:
        waits = 2

        def on_line(self, frame, event, arg):
            if event == "line" and frame.f_code.co_name == "_carry_out" and frame.f_lineno == self.line(frame):
                self.waits -= 1
                if not self.waits:
                    raise KeyboardInterrupt
            return self.on_line

        @staticmethod
        def line(frame):
            return frame.f_code.co_firstlineno + 2

    before = sys.gettrace()
    sys.settrace(Stop().on_line)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_backward(root)
    finally:
        sys.settrace(before)
    assert 0 < pieces(registry) < len(xs)
    assert {x._grad for x in xs} == {1.0, None}
    with pytest.raises(GraphConsumedError):
        run_backward(root)
    assert {x._grad for x in xs} == {1.0}
    finish(registry)
    assert stats(registry).consumed == len(xs) - 1


# --- states that an exception between two lines leaves, one by one ----------------------------------------------------


@pytest.fixture
def late():
    """A registry into which nothing enters by itself."""
    made = Registry(settle_at=10**6)
    yield made
    finish(made)
    assert not made.nodes


def test_node_that_is_entered_but_still_queued_is_consumed_and_goes(late):
    x = variable(late, 2.0)
    y = x * x
    late.born.popleft()
    for node in (x.node, y.node):
        late.nodes.piece(node.id)[node.id] = node
        late.registered += 1
    late.busy = True  # the counts were not reached, nor the edges of `y`
    run_backward(y)
    assert x._grad == 4.0
    finish(late)
    found = stats(late)
    assert (found.registered, found.nodes, found.consumed, found.swept, found.variables) == (2, 1, 1, 0, 1)
    del x, y


def test_consumed_node_that_is_counted_but_still_queued_is_counted_once(late):
    x = variable(late, 2.0)
    y = x * x
    node = y.node
    run_backward(y)
    late.born.append(node)
    finish(late)
    found = stats(late)
    assert (found.registered, found.nodes, found.consumed, found.swept) == (2, 1, 1, 0)
    del x, y


def test_drop_that_is_done_but_still_queued_is_not_done_twice(late):
    x = variable(late, 2.0)
    late.settle()
    late.dropped.append(None)
    finish(late)
    assert stats(late).nodes == 1
    assert not late.dropped
    del x


def test_node_that_is_released_but_still_queued_is_released_once(late):
    x = variable(late, 2.0)
    y = x * x
    z = y * y
    run_backward(y)
    late.settle()
    late.stranded.extend([z.node, z.node])
    finish(late)
    assert stats(late).saved_bytes == 0
    with pytest.raises(GraphConsumedError):
        run_backward(z)
    del x, y, z


def test_gradient_is_set_after_what_was_decided_before(late):
    x = variable(late, 2.0)
    late.decided = registry_module._Decided([], [(x, None, 5.0)])
    late.set_gradients([x], 7.0)
    assert x._grad == 7.0
    assert late.decided is None
    del x


def test_counts_are_taken_again_where_a_finaliser_ran_a_pass_between_them(late, monkeypatch):
    x = variable(late, 2.0)
    y = x * x
    late.busy = True  # a batch that did not end, so that the counts are taken anew
    snapshot = late.snapshot

    def finalised():
        monkeypatch.setattr(late, "snapshot", snapshot)
        run_backward(y)
        return snapshot()

    monkeypatch.setattr(late, "snapshot", finalised)
    late.settle()
    found = stats(late)
    assert (found.registered, found.nodes, found.consumed, found.swept) == (2, 1, 1, 0)
    assert x._grad == 4.0
