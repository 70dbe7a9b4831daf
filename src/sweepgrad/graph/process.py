"""The one registry and the one sweeper that serve this process, and their behaviour across `os.fork`.

A fork waits for nobody. Another thread may be inside the registry then, which the child finds as an exception would
have left it, and mends (see the registry's guarantees). The child's sweeper runs if the parent's did.
"""

import functools
import gc
import os
import threading
from collections.abc import Callable, Mapping

from sweepgrad.errors import ArgumentError
from sweepgrad.graph.node import Node
from sweepgrad.graph.registry import Registry
from sweepgrad.graph.report import SweepReport
from sweepgrad.graph.sweeper import Sweeper

registry = Registry()
Node.leaves = property(registry.dropped.append)

find_handles: Callable[[], Mapping[Node, int]] = dict
"""Counts the living tensors of each node, for the audit; the tensor module sets it."""


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
        gc.collect()
    return registry.sweep(max_nodes=max_nodes, max_seconds=max_seconds)


def _after_fork_in_child() -> None:
    registry.lock = threading.RLock()  # nobody here holds the old one
    sweeper.restart_after_fork()


@functools.cache
def survive_forks() -> None:
    """Prepare for `os.fork`, once: called where the first variable is made or the daemon is started."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork_in_child)


sweeper = Sweeper(registry, before_start=survive_forks)
