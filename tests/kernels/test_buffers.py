"""The pool of buffers: no memory is lent twice, whatever keeps it alive, and it comes back once nothing does."""

import contextlib
import copy
import ctypes
import gc
import os
import pickle
import random
import sys
import textwrap
import threading
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

import sweepgrad as sg
from launch import python
from sweepgrad import config
from sweepgrad.errors import ArgumentError
from sweepgrad.graph import process, report
from sweepgrad.kernels import buffers
from sweepgrad.kernels.buffers import ALIGNMENT, POOLED_FROM, Pool, PoolStats

BYTE, FLOAT = np.dtype(np.uint8), np.dtype(np.float64)
SIZE = POOLED_FROM // 8  # float64 elements of the smallest pooled array


def address(array):
    return array.ctypes.data


def counts(pool):
    found = pool.stats()
    return found.idle_blocks, found.lent_blocks


@pytest.fixture
def pool():
    pool = Pool(1 << 30)
    yield pool
    gc.collect()
    found = pool.stats()
    assert found.lent_blocks == found.lent_bytes == 0
    assert found.idle_bytes == sum(block.size for blocks in pool._idle.values() for block in blocks)
    pool.limit = 0
    assert counts(pool) == (0, 0)


# --- what is handed out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "int32", "uint32", "float32", "int64", "float64"])
@pytest.mark.parametrize("nbytes", [0, 8, POOLED_FROM - 8, POOLED_FROM, POOLED_FROM + 8, 5 * POOLED_FROM - 8])
def test_arrays_are_flat_contiguous_and_writable(pool, dtype, nbytes):
    dtype = np.dtype(dtype)
    size = nbytes // dtype.itemsize
    for _ in range(2):  # a miss and a hit
        array = pool.new(size, dtype)
        assert type(array) is np.ndarray
        assert (array.shape, array.dtype, array.nbytes) == ((size,), dtype, nbytes)
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.flags.aligned
        array.fill(1)
        assert array.all()
        assert pool.stats().lent_blocks == (nbytes >= POOLED_FROM)
        if nbytes >= POOLED_FROM:
            assert address(array) % ALIGNMENT == 0
        del array


def test_dtypes_share_blocks(pool):
    first = pool.new(SIZE, FLOAT)
    place = address(first)
    del first
    assert address(pool.new(2 * SIZE, np.dtype(np.float32))) == place
    assert address(pool.new(8 * SIZE, np.dtype(bool))) == place
    assert pool.stats().misses == 1


def test_blocks_are_at_most_an_eighth_larger(pool):
    sizes = set()
    rng = random.Random(0)
    edges = [POOLED_FROM, POOLED_FROM + 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 9 << 17, (9 << 17) + 1]
    for nbytes in edges + [POOLED_FROM + rng.randrange(1 << 24) for _ in range(100)]:
        array = pool.new(nbytes, BYTE)
        size = pool.stats().lent_bytes
        assert nbytes <= size <= nbytes * 1.125
        sizes.add(size)
        del array
    assert (1 << 20) in sizes


@pytest.mark.parametrize("size", [-1, -SIZE])
def test_negative_size_is_refused_as_numpy_does(pool, size):
    with pytest.raises(ValueError, match="negative"):
        pool.new(size, FLOAT)


def test_last_returned_is_first_reused(pool):
    arrays = [pool.new(SIZE, FLOAT) for _ in range(3)]
    places = [address(array) for array in arrays]
    for k in (1, 0, 2):
        arrays[k] = None
    again = [pool.new(SIZE, FLOAT) for _ in range(3)]
    assert [address(array) for array in again] == [places[2], places[0], places[1]]
    assert (pool.stats().hits, pool.stats().misses) == (3, 3)


# --- what keeps a block lent ------------------------------------------------------------------------------------------


class Resurrected:
    """Comes back to life when it dies, once, with the array it holds."""

    saved: ClassVar = deque()

    def __init__(self, array):
        self.array = array
        self.me = self  # so that only the collector finds it

    def __del__(self):
        self.saved.append(self.array)


