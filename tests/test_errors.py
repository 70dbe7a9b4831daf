"""Bad calls: the exception's types, what its message names, and that the graph is as it was."""

import gc
import operator

import numpy as np
import pytest

import sweepgrad as sg
from sweepgrad.optim import SGD, Adam, AdamW


class Tensors:
    """What the calls are made on: variables unless their name says otherwise."""

    def __init__(self):
        self.x = sg.asarray(np.arange(6.0).reshape(2, 3), requires_grad=True)
        self.y = sg.ones((4, 3), requires_grad=True)
        self.v = sg.asarray(np.arange(3.0), requires_grad=True)
        self.s = sg.asarray(2.0, requires_grad=True)
        self.empty = sg.zeros((0, 3), requires_grad=True)
        self.result = self.x * 2.0
        self.ints = sg.asarray([1, 2, 3])
        self.truth = sg.asarray([True, False])


SHAPE, AXIS, DTYPE, ARGUMENT = sg.ShapeError, sg.AxisError, sg.DTypeError, sg.ArgumentError
UNTRACKED, VARIABLE = sg.NotTrackedError, sg.VariableError

BUILT_IN = {
    SHAPE: (ValueError,),
    AXIS: (IndexError, ValueError),
    DTYPE: (TypeError,),
    ARGUMENT: (ValueError,),
    UNTRACKED: (RuntimeError,),
    VARIABLE: (RuntimeError,),
    sg.ImmutableError: (TypeError,),
    sg.FuseError: (TypeError,),
    sg.DeviceError: (RuntimeError,),
    sg.MissingDependencyError: (ImportError,),
    sg.GraphConsumedError: (RuntimeError,),
    sg.OutOfMemoryError: (MemoryError,),
    sg.AuditError: (AssertionError,),
    sg.AnomalyError: (ArithmeticError, FloatingPointError),
}

