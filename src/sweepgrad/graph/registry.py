"""The registry: every tracked operation, and the sweep that removes those that no living tensor can use.

Guarantees
- Registering costs the same however large the graph is; sweeping costs O(orphans), whatever the size of the live part.
- The lock is held for at most `BATCH` steps at a time while sweeping. Saved values die outside it, and no kernel,
  hook or callback runs inside it.
- A finaliser only ever appends to `dropped`: it takes no lock, so it may run at any point, also on a thread that
  holds the lock.
- Every node leaves in one of two ways, consumed or swept, through `_remove`: registered == nodes + consumed + swept.

A sweep is deferred reference counting. Dropping a tensor queues its node; the sweep takes the queue's nodes, and one
with no handle and no child goes, which may leave a parent with no handle and no child, which follows: leaf first.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

from sweepgrad.errors import ArgumentError, GraphConsumedError
from sweepgrad.graph.node import REMOVED, VARIABLE, Consumed, Extra, Gone, Node, Unavailable
from sweepgrad.graph.report import SweepReport, Threshold

log = logging.getLogger("sweepgrad")

BATCH = 256
"""Steps per hold of the lock: about 0.1 ms, short for other threads, long enough that taking the lock costs little."""

BACKWARD_SWEEP = 4096
"""Most orphans that the end of one backward pass removes, so that no single pass pays for a large backlog."""

HELP_FACTOR = 4
"""With the daemon running, a registering thread sweeps by itself once the backlog is this many thresholds."""

Callback = Callable[[str, dict[str, Any]], object]


class Registry:
    """The graph's nodes and counts. One serves the process; tests make their own."""

    def __init__(self, *, lock: Any = None, clock: Callable[[], float] = time.perf_counter) -> None:
        # The lock guards all that follows down to `peak`, and every field of a registered node. It is reentrant
        # because the garbage collector may run a user's finaliser, and that finaliser an operation, while this
        # thread holds it; each step below leaves the structure whole at every point where that can happen.
        self.lock = threading.RLock() if lock is None else lock
        self.nodes: dict[int, Node] = {}
        self.ready: list[Node] = []  # no handle and no child when they were put here
        self.retiring: list[Node] = []  # consumed, not yet removed
        self.stranded: list[Node] = []  # computed from a consumed node, their saved values not yet released
        self.registered = 0
        self.consumed = 0
        self.swept = 0
        self.variables = 0
        self.with_children = 0
        self.saved_bytes = 0
        self.peak = 0
        self.sweeps = 0
        self.sweep_seconds = 0.0
        # Not guarded: appended to by finalisers, read from the left under the lock.
        self.dropped: deque[Node] = deque()
        self.threshold = Threshold(nodes=2000, bytes=64 << 20)
        self.bytes_mark = self.threshold.bytes  # saved bytes beyond which the next registering thread looks
        self.callbacks: list[Callback] = []
        self.callback_errors = 0
        self.wake: Callable[[], None] | None = None  # set by a running sweeper
        self.clock = clock
        self._announcing = threading.local()

    def register(self, node: Node) -> None:
        """Add `node`, whose parents the caller keeps alive through their tensors until this returns."""
        with self.lock:
            self.registered = node.id = number = self.registered + 1
            self.nodes[number] = node
            self.saved_bytes += node.nbytes
            for parent in node.parents:
                while True:
                    children = parent.children
                    if children is None:
                        parent.children = node
                        self.with_children += 1
                    elif type(children) is set:
                        children.add(node)
                    elif children is REMOVED:
                        self.stranded.append(node)
                    else:
                        pair = {children, node}  # the collector may run here, and a finaliser change the children
                        if parent.children is not children:
                            continue
                        parent.children = pair  # type: ignore[assignment]
                    break
            if node.rule is VARIABLE:
                self.variables += 1
        if len(self.dropped) > self.threshold.nodes or self.saved_bytes > self.bytes_mark:
            self._relieve()

    def share(self, node: Node) -> None:
        """Count one more handle on `node`, for a second tensor that refers to it."""
        with self.lock:
            node.handles += 1

    def extra(self, node: Node) -> Extra:
        """The node's owner and hooks, made when first asked for."""
        with self.lock:
            if node.extra is None:
                node.extra = Extra()
            return node.extra

    def _relieve(self) -> None:
        """Sweep, or wake the daemon: more was dropped or saved than the threshold allows."""
        limit = self.threshold
        if self.dropped or self.ready or self.stranded:
            grown = self.saved_bytes - self.bytes_mark + limit.bytes  # since the last sweep
            backlog = max(len(self.dropped) / limit.nodes, grown / limit.bytes)
            if self.wake is not None and backlog < HELP_FACTOR:
                self.wake()
                return
            self.sweep(trigger="threshold")
        # Nothing more can go: look again only after as much growth again, so a growing live graph costs nothing.
        self.bytes_mark = self.saved_bytes + limit.bytes

    def set_threshold(self, nodes: int | None = None, nbytes: int | None = None) -> None:
        """Change the thresholds; None leaves one as it is."""
        for name, value in (("nodes", nodes), ("bytes", nbytes)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ArgumentError(f"`set_threshold` {name} is {value!r}; needed is a positive integer")
        with self.lock:
            old = self.threshold
            self.threshold = Threshold(nodes=nodes or old.nodes, bytes=nbytes or old.bytes)
            self.bytes_mark = self.saved_bytes + self.threshold.bytes

    def sweep(
        self, *, max_nodes: int | None = None, max_seconds: float | None = None, trigger: str = "call"
    ) -> SweepReport:
        """Remove orphans, leaf first, until none is left or a limit is reached."""
        start = self.clock()
        if self.callbacks:
            self._announce("start", {"trigger": trigger, "dropped": len(self.dropped)})
        nodes = freed = 0
        entries = len(self.dropped)  # what others drop from now on is for the next sweep, so this one ends
        while max_nodes is None or nodes < max_nodes:
            limit = BATCH if max_nodes is None else min(BATCH, max_nodes - nodes)
            with self.lock:
                entries, dead, count, size = self._batch(limit, entries)
                more = entries > 0 or bool(self.ready or self.retiring or self.stranded)
            nodes += count
            freed += size
            del dead  # the arrays die here, outside the lock
            if not more or (max_seconds is not None and self.clock() - start >= max_seconds):
                break
        seconds = self.clock() - start
        with self.lock:
            self.sweeps += 1
            self.sweep_seconds += seconds
            self.bytes_mark = self.saved_bytes + self.threshold.bytes
            remaining = self._backlog()
        report = SweepReport(nodes=nodes, bytes=freed, seconds=seconds, remaining=remaining)
        if self.callbacks:
            self._announce("stop", {"trigger": trigger, **report.as_dict()})
        return report

    def _backlog(self) -> int:
        return len(self.dropped) + len(self.ready) + len(self.retiring) + len(self.stranded)

    def _batch(self, limit: int, entries: int) -> tuple[int, list[Any], int, int]:
        """Take up to `BATCH` steps and remove up to `limit` orphans; the lock is held.

        Returns the drop-queue entries still to look at, what must die outside the lock, and nodes and bytes released.
        """
        dead: list[Any] = []
        before, swept = self.saved_bytes, self.swept
        self.peak = max(self.peak, len(self.nodes))
        steps = BATCH
        while self.retiring and steps:
            steps -= 1
            self._remove(self.retiring.pop(), dead)
        while self.stranded and steps:
            steps -= 1
            self._release(self.stranded.pop(), dead)
        ready, dropped = self.ready, self.dropped
        while steps and self.swept - swept < limit:
            steps -= 1
            if ready:
                node = ready.pop()
            elif entries and dropped:
                entries -= 1
                node = dropped.popleft()
                node.handles -= 1
            else:
                entries = 0
                break
            if not node.handles and not node.children:
                self._remove(node, dead)
        return entries, dead, self.swept - swept, before - self.saved_bytes

    def _remove(self, node: Node, dead: list[Any]) -> None:
        """Take `node` out of every index, unless it is out already, and cut its edges. The lock is held."""
        dead.append(node)  # even if it is out: this may be the last that knows it, and its hooks die with it
        if self.nodes.pop(node.id, None) is None:
            return
        self.saved_bytes -= node.nbytes
        self._strand(node)
        if type(node.saved) is Consumed:
            self.consumed += 1
        else:
            self.swept += 1
            if node.rule is VARIABLE:
                self.variables -= 1
            dead.append(node.saved)
            if type(node.saved) is tuple:
                node.saved = Gone(node.rule.name)  # read only if a finaliser brings the swept tensor back to life
        self._unlink(node)

    def _strand(self, node: Node) -> None:
        """Queue what was computed from `node`, through which no pass can run any more. The lock is held."""
        children, node.children = node.children, REMOVED
        if children:
            self.with_children -= 1
            self.stranded.extend(children if isinstance(children, set) else (children,))  # type: ignore[arg-type]

    def _unlink(self, node: Node) -> None:
        """Cut the edges from `node` to its parents; a parent that is left alone becomes ready. The lock is held."""
        parents, node.parents = node.parents, ()
        for parent in parents:
            children = parent.children
            if children is node:
                parent.children = None
                self.with_children -= 1
                if not parent.handles:
                    self.ready.append(parent)
            elif type(children) is set:
                children.discard(node)
                if not children:
                    parent.children = None
                    self.with_children -= 1
                    if not parent.handles:
                        self.ready.append(parent)

    def _release(self, node: Node, dead: list[Any]) -> None:
        """Drop what `node` saved, as it descends from a consumed node and can never run. The lock is held."""
        dead.append(node)
        gone = next((parent.saved for parent in node.parents if isinstance(parent.saved, Gone)), None)
        if gone is None or type(node.saved) is not tuple:
            return  # removed, released or consumed already
        dead.append(node.saved)
        node.saved = Gone(gone) if type(gone) is Gone else Unavailable(gone)
        self.saved_bytes -= node.nbytes
        node.nbytes = 0
        self._strand(node)
        self._unlink(node)
        if not node.handles:
            self.ready.append(node)

    def commit(self, order: list[Node], totals: list[tuple[Any, Any, Any]], *, consume: bool) -> bool:
        """End a backward pass: set every gradient and consume the nodes that ran, together or not at all.

        `totals` holds (owner, gradient before, gradient after). False means that another thread changed a gradient
        meanwhile and nothing was done. Raises GraphConsumedError if another pass consumed a node of `order`.
        """
        ran = [node for node in order if node.rule is not VARIABLE] if consume else []
        marks = {name: Consumed(name) for name in {node.rule.name for node in ran}}
        owners, before, after = zip(*totals, strict=True) if totals else ((), (), ())
        steps = chain(
            map(setattr, owners, repeat("_grad"), after),
            map(setattr, ran, repeat("saved"), [marks[node.rule.name] for node in ran]),
            map(self.retiring.append, reversed(ran)),
        )
        sink: deque[None] = deque(maxlen=0)
        kept = [node.saved for node in ran]  # so that no saved value dies, and runs a finaliser, under the lock
        with self.lock:
            for node in order:
                if type(node.saved) is not tuple:
                    raise consumed_error(node)
            if any(owner._grad is not old for owner, old in zip(owners, before, strict=True)):
                return False
            # One call into C, which allocates nothing: neither a signal handler, and so no KeyboardInterrupt, nor the
            # collector can come between two of the steps.
            sink.extend(steps)
        del kept
        return True

    def retire(self) -> None:
        """Remove consumed nodes in batches, then a bounded number of orphans: the end of a backward pass."""
        while self.retiring:
            with self.lock:
                dead = self._batch(0, 0)[1]
            del dead
        if self.dropped or self.ready or self.stranded:
            self.sweep(max_nodes=BACKWARD_SWEEP, trigger="backward")

    def _announce(self, phase: str, info: dict[str, Any]) -> None:
        """Call the user's callbacks; one that raises is logged and counted, and ends nothing."""
        if getattr(self._announcing, "now", False):
            return  # a callback that sweeps is not told about its own sweep
        self._announcing.now = True
        try:
            for callback in tuple(self.callbacks):
                try:
                    callback(phase, dict(info))
                except Exception:
                    self.callback_errors += 1
                    log.exception("sweepgrad: the sweep callback %r raised", callback)
        finally:
            self._announcing.now = False

    def snapshot(self) -> tuple[list[Node], list[Node]]:
        """The registered nodes in ascending order of id, and the queue of dropped ones, at one moment."""
        with self.lock:
            return list(self.nodes.values()), list(self.dropped)

    def reset_lock(self) -> None:
        """Make the lock anew, for a forked child in which nobody holds the old one."""
        self.lock = threading.RLock()


def consumed_error(node: Node) -> GraphConsumedError:
    """The error for a backward pass that needs `node`, whose saved values are gone."""
    name, source = node.rule.name, node.saved
    if type(source) is Gone:
        return GraphConsumedError(
            f"`{name}` (node {node.id}) needs the result of `{source}`, which was swept: its tensor was finalised and "
            "then brought back to life; compute the result anew"
        )
    how = (
        "was consumed by an earlier backward pass"
        if type(source) is Consumed
        else f"was computed from `{source}`, which an earlier backward pass consumed"
    )
    return GraphConsumedError(
        f"`{name}` (node {node.id}) {how}, so no backward pass can run through it; "
        "give the earlier pass retain_graph=True, or compute the result anew"
    )
