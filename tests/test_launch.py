"""`launch`, on which other tests rely: a process that hangs is shown and killed, with its children."""

import os
import signal
import time

import pytest

import launch
from launch import finish, program, python, start

pytestmark = pytest.mark.skipif(os.name != "posix", reason="elsewhere a process is killed and shows no stacks")

HANG = """
import os, signal, sys, threading

inside = threading.Event()

def waits_in_a_thread():
    inside.set()
    threading.Event().wait()

def waits_in_the_child():
    os.write(write, b"1")
    threading.Event().wait()

def waits_in_main():
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    threading.Event().wait()

if sys.argv[1] == "deaf":
    signal.signal(signal.SIGABRT, signal.SIG_IGN)
if sys.argv[1] == "fork":
    read, write = os.pipe()
    if not os.fork():
        waits_in_the_child()
    os.read(read, 1)
threading.Thread(target=waits_in_a_thread).start()
inside.wait()
waits_in_main()
"""


def hanging(kind):
    process = start("-c", HANG, kind)
    assert process.stdout.readline() == "ready\n"
    return process


def test_the_stacks_of_all_threads_are_shown():
    process = hanging("plain")
    with pytest.raises(AssertionError, match="did not end within") as caught:
        finish(process, limit=0.1)
    assert process.returncode == -signal.SIGABRT
    for name in ("waits_in_a_thread", "waits_in_main"):
        assert f"in {name}" in str(caught.value)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="elsewhere stacks of several processes are mixed up")
def test_a_child_of_the_process_is_shown_and_killed():
    process = hanging("fork")
    assert len(launch._members(process)) == 2
    with pytest.raises(AssertionError, match="in waits_in_the_child") as caught:
        finish(process, limit=0.1)
    assert "in waits_in_main" in str(caught.value)
    while launch._members(process):  # one that was killed takes a moment to end
        time.sleep(0.01)


def test_a_process_that_ignores_the_request_is_killed(monkeypatch):
    monkeypatch.setattr(launch, "_LAST_WORDS", 0.2)
    process = hanging("deaf")
    with pytest.raises(AssertionError, match="did not end within"):
        finish(process, limit=0.1)
    assert process.returncode == -signal.SIGKILL


def test_what_a_process_says_is_handed_on():
    source = """
        import sys
        print(sys.argv[1:])
        sys.exit("bad")
    """
    done = program(source, 3, "x")
    assert (done.returncode, done.stdout, done.stderr) == (1, "['3', 'x']\n", "bad\n")
    assert python("-c", "pass").returncode == 0
