"""Long graphs: nothing recurses."""

import pytest
from graph_toys import Rule, chain_of, record, run_backward, run_gradients, variable

from sweepgrad.errors import GraphConsumedError
from sweepgrad.graph.report import node_infos, stats

LENGTH = 100_000

pytestmark = pytest.mark.usefixtures("shallow")

STEP = Rule("step", lambda ct: (ct,))


def single_file(x, length=LENGTH):
    """A chain in which every node has one parent and one child."""
    y = x
    for _ in range(length):
        y = record(STEP, 1.0, (), y)
    return y


def test_stack_is_small(registry):
    def down(n):
        return down(n - 1) if n else 0

    with pytest.raises(RecursionError):
        down(200)


def test_long_chain_is_built_differentiated_and_consumed(registry):
    x = variable(registry, 1.0)
    y = chain_of(x, LENGTH)
    run_backward(y)
    assert x._grad == LENGTH + 1
    assert (stats(registry).nodes, stats(registry).consumed) == (1, LENGTH)


def test_long_chain_gives_gradients_of_chosen_nodes(registry):
    x = variable(registry, 1.0)
    y = single_file(x, 1)
    z = single_file(y)
    assert run_gradients(z, [x, y], retain_graph=True) == [1.0, 1.0]


def test_long_chain_is_dropped_listed_and_swept(registry):
    x = variable(registry, 1.0)
    y = single_file(x)
    assert sum(info.alive for info in node_infos(registry)) == LENGTH + 1
    del x, y
    assert not any(info.alive for info in node_infos(registry))
    assert registry.sweep().remaining == 0
    assert stats(registry).nodes == 0


def test_long_chain_of_living_handles_is_dropped_at_once(registry):
    handles = [variable(registry, 1.0)]
    for _ in range(LENGTH):
        handles.append(record(STEP, 1.0, (), handles[-1]))
    registry.sweep()
    handles.clear()
    registry.sweep()
    assert stats(registry).nodes == 0


def test_long_chain_that_can_run_no_more_is_released(registry):
    x = variable(registry, 1.0)
    first = x * x
    y = single_file(first)
    run_backward(first)
    registry.sweep()
    assert stats(registry).nodes == 2
    with pytest.raises(GraphConsumedError, match=r"`step` .* was computed from `multiply`"):
        run_backward(y)
