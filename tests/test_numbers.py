"""Numbers at the edge: infinities, NaN, subnormals, overflow; shapes with nothing in them; more elements than 2**31.

What is in the rows' domains, and layouts, is in `ops/test_rows.py`.
"""

import math
import os
import warnings
from pathlib import Path

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

import sweepgrad as sg
from strategies import examples, seeds
from sweepgrad.ops.op import OPS, Elementwise

INF, NAN = math.inf, math.nan
DTYPES = ("float32", "float64")
ROWS = [row for row in OPS.values() if isinstance(row, Elementwise) and row.accepts != "bits"]
SMOOTH = [row for row in ROWS if row.differentiable]


def edges(dtype):
    """Where formulas overflow, underflow, lose digits or change: of both signs, and NaN."""
    info = np.finfo(dtype)
    tiny, least, most, eps = (float(x) for x in (info.tiny, info.smallest_subnormal, info.max, info.eps))
    root = math.sqrt(most)
    magnitudes = [0, least, 3 * least, tiny / 2, tiny * (1 - 2 * eps), tiny, 1e-3, 0.5, 1 - eps, 1, 1 + eps, 1.5, 2, 3]
    magnitudes += [10, 20, 88, 89, 104, 710, 745, 750, 1e10, root / 2, 2 * root, most / 2, most, INF]
    return np.array([*magnitudes, *(-x for x in magnitudes), NAN], dtype)


def grids(row, dtype, step=1):
    """All combinations of edges, of every `step`-th, and for three inputs of fewer."""
    values = edges(dtype)[:: step if row.arity < 3 else 4 * step]
    found = [array.reshape(-1).copy() for array in np.meshgrid(*[values] * row.arity)]
    if row.condition:
        found[0] = found[0] > 0
    return found


def quietly(function):
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function()


def like(row, arrays, **params):
    names = {"np": np, "special": special, "x": arrays[0], **params}
    return quietly(lambda: np.asarray(eval(row.like, names | {f"x{k + 1}": a for k, a in enumerate(arrays)})))


# --- elementwise ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_values_at_the_edges(row, dtype):
    """As NumPy and SciPy, up to 4 units in the last place; nothing that underflows is flushed to zero."""
    arrays = grids(row, dtype)
    expected = like(row, arrays)
    found = row.function(*map(sg.asarray, arrays)).numpy()
    assert found.dtype == expected.dtype
    if row.name == "sigmoid":  # SciPy's is 0 already where the result is subnormal
        expected = np.where(arrays[0] < math.log(np.finfo(dtype).tiny), found, expected)
        assert (
            found[np.isfinite(arrays[0]) & (arrays[0] > -745 if dtype == "float64" else arrays[0] > -100)] > 0
        ).all()
    if row.result == "bool":
        np.testing.assert_array_equal(found, expected)
        return
    both = np.isfinite(found) & np.isfinite(expected)
    np.testing.assert_array_equal(found[~both], expected[~both])
    unit = quietly(lambda: np.spacing(np.abs(expected[both])))  # of the greatest number, it overflows
    if row.name in ("logaddexp", "gelu"):  # NumPy cancels near 0; SciPy multiplies a rounded probability
        unit = np.maximum(unit, 4 * np.finfo(dtype).eps * np.abs(expected[both]) + np.finfo(dtype).eps / 64)
    assert (np.abs(found[both].astype("float64") - expected[both]) <= 4 * unit.astype("float64")).all()
    np.testing.assert_array_equal(np.signbit(found[both]), np.signbit(expected[both]))


def _power(x1, x2):
    return x2 * mpmath.power(x1, x2 - 1)