# (what is called, the exception's type, parts of the message)
TABLE = [
    # shapes that do not broadcast
    (lambda t: t.x + t.y, SHAPE, ["`add`", "(2, 3)", "(4, 3)", "equal or 1"]),
    (lambda t: sg.maximum(t.x, np.ones(2)), SHAPE, ["`maximum`", "(2, 3)", "(2,)"]),
    (lambda t: np.ones((4, 3)) * t.x, SHAPE, ["`multiply`", "(4, 3)", "(2, 3)"]),
    (lambda t: sg.where(t.x > 0.0, t.y, 1.0), SHAPE, ["`where`", "(2, 3)", "(4, 3)"]),
    (lambda t: sg.clip(t.x, t.v, np.ones(4)), SHAPE, ["`clip`", "(2, 3)", "(3,)", "(4,)"]),
    (lambda t: t.x == t.y, SHAPE, ["`equal`", "(2, 3)", "(4, 3)"]),
    (lambda t: t.x + t.empty, SHAPE, ["`add`", "(2, 3)", "(0, 3)"]),
    (lambda t: sg.broadcast_to(t.x, (3, 3)), SHAPE, ["`broadcast_to`", "(2, 3)", "(3, 3)"]),
    (lambda t: sg.broadcast_to(t.x, (3,)), SHAPE, ["`broadcast_to`", "(2, 3)", "(3,)"]),
    # axes
    (lambda t: sg.sum(t.x, axis=2), AXIS, ["`sum`", "axis 2", "2 dimensions", "from -2 to 1"]),
    (lambda t: sg.mean(t.x, axis=-3), AXIS, ["`mean`", "axis -3", "2 dimensions"]),
    (lambda t: sg.max(t.s, axis=0), AXIS, ["`max`", "axis 0", "0 dimensions"]),
    (lambda t: sg.prod(t.x, axis=(0, 5)), AXIS, ["`prod`", "axis 5"]),
    (lambda t: sg.sum(t.x, axis=(0, -2)), AXIS, ["`sum`", "(0, -2)", "twice"]),
    (lambda t: sg.flip(t.x, axis=(1, 1)), AXIS, ["`flip`", "(1, 1)", "twice"]),
    (lambda t: sg.sum(t.x, axis=1.0), DTYPE, ["`sum`", "integer axis", "float 1.0"]),
    (lambda t: sg.softmax(t.x, axis="0"), DTYPE, ["`softmax`", "integer axis", "str '0'"]),
    (lambda t: sg.argmax(t.x, axis=(0, 1)), DTYPE, ["`argmax`", "integer axis", "tuple"]),
    (lambda t: sg.logsumexp(t.x, axis=(0, None)), DTYPE, ["`logsumexp`", "integer axis", "NoneType"]),
    (lambda t: sg.expand_dims(t.x, axis=4), AXIS, ["`expand_dims`", "axis 4", "3 dimensions"]),
    (lambda t: sg.permute_dims(t.x, (0,)), SHAPE, ["`permute_dims`", "2 axes", "(0,)"]),
    (lambda t: sg.permute_dims(t.x, (0, 0)), AXIS, ["`permute_dims`", "twice"]),
    (lambda t: sg.moveaxis(t.x, (0, 1), 0), SHAPE, ["`moveaxis`", "2 source", "1 destination"]),
    (lambda t: sg.roll(t.x, (1, 2), axis=0), SHAPE, ["`roll`", "2 shifts", "1 axes"]),
    (lambda t: sg.vecdot(t.x, t.x, axis=5), AXIS, ["`vecdot`", "axis 5"]),
    (lambda t: t.v.T, SHAPE, ["`T`", "(3,)", "2 dimensions"]),
    (lambda t: t.v.mT, SHAPE, ["`matrix_transpose`", "(3,)", "2 dimensions"]),
    # backward
    (lambda t: (t.x * 2.0).backward(), SHAPE, ["`backward`", "(2, 3)", "`gradient`", "sum()"]),
    (lambda t: (t.x * 2.0).backward(np.ones((3, 2))), SHAPE, ["`gradient`", "(3, 2)", "(2, 3)"]),
    (lambda t: (t.x * 2.0).backward(1.0), SHAPE, ["`gradient`", "()", "(2, 3)"]),
    (lambda t: (t.x * 2.0).backward(sg.ones((2, 3), dtype="float32")), DTYPE, ["`gradient`", "float32", "float64"]),
    (lambda t: (t.x * 2.0).backward("ones"), DTYPE, ["`gradient`", "(2, 3)", "str"]),
    (lambda t: (t.x * 2.0).backward([[1.0], [1.0, 2.0]]), DTYPE, ["`gradient`", "(2, 3)", "list"]),
    (lambda t: t.ints.sum().backward(), UNTRACKED, ["`backward`", "not tracked", "requires_grad=True"]),
    (lambda t: t.x.sum().detach().backward(), UNTRACKED, ["`backward`", "not tracked"]),
    (lambda t: setattr(t.x, "grad", sg.ones((3,))), SHAPE, ["`grad`", "(3,)", "(2, 3)"]),
    (lambda t: setattr(t.x, "grad", sg.ones((2, 3), dtype="float32")), DTYPE, ["`grad`", "float32", "float64"]),
    (lambda t: setattr(t.x, "grad", np.ones((2, 3))), DTYPE, ["`grad`", "ndarray"]),
    (lambda t: sg.asarray([1, 2], requires_grad=True), DTYPE, ["`requires_grad`", "int64", "float32 and float64"]),
    (lambda t: t.ints.detach().requires_grad_(), DTYPE, ["`requires_grad`", "int64"]),
    (lambda t: t.result.requires_grad_(False), VARIABLE, ["`requires_grad_(False)`", "`multiply`", "detach"]),
    (lambda t: t.result.copy_(0), VARIABLE, ["`copy_`", "`multiply`"]),
    (lambda t: t.x.copy_([[1], [1, 2]]), SHAPE, ["`copy_`", "regular array"]),
    (lambda t: t.x.copy_("abc"), DTYPE, ["`copy_`", "from str", "float64"]),
    (lambda t: t.x.copy_(None), DTYPE, ["`copy_`", "from NoneType", "float64"]),
    (lambda t: t.x.copy_([t.v, t.v]), VARIABLE, ["`copy_`", "`stack`"]),
    (lambda t: t.x.copy_(np.ones(2)), SHAPE, ["`copy_`", "cannot broadcast", "(2,)", "(2, 3)"]),
    (
        lambda t: t.x.__setitem__(0, 1.0),
        sg.ImmutableError,
        ["`t[key] = value`", "immutable", "`where(mask, value, t)`"],
    ),
    (lambda t: np.asarray(t.x), VARIABLE, ["`__array__`", "`t.numpy()`", "`t.detach()`"]),
    (lambda t: t.ints.__array__("float64", copy=False), ARGUMENT, ["`__array__`", "copy=False", "int64", "float64"]),
    (lambda t: operator.index(t.s.detach()), DTYPE, ["`__index__`", "0-d integer", "()", "float64", "`int(t)`"]),
    (lambda t: len(t.s), DTYPE, ["`len`", "0-d", "`t.size`"]),
    (lambda t: t.x.item(), SHAPE, ["`item`", "one element", "(2, 3)", "`tolist()`"]),
    (lambda t: float(t.x), SHAPE, ["`float`", "one element", "(2, 3)", "`tolist()`"]),
    (lambda t: bool(t.x), SHAPE, ["`bool`", "one element", "(2, 3)", "`any` or `all`"]),
    (lambda t: f"{t.x:.2f}", SHAPE, ["`format`", "'.2f'", "(2, 3)", "index"]),
    (lambda t: t.ints.retain_grad(), UNTRACKED, ["`retain_grad`", "not tracked", "requires_grad=True"]),
    # making tensors
    (lambda t: sg.asarray(None), DTYPE, ["`asarray`", "from NoneType", "float64"]),
    (lambda t: sg.asarray(n for n in (1, 2)), DTYPE, ["`asarray`", "from generator", "float64"]),
    (lambda t: sg.asarray([t.x]), VARIABLE, ["`asarray`", "`stack`"]),
    (lambda t: sg.asarray(t.x, dtype="float32", copy=False), ARGUMENT, ["`asarray`", "copy=False", "float32"]),
    (lambda t: sg.full_like(t.x, "a"), DTYPE, ["`full_like`", "number as `fill_value`", "str"]),
    (lambda t: sg.full((2,), 300, dtype="int8"), ARGUMENT, ["`full`", "300", "int8"]),
    (lambda t: sg.full((2,), np.int64(-1), dtype="uint8"), ARGUMENT, ["`full`", "-1", "uint8"]),
    (lambda t: sg.full_like(t.ints, float("nan")), ARGUMENT, ["`full_like`", "nan", "int64"]),
    (lambda t: sg.full((2,), 10**400, dtype="float64"), ARGUMENT, ["`full`", "float64"]),
    (lambda t: sg.arange("a"), DTYPE, ["`arange`", "number as `start`", "str"]),
    (lambda t: sg.arange(0, True), DTYPE, ["`arange`", "number as `stop`", "bool"]),
    (lambda t: sg.arange(0, 1, None), DTYPE, ["`arange`", "number as `step`", "NoneType"]),
    (lambda t: sg.arange(float("nan")), ARGUMENT, ["`arange`", "nan", "finite"]),
    (lambda t: sg.arange(0, float("inf")), ARGUMENT, ["`arange`", "inf", "finite"]),
    (lambda t: sg.arange(10**30, 10**30 + 2), ARGUMENT, ["`arange`", str(10**30), "smaller"]),
    (lambda t: sg.linspace("a", 1, 3), DTYPE, ["`linspace`", "number as `start`", "str"]),
    (lambda t: sg.linspace(0, 10**400, 3), ARGUMENT, ["`linspace`", "`stop`", "float64 cannot hold"]),
    (lambda t: sg.linspace(0, 1, True), DTYPE, ["`linspace`", "integers as `num`", "bool True"]),
    (lambda t: sg.linspace(0, 1, -1), ARGUMENT, ["`linspace`", "-1"]),
    (lambda t: sg.eye(2, k="a"), DTYPE, ["`eye`", "integers as `k`", "str 'a'"]),
    (lambda t: sg.zeros((2, True)), DTYPE, ["`zeros`", "integers as `shape`", "bool True"]),
    # matmul and its relatives
    (lambda t: t.x @ t.y, SHAPE, ["`matmul`", "(2, 3)", "(4, 3)", "second to last"]),
    (lambda t: t.x @ np.ones(2), SHAPE, ["`matmul`", "(2, 3)", "(2,)", "only"]),
    (lambda t: t.x @ np.ones((4, 3), np.float32), SHAPE, ["`matmul`", "(2, 3)", "(4, 3)"]),
    (lambda t: t.x @ 2.0, SHAPE, ["`matmul`", "()", "1 dimension", "`*`"]),
    (lambda t: sg.matmul(sg.ones((2, 1, 3)), sg.ones((3, 3, 1))), SHAPE, ["`matmul`", "broadcast", "(2,)", "(3,)"]),
    (lambda t: t.truth @ t.truth, DTYPE, ["`matmul`", "numbers", "bool"]),
    (lambda t: sg.tensordot(t.x, t.y, axes=1), SHAPE, ["`tensordot`", "(2, 3)", "(4, 3)", "axes 1"]),
    (lambda t: sg.tensordot(t.x, t.y, axes=3), AXIS, ["`tensordot`", "axes=3", "(2, 3)", "(4, 3)"]),
    (lambda t: sg.vecdot(t.x, sg.ones((4,))), SHAPE, ["`vecdot`", "(2, 3)", "(4,)", "one length"]),
    (lambda t: sg.vecdot(t.x, t.s), SHAPE, ["`vecdot`", "(2, 3)", "()", "1 dimension"]),
    # shapes
    (lambda t: t.x.reshape(4, 2), SHAPE, ["`reshape`", "(4, 2)", "6 elements", "(2, 3)"]),
    (lambda t: t.x.reshape(-1, 4), SHAPE, ["`reshape`", "(-1, 4)", "6 elements"]),
    (lambda t: t.x.reshape(-1, -1), SHAPE, ["`reshape`", "negative", "(-1, -1)"]),
    (lambda t: t.x.reshape(-2, -3), SHAPE, ["`reshape`", "negative", "(-2, -3)"]),
    (lambda t: t.empty.reshape(-1, 0), SHAPE, ["`reshape`", "(-1, 0)"]),
    (lambda t: t.x.reshape(2.0, 3), DTYPE, ["`reshape`", "integers", "2.0"]),
    (lambda t: sg.reshape(t.x.T, (6,), copy=False), ARGUMENT, ["`reshape`", "copy=False", "strided"]),
    (lambda t: t.x.squeeze(0), SHAPE, ["`squeeze`", "length 1", "(2, 3)", "axis 0"]),
    (lambda t: t.x.squeeze((0, 3)), AXIS, ["`squeeze`", "axis 3"]),
    (lambda t: sg.concat([t.x, t.v]), SHAPE, ["`concat`", "axis 0", "(2, 3)", "(3,)"]),
    (lambda t: sg.concat([t.x, t.y], axis=1), SHAPE, ["`concat`", "axis 1", "(2, 3)", "(4, 3)"]),
    (lambda t: sg.concat([t.x, t.y.astype("float32"), np.ones((1, 2))]), SHAPE, ["`concat`", "(1, 2)"]),
    (lambda t: sg.concat([t.x, t.x], axis=2), AXIS, ["`concat`", "axis 2"]),
    (lambda t: sg.concat([]), ARGUMENT, ["`concat`", "at least one"]),
    (lambda t: sg.concat([t.s, t.s]), SHAPE, ["`concat`", "0-d", "`stack`"]),
    (lambda t: sg.concat(t.x), DTYPE, ["`concat`", "list or tuple", "Tensor"]),
    (lambda t: sg.stack([t.x, t.y]), SHAPE, ["`stack`", "equal shapes", "(2, 3)", "(4, 3)"]),
    (lambda t: sg.stack(()), ARGUMENT, ["`stack`", "at least one"]),
    (lambda t: sg.stack([t.x, t.x], axis=3), AXIS, ["`stack`", "axis 3"]),
    # indices
    (lambda t: sg.take(t.x, [0, 2], axis=0), AXIS, ["`take`", "from 0 to 2", "length 2"]),
    (lambda t: sg.take(t.x, [-4], axis=1), AXIS, ["`take`", "from -4 to -4", "length 3"]),
    (lambda t: sg.take(t.x, [0.0], axis=0), DTYPE, ["`take`", "integer", "float64"]),
    (lambda t: sg.take(t.x, [0]), SHAPE, ["`take`", "axis", "(2, 3)"]),
    (lambda t: t.x[2], AXIS, ["`getitem`", "(2, 3)", "index 2"]),
    (lambda t: t.x[0, 0, 0], AXIS, ["`getitem`", "(2, 3)", "too many"]),
    (lambda t: t.x[[0, 5]], AXIS, ["`getitem`", "(2, 3)", "index 5"]),
    (lambda t: t.x[1.0], DTYPE, ["`getitem`", "integers", "float"]),
    (lambda t: t.x[np.array([0.0])], DTYPE, ["`getitem`", "integer and bool", "float64"]),
    (lambda t: t.x["a"], DTYPE, ["`getitem`", "str"]),
    (lambda t: t.x[0.5:], DTYPE, ["`getitem`", "float"]),
    (lambda t: t.x[::0], ARGUMENT, ["`getitem`", "step other than 0"]),
    (lambda t: t.x[np.array([True, False, True])], AXIS, ["`getitem`", "(2, 3)", "boolean"]),
    (lambda t: sg.roll(t.x, "a", axis=0), DTYPE, ["`roll`", "integers as `shift`", "str 'a'"]),
    (lambda t: sg.roll(t.x, 1.5), DTYPE, ["`roll`", "integers as `shift`", "float 1.5"]),
    (lambda t: sg.roll(t.x, (1, True), axis=(0, 1)), DTYPE, ["`roll`", "integers as `shift`", "bool True"]),
    # nothing to compare
    (lambda t: sg.max(t.empty), SHAPE, ["`max`", "nothing", "(0, 3)"]),
    (lambda t: sg.min(t.empty, axis=0), SHAPE, ["`min`", "nothing", "(0, 3)"]),
    (lambda t: sg.argmax(t.empty, axis=0), SHAPE, ["`argmax`", "nothing", "(0, 3)"]),
    (lambda t: sg.argmin(t.empty), SHAPE, ["`argmin`", "nothing", "(0, 3)"]),
    # dtypes
    (lambda t: t.ints**-1, ARGUMENT, ["`pow`", "negative", "float"]),
    (lambda t: t.ints ** sg.asarray([1, 0, -1]), ARGUMENT, ["`pow`", "negative"]),
    (lambda t: 2 ** sg.asarray([1, -1]), ARGUMENT, ["`pow`", "negative"]),
    (lambda t: t.truth**-1, ARGUMENT, ["`pow`", "negative"]),
    (lambda t: np.array([2]) ** sg.asarray(-1), ARGUMENT, ["`pow`", "negative"]),
    (lambda t: t.truth + t.truth, DTYPE, ["`add`", "numbers", "bool and bool", "logical_or"]),
    (lambda t: -t.truth, DTYPE, ["`negative`", "numbers", "bool"]),
    (lambda t: t.truth * True, DTYPE, ["`multiply`", "bool"]),
    (lambda t: sg.abs(t.truth), DTYPE, ["`abs`", "bool"]),
    (lambda t: sg.max(t.truth), DTYPE, ["`max`", "bool", "`any`"]),
    (lambda t: t.x & 1, DTYPE, ["`bitwise_and`", "integers", "float64"]),
    (lambda t: 1.5 | t.ints, DTYPE, ["`bitwise_or`", "integers", "float"]),
    (lambda t: t.ints ^ t.x[0], DTYPE, ["`bitwise_xor`", "int64 and float64"]),
    (lambda t: ~t.x, DTYPE, ["`bitwise_invert`", "float64"]),
    (lambda t: sg.asarray(np.int8(1)) + 1000, DTYPE, ["`add`", "1000", "int8"]),
    (lambda t: sg.astype(t.x, "complex128"), DTYPE, ["`astype`", "complex128", "float64"]),
    (lambda t: sg.sum(t.x, dtype="float16"), DTYPE, ["`sum`", "float16"]),
    (lambda t: sg.exp("a"), DTYPE, ["`exp`", "str", "`sweepgrad.asarray`"]),
    (lambda t: sg.add(t.x, [1.0, 2.0, 3.0]), DTYPE, ["`add`", "list", "`sweepgrad.asarray`"]),
    (lambda t: sg.add(t.x, np.ones(3, complex)), DTYPE, ["`add`", "complex128", "float64"]),
    # optimisers
    (lambda t: SGD(t.x, 0.1), DTYPE, ["`SGD`", "one tensor", "list"]),
    (lambda t: SGD([], 0.1), ARGUMENT, ["`SGD`", "no parameters"]),
    (lambda t: Adam([t.x, 1.0]), DTYPE, ["`Adam`", "float"]),
    (lambda t: Adam([np.ones(3)]), DTYPE, ["`Adam`", "ndarray"]),
    (lambda t: SGD([t.result], 0.1), VARIABLE, ["`SGD`", "(2, 3)", "result of an operation"]),
    (lambda t: AdamW([sg.ones((2,))]), VARIABLE, ["`AdamW`", "(2,)", "does not require a gradient"]),
    (lambda t: SGD([t.x, t.v, t.x], 0.1), ARGUMENT, ["`SGD`", "twice"]),
    (lambda t: SGD([t.x], -0.1), ARGUMENT, ["`SGD`", "lr=-0.1", "0.0 <= lr"]),
    (lambda t: SGD([t.x], float("nan")), ARGUMENT, ["`SGD`", "lr=nan"]),
    (lambda t: SGD([t.x], "fast"), ARGUMENT, ["`SGD`", "lr='fast'"]),
    (lambda t: SGD([t.x], 0.1, momentum=1.0), ARGUMENT, ["`SGD`", "momentum=1.0", "< 1.0"]),
    (lambda t: Adam([t.x], betas=(0.9, 1.0)), ARGUMENT, ["`Adam`", "beta2=1.0"]),
    (lambda t: Adam([t.x], betas=(-0.1, 0.9)), ARGUMENT, ["`Adam`", "beta1=-0.1"]),
    (lambda t: Adam([t.x], eps=-1.0), ARGUMENT, ["`Adam`", "eps=-1.0"]),
    (lambda t: AdamW([t.x], weight_decay=float("inf")), ARGUMENT, ["`AdamW`", "weight_decay=inf"]),
]


