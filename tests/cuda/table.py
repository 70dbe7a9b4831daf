"""Every operation on a device: run in processes of its own, in each of the ways of `modes`.

Where kernels run, what comes out is compared with the CPU's.
"""

import zlib

import modes
import numpy as np
import pytest
from modes import RUNS

import sweepgrad as sg
from sweepgrad.ops import reducer
from sweepgrad.ops.op import OPS, Elementwise
from sweepgrad.ops.structural import Composed

modes.enter()

TOLERANCES = {"float32": 2e-5, "float64": 1e-13}
ROWS = [row for row in OPS.values() if isinstance(row, Elementwise)]
OTHERS = [row for row in OPS.values() if isinstance(row, Composed) and row.name != "to_device"]
# To compile takes longer than to simulate: fewer layouts and dtypes, and no further derivatives.
SHAPES = {1: ["v", "t"], 2: ["vv", "rc", "sv", "tv", "nv"], 3: ["vvv", "csr", "tsv"]}
SHAPES = SHAPES if RUNS else {1: ["v"], 2: ["vv"], 3: ["vvv"]}
WHOLE = ["int64", "bool", "uint8"] if RUNS else ["int64"]
REDUCED = ["float32", "float64", "uint64", "int8", "bool"] if RUNS else ["float32", "uint64"]
AXES = [None, 0, 1, 2, (0, 1), (0, 2), (1, 2)] if RUNS else [None, 0, 2]
LENGTHS = {"v": (3, 4), "r": (4,), "c": (3, 1), "s": (), "t": (4, 3), "n": ()}


def rng_of(*names):
    return np.random.default_rng(zlib.crc32(repr(names).encode()))


def on_device(f, arrays, tracked=None):
    """`f` of tensors on the device gives what it gives on the CPU; `f` returns tensors or arrays."""
    tracked = tracked or [array.dtype.kind == "f" for array in arrays]

    def on(device):
        made = zip(arrays, tracked, strict=True)
        return f(*[sg.asarray(array, device=device, requires_grad=requires) for array, requires in made])

    found = on("cuda")
    assert all(one.device == "cuda:0" for one in found)
    if not RUNS:
        return
    for one, right in zip(found, on("cpu"), strict=True):
        assert one.shape == right.shape
        assert one.dtype == right.dtype
        expected = right.numpy()
        narrow = {array.dtype.name for array in (*arrays, expected)} & {"float32"}
        tolerance = TOLERANCES["float32" if narrow else "float64"]
        scale = np.abs(expected[np.isfinite(expected)]).max(initial=1) if expected.dtype.kind == "f" else 1
        np.testing.assert_allclose(one.numpy(), expected, rtol=tolerance, atol=tolerance * scale)


def differentiated(y, inputs, seed, twice=False):
    """The value, the gradients of what requires one, and those of the sum of the gradients."""
    if not y.requires_grad:
        return [y]
    wanted = [x for x in inputs if x.requires_grad]
    ct = np.random.default_rng(seed).standard_normal(y.shape).astype(y.dtype)
    y.backward(ct, create_graph=twice)
    grads = [x.grad for x in wanted if x.grad is not None]
    found = [y, *grads]
    if twice and any(grad.requires_grad for grad in grads):
        for x in wanted:
            x.grad = None
        sum(sg.sum(grad) for grad in grads if grad.requires_grad).backward()
        found += [x.grad for x in wanted if x.grad is not None]
    return found


def sample(row, rng, k, kind, dtype):
    if kind == "n":  # a number that is on the device, of a dtype of its own
        kind = "s"
    low, high = row.domain[k]
    shape = LENGTHS[kind]
    if row.accepts == "bits" or "int" in dtype or dtype == "bool":
        return rng.integers(0 if row.accepts == "bits" else 1, 10, shape).astype(dtype)
    if row.condition and k == 0:
        return rng.random(shape) < 0.5
    values = rng.uniform(low, high, shape)
    return (np.round(values) if row.result == "bool" else values).astype(dtype)