# The exact partial derivatives, by mpmath.
PARTIALS = {
    "add": (lambda a, b: 1, lambda a, b: 1),
    "subtract": (lambda a, b: 1, lambda a, b: -1),
    "multiply": (lambda a, b: b, lambda a, b: a),
    "divide": (lambda a, b: 1 / b, lambda a, b: -a / b**2),
    "floor_divide": (lambda a, b: 0, lambda a, b: 0),
    "remainder": (lambda a, b: 1, lambda a, b: -mpmath.floor(a / b)),
    "pow": (lambda a, b: _power(a, b), lambda a, b: mpmath.power(a, b) * mpmath.log(a)),
    "negative": (lambda x: -1,),
    "positive": (lambda x: 1,),
    "square": (lambda x: 2 * x,),
    "reciprocal": (lambda x: -1 / x**2,),
    "abs": (mpmath.sign,),
    "sign": (lambda x: 0,),
    "floor": (lambda x: 0,),
    "ceil": (lambda x: 0,),
    "trunc": (lambda x: 0,),
    "round": (lambda x: 0,),
    "sqrt": (lambda x: 1 / (2 * mpmath.sqrt(x)),),
    "exp": (mpmath.exp,),
    "expm1": (mpmath.exp,),
    "log": (lambda x: 1 / x,),
    "log1p": (lambda x: 1 / (1 + x),),
    "log2": (lambda x: 1 / (x * mpmath.log(2)),),
    "log10": (lambda x: 1 / (x * mpmath.log(10)),),
    "logaddexp": (lambda a, b: 1 / (1 + mpmath.exp(b - a)), lambda a, b: 1 / (1 + mpmath.exp(a - b))),
    "sin": (mpmath.cos,),
    "cos": (lambda x: -mpmath.sin(x),),
    "tan": (lambda x: 1 / mpmath.cos(x) ** 2,),
    "asin": (lambda x: 1 / mpmath.sqrt(1 - x * x),),
    "acos": (lambda x: -1 / mpmath.sqrt(1 - x * x),),
    "atan": (lambda x: 1 / (1 + x * x),),
    "atan2": (lambda a, b: b / (a * a + b * b), lambda a, b: -a / (a * a + b * b)),
    "hypot": (lambda a, b: a / mpmath.sqrt(a * a + b * b), lambda a, b: b / mpmath.sqrt(a * a + b * b)),
    "sinh": (mpmath.cosh,),
    "cosh": (mpmath.sinh,),
    "tanh": (lambda x: mpmath.sech(x) ** 2,),
    "asinh": (lambda x: 1 / mpmath.sqrt(1 + x * x),),
    "acosh": (lambda x: 1 / mpmath.sqrt(x * x - 1),),
    "atanh": (lambda x: 1 / (1 - x * x),),
    "erf": (lambda x: 2 / mpmath.sqrt(mpmath.pi) * mpmath.exp(-x * x),),
    "erfc": (lambda x: -2 / mpmath.sqrt(mpmath.pi) * mpmath.exp(-x * x),),
    "sigmoid": (lambda x: 1 / (2 + mpmath.exp(x) + mpmath.exp(-x)),),
    "relu": (lambda x: int(x > 0),),
    "softplus": (lambda x: 1 / (1 + mpmath.exp(-x)),),
    "gelu": (lambda x: mpmath.ncdf(x) + x * mpmath.npdf(x) if abs(x) < 1000 else int(x > 0),),
    "maximum": (lambda a, b: (1 + mpmath.sign(a - b)) / 2, lambda a, b: (1 + mpmath.sign(b - a)) / 2),
    "minimum": (lambda a, b: (1 + mpmath.sign(b - a)) / 2, lambda a, b: (1 + mpmath.sign(a - b)) / 2),
}

ABSOLUTE = {"expm1", "tanh", "sigmoid", "gelu"}
"""Whose derivatives are small differences of numbers near 1, or pass through 0: right to that many digits of 1."""

KINKS = {"sign", "abs", "hypot", "atan2"}
"""Whose derivatives at 0, or at two zeros, do not exist."""


def test_every_derivative_has_an_exact_one():
    assert {row.name for row in SMOOTH} == PARTIALS.keys() | {"where", "clip"}  # two that only select


