"""Tensors as objects: conversion in and out, attributes, protocols, immutability, and the creation functions."""

import copy
import operator
import pickle
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import sweepgrad as sg
from strategies import LAYOUTS, examples, frozen, laid_out, layouts
from sweepgrad.elements import dense
from sweepgrad.ops import plan


def described(value):
    """A parameter as a test's name: the same in every process, so not an address."""
    return type(value).__name__ if " at 0x" in repr(value) else repr(value)


DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
FLOATS = ("float32", "float64")

arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)


def check_same(tensor, array):
    array = np.asarray(array)
    assert tensor.shape == array.shape
    assert tensor.dtype == array.dtype
    np.testing.assert_array_equal(tensor.numpy(), array, strict=True)


# --- asarray --------------------------------------------------------------------------------------------------------


@examples(150)
@given(array=arrays, layout=layouts)
def test_asarray_keeps_any_array(array, layout):
    array = laid_out(array, layout)
    tensor = sg.asarray(array)
    check_same(tensor, array)
    check_same(sg.asarray(array, copy=True), array)
    assert (tensor.ndim, tensor.size, tensor.nbytes) == (array.ndim, array.size, array.nbytes)
    assert tensor.tolist() == array.tolist() or np.isnan(array.astype(float)).any()


@pytest.mark.parametrize(
    "data",
    [
        1,
        -2.5,
        True,
        [1, 2],
        [1, 2.5],
        [True, False],
        [[1], [2]],
        (),
        [],
        [[], []],
        (1.0, [2][0]),
        range(3),
        [np.float32(1)],
    ],
    ids=described,
)
def test_python_numbers_and_lists_as_in_numpy(data):
    check_same(sg.asarray(data), np.asarray(data))


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_scalars(dtype):
    scalar = np.dtype(dtype).type(1)
    check_same(sg.asarray(scalar), np.asarray(scalar))
    check_same(sg.asarray([scalar, scalar]), np.asarray([scalar, scalar]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [str, np.dtype, lambda name: np.dtype(name).type])
def test_dtype_converts(dtype, form):
    for data in (np.array([0, 1, 2], np.float16), [0, 1, 2], np.array([0, 1, 2], ">i4"), sg.asarray([0, 1, 2])):
        check_same(sg.asarray(data, dtype=form(dtype)), np.array([0, 1, 2], dtype))
    assert sg.asarray([1], dtype=float).dtype == np.float64


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_writable_array_is_copied_and_a_constant_one_shared(layout):
    array = np.array(laid_out(np.arange(12.0).reshape(3, 4), layout), order="K")
    before = array.copy()
    tensor = sg.asarray(array)
    array[...] = -1
    check_same(tensor, before)
    shared = laid_out(before, layout)
    assert np.shares_memory(dense(sg.asarray(shared)), shared)
    assert dense(sg.asarray(shared)).strides == shared.strides
    assert not np.shares_memory(dense(sg.asarray(shared, copy=True)), shared)


def test_a_read_only_view_of_a_writable_array_is_copied():
    array = np.arange(4.0)
    view = array[1:]
    view.flags.writeable = False
    tensor = sg.asarray(view)
    array[:] = -1
    assert tensor.tolist() == [1.0, 2.0, 3.0]
    wide = np.broadcast_to(array, (2, 4))
    assert not wide.flags.writeable
    tensor = sg.asarray(wide)
    array[:] = 7
    assert (tensor.numpy() == -1).all()


def test_read_only_buffers():
    data = np.arange(3.0)
    for frozen_bytes in (np.frombuffer(data.tobytes()), np.asarray(memoryview(data.tobytes()))):
        assert np.shares_memory(dense(sg.asarray(frozen_bytes)), frozen_bytes)
    writable = bytearray(data.tobytes())
    view = np.frombuffer(memoryview(writable).toreadonly())
    tensor = sg.asarray(view)
    writable[:] = bytes(24)
    assert tensor.tolist() == [0.0, 1.0, 2.0]


def test_copy_false():
    shared = frozen(np.arange(3.0))
    assert np.shares_memory(dense(sg.asarray(shared, copy=False)), shared)
    tensor = sg.asarray(shared)
    assert sg.asarray(tensor, copy=False) is tensor
    for data, kwargs in [
        (np.arange(3.0), {}),
        (shared, {"dtype": "float32"}),
        (frozen(np.arange(3).astype(">i8")), {}),
        ([1.0], {}),
        (1.0, {}),
        (tensor, {"dtype": "float32"}),
    ]:
        with pytest.raises(sg.ArgumentError, match="`asarray` with copy=False"):
            sg.asarray(data, copy=False, **kwargs)


@pytest.mark.parametrize("dtype", [np.longlong, np.ulonglong, np.intc, np.uintc])
def test_dtypes_of_other_names(dtype):
    """NumPy has several integer dtypes of one size; tensors have one of each."""
    array = frozen(np.arange(3, dtype=dtype))
    tensor = sg.asarray(array)
    assert tensor.dtype is getattr(sg, array.dtype.name)
    for result in (
        tensor + array,
        array + tensor,
        sg.add(array, tensor),
        tensor.astype(dtype),
        tensor.sum() * 0 + array,
    ):
        assert result.dtype is (getattr(sg, result.dtype.name))
    assert (tensor + array).tolist() == [0, 2, 4]


@pytest.mark.parametrize("dtype", [">f8", ">f4", ">i4", ">u2"])
def test_big_endian_arrays_become_native(dtype):
    array = frozen(np.arange(5).astype(dtype))
    tensor = sg.asarray(array)
    assert tensor.dtype.isnative
    np.testing.assert_array_equal(tensor.numpy(), array)
    np.testing.assert_array_equal((tensor + array).numpy(), 2 * array)


def unaligned(values):
    raw = np.zeros(values.nbytes + 1, np.uint8)
    array = raw[1:].view(values.dtype)
    array[...] = values
    return array


def test_unaligned_arrays_are_copied():
    array = frozen(unaligned(np.arange(5.0)))
    assert not array.flags.aligned
    tensor = sg.asarray(array)
    assert tensor.numpy().flags.aligned
    assert (tensor + array).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    with pytest.raises(sg.ArgumentError, match="aligned"):
        sg.asarray(array, copy=False)


def test_array_subclasses_and_fields():
    matrix = np.array([[1.0, 2.0]]).view(np.recarray)
    assert type(sg.asarray(frozen(matrix)).numpy()) is np.ndarray
    with pytest.raises(sg.DTypeError, match="`asarray` got dtype"):
        sg.asarray(np.zeros(2, [("a", float)]))


@pytest.mark.parametrize(
    "data",
    [
        np.float16(1),
        np.ones(2, np.float16),
        1j,
        np.ones(2, complex),
        np.ones(2, object),
        "1.0",
        ["a"],
        b"a",
        None,
        {},
        object(),
        10**30,
        [None, 1.0],
        np.array(["2000-01-01"], "M8[D]"),
        Decimal(1),
    ],
    ids=described,
)
def test_dtypes_that_tensors_cannot_have(data):
    with pytest.raises(sg.DTypeError, match=r"`asarray` got dtype .*; accepted are bool, int8, .*float64"):
        sg.asarray(data)


@pytest.mark.parametrize("dtype", ["float16", complex, object, str, "nonsense", "M8[D]"])
def test_dtypes_that_are_refused(dtype):
    for make in (
        lambda: sg.asarray([1.0], dtype=dtype),
        lambda: sg.zeros((1,), dtype=dtype),
        lambda: sg.full((1,), 1.0, dtype=dtype),
        lambda: sg.arange(3, dtype=dtype),
        lambda: sg.linspace(0, 1, 3, dtype=dtype),
        lambda: sg.ones_like([1.0], dtype=dtype),
        lambda: sg.asarray([1.0]).astype(dtype),
    ):
        with pytest.raises(sg.DTypeError, match=r"got dtype .*; accepted are"):
            make()
    with pytest.raises(sg.DTypeError):
        sg.asarray(np.array([1j]), dtype="float64")


@pytest.mark.parametrize("data", [[[1.0], [1.0, 2.0]], [[1], 2], [np.ones(2), np.ones(3)]], ids=described)
def test_ragged_lists(data):
    with pytest.raises(sg.ShapeError, match="`asarray` cannot make a regular array"):
        sg.asarray(data)


def test_lists_that_hold_tensors():
    plain = sg.asarray([1.0, 2.0])
    check_same(sg.asarray([plain, [3, 4]]), [[1.0, 2.0], [3.0, 4.0]])
    check_same(sg.asarray([sg.asarray(1.0), 2]), [1.0, 2.0])
    tracked = sg.asarray([1.0, 2.0], requires_grad=True)
    for data in ([tracked], [plain, (plain, tracked)], (1.0, tracked[0]), [[tracked * 2.0]]):
        with pytest.raises(sg.VariableError, match=r"`asarray` of a list .* `stack` or `concat`"):
            sg.asarray(data)


def test_a_list_that_holds_itself_ends():
    data = [1.0]
    data.append(data)
    with pytest.raises(ValueError, match="`asarray`"):
        sg.asarray(data)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in FLOATS])
