"""Backward passes, gradients, hooks, modes, and functional differentiation, through the public API."""

import functools
import gc
import threading
import typing
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sweepgrad as sg
from strategies import examples, seeds
from sweepgrad.elements import dense


@pytest.fixture(autouse=True)
def _audited():
    """The registry's counts are right as the test left it, and after a sweep."""
    sg.sweep()
    yield
    sg.graph.audit()
    gc.collect()
    while sg.sweep().remaining:
        pass
    sg.graph.audit()


def variable(*values, dtype=None):
    return sg.asarray(values[0] if len(values) == 1 else list(values), dtype=dtype, requires_grad=True)


def state():
    """What the graph holds, once all that was dropped is swept."""
    gc.collect()
    while sg.sweep().remaining:
        pass
    now = sg.graph.stats()
    return now.nodes, now.variables, now.childless, now.saved_bytes, now.consumed


# --- backward -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", [np.array([1.0, 10.0]), sg.asarray([1.0, 10.0]), [1, 10], (1.0, 10.0)], ids=repr)
def test_backward_with_a_gradient(gradient):
    x = variable(2.0, 3.0)
    (x * x).backward(gradient)
    assert x.grad.tolist() == [4.0, 60.0]
    assert not x.grad.requires_grad


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_the_default_gradient_is_one(shape):
    x = sg.full(shape, 3.0, requires_grad=True)
    (x * x).backward()
    assert x.grad.shape == shape
    assert x.grad.item() == 6.0
    (x * x).backward(2.0 if shape == () else np.full(shape, 2.0))
    assert x.grad.item() == 18.0


def test_backward_on_a_variable_itself():
    x = variable(2.0)
    x.backward()
    x.backward(5.0)
    assert x.grad.item() == 6.0


def test_gradients_add_up_and_earlier_ones_are_not_changed():
    x, y = variable(1.0, 2.0), variable(3.0, 4.0)
    (x + y).backward(np.array([1.0, 1.0]))
    first = x.grad, y.grad
    for _ in range(3):
        (x + y).backward(np.array([1.0, 1.0]))
        (x * 2.0).sum().backward()
    assert [g.tolist() for g in first] == [[1.0, 1.0], [1.0, 1.0]]
    assert x.grad.tolist() == [10.0, 10.0]
    assert y.grad.tolist() == [4.0, 4.0]


def test_a_given_gradient_is_not_changed():
    x, y = variable(1.0, 2.0), variable(3.0, 4.0)
    given = sg.asarray([1.0, 2.0])
    total = x + y
    (total + total + x).backward(given)
    x.backward(given)
    assert given.tolist() == [1.0, 2.0]
    assert x.grad.tolist() == [4.0, 8.0]
    assert y.grad.tolist() == [2.0, 4.0]


def test_float32_gradients_are_float32():
    x = variable(1.0, 2.0, dtype="float32")
    (x * 3.0 + x).sum().backward()
    assert x.grad.dtype == np.float32
    assert x.grad.tolist() == [4.0, 4.0]


def test_grad_can_be_set():
    x = variable(1.0, 2.0)
    x.grad = sg.asarray([5.0, 5.0])
    x.sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]
    x.grad = None
    assert x.grad is None
    for value, error in [
        (np.ones(2), sg.DTypeError),
        (1.0, sg.DTypeError),
        (sg.ones((1,)), sg.ShapeError),
        (sg.ones((2, 1)), sg.ShapeError),
        (sg.ones((2,), dtype="float32"), sg.DTypeError),
    ]:
        with pytest.raises(error, match="`grad`"):
            x.grad = value
    assert x.grad is None


def test_only_variables_get_a_gradient():
    x = variable(1.0, 2.0)
    plain = sg.asarray([1.0, 2.0])
    y = x * plain
    y.sum().backward()
    assert (plain.grad, y.grad) == (None, None)


def test_a_dropped_variable_costs_nothing():
    x, y = variable(1.0, 2.0), variable(3.0, 4.0)
    z = (x * y).sum()
    gone = weakref.ref(y)
    del y
    assert gone() is None
    z.backward()
    assert x.grad.tolist() == [3.0, 4.0]


@st.composite
def programs(draw):
    """(operation, operands) in turn; an operand is the number of a variable or of an earlier result."""
    steps = []
    for k in range(draw(st.integers(1, 12))):
        earlier = st.integers(0, 2 + k)
        name = draw(st.sampled_from(["add", "subtract", "multiply", "sin", "sum", "flip", "half", "join"]))
        steps.append((name, draw(earlier), draw(earlier)))
    return steps


