"""Elementwise operations on arrays of any shapes that broadcast, layouts and dtypes, against NumPy."""

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes

import sweepgrad as sg
from launch import python
from strategies import examples, laid_out, layouts, seeds, summed_to

DTYPES = ("bool", "int8", "uint8", "int64", "float32", "float64")

DERIVATIVES = {
    "add": lambda a, b: (1.0, 1.0),
    "subtract": lambda a, b: (1.0, -1.0),
    "multiply": lambda a, b: (b, a),
    "divide": lambda a, b: (1 / b, -a / b**2),
    "maximum": lambda a, b: ((a > b) + (a == b) / 2, (a < b) + (a == b) / 2),
    "hypot": lambda a, b: (a / np.hypot(a, b), b / np.hypot(a, b)),
}

PAIRS = ("add", "multiply", "maximum", "less", "less_equal", "greater", "greater_equal", "equal", "not_equal")


def shapes_of(count):
    shapes = mutually_broadcastable_shapes(num_shapes=count, min_dims=0, max_dims=5, min_side=0, max_side=4)
    return shapes.map(lambda found: found.input_shapes)


def values(rng, shape, dtype):
    """Few different values, so that some are equal, and the extreme and special ones."""
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype.startswith("float"):
        return rng.choice(np.array([-2, -0.0, 0, 0.1, 1, 3, np.inf, -np.inf, np.nan], dtype), shape)
    info = np.iinfo(dtype)
    return rng.choice(np.array([info.min, info.max, 0, 1, 2, 3], dtype), shape)


@st.composite
def operands(draw, count, dtypes=DTYPES):
    """`count` arrays that broadcast together, one of which may be a Python number instead."""
    shapes = draw(shapes_of(count))
    rng = np.random.default_rng(draw(seeds))
    found = [laid_out(values(rng, shape, draw(st.sampled_from(dtypes))), draw(layouts)) for shape in shapes]
    if draw(st.booleans()):
        place = draw(st.integers(0, count - 1))
        found[place] = draw(st.sampled_from([0, 3, 1.5, -0.0, True, float("inf"), float("nan")]))
        assume(any(isinstance(one, np.ndarray) for one in found))
    return found


def tensors(found):
    return [sg.asarray(one) if isinstance(one, np.ndarray) else one for one in found]


def check_like_numpy(name, found, reference=None):
    with np.errstate(all="ignore"):
        expected = np.asarray((reference or getattr(np, name))(*found))
    result = getattr(sg, name)(*tensors(found))
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result.numpy(), expected)


def is_truth(*found):
    return np.result_type(*(getattr(one, "dtype", one) for one in found)).kind == "b"


@pytest.mark.parametrize("name", PAIRS)
@examples(60)
@given(found=operands(2))
def test_pairs_as_in_numpy(name, found):
    if name in ("add", "multiply", "maximum") and is_truth(*found):
        with pytest.raises(sg.DTypeError, match=rf"`{name}` takes numbers; found .*bool"):
            getattr(sg, name)(*tensors(found))
    else:
        check_like_numpy(name, found)


