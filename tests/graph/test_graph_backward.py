"""What a backward pass computes, what it consumes, and that one which raises changes nothing."""

import pytest
from graph_toys import (
    Rule,
    add,
    add_hook,
    chain_of,
    handles_of,
    multiply,
    passing,
    record,
    retain_grad,
    run_backward,
    run_gradients,
    run_replay,
    state,
    variable,
)

from sweepgrad.errors import GraphConsumedError
from sweepgrad.graph import backward as backward_module
from sweepgrad.graph.backward import backward
from sweepgrad.graph.registry import BATCH, RELIEF
from sweepgrad.graph.report import audit, stats

# --- gradients --------------------------------------------------------------------------------------------------------


def test_both_edges_to_a_shared_parent_count(registry):
    x = variable(registry, 3.0)
    run_backward(x * x)
    assert x._grad == 6.0


def test_diamond_sums_over_its_paths(registry):
    x = variable(registry, 2.0)
    y = x * x
    run_backward((y + x) * (y * x))  # (x^2 + x) x^3
    assert x._grad == 5 * 2.0**4 + 4 * 2.0**3


def test_cotangent_of_the_root_scales_the_gradients(registry):
    x = variable(registry, 3.0)
    run_backward(x * x, ct=-0.5)
    assert x._grad == -3.0


def test_root_may_be_a_variable(registry):
    x = variable(registry, 3.0)
    run_backward(x, ct=5.0)
    run_backward(x, ct=2.0)
    assert x._grad == 7.0


def test_gradients_of_several_roots_add_up(registry):
    x = variable(registry, 3.0)
    y = x * x
    roots = [y * x, y + x]
    for root in roots:
        run_backward(root, retain_graph=True)
    assert x._grad == 3 * 3.0**2 + 2 * 3.0 + 1


def test_zero_cotangents_arrive_and_absent_ones_do_not(registry):
    x, y, z = (variable(registry, v) for v in (1.0, 2.0, 3.0))
    u = record(Rule("first two", lambda ct: (ct, 0.0, None)), 1.0, (), x, y, z)
    run_backward(u)
    assert (x._grad, y._grad, z._grad) == (1.0, 0.0, None)


def test_absent_part_leaves_what_came_over_another_edge(registry):
    x = variable(registry, 1.0)
    run_backward(record(Rule("first", lambda ct: (ct, None)), 1.0, (), x, x))
    run_backward(record(Rule("second", lambda ct: (None, ct)), 1.0, (), x, x))
    assert x._grad == 2.0


def test_operations_that_no_cotangent_reaches_do_not_run(registry):
    x = variable(registry, 1.0)
    inner = Rule("inner", lambda ct: (ct,))
    y = record(Rule("cut", lambda ct: (None,)), 1.0, (), record(inner, 1.0, (), x))
    run_backward(y)
    assert inner.calls == 0
    assert x._grad is None


def test_children_run_before_parents(registry):
    x = variable(registry, 1.0)
    order = []
    a = passing(x, lambda: order.append("a"))
    b = passing(a, lambda: order.append("b"))
    c = passing(a, lambda: order.append("c"))
    d = passing(b + c, lambda: order.append("d"))
    run_backward(d * a)
    assert order == ["d", "c", "b", "a"]


def test_each_node_is_visited_once_however_many_paths_lead_to_it(registry):
    x = variable(registry, 1.0)
    y = x
    for _ in range(100):
        y = y + y
    assert [node.id for node in backward_module.reachable(y.node)] == list(range(101, 0, -1))
    run_backward(y)
    assert x._grad == 2.0**100


def test_own_sums_only_may_be_overwritten(registry):
    class Box:
        def __init__(self, v):
            self.v = v

        def __add__(self, other):
            return Box(self.v + other.v)

    def accumulate(total, part):
        total.v += part.v
        return total

    x, y = variable(registry, 1.0), variable(registry, 1.0)
    given = Box(1.0)
    z = (x + y) + (x + y) + (x + y)  # `add` passes the one cotangent on to all
    backward(registry, z.node, given, arithmetic=backward_module.Arithmetic(accumulate=accumulate), retain_graph=True)
    assert given.v == 1.0
    assert (x._grad.v, y._grad.v) == (3.0, 3.0)
    before = x._grad
    backward(registry, z.node, given, arithmetic=backward_module.Arithmetic(accumulate=accumulate))
    assert before.v == 3.0
    assert x._grad.v == 6.0


