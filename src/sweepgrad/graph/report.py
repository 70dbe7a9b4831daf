"""What the registry tells about itself: frozen values with a readable `str`, and the audit that checks the counts."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sweepgrad.errors import AuditError, GraphConsumedError
from sweepgrad.graph.node import CONSUMED, REMOVED, VARIABLE, Gone, Node, Unavailable

if TYPE_CHECKING:
    from sweepgrad.graph.registry import Registry

log = logging.getLogger("sweepgrad")

Callback = Callable[[str, dict[str, Any]], object]


def log_exception(message: str, *args: object) -> None:
    """Log the exception that is being handled; where there is no stderr, that goes nowhere."""
    with suppress(Exception):
        log.exception(message, *args)


pool_bytes: Callable[[], int] = int
"""Bytes idle in the pool of buffers; the pool's module sets it."""

device_pool_bytes: Callable[[], int] = int
"""Bytes idle on GPUs; the module of devices sets it."""


def format_bytes(count: float) -> str:
    """`count` bytes with a binary unit, as in `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def count(number: int, noun: str) -> str:
    """`number` of something, as in `1 node` or `2,000 nodes`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class Callbacks(list[Callback]):
    """Users' functions, called at the start and the stop of each sweep."""

    def __init__(self) -> None:
        self.errors = 0
        self._lock = threading.RLock()  # guards `errors`
        self._announcing = threading.local()

    def announce(self, phase: str, info: dict[str, Any]) -> None:
        """Call them; one that raises is logged and counted, and ends nothing."""
        if getattr(self._announcing, "now", False):
            return  # a callback that sweeps is not told about its own sweep
        self._announcing.now = True
        try:
            for callback in tuple(self):
                try:
                    callback(phase, dict(info))
                except Exception:
                    with self._lock:
                        self.errors += 1
                    log_exception("sweepgrad: the sweep callback %r raised", callback)
        finally:
            self._announcing.now = False


@dataclass(frozen=True, slots=True)
class Threshold:
    """When a registering thread sweeps: dropped tensors waiting, and bytes saved since the last sweep."""

    nodes: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What one sweep did.

    `nodes` and `bytes` were released in `seconds`. `remaining` counts what is still queued: dropped tensors not yet
    looked at, and nodes known to be orphans; 0 means that nothing is left to sweep.
    """

    nodes: int
    bytes: int
    seconds: float
    remaining: int

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"swept {count(self.nodes, 'node')} ({format_bytes(self.bytes)}) "
            f"in {self.seconds * 1e3:.2f} ms; {self.remaining:,} remaining"
        )


@dataclass(frozen=True, slots=True)
class GraphStats:
    """The registry's counts at one moment.

    `nodes` are registered now, `variables` and `childless` of them; `dropped` tensors are queued and not yet swept.
    `saved_bytes` are held for backward; an array that several nodes saved counts at each. `registered`, `consumed`
    and `swept` count nodes since the start, and `registered == nodes + consumed + swept` once queued work is done.
    `peak` is the most nodes at once, `sweeps` and `sweep_seconds` the sweeps so far. `indexes` gives the size of
    every index that the registry keeps. `pool_bytes` are held outside the graph, idle, for results to come. Of the
    saved bytes, `device_bytes` are in the memory of GPUs, where `device_pool_bytes` are idle.
    """

    nodes: int
    variables: int
    childless: int
    dropped: int
    saved_bytes: int
    registered: int
    consumed: int
    swept: int
    peak: int
    sweeps: int
    sweep_seconds: float
    indexes: Mapping[str, int]
    pool_bytes: int = 0
    device_bytes: int = 0
    device_pool_bytes: int = 0

    def __str__(self) -> str:
        idle = f"; {format_bytes(self.pool_bytes)} idle in the pool" if self.pool_bytes else ""
        idle += f"; {format_bytes(self.device_pool_bytes)} idle on devices" if self.device_pool_bytes else ""
        apart = f" ({format_bytes(self.device_bytes)} on devices)" if self.device_bytes else ""
        return (
            f"{count(self.nodes, 'node')} ({count(self.variables, 'variable')}, {self.childless:,} childless), "
            f"{format_bytes(self.saved_bytes)} saved{apart}, {self.dropped:,} dropped and waiting; "
            f"{self.registered:,} registered, {self.consumed:,} consumed, {self.swept:,} swept "
            f"in {self.sweeps:,} sweeps{idle}"
        )


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One registered node: its operation, its parents' ids, its result's shape and dtype, and what it saved.

    `alive` says whether a living tensor is this node's result or was computed from it.
    """

    id: int
    op: str
    parents: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    saved_bytes: int
    alive: bool

    def __str__(self) -> str:
        parents = ", ".join(map(str, self.parents)) or "none"
        return (
            f"node {self.id}: {self.op} {self.shape} {self.dtype}, parents {parents}, "
            f"{format_bytes(self.saved_bytes)} saved, {'alive' if self.alive else 'orphan'}"
        )


