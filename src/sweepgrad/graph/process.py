"""The one registry and the one sweeper that serve this process, and their behaviour across `os.fork`.

A fork waits for nobody. Another thread may be inside the registry then, which the child finds as an exception would
have left it, and mends (see the registry's guarantees). The child's sweeper runs if the parent's did.
"""

import functools
import os
import threading
from collections.abc import Callable, Mapping

from sweepgrad.graph.node import Node
from sweepgrad.graph.registry import Registry
from sweepgrad.graph.sweeper import Sweeper

registry = Registry()
Node.leaves = property(registry.dropped.append)

find_handles: Callable[[], Mapping[Node, int]] = dict
"""Counts the living tensors of each node, for the audit; the tensor module sets it."""


_process = os.getpid()


def _after_fork_in_child() -> None:
    global _process  # noqa: PLW0603  # two threads may have registered this at once
    if _process != os.getpid():
        _process = os.getpid()
        if not registry.lock._is_owned():  # else the thread that forked is inside, and goes on here
            registry.lock = threading.RLock()
        sweeper.restart_after_fork()


@functools.cache
def survive_forks() -> None:
    """Prepare for `os.fork`, once: called where the first variable is made or the daemon is started."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork_in_child)


sweeper = Sweeper(registry, before_start=survive_forks)