def exactly(function, point):
    """The derivative at a point; None where it does not exist or is not real."""
    try:
        value = function(*map(mpmath.mpf, point))
    except (ZeroDivisionError, ValueError):
        return None
    if isinstance(value, mpmath.mpc) or mpmath.isnan(value):
        return None
    return value


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [row for row in SMOOTH if row.name in PARTIALS], ids=lambda row: row.name)
def test_derivatives_at_the_edges(row, dtype):
    """Relatively to the exact ones, where these are normal numbers; infinite where they are too large."""
    arrays = grids(row, dtype, step=row.arity)
    info = np.finfo(dtype)
    defined = quietly(lambda: np.isfinite(row.function(*map(sg.asarray, arrays)).numpy()))
    defined &= np.all([np.isfinite(array) for array in arrays], axis=0)
    if row.name in ("hypot", "pow"):  # of subnormal numbers, whose few digits are those of the result
        defined &= np.all([np.abs(array) >= info.tiny for array in arrays], axis=0)
    if row.name in KINKS:
        defined &= np.any([array != 0 for array in arrays], axis=0)
    arrays = [array[defined] for array in arrays]
    assert arrays[0].size > 10
    inputs = [sg.asarray(array, requires_grad=True) for array in arrays]
    for create_graph in (False, True):
        for x in inputs:
            x.grad = None
        row.function(*inputs).backward(sg.ones(arrays[0].shape, dtype=dtype), create_graph=create_graph)
        for k, x in enumerate(inputs):
            check_derivative(row, k, x.grad.numpy(), arrays, info)


def check_derivative(row, k, found, arrays, info):
    with mpmath.workprec(400):
        exact = [exactly(PARTIALS[row.name][k], [float(a[i]) for a in arrays]) for i in range(len(found))]
        few = 500 * float(info.eps)  # of an exponential of a large square
        for value, want, *point in zip(found, exact, *arrays, strict=True):
            if want is None:
                continue
            if abs(want) > float(info.max):
                assert value == math.copysign(INF, want) or abs(want) < 1.001 * float(info.max), (point, value, want)
                continue
            allowed = few * abs(want) + float(info.tiny)
            if row.name in ABSOLUTE:
                allowed += 4 * float(info.eps)
            assert abs(float(value) - want) <= allowed, (point, value, want)


# The derivatives at minus infinity and at infinity.
AT_INFINITY = {
    "exp": (0, INF), "expm1": (0, INF), "log": (None, 0), "log2": (None, 0), "log10": (None, 0), "log1p": (None, 0),
    "sqrt": (None, 0), "tanh": (0, 0), "sigmoid": (0, 0), "softplus": (0, 1), "relu": (0, 1), "atan": (0, 0),
    "asinh": (0, 0), "acosh": (None, 0), "erf": (0, 0), "erfc": (0, 0), "sinh": (INF, INF), "cosh": (-INF, INF),
    "square": (-INF, INF), "reciprocal": (0, 0), "abs": (-1, 1), "sign": (0, 0), "negative": (-1, -1),
    "positive": (1, 1), "floor": (0, 0), "ceil": (0, 0), "trunc": (0, 0), "round": (0, 0), "sin": (NAN, NAN),
    "cos": (NAN, NAN), "tan": (NAN, NAN), "asin": (NAN, NAN), "acos": (NAN, NAN),
}  # fmt: skip


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", AT_INFINITY)
def test_derivatives_at_infinity(name, dtype, create_graph):
    x = sg.asarray(np.array([-INF, INF], dtype), requires_grad=True)
    OPS[name].function(x).sum().backward(create_graph=create_graph)
    for found, want in zip(x.grad.tolist(), AT_INFINITY[name], strict=True):
        assert want is None or found == want or (math.isnan(want) and math.isnan(found))


FLAT = {"floor", "ceil", "trunc", "round", "sign", "negative", "positive", "relu"}
"""Whose derivative is a constant, or chosen by a comparison, which a NaN fails."""


@pytest.mark.parametrize("row", [row for row in SMOOTH if row.arity == 1], ids=lambda row: row.name)
def test_derivative_at_nan_is_nan(row):
    x = sg.asarray([NAN, row.domain[0][1]], requires_grad=True)
    row.function(x).sum().backward()
    assert math.isnan(x.grad.tolist()[0]) == (row.name not in FLAT)
    assert math.isfinite(x.grad.tolist()[1])