class Dressed:
    """What users get for a cotangent that the pass itself keeps as a plain float."""

    def __init__(self, node, v):
        self.op = node.rule.name
        self.v = v

    def __add__(self, other):
        return self.v + other.v


DRESSING = backward_module.Arithmetic(deliver=Dressed, receive=lambda node, dressed: dressed.v)


def test_hooks_owners_and_callers_get_what_the_arithmetic_delivers(registry):
    x = variable(registry, 3.0)
    y = x * x
    retain_grad(y)
    seen = []
    add_hook(y, lambda ct: seen.append((ct.op, ct.v)))
    add_hook(y, lambda ct: Dressed(y.node, ct.v * 10))
    add_hook(y, lambda ct: seen.append((ct.op, ct.v)))
    run_backward(y, arithmetic=DRESSING, retain_graph=True)
    assert seen == [("multiply", 1.0), ("multiply", 10.0)]
    assert (y._grad.op, y._grad.v) == ("multiply", 10.0)
    assert (x._grad.op, x._grad.v) == ("variable", 60.0)
    (found,) = run_gradients(y, [x], arithmetic=DRESSING, retain_graph=True)
    assert (found.op, found.v) == ("variable", 60.0)
    run_backward(y, arithmetic=DRESSING)
    assert x._grad == 120.0


def test_first_two_parts_are_added_and_further_ones_accumulated(registry):
    calls = []

    def noted(name):
        return lambda total, part: calls.append((name, total, part)) or total + part

    x = variable(registry, 1.0)
    y = record(Rule("four", lambda ct: (ct, 10 * ct, 100 * ct, 1000 * ct)), 1.0, (), x, x, x, x)
    run_backward(y, arithmetic=backward_module.Arithmetic(add=noted("add"), accumulate=noted("accumulate")))
    assert calls == [("add", 1.0, 10.0), ("accumulate", 11.0, 100.0), ("accumulate", 111.0, 1000.0)]
    assert x._grad == 1111.0


def test_replay_gives_gradients_that_can_be_differentiated_again(registry):
    x, one = variable(registry, 3.0), variable(registry, 1.0)
    y = x * x * x
    run_replay(y, one)
    first, x._grad = x._grad, None
    assert first.v == 27.0
    run_backward(first)
    assert x._grad == 18.0


# --- who gets a gradient ----------------------------------------------------------------------------------------------


def test_dead_variables_get_nothing_and_rules_that_lead_only_to_them_do_not_run(registry):
    x, dead = variable(registry, 2.0), variable(registry, 3.0)
    shared = Rule("shared", lambda ct: (ct, ct))
    vain = Rule("vain", lambda ct: (ct,))
    y = record(shared, 1.0, (), x, record(vain, 1.0, (), dead))
    del dead
    run_backward(y)
    assert x._grad == 1.0
    assert (shared.calls, vain.calls) == (1, 0)


def test_parts_for_dead_variables_are_not_even_added(registry):
    x, dead = variable(registry, 2.0), variable(registry, 3.0)
    y = (x * dead) * dead
    del dead

    def add_nothing(total, part):
        raise AssertionError("two parts for a dead variable were added")

    run_backward(y, arithmetic=backward_module.Arithmetic(add=add_nothing))
    assert x._grad == 9.0


def test_pass_that_leads_to_nothing_living_runs_no_rule(registry):
    dead = variable(registry, 3.0)
    rule = Rule("vain", lambda ct: (ct,))
    y = record(rule, 1.0, (), dead)
    del dead
    run_backward(y)
    assert rule.calls == 0


def test_owner_of_an_intermediate_gets_its_gradient(registry):
    x = variable(registry, 2.0)
    y = x * x
    retain_grad(y)
    run_backward(y * x)
    assert (x._grad, y._grad) == (12.0, 2.0)


def test_owner_that_lives_keeps_its_branch_wanted_though_its_variable_is_dead(registry):
    dead, w = variable(registry, 2.0), variable(registry, 5.0)
    y = dead * dead
    retain_grad(y)
    z = y * w
    del dead, w
    run_backward(z)
    assert y._grad == 5.0


def test_dead_owner_gets_nothing(registry):
    x = variable(registry, 2.0)
    y = x * x
    retain_grad(y)
    z = y * x
    del y
    run_backward(z)
    assert x._grad == 12.0


def test_owner_may_die_while_the_pass_runs(registry):
    living = [variable(registry, 2.0)]
    y = passing(living[0], living.clear)
    run_backward(y)
    assert registry.sweep().remaining == 0
    assert stats(registry).variables == 0


