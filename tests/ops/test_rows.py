"""Walks the table of all operations: value, first and second derivative, over layouts and dtypes.

Values are compared with the NumPy or SciPy expression in the row, derivatives with central differences of the
operation itself, at random points of the row's domain.
"""

import inspect
import zlib

import numpy as np
import pytest
from scipy import special

import sweepgrad as sg
from strategies import frozen
from sweepgrad.ops.op import OPS, Elementwise
from sweepgrad.ops.operators import _ufunc_table
from sweepgrad.ops.structural import Composed, Structural

SHAPE = (3, 4)

ELEMENTWISE = [row for row in OPS.values() if isinstance(row, Elementwise)]
WHOLE = [(row, case) for row in OPS.values() if isinstance(row, Composed) for case in row.cases]

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "negative stride": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
    "row": lambda x: x[:1],
    "column": lambda x: x[:, :1],
    "one": lambda x: x[:1, :1],
    "0-d": lambda x: x[0, 0],
    "empty": lambda x: x[:0],
    "broadcast": lambda x: np.broadcast_to(x[0, :2, None, None, None], (2, 3, 2, 2)[:4]),
}


INTERNAL = {"getitem", "scatter", "expand"}
"""Rows that users reach in another way: as `t[key]`, and as what rules are made of."""


def rng_of(*names):
    return np.random.default_rng(zlib.crc32(repr(names).encode()))


def sample(row, rng, dtype="float64"):
    """Random inputs of an elementwise row, of shape SHAPE."""
    values = [rng.uniform(low, high, SHAPE) for low, high in row.domain]
    if row.accepts == "bits":
        return [rng.integers(0, 100, SHAPE) for _ in values]
    if row.result == "bool":
        values = [np.round(value) for value in values]  # so that some are equal
    arrays = [value.astype(dtype) for value in values]
    if row.condition:
        arrays[0] = rng.random(SHAPE) < 0.5
    return arrays


def reference(row, arrays, params=None):
    names = {"np": np, "special": special, "xs": arrays, **(params or {})}
    names |= {"x": arrays[0]} | {f"x{k + 1}": array for k, array in enumerate(arrays)}
    if row.name == "scatter":
        names["scatter"] = scattered
    return eval(row.like, names)


def scattered(x, key, shape):
    out = np.zeros(shape)
    np.add.at(out, key, x)
    return out


def slope_along(function, arrays, k, direction, step):
    """Central difference of function(*arrays) when input k moves along `direction`."""
    ends = [function(*arrays[:k], arrays[k] + sign * step * direction, *arrays[k + 1 :]) for sign in (1, -1)]
    return (ends[0] - ends[1]) / (2 * step)


def check_derivatives(function, arrays, positions, rng):
    """First and second derivative of `function`, along random directions, against central differences."""
    sg.sweep(collect_cycles=True)  # what an earlier test left behind
    before = sg.graph.stats().nodes
    weights = rng.standard_normal(function(*map(sg.asarray, arrays)).shape)
    directions = {k: rng.standard_normal(np.shape(arrays[k])) for k in positions}

    def weighted(*inputs):
        return sg.sum(function(*inputs) * weights)

    def steepness(*inputs):
        """The derivative of `weighted` along all directions together."""
        gradients = sg.grad(weighted, argnums=tuple(positions))(*inputs)
        parts = [sg.sum(gradient * directions[k]) for k, gradient in zip(positions, gradients, strict=True)]
        return sum(parts[1:], start=parts[0])

    tensors = [sg.asarray(array, requires_grad=k in positions) for k, array in enumerate(arrays)]
    weighted(*tensors).backward()
    second = sg.grad(steepness, argnums=tuple(positions))(*map(sg.asarray, arrays))
    for k, again in zip(positions, second, strict=True):
        for what, gradient, f, step, tolerance in [
            ("first", tensors[k].grad, weighted, 1e-6, 1e-6),
            ("second", again, steepness, 1e-6, 1e-5),
        ]:
            toward = rng.standard_normal(np.shape(arrays[k]))
            expected = slope_along(lambda *moved, f=f: f(*map(sg.asarray, moved)).item(), arrays, k, toward, step)
            found = np.sum(gradient.numpy() * toward)
            assert gradient.shape == np.shape(arrays[k])
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, err_msg=f"{what}, input {k}")
    sg.sweep()
    assert sg.graph.stats().nodes - before == len(positions)  # the variables, still held here


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("row", ELEMENTWISE, ids=lambda row: row.name)
def test_value_over_layouts(row, dtype):
    arrays = sample(row, rng_of(row.name, dtype), dtype)
    for name, layout in LAYOUTS.items():
        inputs = [layout(array) for array in arrays]
        for mixed in [inputs] if row.arity == 1 else [inputs, [arrays[0], *inputs[1:]]]:
            try:
                expected = reference(row, mixed)
            except ValueError:
                continue  # an empty or 4-d array next to a matrix
            result = row.function(*(sg.asarray(frozen(array)) for array in mixed))
            assert result.shape == np.shape(expected), name
            if row.accepts == "bits" or row.result == "bool":
                np.testing.assert_array_equal(result.numpy(), expected, err_msg=name)
            else:
                assert result.dtype == dtype, name
                np.testing.assert_allclose(
                    result.numpy(), expected, rtol=1e-5 if dtype == "float32" else 1e-12, err_msg=name
                )


