"""The audit finds each kind of damage, and accepts every state that the library can be in."""

import gc

import pytest
from graph_toys import Handle, add, handles_of, multiply, run_backward, variable

from sweepgrad.errors import AuditError, SweepgradError
from sweepgrad.graph.report import audit


def miscount(name):
    def corrupt(registry, y, z):
        setattr(registry, name, getattr(registry, name) + 1)

    return corrupt


def lose_child(registry, y, z):
    y.node.children = None
    registry.with_children -= 1


def lose_children_of_a_runnable_node(registry, y, z):
    y.node.children = frozenset()
    registry.with_children -= 1


def invent_child(registry, y, z):
    z.node.children = y.node
    registry.with_children += 1


def lose_edge(registry, y, z):
    z.node.links = ()


def count_extra_handle(registry, y, z):
    y.node.handles += 1


def lose_handle(registry, y, z):
    y.node.handles -= 1


def drop_a_living_handle(registry, y, z):
    registry.dropped.append(z.node)


def lose_orphan(registry, y, z):
    add(z, z)
    registry.dropped.pop().handles -= 1


def lose_consumed(registry, y, z):
    registry.commit([z.node], [], consume=True, version=registry.version)
    registry.retiring.clear()


def lose_stranded(registry, y, z):
    run_backward(y)
    z._grad = add(y, y)
    registry.stranded.clear()


def change_key(registry, y, z):
    registry.nodes.discard(z.node.id)
    registry.nodes.piece(99)[99] = z.node


@pytest.mark.parametrize(
    ("corrupt", "text"),
    [
        (miscount("variables"), "variables: 2 counted, 1 found"),
        (miscount("with_children"), "with children: 3 counted, 2 found"),
        (miscount("saved_bytes"), "saved bytes: 33 counted, 32 found"),
        (miscount("registered"), "swept: 0 counted, 1 found"),
        (miscount("consumed"), "swept: 0 counted, -1 found"),
        (miscount("swept"), "swept: 1 counted, 0 found"),
        (lose_child, "<Node 2 multiply>: children set() kept, {<Node 3 add>} found"),
        (
            lose_children_of_a_runnable_node,
            "with children: 1 counted, 2 found; <Node 2 multiply>: children set() kept, {<Node 3 add>} found",
        ),
        (invent_child, "<Node 3 add>: children {<Node 2 multiply>} kept, set() found"),
        (lose_edge, "<Node 2 multiply>: children {<Node 3 add>} kept, set() found"),
        (count_extra_handle, "<Node 2 multiply>: 2 handles counted, 1 found"),
        (lose_handle, "<Node 2 multiply>: 0 handles counted, 1 found"),
        (drop_a_living_handle, "<Node 3 add>: 0 handles counted, 1 found"),
        (lose_orphan, "<Node 4 add>: an orphan that no sweep would find"),
        (lose_consumed, "swept: 0 counted, -1 found; <Node 3 add>: consumed, and no sweep would remove it"),
        (lose_stranded, "<Node 4 add>: computed from a consumed node, and no sweep would release it"),
        (change_key, "<Node 3 add>: registered as 99"),
    ],
)
def test_audit_names_what_is_wrong(unchecked, corrupt, text):
    x = variable(unchecked, 2.0)
    y = x * x
    z = add(y, y)
    audit(unchecked, handles_of(unchecked))
    corrupt(unchecked, y, z)
    with pytest.raises(AuditError) as caught:
        audit(unchecked, handles_of(unchecked))
    prefix, _, problems = str(caught.value).partition(": ")
    assert prefix == "the graph registry is inconsistent"
    assert problems == text


def test_audit_error_is_an_assertion_error_of_ours(unchecked):
    unchecked.swept += 1
    for kind in (AssertionError, SweepgradError):
        with pytest.raises(kind):
            audit(unchecked, handles_of(unchecked))


def test_audit_shows_ten_problems_at_most(unchecked):
    x = variable(unchecked, 2.0)
    live = [x * x for _ in range(30)]
    for y in live:
        y.node.handles += 1
    with pytest.raises(AuditError) as caught:
        audit(unchecked, handles_of(unchecked))
    assert str(caught.value).count("handles counted") == 10


def test_audit_accepts_consumed_nodes_that_wait_to_be_removed(registry):
    x = variable(registry, 2.0)
    y = x * x
    z = multiply(y, x)
    registry.commit([y.node], [], consume=True, version=registry.version)
    audit(registry, handles_of(registry))
    assert list(registry.retiring) == [y.node]
    del y
    registry.sweep()
    del z


def test_audit_accepts_nodes_that_wait_to_be_released(registry):
    x = variable(registry, 2.0)
    y = x * x
    run_backward(y)
    z = multiply(y, x)
    u = multiply(z, z)
    assert registry.stranded == [z.node]
    audit(registry, handles_of(registry))
    registry._release(registry.stranded.pop(), [])
    assert registry.stranded == [u.node]
    audit(registry, handles_of(registry))
    del z
    audit(registry, handles_of(registry))


def test_audit_counts_again_when_a_handle_dies_while_it_counts(registry):
    x = variable(registry, 2.0)
    living = [x * x]
    rounds = []

    def find_handles():
        found = handles_of(registry)()
        rounds.append(len(found))
        living.clear()
        return found

    audit(registry, find_handles)
    assert rounds == [2, 1]


def test_audit_sees_handles_in_reference_cycles(registry):
    x = variable(registry, 2.0)
    y = x * x
    y._grad = y
    del y
    audit(registry, handles_of(registry))
    assert sum(type(found) is Handle and found.registry is registry for found in gc.get_objects()) == 2
