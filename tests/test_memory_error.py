"""Memory that runs short: one more attempt after a sweep, an error that tells, and everything works on.

Allocations are made to fail where they are made: NumPy gets an allocator that refuses chosen requests (`Starved`), so
whatever asks for an array's elements, in NumPy or here, meets it. The last part is real: a process with a limit.
"""

import contextlib
import copy
import ctypes
import gc
import itertools
import sys
import threading

import numpy as np
import pytest

import sweepgrad as sg
from launch import quiet
from sweepgrad import shortage
from sweepgrad.graph import process
from sweepgrad.kernels.buffers import pool
from sweepgrad.ops.op import OPS
from sweepgrad.ops.structural import Composed

ALWAYS = 1 << 60


class _Handler(ctypes.Structure):
    """NumPy's `PyDataMem_Handler`, version 1."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        *((field, ctypes.c_void_p) for field in ("context", "malloc", "calloc", "realloc", "free")),
    )


_MALLOC = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_CALLOC = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
_SET, _GET = 304, 305  # of NumPy's C interface, since 1.22


class Starved:
    """Within `with starved(fails):` the requests of this thread that `fails` contains, by their number, are refused."""

    def __init__(self):
        from numpy._core import _multiarray_umath

        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        table = (ctypes.c_void_p * (_GET + 1)).from_address(address(_multiarray_umath._ARRAY_API, None))
        self._set = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table[_SET])
        own = _Handler.from_address(address(ctypes.PYFUNCTYPE(ctypes.py_object)(table[_GET])(), b"mem_handler"))
        assert (own.name, own.version) == (b"default_allocator", 1)
        malloc, calloc = _MALLOC(own.malloc), _CALLOC(own.calloc)
        self.asked = 0
        self.fails = range(0)

        def refuses():
            self.asked += 1
            return self.asked - 1 in self.fails

        # NumPy frees by itself what these have allocated, so they are not called once the block is left.
        mine = (
            _MALLOC(lambda context, size: None if refuses() else malloc(context, size)),
            _CALLOC(lambda context, count, size: None if refuses() else calloc(context, count, size)),
        )
        pointers = [ctypes.cast(function, ctypes.c_void_p) for function in mine]
        handler = _Handler(b"starved", 1, own.context, *pointers, own.realloc, own.free)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object((handler, mine)))  # for arrays that live as long as the process
        self._handler = capsule(ctypes.addressof(handler), b"mem_handler", None)

    @contextlib.contextmanager
    def __call__(self, fails):
        self.asked, self.fails = 0, fails
        before = self._set(self._handler)
        try:
            yield
        finally:
            self._set(before)


starved = Starved()
ALL = range(ALWAYS)
NONE = range(0)


@pytest.fixture
def sweeps(monkeypatch):
    """How many sweeps there were because of short memory; they leave reference cycles alone, since that takes long."""
    calls = []

    def sweep(*, collect_cycles):
        calls.append(collect_cycles)
        return sg.sweep()

    monkeypatch.setattr(shortage.graph, "sweep", sweep)
    return calls


def numbers(*shape, low=0.5, high=2.0):
    return np.random.default_rng(sum(shape) + len(shape)).uniform(low, high, shape)


def seen(results):
    """Elements of the results, None where there is none."""
    return [None if one is None else one.numpy().copy() for one in results]


def assert_same(found, expected, what):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None), what
        if one is not None:
            np.testing.assert_array_equal(one, other, err_msg=what)


def assert_free():
    """No lock is held: another thread can take each."""

    def take():
        for lock in (process.registry.lock, pool._lock):
            taken.append(lock.acquire(timeout=30))
            lock.release()

    taken = []
    thread = threading.Thread(target=take)
    thread.start()
    thread.join(60)
    assert taken == [True, True]


# --- every allocation of every operation ------------------------------------------------------------------------------


def whole(function, arrays, params, listed):
    """What an operation gives, and its gradients, by an ordinary pass and by one that can be differentiated."""
    made = {}

    def gradient(shape):  # made once, so that it is not among the allocations
        if shape not in made:
            made[shape] = sg.asarray(numbers(*shape))
        return made[shape]

    def run(**how):
        inputs = [sg.asarray(array, requires_grad=array.dtype == float) for array in arrays]
        result = function(inputs, **params) if listed else function(*inputs, **params)
        if not result.requires_grad:
            return [result]
        result.backward(gradient(result.shape), **how)
        return [result, *(one.grad for one in inputs)]

    return {"": run, " with create_graph": lambda: run(create_graph=True)}


def elementwise_jobs():
    x, y, mask = numbers(3, 4), numbers(4, 3).T, numbers(3, 4) > 1.0
    ones, low, whole_numbers = np.ones((3, 4)), np.ones((3, 4), "float32"), np.array([[1, 2]])
    forms = {
        "one": (sg.exp, [x]),
        "one, strided": (sg.exp, [y]),
        "two": (sg.multiply, [x, x + 1.0]),
        "two, nothing to compute": (sg.add, [x, x + 1.0]),
        "two, one to compute": (sg.subtract, [x, x + 1.0]),
        "one twice": (lambda x: x * x, [x]),
        "beside a number": (lambda x: 2.0 / x - 1.0, [x]),
        "beside an array": (lambda x: ones * x, [x]),
        "beside a small dtype": (lambda x: x * low, [x]),
        "rows": (sg.multiply, [x, x[0]]),
        "columns": (sg.multiply, [x, x[:, :1]]),
        "one element": (sg.multiply, [x, x[:1, :1]]),
        "strided": (sg.multiply, [x, y]),
        "nothing": (sg.multiply, [x[:0], x[:1]]),
        "five axes": (sg.multiply, [numbers(2, 1, 2, 1, 2), numbers(1, 2, 1, 2, 1)]),
        "condition": (sg.where, [mask, x, x[0]]),
        "three": (sg.clip, [x, 0.7 * x[0], 1.5 * x[0]]),
        "no derivative": (sg.floor, [x]),
        "truth values": (sg.less, [x, x[0]]),
        "integers": (lambda x: sg.asarray([[1, 2]]) ** sg.asarray(whole_numbers), [x]),
    }
    for name, (function, arrays) in forms.items():
        yield from ((f"elementwise, {name}{how}", run) for how, run in whole(function, arrays, {}, False).items())


def table_jobs():
    """Every row that is not elementwise, on every one of its cases."""
    for row in OPS.values():
        if isinstance(row, Composed):
            for k, (shapes, params) in enumerate(row.cases):
                arrays = [numbers(*shape) for shape in shapes]
                runs = whole(row.function, arrays, params, row.listed)
                yield from ((f"{row.name} {k}{how}", run) for how, run in runs.items())


@sg.fuse
def fused(x, y):
    return sg.sum(sg.exp(x.T) * y, axis=1)


@sg.fuse
def fused_pair(x, y):
    return sg.softmax(x * y), sg.sum(x * 2.0)


@sg.fuse
def fused_loss(x):
    return sg.sum(x * x)


def other_jobs():
    x, y = numbers(3, 4), numbers(4, 3)
    a, b = sg.asarray(x), sg.asarray(y)
    creation = {
        "asarray of a list": lambda: sg.asarray([[1, 2], [3, 4]]),
        "asarray of an array": lambda: sg.asarray(x, requires_grad=True),
        "asarray of a tensor": lambda: sg.asarray(a, dtype="float32", copy=True),
        "zeros": lambda: sg.zeros((3, 4), requires_grad=True),
        "ones": lambda: sg.ones((3, 4)),
        "full": lambda: sg.full((3, 4), 2.5),
        "arange": lambda: sg.arange(0.0, 5.0, 0.5),
        "linspace": lambda: sg.linspace(0.0, 1.0, 7),
        "eye": lambda: sg.eye(3, 4, k=1),
        "zeros_like": lambda: sg.zeros_like(x),
        "ones_like": lambda: sg.ones_like(a, dtype="float32"),
        "full_like": lambda: sg.full_like(a, 3.0),
    }
    yield from ((name, lambda make=make: [make()]) for name, make in creation.items())
    yield from ((f"fused{how}", run) for how, run in whole(fused, [x, y], {}, False).items())
    yield from ((f"fused, by an array{how}", run) for how, run in whole(lambda x: fused(x, y), [x], {}, False).items())
    yield "two fused results", lambda: list(fused_pair(x, x[0]))
    yield "value_and_grad of a fused function", lambda: list(sg.value_and_grad(fused_loss)(y))
    yield "grad of grad", lambda: [sg.grad(lambda x: sg.sum(sg.grad(lambda z: sg.sum(z * z * z))(x)))(x)]

    def pass_with(gradient, hook=None):
        v = sg.asarray(x, requires_grad=True)
        y = v * v * 2.0 + v * 3.0 + sg.reshape(v, (4, 3)).T * v[0, 0] + v  # sums from several rules, in place and not
        if hook:
            y.register_hook(hook)
        y.backward(gradient)
        y = v * 2.0
        y.backward(gradient)
        return [v.grad]

    yield "many sums", lambda: pass_with(a)
    yield "a gradient that is a list", lambda: pass_with([[1.0] * 4] * 3)
    yield "a gradient that is strided", lambda: pass_with(b.T)
    yield "a hook with a strided result", lambda: pass_with(a, lambda ct: b.T)

    def copied():
        v = sg.asarray(x, requires_grad=True)
        copies = [copy.copy(v), sg.asarray(a.__array__("float32")), sg.asarray(a.__array__(copy=True))]
        return [v.copy_(y.T), *copies]

    yield "copy_", copied
    for name, make in OPTIMISERS.items():
        yield f"steps of {name}", lambda make=make: optimised(make, x)
    wide = numbers(300, 200)
    yield "large, flat", lambda: large_pass(lambda x: sg.sum(sg.exp(x * x) * x + x), wide)
    yield "large, rows", lambda: large_pass(lambda x: sg.sum(x * x[0] + sg.softmax(x)), wide)
    yield "large, strided", lambda: large_pass(lambda x: sg.sum(sg.concat([x.T, x.T * x.T])[::2] @ x), wide)


OPTIMISERS = {
    "SGD": lambda params: sg.optim.SGD(params, 0.1),
    "SGD with momentum": lambda params: sg.optim.SGD(params, 0.1, momentum=0.5),
    "Adam": lambda params: sg.optim.Adam(params, 0.1),
    "AdamW": lambda params: sg.optim.AdamW(params, 0.1),
}


def optimised(make, x):
    """Two steps; the parameters, one of them strided, and the state."""
    params = [sg.asarray(x, requires_grad=True), sg.asarray(np.asarray(x[0]), requires_grad=True)]
    optimizer = make(params)
    for factor in (1.0, -2.0):
        for param in params:
            param.grad = sg.asarray(x.T if param.shape != (4,) else x[:1].T).T.reshape(param.shape) * factor
        optimizer.step()
    state = [sg.asarray(array) for arrays in optimizer._state for array in arrays]
    return [*(param.detach() for param in params), *state, sg.asarray(optimizer.steps)]


def large_pass(loss, array):
    x = sg.asarray(array, requires_grad=True)
    y = loss(x)
    y.backward()
    return [y, x.grad]


JOBS = dict([*elementwise_jobs(), *table_jobs(), *other_jobs()])


@pytest.mark.parametrize("name", JOBS)
def test_any_allocation_may_fail(name, sweeps):
    job = JOBS[name]
    job()  # compiles, and fills what is kept from call to call
    expected = seen(job())
    lent = settled()
    for k in itertools.count():
        fresh()
        sweeps.clear()
        with starved(range(k, k + 1)):
            found = job()
        assert_same(seen(found), expected, f"{name}, without allocation {k}")
        del found
        if starved.asked <= k:
            break
        assert sweeps in ([True], []), "one sweep, or none where NumPy did without the memory"
    for start in range(k):
        fresh()
        sweeps.clear()
        with starved(range(start, ALWAYS)), pytest.raises(sg.OutOfMemoryError, match=r"`[\w.]+( \w+)?` cannot get"):
            job()
        assert sweeps == [True]
        assert sg.is_grad_enabled()
    assert settled() == lent
    assert_same(seen(job()), expected, f"{name}, afterwards")
    sg.graph.audit()
    assert_free()


def fresh():
    """Leave no memory idle, on which the number of allocations would depend."""
    sg.sweep()
    pool.clear()


def settled():
    """Blocks that are lent when all that is dropped is gone."""
    sg.sweep()
    return pool.stats().lent_blocks


# --- what happens in between ------------------------------------------------------------------------------------------


def test_what_the_failed_attempt_made_is_dead_before_the_next(monkeypatch):
    """Two large cotangents of one rule are there when there is no memory for the counters of its kernel."""
    x, y = (sg.asarray(numbers(200, 300), requires_grad=True) for _ in range(2))
    gradient = sg.asarray(numbers(200, 300))
    z = x * y
    lent, found = settled(), []
    monkeypatch.setattr(shortage.graph, "sweep", lambda **how: found.append(pool.stats().lent_blocks))
    pool.clear()
    with starved(range(2, 3)):
        z.backward(gradient)
    assert starved.asked == 2 * 3
    assert found == [lent]
    np.testing.assert_array_equal(x.grad.numpy(), y.numpy() * gradient.numpy())


def test_no_reference_cycle_keeps_arrays_after_the_error():
    x = sg.asarray(numbers(200, 300), requires_grad=True)
    z, gradient = sg.sum(x * x * x, axis=0), sg.asarray(numbers(300))
    lent = settled()
    gc.collect()
    gc.disable()
    try:
        for k in range(4):
            with starved(range(k, ALWAYS)), contextlib.suppress(MemoryError):
                z.backward(gradient)
            assert settled() == lent
    finally:
        gc.enable()


def test_the_error_keeps_nothing_that_the_operation_made():
    x = sg.asarray(numbers(200, 300))
    sg.exp(x)
    lent = settled()
    pool.clear()
    with starved({1, 3}), pytest.raises(sg.OutOfMemoryError) as caught:  # both times after the result has been made
        sg.exp(x)
    assert settled() == lent
    assert caught.value.__traceback__ is not None


def test_orphans_cycles_and_the_pool_are_given_back():
    def orphans():
        x = sg.asarray(numbers(200, 300), requires_grad=True)
        ring = [x * x]
        ring.append(ring)

    idle = sg.asarray(numbers(200, 300)) * 2.0
    gc.collect()
    lent, swept = settled(), sg.graph.stats().swept
    gc.disable()
    try:
        orphans()
        del idle
        assert settled() == lent  # one idle; the one in the cycle is not found yet
        with starved(range(1)):
            result = sg.ones((3,))
    finally:
        gc.enable()
    assert result.tolist() == [1.0] * 3
    assert sg.graph.stats().swept == swept + 2
    assert pool.stats().lent_blocks == lent - 1
    assert pool.stats().idle_bytes == 0


def test_the_sweep_holds_no_lock_of_the_pool():
    locked = []

    def announced(phase, info):
        def attempt():
            free = pool._lock.acquire(timeout=10)
            locked.append(not free)
            if free:
                pool._lock.release()

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join(60)

    x = sg.asarray(numbers(200, 300))
    sg.exp(x)
    pool.clear()
    sg.graph.callbacks.append(announced)
    try:
        with starved(range(1)):
            sg.exp(x)
    finally:
        sg.graph.callbacks.remove(announced)
    assert locked == [False, False]


def test_a_finaliser_that_computes_while_memory_is_looked_for():
    """It runs out, too, within the sweep: it gets the error at once, rather than another sweep."""
    met = []

    class Late:
        def __init__(self):
            self.ring = self

        def __del__(self):
            try:
                sg.ones((3,))
            except MemoryError as error:
                met.append(isinstance(error, sg.OutOfMemoryError))

    Late()
    with starved(ALL), pytest.raises(sg.OutOfMemoryError):
        sg.zeros((4,))
    assert met == [False]
    assert not shortage._state.trying


def test_another_thread_looks_for_memory_of_its_own(monkeypatch):
    """Each thread has its own second attempt, also while another is at its."""
    made, sweeps = [], []

    def other():
        with starved_elsewhere(range(1)):
            made.append(sg.ones((3,)).tolist())

    def sweep(**how):
        sweeps.append(threading.current_thread().name)
        if len(sweeps) == 1:
            thread = threading.Thread(target=other, name="other")
            thread.start()
            thread.join(60)

    starved_elsewhere = Starved()
    monkeypatch.setattr(shortage.graph, "sweep", sweep)
    with starved(range(1)):
        made.append(sg.zeros((2,)).tolist())
    assert made == [[1.0] * 3, [0.0] * 2]
    assert sweeps == [threading.current_thread().name, "other"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_sweep_that_raises(monkeypatch, error):
    """Short memory within the sweep ends the sweep; an interrupt ends the operation. Neither ends later attempts."""
    raised = []

    def sweep(**how):
        raised.append(error)
        raise error

    monkeypatch.setattr(shortage.graph, "sweep", sweep)
    with starved(range(1)), pytest.raises(error) if error is KeyboardInterrupt else contextlib.nullcontext():
        assert sg.ones((3,)).tolist() == [1.0] * 3
    monkeypatch.undo()
    assert raised == [error]
    with starved(range(1)):
        assert sg.ones((3,)).tolist() == [1.0] * 3


def test_a_hook_is_called_once(sweeps):
    x = sg.asarray(numbers(3, 4), requires_grad=True)
    gradient = sg.asarray(numbers(3, 4))

    def run(fails):
        calls.clear()
        y = x * x
        y.register_hook(lambda ct: calls.append(1))
        z = y * y + y
        with starved(fails):
            z.backward(gradient)

    calls = []
    for k in range(20):
        run(range(k, k + 1))
        assert calls == [1]
        if starved.asked <= k:
            break
    assert k > 3


def test_a_pass_that_fails_changes_nothing(sweeps):
    x = sg.asarray(numbers(3, 4), requires_grad=True)
    gradient = sg.asarray(numbers(3, 4))
    (x * 1.0).backward(gradient)
    before = x.grad
    y = x * x * 2.0 + sg.softmax(x) * x
    for k in range(100):
        try:
            with starved(range(k, ALWAYS)):
                y.backward(gradient)
        except sg.OutOfMemoryError:
            assert x.grad is before
            sg.graph.audit()
        else:
            break
    assert k > 5
    v = sg.asarray(x.numpy(), requires_grad=True)
    (v * 1.0).backward(gradient)
    (v * v * 2.0 + sg.softmax(v) * v).backward(gradient)
    np.testing.assert_array_equal(x.grad.numpy(), v.grad.numpy())


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_step_that_fails_changes_nothing_of_its_parameter(name, sweeps):
    """And may be tried again: numbers of steps and running means are those of the steps that were made."""
    given = sg.asarray(numbers(3, 4)).T  # which has to be copied first

    def trained(fails):
        param = sg.asarray(numbers(4, 3), requires_grad=True)
        optimizer = OPTIMISERS[name]([param])
        param.grad = given
        for k in range(3):
            optimizer.step()
            for start in fails:
                before = param.numpy().copy()
                with starved(range(start, ALWAYS)), pytest.raises(sg.OutOfMemoryError, match=r"`\w+\.step`|`cont"):
                    optimizer.step()
                np.testing.assert_array_equal(param.numpy(), before)
                assert optimizer.steps == [k + 1]
        return param.numpy()

    np.testing.assert_array_equal(trained(range(2)), trained([]))


def test_allocations_within_numpy_are_seen_too():
    """Of which the table above is made: an index array is copied, and then more is asked for."""
    x = sg.asarray(numbers(3, 4))
    with starved(NONE):
        x[np.array([[0, 1]])]
    assert starved.asked >= 2


# --- what the error says ----------------------------------------------------------------------------------------------


def test_the_message(sweeps):
    sg.sweep(collect_cycles=True)
    x = sg.asarray(numbers(100, 100), requires_grad=True)
    held = [sg.exp(x), sg.sin(x), sg.sin(x), sg.sin(x), sg.tanh(x[:1]), sg.log(x[:2])]
    with starved(ALL), pytest.raises(MemoryError) as caught:
        sg.ones((1024, 1024))
    text = str(caught.value)
    assert text.startswith("`ones` cannot get 8.0 MiB, although orphans were swept and the pools were emptied. Graph: ")
    assert str(sg.graph.stats()) in text
    assert (
        "most is saved by `sin` (234.4 KiB in 3 nodes), `exp` (78.1 KiB in 1 node), `log` (1.6 KiB in 1 node)." in text
    )
    assert f"Pool: {sg.pool.stats()}. Drop tensors" in text
    assert "`no_grad`" in text
    assert held


def test_the_message_names_the_innermost_operation():
    x = sg.asarray(numbers(3, 4), requires_grad=True)
    y, gradient, seen = sg.matmul(x, x.T), sg.ones((3, 3)), {}
    for name, call in {
        "matmul": lambda: sg.tensordot(x, x, axes=((1,), (1,))),
        "multiply": lambda: x * 2.0,
        "asarray": lambda: sg.asarray([1.0, 2.0]),
        "getitem": lambda: x[[0, 1]],
        "fused_loss": lambda: fused_loss(x),
        "copy_": lambda: x.copy_(0.0),
    }.items():
        with starved(ALL), pytest.raises(sg.OutOfMemoryError) as caught:
            call()
        seen[name] = str(caught.value).split("`")[1]
    assert seen == {name: name for name in seen}
    with starved(ALL), pytest.raises(sg.OutOfMemoryError, match="`matmul` cannot get"):
        y.backward(gradient)


def test_an_error_in_the_middle_of_the_message(monkeypatch):
    """There may be no memory even for that: then what is known is said."""

    def short(*_):
        raise MemoryError

    for name in ("report.stats", "_holders", "pool.stats"):
        with monkeypatch.context() as patch:
            target = shortage
            *path, last = name.split(".")
            for part in path:
                target = getattr(target, part)
            patch.setattr(target, last, short)
            with starved(ALL), pytest.raises(sg.OutOfMemoryError) as caught:
                sg.ones((2,))
        assert str(caught.value) == "`ones` cannot get 16 B, although orphans were swept and the pools were emptied"


def test_a_memory_error_that_does_not_tell_how_much(sweeps):
    """As from NumPy's own working memory, or from an array that a user's object makes."""

    class Array:
        def __array__(self, dtype=None, copy=None):
            calls.append(1)
            raise MemoryError

    calls = []
    with pytest.raises(sg.OutOfMemoryError, match="`asarray` cannot get memory, although"):
        sg.asarray(Array())
    assert len(calls) == 2


@pytest.mark.parametrize("call", [lambda: sg.ones((1 << 44,)), lambda: sg.asarray(0.0) * np.broadcast_to(1.0, 1 << 44)])
def test_more_than_any_machine_has(call):
    with pytest.raises(sg.OutOfMemoryError, match=r"cannot get 128\.0 TiB"):
        call()
    assert sg.ones((3,)).tolist() == [1.0] * 3


# --- a process with a limit -------------------------------------------------------------------------------------------

LIMITED = """
import gc, resource
import numpy as np
import sweepgrad as sg
from sweepgrad.kernels.buffers import pool