def tally(registry: "Registry") -> dict[str, int]:
    """The registry's counts that follow from its nodes and its other counts, by name."""
    consumed = -1
    while consumed != registry.consumed:  # else a finaliser has run a backward pass in between
        consumed, retiring = registry.consumed, set(registry.retiring.copy())
        nodes = registry.snapshot()
        kept = len(nodes) - sum(node.id in registry.nodes for node in retiring)
        swept = registered(registry) - consumed - kept
    return {
        "variables": sum(node.rule is VARIABLE for node in nodes),
        "with_children": sum(node.children is not None and node.children is not REMOVED for node in nodes),
        "saved_bytes": sum(node.nbytes for node in nodes),
        "device_bytes": sum(node.nbytes for node in nodes if node.on_device),
        "swept": swept,
    }


def registered(registry: "Registry") -> int:
    """How many nodes have been registered: those entered, and those consumed that wait to be counted as entered."""
    waiting = [node for node in registry.born.copy() if node.saved is CONSUMED and node.children is not REMOVED]
    return registry.registered + sum(node.id not in registry.nodes for node in waiting)


def consumed_error(node: Node) -> GraphConsumedError:
    """The error for a backward pass that needs `node`, whose saved values are gone."""
    name, source = node.rule.name, node.saved
    if type(source) is Gone and source is not CONSUMED:
        return GraphConsumedError(
            f"`{name}` (node {node.id}) needs the result of `{source}`, which was swept: its tensor was finalised and "
            "then brought back to life; compute the result anew"
        )
    how = (
        "was consumed by an earlier backward pass"
        if source is CONSUMED
        else f"was computed from `{source}`, which an earlier backward pass consumed"
    )
    return GraphConsumedError(
        f"`{name}` (node {node.id}) {how}, so no backward pass can run through it; "
        "give the earlier pass retain_graph=True, or compute the result anew"
    )


def descendant_mark(node: Node) -> Gone:
    """What takes the place of the saved values of `node`, computed from a node that is gone: it names that one."""
    marks = (
        Unavailable(parent.rule.name) if parent.saved is CONSUMED else parent.saved
        for parent in node.parents
        if isinstance(parent.saved, Gone)
    )
    return next(marks, Unavailable("an operation"))


def living(nodes: Iterable[Node], dropped: Iterable[Node | None]) -> set[Node]:
    """Those of `nodes`, given in ascending order of id, that have a handle or a live descendant."""
    pending = Counter(dropped)
    alive: set[Node] = set()
    for node in reversed(list(nodes)):
        if node in alive or node.handles > pending[node]:
            alive.add(node)
            alive.update(node.parents)
    return alive


def stats(registry: "Registry") -> GraphStats:
    """The counts of `registry`, read together under its lock."""
    idle, idle_on_devices = pool_bytes(), device_pool_bytes()  # outside the lock: they take those of pools
    registry.settle()
    with registry.lock:
        within, registry.busy = registry.busy, True  # so that no finaliser sweeps meanwhile
        nodes = len(registry.nodes)
        found = GraphStats(
            nodes=nodes,
            variables=registry.variables,
            childless=nodes - registry.with_children,
            dropped=len(registry.dropped),
            saved_bytes=registry.saved_bytes,
            registered=registered(registry),
            consumed=registry.consumed - len(registry.retiring),
            swept=registry.swept,
            peak=registry.peak,
            sweeps=registry.sweeps,
            sweep_seconds=registry.sweep_seconds,
            indexes={
                "nodes": nodes,
                "born": len(registry.born),
                "dropped": len(registry.dropped),
                "ready": len(registry.ready),
                "retiring": len(registry.retiring),
                "stranded": len(registry.stranded),
            },
            pool_bytes=idle,
            device_bytes=registry.device_bytes,
            device_pool_bytes=idle_on_devices,
        )
        registry.busy = within
    return found


