"""The computation graph: what it holds, when it is swept, and whether its counts are right.

Shaped like Python's `gc`: `stats`, `nodes`, `set_threshold`, `get_threshold`, `callbacks`, and `audit`.
"""

import gc as _gc

from sweepgrad.errors import ArgumentError
from sweepgrad.graph import process as _process
from sweepgrad.graph import report as _report
from sweepgrad.graph.report import Callback, GraphStats, NodeInfo, SweepReport, Threshold

callbacks: list[Callback] = _process.registry.callbacks
"""Functions called as `callback(phase, info)` at the "start" and the "stop" of each sweep, like `gc.callbacks`.

`info` is a dict: `trigger` ("call", "sweeper", "backward" or "threshold"); at the start `dropped`; at the stop the
fields of `SweepReport`. They run without the registry's lock, on the thread that sweeps, which at the
end of a backward pass does not record operations. One that raises is logged.
"""


def stats() -> GraphStats:
    """The registry's counts, read together.

    Example:
        >>> import sweepgrad as sg
        >>> x = sg.ones((3,), requires_grad=True)
        >>> sg.graph.stats().variables >= 1
        True
    """
    return _report.stats(_process.registry)


def nodes() -> list[NodeInfo]:
    """A snapshot of every registered node, oldest first; it holds no tensor and no array.

    Example:
        >>> import sweepgrad as sg
        >>> x = sg.ones((3,), requires_grad=True)
        >>> y = x * 2.0
        >>> sg.graph.nodes()[-1].op
        'multiply'
    """
    return _report.node_infos(_process.registry)


def set_threshold(*, nodes: int | None = None, bytes: int | None = None) -> None:
    """Set when an operation sweeps by itself: `nodes` dropped and waiting, or `bytes` saved since the last sweep.

    None leaves a value as it is.

    Raises:
        ValueError: if a value is not a positive integer.
    """
    for name, value in (("nodes", nodes), ("bytes", bytes)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ArgumentError(f"`set_threshold` {name} is {value!r}; needed is a positive integer")
    _process.registry.set_threshold(nodes, bytes)


def get_threshold() -> Threshold:
    """The thresholds in force."""
    return _process.registry.threshold


def audit() -> None:
    """Recompute from the living tensors what should be registered, and compare every count.

    Meant for tests and bug reports: it walks the whole graph and every object that Python's garbage collector knows.
    Tensors that were alive when `gc.freeze()` was called are not among those, and are reported as missing. Call it
    while no other thread computes: `gc.get_objects`, which this uses, can make a tuple fail that another thread builds.

    Raises:
        AuditError: naming each difference. That is a fault in sweepgrad.
    """
    _report.audit(_process.registry, _process.find_handles)


def sweep(
    *, max_nodes: int | None = None, max_seconds: float | None = None, collect_cycles: bool = False
) -> SweepReport:
    """Remove the graph's orphans, leaf first: nodes that no living tensor is or was computed from.

    Args:
        max_nodes: remove at most this many; None for all.
        max_seconds: stop soon after this many seconds; None for no limit.
        collect_cycles: run Python's `gc.collect()` first, for tensors caught in reference cycles.

    Returns:
        What was removed, and what remains queued.

    Raises:
        ValueError: if a limit is negative or not a number.

    Example:
        >>> import sweepgrad as sg
        >>> x = sg.ones((3,), requires_grad=True)
        >>> dropped = x * 2.0
        >>> del dropped
        >>> sg.sweep().remaining
        0
    """
    if max_nodes is not None and (not isinstance(max_nodes, int) or isinstance(max_nodes, bool) or max_nodes < 0):
        raise ArgumentError(f"`sweep` got max_nodes={max_nodes!r}; needed is None or an integer that is not negative")
    if max_seconds is not None and not (isinstance(max_seconds, (int, float)) and max_seconds >= 0):
        raise ArgumentError(f"`sweep` got max_seconds={max_seconds!r}; needed is None or a number that is not negative")
    if collect_cycles:
        _gc.collect()
    return _process.registry.sweep(max_nodes=max_nodes, max_seconds=max_seconds)


__all__ = [
    "GraphStats",
    "NodeInfo",
    "SweepReport",
    "Threshold",
    "audit",
    "callbacks",
    "get_threshold",
    "nodes",
    "set_threshold",
    "stats",
    "sweep",
]