HARD = resource.getrlimit(resource.RLIMIT_AS)[1]
ROOM = 2 << 20  # for what is small; the arrays below have 4.5 MiB, or 2.25 in float32
N = 768
sg.set_num_threads(1)
sg.graph.set_threshold(nodes=1 << 40, bytes=1 << 50)
sg.pool.set_limit("1GiB")
gc.disable()

def limit(room=None):
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (HARD if room is None else used + room, HARD))

def clean():
    v.grad = None
    gc.collect()
    sg.sweep()
    sg.pool.empty()

def audit():
    gc.unfreeze()
    sg.graph.audit()
    gc.freeze()  # what is alive, so that to look for cycles takes no time

# Each holds 64 MiB, which nothing writes to, so that the system need not find it.
row = sg.ones((1, 4096), requires_grad=True)

def orphans():
    for _ in range(8):
        row @ sg.zeros((4096, 256))

def cycles():
    for _ in range(8):
        ring = [row @ sg.zeros((4096, 256))]
        ring.append(ring)

def idle():
    lent = [pool.new(4 << 20, np.dtype(float)) for _ in range(2)]

rng = np.random.default_rng(0)
a, b = (rng.uniform(0.5, 2.0, (N, N)) for _ in range(2))
thin = sg.asarray(a[:, :4], requires_grad=True)
x, y, v, target = sg.asarray(a), sg.asarray(b), sg.asarray(a, requires_grad=True), sg.asarray(a)
whole, mask, ints = sg.asarray(np.arange(N * N)), a > 0.75, rng.integers(0, N, N)
fused = sg.fuse(lambda x, y: sg.exp(x) * y - x)

