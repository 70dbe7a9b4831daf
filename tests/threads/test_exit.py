"""The end of a process: quick, quiet and with the right exit status, whatever its threads were doing."""

import os
import re
import signal
import time

import pytest

from launch import finish, start

LIMIT = 20
"""Seconds from the end of `main` to that of the process in which it is not taken to hang; 2 are promised."""

PRELUDE = """
import atexit, sys, threading, time
import numpy as np
import sweepgrad as sg

def compute(n=3):
    with sg.enable_grad():
        x = sg.asarray(np.full(n, 2.0), requires_grad=True)
        sg.sum(x * x * x).backward()
    assert x.grad.numpy()[0] == 12.0

compute()

def main_ends():
    # On most systems, and on all that have forks, every process has the same monotonic clock.
    print("end", time.monotonic(), flush=True)
"""


def run(source, *, status=0, settings=None, flags=()):
    """The process ends with `status`, and within the limit after it said that main ends; its standard error."""
    process = start(*flags, "-c", PRELUDE + source, settings=settings)
    done = finish(process)
    end = time.monotonic()
    assert done.returncode == status, done.stderr
    took = end - float(re.findall(r"^end (\S+)$", done.stdout, re.MULTILINE)[-1])
    assert took < LIMIT
    print(f"{took:.2f} s")
    return done.stderr


def live(nodes):
    """So many nodes are alive, among the module's globals."""
    return f"""
sg.graph.set_threshold(nodes=10**9)
x = sg.ones((3,), requires_grad=True)
kept = [(x + 1.0) * 2.0 for _ in range({nodes} // 2)]
"""


def sweeping(nodes):
    """So many are being swept by the daemon, which has just begun."""
    return f"""
begun = threading.Event()
sg.sweeper.stop()
sg.graph.callbacks.append(lambda phase, info: begun.set() if phase == "start" and info["dropped"] >= {nodes} else None)
dropped = [x * 2.0 for _ in range({nodes})]
del dropped
sg.sweeper.start("1ms")
begun.wait()
"""


FEW = live(2_000)
DAEMON_SWEEPS = {"SWEEPGRAD_AUTO_SWEEP": "1ms"}


@pytest.mark.parametrize("flags", [(), ("-X", "dev")], ids=["plain", "dev"])
def test_main_returns_during_a_sweep(flags):
    """A hundred thousand nodes are alive, and a third of that is being swept."""
    source = f"{live(100_000)}{sweeping(30_000)}assert sg.graph.stats().nodes > 100_000\nmain_ends()\n"
    assert run(source, settings=DAEMON_SWEEPS, flags=flags) == ""


@pytest.mark.parametrize("status", [0, 3])
def test_sys_exit_during_a_sweep(status):
    source = f"{FEW}{sweeping(20_000)}main_ends()\nsys.exit({status})\n"
    assert run(source, status=status, settings=DAEMON_SWEEPS) == ""


def test_main_returns_while_the_sweeper_runs_every_millisecond():
    assert run(f"{FEW}main_ends()\n", settings=DAEMON_SWEEPS) == ""


def test_sys_exit_on_a_thread_ends_the_thread():
    source = """
def end():
    compute()
    sys.exit(5)

thread = threading.Thread(target=end)
thread.start()
thread.join()
compute()
main_ends()
"""
    assert run(source, settings=DAEMON_SWEEPS) == ""


def test_a_thread_goes_on_after_main():
    source = """
def go_on():
    threading.main_thread().join()
    for _ in range(20):
        compute()
        compute(1 << 18)
    sg.sweep()
    sg.graph.audit()
    main_ends()

sg.set_num_threads(2)
threading.Thread(target=go_on).start()
"""
    assert run(source, settings=DAEMON_SWEEPS) == ""


def test_tensors_wherever_a_module_keeps_them():
    source = """
class Holder:
    cached = None

    def __init__(self, tensor):
        self.tensor, self.me = tensor, self

    def __del__(self, compute=compute):
        compute()  # the module's names may be gone by now

v = sg.ones((3,), requires_grad=True)
graph = sg.exp(v) * 2.0
v.register_hook(lambda ct: ct * graph.detach())
Holder.cached = graph + 1.0
local = threading.local()
local.tensor = graph + 2.0
sys.stay = graph + 3.0
many = sg.asarray(np.ones(1 << 18), requires_grad=True)
held = [Holder(sg.sin(many)) for _ in range(3)]
gradient = sg.grad(lambda t: sg.sum(t * t))
optimizer = sg.optim.Adam([v])
graph.sum().backward(create_graph=True)
optimizer.step()
sg.graph.callbacks.append(lambda phase, info: compute())
atexit.register(lambda kept: None, v * 5.0)
main_ends()
"""
    assert run(source, settings=DAEMON_SWEEPS) == ""