def state():
    gc.collect()
    while sg.sweep().remaining:
        pass
    now = sg.graph.stats()
    return now.nodes, now.variables, now.childless, now.saved_bytes, now.consumed


@pytest.mark.parametrize(("call", "error", "parts"), TABLE, ids=[" ".join(parts[:2]) for _, _, parts in TABLE])
def test_bad_call(call, error, parts):
    t = Tensors()
    before, grads = state(), [t.x.grad, t.v.grad]
    caught = None
    try:
        call(t)
    except error as raised:
        caught = type(raised), str(raised)
    assert caught is not None, "nothing was raised"
    assert caught[0] is error
    missing = [part for part in parts if part not in caught[1]]
    assert not missing, f"{missing} not in: {caught[1]}"
    assert state() == before
    assert [t.x.grad, t.v.grad] == grads
    sg.graph.audit()


@pytest.mark.parametrize("error", BUILT_IN)
def test_every_exception_is_a_built_in_one_too(error):
    assert issubclass(error, sg.SweepgradError)
    assert all(issubclass(error, built_in) for built_in in BUILT_IN[error])


def test_no_exception_is_left_out_of_the_table():
    assert {error for error in vars(sg).values() if isinstance(error, type) and issubclass(error, Exception)} == {
        sg.SweepgradError,
        *BUILT_IN,
    }


def test_an_error_in_the_middle_of_an_expression_leaves_no_node():
    x, y = sg.ones((2, 3), requires_grad=True), sg.ones((4, 3), requires_grad=True)
    before = state()
    with pytest.raises(sg.ShapeError):
        sg.exp(x * 2.0) + sg.sum(x, axis=0, keepdims=True) @ y
    assert state() == before
    (x * 1.0).sum().backward()
    assert x.grad.tolist() == np.ones((2, 3)).tolist()
