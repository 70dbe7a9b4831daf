"""The optimisers against the formulas of the papers, in plain NumPy."""

import gc
import pickle

import numpy as np
import pytest

import sweepgrad as sg
from strategies import laid_out
from sweepgrad.kernels import workers
from sweepgrad.optim import SGD, Adam, AdamW

STEPS = 20
BETAS = (0.8, 0.99)


class PlainSGD:
    """Momentum as in Sutskever et al. 2013, in the form v = momentum * v + g; p = p - lr * v."""

    def __init__(self, momentum=0.0):
        self.momentum = momentum
        self.v = 0.0

    def __call__(self, p, g, lr):
        self.v = self.momentum * self.v + g
        return p - lr * self.v


class PlainAdam:
    """Kingma and Ba, arXiv:1412.6980, algorithm 1; decay added to the gradient (L2)."""

    def __init__(self, betas=(0.9, 0.999), eps=1e-8, decay=0.0):
        self.betas, self.eps, self.decay = betas, eps, decay
        self.m = self.v = 0.0
        self.t = 0

    def __call__(self, p, g, lr):
        return p - lr * self.direction(g + self.decay * p)

    def direction(self, g):
        b1, b2 = self.betas
        self.t += 1
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g**2
        return self.m / (1 - b1**self.t) / (np.sqrt(self.v / (1 - b2**self.t)) + self.eps)


class PlainAdamW(PlainAdam):
    """Loshchilov and Hutter, arXiv:1711.05101, algorithm 2, with the learning rate as the schedule multiplier."""

    def __call__(self, p, g, lr):
        return p - lr * (self.direction(g) + self.decay * p)


CASES = {
    "SGD": (lambda p: SGD(p, 0.1), PlainSGD),
    "momentum": (lambda p: SGD(p, 0.1, momentum=0.9), lambda: PlainSGD(0.9)),
    "Adam": (lambda p: Adam(p, 0.1), PlainAdam),
    "Adam, all set": (
        lambda p: Adam(p, lr=0.1, betas=BETAS, eps=1e-3, weight_decay=0.3),
        lambda: PlainAdam(BETAS, 1e-3, 0.3),
    ),
    "AdamW": (lambda p: AdamW(p, 0.1), lambda: PlainAdamW(decay=1e-2)),
    "AdamW, no decay": (lambda p: AdamW(p, 0.1, weight_decay=0.0), PlainAdam),
    "AdamW, all set": (
        lambda p: AdamW(p, lr=0.1, betas=BETAS, eps=1e-3, weight_decay=0.3),
        lambda: PlainAdamW(BETAS, 1e-3, 0.3),
    ),
}

optimisers = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def rtol_of(dtype):
    return 3e-6 if dtype == "float32" else 1e-12


def check_close(params, plain):
    for param, value in zip(params, plain, strict=True):
        rtol = rtol_of(param.dtype)
        np.testing.assert_allclose(param.numpy(), value, rtol=rtol, atol=rtol)


@optimisers
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_twenty_steps(case, dtype):
    """Several shapes and layouts, random gradients, and a learning rate that changes at every step."""
    make, plain = case
    rng = np.random.default_rng(7)
    shapes = [
        ((3, 4), "contiguous"),
        ((2, 3), "transposed"),
        ((), "contiguous"),
        ((5,), "reversed"),
        ((0, 2), "contiguous"),
    ]
    start = [laid_out(rng.standard_normal(shape).astype(dtype), layout) for shape, layout in shapes]
    params = [sg.asarray(value, requires_grad=True) for value in start]
    values = [value.astype(np.float64) for value in start]
    optimizer = make(params)
    rules = [plain() for _ in params]
    for step in range(STEPS):
        optimizer.lr = lr = 0.1 / (1 + step)
        for k, param in enumerate(params):
            g = laid_out(rng.standard_normal(param.shape).astype(dtype), "transposed")
            param.grad = sg.asarray(g)
            values[k] = rules[k](values[k], g.astype(np.float64), lr)
        optimizer.step()
        check_close(params, values)
        assert all(param.dtype == dtype and param.shape == one.shape for param, one in zip(params, start, strict=True))


def test_the_first_step_of_adam_in_float32_is_exact():
    """m / bias1 and sqrt(v / bias2) are g and |g|: a 1 - beta rounded to float32 would miss by 1e-5."""
    g = np.random.default_rng(3).uniform(0.5, 2, 1000).astype(np.float32)
    param = sg.zeros((1000,), dtype="float32", requires_grad=True)
    optimizer = Adam([param], lr=1.0, eps=0.0)
    param.grad = sg.asarray(g)
    optimizer.step()
    np.testing.assert_allclose(param.numpy(), np.full(1000, -1, np.float32), rtol=5e-7)


@optimisers
def test_a_parameter_without_gradient_is_skipped(case):
    """It keeps its elements, and its own count of updates, so a late start is as any start."""
    make, plain = case
    rng = np.random.default_rng(8)
    start = rng.standard_normal((3, 4))
    params = [sg.asarray(value, requires_grad=True) for value in start]
    optimizer = make(params)
    rules = [plain() for _ in params]
    values = list(start)
    for step in range(6):
        optimizer.zero_grad()
        for k in range(3):
            if (step + k) % (k + 1) == 0 and step >= k:
                g = rng.standard_normal(4)
                params[k].grad = sg.asarray(g)
                values[k] = rules[k](values[k], g, optimizer.lr)
        before = [param.numpy().copy() for param in params]
        optimizer.step()
        check_close(params, values)
        for param, old in zip(params, before, strict=True):
            assert (param.grad is None) == np.array_equal(param.numpy(), old)