def test_functions_that_compute_at_exit():
    """What is called last was registered first: here, after all else, the first use of helpers and of an operation."""
    source = """
def last():
    sg.set_num_threads(2)
    compute(1 << 18)
    sg.sum(sg.fuse(lambda t: sg.exp(t) * t)(sg.ones((3,), requires_grad=True))).backward()
    sg.sweep()
    stats = sg.graph.stats()
    assert stats.registered == stats.nodes + stats.consumed + stats.swept
    sg.graph.audit()
    sg.pool.empty()
    print("last")

atexit.register(last)
atexit.register(compute)
atexit.register(sg.sweeper.stop)
main_ends()
"""
    assert run(source, settings=DAEMON_SWEEPS) == ""


DAEMON = """
running = threading.Event()

def work(n):
    while True:
        compute(n)
        running.set()
        sg.ones((3,), requires_grad=True) * 2.0
        sg.graph.stats()

sg.set_num_threads(2)
compute(1 << 18)
for n in (3, 3, 40_000, 1 << 18):
    threading.Thread(target=work, args=(n,), daemon=True).start()
running.wait()
"""


@pytest.mark.parametrize("turn", range(3))
def test_daemon_threads_that_compute_until_the_end(turn):
    """They are stopped anywhere: in a kernel, within the registry, in the pool."""
    source = f"{DAEMON}time.sleep({0.003 * turn})\nmain_ends()\n"
    assert run(source, settings=DAEMON_SWEEPS) == ""


def test_a_daemon_thread_that_compiles_until_the_end(tmp_path):
    source = """
from sweepgrad.kernels.cpu import COUNTS
before = COUNTS["compiled"]

def work():
    for name in ("asinh", "gelu", "erfc", "softplus"):
        getattr(sg, name)(sg.ones((3,), dtype="float32"))

threading.Thread(target=work, daemon=True).start()
while COUNTS["compiled"] == before:
    pass
main_ends()
"""
    assert run(source, settings={"SWEEPGRAD_CACHE_DIR": str(tmp_path), "SWEEPGRAD_AUTO_SWEEP": "1ms"}) == ""


@pytest.mark.parametrize("daemon", [False, True])
def test_an_exception_at_top_level(daemon):
    """Its traceback is all that is said; the tensors in its frames change nothing."""
    source = f"""
def fails(x):
    y = sg.exp(x) * x
    main_ends()
    return y + [1, 2][5]

{DAEMON if daemon else ""}
fails(kept[0])
"""
    stderr = run(FEW + source, status=1, settings=DAEMON_SWEEPS)
    assert stderr.startswith("Traceback (most recent call last):\n")
    assert stderr.endswith("\nIndexError: list index out of range\n")
    assert stderr.count("\n") == 4


def test_an_exception_of_a_hook_at_top_level():
    source = """
def fails(ct):
    main_ends()
    raise RuntimeError("from the hook")

v = sg.ones((3,), requires_grad=True)
v.register_hook(fails)
sg.sum(v * v).backward()
"""
    stderr = run(FEW + source, status=1, settings=DAEMON_SWEEPS)
    assert stderr.startswith("Traceback (most recent call last):\n")
    assert stderr.endswith("\nRuntimeError: from the hook\n")
    assert stderr.count("Traceback") == 1


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_an_interrupt_at_top_level():
    source = """
import os, signal
main_ends()
os.kill(os.getpid(), signal.SIGINT)
while True:
    compute()
"""
    stderr = run(FEW + source, status=-signal.SIGINT, settings=DAEMON_SWEEPS)
    assert stderr.endswith("\nKeyboardInterrupt\n")
    assert stderr.count("Traceback") == 1


def test_system_exit_in_a_callback_of_the_daemons_sweep_ends_nothing():
    source = """
import logging
logging.disable()
raised = threading.Event()

def leave(phase, info):
    raised.set()
    raise SystemExit(7)

sg.graph.callbacks.append(leave)
raised.wait()
assert sg.sweeper.is_running()
sg.graph.callbacks.clear()
compute()
main_ends()
"""
    assert run(source, settings=DAEMON_SWEEPS) == ""
