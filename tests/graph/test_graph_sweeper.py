"""The daemon thread: started, woken, reconfigured, failing, stopped; and both sides of a fork."""

import importlib.util
import os
import select
import signal
import threading
import traceback
import warnings
import weakref

import pytest
from graph_toys import TIMEOUT, Handle, handles_of, run_backward, thread, variable

from sweepgrad.config import DEFAULT_INTERVAL
from sweepgrad.errors import ArgumentError
from sweepgrad.graph import process
from sweepgrad.graph.node import VARIABLE, Node
from sweepgrad.graph.report import audit, stats

LONG = "1m"
"""An interval after which no test sweeps: what happens with it is not the schedule's doing."""

SHORT = 0.001


class Sweeps:
    """Counts the sweeps of the daemon thread, and can keep it inside one."""

    def __init__(self, registry):
        self._ended = threading.Semaphore(0)
        self.threads = set()
        self.hold = False
        self.inside = threading.Event()
        self.go_on = threading.Event()
        registry.callbacks.append(self._callback)

    def _callback(self, phase, info):
        if info["trigger"] != "sweeper":
            return
        self.threads.add(threading.current_thread())
        if phase == "start" and self.hold:
            self.inside.set()
            assert self.go_on.wait(TIMEOUT)
        if phase == "stop":
            self._ended.release()

    def wait(self, count=1):
        for _ in range(count):
            assert self._ended.acquire(timeout=TIMEOUT), "the thread does not sweep"

    def wait_for_a_later_one(self):
        """Wait for a sweep that begins after this call."""
        while self._ended.acquire(blocking=False):
            pass
        self.wait(2)  # the first of the two may have begun before


@pytest.fixture
def sweeps(registry):
    return Sweeps(registry)


def workers_of(sweeper):
    return [worker for worker in threading.enumerate() if getattr(worker, "sweeper", None) is sweeper]


# --- start ------------------------------------------------------------------------------------------------------------


def test_nothing_runs_before_the_start(sweeper, registry):
    assert not sweeper.is_running()
    assert sweeper.interval == DEFAULT_INTERVAL == 1.0
    assert registry.wake is None
    assert sweeper.errors == 0


def test_thread_sweeps_at_once_and_then_on_schedule(sweeper, registry, sweeps):
    x = variable(registry, 1.0)
    sweeper.start(SHORT)
    assert sweeper.is_running()
    sweeps.wait()
    x * x
    sweeps.wait_for_a_later_one()
    assert stats(registry).nodes == 1


def test_sweeper_shows_its_interval(sweeper):
    assert repr(sweeper) == "<sweeper: not running>"
    sweeper.start("500ms")
    assert repr(sweeper) == "<sweeper: every 0.5 s>"


def test_thread_is_a_daemon_so_that_the_interpreter_may_exit(sweeper, registry, sweeps):
    sweeper.start(LONG)
    sweeps.wait()
    (worker,) = sweeps.threads
    assert worker.daemon
    assert worker.name == "sweepgrad-sweeper"


@pytest.mark.parametrize(("value", "seconds"), [("500ms", 0.5), ("2s", 2.0), ("1m", 60.0), (5, 5.0), ("on", 1.0)])
def test_start_takes_the_forms_of_the_setting(sweeper, value, seconds):
    sweeper.start(value)
    assert sweeper.interval == seconds


def test_start_without_an_interval_takes_the_default(sweeper):
    sweeper.start()
    assert sweeper.interval == DEFAULT_INTERVAL


@pytest.mark.parametrize("value", ["often", -1, True, None, "8d", float("nan")])
def test_start_refuses_other_forms_and_starts_nothing(sweeper, value):
    with pytest.raises(ValueError, match=r"`interval` is .*; accepted are seconds"):
        sweeper.start(value)
    assert not sweeper.is_running()


@pytest.mark.parametrize("value", ["off", 0, "", "0ms"])
def test_start_refuses_to_mean_stop(sweeper, value):
    with pytest.raises(ArgumentError, match=r"`interval` is .*, which means not to sweep; call `sweeper.stop\(\)`"):
        sweeper.start(value)
    assert not sweeper.is_running()