def test_gradient_adds_to_what_was_there(registry):
    x = variable(registry, 2.0)
    x._grad = 100.0
    run_backward(x * x)
    assert x._grad == 104.0


def test_gradients_leaves_the_owners_gradients_alone(registry):
    x, w = variable(registry, 2.0), variable(registry, 3.0)
    x._grad = 100.0
    y = x * w
    z = y * x
    assert run_gradients(z, [x, y, z], retain_graph=True) == [12.0, 2.0, 1.0]
    assert (x._grad, y._grad, w._grad) == (100.0, None, None)


def test_gradients_runs_only_what_leads_to_a_target(registry):
    x, w = variable(registry, 2.0), variable(registry, 3.0)
    rule = Rule("other", lambda ct: (ct,))
    z = x + record(rule, 3.0, (), w)
    assert run_gradients(z, [x], retain_graph=True) == [1.0]
    assert rule.calls == 0


def test_gradients_of_something_unrelated_is_absent_and_consumes_nothing(registry):
    x, w = variable(registry, 2.0), variable(registry, 3.0)
    y = x * x
    assert run_gradients(y, [w]) == [None]
    run_backward(y)
    assert x._grad == 4.0


def test_gradients_consumes_what_it_ran(registry):
    x = variable(registry, 2.0)
    y = x * x
    assert run_gradients(y, [x]) == [4.0]
    assert (stats(registry).nodes, stats(registry).consumed) == (1, 1)
    with pytest.raises(GraphConsumedError):
        run_backward(y)
    assert x._grad is None


def test_gradients_takes_a_cotangent_and_replays(registry):
    x, one = variable(registry, 3.0), variable(registry, 1.0)
    y = x * x * x
    found = backward_module.gradients(
        registry, y.node, one, iter([x.node]), arithmetic=backward_module.Arithmetic(replays=True), retain_graph=True
    )
    assert found[x.node].v == 27.0
    assert run_gradients(found[x.node], [x], ct=2.0) == [36.0]


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_hook_sees_the_whole_cotangent_and_may_change_it(registry):
    x = variable(registry, 2.0)
    y = x * x
    seen = []
    add_hook(y, lambda ct: seen.append(ct) or ct * 10)
    run_backward(y + y)
    assert seen == [2.0]
    assert x._grad == 80.0


def test_hook_that_returns_none_leaves_the_cotangent(registry):
    x = variable(registry, 2.0)
    add_hook(x, lambda ct: None)
    run_backward(x * x)
    assert x._grad == 4.0


def test_hooks_run_in_the_order_in_which_they_were_added(registry):
    x = variable(registry, 2.0)
    add_hook(x, lambda ct: ct + 1)
    add_hook(x, lambda ct: ct * 10)
    run_backward(x * x)
    assert x._grad == 50.0


def test_hook_may_change_a_cotangent_to_zero(registry):
    x = variable(registry, 2.0)
    add_hook(x, lambda ct: 0.0)
    run_backward(x * x)
    assert x._grad == 0.0


def test_owner_of_an_intermediate_gets_what_its_hooks_made(registry):
    x = variable(registry, 2.0)
    y = x * x
    retain_grad(y)
    add_hook(y, lambda ct: ct * 3)
    run_backward(y)
    assert (y._grad, x._grad) == (3.0, 12.0)


def test_hook_of_a_dead_intermediate_runs_though_nothing_else_is_wanted(registry):
    dead = variable(registry, 2.0)
    y = dead * dead
    seen = []
    add_hook(y, seen.append)
    z = y * y
    del dead, y
    run_backward(z)
    assert seen == [8.0]


def test_hook_of_a_dead_variable_runs(registry):
    dead = variable(registry, 2.0)
    seen = []
    add_hook(dead, seen.append)
    z = dead * dead
    del dead
    run_backward(z)
    assert seen == [4.0]


def test_hooks_on_branches_that_are_not_wanted_do_not_run_for_given_targets(registry):
    x, w = variable(registry, 2.0), variable(registry, 3.0)
    seen = []
    add_hook(w, seen.append)
    assert run_gradients(x * w, [x]) == [3.0]
    assert seen == []


def test_hook_removed_by_an_earlier_hook_of_the_node_still_runs_in_this_pass(registry):
    x = variable(registry, 2.0)
    seen = []
    add_hook(x, lambda ct: registry.extra(x.node).hooks.clear())
    add_hook(x, seen.append)
    y = x * x
    run_backward(y, retain_graph=True)
    run_backward(y)
    assert seen == [4.0]