STEPS = {
    # on tensors or arrays (m is the module), then the cotangents of the two operands
    "add": (lambda m, x, y: x + y, lambda x, y, ct: (ct, ct)),
    "subtract": (lambda m, x, y: x - y, lambda x, y, ct: (ct, -ct)),
    "multiply": (lambda m, x, y: x * y, lambda x, y, ct: (ct * y, ct * x)),
    "sin": (lambda m, x, y: m.sin(x), lambda x, y, ct: (ct * np.cos(x), 0)),
    "sum": (lambda m, x, y: y + m.sum(x), lambda x, y, ct: (np.sum(ct) + 0 * x, ct)),
    "flip": (lambda m, x, y: m.flip(x) * 2.0, lambda x, y, ct: (2 * ct[::-1], 0)),
    "half": (lambda m, x, y: x * 0.5, lambda x, y, ct: (0.5 * ct, 0)),
    "join": (
        lambda m, x, y: m.concat([x[:1], y[1:]]),
        lambda x, y, ct: (ct * (np.arange(3) < 1), ct * (np.arange(3) >= 1)),
    ),
}


@examples(150)
@given(steps=programs(), passes=st.integers(1, 3), create_graph=st.booleans(), seed=seeds)
def test_any_program(steps, passes, create_graph, seed):
    """Random programs with shared intermediates, each `grad` and retained `grad` against the chain rule in NumPy."""
    rng = np.random.default_rng(seed)
    values = list(rng.uniform(-1, 1, (3, 3)))
    tensors = [variable(value) for value in values]
    for name, i, j in steps:
        forward = STEPS[name][0]
        values.append(forward(np, values[i], values[j]))
        tensors.append(forward(sg, tensors[i], tensors[j]))
        tensors[-1].retain_grad()
    ct = rng.standard_normal(3)
    given = [sg.asarray(ct) for _ in range(passes)]
    for k, gradient in enumerate(given):
        tensors[-1].backward(gradient, retain_graph=k < passes - 1, create_graph=create_graph)
    cts = [np.zeros(3) for _ in values]
    cts[-1] = ct * passes
    for k in reversed(range(len(steps))):
        name, i, j = steps[k]
        to_i, to_j = STEPS[name][1](values[i], values[j], cts[3 + k])
        cts[i] = cts[i] + to_i
        cts[j] = cts[j] + to_j
    for tensor, expected in zip(tensors, cts, strict=True):
        found = np.zeros(3) if tensor.grad is None else tensor.grad.numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    for gradient in given:
        np.testing.assert_array_equal(gradient.numpy(), ct)


def test_a_long_chain_needs_no_recursion():
    x = variable(1.0)
    y = x
    for _ in range(20_000):
        y = y + x
    y.backward()
    assert x.grad.item() == 20_001
    y = x
    for _ in range(20_000):
        y = y + x
    del y
    assert state()[:2] == (1, 1)


# --- keeping and consuming the graph --------------------------------------------------------------------------------


def test_retain_graph():
    x = variable(1.0, 2.0)
    y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.tolist() == [6.0, 12.0]
    with pytest.raises(sg.GraphConsumedError, match=r"`sum` .*consumed"):
        y.backward()
    assert x.grad.tolist() == [6.0, 12.0]


def test_backward_leaves_only_variables():
    before = state()
    x = variable(1.0, 2.0)
    y = sg.exp(x * x).sum()
    y.backward()
    nodes, variables, childless, saved, _ = state()
    assert (nodes - before[0], variables - before[1], childless - before[2], saved - before[3]) == (1, 1, 1, 0)


@pytest.mark.parametrize("call", [sg.Tensor.backward, lambda t: sg.grad(lambda s: s * t)(2.0)])
def test_consumed_graphs(call):
    """A pass through what an earlier one used up raises, names the operation, and changes nothing."""
    x = variable(1.0, 2.0)
    shared = x * x
    first, second = shared.sum(), sg.exp(shared).sum()
    other = variable(1.0, 1.0)
    mixed = (sg.exp(shared) * other).sum()
    first.backward()
    grad, before = x.grad, state()
    for broken in (second, mixed):
        with pytest.raises(sg.GraphConsumedError, match="`multiply`"):
            call(broken)
        with pytest.raises(RuntimeError):
            call(broken)
    assert x.grad is grad
    assert other.grad is None
    assert state() == before
    anew = sg.exp(x * x).sum()
    anew.backward()
    np.testing.assert_allclose(x.grad.numpy(), [2 + 2 * np.e, 4 + 4 * np.exp(4)], rtol=1e-14)


def test_values_of_a_consumed_graph_stay():
    x = variable(1.0, 2.0)
    y = x * x
    y.sum().backward()
    assert y.tolist() == [1.0, 4.0]
    assert y.detach().requires_grad is False
    with pytest.raises(sg.GraphConsumedError):
        (y * 2.0).sum().backward()


def test_a_part_that_leads_nowhere_is_not_consumed():
    """`grad` by x uses up only what leads to x."""
    w = variable(3.0)
    outer = w * w
    with sg.no_grad():
        by_x = sg.grad(lambda x: x * outer)(2.0)
    assert by_x.item() == 9.0
    outer.backward()
    assert w.grad.item() == 6.0


