"""Nobody writes to what a rule has saved: every way that leads to a tensor's memory is tried, and every way into it.

Gradients are compared, bit for bit, with those of the same computation that nobody interfered with.
"""

import contextlib
import copy
import gc
import io
import mmap
import operator
import pickle
import random
import re
import struct
import warnings
from array import array as buffer

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib import stride_tricks

import sweepgrad as sg
from strategies import LAYOUTS, examples, laid_out, seeds
from sweepgrad import sharing, tensor
from sweepgrad.kernels.buffers import POOLED_FROM
from sweepgrad.ops.op import OPS, Elementwise
from sweepgrad.ops.structural import Composed

SIZES = {"small": 3, "shared": sharing._COPIED // 8 + 1, "pooled": POOLED_FROM // 8 + 8}
"""Elements, of float64, of an array that goes out as a copy, of one that shares memory, and of one from the pool."""

# --- what goes out ---------------------------------------------------------------------------------------------------

LEADS = [
    *map(operator.attrgetter, ["base", "obj", "data", "T", "real", "flat"]),
    *map(operator.methodcaller, ["raw", "toreadonly", "view", "ravel", "__array__", "__copy__"]),
    memoryview,
    pickle.PickleBuffer,
    np.asarray,
    np.frombuffer,
    np.from_dlpack,
    np.matrix,
    lambda x: np.array(x, copy=None),
    lambda x: x.view(np.recarray),
    lambda x: x.view(np.uint8),
    lambda x: x[...],
    lambda x: np.ndarray(x.shape, x.dtype, x),
    lambda x: stride_tricks.as_strided(x, x.shape, x.strides, writeable=True),
    lambda x: stride_tricks.sliding_window_view(x, x.shape, writeable=True),
    lambda x: np.broadcast_arrays(x)[0],
    lambda x: np.nditer(x, flags=["external_loop"], op_flags=["readwrite"]).itviews[0],
    lambda x: x.__array_wrap__(x),
    lambda x: x.__reduce_ex__(5),
]
"""From an array, or from what exports or holds one, to others that share its memory."""

# Not among them is what crashes NumPy itself with any array: `resize` of one that has views, and new strides.
# (`random` crashes with an `out` that is no array.)
WRITES = [
    lambda x: setattr(x.flags, "writeable", True),
    lambda x: x.setflags(write=True),
    *(
        lambda x, key=key, value=value: operator.setitem(x, key, value)
        for key in (..., slice(None), 0)
        for value in (77, b"M")
    ),
    lambda x: operator.iadd(x, 77),
    *(operator.methodcaller("fill", 77), operator.methodcaller("sort"), operator.methodcaller("partition", 0)),
    lambda x: x.byteswap(inplace=True),
    lambda x: x.setfield(77, np.uint8),
    lambda x: np.copyto(x, 77),
    lambda x: np.put(x, [0], 77),
    lambda x: np.add.at(x, ..., 77),
    lambda x: np.add(x, 77, out=x),
    lambda x: np.nan_to_num(x, copy=False, nan=77),
    lambda x: np.random.default_rng(0).random(out=x[...]),
    lambda x: np.random.default_rng(0).shuffle(x),
    lambda x: random.Random(0).shuffle(x),
    lambda x: struct.pack_into("d", x, 0, 77.0),
    lambda x: io.BytesIO(b"M" * 64).readinto(x),
    *(
        lambda x, name=name, value=value: setattr(x, name, value)
        for name, value in [("shape", (-1,)), ("dtype", np.uint8)]
    ),
]


def is_of_numbers(thing):
    """Not an array of objects, such as NumPy makes of anything: numbers written where it has addresses crash it."""
    return not isinstance(thing, np.ndarray) or not thing.dtype.hasobject


def attack(start, steps=2):
    """Try to write to everything that can be reached from `start` in so many steps."""
    found = [(start, 0)]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of what is deprecated
        for thing, far in found:
            for lead in LEADS if far < steps else ():
                with contextlib.suppress(Exception):
                    new = lead(thing)
                    found += [(one, far + 1) for one in (new if type(new) is tuple else (new,)) if is_of_numbers(one)]
            for write in WRITES:
                with contextlib.suppress(Exception):
                    write(thing)


def test_an_attack_succeeds_where_it_can():
    """On an array that is marked read-only, from a view of a view of it, and on the pool's way to make arrays."""
    for array in (np.arange(3.0), np.frombuffer(memoryview(np.arange(3.0)))):
        view = array[:].view()
        for one in (array, view):
            one.flags.writeable = False
        attack(view, steps=1)
        assert array.tolist() != [0.0, 1.0, 2.0]


def tracked(size=3):
    return sg.asarray(np.resize([3.0, 1.0, 2.0], size), requires_grad=True)


def gradient_of(x, **how):
    sg.sum(x * x).backward(**how)
    return x.grad


def from_a_hook(x, kept=None):
    kept = []
    y = x * x
    y.register_hook(kept.append)
    sg.sum(y).backward()
    return kept[0]


def from_the_root_hook(x):
    kept = []
    y = sg.sum(x)
    y.register_hook(kept.append)
    y.backward()
    return kept[0]


def retained(x):
    y = x * 2.0
    y.retain_grad()
    sg.sum(y * y).backward()
    return y.grad


OUT = {
    "variable": lambda x: x,
    "result": lambda x: sg.exp(x),
    "detached": lambda x: x.detach(),
    "0-d": lambda x: sg.sum(x),
    "reshaped": lambda x: sg.reshape(x, (1, -1)),
    "element": lambda x: x[0],
    "slice": lambda x: x[1:],
    "reversed": lambda x: sg.flip(x),
    "gathered": lambda x: x[np.array([0, 0])],
    "broadcast": lambda x: sg.broadcast_to(x, (2, *x.shape)),
    "transposed": lambda x: sg.reshape(x, (1, -1)).T,
    "product of matrices": lambda x: sg.reshape(x, (-1, 1)) @ sg.ones((1, 2)),
    "reduced": lambda x: sg.max(x, axis=0),
    "fused": lambda x: sg.softmax(x),
    "gradient": gradient_of,
    "differentiable gradient": lambda x: gradient_of(x, create_graph=True),
    "hook": from_a_hook,
    "root hook": from_the_root_hook,
    "retained": retained,
    "of grad": sg.grad(lambda x: sg.sum(x * x * x)),
    "value": lambda x: sg.value_and_grad(lambda x: sg.sum(x * x))(x)[0],
    "copied": lambda x: copy.deepcopy(x),
    "unpickled": lambda x: pickle.loads(pickle.dumps(x, protocol=5)),
    "converted": lambda x: sg.astype(x, "float32"),
    "truth": lambda x: x > 1.0,
    "filled": lambda x: sg.zeros((3,)),
    "a number": lambda x: sg.asarray(2.0),
}

POOLED = {"variable", "result", "gradient", "hook", "unpickled"}
"""Of these, what is tried with large arrays, too: to attack one takes a second."""


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name in OUT for size in SIZES if size != "pooled" or name in POOLED]
)
def test_what_goes_out_cannot_be_written_to(name, size):
    t = OUT[name](tracked(SIZES[size]))
    before = t.numpy().tobytes()
    plain = t.detach()
    ways = [t.numpy, plain.__array__, lambda: np.asarray(plain), lambda: np.ravel(plain)]
    for way in ways[: 1 if size == "pooled" else None]:
        attack(way(), steps=1)
        assert t.numpy().tobytes() == before
    assert not t.numpy().flags.writeable
    assert np.asarray(t.tolist(), t.dtype).tobytes() == before
    x = tracked()
    sg.sum(x).backward()  # begins with a cotangent that all passes share
    assert x.grad.tolist() == [1.0, 1.0, 1.0]


