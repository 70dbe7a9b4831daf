"""A forked child computes, runs backward and sweeps, whatever other threads were doing."""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

PROGRAM = """
import os, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks in processes with threads
import sweepgrad as sg
from sweepgrad.graph import process
from sweepgrad.kernels import cpu

def compute():
    x = sg.asarray([1.0, 2.0], requires_grad=True)
    sg.sum(x * x).backward()
    assert x.grad.tolist() == [2.0, 4.0]

compute()
sg.sweeper.start("1ms")
lock = {lock}
held, forking = threading.Event(), threading.Event()

def hold():
    with lock:
        held.set()
        forking.wait(0.2)  # the fork must wait for the lock, so nobody can say when it has begun to

threading.Thread(target=hold, daemon=True).start()
held.wait()
pid = os.fork()
if pid == 0:
    compute()
    sg.asinh(sg.ones((3,)))  # a kernel of its own
    assert sg.sweeper.is_running()
    sg.sweep()
    os._exit(0)
status = os.waitpid(pid, 0)[1]
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("lock", ["process.registry.lock", "cpu._lock"])
def test_child_works_though_another_thread_held_a_lock(lock):
    program = textwrap.dedent(PROGRAM).replace("{lock}", lock)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == "0\n", result.stderr
