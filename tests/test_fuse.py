"""`fuse`: the same bits forward, the same gradients, one node, and errors that say what does not fit."""

import collections
import functools
import re
import threading
import warnings

import numpy as np
import pytest
import scipy.special as special
from hypothesis import given
from hypothesis import strategies as st

import sweepgrad as sg
from strategies import examples, laid_out, layouts, seeds
from sweepgrad.kernels import workers
from sweepgrad.ops import loop

UNARY = ["exp", "negative", "tanh", "sigmoid", "square", "abs", "relu", "sin", "expm1", "softplus", "gelu", "atan"]
BINARY = ["add", "subtract", "multiply", "maximum", "minimum", "hypot", "logaddexp", "atan2"]
DTYPES = ["float32", "float64"]


@st.composite
def expressions(draw, inputs, size=6):
    """A function of `inputs` tensors made of random elementwise operations, and its text."""
    steps = []
    for k in range(draw(st.integers(1, size))):
        have = st.integers(0, inputs + k - 1)
        name = draw(st.sampled_from(UNARY + BINARY + ["where", "scale"]))
        steps.append((name, draw(have), draw(have), draw(have), draw(st.sampled_from([0.5, -1.5, 2.0]))))

    def function(*tensors):
        values = list(tensors)
        for name, i, j, k, number in steps:
            if name == "where":
                values.append(sg.where(values[i] > 0.25, values[j], values[k]))
            elif name == "scale":
                values.append(values[i] * number + 1.0)
            elif name in UNARY:
                values.append(getattr(sg, name)(values[i]))
            else:
                values.append(getattr(sg, name)(values[i], values[j]))
        return sum(values[inputs:])

    return function


def arrays(seed, *shapes, dtype="float64"):
    rng = np.random.default_rng(seed)
    return [rng.uniform(-2, 2, shape).astype(dtype) for shape in shapes]


def gradients(f, *arguments):
    """The gradients of a weighted sum of f's result by all arguments."""

    def loss(*tensors):
        result = f(*tensors)
        weights = np.random.default_rng(1).standard_normal(result.shape)
        return sg.sum(result * weights.astype(result.dtype))

    return sg.grad(loss, argnums=tuple(range(len(arguments))))(*arguments)


def assert_close(found, expected, dtype):
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(
        found, expected, rtol=1e-9 if dtype == "float64" else 1e-3, atol=scale * (1e-11 if dtype == "float64" else 1e-4)
    )


SHAPES = [
    ((3, 5), (3, 5)),
    ((3, 5), (5,)),
    ((4,), (4,)),
    ((3, 1), (1, 5)),
    ((2, 3, 4), (3, 4)),
    ((2, 3, 4), ()),
    ((), ()),
]