# --- consumption ------------------------------------------------------------------------------------------------------


def test_second_pass_raises_and_names_the_operation_before_anything_changes(registry):
    x = variable(registry, 2.0)
    y = x * x
    run_backward(y)
    before = state(registry)
    with pytest.raises(
        GraphConsumedError,
        match=r"`multiply` \(node 2\) was consumed by an earlier backward pass, so no backward pass can run through "
        r"it; give the earlier pass retain_graph=True, or compute the result anew",
    ):
        run_backward(y)
    assert x._grad == 4.0
    assert state(registry) == before


def test_retained_graph_runs_again(registry):
    x = variable(registry, 2.0)
    y = x * x
    for _ in range(3):
        run_backward(y, retain_graph=True)
    assert x._grad == 12.0
    assert stats(registry).consumed == 0
    run_backward(y)
    assert x._grad == 16.0
    assert stats(registry).consumed == 1


def test_consumed_nodes_leave_at_once_and_the_variables_stay(registry):
    x = variable(registry, 2.0)
    y = chain_of(x, 3 * BATCH)
    run_backward(y)
    found = stats(registry)
    assert (found.nodes, found.variables, found.consumed, found.saved_bytes) == (1, 1, 3 * BATCH, 0)
    assert x.node.children is None


def test_variable_works_on_after_its_graph_was_consumed(registry):
    x = variable(registry, 2.0)
    for k in range(1, 4):
        run_backward(x * x)
        assert x._grad == 4.0 * k


def test_only_what_ran_is_consumed(registry):
    x, dead = variable(registry, 2.0), variable(registry, 3.0)
    vain = dead * dead
    y = x * vain
    del dead
    run_backward(y)
    assert stats(registry).consumed == 1
    run_backward(vain)  # it led to nothing living, so it still has what it saved


def test_later_results_of_a_consumed_node_are_unavailable_and_release_what_they_saved(registry):
    x, w = variable(registry, 2.0), variable(registry, 3.0)
    y = x * x
    z = multiply(y, w, nbytes=100)
    u = multiply(z, w, nbytes=10)
    run_backward(y)
    assert stats(registry).saved_bytes == 0
    for root, name in ((z, "multiply"), (u, "multiply")):
        with pytest.raises(GraphConsumedError, match=rf"`{name}` .* was computed from `multiply`, which an earlier"):
            run_backward(root)
    assert w._grad is None


def test_long_rest_of_a_consumed_graph_is_released_at_the_end_of_the_pass(registry):
    x = variable(registry, 2.0)
    y = x * x
    z = chain_of(y, 3 * BATCH)
    run_backward(y)
    assert stats(registry).saved_bytes == 0
    assert z.node.parents == ()


def test_error_names_the_operation_that_was_consumed_and_the_one_that_cannot_run(registry):
    x = variable(registry, 2.0)
    y = x * x
    z = add(add(y, x), x)
    run_backward(y)
    with pytest.raises(GraphConsumedError, match=r"`add` \(node 4\) was computed from `multiply`"):
        run_backward(z)


def test_result_computed_after_the_consumption_is_unavailable_and_releases_what_it_saved(registry):
    x = variable(registry, 2.0)
    y = x * x
    unavailable = y * x
    run_backward(y)
    late = [multiply(y, x, nbytes=100), multiply(unavailable, x, nbytes=10)]
    late.append(multiply(late[1], x, nbytes=1))
    for root in late:
        with pytest.raises(GraphConsumedError):
            run_backward(root)
    assert stats(registry).saved_bytes == 111
    assert registry.sweep().bytes == 111
    for root in late:
        with pytest.raises(GraphConsumedError, match="was computed from `multiply`"):
            run_backward(root)
    audit(registry, handles_of(registry))


def test_other_parents_of_an_unavailable_node_become_orphans(registry):
    x, w = variable(registry, 2.0), variable(registry, 3.0)
    y, other = x * x, w * w
    z = y * other
    del other
    registry.sweep()
    assert stats(registry).nodes == 5
    run_backward(y)
    assert [node.id for node in registry.snapshot()] == [1, 2, 5]  # the variables, and z, whose handle lives
    assert w.node.children is None
    del z
    assert registry.sweep().nodes == 1


def test_dead_node_between_a_consumed_and_a_living_one_goes(registry):
    x = variable(registry, 2.0)
    y = x * x
    z = y * y
    u = z * z
    del z
    registry.sweep()
    run_backward(y)
    assert [node.id for node in registry.snapshot()] == [1, 4]
    del u