@pytest.mark.parametrize("name", ["floor_divide", "remainder"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int64", "uint8"])
def test_quotients_as_in_numpy(name, dtype):
    """Decimal fractions too, whose quotient rounds up to an integer: 1.0 // 0.1 is 9."""
    grid = np.arange(-30, 31) / (10 if dtype.startswith("float") else 1)
    a, b = np.meshgrid(np.append(grid, [np.inf, np.nan]) if dtype.startswith("float") else grid, grid)
    if dtype.startswith("u"):
        a, b = abs(a), abs(b)
    check_like_numpy(name, [a.astype(dtype), b.astype(dtype)])


@pytest.mark.parametrize(("dtype", "number"), [("uint8", -1), ("int8", 300), ("int8", -300), ("int64", 2**70)])
def test_comparison_with_a_number_outside_the_dtype(dtype, number):
    """Has an answer, as in NumPy, though the number does not fit."""
    x = np.array([0, 1, np.iinfo(dtype).max], dtype)
    for name in ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"):
        check_like_numpy(name, [x, number])
        check_like_numpy(name, [number, x])


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_the_least_integer_divided_by_minus_one(dtype):
    """The quotient does not fit and wraps around; the processor traps it, which ends the process."""
    code = f"""if True:
        import numpy as np, sweepgrad as sg
        x = sg.asarray(np.array([np.iinfo("{dtype}").min, 7], "{dtype}"))
        print((x // -1).tolist(), (x % -1).tolist())
        """
    result = python("-c", code)
    assert result.returncode == 0, result.returncode
    assert result.stdout.strip() == f"[{np.iinfo(dtype).min}, -7] [0, 0]"


@examples(60)
@given(found=operands(3), seed=seeds)
def test_where_as_in_numpy(found, seed):
    if isinstance(found[0], np.ndarray):
        found[0] = found[0].astype(bool)
    check_like_numpy("where", found)


@examples(60)
@given(found=operands(3, dtypes=("int8", "uint8", "int64", "float32", "float64")))
@example([np.array([3.0, 1.0]), float("nan"), 2.0])
@example([np.array([3.0, 1.0]), 0.0, np.array([np.nan, 2.0])])
@example([np.array([np.nan, 1.0]), 2.0, 0.0])
def test_clip_as_in_numpy(found):
    dtype = np.result_type(*(getattr(one, "dtype", one) for one in found))
    check_like_numpy("clip", found, lambda x, low, high: np.minimum(np.maximum(x, low), high).astype(dtype))


@pytest.mark.parametrize("dtype", ["int8", "uint64", "int64", "float32"])
@pytest.mark.parametrize("other", ["int16", "int64", "float64"])
def test_clip_at_one_end_keeps_the_common_dtype(dtype, other):
    x = np.array([0, 1, 100], dtype)
    limit = np.array(200, other)
    check_like_numpy("clip", [x, limit], np.maximum)
    for low, high in ((limit, None), (None, limit), (None, None)):
        result = sg.clip(sg.asarray(x), min=low, max=high)
        expected = np.clip(x, low, high)
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result.numpy(), expected)


@examples(40)
@given(found=operands(2), name=st.sampled_from(["add", "multiply", "less"]))
def test_arrays_and_numpy_scalars_are_taken_too(found, name):
    """An array is not weak, whatever its dimension, on either side of a tensor."""
    assume(not is_truth(*found))
    first, second = found
    with np.errstate(all="ignore"):
        expected = np.asarray(getattr(np, name)(first, second))
    for result in (getattr(sg, name)(first, second), getattr(sg, name)(*tensors([first]), second)):
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result.numpy(), expected)


def upstream(name, a, b, ct):
    """Cotangents of the two inputs of the operation `name`, by its derivatives in NumPy."""
    parts = [np.broadcast_to(ct * partial, ct.shape) for partial in DERIVATIVES[name](a, b)]
    return [summed_to(part, x.shape) for part, x in zip(parts, (a, b), strict=True)]


@examples(150)
@given(
    shapes=shapes_of(3),
    layout=st.tuples(layouts, layouts, layouts),
    names=st.tuples(*[st.sampled_from(sorted(DERIVATIVES))] * 2),
    again=st.booleans(),
    seed=seeds,
)
@example([(), (4, 1), (1, 3)], ("contiguous",) * 3, ("multiply", "multiply"), True, 0)
def test_gradient_of_two_operations(shapes, layout, names, again, seed):
    """`outer(inner(a, b), c)`, where c may be a itself, against the chain rule written in NumPy."""
    rng = np.random.default_rng(seed)
    a, b, c = (laid_out(rng.uniform(0.5, 2, shape), one) for shape, one in zip(shapes, layout, strict=True))
    inner, outer = names
    x, y, z = (sg.asarray(one, requires_grad=True) for one in (a, b, c))
    if again:
        c, z = a, x
    middle = getattr(np, inner)(a, b)
    result = getattr(sg, outer)(getattr(sg, inner)(x, y), z)
    np.testing.assert_allclose(result.numpy(), getattr(np, outer)(middle, c), rtol=1e-14)
    ct = rng.standard_normal(result.shape)
    result.backward(ct)
    to_middle, to_c = upstream(outer, middle, c, ct)
    to_a, to_b = upstream(inner, a, b, to_middle)
    expected = [to_a + to_c, to_b] if again else [to_a, to_b, to_c]
    for tensor, gradient in zip((x, y) if again else (x, y, z), expected, strict=True):
        assert tensor.grad.shape == tensor.shape
        np.testing.assert_allclose(tensor.grad.numpy(), gradient, rtol=1e-12, atol=1e-12)