@examples(25)
@given(expressions(2), st.sampled_from(SHAPES), st.sampled_from(DTYPES), layouts, seeds)
def test_elementwise_results_are_the_same_bits_and_gradients_agree(f, shapes, dtype, layout, seed):
    values = [laid_out(array, layout) for array in arrays(seed, *shapes, dtype=dtype)]
    tensors = [sg.asarray(value) for value in values]
    expected = f(*tensors)
    found = sg.fuse(f)(*tensors)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.numpy(), expected.numpy())
    for one, other in zip(gradients(sg.fuse(f), *tensors), gradients(f, *tensors), strict=True):
        assert one.shape == other.shape
        assert_close(one.numpy(), other.numpy(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", [((200_000,), (200_000,)), ((400, 500), (500,)), ((400, 500), (400, 1))])
def test_large_arrays_have_the_same_bits_whatever_the_number_of_threads(shapes, dtype, monkeypatch):
    monkeypatch.setattr(workers, "PARALLEL", 1)
    values = arrays(3, *shapes, dtype=dtype)

    def f(x, y):
        return sg.tanh(x * y) * sg.exp(-x) + sg.sqrt(y * y + 0.5)

    expected = f(*map(sg.asarray, values)).numpy()
    before = sg.get_num_threads()
    try:
        sums = set()
        for count in (1, 2, 5):
            sg.set_num_threads(count)
            np.testing.assert_array_equal(sg.fuse(f)(*values).numpy(), expected)
            sums.add(sg.sum(sg.asarray(values[0])).item())
        assert len(sums) == 1
    finally:
        sg.set_num_threads(before)


def softmax_rows(x):
    return sg.softmax(x, axis=-1)


def layer_norm(x, gain, bias):
    mean = sg.mean(x, axis=-1, keepdims=True)
    spread = sg.mean(sg.square(x - mean), axis=-1, keepdims=True)
    return sg.gelu((x - mean) / sg.sqrt(spread + 1e-5) * gain + bias)


def mixture(x, means, scales, weights):
    z = (x[:, None] - means) * sg.exp(-scales)
    return sg.sum(sg.logsumexp(weights - sg.logsumexp(weights) - scales - 0.5 * z * z, axis=-1))


REDUCTIONS = {
    "total": (lambda x, y: sg.sum(sg.exp(-(x * x)) * y + x * y), [(5, 7), (5, 7)]),
    "total of a row and a matrix": (lambda x, y: sg.sum(x * y), [(5, 7), (7,)]),
    "outer product": (lambda x, y: sg.sum(sg.exp(x[:, None] * y), axis=1), [(5,), (7,)]),
    "softmax": (softmax_rows, [(5, 7)]),
    "softmax of a vector": (softmax_rows, [(9,)]),
    "log_softmax of three axes": (lambda x: sg.log_softmax(x, axis=-1), [(2, 3, 4)]),
    "over two axes": (lambda x: sg.logsumexp(x, axis=(1, 2)), [(2, 3, 4)]),
    "over the first axis": (lambda x, y: sg.sum(sg.tanh(x * y), axis=0), [(5, 7), (5, 1)]),
    "rms": (lambda x: sg.sqrt(sg.mean(sg.square(x))), [(5, 7)]),
    "rms of a softmax": (lambda x, y: sg.sqrt(sg.mean(sg.square(sg.softmax(x + y)))), [(5, 7), (7,)]),
    "normalised by the whole": (lambda x: x / sg.sum(sg.exp(x)), [(5, 7)]),
    "var": (lambda x: sg.var(x, axis=0), [(5, 7)]),
    "columns, then all": (lambda x: sg.sum(sg.exp(sg.mean(x, axis=0))), [(5, 7)]),
    "columns, then rows": (lambda x: sg.sum(sg.square(sg.sum(x, axis=0, keepdims=True) * x), axis=1), [(5, 7)]),
    "max": (lambda x: sg.max(x, axis=1) * 2.0, [(5, 7)]),
    "max of what is computed": (lambda x: sg.max(sg.exp(x), axis=-1), [(5, 7)]),
    "a condition that is reduced": (
        lambda x: sg.where(sg.any(x > 0.5, axis=-1, keepdims=True), x, 2.0 * x),
        [(5, 7)],
    ),
    "a sum of functions of columns": (lambda x: sg.sum(sg.tanh(sg.mean(x, axis=0))), [(5, 7)]),
    "sums of rows": (lambda x: sg.sum(x, axis=1), [(5, 7)]),
    "repeated rows": (lambda x, y: sg.exp(y) * sg.exp(0.0 * x), [(5, 7), (7,)]),
    "min of all": (lambda x: x - sg.min(x), [(5, 7)]),
    "layer norm": (layer_norm, [(5, 7), (7,), (7,)]),
    "mixture": (mixture, [(20,), (3,), (3,), (3,)]),
    "middle axis repeated": (lambda x, y: sg.sum(x[:, None, :] * y), [(5, 4), (5, 3, 4)]),
    "scalar tensors": (lambda x, s: sg.sum(x * s + s), [(5, 7), ()]),
    "of scalars alone": (lambda x, y: sg.exp(x) * y, [(), ()]),
    "transposed": (lambda x, y: sg.sum(x.T * y, axis=1), [(5, 7), (7, 5)]),
    "long rows": (lambda x, y: sg.sum(sg.softmax(x * y, axis=1) * x, axis=1), [(3, 2500), (2500,)]),
    "an argument that is not read": (lambda x, y: sg.sum(x * x), [(5, 7), (3,)]),
    "no rows": (lambda x: sg.sum(x, axis=1), [(0, 4)]),
    "empty rows": (lambda x: sg.sum(x * 2.0, axis=1), [(3, 0)]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_and_their_gradients(name, dtype):
    f, shapes = REDUCTIONS[name]
    values = arrays(5, *shapes, dtype=dtype)
    tensors = [sg.asarray(value) for value in values]
    expected, found = f(*tensors), sg.fuse(f)(*tensors)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert_close(found.numpy(), expected.numpy(), dtype)
    for one, other in zip(gradients(sg.fuse(f), *tensors), gradients(f, *tensors), strict=True):
        assert one.shape == other.shape
        assert_close(one.numpy(), other.numpy(), dtype)


@pytest.mark.parametrize("name", [name for name, (_, shapes) in REDUCTIONS.items() if name not in ("no rows",)])
def test_value_and_gradients_in_one_pass(name):
    f, shapes = REDUCTIONS[name]
    tensors = [sg.asarray(value) for value in arrays(6, *shapes)]

    def loss(*args):
        return sg.sum(sg.sin(f(*args)))

    before = sg.graph.stats().registered
    value, found = sg.value_and_grad(sg.fuse(loss), argnums=tuple(range(len(shapes))))(*tensors)
    assert sg.graph.stats().registered == before  # no node: one kernel does both
    wanted, expected = sg.value_and_grad(loss, argnums=tuple(range(len(shapes))))(*tensors)
    assert_close(value.numpy(), wanted.numpy(), "float64")
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert_close(one.numpy(), other.numpy(), "float64")


def test_against_scipy():
    (x,) = arrays(7, (6, 50))
    np.testing.assert_allclose(sg.fuse(softmax_rows)(x).numpy(), special.softmax(x, axis=-1), rtol=1e-14)
    value, grad = sg.value_and_grad(sg.fuse(lambda x: sg.sum(sg.logsumexp(x, axis=1))))(x)
    np.testing.assert_allclose(value.item(), special.logsumexp(x, axis=1).sum(), rtol=1e-14)
    np.testing.assert_allclose(grad.numpy(), special.softmax(x, axis=1), rtol=1e-13)


@pytest.mark.parametrize("name", [name for name in REDUCTIONS if name not in ("no rows", "empty rows", "long rows")])
def test_second_derivatives(name):
    f, shapes = REDUCTIONS[name]
    tensors = [sg.asarray(value) for value in arrays(8, *shapes)]

    def slope(g):
        def inner(x):
            return sg.sum(sg.sin(sg.grad(lambda x: sg.sum(sg.square(g(x, *tensors[1:]))))(x)))

        return sg.grad(inner)(tensors[0])

    assert_close(slope(sg.fuse(f)).numpy(), slope(f).numpy(), "float64")


def test_one_node_that_saves_the_inputs_alone():
    x = sg.asarray(np.ones(1000), requires_grad=True)
    y = sg.asarray(np.ones(1000))
    before = sg.graph.stats()
    result = sg.fuse(lambda x, y: sg.sum(sg.exp(x) * sg.tanh(y) * x))(x, y)
    after = sg.graph.stats()
    assert after.registered - before.registered == 1
    assert after.saved_bytes - before.saved_bytes == 2 * 8000
    result.backward()
    np.testing.assert_allclose(x.grad.numpy(), 2 * np.e * np.tanh(1), rtol=1e-14)
    assert y.grad is None


def test_hooks_retained_gradients_and_no_grad():
    x = sg.asarray([1.0, 2.0], requires_grad=True)
    y = sg.fuse(lambda x: x * x)(x)
    y.register_hook(lambda ct: ct * 3.0)
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [6.0, 12.0])
    with sg.no_grad():
        assert not sg.fuse(lambda x: x * x)(x).requires_grad


@pytest.fixture
def compiled(monkeypatch):
    """The sources of kernels that are asked for."""
    sources = set()

    def compile_kernel(source, *args, **kwargs):
        sources.add(source)
        return original(source, *args, **kwargs)

    original = loop.compile_kernel
    monkeypatch.setattr(loop, "compile_kernel", compile_kernel)
    return sources


def test_a_changed_number_or_length_compiles_nothing(compiled):
    f = sg.fuse(lambda x, rate: sg.sum(x * (rate * 0.1) + rate))
    cases = [(sg.asarray(np.arange(n) / 7), rate) for rate, n in [(0.1, 3), (0.3, 3), (1e-30, 33), (-0.0, 40)]]
    expected = [f.plain(x, rate).numpy() for x, rate in cases]
    compiled.clear()
    for (x, rate), right in zip(cases, expected, strict=True):
        assert_close(f(x, rate).numpy(), right, "float64")
        assert_close(f(x, rate=rate).numpy(), right, "float64")
    assert len(compiled) == 1
    sg.fuse(lambda y, step: sg.sum(y * (step * 0.1) + step))(*cases[0])
    assert len(compiled) == 1  # nor does the same function under another name


def test_gradients_by_some_of_many_arguments():
    def f(power, name, x, flag, y, rate, z):
        assert name == "n" and flag  # noqa: PT018
        return sg.sum(x**power * y * rate + sg.where(z, x, y))

    x, y = (sg.asarray(v) for v in arrays(1, (4,), (4,)))
    arguments = (3, "n", x, True, y, 0.5, np.array([True, False, True, True]))
    for argnums in (2, 4, (4, 2), (-3,)):
        expected = sg.value_and_grad(f, argnums=argnums)(*arguments)
        found = sg.value_and_grad(sg.fuse(f), argnums=argnums)(*arguments)
        assert_close(found[0].numpy(), expected[0].numpy(), "float64")
        pairs = zip(*(g if isinstance(g, tuple) else (g,) for g in (found[1], expected[1])), strict=True)
        for one, other in pairs:
            assert_close(one.numpy(), other.numpy(), "float64")
    for argnums in (0, 1, 3, 6):
        with pytest.raises(sg.DTypeError, match=f"by argument {argnums}"):
            sg.value_and_grad(sg.fuse(f), argnums=argnums)(*arguments)
    by_rate = sg.value_and_grad(sg.fuse(f), argnums=5)(*arguments)[1]
    assert_close(by_rate.numpy(), sg.value_and_grad(f, argnums=5)(*arguments)[1].numpy(), "float64")
    one, other = sg.value_and_grad(sg.fuse(lambda a, b: sg.sum(a * a * b)), argnums=(0, 1))(x, x)[1]
    np.testing.assert_allclose(one.numpy(), 2 * x.numpy() ** 2, rtol=1e-14)
    np.testing.assert_allclose(other.numpy(), x.numpy() ** 2, rtol=1e-14)


def test_numbers_that_are_fixed_are_told_apart_by_their_bits():
    calls = []

    def f(x, number):
        calls.append(number)
        return x * (number if number < 1 else 1.0)

    fused, x = sg.fuse(f), sg.asarray([1.0])
    assert [str(fused(x, number).item()) for number in (0.0, -0.0, 0.0)] == ["0.0", "-0.0", "0.0"]
    fused(x, float("nan"))
    before = len(calls)
    fused(x, float("nan"))
    assert len(calls) == before

    class Degrees(float):
        pass

    assert fused(x, Degrees(0.25)).item() == 0.25


def test_numbers_are_computed_as_python_does():
    x = sg.asarray(np.ones(3, np.float32))

    def f(x, a, b):
        return x * (a * b - 1 / a) * abs(-a) + (2.0 - b)

    np.testing.assert_array_equal(sg.fuse(f)(x, 0.1, 0.7).numpy(), f(x, 0.1, 0.7).numpy())


def test_numbers_whose_value_the_function_asks_for_are_fixed():
    calls = []

    @sg.fuse
    def f(x, slope, *, power):
        calls.append(slope)
        return x**power if slope > 1 else x * slope

    x = sg.asarray([1.0, 2.0, 3.0])
    np.testing.assert_array_equal(f(x, 0.5, power=2.0).numpy(), [0.5, 1.0, 1.5])
    np.testing.assert_array_equal(f(x, 2.5, power=2.0).numpy(), [1.0, 4.0, 9.0])
    np.testing.assert_array_equal(f(x, 2.5, power=3.0).numpy(), x.numpy() ** 3.0)
    before = len(calls)
    np.testing.assert_array_equal(f(x, 2.5, power=2.0).numpy(), [1.0, 4.0, 9.0])
    assert len(calls) == before


def test_arguments_in_lists_and_dictionaries_and_results_in_tuples():
    @sg.fuse
    def f(weights, data, *, axis, flag=True):
        a, b = weights
        out = data["x"] * a + b
        return (out, sg.sum(out, axis=axis)) if flag else [out]

    a, b, x = (sg.asarray(v, requires_grad=True) for v in arrays(2, (4,), (4,), (3, 4)))
    out, total = f([a, b], {"x": x}, axis=1)
    np.testing.assert_array_equal(out.numpy(), x.numpy() * a.numpy() + b.numpy())
    np.testing.assert_allclose(total.numpy(), out.numpy().sum(1), rtol=1e-14)
    (sg.sum(out) + 2.0 * sg.sum(total)).backward()
    np.testing.assert_allclose(b.grad.numpy(), np.full(4, 9.0), rtol=1e-14)
    np.testing.assert_allclose(x.grad.numpy(), np.broadcast_to(3 * a.numpy(), (3, 4)), rtol=1e-14)
    assert isinstance(f([a, b], {"x": x}, axis=0, flag=False), list)


def test_a_fused_function_within_another_and_as_a_method():
    inner = sg.fuse(lambda x: sg.exp(x) + 1.0)
    outer = sg.fuse(lambda x: sg.sum(inner(x) * x))
    x = sg.asarray([0.5, 1.0])
    np.testing.assert_allclose(outer(x).numpy(), ((np.exp(x.numpy()) + 1) * x.numpy()).sum(), rtol=1e-15)

    class Model:
        def __init__(self):
            self.scale = 2.0

        @sg.fuse(fallback=True)
        def call(self, x):
            return x * self.scale

        @staticmethod
        @sg.fuse
        def scaled(x, scale):
            return x * scale

    model = Model()
    np.testing.assert_array_equal(model.scaled(x, model.scale).numpy(), [1.0, 2.0])
    with pytest.warns(RuntimeWarning, match="an object of Model"):  # what it holds may change unseen
        model.call(x)
    model.scale = 3.0
    np.testing.assert_array_equal(model.call(x).numpy(), [1.5, 3.0])
    assert "fused" in repr(inner)
    assert functools.wraps(outer.plain)(outer).__name__ == "<lambda>"


def test_results_that_have_no_axis_in_common():
    x, y, z = arrays(1, (3,), (5,), (4, 6))
    a, b = sg.fuse(lambda x, y: (x * 2.0, sg.sum(sg.exp(y))))(x, y)
    np.testing.assert_array_equal(a.numpy(), x * 2)
    np.testing.assert_allclose(b.numpy(), np.exp(y).sum(), rtol=1e-14)
    with pytest.raises(sg.FuseError, match="some of the axes"):  # a loop over 3 x 5 x 4 x 6 would be no gain
        sg.fuse(lambda x, y, z: (x * 2.0, y * 2.0, z * 2.0))(x, y, z)


def test_what_is_computed_under_no_grad_is_constant():
    @sg.no_grad()
    def top(x):
        return sg.max(x) * 2.0

    def f(x):
        with sg.no_grad():
            square = x * x
        return sg.sum(square * x) + top(x) * sg.sum(x)

    (x,) = arrays(1, (5,))
    expected = sg.grad(f)(x)
    assert_close(sg.grad(sg.fuse(f))(x).numpy(), expected.numpy(), "float64")
    with sg.no_grad():  # around the first call, it changes nothing of the trace
        fused = sg.fuse(f)
        fused(x)
    assert_close(sg.grad(fused)(x).numpy(), expected.numpy(), "float64")


def test_numbers_reach_numpy_and_dictionaries_with_their_values():
    table = {0.3: 2.0}
    x = sg.asarray([1.0, 2.0])
    for f in (lambda x, t: x * float(np.sin(t)), lambda x, t: x * table[t], lambda x, t: x * len(str(t))):
        np.testing.assert_array_equal(sg.fuse(f)(x, 0.3).numpy(), f(x, 0.3).numpy())
    assert sg.grad(sg.fuse(lambda a: sg.exp(a)))(0.0).item() == 1.0
    assert sg.grad(sg.fuse(lambda a: sg.sum(a * a)))([1.0, 2.0]).tolist() == [2.0, 4.0]


def test_an_axis_that_is_walked_twice_is_refused_even_if_it_is_reduced_away():
    x, y = arrays(1, (3,), (3,))
    for f in (
        lambda x: sg.sum(x[:, None] * x),
        lambda x: sg.max(x[:, None] - x[None, :]),
        lambda x: sg.mean(sg.softplus(x[None, :] - x[:, None])),
        lambda x: sg.sum(sg.exp(x[:, None] - x), axis=1),
    ):
        with pytest.raises(sg.FuseError, match="two axes of one tensor"):
            sg.fuse(f)(x)
    with pytest.raises(sg.FuseError, match="two axes of one tensor"):
        sg.fuse(lambda x, y: sg.sum(x[:, None] * y) + sg.sum(x * y))(x, y)
    rows = np.arange(6.0).reshape(2, 3)
    with pytest.raises(sg.FuseError, match="two axes of one tensor"):
        sg.fuse(lambda m: sg.sum(sg.sum(m, axis=1)[:, None] * sg.sum(m, axis=1)))(rows)


def test_python_values_of_every_kind():
    x = sg.asarray([0.5, -1.0, 2.0])
    pair = collections.namedtuple("Pair", "a b")
    for f, arguments in [
        (lambda x: x * 10**20 - 2**63 - 1, ()),
        (lambda x: sg.where(3.0, x, -x) + sg.where(0, x, 1.0), ()),
        (lambda x: sg.where(x, x * 2.0, 7.0), ()),
        (lambda x: sg.bitwise_or(sg.bitwise_and(x > 0, True), False), ()),
        (lambda x: sg.pow(x, 2), ()),
        (lambda x, p: x * p.a + p.b, (pair(2.0, 3.0),)),
        (lambda x, d: x * d["k"], (collections.OrderedDict(k=2.0),)),
        (lambda x, g: g(x), (sg.tanh,)),
        (lambda x, axis, dtype, name: x * (axis is None) * len(name) + dtype.itemsize, (None, x.dtype, "ab")),
    ]:
        np.testing.assert_array_equal(sg.fuse(f)(x, *arguments).numpy(), f(x, *arguments).numpy())

    def in_place(x):
        y = x * 2.0
        y += 1.0
        return y

    assert sg.fuse(in_place)(x).tolist() == [2.0, -1.0, 5.0]
    big = np.full(3, 1e19, np.float32)
    np.testing.assert_array_equal(sg.pow(big, 2).numpy(), big * big)


def test_detach_cuts_the_gradient():
    f = sg.fuse(lambda x: sg.sum(x * x.detach()))
    np.testing.assert_array_equal(sg.grad(f)([2.0, 3.0]).numpy(), [2.0, 3.0])


def test_masks_are_arguments_too():
    x, mask = np.arange(6.0).reshape(2, 3), np.array([[True, False, True], [False, True, True]])
    f = sg.fuse(lambda x, mask: sg.sum(sg.where(mask, x, -1.0) + mask * x))
    np.testing.assert_array_equal(f(x, mask).item(), np.where(mask, x, -1).sum() + (mask * x).sum())
    assert sg.fuse(lambda x: x > 2.0)(x).dtype == bool
    assert sg.fuse(lambda x: sg.any(x > 4.0, axis=1))(x).tolist() == [False, True]
    assert sg.fuse(lambda x: sg.all(x > -1.0))(x).item() is True


outside = sg.asarray([1.0, 2.0])
REFUSED = {
    "matmul": (lambda x: x @ x, "matmul"),
    "a branch on elements": (lambda x: x if sg.sum(x) > 0 else -x, "bool"),
    "item": (lambda x: x * sg.sum(x).item(), "item"),
    "a tensor from outside": (lambda x: x * outside, "multiply"),
    "an array from outside": (lambda x: np.ones(2) + x, "add"),
    "prod": (lambda x: sg.prod(x), "prod"),
    "sort": (lambda x: sg.argmax(x), "argmax"),
    "reshape": (lambda x: x.reshape(4), "reshape"),
    "slice": (lambda x: x[0], "getitem"),
    "another dtype": (lambda x: sg.astype(x, "float32"), "astype"),
    "pairs of elements": (lambda x: sg.sum(x[:, :, None] * x[:, None, :]), "<lambda>"),
    "pairs that meet later": (lambda x: sg.sum(x[:, :1, None] * x[None]) + sg.sum(x * x.T), "getitem|<lambda>"),
    "its own transpose": (lambda x: x * x.T, "<lambda>"),
    "reductions that cross": (lambda x: sg.sum(x, axis=0) + sg.sum(x, axis=1), "<lambda>|sum"),
    "no tensor": (lambda x: 3.0, "<lambda>"),
    "backward": (lambda x: sg.sum(x).backward(), "backward"),
    "requires_grad": (lambda x: x if x.requires_grad else -x, "requires_grad"),
    "grad": (lambda x: x * 1.0 if x.grad is None else x, "requires_grad"),
    "hook": (lambda x: (x * 1.0).retain_grad() or x, "retain_grad"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_fused_is_named_with_its_line_and_may_fall_back(name):
    f, operation = REFUSED[name]
    x = sg.asarray([[1.0, 2.0], [3.0, 4.0]])
    with pytest.raises(sg.FuseError, match=rf"`({operation})`.* at .*:\d+ cannot be fused.*fallback") as error:
        sg.fuse(f)(x)
    if operation != "<lambda>" and "|" not in operation:
        assert f"{__file__}:{f.__code__.co_firstlineno}" in str(error.value)
    if name in ("no tensor", "backward", "hook"):
        return
    fallen = sg.fuse(f, fallback=True)
    with pytest.warns(RuntimeWarning, match=re.escape("runs as it is")) as caught:
        first = fallen(x)
    assert caught[0].filename == __file__
    assert "fallback" not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = fallen(x)
    np.testing.assert_array_equal(first.numpy(), f(x).numpy())
    np.testing.assert_array_equal(second.numpy(), f(x).numpy())


def test_arguments_that_do_not_fit():
    with pytest.raises(sg.FuseError, match=r"one float dtype.*float32.*float64"):
        sg.fuse(lambda x, y: x + y)(np.ones(2, np.float32), np.ones(2))
    with pytest.raises(sg.FuseError, match="int64"):
        sg.fuse(lambda x, y: x + y)(np.ones(2, np.int64), np.ones(2))
    with pytest.raises(sg.FuseError, match="no tensor"):
        sg.fuse(lambda x: x)(3)
    with pytest.raises(sg.FuseError, match="hashable"):
        sg.fuse(lambda x, y: x)(np.ones(2), {1, 2})
    with pytest.warns(RuntimeWarning, match="hashable"):
        assert sg.fuse(lambda x, y: x * len(y), fallback=True)(sg.ones((2,)), {1, 2}).tolist() == [2.0, 2.0]
    with pytest.raises(sg.FuseError, match="an object of object"):
        sg.fuse(lambda x, y: x)(np.ones(2), object())
    with pytest.raises(sg.DTypeError, match="real numbers"):
        sg.fuse(lambda x, k: x * k**0.5)(np.ones(2), -2.0)
    with pytest.raises(OverflowError):
        sg.fuse(lambda x: x * 10**400)(np.ones(2))
    with pytest.raises(sg.DTypeError, match="needs a function"):
        sg.fuse(3)
    with pytest.raises(sg.ShapeError, match="broadcast"):
        sg.fuse(lambda x, y: x + y)(np.ones(2), np.ones(3))
    with pytest.raises(ZeroDivisionError):
        sg.fuse(lambda x: x * (1 / 0))(np.ones(2))


def test_many_shapes_do_not_fill_memory():
    f = sg.fuse(lambda x: x + 1.0)
    for length in range(2, 400):
        f(np.zeros(length))
    assert len(f._forms) <= 256


@pytest.mark.timeout(120)
def test_threads_trace_and_run_at_once():
    f = sg.fuse(lambda x: sg.sum(sg.exp(x) * x, axis=-1))
    inputs = [sg.asarray(v) for v in arrays(4, (20, 30), (300, 400), (7,), (50, 3000))]
    expected = [(np.exp(x.numpy()) * x.numpy()).sum(-1) for x in inputs]
    wrong = []

    def work():
        for _ in range(30):
            for x, right in zip(inputs, expected, strict=True):
                if not np.allclose(f(x).numpy(), right, rtol=1e-12):
                    wrong.append(x.shape)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