def test_refused_interval_leaves_the_running_thread_as_it_is(sweeper):
    sweeper.start(LONG)
    with pytest.raises(ArgumentError):
        sweeper.start("often")
    assert sweeper.is_running()
    assert sweeper.interval == 60.0


def test_second_start_changes_the_interval_of_the_one_thread(sweeper, registry, sweeps):
    sweeper.start(LONG)
    sweeps.wait()
    sweeper.start(SHORT)
    sweeps.wait(5)
    sweeper.start(LONG)
    assert len(sweeps.threads) == 1
    assert workers_of(sweeper) == [sweeper._worker]


# --- waking -----------------------------------------------------------------------------------------------------------


def test_registering_beyond_the_threshold_wakes_the_thread(sweeper, registry, sweeps):
    sweeper.start(LONG)
    sweeps.wait()
    registry.set_threshold(nodes=3)
    x = variable(registry, 1.0)
    for _ in range(5):
        x * x
    sweeps.wait()
    assert stats(registry).swept >= 4


def test_thread_that_is_behind_is_woken_once_and_helped(sweeper, registry, sweeps):
    sweeps.hold = True
    sweeper.start(LONG)
    assert sweeps.inside.wait(TIMEOUT)
    registry.set_threshold(nodes=3)
    x = variable(registry, 1.0)
    for _ in range(12):
        x * x
    assert stats(registry).sweeps == 0
    assert sweeper._worker.messages.qsize() == 1
    x * x
    assert stats(registry).sweeps == 1
    assert stats(registry).swept == 12
    sweeps.hold = False
    sweeps.go_on.set()
    sweeps.wait(2)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_errors_are_logged_and_counted_and_the_thread_goes_on(sweeper, registry, sweeps, caplog):
    failed = threading.Event()

    def broken_clock():
        registry.clock = lambda: 0.0
        failed.set()
        raise OSError("no time")

    registry.clock = broken_clock
    sweeper.start(LONG)
    assert failed.wait(TIMEOUT)
    registry.wake()
    sweeps.wait()
    assert sweeper.errors == 1
    assert sweeper.is_running()
    (record,) = caplog.records
    assert record.name == "sweepgrad"
    assert "a sweep of the daemon thread raised; the thread goes on" in caplog.text
    assert "no time" in caplog.text


def test_errors_of_callbacks_do_not_end_the_thread(sweeper, registry, caplog):
    def broken(phase, info):
        raise ValueError("broken")

    registry.callbacks.append(broken)
    sweeps = Sweeps(registry)
    sweeper.start(SHORT)
    sweeps.wait(3)
    assert sweeper.is_running()
    sweeper.stop()
    assert registry.callbacks.errors >= 6
    assert sweeper.errors == 0
    caplog.clear()


# --- stop -------------------------------------------------------------------------------------------------------------


def test_stop_ends_the_thread(sweeper, registry, sweeps):
    sweeper.start(LONG)
    sweeps.wait()
    sweeper.stop()
    assert not sweeper.is_running()
    assert registry.wake is None
    (worker,) = sweeps.threads
    assert not worker.is_alive()
    x = variable(registry, 1.0)
    x * x
    assert stats(registry).nodes == 2


def test_stop_before_any_start_and_twice_does_nothing(sweeper):
    sweeper.stop()
    sweeper.start(LONG)
    sweeper.stop()
    sweeper.stop()
    assert not sweeper.is_running()


def test_stopped_sweeper_starts_again(sweeper, registry, sweeps):
    for _ in range(3):
        sweeper.start(LONG)
        sweeps.wait()
        sweeper.stop()
    assert len(sweeps.threads) == 3
    assert not workers_of(sweeper)


