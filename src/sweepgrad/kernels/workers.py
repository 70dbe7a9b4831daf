"""Several threads on one kernel.

Numba's own threading layers are never entered: one aborts when two threads use it, one is killed in a forked child.

A chunked kernel takes its chunks, one after the other, from a counter in its argument `task`, an array of four numbers:

    0  the next chunk    1  chunks done    2  workers that came    3  whether all is done

Guarantees
- The calling thread works itself, and never waits for a thread that has not begun: helpers that come late find nothing
  left to do. It waits at most for the chunks that others are in the middle of.
- No worker needs the interpreter's lock between its first chunk and its last.
- Any number of threads may run kernels at once; a forked child makes helpers of its own.
- Helpers are daemon threads, started when they are first needed; where the system gives none, the caller works alone.
- A kernel cannot fail: it allocates nothing, divides without a check and has its bounds from its caller.
"""

import contextlib
import os
import threading
import time
from queue import SimpleQueue
from typing import Any

import numpy as np

from sweepgrad.config import NUM_THREADS, num_threads
from sweepgrad.errors import ArgumentError
from sweepgrad.kernels.cpu import Kernel

PARALLEL = 1 << 17
"""Elements from which helpers are called: one comes after some 30 us, in which a thread adds 65,536 numbers."""

_SPINS = 200
"""How often the calling thread looks for the others' last chunks before it begins to sleep: some 20 us."""


class _Team:
    """The helpers of this process."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[list[Any]] = SimpleQueue()
        self.size = 0
        self.lock = threading.Lock()

    def call(self, job: list[Any], count: int) -> None:
        """Ask `count` helpers to run `job`, [kernel, arguments]; without threads or memory for that, fewer or none."""
        with contextlib.suppress(RuntimeError, MemoryError):
            if self.size < count:
                with self.lock:
                    while self.size < count:
                        threading.Thread(target=self._help, name=f"sweepgrad-{self.size + 1}", daemon=True).start()
                        self.size += 1
        with contextlib.suppress(MemoryError):
            for _ in range(min(count, self.size)):
                self.jobs.put(job)

    def _help(self) -> None:
        while True:
            job = self.jobs.get()
            try:
                kernel, args = job
            except ValueError:  # done already, and emptied so that it holds no array
                continue
            kernel(*args)
            del job, kernel, args


_state: dict[str, Any] = {"threads": None, "team": _Team()}


def _reset() -> None:
    _state["team"] = _Team()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset)


def get_num_threads() -> int:
    """Threads that one kernel may use, this one included: as set, or `SWEEPGRAD_NUM_THREADS`, or the cores usable."""
    if _state["threads"] is None:
        _state["threads"] = num_threads()
    return _state["threads"]  # type: ignore[no-any-return]


def set_num_threads(n: int) -> None:
    """Let one kernel use `n` threads, the calling one included; results do not depend on it.

    Raises:
        ValueError: if `n` is not a positive integer.

    Example:
        >>> import sweepgrad as sg
        >>> sg.set_num_threads(1)
        >>> sg.get_num_threads()
        1
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ArgumentError(f"`set_num_threads` got {n!r}; needed is an integer from 1 (see also `{NUM_THREADS}`)")
    _state["threads"] = n


def crew(size: int, chunks: int) -> int:
    """Workers for a kernel of `size` elements in so many chunks."""
    return 1 if size < PARALLEL else min(get_num_threads(), chunks)


def run(kernel: Kernel, args: tuple[Any, ...], task: Any, count: int) -> None:
    """Run a chunked kernel, whose argument `task` is zeros at first, with `count` workers."""
    if count == 1:
        kernel(*args)
        return
    job = [kernel, args]
    _state["team"].call(job, count - 1)
    kernel(*args)
    spins = 0
    while not task[3]:
        spins += 1
        if spins > _SPINS:
            time.sleep(2e-5)
    job.clear()


def new_task() -> Any:
    """The counters of a chunked kernel's next run."""
    return np.zeros(4, np.int64)