def test_only_floats_can_require_a_gradient(dtype):
    for make in (
        lambda: sg.asarray(np.ones(2, dtype), requires_grad=True),
        lambda: sg.asarray([1.0], dtype=dtype, requires_grad=True),
        lambda: sg.asarray(sg.ones((2,), dtype=dtype), requires_grad=True),
        lambda: sg.zeros((2,), dtype=dtype, requires_grad=True),
        lambda: sg.ones((2,), dtype=dtype).requires_grad_(),
    ):
        with pytest.raises(sg.DTypeError, match=f"`requires_grad` needs a float dtype; found {dtype}"):
            make()


def test_asarray_of_a_tensor():
    plain = sg.asarray([1.0, 2.0])
    assert sg.asarray(plain) is plain
    assert sg.asarray(plain, dtype="float64") is plain
    assert sg.asarray(plain, copy=True) is not plain
    made = sg.asarray(plain, requires_grad=True)
    assert made.is_variable
    assert not plain.requires_grad
    assert sg.asarray(made) is made
    low = sg.asarray(made, dtype="float32")
    assert low.dtype == np.float32
    low.sum().backward()
    assert made.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [None, "float64", "float32"])
@pytest.mark.parametrize("source", ["plain", "variable", "result"])
def test_asarray_copies_a_tensor(source, dtype, requires_grad):
    x = sg.asarray([1.0, 2.0], requires_grad=source != "plain")
    tensor = x * 3.0 if source == "result" else x
    copied = sg.asarray(tensor, dtype=dtype, copy=True, requires_grad=requires_grad)
    check_same(copied, tensor.numpy().astype(dtype or "float64"))
    assert not np.shares_memory(dense(copied), dense(tensor))
    assert copied.requires_grad is (requires_grad or tensor.requires_grad)
    assert copied.is_variable is (requires_grad and source == "plain")
    if source != "plain":
        copied.sum().backward()
        assert x.grad.tolist() == ([3.0, 3.0] if source == "result" else [1.0, 1.0])
    elif requires_grad:
        copied.sum().backward()
        assert (copied.grad.tolist(), x.grad) == ([1.0, 1.0], None)