def backward(f, gradient=y, **how):
    def prepare():
        z = f(v)
        def run():
            z.backward(gradient, retain_graph=True, **how)
            return v.grad
        return run
    return prepare

def step(make):
    def prepare():
        p = sg.asarray(a, requires_grad=True)
        p.grad = y
        optimizer = make([p])
        return lambda: optimizer.step() or p.detach()
    return prepare

OPERATIONS = {
    "tensors": lambda: x * y,
    "tracked": lambda: v * y,
    "one": lambda: sg.exp(v),
    "number": lambda: x + 2.0,
    "array": lambda: a * v,
    "rows": lambda: v * x[0],
    "columns": lambda: v * x[:, :1],
    "strided": lambda: v * x.T,
    "where": lambda: sg.where(mask, x, 0.0),
    "integers": lambda: whole * 2,
    "conversion": lambda: x * whole.reshape((N, N)),
    "sum of strided": lambda: sg.sum(v[:, :-20]),
    "mean of float32": lambda: sg.mean(x.astype("float32"), axis=0),
    "var": lambda: sg.var(x.T[:, :-20], axis=1, keepdims=True) * x,
    "softmax": lambda: sg.softmax(v, axis=-1),
    "fuse": lambda: fused(v, y),
    "fuse, copied": lambda: fused(x.T, v),
    "matmul": lambda: thin @ x[:4],
    "tensordot": lambda: sg.tensordot(thin, x[:4], axes=1),
    "concat": lambda: sg.concat([x, v]),
    "stack": lambda: sg.stack([x, v], axis=1),
    "roll": lambda: sg.roll(v, 3, axis=1),
    "flip": lambda: sg.exp(sg.flip(v)),
    "transposed": lambda: sg.reshape(v.T, (-1,)),
    "broadcast": lambda: sg.reshape(sg.broadcast_to(v[0], (N, N)), (-1,)),
    "astype": lambda: v.astype("float32"),
    "take": lambda: sg.take(v, ints, axis=0),
    "getitem": lambda: v[ints],
    "getitem by a mask": lambda: v[mask],
    "zeros": lambda: sg.zeros((N, N)),
    "ones": lambda: sg.ones((N, N), requires_grad=True),
    "full": lambda: sg.full((N, N), 2.0),
    "full_like": lambda: sg.full_like(x, 2.0),
    "arange": lambda: sg.arange(0.0, float(N * N)),
    "linspace": lambda: sg.linspace(0.0, 1.0, N * N),
    "eye": lambda: sg.eye(N),
    "asarray": lambda: sg.asarray(a, requires_grad=True),
    "asarray in float32": lambda: sg.asarray(a, dtype="float32"),
    "copy_": lambda: target.copy_(x.T),
    "numpy": lambda: sg.asarray(np.asarray(x, dtype="float32")),
    "grad": lambda: sg.grad(lambda x: sg.sum(x * y))(a),
    "value_and_grad": lambda: sg.value_and_grad(sg.fuse(lambda x, y: sg.sum(sg.sin(x) * y)))(x, y)[1],
}
PREPARED = {name: lambda f=f: f for name, f in OPERATIONS.items()} | {
    "backward": backward(lambda v: v * y),
    "backward of two": backward(lambda v: (v * y) * (v + y)),
    "backward with sums": backward(lambda v: v * v * y + sg.reshape(v.T, (N, N)) + v),
    "backward of rows": backward(lambda v: v[0] * v),
    "backward of strided": backward(lambda v: v.T * y),
    "backward of a product": backward(lambda v: v[:, :4] @ x[:4]),
    "backward of getitem": backward(lambda v: v[:3], y[:3]),
    "backward of take": backward(lambda v: v[ints]),
    "backward of a sum": backward(lambda v: sg.sum(v, axis=0), y[0]),
    "backward of a maximum": backward(lambda v: sg.max(v, axis=0), y[0]),
    "backward of softmax": backward(sg.softmax),
    "backward of fused": backward(lambda v: fused(v, y)),
    "backward with create_graph": backward(lambda v: v * y, create_graph=True),
    "backward of an array": backward(lambda v: v * y, b),
    "backward of a strided gradient": backward(lambda v: v + y, x.T),
    "SGD": step(lambda params: sg.optim.SGD(params, 0.1)),
    "Adam": step(lambda params: sg.optim.Adam(params, 0.1)),
}