def test_not_tracked():
    for tensor in (sg.ones(()), sg.ones((), requires_grad=True).detach(), sg.ones((), requires_grad=True) > 0.0):
        with pytest.raises(sg.NotTrackedError, match="`backward` on a tensor that is not tracked"):
            tensor.backward()
        with pytest.raises(sg.NotTrackedError, match="`retain_grad`"):
            tensor.retain_grad()
        with pytest.raises(sg.NotTrackedError, match="`register_hook`"):
            tensor.register_hook(print)


# --- higher orders --------------------------------------------------------------------------------------------------


def test_second_and_third_derivative_with_create_graph():
    x = variable(0.3, -0.7)
    expected = [np.cos(x.numpy()), -np.sin(x.numpy()), -np.cos(x.numpy())]
    y = sg.sin(x).sum()
    for derivative in expected:
        x.grad = None
        y.backward(create_graph=True)
        np.testing.assert_allclose(x.grad.numpy(), derivative, rtol=1e-14)
        y = x.grad.sum()


def test_gradient_penalty():
    """loss = |d/dx f|**2 for f = sum(w x**3), through both variables."""
    w, x = variable(2.0, 3.0), variable(0.5, -1.0)
    (w * x**3).sum().backward(create_graph=True)
    gradient = x.grad
    w.grad = x.grad = None
    sg.square(gradient).sum().backward()
    a, b = w.numpy(), x.numpy()
    np.testing.assert_allclose(x.grad.numpy(), 2 * (3 * a * b**2) * 6 * a * b, rtol=1e-14)
    np.testing.assert_allclose(w.grad.numpy(), 2 * (3 * a * b**2) * 3 * b**2, rtol=1e-14)


def test_create_graph_differentiates_by_the_given_gradient():
    x, ct = variable(2.0, 3.0), variable(5.0, 7.0)
    (x * x).backward(ct, create_graph=True)
    x.grad.sum().backward()
    assert ct.grad.tolist() == [4.0, 6.0]


def test_create_graph_under_no_grad_and_not_after_it():
    x = variable(2.0)
    y = x * x * x
    with sg.no_grad():
        y.backward(create_graph=True)
        assert not sg.is_grad_enabled()
    assert x.grad.requires_grad
    first, x.grad = x.grad, None
    first.backward()
    assert x.grad.item() == 12.0
    assert not x.grad.requires_grad


def test_a_plain_pass_adds_plainly_to_a_tracked_gradient():
    x = variable(2.0)
    y = x * x
    y.backward(create_graph=True)
    assert x.grad.requires_grad
    y.backward()
    assert x.grad.item() == 8.0
    assert not x.grad.requires_grad


# --- retain_grad, hooks ---------------------------------------------------------------------------------------------


def test_retain_grad():
    x = variable(1.0, 2.0)
    y = x * 3.0
    y.retain_grad()
    (y * y).sum().backward()
    assert y.grad.tolist() == [6.0, 12.0]
    assert x.grad.tolist() == [18.0, 36.0]
    assert not y.is_variable


def test_hooks_run_in_order_and_replace():
    x = variable(1.0, 2.0)
    seen = []

    def hook(name, change):
        def call(ct):
            seen.append((name, ct.tolist()))
            assert not ct.requires_grad
            return change(ct)

        return call

    y = x * 2.0
    y.register_hook(hook("first", lambda ct: ct + 1.0))
    y.register_hook(hook("second", lambda ct: None))
    y.register_hook(hook("third", lambda ct: ct * 10.0))
    y.retain_grad()
    x.register_hook(hook("x", lambda ct: None))
    (y + y).sum().backward()
    assert seen == [("first", [2.0, 2.0]), ("second", [3.0, 3.0]), ("third", [3.0, 3.0]), ("x", [60.0, 60.0])]
    assert y.grad.tolist() == [30.0, 30.0]
    assert x.grad.tolist() == [60.0, 60.0]


def test_a_hook_sees_the_whole_cotangent_once():
    x = variable(1.0)
    seen = []
    y = x * 1.0
    y.register_hook(lambda ct: seen.append(ct.item()))
    (y + y * y + sg.exp(y)).backward()
    np.testing.assert_allclose(seen, [1 + 2 + np.e])


def test_the_same_hook_twice_and_removal():
    x = variable(1.0)
    double = lambda ct: ct * 2.0  # noqa: E731
    first, second = x.register_hook(double), x.register_hook(double)
    x.backward()
    assert x.grad.item() == 4.0
    first.remove()
    first.remove()
    x.grad = None
    x.backward()
    assert x.grad.item() == 2.0
    x.register_hook(lambda ct: ct + 1.0)  # may get the memory of what is gone
    first.remove()
    second.remove()
    second.remove()
    x.grad = None
    x.backward()
    assert x.grad.item() == 2.0
    x.grad = None
    with x.register_hook(double) as handle:
        assert isinstance(handle, sg.HookHandle)
        x.backward()
    x.backward()
    assert x.grad.item() == 4.0 + 2.0


def test_hooks_whose_handles_are_dropped_all_stay():
    x = variable(1.0)
    seen = []
    for k in range(10):
        x.register_hook(lambda ct, k=k: seen.append(k))
    x.backward()
    assert seen == list(range(10))