def test_asarray_without_recording_makes_a_new_variable():
    x = sg.asarray([1.0, 2.0], requires_grad=True)
    with sg.no_grad():
        plain, copied = sg.asarray(x, copy=True), sg.asarray(x, copy=True, requires_grad=True)
    assert not plain.requires_grad
    assert copied.is_variable
    assert not np.shares_memory(dense(copied), dense(x))


# --- what a caller changes later ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, a: x * a,
        lambda x, a: a * x,
        sg.multiply,
        lambda x, a: x / a,
        lambda x, a: x @ a.T,
        lambda x, a: x ** sg.asarray(a),
        lambda x, a: sg.where(a > 1.5, x, a),
        lambda x, a: sg.where(x > 0, a, x * a),
        lambda x, a: sg.concat([x, a]) * sg.concat([a, x]),
        lambda x, a: x * a[:1],
        lambda x, a: x * a[0, 0],
        lambda x, a: sg.tensordot(x, a, axes=2),
        sg.vecdot,
        lambda x, a: sg.clip(x, a[:, :1], a + 3),
    ],
)
def test_a_changed_array_changes_no_value_and_no_gradient(operation):
    rng = np.random.default_rng(4)
    start, given = rng.uniform(1, 2, (2, 3, 3))
    results = []
    for change in (False, True):
        a, source = given.copy(), start.copy()
        x = sg.asarray(source, requires_grad=True)
        y = operation(x, a)
        if change:
            a[...] = np.nan
            source[...] = np.nan
        sg.sum(y).backward()
        results.append((y.numpy(), x.grad.numpy()))
    for kept, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(kept, expected)


def test_a_changed_gradient_array_changes_no_gradient():
    x = sg.ones((3,), requires_grad=True)
    given = np.ones(3)
    x.backward(given)
    given[...] = 5
    assert x.grad.tolist() == [1.0, 1.0, 1.0]


def test_copy_underscore():
    source = np.array([1.0, 2.0])
    x = sg.zeros((2,), requires_grad=True)
    node_before = sg.graph.stats().registered
    y = (x + 3.0) * (x + 3.0)
    old = x.numpy()
    assert x.copy_(source) is x
    source[...] = 9
    assert x.tolist() == [1.0, 2.0]
    assert old.tolist() == [0.0, 0.0]
    y.sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]
    assert sg.graph.stats().registered == node_before + 4
    assert x.copy_(7).tolist() == [7.0, 7.0]
    assert x.copy_(sg.asarray([[1, 2]])[0]).tolist() == [1.0, 2.0]
    with pytest.raises(sg.ShapeError, match=r"`copy_` cannot broadcast shape \(3,\) to \(2,\)"):
        x.copy_(np.zeros(3))
    with pytest.raises(sg.VariableError, match="`copy_` into the result of `multiply`"):
        (x * 2.0).copy_(0)


# --- creation functions ---------------------------------------------------------------------------------------------

CREATED = {
    "zeros": (lambda m, **kw: m.zeros((2, 3), **kw), "float64"),
    "zeros, int": (lambda m, **kw: m.zeros(3, **kw), "float64"),
    "zeros, 0-d": (lambda m, **kw: m.zeros((), **kw), "float64"),
    "ones": (lambda m, **kw: m.ones((2, 0), **kw), "float64"),
    "full, float": (lambda m, **kw: m.full((2, 2), 1.5, **kw), "float64"),
    "full, int": (lambda m, **kw: m.full(2, 3, **kw), "int64"),
    "full, bool": (lambda m, **kw: m.full((2,), True, **kw), "bool"),
    "full, float32": (lambda m, **kw: m.full((2,), np.float32(0.1), **kw), "float32"),
    "arange": (lambda m, **kw: m.arange(5, **kw), "int64"),
    "arange, NumPy int": (lambda m, **kw: m.arange(np.int64(1), np.int64(6), **kw), "int64"),
    "arange, down": (lambda m, **kw: m.arange(5, -4, -2, **kw), "int64"),
    "arange, float": (lambda m, **kw: m.arange(5.0, **kw), "float64"),
    "arange, step": (lambda m, **kw: m.arange(0, 1, 0.1, **kw), "float64"),
    "arange, empty": (lambda m, **kw: m.arange(5, 2, **kw), "int64"),
    "linspace, NumPy int": (lambda m, **kw: m.linspace(np.int8(0), 1, np.int64(3), **kw), "float64"),
    "linspace": (lambda m, **kw: m.linspace(-1, 2, 7, **kw), "float64"),
    "linspace, open": (lambda m, **kw: m.linspace(0.5, 2, 4, endpoint=False, **kw), "float64"),
    "linspace, 1": (lambda m, **kw: m.linspace(0, 1, 1, **kw), "float64"),
    "linspace, 0": (lambda m, **kw: m.linspace(0, 1, 0, **kw), "float64"),
    "full, NumPy bool": (lambda m, **kw: m.full((2,), np.bool_(True), **kw), "bool"),
    "full, fraction": (lambda m, **kw: m.full((2,), 0.5 if m is np else Fraction(1, 2), **kw), "float64"),
    "eye, NumPy int": (lambda m, **kw: m.eye(np.int8(2), k=np.int64(1), **kw), "float64"),
    "eye": (lambda m, **kw: m.eye(3, **kw), "float64"),
    "eye, wide": (lambda m, **kw: m.eye(2, 4, k=1, **kw), "float64"),
    "eye, below": (lambda m, **kw: m.eye(3, k=-1, **kw), "float64"),
}


