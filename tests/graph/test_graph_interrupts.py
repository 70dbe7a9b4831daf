"""A KeyboardInterrupt may come anywhere: a pass does all or nothing, and the registry loses count of nothing."""

import sys

import pytest
from graph_toys import NBYTES, add_hook, handles_of, retain_grad, run_backward, state, variable

from sweepgrad.errors import GraphConsumedError
from sweepgrad.graph import backward as backward_module
from sweepgrad.graph import registry as registry_module
from sweepgrad.graph.registry import BATCH, SETTLE, Registry
from sweepgrad.graph.report import audit, stats

FILES = (backward_module.__file__, registry_module.__file__)


class Interrupt:
    """Raises KeyboardInterrupt at the `point`-th occasion in engine or registry, and remembers in which function."""

    def __init__(self, point):
        self.left = point
        self.where = None

    def occasion(self, frame):
        # What is raised while a generator is closed goes nowhere.
        if frame.f_code.co_filename in FILES and frame.f_code.co_name != "<genexpr>":
            self.left -= 1
            if not self.left:
                self.where = frame.f_code.co_name
                raise KeyboardInterrupt

    def on_line(self, frame, event, arg):
        if event == "line":
            self.occasion(frame)
        return self.on_line

    def after_call(self, frame, event, arg):
        if event in ("call", "c_return"):
            self.occasion(frame)

    def run(self, function, install, hook, before):
        install(hook)
        try:
            function()
        except KeyboardInterrupt:
            assert self.where is not None
        finally:
            install(before)
        return self.where

    def by_lines(self, function):
        """Every line is an occasion: more than Python really has."""
        return self.run(function, sys.settrace, self.on_line, sys.gettrace())

    def by_calls(self, function):
        """After each call, where Python looks for signals."""
        return self.run(function, sys.setprofile, self.after_call, sys.getprofile())


def interrupted_pass(point):
    """A pass interrupted at one point does all or nothing; returns where it was, or None if it ended before."""
    registry = Registry(settle_at=1)
    x, w = variable(registry, 2.0), variable(registry, 3.0)
    y = x * w
    z = y * x + y
    retain_grad(y)
    add_hook(x, lambda ct: ct * 2)
    handles, before = (x, w, y), state(registry)
    where = Interrupt(point).by_lines(lambda: run_backward(z))
    assert registry.lock.acquire(blocking=False)
    registry.lock.release()
    if x._grad is None:
        assert [handle._grad for handle in handles] == [None] * 3
        assert state(registry) == before
        run_backward(z)
    assert [handle._grad for handle in handles] == [30.0, 6.0, 3.0]
    with pytest.raises(GraphConsumedError):
        run_backward(z)
    return where


def test_interrupt_on_any_line_of_a_pass_leaves_all_or_nothing():
    point, places = 1, set()
    while where := interrupted_pass(point):
        places.add(where)
        point += 1
    assert {"backward", "reachable", "validate", "run", "call_hooks", "commit", "retire"} <= places


def finish(registry):
    while registry.sweep().remaining:
        pass
    audit(registry, handles_of(registry))


def interrupted_bookkeeping(point, settle_at):
    """Nodes enter, are consumed, released and swept, with one interrupt; nothing is lost, and what was left goes on."""
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

    where = Interrupt(point).by_calls(lambda: work(*kept[3:5]))
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


@pytest.mark.parametrize("settle_at", [1, 3, SETTLE])
def test_interrupt_after_any_call_loses_no_node_and_no_count(settle_at):
    point, places = 1, set()
    while where := interrupted_bookkeeping(point, settle_at):
        places.add(where)
        point += 1
    assert {"settle", "_enter", "sweep", "_batch", "_remove", "_strand", "_unlink", "_release", "retire"} <= places


@pytest.mark.parametrize("step", ["settle", "sweep"])
def test_long_work_goes_on_after_an_interrupt(step):
    registry = Registry(settle_at=10 * BATCH)
    x = variable(registry, 2.0)
    for _ in range(2 * BATCH):
        x * x
    where = Interrupt(BATCH).by_calls(getattr(registry, step))
    assert where is not None
    finish(registry)
    assert stats(registry).nodes == 1
    assert stats(registry).swept == 2 * BATCH