for prepare in PREPARED.values():  # compiles
    prepare()()
gc.collect()
gc.freeze()

for name, prepare in PREPARED.items():
    clean()
    expected = prepare()().numpy().copy()
    for fill in (orphans, cycles, idle):
        run = prepare()
        clean()
        before = sg.graph.stats()
        fill()
        limit(ROOM)
        try:
            result = run()
        except MemoryError as error:
            limit()
            raise AssertionError(f"{name} among {fill.__name__}: {error!r}") from None
        limit()
        freed = sg.graph.stats().swept - before.swept >= 8 if fill is not idle else pool.stats().idle_bytes < 32 << 20
        assert freed, f"{name} among {fill.__name__} had enough memory"
        assert np.array_equal(result.numpy(), expected), f"{name} among {fill.__name__}"
        del result, run
    clean()
    audit()

held = [row @ sg.zeros((4096, 256)) for _ in range(8)]  # live, so that no sweep helps
for name, prepare in PREPARED.items():
    run = prepare()
    clean()
    limit(ROOM)
    try:
        run()
    except sg.OutOfMemoryError as error:
        message = str(error)
    else:
        raise AssertionError(f"{name} had enough memory")
    finally:
        limit()
    assert "although orphans were swept" in message and "most is saved by `matmul` (6" in message, message
    assert v.grad is None
    run()
    del run
    sg.sweep()
    audit()
print("done")
"""


def test_orphans_and_the_pool_make_room_for_every_kind_of_operation():
    pytest.importorskip("resource", reason="this system sets no limits")
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux keeps to a limit on addresses, and tells how many there are")
    # Large blocks come from the system one by one and go back to it, and no thread has memory of its own.
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    settings |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")
    assert quiet(LIMITED, settings=settings, limit=240) == "done\n"  # it compiles some sixty kernels