def resurrect(array):
    Resurrected.saved.clear()
    Resurrected(array)
    del array
    gc.collect()
    return Resurrected.saved.pop()


class Subclass(np.ndarray):
    saved: ClassVar = deque()

    def __del__(self):
        if not hasattr(self, "again"):
            self.again = True
            Subclass.saved.append(self)


def resurrect_subclass(array):
    view = array.view(Subclass)
    view.cycle = view
    del array, view
    gc.collect()
    kept = list(Subclass.saved)
    Subclass.saved.clear()
    return kept


def torch_tensor(array):
    return pytest.importorskip("torch").from_numpy(array)


def torch_slice(array):
    return torch_tensor(array)[5:10]


def torch_dlpack(array):
    return pytest.importorskip("torch").from_dlpack(array)


def ctypes_pointer(array):
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_double))


class Interface:
    def __init__(self, array):
        self.array = array
        self.__array_interface__ = array.__array_interface__


def innermost(array):
    """What a program gets that looks for an array's owner."""
    while getattr(array, "base", None) is not None:
        array = array.base
    return array


KEEPERS = {
    "array": lambda a: a,
    "slice": lambda a: a[3:7],
    "slice of a slice": lambda a: a[3:][4:][::2],
    "reshaped": lambda a: a.reshape(2, -1).T,
    "other dtype": lambda a: a[8:].view(np.uint8),
    "0-d": lambda a: a[:1].reshape(()),
    "broadcast": lambda a: np.broadcast_to(a[1:2], (5, 5)),
    "as_strided": lambda a: np.lib.stride_tricks.as_strided(a, (3, 3), (8, 8)),
    "asarray of a slice": lambda a: np.asarray(a[5:]),
    "frombuffer": lambda a: np.frombuffer(a, np.uint8)[10:],
    "ndarray over it": lambda a: np.ndarray((5,), FLOAT, a)[1:],
    "recarray": lambda a: a.view(np.recarray),
    "view of a recarray": lambda a: a.view(np.recarray)[2:].view(np.ndarray),
    "masked": lambda a: np.ma.MaskedArray(a),
    "real": lambda a: a.view(np.complex128).real,
    "flat iterator": lambda a: a.flat,
    "nditer": lambda a: np.nditer(a),
    "memoryview": lambda a: memoryview(a),
    "memoryview slice": lambda a: memoryview(a)[10:][5:],
    "memoryview cast": lambda a: memoryview(a).cast("B")[1:],
    "data": lambda a: a.data,
    "base": lambda a: a.base,
    "slice of base": lambda a: a.base[10:],
    "array of base": lambda a: np.asarray(a.base)[10:],
    "ndarray over base": lambda a: np.ndarray((5,), FLOAT, a.base)[1:],
    "base of a slice": lambda a: a[5:].base,
    "owner": innermost,
    "owner's object": lambda a: innermost(a).obj,
    "slice of the owner's object": lambda a: innermost(a).obj[10:],
    "ufunc out": lambda a: np.negative(a, out=a),
    "ufunc out slice": lambda a: np.negative(a[5:], out=a[5:]),
    "array interface": lambda a: np.asarray(Interface(a))[2:],
    "array struct": lambda a: a.__array_struct__,
    "dlpack capsule": lambda a: a.__dlpack__(),
    "dlpack": lambda a: np.from_dlpack(a)[3:],
    "pickle out of band": lambda a: pickle.PickleBuffer(a),
    "pickled out of band": lambda a: _out_of_band(a),
    "ctypes object": lambda a: a.ctypes,
    "ctypes pointer": ctypes_pointer,
    "ctypes array": lambda a: np.ctypeslib.as_ctypes(a),
    "ctypes from_buffer": lambda a: (ctypes.c_char * 100).from_buffer(a),
    "bytes reader": lambda a: memoryview(memoryview(a[2:])),
    "torch": torch_tensor,
    "torch slice": torch_slice,
    "torch dlpack": torch_dlpack,
    "shallow copy of a list": lambda a: copy.copy([a]),
    "object array": lambda a: np.array([a, None], dtype=object)[:1],
    "resurrected": resurrect,
    "resurrected subclass": resurrect_subclass,
}