def node_infos(registry: "Registry") -> list[NodeInfo]:
    """A snapshot of the registered nodes, in the order in which they were made."""
    registry.settle()
    with registry.lock:
        nodes, dropped = registry.snapshot(), registry.dropped.copy()
    alive = living(nodes, dropped)
    return [
        NodeInfo(
            id=node.id,
            op=node.rule.name,
            parents=tuple(parent.id for parent in node.parents),
            shape=node.shape,
            dtype=node.dtype,
            saved_bytes=node.nbytes,
            alive=node in alive,
        )
        for node in nodes
    ]


def audit(registry: "Registry", find_handles: Callable[[], Mapping[Node, int]]) -> None:
    """Recompute from scratch what should be registered and compare every count; raise AuditError on a difference.

    `find_handles` counts the living handles of each node by other means than the registry's own counting: through the
    garbage collector, so it misses those that were there when `gc.freeze` was called.
    """
    registry.settle()
    with registry.lock:
        while True:
            dropped = registry.dropped.copy()
            handles = find_handles()
            if len(dropped) == len(registry.dropped):
                break  # else a tensor was dropped while they were counted
        nodes = registry.snapshot()
        problems = [*_wrong_counts(registry), *_wrong_edges(nodes), *_lost(registry, nodes, dropped)]
        problems += [f"{node!r}: registered as {key}" for key, node in registry.nodes.items() if key != node.id]
        pending = Counter(dropped)
        for node in nodes:
            held = node.handles - pending[node]
            if held != handles.get(node, 0):
                problems.append(f"{node!r}: {held} handles counted, {handles.get(node, 0)} found")
    if problems:
        raise AuditError("the graph registry is inconsistent: " + "; ".join(problems[:10]))


def _wrong_counts(registry: "Registry") -> list[str]:
    """Counts that differ from what the registered nodes add up to."""
    return [
        f"{name.replace('_', ' ')}: {getattr(registry, name)} counted, {number} found"
        for name, number in tally(registry).items()
        if getattr(registry, name) != number
    ]


def _lost(registry: "Registry", nodes: Iterable[Node], dropped: Iterable[Node | None]) -> list[str]:
    """Nodes that should go, or release what they saved, and stand in no queue."""
    alive = living(nodes, dropped)
    retiring, stranded = set(registry.retiring), set[Node]()
    for one in registry.stranded:
        stranded.update(one.values() if isinstance(one, dict) else (one,))
    queued = retiring | stranded | set(registry.ready)
    # Parents of a node whose removal has begun: where an exception ended it, it is taken up again and finds them.
    queued |= {parent for node in nodes if node.children is REMOVED for parent in node.parents}
    problems = []
    for node in nodes:
        if node not in alive and not node.handles and not node.children and node not in queued:
            problems.append(f"{node!r}: an orphan that no sweep would find")
        if node.saved is CONSUMED and node not in retiring:
            problems.append(f"{node!r}: consumed, and no sweep would remove it")
        if type(node.saved) is tuple and node not in stranded and any(p.children is REMOVED for p in node.parents):
            problems.append(f"{node!r}: computed from a consumed node, and no sweep would release it")
    return problems


def _wrong_edges(nodes: Iterable[Node]) -> list[str]:
    """Edges that only one of their two ends knows."""
    down: dict[Node, set[Node]] = {}
    for node in nodes:
        for parent in node.parents:
            down.setdefault(parent, set()).add(node)
    cutting = {node for node in nodes if node.children is REMOVED}  # one edge after the other
    problems = []
    for node in nodes:
        children = node.children
        if children is REMOVED and type(node.saved) is not tuple:
            continue  # it can run no more, and its children are being cut
        known = {children} if isinstance(children, Node) else set(children or ())
        if known - cutting != down.get(node, set()) - cutting:
            problems.append(f"{node!r}: children {known} kept, {down.get(node, set())} found")
    return problems
