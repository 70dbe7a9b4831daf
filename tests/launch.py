"""Fresh Python processes for tests. One that hangs is a failure that shows where each of its threads was."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

LIMIT = 120
"""Seconds after which a process is taken to hang: far more than any needs."""

_LAST_WORDS = 20
"""Seconds for a process that hangs to write its stacks."""

_GROUPS = hasattr(os, "killpg")


def python(*arguments, settings=None, limit=LIMIT, **options):
    """Run Python with `arguments`, and `settings` in its environment in the place of any SWEEPGRAD_AUTO_SWEEP."""
    return finish(start(*arguments, settings=settings, **options), limit)


def program(source, *arguments, flags=(), **options):
    """Run the Python program `source`, which may be indented, like `python`."""
    return python(*flags, "-c", textwrap.dedent(source), *arguments, **options)


def quiet(source, *arguments, **options):
    """Run the program `source`, which has to end well and without a word on standard error; what it printed."""
    done = program(source, *arguments, **options)
    assert (done.returncode, done.stderr) == (0, ""), f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def start(*arguments, settings=None, **options):
    """Start what `python` runs, in a process group of its own, which its children share."""
    env = {name: value for name, value in os.environ.items() if name != "SWEEPGRAD_AUTO_SWEEP"}
    # Through the environment, so that stacks of the process's children are to be had as well.
    env |= {"PYTHONFAULTHANDLER": "1"} | (settings or {})
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    group = {"process_group": 0} if _GROUPS else {}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, **({"env": env, "text": True} | group | streams | options))


def finish(process, limit=LIMIT):
    """Wait for a process of `start`; if it hangs, kill it and its children, and fail with what they say."""
    with process:
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            out, err = _stacks(process)
            command = textwrap.shorten(" ".join(process.args), 200)
            raise AssertionError(
                f"`{command}` did not end within {limit} s\n-- standard output --\n{out}\n-- standard error --\n{err}"
            ) from None
        except BaseException:
            _kill(process)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _stacks(process):
    """End a process that hangs; what it and its children wrote, the stacks of all their threads at the end."""
    asked = set()
    end = time.monotonic() + _LAST_WORDS
    while time.monotonic() < end:
        left = _members(process)
        if left and not left & asked:  # one after the other, as they all write to the same place
            asked.add(min(left))
            _signal(min(left), signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=0.05)
    _kill(process)
    try:
        return process.communicate(timeout=_LAST_WORDS)
    except subprocess.TimeoutExpired as error:  # a child in a group of its own has the pipes
        return error.stdout, error.stderr


def _members(process):
    """The numbers of the living processes in the group of `process`; where they are not known, that of the group."""
    if not os.path.exists("/proc/self/stat"):
        return {-process.pid} if _GROUPS else set()
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group, *_ = path.read_text().rpartition(")")[2].split()
            if int(group) == process.pid and state != "Z":
                found.add(int(path.parent.name))
    return found


def _kill(process):
    if _GROUPS:
        _signal(-process.pid, signal.SIGKILL)
    else:
        process.kill()


def _signal(number, what):
    """Signal a process or group of which nobody has been waited for yet, so that the number is still its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(number, what)