def test_unavailable_node_that_dies_between_two_sweeps_goes(registry):
    x = variable(registry, 2.0)
    y = x * x
    z = y * x
    u = [z * z for _ in range(3)]
    registry.commit([y.node], [], consume=True, version=registry.version)
    del z
    registry.sweep(max_nodes=1)
    audit(registry, handles_of(registry))
    registry.sweep()
    assert [node.id for node in registry.snapshot()] == [1, 4, 5, 6]
    del u


def test_siblings_of_a_consumed_node_run(registry):
    x = variable(registry, 2.0)
    y, z = x * x, x * x
    run_backward(y)
    run_backward(z)
    assert x._grad == 8.0


def test_end_of_a_pass_sweeps_a_bounded_number_of_orphans(registry):
    x = variable(registry, 2.0)
    y = x * x
    registry.set_threshold(nodes=2 * RELIEF)
    for _ in range(RELIEF + 10):
        x + x
    run_backward(y)
    assert stats(registry).swept == RELIEF
    assert stats(registry).dropped == 10


def test_pass_frees_dropped_branches_even_where_nothing_is_consumed(registry):
    x = variable(registry, 2.0)
    y = x * x
    x + x
    run_backward(y, retain_graph=True)
    assert stats(registry).swept == 1


# --- a pass that raises changes nothing -------------------------------------------------------------------------------


class Trouble(Exception):
    pass


def trouble(error):
    def action(*_):
        raise error

    return action


@pytest.fixture(params=[Trouble("no"), KeyboardInterrupt(), MemoryError()], ids=lambda error: type(error).__name__)
def error(request):
    return request.param


def expect_nothing_changed(registry, root, handles, error):
    """The pass raises `error`, and everything is as before."""
    before = state(registry), [handle._grad for handle in handles]
    with pytest.raises(type(error)) as caught:
        run_backward(root)
    caught.value.__traceback__ = None  # it holds the handles of the pass
    assert (state(registry), [handle._grad for handle in handles]) == before
    audit(registry, handles_of(registry))


def test_rule_that_raises_changes_nothing(registry, error):
    x, w = variable(registry, 2.0), variable(registry, 3.0)
    w._grad = 50.0
    y = w * passing(x * x, trouble(error))
    retain_grad(y)
    expect_nothing_changed(registry, y, [x, w, y], error)


def test_hook_that_raises_changes_nothing(registry, error):
    x, w = variable(registry, 2.0), variable(registry, 3.0)
    y = w * x
    add_hook(x, trouble(error))
    retain_grad(y)
    expect_nothing_changed(registry, y, [x, w, y], error)
    registry.extra(x.node).hooks.clear()
    run_backward(y)
    assert (x._grad, w._grad, y._grad) == (3.0, 2.0, 1.0)


def test_sum_with_an_earlier_gradient_that_raises_changes_nothing(registry, error):
    class Fragile(float):
        __add__ = trouble(error)

    x, w = variable(registry, 2.0), variable(registry, 3.0)
    x._grad = Fragile(1.0)  # w, which is younger, has its sum by then
    w._grad = 1.0
    y = x * w
    expect_nothing_changed(registry, y, [x, w], error)
    x._grad = None
    run_backward(y)
    assert (x._grad, w._grad) == (3.0, 3.0)


def test_sum_within_the_pass_that_raises_changes_nothing(registry, error):
    class Fragile(float):
        __add__ = trouble(error)

    x = variable(registry, 2.0)
    y = record(Rule("fragile", lambda ct: (Fragile(ct), Fragile(ct))), 1.0, (), x, x)
    expect_nothing_changed(registry, y, [x], error)


def test_pass_over_a_consumed_ancestor_changes_nothing(registry):
    x, w = variable(registry, 2.0), variable(registry, 3.0)
    shared = x * x
    late = shared * w
    run_backward(shared)
    expect_nothing_changed(registry, late, [x, w], GraphConsumedError())


def test_sweep_at_the_end_of_a_pass_reports_orphans_only(registry):
    x = variable(registry, 2.0)
    multiply(x, x, nbytes=10)
    y = multiply(x, x, nbytes=1000)
    reports = []
    registry.callbacks.append(lambda phase, info: reports.append((phase, info)))
    run_backward(y)
    (_, start), (_, stop) = reports
    assert start == {"trigger": "backward", "dropped": 1}
    assert (stop["trigger"], stop["nodes"], stop["bytes"], stop["remaining"]) == ("backward", 1, 10, 0)