@pytest.mark.parametrize(
    ("name", "point", "expected"),
    [
        ("maximum", (INF, 1.0), (1, 0)),
        ("maximum", (-INF, 1.0), (0, 1)),
        ("maximum", (INF, INF), (0.5, 0.5)),
        ("minimum", (-INF, 1.0), (1, 0)),
        ("minimum", (INF, -INF), (0, 1)),
        ("where", (True, INF, NAN), (None, 1, 0)),
        ("where", (False, NAN, 2.0), (None, 0, 1)),
        ("clip", (INF, -1.0, 1.0), (0, 0, 1)),
        ("clip", (-INF, -1.0, 1.0), (0, 1, 0)),
        ("clip", (INF, -INF, INF), (1, 0, 0)),
        ("multiply", (INF, 2.0), (2, INF)),
        ("divide", (1.0, INF), (0, 0)),
        ("divide", (INF, 2.0), (0.5, -INF)),
        ("hypot", (INF, 1.0), (None, 0)),
        ("logaddexp", (-INF, 1.0), (0, 1)),
        ("logaddexp", (INF, 1.0), (1, 0)),
        ("pow", (INF, 2.0), (INF, INF)),
        ("pow", (2.0, -INF), (None, 0)),
        ("pow", (0.0, 0.0), (0, 0)),
    ],
)
def test_derivatives_beside_infinities(name, point, expected):
    inputs = [sg.asarray(value, requires_grad=type(value) is float) for value in point]
    OPS[name].function(*inputs).backward()
    for x, want in zip(inputs, expected, strict=True):
        assert want is None or x.grad.item() == want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 100_000])
def test_subnormal_numbers_are_kept(dtype, size):
    """By kernels of every kind: for few elements, for many, strided, fused; in values, sums and cotangents."""
    least = float(np.finfo(dtype).smallest_subnormal)
    x = sg.asarray(np.full((2, size), least, dtype), requires_grad=True)
    assert (x.detach() * 1.0).tolist() == x.tolist()
    assert ((x.detach().T * 2.0).numpy() == 2 * least).all()
    assert sg.sum(x).item() == 2 * size * least
    assert sg.sum(x, axis=0).tolist() == [2 * least] * size
    assert (sg.fuse(lambda t: t * 3.0)(x.detach()).numpy() == 3 * least).all()
    assert sg.fuse(lambda t: sg.sum(t * 3.0))(x.detach()).item() == 6 * size * least
    assert (sg.asarray([[1.0, 1.0]], dtype=dtype) @ x.detach()).tolist() == [[2 * least] * size]
    y = x * 0.5 + x
    y.backward(sg.full(y.shape, 2 * least, dtype=dtype))
    assert (x.grad.numpy() == 3 * least).all()


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.3, 0.3, 1.0), (1.0, -1.0), (0.3, 0.3, -1.0)])
def test_sums_of_cotangents_overflow_and_cancel_without_a_warning(factors, create_graph):
    """Two that are added, and a third that is added to their sum in its place; none by the kernel that computes it."""
    x = sg.asarray([1.0, 2.0], requires_grad=True)
    parts = [sg.reshape(x, (1, 2)) * factor for factor in factors]
    ct = np.array([[1.2e308, INF]])
    sum(parts[1:], start=parts[0]).backward(sg.asarray(ct), create_graph=create_graph)
    np.testing.assert_allclose(x.grad.numpy(), quietly(lambda: sum(ct[0] * factor for factor in factors)), rtol=1e-15)


# --- reductions and products ----------------------------------------------------------------------------------------

LARGE = {"float32": 3e38, "float64": 1.5e308}


