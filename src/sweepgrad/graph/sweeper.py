"""The daemon thread that sweeps on a schedule, and sooner when a threshold is passed.

One thread at most. It holds the registry's lock only as any sweep does, logs and counts what its sweeps raise, goes on
afterwards, and never keeps the interpreter from exiting.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from sweepgrad.config import DEFAULT_INTERVAL, parse_interval
from sweepgrad.errors import ArgumentError
from sweepgrad.graph.registry import Registry
from sweepgrad.graph.report import log_exception


class _Worker(threading.Thread):
    """The thread, and the queue that wakes it.

    The queue is a SimpleQueue because its `put` is reentrant: an operation in a user's finaliser may wake the thread
    while the thread itself, or the same one as the finaliser's, is inside the queue.
    """

    def __init__(self, sweeper: "Sweeper") -> None:
        super().__init__(name="sweepgrad-sweeper", daemon=True)
        self.sweeper = sweeper
        self.messages: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.ending = False

    def wake(self) -> None:
        if self.messages.empty():  # else a sweep comes anyhow
            self.messages.put(None)

    def end(self) -> None:
        self.ending = True
        self.messages.put(None)

    def run(self) -> None:
        while not self.ending:
            with suppress(queue.Empty):
                self.messages.get(timeout=self.sweeper.interval)
            if not self.ending:
                self.sweeper.sweep_once()


class Sweeper:
    """Starts, reconfigures and stops the sweeping thread of one registry."""

    def __init__(self, registry: Registry, before_start: Callable[[], object] = int) -> None:
        self._registry = registry
        self._before_start = before_start
        self._lock = threading.RLock()  # guards `_worker` and `_interval`; never held while sweeping or joining
        self._worker: _Worker | None = None
        self._interval = DEFAULT_INTERVAL
        self.errors = 0

    @property
    def interval(self) -> float:
        """Seconds between two sweeps of the thread."""
        return self._interval

    def __repr__(self) -> str:
        return f"<sweeper: {f'every {self._interval:g} s' if self.is_running() else 'not running'}>"

    def is_running(self) -> bool:
        """Whether the thread is alive and has not been told to end."""
        worker = self._worker
        return worker is not None and worker.is_alive() and not worker.ending

    def start(self, interval: float | str = DEFAULT_INTERVAL) -> None:
        """Sweep every `interval` seconds from now on; started twice, only the interval changes.

        `interval` takes the same forms as `SWEEPGRAD_AUTO_SWEEP`: `0.5`, `"500ms"`, `"2s"`, `"1m"`, `"on"`.

        Raises:
            ValueError: if `interval` is none of these, or means "off".

        Example:
            >>> import sweepgrad as sg
            >>> sg.sweeper.start("500ms")
            >>> sg.sweeper.interval
            0.5
            >>> sg.sweeper.stop()
        """
        seconds = parse_interval(interval, subject="interval")
        if seconds is None:
            raise ArgumentError(f"`interval` is {interval!r}, which means not to sweep; call `sweeper.stop()` for that")
        self._before_start()
        with self._lock:
            self._interval = seconds
            if self._worker is None or not self.is_running():
                self._worker = _Worker(self)
                self._worker.start()
            self._registry.wake = self._worker.wake
            self._worker.wake()  # it sweeps now, and waits for the new interval next

    def stop(self, timeout: float | None = None) -> None:
        """Tell the thread to end, and wait for it for at most `timeout` seconds (None: until it has ended).

        Called from the thread itself, as from a callback, it does not wait.
        """
        with self._lock:
            worker = self._worker
            if worker is not None:
                worker.end()  # before it is forgotten, so that an interrupt leaves none that nobody can stop
            self._worker = self._registry.wake = None
        if worker is not None and worker.is_alive() and worker is not threading.current_thread():
            worker.join(timeout)

    def sweep_once(self) -> None:
        """One sweep of the thread; what it raises is logged and counted."""
        try:
            self._registry.sweep(trigger="sweeper")
        except BaseException:  # a callback's SystemExit too: it means its own thread, not this one
            self.errors += 1
            log_exception("sweepgrad: a sweep of the daemon thread raised; the thread goes on")

    def restart_after_fork(self) -> None:
        """In a forked child, where only the forking thread lives: run again if the parent's thread ran."""
        ran = self._worker is not None
        self._lock = threading.RLock()
        self._worker = self._registry.wake = None
        if ran:
            self.start(self._interval)