def test_a_hook_on_an_intermediate_whose_tensor_was_dropped():
    x = variable(1.0, 2.0)
    y = x * 3.0
    seen = []
    y.register_hook(lambda ct: seen.append(ct.tolist()) or ct * 2.0)
    z = (y * y).sum()
    del y
    sg.sweep()
    z.backward()
    assert seen == [[6.0, 12.0]]
    assert x.grad.tolist() == [36.0, 72.0]


def test_a_hook_is_called_though_no_variable_is_left():
    x = variable(1.0, 2.0)
    y = x * 3.0
    seen = []
    y.register_hook(lambda ct: seen.append(ct.tolist()))
    z = (y * y).sum()
    del x, y
    z.backward()
    assert seen == [[6.0, 12.0]]


def test_a_hook_can_be_differentiated_with_create_graph():
    x = variable(3.0)
    y = x * x
    y.register_hook(lambda ct: ct * x)
    y.backward(create_graph=True)
    assert x.grad.item() == 18.0  # 2 x x
    gradient, x.grad = x.grad, None
    gradient.backward()
    assert x.grad.item() == 12.0


def test_a_hook_with_tracked_values_leaves_nothing_tracked():
    x = variable(3.0)
    y = x * 2.0
    y.register_hook(lambda ct: ct * x)
    y.backward()
    assert x.grad.item() == 6.0
    assert not x.grad.requires_grad


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (1.0, sg.DTypeError, "must be a Tensor or None; found float"),
        (np.ones(2), sg.DTypeError, "must be a Tensor or None; found ndarray"),
        (sg.ones((3,)), sg.ShapeError, r"has shape \(3,\); needed is the tensor's own shape \(2,\)"),
        (sg.ones((2,), dtype="float32"), sg.DTypeError, "has dtype float32; needed is the tensor's own dtype float64"),
    ],
)
def test_a_hook_that_returns_something_else(result, error, message):
    x = variable(1.0, 2.0)
    y = (x * x).sum()
    with (
        x.register_hook(lambda ct: result),
        pytest.raises(error, match=f"the result of the hook `.*<lambda>` {message}"),
    ):
        y.backward()
    assert x.grad is None
    y.backward()
    assert x.grad.tolist() == [2.0, 4.0]


def test_a_hook_must_be_callable():
    with pytest.raises(sg.DTypeError, match="`register_hook` needs a function; found int"):
        variable(1.0).register_hook(3)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("where", ["variable", "intermediate"])
def test_a_hook_that_raises_leaves_everything_as_it_was(error, create_graph, where):
    x, w = variable(1.0, 2.0), variable(3.0, 4.0)
    (x + w).sum().backward()
    y = x * w
    y.retain_grad()
    z = sg.exp(y).sum() + w.sum()
    before, grads = state(), (x.grad, w.grad, y.grad)

    def stop(ct):
        raise error("now")

    with (x if where == "variable" else y).register_hook(stop), pytest.raises(error, match="now"):
        z.backward(create_graph=create_graph)
    assert all(found is old for found, old in zip((x.grad, w.grad, y.grad), grads, strict=True))
    assert sg.is_grad_enabled()
    assert state() == before
    z.backward()
    slope = np.exp([3.0, 8.0])
    np.testing.assert_allclose(y.grad.numpy(), slope, rtol=1e-14)
    np.testing.assert_allclose(x.grad.numpy(), 1 + slope * [3, 4], rtol=1e-14)
    np.testing.assert_allclose(w.grad.numpy(), 2 + slope * [1, 2], rtol=1e-14)


def test_a_hook_may_run_backward_itself():
    x, other = variable(2.0), variable(5.0)
    y = x * x

    @sg.enable_grad()
    def hook(ct):
        (other * other).backward()

    y.register_hook(hook)
    y.backward()
    assert (x.grad.item(), other.grad.item()) == (4.0, 10.0)


# --- variables and plain tensors ------------------------------------------------------------------------------------


def test_detach():
    x = variable(1.0, 2.0)
    y = (x * 3.0).detach()
    assert not y.requires_grad
    (x * y).sum().backward()
    assert x.grad.tolist() == [3.0, 6.0]
    assert np.shares_memory(dense(x.detach()), dense(x))


def test_requires_grad_both_ways():
    x = sg.asarray([1.0, 2.0])
    assert x.requires_grad_() is x
    assert x.is_variable
    (x * x).sum().backward()
    assert x.grad.tolist() == [2.0, 4.0]
    assert x.requires_grad_(True) is x
    assert x.requires_grad_(False) is x
    assert not x.requires_grad
    assert not (x * x).requires_grad
    x.requires_grad_(False)
    with pytest.raises(sg.VariableError, match=r"`requires_grad_\(False\)` on the result of `multiply`"):
        (variable(1.0) * 2.0).requires_grad_(False)
    y = variable(1.0) * 2.0
    assert y.requires_grad_() is y
    assert not y.is_variable


