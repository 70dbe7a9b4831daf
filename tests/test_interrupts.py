"""A KeyboardInterrupt may come anywhere in the library: afterwards all is whole, and works on."""

import gc
import signal
import sys
import threading
from pathlib import Path

import pytest

import sweepgrad as sg
from raising import Raising
from sweepgrad.graph.process import registry

PACKAGE = str(Path(sg.__file__).parent)


def program(x, w):
    """A bit of everything that registers, drops, consumes and sweeps."""
    y = sg.tanh(x * w)
    x * x
    z = (y @ sg.ones((2, 2))).sum() + sg.softmax(y).max()
    z.register_hook(lambda ct: ct * 1.0)
    y.retain_grad()
    z.backward(create_graph=True)
    sg.sweep(max_nodes=1)
    w.copy_(w)
    x.grad.sum().backward()
    x.grad = None
    sg.grad(lambda v: (v * v).sum())(w)
    sg.sweep()


def assert_whole(x, w):
    assert not registry.lock._is_owned()
    assert sg.is_grad_enabled()
    gc.collect()
    sg.graph.audit()
    x.grad = w.grad = None
    (x * w).sum().backward()
    assert x.grad.tolist() == w.tolist()
    assert w.grad.tolist() == x.tolist()


@pytest.fixture
def unraisable(monkeypatch):
    """A tensor whose making was interrupted before it had its first field dies with an error that Python ignores.

    Yields a function that forgets such errors, which hold the tensor and what was interrupted.
    """
    found = []
    callbacks = gc.callbacks[:]  # those of test tools are Python functions, in which a signal would be raised
    gc.callbacks.clear()
    monkeypatch.setattr(sys, "unraisablehook", found.append)  # in C, so that no signal is raised in it

    def forget():
        assert {str(one.exc_value) for one in found} <= {"'Tensor' object has no attribute '_handle'"}
        found.clear()

    yield forget
    gc.callbacks.extend(callbacks)
    forget()


def interrupted(point, forget):
    sg.sweep(collect_cycles=True)
    before = sg.graph.stats().nodes
    x = sg.asarray([1.0, 2.0], requires_grad=True)
    w = sg.asarray([0.5, -1.0], requires_grad=True)
    where = Raising(PACKAGE, point).by_calls(lambda x=x, w=w: program(x, w))
    forget()
    assert_whole(x, w)
    x.grad = w.grad = None
    del x, w
    sg.sweep(collect_cycles=True)
    assert sg.graph.stats().nodes == before
    return where


@pytest.mark.parametrize("start", range(8))  # in eight parts, which may run side by side
def test_exception_after_any_call_leaves_everything_whole(start, unraisable):
    program(*(sg.ones((2,), requires_grad=True) for _ in range(2)))  # so that no kernel is compiled in between
    point, places = 1 + start, set()
    while where := interrupted(point, unraisable):
        places.add(where)
        point += 8
    assert len(places) > 20


def test_dropping_a_tensor_runs_no_python_code():
    x = sg.ones((2,), requires_grad=True)
    y, plain = x * 2.0, sg.ones((2,))
    calls = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: calls.append((event, frame.f_code.co_name)))
    try:
        del y
        del plain
    finally:
        sys.setprofile(before)
    assert [call for call in calls if call[0] == "call"] == []
    assert registry.dropped[-1].rule.name == "multiply"


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timer")
def test_no_drop_is_lost_under_a_storm_of_signals(unraisable):
    """Signals that raise while tensors are made and die: the real thing beside the harness above."""

    class Storm(Exception):
        pass

    def handler(number, frame):
        if armed:
            raise Storm

    assert threading.current_thread() is threading.main_thread()
    x = sg.asarray([1.0, 2.0], requires_grad=True)
    armed, hits = [], 0
    y = z = x
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 2e-4, 2e-4)
    try:
        for _ in range(300):
            try:
                armed.append(True)
                for _ in range(10_000):
                    y = x * x
                    z = y * x
                    x.detach()
            except Storm:
                hits += 1
            finally:
                armed.clear()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert hits > 100
    del y, z
    unraisable()
    assert_whole(x, sg.ones((2,), requires_grad=True))