def test_float32_is_summed_beyond_its_range():
    x = sg.asarray(np.array([3e38, 3e38, -3e38, -1e38], "float32"), requires_grad=True)
    assert sg.sum(x).item() == pytest.approx(2e38, rel=1e-6)
    assert sg.mean(sg.asarray(np.full((4, 3), 3e38, "float32")), axis=0).tolist() == pytest.approx([3e38] * 3, rel=1e-6)
    assert sg.sum(sg.asarray(np.full(3, 3e38, "float32"))).item() == INF


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_that_overflow(dtype):
    large = LARGE[dtype]
    x = sg.asarray(np.array([[large, large], [-large, 1.0]], dtype), requires_grad=True)
    np.testing.assert_allclose(sg.max(x, axis=0).numpy(), [large, large], rtol=1e-6)
    assert sg.prod(x).item() == -INF
    assert sg.logsumexp(x).item() == pytest.approx(large + math.log(2), rel=1e-6)
    assert sg.softmax(x, axis=1).tolist() == [[0.5, 0.5], [0.0, 1.0]]
    assert sg.log_softmax(x, axis=1).tolist()[1] == [pytest.approx(-large, rel=1e-6), 0.0]
    for name in ("logsumexp", "softmax", "log_softmax", "max", "sum", "mean"):
        x.grad = None
        getattr(sg, name)(x).sum().backward()
        assert np.isfinite(x.grad.numpy()).all(), name
    assert sg.var(x).item() == INF
    if dtype == "float64":
        assert sg.sum(sg.asarray([large, large])).item() == INF
        assert sg.mean(sg.asarray([large, large])).item() == INF


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("name", ["sum", "mean", "prod", "max", "min"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_of_special_numbers(name, dtype, axis):
    values = np.array([0.0, -0.0, 1.0, INF, -INF, NAN, np.finfo(dtype).tiny], dtype)
    x = np.stack(np.meshgrid(values, values, values), axis=-1).reshape(-1, 3).T
    found = getattr(sg, name)(sg.asarray(x), axis=axis).numpy()
    exact = quietly(lambda: getattr(np, name)(x.astype("float64"), axis=axis).astype(dtype))
    np.testing.assert_allclose(found, exact, rtol=1e-6)


def test_gradients_of_reductions_of_special_numbers():
    x = sg.asarray([[INF, 1.0, INF], [-INF, 2.0, 0.0]], requires_grad=True)

    def gradient(function):
        x.grad = None
        function(x).sum().backward()
        return x.grad.tolist()

    assert gradient(lambda t: sg.max(t, axis=1)) == [[0.5, 0, 0.5], [0, 1, 0]]
    assert gradient(lambda t: sg.min(t, axis=1)) == [[0, 1, 0], [1, 0, 0]]
    np.testing.assert_array_equal(gradient(lambda t: sg.prod(t, axis=1)), [[INF, INF, INF], [0, NAN, -INF]])
    assert gradient(lambda t: sg.sum(t)) == [[1, 1, 1], [1, 1, 1]]
    expected = [[0, 0, 0], [0, 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))]]
    np.testing.assert_allclose(gradient(lambda t: sg.logsumexp(t[1:])), expected, rtol=1e-12)


def test_gradient_of_a_product_that_overflows_on_the_way():
    """In float64, as the product itself: of two halves that are multiplied, one would be infinite and one 0."""
    x = sg.asarray(np.array([1e30, 1e-30, 1e30, 1e-30], "float32"), requires_grad=True)
    y = sg.prod(x)
    y.backward()
    assert y.item() == pytest.approx(1.0, rel=1e-6)
    assert x.grad.dtype == np.float32
    np.testing.assert_allclose(x.grad.numpy(), [1e-30, 1e30, 1e-30, 1e30], rtol=1e-6)


matrices = st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (1, 5), (3, 4), (2, 1, 2), (2, 2, 1), (3, 1, 1)])


@examples(40)
@given(shape=matrices, columns=st.integers(1, 3), vector=st.booleans(), dtype=st.sampled_from(DTYPES), seed=seeds)
def test_products_of_matrices_of_special_numbers(shape, columns, vector, dtype, seed):
    """0 times infinity or NaN is NaN, also where BLAS is told to scale by the number 0; forward and backward."""
    rng = np.random.default_rng(seed)
    special_numbers = np.array([0, 0, 0, 1, -2, INF, -INF, NAN], dtype)
    a = rng.choice(special_numbers, shape)
    b = rng.choice(special_numbers, (shape[-1],) if vector else (shape[-1], columns))
    inputs = [sg.asarray(a, requires_grad=True), sg.asarray(b, requires_grad=True)]
    y = sg.matmul(*inputs)
    wide = b[:, None] if vector else b
    product = quietly(lambda: (a[..., :, :, None] * wide).sum(axis=-2))
    np.testing.assert_array_equal(y.numpy(), product[..., 0] if vector else product)
    ct = rng.choice(special_numbers, y.shape)
    y.backward(sg.asarray(ct))
    spread = ct[..., None] if vector else ct
    by_a = quietly(lambda: (spread[..., :, None, :] * wide).sum(axis=-1))
    by_b = quietly(lambda: (a[..., :, :, None] * spread[..., :, None, :]).sum(axis=(*range(a.ndim - 2), -3)))
    np.testing.assert_array_equal(inputs[0].grad.numpy(), by_a)
    np.testing.assert_array_equal(inputs[1].grad.numpy(), by_b[:, 0] if vector else by_b)