@pytest.mark.parametrize(("make", "default"), CREATED.values(), ids=CREATED.keys())
def test_creation_as_in_numpy(make, default):
    check_same(make(sg), make(np))
    assert make(sg).dtype == default
    for dtype in ("float32", "float64", "int64", "int8"):
        expected = make(np).astype(dtype) if "arange" in make.__code__.co_names else make(np, dtype=dtype)
        check_same(make(sg, dtype=dtype), expected)


@pytest.mark.parametrize(("make", "default"), CREATED.values(), ids=CREATED.keys())
def test_creation_of_variables(make, default):
    if default in FLOATS or "arange" in make.__code__.co_names:
        made = make(sg, requires_grad=True)
        assert made.is_variable
        assert made.dtype == (default if default in FLOATS else "float64")
        np.testing.assert_array_equal(made.numpy(), make(np))
    else:
        with pytest.raises(sg.DTypeError, match="`requires_grad` needs a float dtype"):
            make(sg, requires_grad=True)
    made = make(sg, dtype="float32", requires_grad=True)
    assert (made.is_variable, made.dtype) == (True, "float32")


@pytest.mark.parametrize(
    "source", [np.ones((2, 3), np.float32), sg.ones((2, 0), dtype="int8"), [1, 2], 1.5], ids=described
)
def test_creation_like_another(source):
    array = np.asarray(source)
    for name, args in (("zeros_like", ()), ("ones_like", ()), ("full_like", (3,))):
        made = getattr(sg, name)(source, *args)
        check_same(made, getattr(np, name)(array, *args))
        assert not made.requires_grad
        check_same(getattr(sg, name)(source, *args, dtype="float64"), getattr(np, name)(array, *args, dtype=float))
        assert getattr(sg, name)(source, *args, dtype="float64", requires_grad=True).is_variable


def test_like_a_tracked_tensor_is_not_tracked():
    x = sg.ones((2,), requires_grad=True)
    assert not sg.zeros_like(x).requires_grad
    assert not sg.ones_like(x * 2.0).requires_grad


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: sg.zeros(-1), sg.ShapeError, "`zeros` needs a shape without negative lengths"),
        (lambda: sg.ones((2, 1.0)), sg.DTypeError, "`ones` takes integers as `shape`"),
        (lambda: sg.zeros(np.array([2, 3])), sg.DTypeError, "`zeros` takes integers as `shape`"),
        (lambda: sg.full("ab", 1), sg.DTypeError, "`full` takes integers as `shape`"),
        (lambda: sg.full((2,), "a"), sg.DTypeError, "`full` takes a number as `fill_value`; found str"),
        (lambda: sg.full((2,), sg.ones(())), sg.DTypeError, "`full` takes a number as `fill_value`; found Tensor"),
        (lambda: sg.full((2,), np.float16(1)), sg.DTypeError, "`full` got dtype float16"),
        (lambda: sg.arange(0, 5, 0), sg.ArgumentError, "`arange` needs a step other than 0"),
        (lambda: sg.linspace(0, 1, -1), sg.ArgumentError, "`linspace` needs a count"),
        (lambda: sg.linspace(0, 1, 2.0), sg.DTypeError, "`linspace` takes integers as `num`; found float 2.0"),
        (lambda: sg.eye(-1), sg.ShapeError, "`eye` needs a shape"),
        (lambda: sg.ones_like("a"), sg.DTypeError, "`asarray` got dtype"),
    ],
)
def test_wrong_creation(make, error, message):
    with pytest.raises(error, match=message):
        make()


# --- attributes and protocols ---------------------------------------------------------------------------------------


def test_attributes():
    x = sg.asarray(np.zeros((2, 3), np.float32))
    assert (x.shape, x.ndim, x.size, x.nbytes, x.dtype) == ((2, 3), 2, 6, 24, np.float32)
    assert x.device == "cpu"
    assert (x.requires_grad, x.is_variable, x.grad) == (False, False, None)
    assert x.T.shape == (3, 2)
    assert x.mT.shape == (3, 2)
    for name in ("shape", "dtype", "requires_grad", "device"):
        with pytest.raises(AttributeError):
            setattr(x, name, None)
    with pytest.raises(AttributeError):
        x.anything = 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numpy_is_read_only(layout):
    x = sg.asarray(laid_out(np.arange(12.0).reshape(3, 4), layout))
    large = sg.asarray(laid_out(np.ones((100, 1000)), layout))
    assert np.shares_memory(large.numpy(), dense(large))
    assert large.numpy().strides == dense(large).strides
    array = x.numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1
    for result in (x + 1.0, x.T, x[1], x.sum(axis=0), sg.zeros((2, 2)), sg.reshape(x, (4, 3))):
        assert not result.numpy().flags.writeable


