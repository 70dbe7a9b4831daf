"""What all tests share."""

import gc
import signal

import pytest

import sweepgrad as sg  # before the freeze

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it for what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left():
    """A module's tests leave no node in the registry that was not there before.

    An audit and a collection look at every object that the garbage collector knows: the many that imports and
    compilations have made are left out, unless a tensor that has a node could be among them.
    """
    before = _nodes()
    if not before:
        gc.freeze()
    yield
    assert _nodes() <= before, [node for node in sg.graph.nodes() if node.alive]


def _nodes():
    gc.collect()
    sg.sweep()
    return sg.graph.stats().nodes