def test_gradient_of_a_remainder_by_the_divisor():
    """Minus the quotient rounded down, which for 1.0 and 0.1 is 9."""
    a, b = (x.ravel() for x in np.meshgrid(np.arange(-30, 31) / 10, np.arange(1, 20) / 10))
    y = sg.asarray(b, requires_grad=True)
    sg.sum(sg.remainder(a, y)).backward()
    np.testing.assert_array_equal(y.grad.numpy(), -(a // b))


@examples(60)
@given(shapes=shapes_of(3), layout=st.tuples(layouts, layouts, layouts), seed=seeds)
def test_gradient_of_where(shapes, layout, seed):
    rng = np.random.default_rng(seed)
    mask, a, b = (laid_out(rng.standard_normal(shape), one) for shape, one in zip(shapes, layout, strict=True))
    x, y = (sg.asarray(one, requires_grad=True) for one in (a, b))
    result = sg.where(mask > 0, x, y)
    ct = rng.standard_normal(result.shape)
    result.backward(ct)
    np.testing.assert_allclose(x.grad.numpy(), summed_to(np.where(mask > 0, ct, 0), a.shape), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(y.grad.numpy(), summed_to(np.where(mask > 0, 0, ct), b.shape), rtol=1e-12, atol=1e-12)


@examples(60)
@given(shapes=shapes_of(3), layout=st.tuples(layouts, layouts, layouts), seed=seeds)
def test_gradient_of_clip(shapes, layout, seed):
    """Where the limits cross, the upper one wins, as in NumPy, and has the derivative."""
    rng = np.random.default_rng(seed)
    arrays = [laid_out(rng.standard_normal(shape), one) for shape, one in zip(shapes, layout, strict=True)]
    inputs = [sg.asarray(one, requires_grad=True) for one in arrays]
    result = sg.clip(*inputs)
    ct = rng.standard_normal(result.shape)
    result.backward(ct)
    a, low, high = np.broadcast_arrays(*arrays)
    to_high = np.maximum(a, low) > high
    to_low = ~to_high & (a < low)
    for tensor, mask in zip(inputs, (~to_high & ~to_low, to_low, to_high), strict=True):
        np.testing.assert_allclose(tensor.grad.numpy(), summed_to(ct * mask, tensor.shape), rtol=1e-12, atol=1e-12)


@examples(60)
@given(shapes=shapes_of(2), layout=st.tuples(layouts, layouts), low=st.integers(0, 1), seed=seeds)
def test_gradient_through_promotion(shapes, layout, low, seed):
    """A float32 input of a float64 operation gets a float32 gradient, an integer one none."""
    rng = np.random.default_rng(seed)
    a, b = (laid_out(rng.uniform(0.5, 2, shape), one) for shape, one in zip(shapes, layout, strict=True))
    dtypes = ["float32" if k == low else "float64" for k in (0, 1)]
    x, y = (sg.asarray(one, dtype=dtype, requires_grad=True) for one, dtype in zip((a, b), dtypes, strict=True))
    counts = rng.integers(1, 4, a.shape)
    result = x * y * counts
    assert result.dtype == np.float64
    ct = rng.standard_normal(result.shape)
    result.backward(ct)
    for tensor, factor in ((x, y.numpy() * counts), (y, x.numpy() * counts)):
        assert tensor.grad.dtype == tensor.dtype
        rtol = 1e-6 if tensor.dtype == np.float32 else 1e-12
        np.testing.assert_allclose(tensor.grad.numpy(), summed_to(ct * factor, tensor.shape), rtol=rtol, atol=rtol)


@examples(60)
@given(shapes=shapes_of(2), layout=st.tuples(layouts, layouts), seed=seeds)
def test_second_derivative_of_a_product(shapes, layout, seed):
    """d/da of <v, d/da sum(a a b b)> = 4 v b b, summed to the shape of a."""
    rng = np.random.default_rng(seed)
    a, b = (laid_out(rng.standard_normal(shape), one) for shape, one in zip(shapes, layout, strict=True))
    v = rng.standard_normal(a.shape)
    slope = sg.grad(lambda x, y: sg.sum(x * y * x * y))
    by_a, by_b = sg.grad(lambda x, y: sg.sum(slope(x, y) * v), argnums=(0, 1))(a, b)
    wide = np.broadcast_shapes(a.shape, b.shape)
    np.testing.assert_allclose(by_a.numpy(), summed_to(np.broadcast_to(2 * b * b * v, wide), a.shape), 1e-12, 1e-12)
    np.testing.assert_allclose(by_b.numpy(), summed_to(np.broadcast_to(4 * a * b * v, wide), b.shape), 1e-12, 1e-12)