def test_numpy_of_a_result_cannot_be_made_writable():
    x = sg.asarray([1.0, 2.0]) * 2.0
    x.numpy().flags.writeable = False
    view = np.asarray(x)
    assert not view.flags.writeable


def test_item_and_tolist():
    assert sg.asarray([[1.5]]).item() == 1.5
    assert type(sg.asarray(1.5, dtype="float32").item()) is float
    assert type(sg.asarray(1).item()) is int
    assert type(sg.asarray(True).item()) is bool
    assert sg.asarray([[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]
    assert sg.asarray(2.0).tolist() == 2.0
    for shape in ((2,), (0,)):
        with pytest.raises(sg.ShapeError, match=r"`item` needs a tensor with one element; found shape \("):
            sg.zeros(shape).item()


def test_conversion_to_numpy():
    x = sg.asarray([1.0, 2.0])
    copied = np.array(x)
    copied[0] = 5
    assert x.tolist() == [1.0, 2.0]
    assert np.asarray(x, dtype="float32").dtype == np.float32
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(x, dtype="float32", copy=False)
    np.testing.assert_array_equal(np.stack([x, x]), [[1.0, 2.0], [1.0, 2.0]])
    for tracked in (sg.ones((2,), requires_grad=True), sg.ones((2,), requires_grad=True) * 2.0):
        for convert in (np.asarray, np.array, lambda t: np.stack([t, t]), np.sum):
            with pytest.raises((sg.VariableError, TypeError)):
                convert(tracked)
        with pytest.raises(sg.VariableError, match=r"`t\.numpy\(\)` or `t\.detach\(\)`"):
            np.asarray(tracked)
        assert np.asarray(tracked.detach()).tolist() == tracked.tolist()


def test_len_and_numbers():
    assert len(sg.zeros((3, 2))) == 3
    assert len(sg.zeros((0, 2))) == 0
    with pytest.raises(TypeError, match="`len` of a 0-d tensor"):
        len(sg.zeros(()))
    for value in (2, 2.5, True, 0):
        x = sg.asarray([[value]])
        assert (bool(x), float(x), int(x)) == (bool(value), float(value), int(value))
    for convert, name in ((bool, "bool"), (float, "float"), (int, "int")):
        for shape in ((2,), (0,)):
            with pytest.raises(sg.ShapeError, match=rf"`{name}` needs a tensor with one element; found shape \("):
                convert(sg.zeros(shape))
    with pytest.raises(sg.ShapeError, match="use `any` or `all`"):
        bool(sg.zeros((2,)))


def test_index():
    assert [10, 20, 30][sg.asarray(1)] == 20
    assert list(range(5))[: sg.asarray(np.uint8(2))] == [0, 1]
    assert operator.index(sg.asarray(-3)) == -3
    for wrong in (sg.asarray(1.0), sg.asarray([1]), sg.asarray(True)):
        with pytest.raises(TypeError, match="`__index__` needs a 0-d integer tensor"):
            operator.index(wrong)


def test_iteration():
    x = sg.asarray([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    first, second = x
    assert [row.tolist() for row in x] == [[1.0, 2.0], [3.0, 4.0]]
    (first * second).sum().backward()
    assert x.grad.tolist() == [[3.0, 4.0], [1.0, 2.0]]
    assert list(sg.zeros((0, 2))) == []
    with pytest.raises(TypeError, match="0-d tensor cannot be iterated"):
        iter(sg.zeros(()))


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (lambda: sg.asarray([1.0, 2.5]), "Tensor([1. , 2.5])"),
        (lambda: sg.asarray([1, 2]), "Tensor([1, 2])"),
        (lambda: sg.asarray(True), "Tensor(True)"),
        (lambda: sg.asarray([1, 2], dtype="int8"), "Tensor([1, 2], dtype=int8)"),
        (
            lambda: sg.ones((2,), dtype="float32", requires_grad=True),
            "Tensor([1., 1.], dtype=float32, requires_grad=True)",
        ),
        (lambda: sg.ones((), requires_grad=True) * 2.0, "Tensor(2., op=multiply)"),
        (lambda: sg.ones((1, 2), requires_grad=True).T, "Tensor([[1.],\n        [1.]], op=permute_dims)"),
        (lambda: sg.zeros((0, 2)), "Tensor([])"),
    ],
)
def test_repr(tensor, text):
    assert repr(tensor()) == text
    assert str(tensor()) == text
    assert f"{tensor()}" == text


def test_format():
    assert f"{sg.asarray(1.2345):.2f}" == "1.23"
    assert f"{sg.asarray([[2]], dtype='int8'):03d}" == "002"
    assert f"{sg.ones((), requires_grad=True) * 0.5:.1%}" == "50.0%"
    assert f"{sg.asarray([1.0, 2.0]):>22}" == "      Tensor([1., 2.])"
    with pytest.raises(ValueError, match="f"):
        f"{sg.ones((2,)):.2f}"


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, *(lambda t, p=p: pickle.loads(pickle.dumps(t, p)) for p in range(6))]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_and_pickle(again, dtype):
    for layout in LAYOUTS:
        x = sg.asarray(laid_out(np.array([[0, 1, 1], [1, 0, 1]], dtype), layout))
        check_same(again(x), x.numpy())
    made = again(sg.ones((2,), dtype="float32", requires_grad=True))
    assert (made.is_variable, made.dtype, made.grad) == (True, np.float32, None)


def test_a_copied_variable_is_another_variable():
    x = sg.asarray([1.0, 2.0], requires_grad=True)
    twin = copy.deepcopy([x, x])
    assert twin[0] is twin[1]
    (x * twin[0]).sum().backward()
    assert x.grad.tolist() == twin[0].grad.tolist() == [1.0, 2.0]
    twin[0].copy_(0)
    assert x.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickle.dumps])