def test_a_tensor_that_is_a_variable_no_more_gets_no_gradient():
    x, w = variable(1.0, 2.0), variable(3.0, 4.0)
    before = x * w
    x.requires_grad_(False)
    before.sum().backward()
    assert x.grad is None
    assert w.grad.tolist() == [1.0, 2.0]


def test_a_variable_made_anew_gets_the_gradient_of_its_new_graph():
    x = variable(1.0, 2.0)
    old = x * 2.0
    x.requires_grad_(False).requires_grad_()
    new = x * 3.0
    (old + new).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_is_variable():
    x = variable(1.0)
    assert [t.is_variable for t in (x, x * 2.0, x.detach(), sg.ones(()), sg.asarray(x))] == [
        True,
        False,
        False,
        False,
        True,
    ]
    assert [t.requires_grad for t in (x, x * 2.0, x.detach(), x > 0.0)] == [True, True, False, False]


# --- modes ----------------------------------------------------------------------------------------------------------


def test_no_grad_and_enable_grad_nest():
    x = variable(1.0)
    registered = sg.graph.stats().registered
    with sg.no_grad():
        assert not sg.is_grad_enabled()
        for function in (lambda: x * 2.0, lambda: x[None], lambda: sg.exp(x), lambda: x @ x[None] if x.ndim else x + x):
            assert not function().requires_grad
        assert not (x + sg.ones((2, 1)) * x.reshape(1)).requires_grad
        assert sg.graph.stats().registered == registered
        with sg.enable_grad():
            assert (x * 2.0).requires_grad
            with sg.no_grad():
                assert not (x * 2.0).requires_grad
            assert sg.is_grad_enabled()
        assert not sg.is_grad_enabled()
        assert sg.ones((), requires_grad=True).is_variable
    assert sg.is_grad_enabled()


def test_modes_are_put_back_after_an_error():
    with pytest.raises(ZeroDivisionError), sg.no_grad():
        raise ZeroDivisionError
    assert sg.is_grad_enabled()

    @sg.no_grad()
    def fails():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert sg.is_grad_enabled()


def test_one_context_entered_twice():
    context = sg.no_grad()
    with context, sg.enable_grad(), context:
        assert not sg.is_grad_enabled()
    assert sg.is_grad_enabled()


def test_modes_as_decorators():
    x = variable(1.0)

    @sg.no_grad()
    def plain(a, *, b=2.0):
        """Documented."""
        return a * b, tracked(a)

    @sg.enable_grad()
    def tracked(a):
        return a * 2.0

    first, second = plain(x, b=3.0)
    assert (first.item(), first.requires_grad, second.requires_grad) == (3.0, False, True)
    assert (plain.__name__, plain.__doc__) == ("plain", "Documented.")
    assert sg.is_grad_enabled()


def test_modes_refuse_generators_and_coroutines():
    def generator():
        yield 1

    async def coroutine():
        return 1

    async def stream():
        yield 1

    for make in (sg.no_grad, sg.enable_grad):
        for function in (generator, coroutine, stream, functools.partial(generator)):
            with pytest.raises(sg.DTypeError, match=f"`{make.__name__}` cannot decorate"):
                make()(function)
        with pytest.raises(sg.DTypeError, match=f"`{make.__name__}` decorates a function; found int"):
            make()(3)


@pytest.mark.parametrize("make", [sg.no_grad, sg.enable_grad])
def test_modes_as_decorators_need_parentheses(make):
    with pytest.raises(sg.DTypeError, match=rf"`{make.__name__}` .* found function: .* `@{make.__name__}\(\)`"):

        @make
        def function():
            return 1


def test_the_mode_is_of_each_thread():
    x = variable(1.0)
    inside, outside = threading.Barrier(2, timeout=30), threading.Barrier(2, timeout=30)
    found = []

    def other():
        found.append(sg.is_grad_enabled())
        with sg.no_grad():
            inside.wait()
            found.append((x * 2.0).requires_grad)
            outside.wait()

    worker = threading.Thread(target=other)
    with sg.no_grad():
        worker.start()
        inside.wait()
    found.append((x * 2.0).requires_grad)
    outside.wait()
    worker.join(30)
    assert found in ([True, False, True], [True, True, False])
    assert (x * 2.0).requires_grad


def test_a_pool_takes_over_the_mode():
    x = variable(1.0)
    with sg.no_grad():
        inheriting = ThreadPoolExecutor(1, initializer=sg.set_grad_enabled, initargs=(sg.is_grad_enabled(),))
        with inheriting, ThreadPoolExecutor(1) as plain:
            assert not inheriting.submit(lambda: (x * 2.0).requires_grad).result(30)
            assert plain.submit(lambda: (x * 2.0).requires_grad).result(30)
        assert not sg.is_grad_enabled()


@pytest.mark.parametrize("value", [None, 1, "on"])
def test_set_grad_enabled_needs_a_bool(value):
    with pytest.raises(TypeError, match="`set_grad_enabled` needs True or False; found"):
        sg.set_grad_enabled(value)
    assert sg.is_grad_enabled()