@pytest.mark.parametrize("row", [row for row in ELEMENTWISE if row.differentiable], ids=lambda row: row.name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_derivatives_over_layouts(row, layout):
    rng = rng_of(row.name, layout)
    arrays = [frozen(LAYOUTS[layout](array)) for array in sample(row, rng)]
    check_derivatives(row.function, arrays, range(int(row.condition), row.arity), rng)
    if row.arity > 1 and layout in ("row", "column", "one", "0-d", "transposed"):
        full = sample(row, rng)
        for k in range(row.arity):
            mixed = [array if j == k else arrays[j] for j, array in enumerate(full)]
            check_derivatives(row.function, mixed, range(int(row.condition), row.arity), rng)


@pytest.mark.parametrize("row", [row for row in ELEMENTWISE if row.differentiable], ids=lambda row: row.name)
def test_gradient_in_float32_is_that_of_float64(row):
    arrays = sample(row, rng_of(row.name), "float32")
    positions = range(int(row.condition), row.arity)

    def gradients(dtype, **how):
        inputs = [
            sg.asarray(array.astype(dtype) if k in positions else array, requires_grad=k in positions)
            for k, array in enumerate(arrays)
        ]
        row.function(*inputs).sum().backward(**how)
        return [inputs[k].grad for k in positions]

    exact = gradients("float64")
    for how in ({}, {"create_graph": True}):
        for low, high in zip(gradients("float32", **how), exact, strict=True):
            assert low.dtype == low.numpy().dtype == np.float32
            np.testing.assert_allclose(low.numpy(), high.numpy(), rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize(
    "row", [row for row in ELEMENTWISE if row.differentiable and row.arity == 2], ids=lambda row: row.name
)
def test_gradient_beside_a_number_stays_in_float32(row):
    """Parts of a partial that read numbers alone must not promote it."""
    (a, b), number = sample(row, rng_of(row.name), "float32"), np.mean(row.domain[1])
    for function in (lambda x: row.function(x, float(number)), lambda x: row.function(float(abs(a[0, 0])) + 0.5, x)):
        x = sg.asarray(b, requires_grad=True)
        function(x).sum().backward(create_graph=True)
        first = x.grad
        assert first.dtype == first.numpy().dtype == np.float32
        if first.requires_grad:
            x.grad = None
            first.sum().backward()
            assert x.grad is None or x.grad.numpy().dtype == np.float32


@pytest.mark.parametrize("row", [row for row in ELEMENTWISE if row.kink], ids=lambda row: row.name)
def test_derivative_where_it_is_absent(row):
    point, expected = row.kink
    inputs = [sg.asarray(float(value), requires_grad=True) for value in point]
    row.function(*inputs).backward()
    assert [x.grad.item() for x in inputs] == list(expected)


SELECTIONS = {
    "relu": sg.relu,
    "clip": lambda x: sg.clip(x, 0.0, None),
    "where": lambda x: sg.where(x > 0, x, 0.0),
    "maximum": lambda x: sg.maximum(x, 0.0),
    "minimum": lambda x: sg.minimum(-x, 0.0) * -1.0,
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", SELECTIONS)
def test_infinite_cotangent_of_what_was_not_selected_is_no_gradient(name, create_graph):
    x = sg.asarray([-1.0, 4.0], requires_grad=True)
    sg.sqrt(SELECTIONS[name](x)).sum().backward(create_graph=create_graph)
    np.testing.assert_array_equal(x.grad.numpy(), [0.0, 0.25])


@pytest.mark.parametrize(
    ("function", "at", "expected"),
    [
        (sg.abs, 0.0, 0.0),
        (sg.softplus, -750.0, 0.0),
        (sg.sigmoid, -750.0, 0.0),
        (lambda x: sg.logaddexp(x, 800.0), 0.0, 0.0),
        (lambda x: sg.logaddexp(800.0, x), 0.0, 0.0),
        (sg.relu, 0.0, 0.0),
    ],
)
def test_second_derivative_at_special_points(function, at, expected):
    """A composite within partials is differentiated by its own partials, not by its expansion's."""
    assert sg.grad(sg.grad(function))(at).item() == pytest.approx(expected, abs=1e-300)


@pytest.mark.parametrize(("row", "case"), WHOLE, ids=lambda value: getattr(value, "name", ""))
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_whole_tensor_operations(row, case, layout):
    shapes, params = case
    rng = rng_of(row.name, repr(params), layout)
    arrays = [rng.uniform(0.3, 2, shape) * rng.choice([-1, 1], shape) for shape in shapes]
    if layout == "strided":
        arrays = [frozen(np.flip(np.array(np.flip(array), order="F"))) for array in arrays]

    def function(*tensors):
        return row.function(list(tensors), **params) if row.listed else row.function(*tensors, **params)

    expected = reference(row, [a > 0 for a in arrays] if row.name in ("all", "any") else arrays, params)
    tensors = [sg.asarray(a > 0 if row.name in ("all", "any") else a) for a in arrays]
    result = function(*tensors)
    assert result.shape == np.shape(expected)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-12, atol=1e-14)
    if not (isinstance(row, Structural) and row.vjp is None):
        check_derivatives(function, arrays, range(len(arrays)), rng)


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    sg.sweep()
    sg.graph.audit()


def test_every_public_operation_is_a_row():
    """Each public function that takes a tensor first is in the table, with a docstring, and the other way round."""
    first = {"x", "x1", "condition", "arrays"}
    creation = {"zeros_like", "ones_like", "full_like", "from_dlpack"}
    public = {
        name
        for name in sg.__all__
        if inspect.isfunction(function := getattr(sg, name))
        and next(iter(inspect.signature(function).parameters), None) in first
    } - creation
    assert public == set(OPS) - INTERNAL
    assert all(row.doc and row.like for row in OPS.values())


@pytest.mark.parametrize(
    "row", [row for row in ELEMENTWISE if row.result == "same" and row.arity == 2], ids=lambda r: r.name
)
@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8"])
def test_integers_as_in_numpy(row, dtype):
    rng = rng_of(row.name, dtype)
    low = 0 if dtype.startswith("u") or row.name == "pow" else -5
    a = rng.integers(low, 6, SHAPE).astype(dtype)
    b = rng.integers(1, 4, SHAPE).astype(dtype)
    result = row.function(sg.asarray(a), sg.asarray(b))
    expected = reference(row, [a, b])
    assert result.dtype == expected.dtype == dtype
    np.testing.assert_array_equal(result.numpy(), expected)


@pytest.mark.parametrize("name", sorted(_ufunc_table()))
def test_numpy_ufuncs_of_tensors(name):
    """`np.exp(tensor)` has the values that `np.exp(array)` has, as a tensor."""
    row = OPS[_ufunc_table()[name]]
    if isinstance(row, Elementwise):
        arrays = sample(row, rng_of(name))
    else:
        arrays = list(rng_of(name).standard_normal((2, 3, 3)))
    ufunc = getattr(np, name)
    result = ufunc(*map(sg.asarray, arrays))
    assert isinstance(result, sg.Tensor)
    np.testing.assert_allclose(result.numpy(), ufunc(*arrays), rtol=1e-12)
    if len(arrays) == 2:
        np.testing.assert_array_equal(ufunc(arrays[0], sg.asarray(arrays[1])).numpy(), result.numpy())