def test_conversion_that_overflows_does_not_warn():
    x = sg.asarray([1e300, -1e300, 1e-300, 1.0], requires_grad=True)
    assert sg.astype(x, "float32").tolist() == [INF, -INF, 0.0, 1.0]
    small = sg.ones((2,), dtype="float32", requires_grad=True)
    sg.astype(small, "float64").backward(sg.asarray([1e300, 2.0]))
    assert small.grad.tolist() == [INF, 2.0]


# --- nothing in it --------------------------------------------------------------------------------------------------

EMPTY = [(0,), (0, 3), (3, 0), (2, 0, 3), (0, 3, 0)]
REFERENCES = {
    "logsumexp": lambda x, **params: np.log(np.sum(np.exp(x), **params)),
    "softmax": lambda x, axis: np.exp(x) / np.sum(np.exp(x), axis=axis, keepdims=True),
    "log_softmax": lambda x, axis: x - np.log(np.sum(np.exp(x), axis=axis, keepdims=True)),
}


def half(shape):
    return np.full(shape, 0.5)


def check_like(function, reference, *shapes):
    """`function` on tensors as `reference` on arrays: a value or an error; gradients of the right shape, and finite."""
    arrays = [half(shape) for shape in shapes]
    try:
        expected = quietly(lambda: np.asarray(reference(*arrays)))
    except (ValueError, IndexError):
        with pytest.raises(sg.SweepgradError):
            function(*map(sg.asarray, arrays))
        return
    for create_graph in (False, True):
        inputs = [sg.asarray(array, requires_grad=True) for array in arrays]
        result = function(*inputs)
        assert result.shape == expected.shape
        np.testing.assert_array_equal(result.numpy(), expected)
        if not result.requires_grad:
            continue
        result.backward(sg.ones(result.shape, dtype=result.dtype), create_graph=create_graph)
        for x in inputs:
            assert x.grad.shape == x.shape
            assert np.isfinite(x.grad.numpy()).all()
            if not result.size:
                assert not x.grad.numpy().any()
            if x.grad.requires_grad:
                x.grad.sum().backward(retain_graph=True)


@pytest.mark.parametrize("shape", EMPTY, ids=str)
@pytest.mark.parametrize(
    "name",
    ["sum", "prod", "mean", "max", "min", "var", "std", "any", "all", "argmax", "argmin", *REFERENCES],
)
def test_reductions_of_nothing(name, shape):
    axes = [None, 0, -1, (), tuple(range(len(shape))), (0, -1) if len(shape) > 1 else (0,)]
    for axis in axes if not name.startswith("arg") else axes[:3]:
        for params in [{}] if "softmax" in name else [{"keepdims": False}, {"keepdims": True}]:
            check_like(
                lambda x, axis=axis, params=params: getattr(sg, name)(x, axis=axis, **params),
                lambda x, axis=axis, params=params: REFERENCES.get(name, getattr(np, name, None))(
                    x, axis=axis, **params
                ),
                shape,
            )


def one_axis(x):
    """`x`, which needs one: NumPy sees a number as an array of one element in places."""
    return x[:] if x.ndim else x[0]