# --- grad and value_and_grad ----------------------------------------------------------------------------------------


def f(x, y, *, scale=1.0):
    return sg.sum(x * x * y) * scale


@pytest.mark.parametrize(
    ("argnums", "expected"),
    [
        (0, [12.0, 40.0]),
        (1, [4.0, 16.0]),
        (-1, [4.0, 16.0]),
        (-2, [12.0, 40.0]),
        (np.int64(1), [4.0, 16.0]),
        ((0,), ([12.0, 40.0],)),
        ((0, 1), ([12.0, 40.0], [4.0, 16.0])),
        ([1, 0], ([4.0, 16.0], [12.0, 40.0])),
        ((-1, 0), ([4.0, 16.0], [12.0, 40.0])),
    ],
)
def test_argnums(argnums, expected):
    x, y = np.array([2.0, 4.0]), np.array([3.0, 5.0])
    value, gradient = sg.value_and_grad(f, argnums)(x, y)
    again = sg.grad(f, argnums)(sg.asarray(x), y, scale=2.0)
    assert value.item() == 92.0
    if isinstance(expected, tuple):
        assert tuple(g.tolist() for g in gradient) == expected
        assert tuple((g * 0.5).tolist() for g in again) == expected
    else:
        assert gradient.tolist() == expected
        assert (again * 0.5).tolist() == expected


def test_grad_touches_no_grad_and_leaves_nothing():
    x, w = variable(2.0, 4.0), variable(1.0, 1.0)
    before = state()
    plain = sg.grad(f)([2.0, 4.0], np.ones(2))
    assert state()[:4] == before[:4]
    captured = sg.grad(lambda a: f(a, w))(x)
    assert captured.requires_grad
    assert (x.grad, w.grad) == (None, None)
    del captured
    assert state()[:4] == before[:4]
    assert not plain.requires_grad


def test_grad_keeps_the_function_name():
    assert sg.grad(f).__name__ == "f"
    assert sg.value_and_grad(f).__name__ == "f"


@pytest.mark.parametrize("order", range(5))
def test_grad_of_grad(order):
    """d**n/dx**n x**5 = 5!/(5-n)! x**(5-n)."""
    function = lambda x: x * x * x * x * x  # noqa: E731
    factor = 1
    for n in range(order):
        function = sg.grad(function)
        factor *= 5 - n
    np.testing.assert_allclose(function(1.5 if order else sg.asarray(1.5)).item(), factor * 1.5 ** (5 - order))


def test_perturbations_are_not_confused():
    """d/dx (x * d/dy (x + y)) = 1; a system that mixes up the two gives 2."""
    assert sg.grad(lambda x: x * sg.grad(lambda y: x + y)(1.0))(1.0).item() == 1.0
    assert sg.grad(lambda x: x * sg.grad(lambda y: x * y)(2.0))(3.0).item() == 6.0
    assert sg.grad(lambda x: sg.grad(lambda y: x * y * y)(x))(3.0).item() == 12.0
    inner = sg.grad(lambda x, y: x * x * y, argnums=0)
    assert sg.grad(inner, argnums=1)(3.0, 5.0).item() == 6.0


def test_backward_inside_a_differentiated_function():
    def through(x):
        y = variable(2.0)
        (y * y * x.detach()).backward()
        return x * y.grad

    assert sg.grad(through)(3.0).item() == 12.0


def test_captured_variables_stay_differentiable():
    w = variable(3.0)
    y = w * w
    value, gradient = sg.value_and_grad(lambda x: x * x * y)(2.0)
    assert (value.item(), gradient.item()) == (36.0, 36.0)
    (value + gradient).backward()  # (4 + 4) w**2
    assert w.grad.item() == 48.0


def test_a_tracked_argument_stays_differentiable():
    w = variable(3.0)
    gradient = sg.grad(lambda x: x * x * x)(w * 2.0)
    assert gradient.item() == 108.0
    gradient.backward()  # d/dw 3 (2w)**2
    assert w.grad.item() == 72.0


def test_under_no_grad_the_result_is_plain():
    w = variable(3.0)
    with sg.no_grad():
        value, gradient = sg.value_and_grad(lambda x: x * x * w)(w)
        assert not sg.is_grad_enabled()
    assert (value.item(), gradient.item()) == (27.0, 18.0)
    assert not value.requires_grad
    assert not gradient.requires_grad


def test_what_does_not_depend_has_zero_gradient():
    for function in (
        lambda x, y: sg.ones(()),
        lambda x, y: y * 1.0,
        lambda x, y: sg.sum(x.detach()),
        lambda x, y: x.sum() * 0.0,
    ):
        value, gradient = sg.value_and_grad(function)(np.ones((2, 3), np.float32), variable(2.0))
        assert value.shape == ()
        assert gradient.tolist() == np.zeros((2, 3)).tolist()
        assert gradient.dtype == np.float32
    by_both = sg.grad(lambda x, y: x * 3.0, argnums=(0, 1))(1.0, [1.0, 2.0])
    assert [g.tolist() for g in by_both] == [3.0, [0.0, 0.0]]