def test_stop_from_a_callback_does_not_wait_for_itself(sweeper, registry):
    stopped = threading.Event()
    workers = []

    def callback(phase, info):
        if phase == "start":
            workers.append(threading.current_thread())
            sweeper.stop()
            stopped.set()

    registry.callbacks.append(callback)
    sweeper.start(SHORT)
    assert stopped.wait(TIMEOUT)
    workers[0].join(TIMEOUT)
    assert not workers[0].is_alive()
    assert len(workers) == 1
    assert not sweeper.is_running()


def test_stop_waits_no_longer_than_it_is_told(sweeper, registry, sweeps):
    sweeps.hold = True
    sweeper.start(LONG)
    assert sweeps.inside.wait(TIMEOUT)
    sweeper.stop(timeout=0)
    (worker,) = sweeps.threads
    assert worker.is_alive()
    assert not sweeper.is_running()
    sweeps.go_on.set()
    worker.join(TIMEOUT)
    assert not worker.is_alive()


def test_start_while_an_earlier_thread_still_ends(sweeper, registry, sweeps):
    sweeps.hold = True
    sweeper.start(LONG)
    assert sweeps.inside.wait(TIMEOUT)
    (old,) = sweeps.threads
    sweeper.stop(timeout=0)
    sweeps.hold = False
    sweeper.start(LONG)
    sweeps.wait()
    assert sweeper.is_running()
    sweeps.go_on.set()
    old.join(TIMEOUT)
    assert workers_of(sweeper) == [sweeper._worker]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_thread_outlives_a_callback_that_wants_to_exit(sweeper, registry, error, caplog):
    def exit_thread(phase, info):
        raise error

    registry.callbacks.append(exit_thread)
    sweeper.start(LONG)
    worker = sweeper._worker
    while not sweeper.errors:
        worker.join(0.01)
        assert worker.is_alive()
    registry.callbacks.clear()
    sweeps = Sweeps(registry)
    sweeper.start(LONG)
    sweeps.wait()
    assert sweeper._worker is worker
    assert "the thread goes on" in caplog.text


def test_starts_and_stops_on_several_threads_leave_one_thread_or_none(sweeper):
    def toggle():
        for _ in range(20):
            sweeper.start(LONG)
            sweeper.stop(TIMEOUT)

    with thread(toggle), thread(toggle), thread(toggle):
        pass
    assert not sweeper.is_running()
    sweeper.start(LONG)
    assert [worker for worker in workers_of(sweeper) if not worker.ending] == [sweeper._worker]


def test_thread_sweeps_while_others_compute(sweeper, registry, sweeps):
    registry.set_threshold(nodes=50)
    sweeper.start(SHORT)
    x = variable(registry, 2.0)
    for k in range(1, 501):
        y = x * x
        x + y
        run_backward(y)
        assert x._grad == 4.0 * k
    sweeps.wait()
    sweeper.stop(TIMEOUT)
    audit(registry, handles_of(registry))


# --- fork -------------------------------------------------------------------------------------------------------------

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is missing here")


@pytest.fixture
def served(registry, sweeper, monkeypatch):
    """The test's registry and sweeper in the places of the process's."""
    monkeypatch.setattr(process, "registry", registry)
    monkeypatch.setattr(process, "sweeper", sweeper)
    process.survive_forks()
    return registry