def test_results_are_not_copied(again):
    with pytest.raises(sg.VariableError, match=r"the result of `multiply` is part of a graph.*detach"):
        again(sg.ones((2,), requires_grad=True) * 2.0)


def test_immutability():
    x = sg.asarray([1.0, 2.0])
    for write in (lambda: x.__setitem__(0, 1.0), lambda: operator.setitem(x, slice(None), 0)):
        with pytest.raises(sg.ImmutableError, match="tensors are immutable"):
            write()
    with pytest.raises(TypeError):
        x[0] = 1
    y = x
    y += 1
    assert y is not x
    assert (x.tolist(), y.tolist()) == ([1.0, 2.0], [2.0, 3.0])
    w = sg.ones((2,), requires_grad=True)
    y = w * 3.0
    result = y
    y **= 2  # of a result: a new tensor, and the graph goes on
    assert y is not result
    y.sum().backward()
    assert w.grad.tolist() == [18.0, 18.0]


IN_PLACE = {
    "+=": (operator.iadd, operator.add),
    "-=": (operator.isub, operator.sub),
    "*=": (operator.imul, operator.mul),
    "/=": (operator.itruediv, operator.truediv),
    "**=": (operator.ipow, operator.pow),
}


@pytest.mark.parametrize("symbol", IN_PLACE)
@pytest.mark.parametrize("other", [3.0, np.array([1.0, 4.0]), sg.asarray([1.0, 4.0])], ids=described)
def test_operators_in_place_on_a_variable(symbol, other):
    in_place, plain = IN_PLACE[symbol]
    w = sg.asarray([1.0, 2.0], requires_grad=True)
    seen = w * w
    expected = plain(w, other).tolist()
    with pytest.raises(sg.ImmutableError, match=rf"`{re.escape(symbol)}` on a variable .* `no_grad\(\)`"):
        in_place(w, other)
    assert w.tolist() == [1.0, 2.0]
    with sg.no_grad():
        assert in_place(w, other) is w
    assert w.is_variable
    assert w.tolist() == expected
    seen.sum().backward()
    assert w.grad.tolist() == [2.0, 4.0]  # of the values that were there


def test_an_operator_in_place_keeps_shape_and_dtype():
    w = sg.ones((2,), dtype="float32", requires_grad=True)
    with sg.no_grad():
        w += np.ones(2)
        assert (w.dtype, w.tolist()) == (np.float32, [2.0, 2.0])
        with pytest.raises(sg.ShapeError, match=r"`copy_` cannot broadcast shape \(3, 2\) to \(2,\)"):
            w += np.ones((3, 2))
    assert w.tolist() == [2.0, 2.0]


def test_tensor_is_neither_called_nor_subclassed():
    for args in ((), ([1.0],)):
        with pytest.raises(sg.DTypeError, match=r"sweepgrad\.asarray"):
            sg.Tensor(*args)
    with pytest.raises(sg.DTypeError, match="cannot be subclassed"):
        type("Mine", (sg.Tensor,), {})


def test_hash_is_by_identity():
    x, y = sg.ones((2,)), sg.ones((2,))
    assert len({x, y, x}) == 2
    assert {x: 1}[x] == 1


# --- operators with other types -------------------------------------------------------------------------------------

BINARY = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "pow": operator.pow,
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "equal": operator.eq,
    "not_equal": operator.ne,
}


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize(
    "other",
    [np.array([1.5, 2.0]), np.array(1.5), np.float64(1.5), np.float32(1.5), 2, 1.5, np.int8(2), True],
    ids=described,
)
def test_operators_on_both_sides(name, other):
    array = np.array([1.0, 3.0])
    for left, right in ((array, other), (other, array)):
        expected = BINARY[name](left, right)
        result = BINARY[name](*(sg.asarray(one) if one is array else one for one in (left, right)))
        assert isinstance(result, sg.Tensor)
        check_same(result, expected) if name != "pow" else np.testing.assert_allclose(result.numpy(), expected, 1e-15)
        function = getattr(sg, name)(*(sg.asarray(one) if one is array else one for one in (left, right)))
        np.testing.assert_array_equal(function.numpy(), result.numpy(), strict=True)


@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or", "bitwise_xor"])
def test_bitwise_operators(name):
    symbol = {"bitwise_and": operator.and_, "bitwise_or": operator.or_, "bitwise_xor": operator.xor}[name]
    array = np.array([1, 6, 12], np.uint8)
    for other in (5, np.uint8(5), np.array([5, 5, 0], np.uint8)):
        check_same(symbol(sg.asarray(array), other), symbol(array, other))
        check_same(symbol(other, sg.asarray(array)), symbol(other, array))
    check_same(~sg.asarray(array), ~array)
    check_same(~sg.asarray([True, False]), [False, True])


def test_unary_operators():
    array = np.array([-1.5, 0.0, 2.0])
    x = sg.asarray(array)
    check_same(-x, -array)
    check_same(+x, array)
    check_same(abs(x), abs(array))


