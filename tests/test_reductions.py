"""Reductions over any axes of any layout against NumPy and SciPy, and where they are delicate."""

import itertools
import math
import warnings

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import special

import sweepgrad as sg
from strategies import examples, laid_out, layouts, seeds

FLOATS = ("float32", "float64")
NUMBERS = ("int8", "uint8", "int32", "uint64", *FLOATS)
ANY = ("bool", *NUMBERS)

shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@st.composite
def axes_of(draw, ndim, *, several=True):
    """None, an axis from either end, or a tuple of axes in any order, perhaps empty."""
    kind = draw(st.sampled_from(["none", "one", "several"] if several else ["none", "one"]))
    if kind == "none" or (kind == "one" and not ndim):
        return None
    if kind == "one":
        return draw(st.integers(-ndim, ndim - 1))
    chosen = draw(st.permutations(range(ndim)))[: draw(st.integers(0, ndim))]
    return tuple(k - ndim * draw(st.booleans()) for k in chosen)


def count_of(shape, axis):
    axes = range(len(shape)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    return math.prod(shape[k] for k in axes)


def random_array(seed, shape, dtype, layout="contiguous"):
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return laid_out(rng.random(shape) < 0.6, layout)
    if dtype.startswith("float"):
        return laid_out(rng.uniform(-2, 2, shape).astype(dtype), layout)
    return laid_out(rng.integers(0 if dtype.startswith("u") else -3, 4, shape).astype(dtype), layout)


def quietly(function, *args, **kwargs):
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return np.asarray(function(*args, **kwargs))


def check(result, expected, rtol=1e-13):
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    if expected.dtype.kind == "f":
        rtol = 2e-6 if expected.dtype == np.float32 else rtol
        np.testing.assert_allclose(result.numpy(), expected, rtol=rtol, atol=rtol)
    else:
        np.testing.assert_array_equal(result.numpy(), expected)


@pytest.mark.parametrize("name", ["sum", "prod", "mean", "all", "any"])
@examples(80)
@given(data=st.data(), shape=shapes, dtype=st.sampled_from(ANY), layout=layouts, keepdims=st.booleans(), seed=seeds)
def test_reductions_of_anything(name, data, shape, dtype, layout, keepdims, seed):
    x = random_array(seed, shape, dtype, layout)
    axis = data.draw(axes_of(len(shape)))
    expected = quietly(getattr(np, name), x, axis=axis, keepdims=keepdims)
    check(getattr(sg, name)(sg.asarray(x), axis=axis, keepdims=keepdims), expected)


@pytest.mark.parametrize("name", ["max", "min"])
@examples(80)
@given(data=st.data(), shape=shapes, dtype=st.sampled_from(NUMBERS), layout=layouts, keepdims=st.booleans(), seed=seeds)
def test_extremes(name, data, shape, dtype, layout, keepdims, seed):
    x = random_array(seed, shape, dtype, layout)
    axis = data.draw(axes_of(len(shape)))
    if count_of(shape, axis) == 0:
        with pytest.raises(sg.ShapeError, match=f"`{name}` of nothing"):
            getattr(sg, name)(sg.asarray(x), axis=axis, keepdims=keepdims)
    else:
        expected = quietly(getattr(np, name), x, axis=axis, keepdims=keepdims)
        check(getattr(sg, name)(sg.asarray(x), axis=axis, keepdims=keepdims), expected)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@examples(80)
@given(data=st.data(), shape=shapes, dtype=st.sampled_from(ANY), layout=layouts, keepdims=st.booleans(), seed=seeds)
def test_positions(name, data, shape, dtype, layout, keepdims, seed):
    x = random_array(seed, shape, dtype, layout)
    axis = data.draw(axes_of(len(shape), several=False))
    if count_of(shape, axis) == 0:
        with pytest.raises(sg.ShapeError, match=f"`{name}` of nothing"):
            getattr(sg, name)(sg.asarray(x), axis=axis, keepdims=keepdims)
    else:
        expected = quietly(getattr(np, name), x, axis=axis, keepdims=keepdims)
        check(getattr(sg, name)(sg.asarray(x), axis=axis, keepdims=keepdims), expected)


@pytest.mark.parametrize("name", ["var", "std"])
@examples(80)
@given(
    data=st.data(),
    shape=shapes,
    dtype=st.sampled_from(ANY),
    layout=layouts,
    keepdims=st.booleans(),
    correction=st.sampled_from([0, 1, 0.5]),
    seed=seeds,
)
def test_spread(name, data, shape, dtype, layout, keepdims, correction, seed):
    x = random_array(seed, shape, dtype, layout)
    axis = data.draw(axes_of(len(shape)))
    result = getattr(sg, name)(sg.asarray(x), axis=axis, correction=correction, keepdims=keepdims)
    expected = quietly(getattr(np, name), x, axis=axis, ddof=correction, keepdims=keepdims)
    if count_of(shape, axis) <= correction:
        assert result.shape == expected.shape
        assert np.isnan(result.numpy()).all()
    else:
        check(result, expected, rtol=1e-12)


@examples(80)
@given(data=st.data(), shape=shapes, dtype=st.sampled_from(ANY), layout=layouts, keepdims=st.booleans(), seed=seeds)
def test_logsumexp(data, shape, dtype, layout, keepdims, seed):
    x = random_array(seed, shape, dtype, layout)
    axis = data.draw(axes_of(len(shape)))
    result = sg.logsumexp(sg.asarray(x), axis=axis, keepdims=keepdims)
    wide = x.astype(np.float64)  # SciPy keeps float32 and its rounding errors
    exact = quietly(lambda: np.log(np.sum(np.exp(wide), axis=axis, keepdims=keepdims)))
    check(result, exact.astype(dtype if dtype in FLOATS else np.float64))
    if x.size and axis != ():
        np.testing.assert_allclose(result.numpy(), special.logsumexp(wide, axis=axis, keepdims=keepdims), rtol=2e-5)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@examples(80)
@given(data=st.data(), shape=shapes, dtype=st.sampled_from(ANY), layout=layouts, seed=seeds)
def test_softmax(name, data, shape, dtype, layout, seed):
    x = random_array(seed, shape, dtype, layout)
    axis = data.draw(axes_of(len(shape)))
    assume(axis != () and x.size)
    wide = x.astype(np.float64)
    expected = np.asarray(getattr(special, name)(wide, axis=axis)).astype(dtype if dtype in FLOATS else np.float64)
    check(getattr(sg, name)(sg.asarray(x), axis=axis), expected)


# --- gradients ------------------------------------------------------------------------------------------------------


def expanded(reduced, shape, axis):
    """`reduced`, with its reduced axes as axes of length 1 again."""
    axes = (
        range(len(shape)) if axis is None else [k % len(shape) for k in (axis if isinstance(axis, tuple) else (axis,))]
    )
    return np.reshape(reduced, [1 if k in axes else n for k, n in enumerate(shape)])


def others(x, axis):
    """For each element the product of all others that it is multiplied with, by brute force."""
    out = np.empty(x.shape)
    for index in np.ndindex(x.shape):
        rest = np.array(x)
        rest[index] = 1
        out[index] = np.broadcast_to(np.prod(rest, axis=axis, keepdims=True), x.shape)[index]
    return out


def softmax_gradient(x, ct, axis):
    y = special.softmax(x, axis=axis)
    return y * (ct - np.sum(ct * y, axis=axis, keepdims=True))


GRADIENTS = {
    "sum": lambda x, ct, axis: ct + 0 * x,
    "mean": lambda x, ct, axis: ct / count_of(x.shape, axis) + 0 * x,
    "prod": lambda x, ct, axis: ct * others(x, axis),
    "max": lambda x, ct, axis: ct * (x == np.max(x, axis=axis, keepdims=True)),
    "min": lambda x, ct, axis: ct * (x == np.min(x, axis=axis, keepdims=True)),
    "var": lambda x, ct, axis: ct * 2 * (x - x.mean(axis=axis, keepdims=True)) / count_of(x.shape, axis),
    "std": lambda x, ct, axis: (
        ct * (x - x.mean(axis=axis, keepdims=True)) / count_of(x.shape, axis) / x.std(axis=axis, keepdims=True)
    ),
    "logsumexp": lambda x, ct, axis: ct * special.softmax(x, axis=axis),
}


@pytest.mark.parametrize("name", GRADIENTS)
@examples(50)
@given(
    data=st.data(),
    shape=hnp.array_shapes(min_dims=0, max_dims=4, max_side=4),
    layout=layouts.filter(lambda one: one != "repeated"),
    keepdims=st.booleans(),
    seed=seeds,
)
def test_gradients(name, data, shape, layout, keepdims, seed):
    x = random_array(seed, shape, "float64", layout)
    axis = data.draw(axes_of(len(shape)))
    assume(axis != () or name in ("sum", "mean", "prod"))
    assume(count_of(shape, axis) > 1 or name != "std")
    tensor = sg.asarray(x, requires_grad=True)
    result = getattr(sg, name)(tensor, axis=axis, keepdims=keepdims)
    ct = np.random.default_rng(seed + 1).standard_normal(result.shape)
    result.backward(ct)
    expected = GRADIENTS[name](x, expanded(ct, shape, axis), axis)
    np.testing.assert_allclose(tensor.grad.numpy(), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("axis", [-1, 0, (0, 2), None])
def test_gradients_of_softmax(axis):
    rng = np.random.default_rng(2)
    x, ct = rng.standard_normal((2, 2, 3, 4))
    for name, expected in (
        ("softmax", softmax_gradient(x, ct, axis)),
        ("log_softmax", ct - special.softmax(x, axis=axis) * np.sum(ct, axis=axis, keepdims=True)),
    ):
        tensor = sg.asarray(x, requires_grad=True)
        getattr(sg, name)(tensor, axis=axis).backward(ct)
        np.testing.assert_allclose(tensor.grad.numpy(), expected, rtol=1e-12, atol=1e-13)


def without(x, *places):
    return math.prod(value for k, value in enumerate(x) if k not in places)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("zeros", [0, 1, 2, 3])
def test_product_with_zeros(n, zeros):
    """First and second derivative are products of the other elements, whether or not those are 0."""
    rng = np.random.default_rng(10 * n + zeros)
    x = rng.uniform(0.5, 2, n)
    x[rng.permutation(n)[:zeros]] = 0
    slope = sg.grad(sg.prod)
    np.testing.assert_allclose(slope(x).numpy(), [without(x, i) for i in range(n)], rtol=1e-13)
    for i in range(n):
        row = sg.grad(lambda t, i=i: slope(t)[i])(x)
        expected = [0 if i == j else without(x, i, j) for j in range(n)]
        np.testing.assert_allclose(row.numpy(), expected, rtol=1e-13)


@pytest.mark.parametrize("name", ["max", "min"])
def test_equal_extremes_share_the_derivative(name):
    sign = 1 if name == "max" else -1
    x = sign * np.array([[3.0, 1, 3], [2, 2, 2], [0, 5, 1]])
    expected = np.array([[1 / 2, 0, 1 / 2], [1 / 3, 1 / 3, 1 / 3], [0, 1, 0]])
    function = getattr(sg, name)
    tensor = sg.asarray(x, requires_grad=True)
    function(tensor, axis=1).backward(np.array([1.0, 1, 1]))
    np.testing.assert_allclose(tensor.grad.numpy(), expected, rtol=1e-15)
    # (max x)**2 has the derivative 2 max(x) share, and that 2 share share.
    slope = sg.grad(lambda t: sg.square(function(t)))
    again = sg.grad(lambda t: sg.sum(slope(t) * sg.asarray([1.0, 0, 0])))(x[0])
    np.testing.assert_allclose(again.numpy(), [1 / 2, 0, 1 / 2], rtol=1e-15)


# --- accuracy and special values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(10_000_000,), (10, 1_000_000), (1_000_000, 10)])
def test_a_long_float32_sum_is_as_accurate_as_that_of_numpy(shape):
    x = np.full(shape, 0.1, np.float32)
    exact = math.prod(shape) * float(x.flat[0])
    for axis in (None, len(shape) - 1, 0):
        truth = exact / (1 if axis is None else math.prod(shape) / shape[axis])
        error = np.abs(sg.sum(x, axis=axis).numpy() - truth).max()
        in_numpy = np.abs(np.sum(x, axis=axis) - truth).max()
        assert error <= in_numpy + np.spacing(np.float32(truth)), (error, in_numpy)


def test_a_long_float64_sum_is_as_accurate_as_that_of_numpy():
    x = np.random.default_rng(0).uniform(0, 1, 1_000_000)
    truth = math.fsum(x)
    for scale in (1, -1):
        assert abs(sg.sum(scale * x).item() - scale * truth) <= 4 * np.spacing(truth)
    assert abs(sg.mean(x).item() - truth / x.size) <= 4 * np.spacing(0.5)


def test_variance_does_not_cancel():
    x = 1e8 + np.random.default_rng(0).standard_normal(1000)
    np.testing.assert_allclose(sg.var(x).item(), np.var(x), rtol=1e-9)
    np.testing.assert_allclose(sg.std(x, correction=1).item(), np.std(x, ddof=1), rtol=1e-9)


def test_small_integers_do_not_overflow_in_a_sum():
    assert sg.sum(np.full(1000, 127, np.int8)).item() == 127_000
    assert sg.sum(np.full(1000, 255, np.uint8)).item() == 255_000
    assert sg.sum(np.ones(300, bool)).item() == 300
    assert sg.sum(np.full(3, 2**63, np.uint64)).item() == 2**63 % 2**64  # as in NumPy
    assert sg.mean(np.full(1000, 127, np.int8)).item() == 127.0


@pytest.mark.parametrize("name", ["sum", "prod"])
def test_dtype_of_a_sum(name):
    x = np.array([[1, 2], [3, 4]], np.int8)
    for dtype in ("int8", "float32", "float64", np.uint8, int):
        result = getattr(sg, name)(x, axis=0, dtype=dtype)
        np.testing.assert_array_equal(result.numpy(), getattr(np, name)(x, axis=0, dtype=dtype), strict=True)
    tensor = sg.asarray(x, dtype="float32", requires_grad=True)
    result = getattr(sg, name)(tensor, dtype="float64")
    assert result.dtype == np.float64
    result.backward()
    assert tensor.grad.dtype == np.float32


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["sum", "prod", "mean", "max", "min"])
@pytest.mark.parametrize("n", [3, 300])
def test_special_values(name, dtype, n):
    """NaN wins wherever it stands, and infinities are as in NumPy, along either axis."""
    special_values = (0.0, np.inf, -np.inf, np.nan)
    rows = []
    for first, second in itertools.product(special_values, repeat=2):
        for i, j in itertools.permutations(sorted({0, 1, n // 2, n - 1}), 2):
            row = np.ones(n, dtype)
            row[[i, j]] = first, second
            rows.append(row)
    x = np.array(rows)
    expected = quietly(getattr(np, name), x, axis=1)
    check(getattr(sg, name)(x, axis=1), expected)
    check(getattr(sg, name)(np.ascontiguousarray(x.T), axis=0), expected)


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint8", "uint64"])
def test_extremes_of_the_dtype(dtype):
    info = np.iinfo(dtype)
    for value in (info.min, info.max):
        x = np.full((3, 2), value, dtype)
        for axis in (None, 0, 1):
            np.testing.assert_array_equal(sg.max(x, axis=axis).numpy(), x.max(axis=axis), strict=True)
            np.testing.assert_array_equal(sg.min(x, axis=axis).numpy(), x.min(axis=axis), strict=True)


@pytest.mark.parametrize("dtype", FLOATS)
def test_logsumexp_and_softmax_at_the_edges(dtype):
    inf, nan = np.inf, np.nan
    big = {"float32": 1e38, "float64": 1e308}[dtype]
    rows = [[0, 0], [big, 0], [-big, -big], [1000, 1000], [-1000, -1000], [-inf, 0], [inf, 0], [inf, -inf]]
    rows += [[-inf, -inf], [nan, 0], [nan, inf], [0, -big]]
    x = np.array(rows, dtype)
    expected = quietly(special.logsumexp, x.astype(float), axis=1)
    np.testing.assert_allclose(sg.logsumexp(x, axis=1).numpy(), expected.astype(dtype), rtol=1e-6)
    finite = np.array([row for row in rows if inf not in row and nan not in row and row != [-inf, -inf]], dtype)
    np.testing.assert_allclose(sg.softmax(finite).numpy(), special.softmax(finite, axis=1), rtol=1e-6)
    np.testing.assert_allclose(sg.log_softmax(finite).numpy(), special.log_softmax(finite, axis=1), rtol=1e-6)
    for row in ([-inf, -inf], [nan, 0]):
        assert np.isnan(sg.softmax(np.array(row, dtype)).numpy()).all()
        assert np.isnan(sg.log_softmax(np.array(row, dtype)).numpy()).all()


def test_gradient_where_an_element_is_masked_by_minus_infinity():
    """As in masked attention: the masked element has weight 0, and no NaN reaches its gradient or the others'."""
    x = np.array([0.5, -np.inf, 1.5])
    weights = special.softmax(x)
    ct = np.array([1.0, 2, 3])
    np.testing.assert_allclose(sg.grad(sg.logsumexp)(x).numpy(), weights, rtol=1e-14)
    by_softmax = sg.grad(lambda t: sg.sum(sg.softmax(t) * ct))(x)
    np.testing.assert_allclose(by_softmax.numpy(), softmax_gradient(x, ct, -1), rtol=1e-13)


def test_gradient_of_logsumexp_does_not_overflow():
    np.testing.assert_allclose(sg.grad(sg.logsumexp)(np.array([1000.0, 1000, 0])).numpy(), [0.5, 0.5, 0], atol=1e-300)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
def test_zero_size(shape):
    """What is reduced to, and the gradient, which is as empty as the input."""
    values = {"sum": 0.0, "prod": 1.0, "mean": np.nan, "var": np.nan, "std": np.nan, "logsumexp": -np.inf}
    for name, value in values.items():
        x = sg.zeros(shape, requires_grad=True)
        result = getattr(sg, name)(x)
        assert result.shape == ()
        np.testing.assert_equal(result.item(), value)
        result.backward()
        assert x.grad.shape == shape
    for name in ("sum", "prod", "max", "min"):
        x = sg.zeros((0, 3), requires_grad=True)
        result = getattr(sg, name)(x, axis=1)
        assert result.shape == (0,)
        result.backward(np.zeros(0))
        assert x.grad.shape == (0, 3)
    assert sg.all(sg.zeros(shape)).item() is True
    assert sg.any(sg.zeros(shape)).item() is False
    for name in ("softmax", "log_softmax"):
        assert getattr(sg, name)(sg.zeros(shape)).shape == shape


def test_extremes_refuse_truth_values():
    for name in ("max", "min"):
        with pytest.raises(sg.DTypeError, match=f"`{name}` takes numbers; found bool: use `any` or `all`"):
            getattr(sg, name)(sg.asarray([True]))


def test_methods_are_the_functions():
    x = sg.asarray(np.random.default_rng(1).standard_normal((3, 4)))
    for name in ("sum", "mean", "prod", "max", "min", "var", "std", "argmax", "all", "any", "logsumexp", "softmax"):
        method, function = getattr(x, name), getattr(sg, name)
        np.testing.assert_array_equal(method(axis=0).numpy(), function(x, axis=0).numpy(), strict=True)


def test_standard_deviation_of_equal_elements_has_derivative_zero():
    for create_graph in (False, True):
        x = sg.asarray([[2.0, 2.0], [1.0, 3.0]], requires_grad=True)
        sg.std(x, axis=1).sum().backward(create_graph=create_graph)
        np.testing.assert_allclose(x.grad.numpy(), [[0.0, 0.0], [-0.5, 0.5]])


def test_ten_million_equal_numbers_are_added_as_precisely_as_by_numpy():
    x = np.full(10_000_000, 0.1, np.float32)
    exact = float(x[0]) * x.size
    assert abs(sg.sum(x).item() - exact) <= abs(float(x.sum()) - exact)
    assert abs(sg.mean(x).item() / x[0] - 1) < 1e-7
    assert sg.sum(x.reshape(-1, 4), axis=0).tolist() == [float(np.float32(exact / 4))] * 4


def test_float64_is_added_pairwise():
    x = np.random.default_rng(0).random(3_000_001)
    exact = math.fsum(x)
    assert abs(sg.sum(x).item() - exact) <= 4 * np.finfo(float).eps * exact
    columns = np.random.default_rng(1).random((500_000, 3))
    found = sg.sum(columns, axis=0).numpy()
    for k in range(3):
        assert abs(found[k] - math.fsum(columns[:, k])) <= 8 * np.finfo(float).eps * found[k]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp", "var"])
def test_reports_name_the_operation_that_was_called(name, dtype):
    x = sg.ones((2, 3), dtype=dtype, requires_grad=True)
    assert f"op={name})" in repr(getattr(sg, name)(x))
