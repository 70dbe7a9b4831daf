"""Every kernel of the table, with its shadow: run by test_cuda.py in processes of its own."""

import sys
import zlib

import numpy as np
import pytest
from shadow import SIMULATED, Shadow

import sweepgrad as sg
from sweepgrad.ops.op import OPS, Elementwise

sys.setswitchinterval(1e-6)  # the simulator waits for its threads without letting go of the interpreter
ROWS = [row for row in OPS.values() if isinstance(row, Elementwise)]
# To compile takes longer than to simulate: fewer layouts and dtypes, and no further derivatives.
SHAPES = {1: ["v"], 2: ["vv", "rc", "sv"], 3: ["vvv", "csr"]} if SIMULATED else {1: ["v"], 2: ["vv"], 3: ["vvv"]}
WHOLE = ["int64", "bool", "uint8"] if SIMULATED else ["int64"]
REDUCED = ["float32", "float64", "uint64", "int8", "bool"] if SIMULATED else ["float32", "uint64"]
AXES = [None, 0, 1, 2, (0, 1), (0, 2), (1, 2)] if SIMULATED else [None, 0, 2]
LENGTHS = {"v": (3, 4), "r": (4,), "c": (3, 1), "s": ()}


@pytest.fixture(autouse=True)
def shadow(monkeypatch):
    return Shadow(monkeypatch)


def rng_of(*names):
    return np.random.default_rng(zlib.crc32(repr(names).encode()))


def twice(dtype):
    """Whether to take second derivatives."""
    return SIMULATED and dtype == "float64"


def sample(row, rng, k, kind, dtype):
    low, high = row.domain[k]
    if row.accepts == "bits" or "int" in dtype:
        return rng.integers(0 if row.accepts == "bits" else 1, 10, LENGTHS[kind]).astype(dtype)
    if row.condition and k == 0:
        return rng.random(LENGTHS[kind]) < 0.5
    values = rng.uniform(low, high, LENGTHS[kind])
    return (np.round(values) if row.result == "bool" else values).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("row", [row for row in ROWS if row.accepts != "bits"], ids=lambda row: row.name)
def test_elementwise(row, dtype):
    """Value, gradient and second derivative, with inputs of all kinds."""
    rng = rng_of(row.name, dtype)
    for kinds in SHAPES[row.arity]:
        arrays = [sample(row, rng, k, kind, dtype) for k, kind in enumerate(kinds)]
        inputs = [sg.asarray(a, requires_grad=a.dtype == dtype) for a in arrays]
        y = row.function(*inputs)
        if y.requires_grad:
            y.backward(rng.standard_normal(y.shape).astype(dtype), create_graph=twice(dtype))
            for x in inputs:
                if x.requires_grad and x.grad.requires_grad and twice(dtype) and kinds == SHAPES[row.arity][0]:
                    x.grad.backward(np.ones(x.shape, dtype), retain_graph=True)


@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_whole_numbers(row, dtype):
    rng = rng_of(row.name, dtype)
    arrays = [sg.asarray(sample(row, rng, k, "v", dtype)) for k in range(row.arity)]
    try:
        row.function(*arrays)
    except sg.DTypeError:
        pytest.skip(f"`{row.name}` takes no {dtype}")


REDUCTIONS = ["sum", "mean", "prod", "max", "min", "any", "all", "var", "std", "logsumexp"]


@pytest.mark.parametrize("dtype", REDUCED)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name, dtype):
    """Over each set of axes."""
    rng = rng_of(name, dtype)
    x = rng.standard_normal((2, 4, 3))
    x = (x if "float" in dtype else x > 0.5).astype(dtype)
    for axes in AXES:
        tensor = sg.asarray(x, requires_grad="float" in dtype)
        try:
            y = getattr(sg, name)(tensor, axis=axes)
        except sg.DTypeError:
            pytest.skip(f"`{name}` takes no {dtype}")
        if y.requires_grad:
            sg.sum(y * y).backward()


@pytest.mark.parametrize("name", ["sum", "max", "any"])
def test_long_reductions(name):
    """Longer than a block has threads, and of more rows than a grid has chunks."""
    x = rng_of(name).standard_normal((70, 5))
    for array, axis in [(x, None), (x, 0), (x.T, 1)]:
        getattr(sg, name)(sg.asarray(np.ascontiguousarray(array)), axis=axis)


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
}


@pytest.mark.parametrize("dtype", ["float32", "float64"] if SIMULATED else ["float32"])
@pytest.mark.parametrize("name", FUSED)
def test_fused(name, dtype):
    f, shapes = FUSED[name]
    rng = rng_of(name, dtype)
    inputs = [sg.asarray(rng.standard_normal(shape).astype(dtype), requires_grad=True) for shape in shapes]
    outs = sg.fuse(f)(*inputs)
    for out in outs if isinstance(outs, tuple) else (outs,):
        sg.sum(out * out).backward(retain_graph=True, create_graph=twice(dtype))
    if twice(dtype):
        sum(sg.sum(x.grad * x.grad) for x in inputs).backward()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_optimisers(name, dtype):
    rng = rng_of(name, dtype)
    w = sg.asarray(rng.standard_normal((4, 5)).astype(dtype), requires_grad=True)
    optimiser = getattr(sg.optim, name)([w], lr=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        sg.sum(w * w).backward()
        optimiser.step()


def test_every_way_of_spreading_a_nest_is_used(shadow):
    x = sg.asarray(np.ones((3, 41)), requires_grad=True)
    sg.sum(sg.softmax(x, axis=-1) * x, axis=0).sum().backward()
    assert set(shadow.ways) == {"elements", "columns", "rows"}