def test_matmul_operators():
    a, b = np.random.default_rng(0).standard_normal((2, 3, 3))
    for left, right in ((sg.asarray(a), sg.asarray(b)), (sg.asarray(a), b), (a, sg.asarray(b))):
        np.testing.assert_allclose((left @ right).numpy(), a @ b, rtol=1e-14)


def test_numpy_scalar_keeps_the_graph():
    x = sg.asarray([1.0, 2.0], requires_grad=True)
    y = np.float64(3) * x + np.array([1.0, 1.0]) * x
    assert y.requires_grad
    y.sum().backward()
    assert x.grad.tolist() == [4.0, 4.0]


UNKNOWN = [[1.0, 2.0], (1.0,), "a", None, {}, 1j, Decimal(1), object()]


@pytest.mark.parametrize("other", UNKNOWN, ids=lambda other: type(other).__name__)
def test_operators_with_unknown_types(other):
    x = sg.asarray([1.0, 2.0])
    for symbol in (*list(BINARY.values())[:-2], operator.matmul, operator.and_):
        with pytest.raises(TypeError):
            symbol(x, other)
        if not (symbol is operator.mod and isinstance(other, str)):  # that formats a string
            with pytest.raises(TypeError):
                symbol(other, x)
    assert (x == other) is False
    assert (x != other) is True


@pytest.mark.parametrize("other", UNKNOWN, ids=lambda other: type(other).__name__)
def test_functions_with_unknown_types(other):
    x = sg.asarray([1.0, 2.0])
    calls = {
        "exp": lambda: sg.exp(other),
        "add": lambda: sg.add(x, other),
        "multiply": lambda: sg.multiply(other, x),
        "pow": lambda: sg.pow(x, other),
        "where": lambda: sg.where(x > 0, x, other),
        "clip": lambda: sg.clip(other, 0, 1),
        "sum": lambda: sg.sum(other),
        "max": lambda: sg.max(other),
        "logsumexp": lambda: sg.logsumexp(other),
        "matmul": lambda: sg.matmul(x, other),
        "reshape": lambda: sg.reshape(other, (2,)),
        "concat": lambda: sg.concat([x, other]),
        "stack": lambda: sg.stack([other, x]),
        "take": lambda: sg.take(other, 0),
        "astype": lambda: sg.astype(other, "float32"),
    }
    for name, function in calls.items():
        with pytest.raises(sg.DTypeError, match=f"`{name}` takes tensors, NumPy arrays and Python numbers; found"):
            function()


def test_arrays_of_refused_dtypes_in_operations():
    x = sg.asarray([1.0, 2.0])
    for array in (
        np.ones(2, complex),
        np.ones(2, np.float16),
        np.array(["a", "b"]),
        np.ones(2, object),
        np.complex128(1),
    ):
        with pytest.raises(sg.DTypeError, match="`add` got dtype"):
            sg.add(x, array)
        with pytest.raises(sg.DTypeError, match="`multiply` got dtype"):
            array * x
        with pytest.raises(sg.DTypeError, match="`sum` got dtype"):
            sg.sum(array)


@pytest.mark.parametrize("data", [[1, 2], (1, 2), "a"], ids=described)
def test_an_integer_tensor_does_not_repeat_a_sequence(data):
    """Though it is an index, and Python would multiply a list by it."""
    for multiply in (lambda: sg.asarray(2) * data, lambda: data * sg.asarray(2)):
        with pytest.raises(sg.DTypeError, match="`multiply` takes tensors, NumPy arrays and Python numbers"):
            multiply()


@pytest.mark.parametrize("value", [3, 2.5, True], ids=described)
@pytest.mark.parametrize("name", ["square", "exp", "negative", "positive", "abs", "floor", "ceil", "trunc", "round"])
def test_functions_of_a_python_number_give_a_tensor(name, value):
    if value is True and name != "exp":
        with pytest.raises(sg.DTypeError, match=f"`{name}` takes numbers; found bool"):
            getattr(sg, name)(value)
    else:
        result = getattr(sg, name)(value)
        assert isinstance(result, sg.Tensor)
        assert result.dtype == (np.float64 if name == "exp" else np.asarray(value).dtype)
        np.testing.assert_allclose(result.numpy(), getattr(np, name)(float(value)), rtol=1e-15)


# --- NumPy's functions ----------------------------------------------------------------------------------------------

UFUNCS = {
    "exp": np.exp,
    "sqrt": np.sqrt,
    "negative": np.negative,
    "isfinite": np.isfinite,
    "add": lambda x: np.add(np.ones(2), x),
    "multiply": lambda x: np.multiply(x, 3.0),
    "divide": lambda x: np.divide(x, np.float64(3)),
    "pow": lambda x: np.power(x, 2),
    "maximum": lambda x: np.maximum(x, 1.5),
    "matmul": lambda x: np.matmul(x, np.eye(2)),
}


@pytest.mark.parametrize("name", UFUNCS)
@pytest.mark.parametrize("tracked", [False, True])
def test_numpy_ufuncs_on_tensors_are_operations(name, tracked):
    array = np.array([1.0, 2.0])
    result = UFUNCS[name](sg.asarray(array, requires_grad=tracked))
    assert isinstance(result, sg.Tensor)
    np.testing.assert_allclose(result.numpy(), UFUNCS[name](array), rtol=1e-15)
    assert result.requires_grad is (tracked and name != "isfinite")


def test_numpy_ufuncs_on_tensors_are_differentiated():
    x = sg.asarray([1.0, 2.0], requires_grad=True)
    np.multiply(np.square(x), np.array([1.0, 10.0])).sum().backward()
    assert x.grad.tolist() == [2.0, 40.0]