def test_no_second_step_leads_to_the_memory_either():
    t = tracked(SIZES["shared"])
    before = t.numpy().tobytes()
    attack(t.numpy(), steps=2)
    assert t.numpy().tobytes() == before


def test_an_array_that_went_out_keeps_its_memory():
    """Its block does not return to the pool while anything that was made of it lives."""
    t = sg.full((SIZES["pooled"],), 5.0) * 1.0
    views = [t.numpy(), memoryview(t.numpy()), t.numpy()[::3]]
    del t
    gc.collect()
    others = [sg.full((SIZES["pooled"],), 7.0) * 1.0 for _ in range(4)]
    assert all((np.asarray(view) == 5.0).all() for view in views)
    assert all((other.numpy() == 7.0).all() for other in others)


def test_an_array_that_went_out_is_an_ordinary_one():
    t = sg.asarray(np.arange(6000.0).reshape(2, -1))
    few = t[:, :2]
    for one in (t, t.T, t[::-1], sg.asarray(1.5), sg.zeros((0, 2)), t > 2.0, sg.arange(3000), few, few.T, few > 1.0):
        array = one.numpy()
        assert type(array) is np.ndarray
        assert (array.shape, array.dtype, array.tolist()) == (one.shape, one.dtype, one.tolist())
        assert array.flags.aligned
        again = pickle.loads(pickle.dumps(array))
        again[...] = 0
        np.testing.assert_array_equal(copy.deepcopy(array), array)
        np.testing.assert_array_equal(np.from_dlpack(array), array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is deprecated
        t.numpy().shape = (6000,)  # its own, and no other's
    assert t.numpy().shape == (2, 3000)


# --- every operation --------------------------------------------------------------------------------------------------


def inputs_of(row, case):
    rng = np.random.default_rng(len(row.name))
    if isinstance(row, Elementwise):
        arrays = [rng.uniform(low, high, (2, 3)) for low, high in row.domain]
        if row.condition:
            arrays[0] = arrays[0] > np.median(arrays[0])
        return arrays, {}
    shapes, params = case
    return [rng.uniform(0.5, 1.5, shape) for shape in shapes], params


CASES = [
    (row, case)
    for row in OPS.values()
    for case in (row.cases if isinstance(row, Composed) else [None])
    if not isinstance(row, Elementwise) or row.differentiable
]


@pytest.mark.parametrize("how", ["first order", "second order"])
def test_gradients_of_every_operation_stay_as_they_were(how):
    for row, case in CASES:
        arrays, params = inputs_of(row, case)
        found = []
        for interfere in (False, True):
            sources = [array.copy() for array in arrays]
            xs = [sg.asarray(one, requires_grad=one.dtype.kind == "f") for one in sources]
            mutable = {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in params.items()}
            y = row.function(xs, **mutable) if getattr(row, "listed", False) else row.function(*xs, **mutable)
            if y.dtype.kind != "f" or not y.requires_grad or any(y is x for x in xs):
                break
            if interfere:
                for one in (y, *xs):
                    attack(one.numpy(), steps=0)
                for one in (*sources, *(value for value in mutable.values() if isinstance(value, np.ndarray))):
                    one[...] = 0
                with sg.no_grad():
                    for x in xs:
                        x.copy_(0.25)
            y.backward(sg.full(y.shape, 0.5), create_graph=how == "second order")
            grads = [x.grad for x in xs if x.grad is not None]
            if how == "second order":
                loss = sum((sg.sum(grad * grad) for grad in grads), start=sg.sum(y * y))
                if interfere:
                    for one in grads:
                        attack(one.numpy(), steps=0)
                for x in xs:
                    x.grad = None
                loss.backward()
                grads = [x.grad for x in xs if x.grad is not None]
            assert grads
            found.append([grad.numpy().tobytes() for grad in grads])
        assert not found or found[0] == found[1], row.name


STEPS = ["multiply", "divide", "matmul", "sum", "softmax", "sin", "getitem", "broadcast", "concat", "add", "where"]
INTERFERE = ["attack", "copy_", "+=", "*=", "optimiser", "setitem", "del", "drop", "out", "grad"]


def step(name, values, w, rng):
    x = values[rng.integers(len(values))]
    y = values[rng.integers(len(values))]
    return {
        "multiply": lambda: x * y,
        "divide": lambda: x / (y * y + 1.0),
        "matmul": lambda: x @ w,
        "sum": lambda: x * sg.sum(y, axis=0, keepdims=True),
        "softmax": lambda: sg.softmax(x, axis=-1),
        "sin": lambda: sg.sin(x),
        "getitem": lambda: x[rng.permutation(3)],
        "broadcast": lambda: x * w[0] + 0.5,
        "concat": lambda: sg.concat([x[:1], y[1:]]),
        "add": lambda: x + y,
        "where": lambda: sg.where(x > y, x, y),
    }[name]()


def interfere(name, values, w, rng):
    """Something that must change no gradient of what was computed."""
    x = values[rng.integers(len(values))]
    if name == "attack":
        attack(x.numpy(), steps=1)
    elif name == "setitem":
        with pytest.raises(sg.ImmutableError):
            x[0] = 77.0
    elif name == "del":
        with pytest.raises(sg.ImmutableError):
            del x[0]
    elif name == "out":
        with pytest.raises(sg.ImmutableError):
            np.add(np.ones((3, 3)), 1.0, out=x)
    elif name == "drop":
        values[1:] = [value for value in values[1:] if value is not x]
    elif name == "grad":
        w.grad = sg.full((3, 3), 77.0)
        attack(w.grad.numpy(), steps=1)
        w.grad = None
    elif name == "optimiser":
        w.grad = sg.ones((3, 3))
        sg.optim.Adam([w], lr=0.5).step()
        w.grad = None
    else:
        with sg.no_grad():
            if name == "copy_":
                w.copy_(77.0)
            elif name == "+=":
                w += 77.0
            else:
                w *= 77.0


@given(
    seed=seeds,
    names=st.lists(st.sampled_from(STEPS), min_size=1, max_size=8),
    between=st.lists(st.sampled_from(INTERFERE), min_size=1, max_size=4),
    retain=st.booleans(),
)
@examples(60)
def test_nothing_between_forward_and_backward_changes_a_gradient(seed, names, between, retain):
    found = []
    for disturbed in (False, True):
        rng = np.random.default_rng(seed)
        start = rng.uniform(-1, 1, (2, 3, 3))
        x, w = (sg.asarray(one, requires_grad=True) for one in start)
        values = [x]
        for name in names:
            values.append(step(name, values, w, rng))
        loss = sg.sum(values[-1] * values[-1]) + sg.sum(w)
        if disturbed:
            chaos = np.random.default_rng(seed)
            for name in between:
                interfere(name, values, w, chaos)
        loss.backward(retain_graph=retain)
        if retain:
            if disturbed:
                attack(w.grad.numpy(), steps=1)
            loss.backward()
        found.append([None if one.grad is None else one.grad.numpy().tobytes() for one in (x, w)])
    assert found[0] == found[1]


# --- what comes in ----------------------------------------------------------------------------------------------------


class Alias:
    """An object whose conversion gives an array that it keeps, as it is."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


class Lies(np.ndarray):
    """An array that says that it is read-only and has no base."""

    base = None
    flags = np.frombuffer(bytes(8)).flags


class Interface:
    """An object that says that its memory is read-only."""

    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, True)}
        self.array = array


def read_only(array):
    array.flags.writeable = False
    return array


def mapped(array, path, mode):
    path.write_bytes(array.tobytes())
    other = np.memmap(path, array.dtype, "r+", shape=array.shape)
    mine = np.memmap(path, array.dtype, mode, shape=array.shape)
    return mine, mine if mode == "c" else other


def anonymous(array):
    memory = mmap.mmap(-1, array.nbytes)
    memory[:] = array.tobytes()
    return read_only(np.frombuffer(memory, array.dtype).reshape(array.shape)), memory


def in_bytearray(array, wrapped=lambda memory: memory):
    memory = bytearray(array.tobytes())
    return np.frombuffer(wrapped(memory), array.dtype).reshape(array.shape), memory


def in_buffer(array):
    memory = buffer("d", array.tobytes())
    return np.frombuffer(memoryview(memory).toreadonly()).reshape(array.shape), memory


INCOMING = {
    "writable": lambda a, _: (a, a),
    "read-only": lambda a, _: (read_only(a), a),
    "read-only view": lambda a, _: (read_only(a[:]), a),
    "read-only view of a read-only view": lambda a, _: (read_only(read_only(a[:])[:]), a),
    "repeated": lambda a, _: (np.broadcast_to(a[:1], a.shape), a),
    "windows": lambda a, _: (stride_tricks.sliding_window_view(a, (1, 1))[:, :, 0, 0], a),
    "transposed": lambda a, _: (read_only(a.T), a),
    "subclass": lambda a, _: (read_only(a.view(np.memmap)), a),
    "record": lambda a, _: (read_only(a.view(np.recarray)), a),
    "liar": lambda a, _: (a.view(Lies), a),
    "view of a liar": lambda a, _: (read_only(np.asarray(a.view(Lies))), a),
    "of another dtype": lambda a, _: (read_only(a.view(np.int64).view(np.float64)), a),
    "bytearray": lambda a, _: in_bytearray(a),
    "memoryview": lambda a, _: in_bytearray(a, lambda memory: memoryview(memory).toreadonly()),
    "array.array": lambda a, _: in_buffer(a),
    "mmap": lambda a, _: anonymous(a),
    "memmap r": lambda a, path: mapped(a, path, "r"),
    "memmap r+": lambda a, path: mapped(a, path, "r+"),
    "memmap c": lambda a, path: mapped(a, path, "c"),
    "object": lambda a, _: (Alias(read_only(a)), a),
    "interface": lambda a, _: (Interface(a), a),
    "exporter": lambda a, _: (memoryview(a).toreadonly(), a),
    "exporter of a read-only array": lambda a, _: (memoryview(read_only(a)), a),
    "list": lambda a, _: ([read_only(a[0]), a[1]], a),
    "dlpack": lambda a, _: (np.from_dlpack(a), a),
}
ANYTHING = {"object", "interface", "exporter", "exporter of a read-only array", "list"}
"""Of these, what operations do not take."""


def overwrite(memory):
    """What the owner of `memory` does afterwards."""
    if isinstance(memory, np.ndarray):
        memory.flags.writeable = True
        memory[...] = 77.0
        memory.flags.writeable = False  # as if nothing had happened
    else:
        memoryview(memory).cast("B")[:] = b"M" * memoryview(memory).nbytes


ENTRANCES = {
    "asarray": lambda a, x: sg.asarray(a) * x,
    "variable": lambda a, x: sg.asarray(a, requires_grad=True) * x,
    "copy_": lambda a, x: sg.zeros((2, 2)).copy_(a) * x,
    "operand": lambda a, x: a * x,
    "reflected": lambda a, x: x * a,
    "matmul": lambda a, x: x @ a,
    "concat": lambda a, x: sg.prod(sg.stack([x, a]), axis=0),
    "fused": sg.fuse(lambda a, x: sg.sum(sg.exp(a * x))),
    "condition": lambda a, x: sg.where(a > 1.5, x, a),
}


TAKES_ANYTHING = ("asarray", "variable", "copy_")


@pytest.mark.parametrize(
    ("kind", "entrance"),
    [(kind, one) for kind in INCOMING for one in (TAKES_ANYTHING if kind in ANYTHING else ENTRANCES)],
)
def test_what_comes_in_may_change_afterwards(kind, entrance, tmp_path):
    found = []
    for change in (False, True):
        given_array, memory = INCOMING[kind](np.array([[1.0, 2.0], [3.0, 4.0]]), tmp_path / "memory")
        x = sg.asarray([[2.0, 5.0], [3.0, 7.0]], requires_grad=True)
        y = ENTRANCES[entrance](given_array, x)
        if change:
            overwrite(memory)
        sg.sum(y).backward()
        found.append((x.grad.tolist(), y.tolist()))
        np.testing.assert_array_equal(np.isfinite(x.grad.tolist()), True)
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", INCOMING)
def test_a_gradient_that_was_passed_in_may_change_afterwards(kind, tmp_path):
    given_array, memory = INCOMING[kind](np.array([[1.0, 2.0], [3.0, 4.0]]), tmp_path / "memory")
    expected = np.array(np.asarray(given_array))
    x = sg.ones((2, 2), requires_grad=True)
    seen = []
    y = x * 1.0
    y.register_hook(seen.append)
    y.backward(given_array)
    overwrite(memory)
    assert seen[0].tolist() == expected.tolist()
    assert x.grad.tolist() == expected.tolist()


def test_indices_may_change_afterwards():
    positions, mask = np.array([0, 2]), np.array([True, False, True])
    for index in (positions, mask, read_only(positions.copy())):
        x = tracked()
        results = [x[index], x[index.tolist()], sg.take(x, np.flatnonzero(index) if index is mask else index)]
        index.flags.writeable = True
        index[...] = 1
        for y in results:
            assert y.tolist() == [3.0, 2.0]
            x.grad = None
            sg.sum(y * y).backward()
            assert x.grad.tolist() == [6.0, 0.0, 4.0]


@pytest.mark.parametrize("protocol", range(6))
def test_memory_that_pickle_was_given_may_change_afterwards(protocol):
    buffers = []
    keep = {"buffer_callback": buffers.append} if protocol == 5 else {}
    data = pickle.dumps([sg.asarray([1.0, 2.0]), np.array([1.0, 2.0])], protocol, **keep)
    memory = [bytearray(one.raw()) for one in buffers]
    x, array = pickle.loads(data, **({"buffers": memory} if memory else {}))
    for one in (*memory, *(one.raw() for one in buffers if not one.raw().readonly)):
        one[:] = b"M" * len(one)
    assert (array.tolist() == [1.0, 2.0]) is not bool(memory)  # NumPy shares what it is given
    assert x.tolist() == [1.0, 2.0]
    memo = {}
    twin = copy.deepcopy(x, memo)
    for one in memo.values():
        attack(one, steps=1)
    assert twin.tolist() == [1.0, 2.0]


# --- what is shared ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_nobody_can_write_to_is_not_copied(layout):
    t = sg.asarray(laid_out(np.arange(6000.0).reshape(60, 100), layout))
    for array in (t.numpy(), t.numpy()[1:], t.T.numpy(), np.frombuffer(bytes(50_000))):
        again = sg.asarray(array)
        assert np.shares_memory(again.numpy(), array)
        assert again.numpy().strides == array.strides


class Sub(bytes):
    """What pretends to be bytes need not be constant."""


def test_only_bytes_themselves_are_taken_to_be_constant():
    assert sharing.is_constant(np.frombuffer(bytes(8)))
    assert not sharing.is_constant(np.frombuffer(Sub(8)))
    assert not sharing.is_constant(np.zeros(1))
    assert not sharing.is_constant(read_only(np.asarray(np.zeros(1).view(Lies))))


def frozen_owner(*values):
    return read_only(np.array(values))


SHARING = {
    "multiply": lambda x, t: x * t,
    "divide": lambda x, t: x / t,
    "matmul": lambda x, t: x @ t,
    "loss": sg.fuse(lambda x, t: sg.sum(sg.exp(x * t))),
    "output": lambda x, t: t / x,  # saves its output in the place of t
    "where": lambda x, t: sg.where(t > 2.0, x, x * 2.0),  # saves truth values
}
VIEWS = [lambda a: a, lambda a: a[::-1], lambda a: a[:], lambda a: np.broadcast_to(a[:1], (2,))]


@pytest.mark.parametrize("view", range(4))
@pytest.mark.parametrize("name", SHARING)
def test_a_shared_array_that_was_made_writable_is_found(name, view):
    """Where it was saved; where not, the gradient is the right one."""
    x = sg.asarray([4.0, 5.0], requires_grad=True)
    sg.sum(SHARING[name](x, VIEWS[view](np.array([2.0, 3.0])))).backward()
    expected, x.grad = x.grad.tolist(), None
    owner = frozen_owner(2.0, 3.0)
    t = sg.asarray(VIEWS[view](owner), copy=False)
    assert np.shares_memory(tensor.dense(t), owner)
    loss = sg.sum(SHARING[name](x, t))
    owner.flags.writeable = True
    owner[...] = 77.0
    if name in ("output", "where") or (name == "loss" and view in (1, 3)):  # a fused function copies strided data
        loss.backward()
        assert x.grad.tolist() == expected
        return
    saved = "<lambda>" if name == "loss" else name
    for how in ({}, {"create_graph": True}, {"retain_graph": True}):
        with pytest.raises(sg.ImmutableError, match=rf"`backward` through `{saved}`.*copy=False.*writable again"):
            loss.backward(**how)
    assert x.grad is None
    sg.sum(x * x).backward()  # another graph, which has saved nothing of it
    assert x.grad.tolist() == [8.0, 10.0]


@pytest.mark.parametrize("kind", sorted(set(INCOMING) - {"read-only"}))
def test_what_is_not_read_only_all_through_is_not_shared(kind, tmp_path):
    array, _ = INCOMING[kind](np.array([[1.0, 2.0], [3.0, 4.0]]), tmp_path / "memory")
    with pytest.raises(sg.ArgumentError, match="`asarray` with copy=False needs"):
        sg.asarray(array, copy=False)


def test_grad_finds_it_too():
    owner = frozen_owner(2.0, 3.0)

    def f(x):
        y = x * sg.asarray(owner, copy=False)
        owner.flags.writeable = True
        return sg.sum(y)

    with pytest.raises(sg.ImmutableError, match="through `multiply`"):
        sg.grad(f)([1.0, 2.0])


def test_a_shared_array_that_stays_read_only_is_as_good_as_any():
    owner = frozen_owner(2.0, 3.0)
    x = sg.asarray([4.0, 5.0], requires_grad=True)
    other = np.ones(2)
    sg.sum(x * sg.asarray(owner, copy=False) * other).backward()
    assert x.grad.tolist() == [2.0, 3.0]


def test_a_shared_array_can_be_given_no_other_form():
    owner = frozen_owner(1.0, 2.0, 3.0, 4.0)
    t = sg.asarray(owner, copy=False, requires_grad=True)
    y = t * t
    owner.shape = (2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is deprecated
        owner.dtype = np.int8
    with contextlib.suppress(ValueError):
        owner.resize((1,), refcheck=False)
    assert (t.shape, t.dtype, t.tolist()) == ((4,), np.float64, [1.0, 2.0, 3.0, 4.0])
    sg.sum(y).backward()
    assert t.grad.tolist() == [2.0, 4.0, 6.0, 8.0]


def test_owners_are_forgotten_when_they_die():
    gc.collect()
    before = len(sharing.owners)
    kept = [sg.asarray(frozen_owner(1.0, float(k)), copy=False) for k in range(10)]
    assert len(sharing.owners) == before + 10
    del kept
    gc.collect()
    assert len(sharing.owners) == before


# --- operators in place, item assignment, NumPy's functions that write ------------------------------------------------

PLACES = {
    "plain": lambda: sg.asarray([[3.0, 1.0], [2.0, 4.0]]),
    "variable": lambda: sg.asarray([[3.0, 1.0], [2.0, 4.0]], requires_grad=True),
    "result": lambda: sg.asarray([[3.0, 1.0], [2.0, 4.0]], requires_grad=True) * 1.0,
}

ARRAY = np.ones((2, 2))
WRITERS = {
    "item": lambda t: operator.setitem(t, 0, 77.0),
    "slice": lambda t: operator.setitem(t, slice(None), 77.0),
    "mask": lambda t: operator.setitem(t, t > 1.0, 77.0),
    "item in place": lambda t: operator.setitem(t, 0, operator.iadd(t[0], 1.0)),
    "deletion": lambda t: operator.delitem(t, 0),
    "ufunc": lambda t: np.add(ARRAY, 1, out=t),
    "ufunc on itself": lambda t: np.add(t, 1, out=t),
    "ufunc into several": lambda t: np.divmod(ARRAY, 2.0, out=(None, t)),
    "at": lambda t: np.add.at(t, 0, 1),
    "reduce": lambda t: np.add.reduce(np.ones((2, 2, 2)), out=t),
    "sum": lambda t: np.sum(np.ones((2, 2, 2)), axis=0, out=t),
    "dot": lambda t: np.dot(ARRAY, ARRAY, out=t),
    "concatenate": lambda t: np.concatenate([ARRAY[:1], ARRAY[:1]], out=t),
    "einsum": lambda t: np.einsum("ij->ij", ARRAY, out=t),
    "shuffle": lambda t: random.Random(0).shuffle(t),
}
FUNCTIONS = {
    "copyto": lambda t: np.copyto(t, 77.0),
    "put": lambda t: np.put(t, [0], 77.0),
    "place": lambda t: np.place(t, np.ones((2, 2), bool), [77.0]),
    "putmask": lambda t: np.putmask(t, np.ones((2, 2), bool), [77.0]),
    "fill_diagonal": lambda t: np.fill_diagonal(t, 77.0),
    "put_along_axis": lambda t: np.put_along_axis(t, np.zeros((1, 2), int), 77.0, 0),
    "nan_to_num": lambda t: np.nan_to_num(t, copy=False),
    "median": lambda t: np.median(t, overwrite_input=True),
}
REBOUND = {
    "shape": lambda t: setattr(t, "shape", (4,)),
    "dtype": lambda t: setattr(t, "dtype", np.int64),
    "T": lambda t: setattr(t, "T", ARRAY),
    "data": lambda t: setattr(t, "data", ARRAY),
    "anything": lambda t: setattr(t, "anything", ARRAY),
}


KEPT = {"reduce", "sum"}
"""Where NumPy keeps what refused to be written to alive for ever, and with it a node, if it has one."""


@pytest.mark.parametrize(
    ("name", "place"),
    [(n, p) for n in [*WRITERS, *FUNCTIONS, *REBOUND] for p in PLACES if p == "plain" or n not in KEPT],
)
def test_writing_into_a_tensor_says_why_not(name, place):
    t = PLACES[place]()
    y = sg.sum(t * t) if place != "plain" else None
    if name in WRITERS:
        with pytest.raises(sg.ImmutableError, match="tensors are immutable"):
            WRITERS[name](t)
    elif name in FUNCTIONS:
        expected = "tensors are immutable" if place == "plain" else "would silently leave the graph"
        with pytest.raises(TypeError, match=expected):
            FUNCTIONS[name](t)
    else:
        with pytest.raises(AttributeError):
            REBOUND[name](t)
    assert t.tolist() == [[3.0, 1.0], [2.0, 4.0]]
    if place == "variable":
        y.backward()
        assert t.grad.tolist() == [[6.0, 2.0], [4.0, 8.0]]


def test_an_array_of_the_users_own_is_not_called_a_tensor():
    with pytest.raises(ValueError, match="read-only"):
        np.copyto(read_only(np.ones(3)), sg.ones((3,)))
    with pytest.raises(sg.DTypeError, match=r"`numpy\.add` does not take tensors"):
        np.add.at(np.ones(3), [0], sg.ones((1,)))


IN_PLACE = {f"{name}=": operator for name, operator in {
    "+": (operator.iadd, operator.add), "-": (operator.isub, operator.sub), "*": (operator.imul, operator.mul),
    "/": (operator.itruediv, operator.truediv), "//": (operator.ifloordiv, operator.floordiv),
    "%": (operator.imod, operator.mod), "**": (operator.ipow, operator.pow), "@": (operator.imatmul, operator.matmul),
}.items()}  # fmt: skip


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("symbol", IN_PLACE)
def test_operators_in_place(symbol, place, recording):
    """Of a variable: its values change, where that is not recorded. Of others: the name gets a new tensor."""
    in_place, plain = IN_PLACE[symbol]
    t = PLACES[place]()
    other = sg.asarray([[1.5, 0.5], [2.0, 1.0]])
    before, expected = t.tolist(), plain(t.detach(), other).tolist()
    seen = t * t  # which saves t
    seen_grad = sg.grad(lambda x: sg.sum(x * x))(t.detach()).tolist()
    with contextlib.nullcontext() if recording else sg.no_grad():
        if place == "variable" and recording:
            with pytest.raises(sg.ImmutableError, match=rf"`{re.escape(symbol)}` on a variable .* `no_grad\(\)`"):
                in_place(t, other)
            expected, after = before, t
        else:
            after = in_place(t, other)
    assert after.tolist() == expected
    assert (after is t) is (place == "variable")
    assert after.requires_grad is (place == "variable" or (place == "result" and recording))
    if place != "variable":
        assert t.tolist() == before
    if place != "plain":
        t.retain_grad()
        sg.sum(seen).backward()
        assert t.grad.tolist() == seen_grad


@pytest.mark.parametrize("symbol", IN_PLACE)
def test_an_operator_in_place_that_does_not_fit_changes_nothing(symbol):
    t = sg.asarray([[3.0, 1.0], [2.0, 4.0]], requires_grad=True)
    for other in (sg.ones((3, 2, 2)), sg.ones((2, 3)), "1", [1.0], None):
        with sg.no_grad(), pytest.raises((TypeError, ValueError)):
            IN_PLACE[symbol][0](t, other)
        assert t.tolist() == [[3.0, 1.0], [2.0, 4.0]]


# --- two threads ------------------------------------------------------------------------------------------------------


class Slow(np.ndarray):
    """Flat data during whose first change of shape something else happens, as on another thread."""

    meanwhile = None

    def reshape(self, *args, **kwargs):
        if (meanwhile := self.meanwhile) is not None:
            self.meanwhile = None
            meanwhile()
        return np.asarray(self).reshape(*args, **kwargs)


def test_new_elements_come_while_a_reader_makes_its_array():
    flat = np.arange(4.0).view(Slow)
    t = tensor.make(flat, None, (2, 2), np.dtype("float64"), None)
    flat.meanwhile = lambda: t.copy_(7.0)
    assert tensor.dense(t).tolist() == [[7.0, 7.0], [7.0, 7.0]]
    assert tensor.flat(t).tolist() == [7.0] * 4
    assert t.tolist() == [[7.0, 7.0], [7.0, 7.0]]


@pytest.mark.parametrize("read", [lambda x, i: sg.take(x, i), lambda x, i: x[i]], ids=["take", "getitem"])
def test_indices_that_alias_an_array_may_change_afterwards(read):
    indices = np.array([0, 1])
    x = sg.asarray([1.0, 2.0, 3.0], requires_grad=True)
    try:
        y = read(x, Alias(indices))
    except TypeError:
        return  # not an index
    indices[:] = 2
    y.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0, 0.0]


def test_elements_replaced_by_another_thread_during_a_product(monkeypatch):
    """The other thread gives the weights new elements after the product has read them, before it is recorded."""
    x = sg.asarray([[1.0, 2.0]], requires_grad=True)
    w = sg.asarray([[3.0], [4.0]], requires_grad=True)
    row = OPS["matmul"]
    forward = row.forward

    def slow(*arrays, **params):
        out = forward(*arrays, **params)
        w.copy_([[70.0], [80.0]])
        return out

    monkeypatch.setattr(row, "forward", slow)
    y = x @ w
    assert y.item() == 11.0
    y.sum().backward()
    assert x.grad.tolist() == [[3.0, 4.0]]