@optimisers
def test_zero_grad(case):
    params = [sg.ones((2,), requires_grad=True), sg.ones((), requires_grad=True)]
    optimizer = case[0](params)
    for param in params:
        (param * param).sum().backward()
    optimizer.zero_grad()
    assert [param.grad for param in params] == [None, None]
    optimizer.step()
    assert [param.tolist() for param in params] == [[1.0, 1.0], 1.0]


@optimisers
@pytest.mark.parametrize("layout", ["contiguous", "reversed"])
def test_a_graph_built_before_a_step_keeps_the_old_values(case, layout):
    rng = np.random.default_rng(9)
    old = rng.standard_normal(5)
    w = sg.asarray(laid_out(old.copy(), layout), requires_grad=True)
    loss, again = (w * w * w).sum(), sg.exp(w).sum()
    view = w[1:3]
    (w * w).sum().backward()
    optimizer = case[0]([w])
    array = w.numpy()
    optimizer.step()
    assert not np.allclose(w.numpy(), old)
    np.testing.assert_array_equal(array, old)
    np.testing.assert_array_equal(view.numpy(), old[1:3])
    optimizer.zero_grad()
    loss.backward()
    np.testing.assert_allclose(w.grad.numpy(), 3 * old**2, rtol=1e-12)
    again.backward(create_graph=True)
    np.testing.assert_allclose(w.grad.numpy(), 3 * old**2 + np.exp(old), rtol=1e-12)


def test_training_reaches_the_least_squares_solution():
    rng = np.random.default_rng(11)
    a, b = rng.standard_normal((20, 3)), rng.standard_normal(20)
    expected = np.linalg.lstsq(a, b)[0]
    for make in (lambda p: SGD(p, 0.02, momentum=0.5), lambda p: Adam(p, 0.1), lambda p: AdamW(p, 0.1, weight_decay=0)):
        w = sg.zeros((3,), requires_grad=True)
        optimizer = make([w])
        for _ in range(400):
            optimizer.zero_grad()
            sg.sum(sg.square(a @ w - b)).backward()
            optimizer.step()
        np.testing.assert_allclose(w.numpy(), expected, atol=2e-3)


def test_a_step_registers_nothing_and_keeps_the_identity():
    w = sg.ones((3,), requires_grad=True)
    optimizer = SGD([w], 0.1, momentum=0.9)
    w.grad = sg.ones((3,))
    sg.sweep(collect_cycles=True)
    before = sg.graph.stats()
    for _ in range(3):
        optimizer.step()
    after = sg.graph.stats()
    assert (after.registered, after.nodes, after.saved_bytes) == (before.registered, before.nodes, before.saved_bytes)
    assert optimizer.params[0] is w
    assert w.is_variable
    (w * 2.0).sum().backward()
    assert w.grad.tolist() == [3.0, 3.0, 3.0]


def test_params_may_come_from_a_generator():
    params = [sg.ones((2,), requires_grad=True) for _ in range(3)]
    optimizer = SGD((param for param in params), 0.5)
    (params[2] * 3.0).sum().backward()
    optimizer.step()
    assert [param.tolist() for param in params] == [[1, 1], [1, 1], [-0.5, -0.5]]


@pytest.fixture(autouse=True)
def _audited():
    yield
    gc.collect()
    sg.sweep()
    sg.graph.audit()


def test_optimiser_can_be_pickled_between_steps():
    x = sg.asarray([1.0, 2.0], requires_grad=True)
    optimizer = sg.optim.Adam([x])
    x.grad = sg.ones((2,))
    optimizer.step()
    again = pickle.loads(pickle.dumps(optimizer))
    for one in (optimizer, again):
        one.params[0].grad = sg.asarray([0.5, -0.5])
        one.step()
    np.testing.assert_array_equal(again.params[0].numpy(), x.numpy())


def test_parameters_updated_at_different_steps_are_corrected_each_for_its_own_number_of_updates():
    def grad(p):
        return sg.asarray([1.0, -2.0]) * float(p)

    together = [sg.ones((2,), requires_grad=True) for _ in range(3)]
    alone = [sg.ones((2,), requires_grad=True) for _ in range(3)]
    optimizer = Adam(together, lr=0.1)
    separate = [Adam([p], lr=0.1) for p in alone]
    for step in range(4):
        for k in range(3):
            if step >= k:
                together[k].grad, alone[k].grad = grad(k + 1), grad(k + 1)
                separate[k].step()
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in together)
    assert optimizer.steps == [4, 3, 2]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_many_elements_are_updated_by_several_threads(case, dtype, monkeypatch):
    monkeypatch.setattr(workers, "PARALLEL", 1)
    make, plain = CASES[case]
    rng = np.random.default_rng(0)
    expected = rng.standard_normal(70_001).astype(dtype)
    p, rule = sg.asarray(expected, requires_grad=True), plain()
    optimizer = make([p])
    for _ in range(3):
        g = rng.standard_normal(expected.shape).astype(dtype)
        p.grad = sg.asarray(g)
        optimizer.step()
        expected = rule(expected.astype("float64"), g.astype("float64"), 0.1)
    np.testing.assert_allclose(p.numpy(), expected, rtol=1e-12 if dtype == "float64" else 1e-4, atol=1e-5)