SHAPED = {
    "reshape to (0,)": (lambda x: sg.reshape(x, (0,)), lambda x: x.reshape((0,))),
    "reshape to (5, 0, 2)": (lambda x: sg.reshape(x, (5, 0, 2)), lambda x: x.reshape((5, 0, 2))),
    "reshape to -1": (lambda x: sg.reshape(x, (-1,)), lambda x: x.reshape(-1)),
    "reshape to (0, -1)": (lambda x: sg.reshape(x, (0, -1)), lambda x: x.reshape((0, -1))),
    "permute_dims": (lambda x: sg.permute_dims(x, range(x.ndim)[::-1]), np.transpose),
    "flip": (sg.flip, np.flip),
    "flip along none": (lambda x: sg.flip(x, axis=()), lambda x: x),
    "roll": (lambda x: sg.roll(x, 3), lambda x: np.roll(x, 3)),
    "roll along one": (lambda x: sg.roll(x, 3, axis=0), lambda x: np.roll(x, 3, axis=0)),
    "roll along none": (lambda x: sg.roll(x, (), axis=()), lambda x: x),
    "expand_dims": (lambda x: sg.expand_dims(x, axis=(0, -1)), lambda x: np.expand_dims(x, (0, -1))),
    "squeeze": (sg.squeeze, np.squeeze),
    "squeeze one": (lambda x: sg.squeeze(x, axis=0), lambda x: np.squeeze(one_axis(x), axis=0)),
    "moveaxis": (lambda x: sg.moveaxis(x, 0, -1), lambda x: np.moveaxis(x, 0, -1)),
    "broadcast_to": (lambda x: sg.broadcast_to(x, (2, *x.shape)), lambda x: np.broadcast_to(x, (2, *x.shape))),
    "broadcast_to nothing": (lambda x: sg.broadcast_to(x, (0, *x.shape)), lambda x: np.broadcast_to(x, (0, *x.shape))),
    "concat": (lambda x: sg.concat([x, x]), lambda x: np.concatenate([x, x])),
    "concat along the last": (lambda x: sg.concat([x, x], axis=-1), lambda x: np.concatenate([x, x], axis=-1)),
    "concat flattened": (lambda x: sg.concat([x, x], axis=None), lambda x: np.concatenate([x, x], axis=None)),
    "stack": (lambda x: sg.stack([x, x], axis=-1), lambda x: np.stack([x, x], axis=-1)),
    "astype": (lambda x: sg.astype(x, "float32"), lambda x: x.astype("float32")),
    "none of the elements": (lambda x: x[:0], lambda x: x[:0]),
    "backwards": (lambda x: x[::-1], lambda x: x[::-1]),
    "by an empty list": (lambda x: x[[]], lambda x: x[[]]),
    "by a mask": (lambda x: x[x > 0.0], lambda x: x[x > 0.0]),
    "by a mask that holds nowhere": (lambda x: x[x < 0.0], lambda x: x[x < 0.0]),
    "the first": (lambda x: x[0], lambda x: x[0]),
    "with a new axis": (lambda x: x[..., None], lambda x: x[..., None]),
    "by a truth value": (lambda x: x[True], lambda x: x[True]),
    "by an untruth": (lambda x: x[False], lambda x: x[False]),
    "take none": (lambda x: sg.take(x, [], axis=0), lambda x: np.take(one_axis(x), np.array([], int), axis=0)),
    "take the first": (lambda x: sg.take(x, [0], axis=0), lambda x: np.take(one_axis(x), [0], axis=0)),
    "fused": (sg.fuse(lambda x: sg.exp(x) * x), lambda x: np.exp(x) * x),
    "fused sum": (sg.fuse(lambda x: sg.sum(sg.exp(x))), lambda x: np.sum(np.exp(x))),
    "fused mean over the last": (sg.fuse(lambda x: sg.mean(x * x, axis=-1)), lambda x: np.mean(x * x, axis=-1)),
}  # fmt: skip


@pytest.mark.parametrize("shape", [(), *EMPTY], ids=str)
@pytest.mark.parametrize("name", SHAPED)
def test_changes_of_shape_of_nothing_and_of_one_number(name, shape):
    check_like(*SHAPED[name], shape)


@pytest.mark.parametrize(
    "shapes",
    [
        ((0, 3), (3, 0)), ((2, 0), (0, 3)), ((0, 3), (3, 2)), ((0,), (0,)), ((0,), (0, 3)), ((2, 0), (0,)),
        ((3, 2, 0), (0, 4)), ((0, 2, 3), (3, 4)), ((0, 2, 3), (1, 3, 4)), ((0, 0), (0, 0)), ((1, 2, 3), (0, 3, 2)),
        ((0, 3), (2, 0)), ((2, 3), (0,)),
    ],
    ids=str,
)  # fmt: skip
def test_products_of_nothing(shapes):
    check_like(sg.matmul, np.matmul, *shapes)
    if len(shapes[0]) == len(shapes[1]) == 2:
        for axes in (0, 1, ((0,), (1,))):
            check_like(
                lambda x, y, axes=axes: sg.tensordot(x, y, axes=axes),
                lambda x, y, axes=axes: np.tensordot(x, y, axes=axes),
                *shapes,
            )
    if shapes[0][-1] == shapes[1][-1]:
        check_like(sg.vecdot, lambda x, y: (x * y).sum(-1), *shapes)


