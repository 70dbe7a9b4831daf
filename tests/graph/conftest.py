import gc
import sys

import pytest
from graph_toys import TIMEOUT, ScriptedLock, handles_of

from sweepgrad.graph.registry import Registry
from sweepgrad.graph.report import audit, stats
from sweepgrad.graph.sweeper import Sweeper


def _check(registry):
    """The counts are right as the test left them, and once all is dropped and swept nothing is left."""
    registry.callbacks.clear()
    audit(registry, handles_of(registry))
    if registry.sweep().remaining or registry.nodes:
        gc.collect()  # handles in reference cycles, such as those of exceptions that a test caught
        while registry.sweep().remaining:
            pass
    audit(registry, handles_of(registry))
    left = stats(registry)
    assert (left.nodes, left.variables, left.childless, left.saved_bytes) == (0, 0, 0, 0)
    assert set(left.indexes.values()) == {0}
    assert left.registered == left.consumed + left.swept


@pytest.fixture
def registry():
    made = Registry(settle_at=1)
    yield made
    _check(made)


@pytest.fixture
def lock():
    return ScriptedLock()


@pytest.fixture
def locked(lock):
    """A registry with the scripted lock."""
    made = Registry(lock=lock, settle_at=1)
    yield made
    _check(made)


@pytest.fixture
def unchecked():
    """A registry that the test is about to corrupt."""
    return Registry(settle_at=1)


@pytest.fixture
def sweeper(registry):
    """A sweeper whose thread, if there is one, has ended when the registry is checked."""
    made = Sweeper(registry)
    yield made
    worker = made._worker
    made.stop(TIMEOUT)
    assert worker is None or not worker.is_alive()


@pytest.fixture
def shallow():
    """A stack so small that recursion over the graph would fail."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(200)
    yield
    sys.setrecursionlimit(limit)