def test_numpy_ufuncs_that_tensors_do_not_have():
    x = sg.ones((2,), requires_grad=True)
    for call, name in (
        (lambda: np.nextafter(x, 1.0), "nextafter"),
        (lambda: np.add.reduce(sg.ones((2,))), "add"),  # not `x`: NumPy keeps a reference to it for ever
        (lambda: np.add.outer(x, x), "add"),
        (lambda: np.exp(x, out=np.zeros(2)), "exp"),
        (lambda: np.exp(x, where=[True, False]), "exp"),
    ):
        with pytest.raises(sg.DTypeError, match=rf"`numpy\.{name}` does not take tensors.* `t\.numpy\(\)`"):
            call()
    with pytest.raises(sg.DTypeError, match=r"does not take tensors with `out`: use `sweepgrad\.exp`"):
        np.exp(x, out=np.zeros(2))
    array = np.ones(2)
    with pytest.raises(sg.DTypeError, match=r"`numpy\.add` does not take tensors"):
        array += x
    assert array.tolist() == [1.0, 1.0]


def test_numpy_functions_take_tensors_that_are_not_tracked():
    x, w = sg.asarray([[1.0, 2.0]]), sg.ones((1, 2), requires_grad=True)
    for found, expected in (
        (np.sum(x, axis=1), [3.0]),
        (np.diff(x), [[1.0]]),
        (np.concatenate([x, x], axis=1), [[1.0, 2.0, 1.0, 2.0]]),
        (np.stack((x, np.zeros((1, 2)))), [[[1.0, 2.0]], [[0.0, 0.0]]]),
    ):
        assert isinstance(found, np.ndarray)
        assert found.tolist() == expected
    for call, name in ((lambda: np.sum(w), "sum"), (lambda: np.concatenate([x, [w]]), "concatenate")):
        with pytest.raises(sg.DTypeError, match=rf"`numpy\.{name}` does not take tensors that require a gradient"):
            call()
    for call, text in (
        (lambda: np.sum(w), "`sweepgrad.sum`"),
        (lambda: np.dot(w, w), "`sweepgrad.matmul`"),
        (lambda: np.linalg.norm(w), "`numpy.linalg.norm` does not"),
    ):
        with pytest.raises(sg.DTypeError, match=re.escape(text)):
            call()


@pytest.mark.parametrize(
    ("values", "dtype"), [([300], "int8"), (-1, "uint8"), (float("nan"), "int64"), ([[1.0, 1e30]], "int64")]
)
def test_numbers_that_an_integer_dtype_cannot_hold_are_refused(values, dtype):
    with pytest.raises(sg.DTypeError, match=f"do not all fit into {dtype}"):
        sg.asarray(values, dtype=dtype)


def test_masked_arrays_are_refused_rather_than_unmasked():
    masked = np.ma.array([1.0, 2.0], mask=[True, False])
    for call in (sg.asarray, sg.exp, lambda m: sg.ones((2,)) * m, lambda m: sg.ones((2,)).copy_(m)):
        with pytest.raises(sg.DTypeError, match="masked array"):
            call(masked)


# --- what is made once and shared -------------------------------------------------------------------------------------


def test_cotangent_that_a_pass_begins_with_is_never_written_to():
    for _ in range(2):
        x = sg.asarray(3.0, requires_grad=True)
        for _ in range(3):
            x.backward()
        assert x.grad.item() == 3.0
        y = x + x + x
        x.grad = None
        y.backward()
        assert x.grad.item() == 3.0


def test_elements_of_a_filled_tensor_keep_their_sign():
    assert np.signbit(sg.full((2,), -0.0).numpy()).all()
    assert not np.signbit(sg.zeros((2,)).numpy()).any()
    assert sg.full_like(sg.ones((2,)), -0.0).tolist() == [0.0, 0.0]
    assert sg.ones((2, 0, 3)).shape == sg.zeros((2, 0, 3)).shape == (2, 0, 3)


def test_same_shapes_in_another_layout_give_the_same():
    x, y = np.arange(6.0).reshape(2, 3), np.arange(3.0)
    strided = sg.asarray(x.T.copy()).mT
    for _ in range(2):
        for one in (sg.asarray(x), strided):
            np.testing.assert_array_equal((one + sg.asarray(y)).numpy(), x + y)
            np.testing.assert_array_equal(one.sum(axis=0).numpy(), x.sum(axis=0))
        with pytest.raises(ValueError, match="broadcast"):
            sg.asarray(x) + sg.asarray(np.ones(2))


def test_layouts_are_remembered_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(plan, "_MOST_LAYOUTS", 3)
    monkeypatch.setattr(plan, "_layouts", {})
    for n in range(2, 12):
        assert (sg.ones((n, 1)) + sg.ones((1, n))).shape == (n, n)
        assert len(plan._layouts) <= 3


def test_node_with_one_parent_refers_to_it_without_a_tuple():
    x = sg.ones((2, 3), requires_grad=True)
    for y in (x.sum(), x + np.ones(3), x.mT, x * 2.0):
        assert y._node.links is x._node


def test_product_of_matrices_does_not_warn_of_infinities():
    x = sg.asarray([[np.inf, 1.0]], requires_grad=True)
    y = x @ sg.asarray([[0.0], [1.0]])
    assert np.isnan(y.item())
    y.backward()