@pytest.mark.parametrize("other", [(), (1,), (0,), (3, 1), (1, 1, 1), (2, 1, 1), (2, 3), (1, 0)], ids=str)
@pytest.mark.parametrize("shape", [*EMPTY, ()], ids=str)
def test_broadcasting_of_nothing(shape, other):
    for first, second in ((shape, other), (other, shape)):
        check_like(lambda x, y: x * y + x, lambda x, y: x * y + x, first, second)
        check_like(lambda x, y: sg.where(x > 0.0, x, y), lambda x, y: np.where(x > 0.0, x, y), first, second)
        if len(second) == 2:  # strided
            check_like(lambda x, y: sg.hypot(x, y.T), lambda x, y: np.hypot(x, y.T), first, second)
        check_like(sg.fuse(lambda x, y: sg.exp(x) * y), lambda x, y: np.exp(x) * y, first, second)


def test_optimisers_of_nothing():
    x = sg.zeros((0, 3), requires_grad=True)
    for optimizer in (sg.optim.SGD([x], lr=0.1, momentum=0.5), sg.optim.Adam([x]), sg.optim.AdamW([x])):
        sg.sum(x * x).backward()
        optimizer.step()
        assert x.shape == (0, 3)


# --- more than 32 bits count ----------------------------------------------------------------------------------------

BEYOND = 2**31 + 8


def available():
    """Bytes of memory that this process may still take."""
    found = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        found = next(int(line.split()[1]) << 10 for line in meminfo.read_text().splitlines() if "MemAvailable" in line)
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (most := (group / "memory.max").read_text().strip()) != "max":
        found = min(found, int(most) - int((group / "memory.current").read_text()))
    return found


enough = pytest.mark.skipif(available() < 6 << 30, reason="needs 6 GiB of memory: 2**31 elements of a byte, twice")


@enough
@pytest.mark.slow
def test_operations_on_more_elements_than_32_bits_count():
    array = np.zeros(BEYOND, "int8")  # takes no memory where nothing is written
    array[-3], array[2**31 - 1], array[5] = 3, -1, 2
    array.flags.writeable = False
    x = sg.asarray(array, copy=False)
    assert (sg.max(x).item(), sg.min(x).item()) == (3, -1)
    assert sg.any(x == 3).item()
    assert sg.argmax(x).item() == BEYOND - 3
    assert (x[BEYOND - 3].item(), x[-3].item(), x[2**31 - 1 :].tolist()) == (3, 3, [-1, 0, 0, 0, 0, 0, 3, 0, 0])
    assert sg.take(x, [BEYOND - 3, 5, 2**31 - 1]).tolist() == [3, 2, -1]
    assert sg.flip(x)[2].item() == 3
    assert sg.reshape(x, (2, BEYOND // 2))[1, -3].item() == 3
    y = (-x).numpy()
    assert (y[-3], y[2**31 - 1], y[5], np.count_nonzero(y[2**31 - 16 :])) == (-3, 1, -2, 2)


@enough
def test_fused_function_of_more_elements_than_32_bits_count():
    """A sum over rows times columns, of which nothing is kept; and its gradient."""
    rows, columns = 2**16, 2**15 + 1
    assert rows * columns > 2**31
    a = sg.asarray(np.linspace(0, 1, rows, dtype="float32")[:, None], requires_grad=True)
    b = sg.asarray(np.linspace(-1, 3, columns, dtype="float32")[None], requires_grad=True)
    total = sg.fuse(lambda x, y: sg.sum(x * y))(a, b)
    total.backward()
    assert total.item() == pytest.approx(rows / 2 * columns, rel=1e-5)
    np.testing.assert_allclose(a.grad.numpy(), columns, rtol=1e-5)
    np.testing.assert_allclose(b.grad.numpy(), rows / 2, rtol=1e-5)


@enough
def test_gradient_through_an_index_beyond_32_bits():
    """The cotangent has zeros at all places but one, in pages that were never touched."""
    x = sg.asarray(np.ones(1, "float32"), requires_grad=True)
    (sg.broadcast_to(x, (BEYOND,))[BEYOND - 5] * 2.0).backward()
    assert x.grad.tolist() == [2.0]