def test_a_result_of_one_element_of_any_shape():
    assert sg.grad(lambda x: x * x)([[3.0]]).tolist() == [[6.0]]
    assert sg.grad(lambda x: x)(2.0).item() == 1.0


def test_an_argument_given_twice():
    x = variable(3.0)
    by_first, by_second = sg.grad(lambda a, b: a * a * b, argnums=(0, 1))(x, x)
    assert (by_first.item(), by_second.item()) == (18.0, 9.0)
    (by_first + by_second).backward()
    assert x.grad.item() == 12.0 + 6.0


def test_hooks_inside_a_differentiated_function():
    def hooked(x):
        y = x * 2.0
        y.register_hook(lambda ct: ct * 100.0)
        return y

    assert sg.grad(hooked)(1.0).item() == 200.0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sg.grad(3), sg.DTypeError, "`grad` needs a function; found int"),
        (lambda: sg.grad(f, argnums="x"), sg.DTypeError, "`grad` needs argnums as an integer or several"),
        (lambda: sg.grad(f, argnums=1.0), sg.DTypeError, "`grad` needs argnums as an integer or several"),
        (lambda: sg.grad(f, argnums=None), sg.DTypeError, "`grad` needs argnums as an integer or several"),
        (lambda: sg.grad(f, argnums=()), sg.ArgumentError, "argnums that differ, at least one"),
        (lambda: sg.grad(f, argnums=(1, 1)), sg.ArgumentError, "argnums that differ, at least one"),
        (lambda: sg.grad(f, argnums=2)(1.0, 2.0), sg.ArgumentError, "argnums=2 for 2 positional arguments"),
        (lambda: sg.grad(f, argnums=-3)(1.0, 2.0), sg.ArgumentError, "argnums=-3 for 2 positional arguments"),
        (sg.grad(f), sg.ArgumentError, "argnums=0 for 0 positional arguments"),
        (lambda: sg.grad(f, argnums=(1, -1))(1.0, 2.0), sg.ArgumentError, "names one of 2 arguments twice"),
        (lambda: sg.grad(f)(2, 3), sg.DTypeError, "`grad` by argument 0 needs a float dtype; found int64"),
        (lambda: sg.grad(f)("x", 3), sg.DTypeError, "`asarray` got dtype"),
        (lambda: sg.grad(lambda x: 3.0)(1.0), sg.DTypeError, "function that returns a tensor; found float"),
        (lambda: sg.grad(lambda x: None)(1.0), sg.DTypeError, "function that returns a tensor; found NoneType"),
        (lambda: sg.grad(lambda x: x)([1.0, 2.0]), sg.ShapeError, r"result of one element; found shape \(2,\)"),
        (lambda: sg.value_and_grad(3), sg.DTypeError, "`value_and_grad` needs a function; found int"),
        (lambda: sg.value_and_grad(f, ()), sg.ArgumentError, "`value_and_grad` needs argnums that differ"),
        (lambda: sg.value_and_grad(f, "x"), sg.DTypeError, "`value_and_grad` needs argnums as an integer"),
        (lambda: sg.value_and_grad(f, 2)(1.0, 2.0), sg.ArgumentError, "`value_and_grad` got argnums=2 for 2"),
        (lambda: sg.value_and_grad(f, (1, -1))(1.0, 2.0), sg.ArgumentError, "`value_and_grad` got .* twice"),
        (lambda: sg.value_and_grad(f)(2, 3), sg.DTypeError, "`value_and_grad` by argument 0 needs a float dtype"),
        (lambda: sg.value_and_grad(f)("x", 3), sg.DTypeError, "`value_and_grad` by argument 0 needs an array"),
        (lambda: sg.value_and_grad(lambda x: 3.0)(1.0), sg.DTypeError, "`value_and_grad` needs a function that"),
        (lambda: sg.value_and_grad(lambda x: x)([1.0, 2.0]), sg.ShapeError, "`value_and_grad` needs a function with"),
    ],
)
def test_wrong_uses_of_grad(call, error, message):
    before = state()
    with pytest.raises(error, match=message):
        call()
    assert state() == before


def test_type_checkers_know_what_argnums_give():
    one, several = "Tensor", "tuple[Tensor, ...]"
    for function, form in ((sg.grad, "Callable[..., {}]"), (sg.value_and_grad, "Callable[..., tuple[Tensor, {}]]")):
        found = [overload.__annotations__ for overload in typing.get_overloads(function)]
        assert [hints["argnums"] for hints in found] == ["int", "Sequence[int]"]
        assert [hints["return"] for hints in found] == [form.format(one), form.format(several)]


def test_a_function_that_raises_leaves_nothing():
    before = state()

    def fails(x):
        y = x * 2.0
        raise ZeroDivisionError(y)

    with pytest.raises(ZeroDivisionError):
        sg.grad(fails)([1.0, 2.0])
    assert sg.is_grad_enabled()
    assert state() == before


