"""A graph of plain floats: just enough of a tensor, of rules and of a lock to drive the registry."""

import gc
import threading
import weakref
from collections import Counter
from contextlib import contextmanager

from sweepgrad.graph.backward import Arithmetic, backward, gradients
from sweepgrad.graph.node import VARIABLE, Node

TIMEOUT = 20.0
"""Seconds after which a thread or a child process that did not answer fails a test."""

NBYTES = 16
"""Bytes that a recorded operation claims to save, unless a test says otherwise."""


class Handle:
    """What a tensor is to the graph: a value, a gradient, and a finaliser that only appends."""

    __slots__ = ("__weakref__", "_grad", "node", "registry", "v")

    def __init__(self, registry, node, v):
        self.registry = registry
        self.node = node
        self.v = v
        self._grad = None

    def __del__(self):
        self.registry.dropped.append(self.node)

    def __add__(self, other):
        return add(self, other)

    def __mul__(self, other):
        return multiply(self, other)


class Multiply:
    name = "multiply"
    fresh = True

    def pullback(self, node, saved, ct):
        return self.pullback_onto(node, saved, ct, (None, None))

    def pullback_onto(self, node, saved, ct, sums):
        x, y = saved
        parts = ct * y, ct * x
        return tuple(part if earlier is None else earlier + part for part, earlier in zip(parts, sums, strict=True))

    def replay(self, node, saved, ct):
        x, y = (attach(ct.registry, parent, v) for parent, v in zip(node.parents, saved, strict=True))
        return ct * y, ct * x


class Add:
    name = "add"
    fresh = False

    def pullback(self, node, saved, ct):
        return ct, ct

    replay = pullback


class Rule:
    """A rule of one test: `pullback(ct)` gives the parents' cotangents."""

    fresh = False

    def __init__(self, name, pullback):
        self.name = name
        self._pullback = pullback
        self.calls = 0

    def pullback(self, node, saved, ct):
        self.calls += 1
        return self._pullback(ct)


MULTIPLY = Multiply()
ADD = Add()


def variable(registry, v):
    node = Node(VARIABLE, (), ())
    handle = Handle(registry, node, v)
    registry.extra(node).owner = weakref.ref(handle)
    registry.register(node)
    return handle


def record(rule, v, saved, *inputs, nbytes=NBYTES):
    registry = inputs[0].registry
    parents = tuple(handle.node for handle in inputs)
    node = Node(rule, saved, parents if len(parents) > 1 else parents[0], nbytes)
    handle = Handle(registry, node, v)
    registry.register(node)
    return handle


def multiply(x, y, nbytes=NBYTES):
    return record(MULTIPLY, x.v * y.v, (x.v, y.v), x, y, nbytes=nbytes)


def add(x, y, nbytes=NBYTES):
    return record(ADD, x.v + y.v, (), x, y, nbytes=nbytes)


def passing(x, action, name="passing"):
    """The identity, whose pullback first calls `action()`."""

    def pullback(ct):
        action()
        return (ct,)

    return record(Rule(name, pullback), x.v, (), x)


def attach(registry, node, v):
    """A second handle on `node`."""
    with registry.lock:
        node.handles += 1
    return Handle(registry, node, v)


def chain_of(x, length):
    """x * x * ... with `length` multiplications, every intermediate dropped."""
    y = x
    for _ in range(length):
        y = multiply(y, x)
    return y


def run_backward(root, ct=1.0, **options):
    backward(root.registry, root.node, ct, **options)


def run_replay(root, ct):
    backward(root.registry, root.node, ct, arithmetic=Arithmetic(replays=True), retain_graph=True)


def run_gradients(root, targets, ct=1.0, **options):
    found = gradients(root.registry, root.node, ct, [target.node for target in targets], **options)
    return [found.get(target.node) for target in targets]


def retain_grad(handle):
    handle.registry.extra(handle.node).owner = weakref.ref(handle)


def add_hook(handle, function):
    hooks = handle.registry.extra(handle.node).hooks
    hooks[len(hooks)] = function


def handles_of(registry):
    """What `audit` calls to count the living handles by other means than the registry's."""
    return lambda: Counter(
        found.node for found in gc.get_objects() if type(found) is Handle and found.registry is registry
    )


def state(registry):
    """All that a pass which raises must leave as it was."""
    nodes = {node.id: (node.saved, node.parents, node.children, node.handles, node.nbytes) for node in registry.nodes}
    counts = (registry.registered, registry.consumed, registry.variables, registry.saved_bytes)
    return nodes, counts


class ScriptedLock:
    """A reentrant lock that knows whether this thread holds it, and acts around each hold."""

    def __init__(self):
        self._lock = threading.RLock()
        self._owner = None
        self._depth = 0
        self.waiting = int  # called before the lock is taken
        self.released = int  # called after it was let go

    def acquire(self):
        self.waiting()
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1

    def release(self):
        self._depth -= 1
        free = not self._depth
        if free:
            self._owner = None
        self._lock.release()
        if free:
            self.released()

    def held(self):
        return self._owner == threading.get_ident()

    _is_owned = held

    def __enter__(self):
        self.acquire()

    def __exit__(self, *exception):
        self.release()


class PlainLock:
    """A lock that its holder cannot take again: a second acquisition never returns."""

    def __init__(self):
        self._lock = threading.Lock()

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *exception):
        self._lock.release()

    def _is_owned(self):
        return False


class Witness:
    """A saved value whose finaliser notes whether its thread holds the lock."""

    def __init__(self, lock, seen):
        self.lock = lock
        self.seen = seen

    def __del__(self):
        self.seen.append(self.lock.held())


@contextmanager
def thread(target, *args):
    """Run `target` on a thread; at the end of the block it is joined, and what it raised is raised here."""
    raised = []

    def run():
        try:
            target(*args)
        except BaseException as error:
            raised.append(error)

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    yield worker
    worker.join(TIMEOUT)
    assert not worker.is_alive(), "the thread did not end"
    if raised:
        raise raised[0]