def turned(inputs, kinds):
    return [sg.matrix_transpose(x) if kind == "t" else x for x, kind in zip(inputs, kinds, strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("row", [row for row in ROWS if row.accepts != "bits"], ids=lambda row: row.name)
def test_elementwise(row, dtype):
    """Value, gradient and second derivative, with inputs of all kinds."""
    rng = rng_of(row.name, dtype)
    for kinds in SHAPES[row.arity]:
        arrays = [sample(row, rng, k, kind, dtype) for k, kind in enumerate(kinds)]
        twice = RUNS and dtype == "float64" and kinds == SHAPES[row.arity][0]
        on_device(
            lambda *xs, kinds=kinds, twice=twice: differentiated(row.function(*turned(xs, kinds)), xs, 1, twice),
            arrays,
            [array.dtype == dtype for array in arrays],
        )


@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_whole_numbers(row, dtype):
    rng = rng_of(row.name, dtype)
    arrays = [sample(row, rng, k, "v", dtype) for k in range(row.arity)]
    try:
        row.function(*map(sg.asarray, arrays))
    except sg.DTypeError:
        pytest.skip(f"`{row.name}` takes no {dtype}")
    on_device(lambda *xs: [row.function(*xs)], arrays)


REDUCTIONS = ["sum", "mean", "prod", "max", "min", "any", "all", "var", "std", "logsumexp"]


@pytest.mark.parametrize("dtype", REDUCED)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name, dtype):
    """Over each set of axes."""
    rng = rng_of(name, dtype)
    x = rng.standard_normal((2, 4, 3))
    x = (x if "float" in dtype else x > 0.5).astype(dtype)
    for axes in AXES:
        try:
            getattr(sg, name)(sg.asarray(x), axis=axes)
        except sg.DTypeError:
            pytest.skip(f"`{name}` takes no {dtype}")
        on_device(lambda t, axes=axes: differentiated(getattr(sg, name)(t, axis=axes), [t], 2), [x])


@pytest.mark.parametrize("name", ["sum", "max", "any"])
def test_long_reductions(name):
    """Longer than a block has threads, and of more rows than a grid has chunks."""
    x = rng_of(name).standard_normal((70, 5))
    for axis, turn in [(None, False), (0, False), (0, True), (1, True)]:
        on_device(lambda t, axis=axis, turn=turn: [getattr(sg, name)(t.T if turn else t, axis=axis)], [x])


@pytest.mark.parametrize(
    ("row", "case"),
    [pytest.param(row, case, id=f"{row.name} {k}") for row in OTHERS for k, case in enumerate(row.cases)],
)
def test_others(row, case):
    """Operations that are a library's, or are made of others: value, gradient and second derivative."""
    shapes, params = case
    rng = rng_of(row.name, repr(params))

    def f(*xs):
        y = row.function(list(xs), **params) if row.listed else row.function(*xs, **params)
        return differentiated(y, xs, 3, twice=True)

    on_device(f, [rng.standard_normal(shape) for shape in shapes])


def normalised(x, weight, bias):
    centred = x - sg.mean(x, axis=-1, keepdims=True)
    return sg.gelu(centred / sg.sqrt(sg.mean(centred * centred, axis=-1, keepdims=True) + 1e-5) * weight + bias)


FUSED = {
    "a loss": (lambda x, y: sg.sum(sg.exp(-(x * x)) * y + x * y), [(3, 41), (3, 41)]),
    "a chain": (lambda x, y: sg.sin(x) * y + x, [(3, 41), (41,)]),
    "softmax": (lambda x: sg.softmax(x, axis=-1), [(3, 41)]),
    "log_softmax over columns": (lambda x: sg.log_softmax(x, axis=0), [(3, 41)]),
    "layer norm and gelu": (normalised, [(3, 41), (41,), (41,)]),
    "mixture": (
        lambda x, mean, weight: sg.sum(sg.logsumexp(weight - (x - mean) ** 2, axis=1)),
        [(3, 1), (41,), (41,)],
    ),
    "rows and all": (lambda x: (sg.sum(x, axis=1), sg.sum(x * x)), [(3, 41)]),
    "columns": (lambda x: sg.sum(sg.exp(x), axis=0) * 2.0, [(3, 41)]),
    "columns of rows": (lambda x: sg.sum(x * sg.softmax(x, axis=-1), axis=0), [(3, 41)]),
    "a row's own": (lambda x, row: x * sg.sum(sg.exp(row)), [(3, 41), (41,)]),
    "a sum of columns": (lambda x: sg.sum(sg.tanh(sg.mean(x, axis=0))), [(3, 41)]),
    "numbers": (lambda x: sg.sum(x) * sg.sum(x * x), [(3, 41)]),
    "turned": (lambda x, y: sg.sum(x.T * y, axis=0), [(3, 4), (4, 3)]),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"] if RUNS else ["float32"])
@pytest.mark.parametrize("name", FUSED)
def test_fused(name, dtype):
    f, shapes = FUSED[name]
    rng = rng_of(name, dtype)

    def run(*inputs):
        outs = sg.fuse(f)(*inputs)
        found = list(outs) if isinstance(outs, tuple) else [outs]
        twice = RUNS and dtype == "float64"
        for out in tuple(found):
            sg.sum(out * out).backward(retain_graph=True, create_graph=twice)
        grads = [x.grad for x in inputs]
        if twice:
            for x in inputs:
                x.grad = None
            sum(sg.sum(grad * grad) for grad in grads).backward()
            grads += [x.grad for x in inputs]
        return found + grads

    on_device(run, [rng.standard_normal(shape).astype(dtype) for shape in shapes])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_optimisers(name, dtype):
    def run(w):
        optimiser = getattr(sg.optim, name)([w], lr=0.1)
        for _ in range(3):
            optimiser.zero_grad()
            sg.sum(w * w).backward()
            optimiser.step()
        return [w]

    on_device(run, [rng_of(name, dtype).standard_normal((4, 5)).astype(dtype)])


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (1,), (1, 1, 1), (2, 1, 2, 1, 2, 2)])
def test_odd_shapes(shape):
    def run(x):
        y = sg.sum(sg.exp(x) * 2.0 + x.mT if x.ndim > 1 and x.shape[-1] == x.shape[-2] else sg.exp(x) * 2.0, axis=-1)
        return differentiated(y, [x], 4)

    on_device(run, [rng_of(shape).standard_normal(shape)])


def test_more_axes_than_are_compiled_ahead():
    x = rng_of("axes").standard_normal((2, 3, 2, 2, 3))
    order = (3, 1, 4, 0, 2)
    on_device(lambda t: differentiated(sg.exp(sg.permute_dims(t, order)), [t], 5), [x])


def test_few_long_rows(monkeypatch):
    monkeypatch.setattr(reducer, "_LONG", 40)
    x = rng_of("long").standard_normal((3, 41))
    for name in ("sum", "mean", "max", "any"):
        on_device(lambda t, name=name: differentiated(getattr(sg, name)(t, axis=1), [t], 6), [x])


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
def test_narrow_columns(n):
    """Fewer columns than a block has threads, and more rows than it takes at once."""
    x = rng_of(n).standard_normal((70, n))
    for name in ("sum", "max", "mean"):
        on_device(lambda t, name=name: differentiated(getattr(sg, name)(t, axis=0), [t], 7), [x])
    bias = rng_of("bias", n).standard_normal(n)
    on_device(lambda t, b: differentiated(sg.tanh(t + b) * b, [t, b], 8, twice=True), [x, bias])