# --- nothing leaks --------------------------------------------------------------------------------------------------


def test_ten_thousand_statistics_of_a_kept_parameter_leave_one_node():
    before = state()
    w = variable(0.5, -1.0)
    for k in range(10_000):
        (sg.exp(w).mean() if k % 2 else sg.sum(w * w)).item()
    assert sg.graph.stats().nodes < before[0] + 2 * sg.graph.get_threshold().nodes
    sg.sweep()
    nodes, variables, childless, saved, consumed = state()
    assert (nodes, variables, childless) == tuple(n + 1 for n in before[:3])
    assert (saved, consumed) == before[3:]
    sg.exp(w).sum().backward()
    np.testing.assert_allclose(w.grad.numpy(), np.exp([0.5, -1.0]), rtol=1e-15)


def test_watching_the_graph_does_not_let_it_grow():
    before = state()
    w = variable(0.5, -1.0)
    for k in range(10_000):
        sg.sum(w * w).item()
        if k % 50 == 0:
            assert sg.graph.stats().nodes < before[0] + 2 * sg.graph.get_threshold().nodes


def test_statistics_kept_keep_their_graph():
    w = variable(0.5)
    kept = [w * float(k) for k in range(100)]
    sg.sweep()
    for k, one in enumerate(kept):
        w.grad = None
        one.backward()
        assert w.grad.item() == k


def test_each_owner_gets_a_gradient_of_its_own():
    """A rule may hand one cotangent to several inputs; changing one gradient must not change another."""
    for create_graph in (False, True):
        x, y = sg.ones((2,), requires_grad=True), sg.ones((2,), requires_grad=True)
        (x + y).sum().backward(create_graph=create_graph)
        assert x.grad is not y.grad
        x.grad.copy_(x.grad * 10.0)
        np.testing.assert_array_equal(y.grad.numpy(), [1.0, 1.0])
    given = sg.ones((2,))
    x.grad = None
    x.backward(given, create_graph=True)
    assert x.grad is not given


def test_broadcast_to_the_same_shape_is_a_result_of_its_own():
    w = sg.ones((2,), requires_grad=True)
    same = sg.broadcast_to(w, (2,))
    with sg.no_grad():
        assert not sg.broadcast_to(w, (2,)).requires_grad
        w -= 1.0
    np.testing.assert_array_equal(same.numpy(), [1.0, 1.0])


@pytest.mark.parametrize("size", [7, 40_000])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cotangents_added_in_place_reach_nobody_else(size, dtype):
    rng = np.random.default_rng(0)
    values = rng.uniform(0.5, 2, size).astype(dtype)
    weights = sg.asarray(rng.standard_normal(size).astype(dtype))
    x = sg.asarray(values, requires_grad=True)
    y = x * weights
    y.retain_grad()
    seen = []
    for tensor in (x, y):
        tensor.register_hook(lambda ct: seen.append((ct, ct.numpy().copy())))
    z = y * y + y * x + y + sg.exp(y) * x + x + x * x
    for _ in range(2):
        z.backward(weights, retain_graph=True)
    w, yv = weights.numpy().astype("float64"), (values * weights.numpy()).astype("float64")
    by_y = w * (2 * yv + values + 1 + np.exp(yv) * values)
    by_x = by_y * w + w * (yv + np.exp(yv) + 1 + 2 * values)
    tolerance = {"rtol": 1e-11, "atol": 1e-13} if dtype == "float64" else {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(y.grad.numpy(), 2 * by_y, **tolerance)
    np.testing.assert_allclose(x.grad.numpy(), 2 * by_x, **tolerance)
    np.testing.assert_array_equal(x.numpy(), values)
    for ct, before in seen:
        np.testing.assert_array_equal(ct.numpy(), before)


def test_an_operation_on_one_tensor_twice_has_one_parent_and_every_derivative():
    x = sg.asarray([0.5, 2.0], requires_grad=True)
    for f, slope, second in [
        (lambda x: x * x, lambda v: 2 * v, lambda v: 2 + 0 * v),
        (lambda x: x + x, lambda v: 2 + 0 * v, lambda v: 0 * v),
        (lambda x: x - x, lambda v: 0 * v, lambda v: 0 * v),
        (lambda x: x / x, lambda v: 0 * v, lambda v: 0 * v),
        (lambda x: sg.hypot(x, x), lambda v: np.sqrt(2) + 0 * v, lambda v: 0 * v),
        (lambda x: sg.maximum(x, x), lambda v: 1 + 0 * v, lambda v: 0 * v),
    ]:
        v = x.numpy()
        assert len(f(x)._node.parents) == 1
        found = sg.grad(lambda x: sg.sum(f(x)))(x)  # noqa: B023  # used before the next round
        np.testing.assert_allclose(found.numpy(), slope(v), atol=1e-15)
        found = sg.grad(lambda x: sg.sum(sg.grad(lambda x: sg.sum(f(x)))(x)))(x)  # noqa: B023
        np.testing.assert_allclose(found.numpy(), second(v), atol=1e-15)