def _out_of_band(array):
    parts = []
    data = pickle.dumps(array, protocol=5, buffer_callback=parts.append)
    return pickle.loads(data, buffers=parts)


@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS)
def test_block_stays_lent_while_anything_refers_to_it(pool, keep):
    array = pool.new(SIZE, FLOAT)
    array.fill(7.0)
    place = address(array)
    handed = [array]
    del array
    kept = keep(handed.pop())
    gc.collect()
    assert counts(pool) == (0, 1)
    other = pool.new(SIZE, FLOAT)
    assert address(other) != place
    del other
    del kept
    gc.collect()
    assert counts(pool) == (2, 0)
    assert address(pool.new(SIZE, FLOAT)) in (place, address(pool.new(SIZE, FLOAT)))


COPIES = {
    "copy": lambda a: a.copy(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda a: pickle.loads(pickle.dumps(a)),
    "tobytes": lambda a: a.tobytes(),
    "fancy": lambda a: a[[1, 2]],
    "item": lambda a: a[3],
}


@pytest.mark.parametrize("take", COPIES.values(), ids=COPIES)
def test_copies_do_not_keep_a_block(pool, take):
    array = pool.new(SIZE, FLOAT)
    array.fill(7.0)
    kept = take(array)
    del array
    assert counts(pool) == (1, 0)
    del kept


def test_array_in_a_dead_cycle_comes_back_when_the_collector_frees_it(pool):
    gc.disable()
    try:
        cycle = [pool.new(SIZE, FLOAT)[1:]]
        cycle.append(cycle)
        del cycle
        assert counts(pool) == (0, 1)
        gc.collect()
        assert counts(pool) == (1, 0)
    finally:
        gc.enable()


def test_block_in_use_survives_the_pool():
    pool = Pool(1 << 30)
    array = pool.new(SIZE, FLOAT)
    array.fill(3.0)
    idle = pool.new(SIZE, FLOAT)
    del idle
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    [np.full(SIZE, 1.0) for _ in range(20)]
    assert (array == 3.0).all()


# --- random schedules -------------------------------------------------------------------------------------------------


EXPORTS = {  # never of length 0
    "half": lambda a: a[len(a) // 2 :],
    "memoryview": lambda a: memoryview(a)[len(a) // 2 :],
    "base": lambda a: a.base if isinstance(a.base, (np.ndarray, memoryview)) else a,
    "bytes": lambda a: np.frombuffer(a, np.uint8),
    "dlpack": np.from_dlpack,
}


class Schedule(RuleBasedStateMachine):
    """Allocates, views, exports and drops in any order; each living block keeps its own pattern."""

    owners = Bundle("owners")

    def __init__(self):
        super().__init__()
        self.pool = Pool(1 << 30)
        self.holders = {}  # holder: (what is held, pattern, bytes of the array)
        self.number = 0

    def hold(self, thing, pattern):
        self.number += 1
        self.holders[self.number] = (thing, pattern)
        return self.number

    @initialize(blocks=st.integers(0, 12))
    def limit(self, blocks):
        self.pool.limit = blocks * POOLED_FROM

    @rule(target=owners, steps=st.integers(0, 3), dtype=st.sampled_from(["u1", "f4", "f8"]))
    def allocate(self, steps, dtype):
        dtype = np.dtype(dtype)
        array = self.pool.new((POOLED_FROM + steps * POOLED_FROM // 16) // dtype.itemsize, dtype)
        pattern = self.number % 251 + 1
        np.frombuffer(array.base, np.uint8)[:] = pattern  # the whole block, of which `base` is a view
        return self.hold(array, pattern)

    @rule(target=owners, owner=owners, keep=st.sampled_from(["half", "memoryview", "base", "bytes", "dlpack"]))
    def export(self, owner, keep):
        if owner not in self.holders:
            return multiple()
        thing, pattern = self.holders[owner]
        return self.hold(EXPORTS[keep](np.asarray(thing)), pattern)

    @rule(owner=consumes(owners))
    def drop(self, owner):
        self.holders.pop(owner, None)

    @rule(owner=consumes(owners))
    def drop_in_a_cycle(self, owner):
        cycle = [self.holders.pop(owner, None)]
        cycle.append(cycle)

    @rule(blocks=st.integers(0, 12))
    def set_limit(self, blocks):
        self.pool.limit = blocks * POOLED_FROM

    @rule()
    def clear(self):
        before = self.pool.stats().idle_bytes
        assert self.pool.clear() == before

    @rule()
    def collect(self):
        gc.collect()

    @invariant()
    def nothing_changed(self):
        for thing, pattern in self.holders.values():
            view = np.asarray(thing).view(np.uint8)
            assert view[0] == view[-1] == pattern
            assert (view[:: max(1, len(view) // 500)] == pattern).all()
        assert self.pool.stats().idle_bytes <= self.pool.limit

    def teardown(self):
        self.holders.clear()
        gc.collect()
        assert self.pool.stats().lent_blocks == 0


Schedule.TestCase.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
TestSchedules = Schedule.TestCase


def hammer(pool, seed, rounds, mailbox):
    """Allocate and drop; now and then swap an array with another thread's, which then drops it."""
    rng = random.Random(seed)
    living = []
    for number in range(rounds):
        pattern = seed * rounds + number
        array = pool.new(SIZE + rng.randrange(2) * SIZE // 8, FLOAT)
        array[:: SIZE // 8] = pattern
        living.append((array if rng.random() < 0.5 else array[: SIZE // 2 + 1], pattern))
        if rng.random() < 0.3:
            mailbox.append(living.pop(rng.randrange(len(living))))
            with contextlib.suppress(IndexError):  # another thread was quicker
                living.append(mailbox.pop(0))
        for kept, expected in living:
            assert (kept[:: SIZE // 8] == expected).all()
        while len(living) > rng.randrange(1, 8):
            del living[rng.randrange(len(living))]
        if rng.random() < 0.02:
            pool.clear()
        if rng.random() < 0.02:
            pool.limit = rng.randrange(12) * POOLED_FROM


def test_threads_never_share_a_block(pool):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        mailbox = []
        with ThreadPoolExecutor(8) as executor:
            tasks = [executor.submit(hammer, pool, seed, 400, mailbox) for seed in range(8)]
            for task in tasks:
                task.result(timeout=120)
    finally:
        sys.setswitchinterval(interval)
    mailbox.clear()


# --- returning at any point -------------------------------------------------------------------------------------------


class Computes:
    """Allocates from the pool when the garbage collector finds it, and keeps an eye on what it got."""

    def __init__(self, pool, log):
        self.cycle = self
        self.pool, self.log = pool, log
        self.held = pool.new(SIZE, FLOAT)

    def __del__(self):
        array = self.pool.new(SIZE, FLOAT)
        self.log.append(array)
        if len(self.log) > 5:
            self.log.clear()


def test_finalisers_return_and_allocate_while_the_lock_is_held(pool):
    log, living = [], []
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for number in range(300):
            Computes(pool, log)
            array = pool.new(SIZE, FLOAT)
            array[:: SIZE // 8] = number
            living.append((array, number))
            if len(living) > 4:
                del living[0]
            assert all((kept[:: SIZE // 8] == expected).all() for kept, expected in living)
            # Held while they are compared: a finaliser may clear the log meanwhile, and its blocks be lent again.
            held = [kept for kept, _ in living] + log
            assert len({address(kept) for kept in held}) == len(held)
            del held
    finally:
        gc.set_threshold(*threshold)
    living.clear()
    gc.collect()
    log.clear()


def test_block_returns_while_its_own_thread_holds_the_lock(pool):
    array = pool.new(SIZE, FLOAT)
    with pool._lock:
        del array
        assert len(pool._returned) == 1
    assert counts(pool) == (1, 0)


def test_block_returns_while_another_thread_holds_the_lock(pool):
    array = [pool.new(SIZE, FLOAT)]
    with pool._lock:
        thread = threading.Thread(target=array.clear)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    assert counts(pool) == (1, 0)


def test_call_within_the_pools_own_work_goes_past_it(pool):
    idle = pool.new(SIZE, FLOAT)
    del idle
    assert counts(pool) == (1, 0)
    pool._busy = True  # as for a finaliser that runs in `_tidy`
    array = pool.new(SIZE, FLOAT)
    pool._busy = False
    assert address(array) % ALIGNMENT == 0
    assert counts(pool) == (1, 0)


def test_interrupted_return_is_completed_by_the_next(pool):
    class Interrupted(dict):
        armed = True

        def __delitem__(self, key):
            super().__delitem__(key)
            if Interrupted.armed:
                Interrupted.armed = False
                raise KeyboardInterrupt

    pool._lent = Interrupted()
    arrays = [pool.new(SIZE, FLOAT) for _ in range(3)]
    arrays.clear()
    with pytest.raises(KeyboardInterrupt):
        pool.stats()
    assert not pool._busy
    assert counts(pool) == (2, 0)  # the one that was interrupted is lost to the pool


# --- the limit --------------------------------------------------------------------------------------------------------


def test_oldest_idle_blocks_are_freed_beyond_the_limit(pool):
    pool.limit = 3 * POOLED_FROM
    arrays = [pool.new(SIZE, FLOAT) for _ in range(5)]
    places = [address(array) for array in arrays]
    for k in (4, 0, 3, 1, 2):
        arrays[k] = None
    assert pool.stats().idle_bytes == 3 * POOLED_FROM
    assert [address(block) for block in map(np.asarray, _idle(pool))] == [places[3], places[1], places[2]]


def _idle(pool):
    return [block.memory for blocks in pool._idle.values() for block in blocks]


def test_oldest_is_found_across_sizes(pool):
    pool.limit = 6 * POOLED_FROM
    first, second, third = (pool.new(k * SIZE, FLOAT) for k in (1, 2, 4))
    del second
    del first
    del third
    assert pool.stats().idle_blocks == 2
    assert sorted(memory.nbytes for memory in _idle(pool)) == [POOLED_FROM, 4 * POOLED_FROM]


def test_limit_holds_at_the_next_small_array_too(pool):
    pool.limit = POOLED_FROM
    arrays = [pool.new(SIZE, FLOAT) for _ in range(3)]
    arrays.clear()
    pool.new(1, FLOAT)
    assert pool._idle_bytes == POOLED_FROM


def test_lowering_the_limit_frees(pool):
    arrays = [pool.new(SIZE, FLOAT) for _ in range(4)]
    arrays.clear()
    assert pool.stats().idle_blocks == 4
    pool.limit = 2 * POOLED_FROM
    assert pool._idle_bytes == 2 * POOLED_FROM
    assert pool.clear() == 2 * POOLED_FROM
    assert pool.clear() == 0


def test_block_larger_than_the_limit_does_not_push_out_others(pool):
    large, small = pool.new(8 * SIZE, FLOAT), pool.new(SIZE, FLOAT)
    pool.limit = 4 * POOLED_FROM
    del small, large
    assert pool.stats().idle_bytes == POOLED_FROM
    array = pool.new(8 * SIZE, FLOAT)
    assert address(array) % ALIGNMENT == 0
    assert counts(pool) == (1, 0)


def test_limit_zero_turns_the_pool_off(pool):
    pool.limit = 0
    array = pool.new(SIZE, FLOAT)
    array.fill(1.0)
    assert address(array) % ALIGNMENT == 0
    del array
    assert str(pool.stats()) == "0 B idle in 0 blocks, 0 B lent in 0 blocks; 0 hits, 0 misses; limit 0 B"


def test_freed_memory_goes_back_to_the_system():
    resource = pytest.importorskip("resource")
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("this system does not tell")

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    pool = Pool(1 << 30)
    before = resident()
    pool.new(8 << 20, FLOAT).fill(1.0)
    assert resident() > before + (48 << 20)
    assert pool.clear() == 64 << 20
    assert resident() < before + (16 << 20)


# --- memory runs short ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 2 * SIZE])
def test_without_memory_the_pool_stays_as_it_was(pool, monkeypatch, size):
    idle, held = pool.new(4 * SIZE, FLOAT), pool.new(SIZE, FLOAT)
    del idle
    before = pool.stats()

    def short(size, dtype):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(buffers.np, "empty", short)
        with pytest.raises(MemoryError):
            pool.new(size, FLOAT)
        assert pool.new(4 * SIZE, FLOAT).size == 4 * SIZE  # which waited there
    after = pool.stats()
    assert (after.idle_bytes, after.lent_bytes) == (before.idle_bytes, before.lent_bytes)
    assert pool.new(size, FLOAT).size == size
    assert held.size == SIZE


# --- fork, exit -------------------------------------------------------------------------------------------------------

FORK = """
import os, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import numpy as np
from sweepgrad.kernels import buffers
F, n = np.dtype(float), 1 << 16
pool = buffers.pool
idle = pool.new(n, F)
late = pool.new(n, F)
kept = pool.new(n, F)
kept.fill(5.0)
del idle
pool.stats()
held, end = threading.Event(), threading.Event()

def hold():
    with pool._lock:
        pool._busy = True
        held.set()
        end.wait(60)
        pool._busy = False

thread = threading.Thread(target=hold, daemon=True)
thread.start()
held.wait()
del late
pid = os.fork()
if pid == 0:
    found = pool.stats()
    assert (found.idle_blocks, found.lent_blocks, found.hits) == (0, 0, 0), found
    arrays = [pool.new(n, F) for _ in range(3)]
    for k, array in enumerate(arrays):
        array.fill(k)
    assert (kept == 5.0).all()
    del kept
    assert pool.stats().lent_blocks == 3
    del array
    arrays.clear()
    assert pool.stats().idle_blocks == 3
    os._exit(0)
status = os.waitpid(pid, 0)[1]
end.set()
thread.join()
assert pool.stats().lent_blocks == 1 and pool.stats().idle_blocks == 2, pool.stats()
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_forked_child_begins_with_an_empty_pool():
    done = python("-c", textwrap.dedent(FORK))
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_arrays_may_die_at_exit():
    code = """
import atexit, gc
import numpy as np
from sweepgrad.kernels import buffers
class Late:
    def __init__(self, array):
        self.array, self.me = array, self
    def __del__(self):
        assert (self.array == 5.0).all()
for _ in range(3):
    array = buffers.empty(1 << 16, np.dtype(float))
    array.fill(5.0)
    late = Late(array[1:])
atexit.register(lambda kept: None, array)
"""
    done = python("-X", "dev", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")


# --- settings and the public functions --------------------------------------------------------------------------------

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("0", 0), ("off", 0), (" OFF ", 0), ("0MB", 0), ("0.0 GiB", 0), (0, 0), ("1048576", MIB), ("10b", 10),
        ("256MB", 256_000_000), ("256mb", 256_000_000), ("256 MiB", 256 * MIB), ("1GiB", GIB), ("1.5GiB", 3 * GIB // 2),
        (".5gib", GIB // 2), ("2.kB", 2000), ("1KiB", 1024), ("1TB", 10**12), ("1 TiB", 1 << 40), ("\t7 B\n", 7),
        ("1024TiB", 1 << 50), (12345, 12345), (1 << 50, 1 << 50),
    ],
)  # fmt: skip
def test_sizes(value, size):
    found = config.parse_size(value, subject="limit")
    assert found == size
    assert type(found) is int


@pytest.mark.parametrize(
    "value",
    ["", "  ", "on", "none", "unlimited", "-1", "+1", "1e9", "1_000", "1,5GB", "MB", ".", "1 2", "1PB", "1M", "1GB s",
     "0x10", "nan", "inf", "1025TiB", "9" * 400, "\u0663", "1\uff27B", -1, (1 << 50) + 1, 1.5, 0.0, True, False, None,
     b"1"],
    ids=repr,
)  # fmt: skip
def test_other_sizes_are_refused(value):
    with pytest.raises(ArgumentError) as caught:
        config.parse_size(value, subject="SOME_SETTING")
    text = str(caught.value)
    assert text.startswith(f"`SOME_SETTING` is {value!r}; accepted are bytes (`1048576`)")
    for form in ("`256MB`", "`1.5GiB`", "`off`", "`0`"):
        assert form in text


@pytest.mark.parametrize(("value", "limit"), [("64MiB", 64 * MIB), ("off", 0), ("0", 0)])
def test_limit_comes_from_the_environment_when_first_needed(monkeypatch, value, limit):
    pool = Pool()
    monkeypatch.setenv(config.POOL_LIMIT, value)
    assert pool.new(4, FLOAT).size == 4
    assert pool._limit is None
    array = pool.new(SIZE, FLOAT)
    monkeypatch.setenv(config.POOL_LIMIT, "garbage")
    assert pool.limit == limit
    assert pool.stats().lent_blocks == (limit > 0)
    del array


def test_wrong_limit_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv(config.POOL_LIMIT, "plenty")
    with pytest.raises(ArgumentError, match="`SWEEPGRAD_POOL_LIMIT` is 'plenty'"):
        Pool().new(SIZE, FLOAT)
    with pytest.raises(ArgumentError, match="`SWEEPGRAD_POOL_LIMIT` is 'plenty'"):
        Pool().stats()
    assert Pool().idle_bytes() == 0


@pytest.mark.parametrize(
    ("pages", "limit"), [(1 << 30, GIB), ((256 * MIB) // 4096, 32 * MIB), (-1, GIB), (ValueError, GIB), (OSError, GIB)]
)
@pytest.mark.parametrize("value", [None, "", " "])
def test_default_limit_suits_the_memory(monkeypatch, pages, limit, value):
    def sysconf(name):
        if not isinstance(pages, int):
            raise pages
        return pages if name == "SC_PHYS_PAGES" else 4096

    monkeypatch.setattr(os, "sysconf", sysconf, raising=False)
    if value is None:
        monkeypatch.delenv(config.POOL_LIMIT, raising=False)
    else:
        monkeypatch.setenv(config.POOL_LIMIT, value)
    assert config.pool_limit() == limit


def test_stats_read_well():
    found = PoolStats(3 * MIB, 1, 2 * GIB, 1500, 12345, 6, GIB)
    assert str(found) == "3.0 MiB idle in 1 block, 2.0 GiB lent in 1,500 blocks; 12,345 hits, 6 misses; limit 1.0 GiB"
    with pytest.raises(AttributeError):
        found.hits = 0


def test_public_functions_serve_the_process_pool():
    before = sg.pool.get_limit()
    try:
        sg.pool.set_limit("8MiB")
        assert sg.pool.get_limit() == sg.pool.stats().limit == 8 * MIB
        sg.pool.empty()
        array = buffers.empty(2 * SIZE, FLOAT)
        lent = sg.pool.stats().lent_bytes
        del array
        assert sg.pool.stats().lent_bytes == lent - 2 * POOLED_FROM
        assert sg.pool.stats().idle_bytes >= 2 * POOLED_FROM
        found = sg.graph.stats()
        assert found.pool_bytes == sg.pool.stats().idle_bytes
        assert f"{report.format_bytes(found.pool_bytes)} idle in the pool" in str(found)
        assert sg.pool.empty() == found.pool_bytes
        assert sg.graph.stats().pool_bytes == 0
        assert "pool" not in str(report.stats(process.registry))
        for wrong in ("plenty", -1, None, 1.0):
            with pytest.raises(ArgumentError, match="`limit` is"):
                sg.pool.set_limit(wrong)
        assert sg.pool.get_limit() == 8 * MIB
    finally:
        sg.pool.set_limit(before)
