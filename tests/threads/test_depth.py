"""Long and wide graphs of tensors: nothing recurses, not even in a thread whose stack is small, and work is linear."""

import numpy as np
import pytest

import sweepgrad as sg
from launch import quiet
from sweepgrad.ops.op import OPS

# A shape is a function of a variable and a size, which returns a scalar, its derivative by the variable, and how many
# nodes there are beside that variable.
SHAPES = """
import sys, threading
import numpy as np
import sweepgrad as sg

def chain(x, n):
    '''One after the other.'''
    y = x
    for _ in range(n - 1):
        y = y + 1.0
    return sg.sum(y), 1.0, n

def ladder(x, n):
    '''A diamond on a diamond: 2 ** n paths.'''
    y = x
    for _ in range(n):
        y = y * 0.5 + y * 0.5
    return sg.sum(y), 1.0, 3 * n + 1

def doubling(x, n):
    '''One tensor twice in an operation, one edge.'''
    y = x
    for _ in range(n):
        y = y * 0.5
        y = y + y
    return sg.sum(y), 1.0, 2 * n + 1

def fan_out(x, n):
    '''One tensor used by many operations, joined by one.'''
    return sg.sum(sg.concat([x * 2.0 for _ in range(n)])), 2.0 * n, n + 2

def accumulated(x, n):
    '''One tensor used by many operations, added one after the other.'''
    y = x * 0.0
    for _ in range(n):
        y = y + x * 3.0
    return sg.sum(y), 3.0 * n, 2 * n + 2

def fan_in(x, n):
    '''Many variables of their own beside the one; each gets a gradient.'''
    own = [sg.asarray([1.0], requires_grad=True) for _ in range(n)]
    y = sg.stack([*own, x])
    return sg.sum(y * y), 2.0, 2 * n + 4

def indexed(x, n):
    '''One tensor of many elements, each taken by itself; it is made of one tensor many times.'''
    wide = sg.concat([x] * n)
    return sg.sum(sg.stack([wide[k] for k in range(n)])), float(n), 2 * n + 3

ALL = {one.__name__: one for one in (chain, ladder, doubling, fan_out, accumulated, fan_in, indexed)}

def in_a_small_thread(function, *args):
    '''Run the function in a thread with a stack of 256 KiB, with few levels of Python's to use.'''
    raised = []

    def run():
        sys.setrecursionlimit(120)
        try:
            function(*args)
        except BaseException as error:
            raised.append(error)

    threading.stack_size(256 * 1024)
    thread = threading.Thread(target=run)
    threading.stack_size(0)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
"""

USE = """
def use(shape, n):
    x = sg.asarray([1.0], requires_grad=True)
    y, slope, nodes = shape(x, n)
    assert sg.graph.stats().nodes == nodes + 1, (sg.graph.stats(), nodes)
    y.backward()
    assert x.grad.tolist() == [slope]
    del y
    assert sg.sweep().remaining == 0 and sg.graph.stats().nodes == 1

    y, slope, nodes = shape(x, n)
    del y
    assert sg.sweep().nodes == nodes and sg.graph.stats().nodes == 1

    n = n // 10 or 1
    x.grad = None
    z = x * 1.0
    y, slope, nodes = shape(z, n)
    y.backward(retain_graph=True)
    assert x.grad.tolist() == [slope]
    assert len(sg.graph.nodes()) == nodes + 2
    z.backward()  # so that nothing can run through what was computed from it
    assert sg.sweep().remaining == 0
    try:
        y.backward()
    except sg.GraphConsumedError:
        pass
    else:
        raise AssertionError
    del y, z, x
    sg.sweep()
    stats = sg.graph.stats()
    assert stats.nodes == 0 and not any(stats.indexes.values()), stats
    assert stats.registered == stats.consumed + stats.swept

use(ALL[sys.argv[1]], 3)  # compiles what is needed, and Numba recurses
in_a_small_thread(use, ALL[sys.argv[1]], int(sys.argv[2]))
"""

SIZES = {
    "chain": 100_000,
    "ladder": 10_000,
    "doubling": 10_000,
    "fan_out": 100_000,
    "accumulated": 100_000,
    "fan_in": 100_000,
    "indexed": 20_000,
}


SLOW = {"fan_in"}


@pytest.mark.parametrize("shape", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SIZES])
def test_large_graphs_in_a_thread_with_a_small_stack(shape):
    quiet(SHAPES + USE, shape, SIZES[shape])


@pytest.mark.slow
def test_a_million_operations_in_a_thread_with_a_small_stack():
    quiet(SHAPES + USE, "chain", 1_000_000)


@pytest.mark.parametrize("shape", SIZES)
def test_work_is_linear(shape):
    """Calls of functions, of Python and of C, are counted; twice the size takes twice as many and no more."""
    source = """
counts = {}

def count(frame, event, arg):
    if event in ("call", "c_call"):
        counts[phase] = counts.get(phase, 0) + 1

def use(shape, n):
    global phase
    counts.clear()
    sg.sweep()
    x = sg.asarray([1.0], requires_grad=True)
    sys.setprofile(count)
    phase = "forward"
    y, *_ = shape(x, n)
    phase = "backward"
    y.backward()
    phase = "again"
    y, *_ = shape(x, n)
    phase = "drop"
    del y
    phase = "sweep"
    assert sg.sweep().nodes >= n
    sys.setprofile(None)
    return dict(counts)

shape = ALL[sys.argv[1]]
sg.graph.set_threshold(nodes=10**9)  # no operation sweeps by itself
use(shape, 300)
small, large = use(shape, 1000), use(shape, 2000)
for phase, calls in large.items():
    assert calls <= 2.2 * small[phase] + 200, (phase, small, large)
"""
    quiet(SHAPES + source, shape)


def test_parts_of_one_tensor_are_added_to_one_sum(monkeypatch):
    """Zeros of the whole for each part would take time in proportion to the square."""
    wholes = []
    scatter = OPS["scatter"].forward
    monkeypatch.setattr(OPS["scatter"], "forward", lambda *args, **params: wholes.append(1) or scatter(*args, **params))
    values = np.arange(12.0).reshape(3, 4)
    x = sg.asarray(values, requires_grad=True)
    y = x * 1.0
    keys = [
        *range(3),
        (0, 1),
        slice(None, None, -2),
        (..., None, 2),
        np.array([0, 2, 0, 0]),
        values > 5.0,
        (slice(1), -1),
    ]
    parts = [y[key] for key in keys] + [sg.take(y, [3, 3, 1], axis=1), sg.take(y, 1, axis=0)]
    picked = np.zeros((3, 4))
    for k, key in enumerate([*keys, (slice(None), [3, 3, 1]), 1], 1):
        np.add.at(picked, key, float(k))
    sum(sg.sum(part) * float(k) for k, part in enumerate(parts, 1)).backward()
    np.testing.assert_array_equal(x.grad.numpy(), picked)
    assert len(wholes) == 1


def test_higher_orders_of_a_deep_graph():
    source = """
def use(n):
    x = sg.asarray([1.0], requires_grad=True)
    y = x
    for _ in range(n):
        y = y * 0.5 + y * 0.5
    (y * y * y).sum().backward(create_graph=True)
    slope, x.grad = x.grad, None
    assert slope.tolist() == [3.0]
    slope.sum().backward()
    assert x.grad.tolist() == [6.0]
    del x, y, slope
    sg.sweep()
    assert sg.graph.stats().nodes == 0

use(3)
in_a_small_thread(use, 5_000)
"""
    quiet(SHAPES + source)