def in_child(function):
    """Fork; run `function` in the child and require that it returns, in time."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        child = os.fork()
    if not child:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(TIMEOUT))  # ends the child even if it hangs in a lock
            function()
            status = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[:60_000])
        finally:
            os._exit(status)
    os.close(writer)
    answered = select.select([reader], [], [], 2 * TIMEOUT)[0]
    text = os.read(reader, 65_536).decode() if answered else "no answer"
    os.close(reader)
    _, status = os.waitpid(child, 0)
    assert (os.waitstatus_to_exitcode(status), text) == (0, "")


@forks
def test_child_computes_and_sweeps_and_its_own_thread_runs(served, sweeper, sweeps):
    x = variable(served, 2.0)
    y = x * x
    sweeper.start(LONG)
    sweeps.wait()
    parents = sweeps.threads.copy()

    def child():
        run_backward(y)
        assert x._grad == 4.0
        x * x
        served.sweep()
        assert stats(served).nodes == 1
        assert sweeper.is_running()
        assert sweeper.interval == 60.0
        sweeps.wait()  # the new thread sweeps at its start
        assert len(sweeps.threads - parents) == 1
        served.wake()
        sweeps.wait()
        sweeper.stop(TIMEOUT)
        assert not sweeper.is_running()

    in_child(child)
    assert x._grad is None
    run_backward(y)
    assert x._grad == 4.0
    assert sweeper.is_running()
    assert sweeps.threads == parents


@forks
def test_child_of_a_process_without_a_sweeper_has_none(served, sweeper):
    x = variable(served, 2.0)
    y = x * x

    def child():
        assert not sweeper.is_running()
        assert served.wake is None
        run_backward(y)
        assert x._grad == 4.0

    in_child(child)


class Stopping(Node):
    """A node that acts when it gets a child."""

    __slots__ = ("_children", "then")

    @property
    def children(self):
        return self._children

    @children.setter
    def children(self, value):
        self._children = value
        if value is not None:
            self.then()


@forks
def test_child_finds_a_batch_of_another_thread_unfinished_and_finishes_it(served):
    def stop():
        inside.set()
        assert forked.wait(TIMEOUT)

    served.settle_at = 100
    inside, forked = threading.Event(), threading.Event()
    node = Stopping.__new__(Stopping)
    node.__init__(VARIABLE, (), ())
    node.then = stop
    x = Handle(served, node, 2.0)
    served.extra(node).owner = weakref.ref(x)
    served.register(node)
    y = x * x
    z = y * x

    def child():
        node.then = int
        assert served.busy
        assert (stats(served).nodes, stats(served).registered, stats(served).variables) == (3, 3, 1)
        audit(served, handles_of(served))
        run_backward(z)
        assert x._grad == 12.0
        assert stats(served).consumed == 2
        audit(served, handles_of(served))

    with thread(served.settle):
        assert inside.wait(TIMEOUT)
        in_child(child)
        forked.set()
    node.then = int
    assert stats(served).nodes == 3


def test_restart_after_fork_starts_a_new_thread_with_the_old_interval(sweeper, registry, sweeps):
    sweeper.start(LONG)
    sweeps.wait()
    old = sweeper._worker
    sweeper.restart_after_fork()  # in a child the old thread would not exist
    sweeps.wait()
    assert sweeper._worker is not old
    assert sweeper.is_running()
    assert sweeper.interval == 60.0
    old.end()
    old.join(TIMEOUT)
    assert not old.is_alive()


def test_child_gets_a_new_lock(served, sweeper, monkeypatch):
    old = served.lock
    held, done = threading.Event(), threading.Event()

    def hold():
        with old:
            held.set()
            assert done.wait(TIMEOUT)

    with thread(hold):
        assert held.wait(TIMEOUT)
        monkeypatch.setattr(process, "_process", 0)  # as if the handler's process were the parent
        process._after_fork_in_child()
        new = served.lock
        assert new is not old
        process._after_fork_in_child()  # registered twice, by two threads at once
        assert served.lock is new
        run_backward(variable(served, 1.0))  # would wait for the old one
        done.set()
    assert not sweeper.is_running()


def test_thread_that_forks_within_the_registry_keeps_its_lock_in_the_child(served, monkeypatch):
    monkeypatch.setattr(process, "_process", 0)
    with served.lock:
        old = served.lock
        process._after_fork_in_child()
        assert served.lock is old
    assert not served.lock._is_owned()


def test_platform_without_fork_needs_no_handlers(monkeypatch):
    monkeypatch.delattr(os, "register_at_fork", raising=False)
    monkeypatch.setattr(Node, "leaves", Node.leaves)  # put back at the end: the module sets it anew
    spec = importlib.util.spec_from_file_location("process_without_fork", process.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.survive_forks()
    assert module.registry.sweep().nodes == 0
