"""The registry: every tracked operation, and the sweep that removes those that no living tensor can use.

Guarantees
- Making a tracked tensor and dropping one are each a single append to a queue: `born` and `dropped`. Neither takes a
  lock, so a finaliser may do either at any point, also on a thread that holds the lock. All bookkeeping is done in
  batches, under the lock, at a cost of O(1) for each node made and each orphan, whatever the size of the live graph.
- The lock is held for at most `BATCH` steps at a time, or for one node's edges if it has more. Saved values die outside
  it, and no kernel, hook or callback runs inside it.
- Every node leaves in one of two ways, consumed or swept: registered == nodes + consumed + swept.
- An exception at any line (KeyboardInterrupt, MemoryError), and a fork at any moment, loses nothing. An entry is taken
  off its queue once it is done, and doing it again does no harm; counts are taken anew after a batch that did not end.

A sweep is deferred reference counting. It first enters the nodes that were born, then takes the dropped ones; one with
no handle and no child goes, which may leave a parent with no handle and no child, which follows: leaf first. Births
are entered before drops because an operation's inputs are kept alive by their tensors until its node is in `born`: so
when a drop is looked at, every child of that node has been counted, and no parent is taken from an operation under
construction.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

from sweepgrad.atomic import numbers
from sweepgrad.graph.node import CONSUMED, REMOVED, VARIABLE, Extra, Gone, Node
from sweepgrad.graph.report import Callbacks, SweepReport, Threshold, consumed_error, descendant_mark, tally
from sweepgrad.shards import Shards, including, others_than, parts

BATCH = 64
"""Steps per hold of the lock: about 0.25 ms, short for other threads, long enough that taking it costs little."""

SETTLE = 128
"""Births after which a registering thread enters them: amortises the lock, which costs as much as the append itself."""

BIG = 1 << 16
"""Saved bytes that make a node worth entering at once, so that the byte threshold sees it."""

RELIEF = 192
"""Most orphans that one operation, or the end of one backward pass, removes: so that none pays for a large backlog."""

HELP_FACTOR = 4
"""With the daemon running, a registering thread sweeps by itself once the backlog is this many thresholds."""

PAUSE = 1e-4
"""Seconds for which the daemon lets go of the interpreter after each batch: else others wait 5 ms for it, each time."""


class _Decided:
    """A backward pass that has been decided, and how much of it has been carried out."""

    __slots__ = ("done", "nodes", "totals")

    def __init__(self, nodes: list[Node], totals: list[tuple[Any, Any, Any]]) -> None:
        self.nodes = nodes
        self.totals = totals
        self.done = 0


class Registry:
    """The graph's nodes and counts. One serves the process; tests make their own."""

    def __init__(
        self,
        *,
        lock: Any = None,
        clock: Callable[[], float] = time.perf_counter,
        settle_at: int = SETTLE,
    ) -> None:
        # The lock guards all that follows down to `sweep_seconds`, and every field of a registered node but `id`. It is
        # reentrant because the garbage collector may run a user's finaliser, and that finaliser an operation or a
        # sweep, while this thread holds it; `busy` then makes such a sweep leave the work to the outer one.
        self.lock: Any = threading.RLock() if lock is None else lock
        self.busy = False  # within a batch, or after one that an exception ended
        self.nodes: Shards[Node] = Shards()  # by id
        self.ready: list[Node] = []  # no handle and no child when they were put here
        self.retiring: deque[Node] = deque()  # consumed, not yet removed
        # Computed from a consumed node, their saved values not yet released; of very many children pieces by number.
        self.stranded: list[Node | dict[int, Node]] = []
        self.decided: _Decided | None = None  # a pass whose gradients and consumption are not all written yet
        self.version = 0  # passes decided, and gradients set by others
        self.registered = 0
        self.consumed = self.swept = 0
        self.variables = 0
        self.with_children = 0
        self.saved_bytes = self.device_bytes = 0  # the second are among the first
        self.peak = self.sweeps = 0
        self.sweep_seconds = 0.0
        # Not guarded: appended to by anyone, read from the left under the lock.
        self.born: deque[Node] = deque()
        self.dropped: deque[Node | None] = deque()  # None: done with, but for an interrupt
        self.threshold = Threshold(nodes=2000, bytes=64 << 20)
        self.settle_at = self._settle_at = settle_at
        self.bytes_mark = self.threshold.bytes  # saved bytes beyond which the next registering thread looks
        self.callbacks = Callbacks()
        self.wake: Callable[[], None] | None = None  # set by a running sweeper
        self.clock = clock
        self._number = numbers()

    def register(self, node: Node) -> None:
        """Add `node`, whose parents the caller keeps alive through their tensors until this returns."""
        node.id = number = self._number()
        self.born.append(node)
        # By number, not by the length of `born`, which others may keep short: thresholds are looked at all the same.
        if number % self.settle_at == 0 or node.nbytes >= BIG:
            self.settle()
            if len(self.dropped) > self.threshold.nodes or self.saved_bytes > self.bytes_mark:
                self._relieve()

    def settle(self) -> None:
        """Enter every node that has been born by now."""
        self.finish()
        births = len(self.born) + self.busy  # which a batch that did not end may have left
        while births > 0:
            nested = self.lock._is_owned()
            with self.lock:
                if not self._begin(nested):
                    return
                births = self._enter(births, BATCH)[0]
                self.busy = False

    def _begin(self, nested: bool) -> bool:
        """Whether a batch may begin: not within one of this thread, whose finaliser asks. The lock is held.

        `nested` says whether this thread held the lock before: if not, a batch that did not end was interrupted.
        """
        if self.busy:
            if nested:
                return False
            vars(self).update(tally(self))
        self.busy = True
        return True

    def _enter(self, births: int, steps: int) -> tuple[int, int]:
        """Enter up to `steps` of the first `births` born nodes; what is left of both. The lock is held."""
        born, nodes = self.born, self.nodes
        self.peak = max(self.peak, self.registered - self.consumed - self.swept + len(self.retiring) + len(born))
        births = min(births, len(born))
        while births > 0 and steps > 0:
            births -= 1
            node = born[0]
            if node.saved is CONSUMED:  # by a backward pass, before anyone asked: nothing to enter
                steps -= 1
                if node.id in nodes:
                    self.retiring.append(node)
                elif node.children is not REMOVED:
                    node.links, node.children, self.registered = (), REMOVED, self.registered + 1
                born.popleft()
                continue
            piece = nodes.piece(node.id)
            if node.id not in piece:
                if node.rule is VARIABLE:
                    self.variables += 1
                self.saved_bytes += node.nbytes
                self.device_bytes += node.nbytes * node.on_device
                piece[node.id], self.registered = node, self.registered + 1
            parents = node.parents
            steps -= 1 + len(parents) // 8
            for parent in parents:
                children = parent.children
                if children is None:
                    self.with_children += 1
                    parent.children = node
                elif children is REMOVED:
                    self.stranded.append(node)
                elif children is not node:
                    parent.children = including(children, node)  # type: ignore[arg-type]
            if node.saved is CONSUMED:  # meanwhile, by a finaliser's pass, which may have come before it was in `nodes`
                self.retiring.append(node)
            born.popleft()
        return births, steps

    def extra(self, node: Node) -> Extra:
        """The node's owner and hooks, made when first asked for."""
        with self.lock:
            node.extra = extra = node.extra or Extra()
            return extra

    def _relieve(self) -> None:
        """Sweep, or wake the daemon: more was dropped or saved than the threshold allows."""
        limit = self.threshold
        if self.dropped or self.ready or self.stranded:
            grown = self.saved_bytes - self.bytes_mark + limit.bytes  # since the last sweep
            backlog = max(len(self.dropped) / limit.nodes, grown / limit.bytes)
            if (wake := self.wake) is not None and backlog < HELP_FACTOR:
                wake()
                return
            self._sweep(RELIEF, None, "threshold")
        # Look again only after as much growth again, so a growing live graph costs nothing.
        self.bytes_mark = self.saved_bytes + limit.bytes

    def set_threshold(self, nodes: int | None = None, nbytes: int | None = None) -> None:
        """Change the thresholds; None leaves one as it is."""
        with self.lock:
            old = self.threshold
            self.threshold = Threshold(nodes=nodes or old.nodes, bytes=nbytes or old.bytes)
            self.settle_at = min(self._settle_at, self.threshold.nodes)
            self.bytes_mark = self.saved_bytes + self.threshold.bytes

    def sweep(
        self, *, max_nodes: int | None = None, max_seconds: float | None = None, trigger: str = "call"
    ) -> SweepReport:
        """Remove orphans, leaf first, until none is left or a limit is reached."""
        return SweepReport(*self._sweep(max_nodes, max_seconds, trigger))

    def _sweep(self, max_nodes: int | None, max_seconds: float | None, trigger: str) -> tuple[int, int, float, int]:
        """The sweep itself; the fields of its report, which takes longer to make than a small sweep."""
        start = self.clock()
        if self.callbacks:
            self.callbacks.announce("start", {"trigger": trigger, "dropped": len(self.dropped)})
        nodes = freed = 0
        entries = len(self.dropped)  # as many as others drop from now on are for the next sweep, so this one ends
        while max_nodes is None or nodes < max_nodes:
            limit = BATCH if max_nodes is None or max_nodes - nodes > BATCH else max_nodes - nodes
            entries, removed, released, more, dead = self._batch(limit, entries)
            del dead  # the arrays die here, outside the lock
            nodes += removed
            freed += released
            if not more or (max_seconds is not None and self.clock() - start >= max_seconds):
                break
            if trigger == "sweeper":
                time.sleep(PAUSE)
        seconds = self.clock() - start
        self.settle()  # a birth may turn out to descend from a consumed node, and wait to be released
        with self.lock:
            self.sweeps, self.sweep_seconds = self.sweeps + 1, self.sweep_seconds + seconds
            self.bytes_mark = self.saved_bytes + self.threshold.bytes
            remaining = len(self.dropped) + len(self.ready) + len(self.retiring) + len(self.stranded)
        if self.callbacks:
            report = SweepReport(nodes, freed, seconds, remaining)
            self.callbacks.announce("stop", {"trigger": trigger, **report.as_dict()})
        return nodes, freed, seconds, remaining

    def _batch(self, limit: int, entries: int) -> tuple[int, int, int, bool, list[Any]]:
        """Take up to `BATCH` steps, up to `entries` of them drops; remove up to `limit` orphans.

        Returns what is left of `entries`, nodes and bytes removed, whether there is more, and what is to die unlocked.
        """
        dead: list[Any] = []
        nested = self.lock._is_owned()
        with self.lock:
            if self.decided is not None:  # before that, a sweep might take what the pass is about to consume
                return entries, 0, 0, True, self._carry_out(nested)
            if not self._begin(nested):
                return 0, 0, 0, False, dead
            # Here, since another sweep may have taken the drops that the caller counted: those to be looked at now may
            # be later ones. And first the drops, then the births: a node's children were born before it was dropped.
            entries = min(entries, len(self.dropped))
            births, steps = self._enter(len(self.born), BATCH)
            retiring, stranded = self.retiring, self.stranded
            while retiring and steps > 0:
                steps -= 1 + self._remove(retiring[0], dead)
                retiring.popleft()
            before = self.saved_bytes
            while stranded and steps > 0:
                last = len(stranded) - 1
                if isinstance(node := stranded[last], dict):
                    stranded[last:] = node.values()
                    continue
                steps -= 1
                self._release(node, dead)
                del stranded[last]
            entries, removed = self._reap(steps, limit, entries, dead)
            released = before - self.saved_bytes
            more = births > 0 or entries > 0 or bool(self.ready or retiring or stranded)
            self.busy = False
        return entries, removed, released, more, dead

    def _reap(self, steps: int, limit: int, entries: int, dead: list[Any]) -> tuple[int, int]:
        """Look at up to `entries` drops, remove up to `limit` orphans; what is left of the first, and how many went."""
        ready, dropped = self.ready, self.dropped
        swept = self.swept
        while steps > 0 and self.swept - swept < limit:
            steps -= 1
            if not ready:
                if not entries or not dropped:
                    return 0, self.swept - swept
                entries -= 1
                node = dropped[0]
                if node is not None:
                    if node.saved is CONSUMED:
                        dead.append(node)  # gone or going; this may be the last that knows it, and holds its hooks
                    elif node.handles == 1 and not node.children:
                        ready.append(node)
                    node.handles, dropped[0] = node.handles - 1, None
                dropped.popleft()
                if not ready:
                    continue
            last = len(ready) - 1
            node = ready[last]
            if not node.handles and not node.children:
                steps -= self._remove(node, dead)
            del ready[last]
        return entries, self.swept - swept

    def _remove(self, node: Node, dead: list[Any]) -> int:
        """Take `node` out, unless it is out already, and cut its edges; steps taken beyond one. The lock is held."""
        dead.append(node)  # even if it is out: this may be the last that knows it, and its hooks die with it
        if node.id not in self.nodes:
            return 0
        if node.children:
            self._strand(node)
        node.children = REMOVED
        more = len(node.parents) // 8
        self._unlink(node)
        saved = node.saved
        if type(saved) is tuple:
            dead.append(saved)
            node.saved = Gone(node.rule.name)  # read only if a finaliser brings a swept tensor back to life
        if saved is not CONSUMED:
            self.swept += 1
        if node.rule is VARIABLE:
            self.variables -= 1
        self.saved_bytes -= node.nbytes
        self.device_bytes -= node.nbytes * node.on_device
        self.nodes.discard(node.id)
        return more

    def _strand(self, node: Node) -> None:
        """Queue what was computed from `node`, through which no pass can run any more. The lock is held."""
        self.stranded.extend(parts(node.children))  # type: ignore[arg-type]
        self.with_children -= 1
        node.children = REMOVED

    def _unlink(self, node: Node) -> None:
        """Cut the edges from `node` to its parents; a parent that is left alone becomes ready. The lock is held."""
        for parent in node.parents:
            children = parent.children
            if children is not node and others_than(node, children):  # a parent either has children or None
                continue
            if not parent.handles and parent.saved is not CONSUMED:  # else it is being retired
                self.ready.append(parent)
            self.with_children -= 1
            parent.children = None
        node.links = ()

    def _release(self, node: Node, dead: list[Any]) -> None:
        """Drop what `node` saved, as it descends from a consumed node and can never run. The lock is held."""
        dead.append(node)
        if node.id not in self.nodes:
            return  # a pass for which the consumed node did not count has consumed this one since
        mark = descendant_mark(node)  # made before the look, as a finaliser's pass may come in between
        saved = node.saved
        if type(saved) is tuple:
            self.device_bytes -= node.nbytes * node.on_device
            node.saved, node.nbytes, self.saved_bytes = mark, 0, self.saved_bytes - node.nbytes
            dead.append(saved)
        if node.children:
            self._strand(node)
        node.children = REMOVED
        self._unlink(node)
        if not node.handles:
            self.ready.append(node)

    def commit(self, order: list[Node], totals: list[tuple[Any, Any, Any]], *, consume: bool, version: int) -> bool:
        """End a backward pass: set every gradient and consume the nodes that ran, together or not at all.

        `totals` holds (owner, gradient before, gradient after). False means that another thread changed a gradient
        meanwhile and nothing was done. Raises GraphConsumedError if another pass consumed a node of `order`.

        Nothing that the pass read has changed if the registry's version is still the `version` that it began with.
        Then one assignment decides, and what was decided is carried out in pieces: by this thread or, if it is
        interrupted, by the next that asks.
        """
        decided = _Decided([node for node in order if node.rule is not VARIABLE] if consume else [], totals)
        for tries in itertools.count():  # pragma: no branch  # it ends within
            # With the lock in the end, or many small passes could hold a large one up for as long as they go on.
            with self.lock if tries > 3 else nullcontext():
                if tries:
                    version = self.version  # read before what was decided until now is carried out, and so seen below
                    self.check(order)
                    if any(owner._grad is not before for owner, before, _ in totals):
                        return False
                if self._decide(decided, version):
                    break
        self.finish()
        return True

    def _decide(self, decided: _Decided, version: int) -> bool:
        """Make `decided` what is carried out, unless something was decided since `version`."""
        with self.lock:
            if self.version != version or self.decided is not None:
                return False
            self.decided, self.version = decided, version + 1  # in this order: who reads the version finds it
            return True

    def check(self, order: Iterable[Node]) -> None:
        """Raise GraphConsumedError if one of the nodes can no longer run."""
        self.finish()
        for node in order:
            if type(node.saved) is not tuple:
                raise consumed_error(node)

    def finish(self) -> None:
        """Carry out what a pass has decided, in pieces; unless an interrupt came, none is left."""
        while self.decided is not None:
            self._batch(0, 0)

    def _carry_out(self, nested: bool) -> list[Any]:
        """A piece of what was decided, which does no harm if it is done again; returns what is to die unlocked."""
        decided = self.decided
        if decided is None:
            return []
        done, end = decided.done, decided.done + BATCH
        # Without those that were released meanwhile, by a pass for which the consumed node did not count.
        nodes, totals = [n for n in decided.nodes[done:end] if type(n.saved) is tuple], decided.totals[done:end]
        dead = [decided, *[node.saved for node in nodes]]
        outermost = self._begin(nested)  # so that no finaliser enters a node after it was looked up here
        entered = [node for node in nodes if node.id in self.nodes]
        steps = chain(
            map(setattr, [owner for owner, _, _ in totals], repeat("_grad"), [new for _, _, new in totals]),
            map(setattr, nodes, repeat("saved"), repeat(CONSUMED)),
            map(self.retiring.append, entered),
            map(setattr, (self, decided), ("consumed", "done"), (self.consumed + len(nodes), end)),
        )
        sink: deque[None] = deque(maxlen=0)
        # Unless a finaliser has done it, and perhaps carried out passes of its own, of which `consumed` above knows
        # nothing. One call into C, in which no signal is looked at: all of them, or none.
        sink.extend(steps if self.decided is decided and decided.done == done else ())
        if self.decided is decided and decided.done >= max(len(decided.nodes), len(decided.totals)):
            self.decided = None
        if outermost:
            self.busy = False
        return dead

    def snapshot(self) -> list[Node]:
        """The nodes that are registered, in ascending order of id. The lock is held."""
        within, self.busy = self.busy, True  # so that no finaliser enters or removes one meanwhile
        nodes = sorted(self.nodes, key=attrgetter("id"))
        self.busy = within
        return nodes

    def set_gradients(self, owners: Sequence[Any], value: Any) -> None:
        """Set each owner's gradient, as a pass without nodes: another pass adds to all of them or to none before it."""
        decided = _Decided([], [(owner, owner._grad, value) for owner in owners])
        while not self._decide(decided, self.version):
            self.finish()
        self.finish()

    def retire(self) -> None:
        """Remove consumed nodes in batches, then a bounded number of orphans: the end of a backward pass."""
        if not (self.dropped or self.ready or self.stranded):
            self.settle()
            while self.retiring and self._batch(0, 0)[3]:
                pass  # False within a batch of this thread, which will go on with them
        if self.dropped or self.ready or self.stranded:
            self._sweep(RELIEF, None, "backward")
