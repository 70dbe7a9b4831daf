"""Reading elements by basic, integer, mask and mixed indices: values, gradients and second derivatives."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import sweepgrad as sg
from strategies import examples, laid_out, layouts, seeds
from sweepgrad.elements import dense
from sweepgrad.ops.indexing import scatter

shapes = hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4)


def masks(shape):
    return seeds.map(lambda seed: np.random.default_rng(seed).random(shape) < 0.5)


@st.composite
def mixed_keys(draw, shape):
    """Integers, slices, None, `...`, integer arrays and masks in one key, perhaps with fewer entries than axes."""
    common = draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3))
    key, axis, dots = [], 0, False
    while axis < len(shape) and draw(st.integers(0, 5)):
        n = shape[axis]
        kind = draw(st.sampled_from(["int", "slice", "array", "mask", "none", "dots"]))
        if kind == "none":
            key.append(None)
            continue
        if kind == "dots":
            if not dots:
                dots = True
                key.append(...)
                axis += draw(st.integers(0, len(shape) - axis))
            continue
        if kind == "slice":
            key.append(draw(st.slices(n)))
        elif kind == "mask":
            key.append(draw(masks((n,))))
        else:
            assume(n > 0)
            array = draw(hnp.arrays(np.int64, common if kind == "array" else (), elements=st.integers(-n, n - 1)))
            key.append(array if kind == "array" else int(array))
        axis += 1
    return tuple(key)


def read(x, key):
    """What NumPy reads, or None where NumPy refuses the key."""
    try:
        return np.asarray(x[key])
    except IndexError:
        return None


def check_key(x, key, rng):
    """Value, gradient, and second derivative of the quadratic sum(w * x[key]**2), along `v`."""
    expected = read(x, key)
    if expected is None:
        with pytest.raises(sg.AxisError, match="`getitem` on shape"):
            sg.asarray(x)[key]
        return
    tensor = sg.asarray(x, requires_grad=True)
    result = tensor[key]
    assert result.shape == expected.shape
    np.testing.assert_array_equal(result.numpy(), expected)

    weights, v = rng.standard_normal(expected.shape), rng.standard_normal(x.shape)
    result.backward(weights)
    added = np.zeros(x.shape)
    np.add.at(added, key, weights)
    np.testing.assert_allclose(tensor.grad.numpy(), added, rtol=1e-12, atol=1e-12)

    slope = sg.grad(lambda t: sg.sum(weights * t[key] ** 2))
    second = sg.grad(lambda t: sg.sum(slope(t) * v))(x)
    added = np.zeros(x.shape)
    np.add.at(added, key, 2 * weights * v[key])
    np.testing.assert_allclose(second.numpy(), added, rtol=1e-12, atol=1e-12)


def random_array(seed, shape, layout):
    rng = np.random.default_rng(seed)
    return laid_out(rng.standard_normal(shape), layout), rng


@examples(150)
@given(
    data=st.data(), shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4), layout=layouts, seed=seeds
)
def test_basic_index(data, shape, layout, seed):
    x, rng = random_array(seed, shape, layout)
    check_key(x, data.draw(hnp.basic_indices(shape, allow_newaxis=True, max_dims=6)), rng)


@examples(100)
@given(data=st.data(), shape=hnp.array_shapes(min_dims=1, max_dims=4, max_side=4), layout=layouts, seed=seeds)
def test_integer_array_index(data, shape, layout, seed):
    x, rng = random_array(seed, shape, layout)
    check_key(x, data.draw(hnp.integer_array_indices(shape)), rng)


@examples(100)
@given(data=st.data(), shape=shapes, layout=layouts, seed=seeds)
def test_mask_index(data, shape, layout, seed):
    """A mask over the first axes, the rest read by a basic index."""
    x, rng = random_array(seed, shape, layout)
    covered = data.draw(st.integers(0, len(shape)))
    rest = data.draw(hnp.basic_indices(shape[covered:], allow_ellipsis=False))
    check_key(x, (data.draw(masks(shape[:covered])), *(rest if isinstance(rest, tuple) else (rest,))), rng)


@examples(200)
@given(data=st.data(), shape=shapes, layout=layouts, seed=seeds)
def test_mixed_index(data, shape, layout, seed):
    x, rng = random_array(seed, shape, layout)
    check_key(x, data.draw(mixed_keys(shape)), rng)


@pytest.mark.parametrize(
    "key",
    [
        [0, 2, 0],
        [],
        [[0, 1], [2, 0]],
        [True, False, True],
        ([0, 1], [1, 1]),
        (slice(None), [1, 0]),
        True,
        False,
        np.True_,
        np.uint8(2),
        np.array(1),
        np.array([2, 0], np.uint8),
        (slice(np.int64(1), None), np.int32(-1)),
    ],
    ids=repr,
)
def test_lists_and_scalars_as_index(key):
    x, rng = random_array(3, (3, 2), "reversed")
    check_key(x, key, rng)


@pytest.mark.parametrize(
    ("key", "plain"),
    [
        (sg.asarray([2, 0, 2]), np.array([2, 0, 2])),
        (sg.asarray([[True, False], [True, True], [False, True]]), np.array([[1, 0], [1, 1], [0, 1]], bool)),
        ((slice(None), sg.asarray([1, 0])), (slice(None), np.array([1, 0]))),
        (sg.asarray(1), 1),
        (slice(sg.asarray(1), None), slice(1, None)),
    ],
    ids=["integers", "mask", "mixed", "scalar", "slice"],
)
def test_tensor_as_index(key, plain):
    x = sg.asarray(np.arange(6.0).reshape(3, 2), requires_grad=True)
    np.testing.assert_array_equal(x[key].numpy(), x.numpy()[plain])
    x[key].sum().backward()
    expected = np.zeros((3, 2))
    np.add.at(expected, plain, 1)
    np.testing.assert_array_equal(x.grad.numpy(), expected)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda i: i, lambda i: i.fill(0)),
        (lambda i: (slice(None), i), lambda i: i.fill(0)),
        (lambda i: slice(i[0], None), lambda i: i.fill(0)),
        (lambda i: slice(i[:1].reshape(()), None), lambda i: i.fill(0)),
    ],
    ids=["array", "in a tuple", "slice", "0-d array in a slice"],
)
def test_a_changed_index_array_changes_no_gradient(make, change):
    x = sg.asarray(np.ones((3, 3)), requires_grad=True)
    index = np.array([1, 2])
    key = make(index)
    expected = np.zeros((3, 3))
    np.add.at(expected, key, 1)
    result = x[key].sum() + sg.take(x, index, axis=1).sum()
    np.add.at(expected, (slice(None), index.copy()), 1)
    change(index)
    result.backward()
    np.testing.assert_array_equal(x.grad.numpy(), expected)


def test_a_list_index_is_copied():
    x = sg.ones((3,), requires_grad=True)
    index = [0, 1]
    result = x[index].sum()
    index[0] = 2
    result.backward()
    assert x.grad.tolist() == [1.0, 1.0, 0.0]


def test_a_read_slice_is_a_view_and_read_only():
    x = sg.asarray(np.arange(6.0))
    assert np.shares_memory(dense(x[1:4]), dense(x))
    assert not x[1:4].numpy().flags.writeable


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float32"])
def test_dtype_is_kept(dtype):
    x = sg.asarray(np.array([[0, 1], [1, 0]], dtype))
    for key in (0, (0, 1), slice(1), [1, 0], x.numpy().astype(bool)):
        np.testing.assert_array_equal(x[key].numpy(), x.numpy()[key], strict=True)
    assert sg.take(x, [0], axis=1).dtype == dtype


@examples(100)
@given(
    data=st.data(),
    shape=hnp.array_shapes(min_dims=1, max_dims=4, max_side=4),
    index_shape=hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3),
    layout=layouts,
    seed=seeds,
)
def test_take(data, shape, index_shape, layout, seed):
    x, rng = random_array(seed, shape, layout)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    n = shape[axis]
    indices = data.draw(hnp.arrays(np.int64, index_shape, elements=st.integers(-n, n - 1)))
    expected = np.take(x, indices, axis=axis)
    tensor = sg.asarray(x, requires_grad=True)
    result = sg.take(tensor, indices, axis=axis)
    assert result.shape == expected.shape
    np.testing.assert_array_equal(result.numpy(), expected)
    weights = rng.standard_normal(expected.shape)
    result.backward(weights)
    added = np.zeros(shape)
    np.add.at(added, (slice(None),) * (axis % len(shape)) + (indices,), weights)
    np.testing.assert_allclose(tensor.grad.numpy(), added, rtol=1e-12, atol=1e-12)


def test_take_without_axis_and_as_a_method():
    x = sg.asarray([10.0, 20.0, 30.0], requires_grad=True)
    result = x.take(sg.asarray([-1, 0, -1]))
    assert result.tolist() == [30.0, 10.0, 30.0]
    sg.grad(lambda t: t.take([2, 2]).sum())(x)
    result.sum().backward()
    assert x.grad.tolist() == [1.0, 0.0, 2.0]


def test_scatter_is_the_transpose_of_reading():
    """<scatter(x), y> == <x, y[key]> for random x and y."""
    rng = np.random.default_rng(5)
    key = (slice(None), np.array([0, 2, 2]))
    x, y = rng.standard_normal((4, 3)), rng.standard_normal((4, 3))
    np.testing.assert_allclose(np.vdot(scatter(x, key, (4, 3)).numpy(), y), np.vdot(x, y[key]), rtol=1e-12)


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        (3, sg.AxisError, "out of bounds"),
        (-4, sg.AxisError, "out of bounds"),
        ((0, 0, 0), sg.AxisError, "too many indices"),
        ((..., ...), sg.AxisError, "ellipsis"),
        ([0, 3], sg.AxisError, "out of bounds"),
        (np.array([True, False]), sg.AxisError, "boolean index"),
        (([0, 1], [0, 1, 0]), sg.AxisError, "broadcast"),
        (1.0, sg.DTypeError, "float"),
        (np.array([1.0]), sg.DTypeError, "float64"),
        (np.float64(1), sg.DTypeError, "float64"),
        ("a", sg.DTypeError, "str"),
        (slice("a", None), sg.DTypeError, "str"),
        (slice(0.5), sg.DTypeError, "float"),
        (slice(None, None, 0), sg.ArgumentError, "step"),
        (sg.asarray([0.5]), sg.DTypeError, "float64"),
    ],
    ids=repr,
)
def test_wrong_keys(key, error, message):
    for x in (sg.zeros((3, 2)), sg.zeros((3, 2), requires_grad=True)):
        with pytest.raises(error, match=f"`getitem`.*{message}"):
            x[key]


@pytest.mark.parametrize(
    ("indices", "axis", "error", "message"),
    [
        ([3], 0, sg.AxisError, "from 3 to 3 for an axis of length 3"),
        ([0, -4], 0, sg.AxisError, "from -4 to 0 for an axis of length 3"),
        ([0.5], 0, sg.DTypeError, "float64"),
        ([True], 0, sg.DTypeError, "bool"),
        ([0], None, sg.ShapeError, r"needs an axis for shape \(3, 2\)"),
        ([0], 2, sg.AxisError, "axis 2 for 2 dimensions"),
        ([0], 0.0, sg.DTypeError, "integer axis"),
    ],
)
def test_wrong_take(indices, axis, error, message):
    with pytest.raises(error, match=f"`take`.*{message}"):
        sg.take(sg.zeros((3, 2)), indices, axis=axis)
