"""Random programs against a model that knows nothing of counters: sets, paths and forward-mode derivatives."""

import itertools
import math
from collections import Counter

import pytest
from graph_toys import (
    ADD,
    MULTIPLY,
    ScriptedLock,
    add_hook,
    attach,
    handles_of,
    record,
    retain_grad,
    run_backward,
    run_gradients,
    thread,
    variable,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sweepgrad import shards
from sweepgrad.errors import GraphConsumedError
from sweepgrad.graph.registry import Registry
from sweepgrad.graph.report import audit, node_infos, stats

BOUND = 2**40
"""Passes whose sums may exceed this are left out, so that floats are exact."""

pick = st.integers(0, 2**16)


class Shadow:
    """What the model knows of one node."""

    def __init__(self, op, parents, v, nbytes):
        self.op = op
        self.parents = parents
        self.v = v
        self.nbytes = nbytes
        self.owner = None  # number of the handle that gets the gradient
        self.factors = []  # of its hooks

    def partials(self, shadows):
        """Pairs of a parent and the derivative by it."""
        if self.op == "multiply":
            a, b = self.parents
            return [(a, shadows[b].v), (b, shadows[a].v)]
        return [(parent, 1) for parent in self.parents]

    def factor(self):
        return math.prod(self.factors)


class Model(RuleBasedStateMachine):
    settle_at = 1
    many = 256  # children of a node that are a set

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(shards, "MANY", self.many)
        self.lock = ScriptedLock()
        self.registry = Registry(settle_at=self.settle_at, lock=self.lock)
        self.shadows = {}  # by the node's id
        self.handles = {}  # by number: the living handles
        self.gradients = {}  # by number of the handle
        self.made = 0
        self.consumed = set()
        self.clean = True  # whether all that can go has gone
        self.calls = []  # ids of nodes whose hooks were called, as the pass calls them

    # The model

    def ancestors(self, root):
        found, todo = set(), [root]
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += self.shadows[node].parents
        return found

    def is_cut(self, node):
        """Whether the node is consumed or computed from one that is: no pass can run through it."""
        return bool(self.ancestors(node) & self.consumed)

    def live(self):
        """Nodes that must stay: with a handle, or needed by a live node that can run."""
        found = set()
        handled = {handle.node.id for handle in self.handles.values()}
        for node in sorted(self.shadows, reverse=True):
            if node in self.consumed:
                continue
            if node in handled or node in found:
                found.add(node)
                if not self.is_cut(node):
                    found.update(self.shadows[node].parents)
        return found

    def targets(self, root):
        """Nodes below `root` with a living owner or a hook."""
        below = self.ancestors(root)
        return {n for n in below if self.shadows[n].owner in self.handles or self.shadows[n].factors}

    def wanted(self, root, targets):
        return {node for node in self.ancestors(root) if self.ancestors(node) & targets}

    def derivative(self, root, target):
        """Of `root` by `target`, each node's hooks included, from the target upwards."""
        tangents = {target: self.shadows[target].factor()}
        for node in sorted(self.ancestors(root)):
            if node > target:
                shadow = self.shadows[node]
                total = sum(d * tangents.get(parent, 0) for parent, d in shadow.partials(self.shadows))
                tangents[node] = total * shadow.factor()
        return tangents.get(root, 0)

    def bound(self, root):
        """Of all sums in a pass from `root`: the same polynomials with each |v| + 1 for v, which bounds derivatives."""
        bounds = {}
        for node in sorted(self.ancestors(root)):
            shadow = self.shadows[node]
            below = [bounds[parent] for parent in shadow.parents]
            made = abs(shadow.v) + 1 if not below else math.prod(below) if shadow.op == "multiply" else sum(below)
            bounds[node] = made * 2 ** len(shadow.factors)
        return bounds[root]

    def consume(self, nodes):
        self.consumed |= {node for node in nodes if self.shadows[node].op != "variable"}

    # Both

    def choose(self, index):
        if not self.handles:
            self.variable(2)
        number = sorted(self.handles)[index % len(self.handles)]
        return number, self.handles[number]

    def keep(self, handle):
        self.made += 1
        self.handles[self.made] = handle
        self.gradients[self.made] = None
        return self.made

    @rule(v=st.integers(-3, 3))
    def variable(self, v):
        handle = variable(self.registry, float(v))
        shadow = self.shadows[handle.node.id] = Shadow("variable", (), v, 0)
        shadow.owner = self.keep(handle)

    @rule(op=st.sampled_from([ADD, MULTIPLY]), i=pick, j=pick, nbytes=st.integers(0, 50), dropped=st.booleans())
    def combine(self, op, i, j, nbytes, dropped):
        x, y = self.choose(i)[1], self.choose(j)[1]
        a, b = (self.shadows[handle.node.id].v for handle in (x, y))
        v, saved = (a * b, (x.v, y.v)) if op is MULTIPLY else (a + b, ())
        if abs(v) > BOUND:
            return
        handle = record(op, float(v), saved, x, y, nbytes=nbytes)
        self.shadows[handle.node.id] = Shadow(op.name, (x.node.id, y.node.id), v, nbytes)
        self.clean &= not (dropped or self.is_cut(handle.node.id))
        if not dropped:
            self.keep(handle)

    @rule(i=pick)
    def detach(self, i):
        """A new variable with the value of another handle, and no edge to it."""
        self.variable(self.shadows[self.choose(i)[1].node.id].v)

    @rule(i=pick)
    def share(self, i):
        _, handle = self.choose(i)
        self.keep(attach(self.registry, handle.node, handle.v))

    @rule(i=pick)
    def drop(self, i):
        number, _ = self.choose(i)
        del self.handles[number], self.gradients[number]
        self.clean = False

    @rule(i=pick)
    def retain_grad(self, i):
        number, handle = self.choose(i)
        retain_grad(handle)
        self.shadows[handle.node.id].owner = number

    @rule(i=pick, factor=st.sampled_from([-1, 0, 2]))
    def hook(self, i, factor):
        _, handle = self.choose(i)
        calls, node = self.calls, handle.node.id
        self.shadows[node].factors.append(factor)
        add_hook(handle, lambda ct: calls.append(node) or ct * factor)

    @rule(i=pick)
    def reset(self, i):
        number, handle = self.choose(i)
        handle._grad = self.gradients[number] = None

    @rule(i=pick, retain=st.booleans(), ct=st.sampled_from([1, -2]))
    def backward(self, i, retain, ct):
        _, handle = self.choose(i)
        root = handle.node.id
        if self.bound(root) > BOUND:
            return
        self.calls.clear()
        if self.is_cut(root):
            with pytest.raises(GraphConsumedError):
                run_backward(handle, ct=float(ct), retain_graph=retain)
            assert not self.calls
            return
        run_backward(handle, ct=float(ct), retain_graph=retain)
        targets = self.targets(root)
        assert self.calls == [n for n in sorted(targets, reverse=True) for _ in self.shadows[n].factors]
        for node in targets:
            owner = self.shadows[node].owner
            if owner in self.handles:
                self.gradients[owner] = (self.gradients[owner] or 0) + ct * self.derivative(root, node)
        if not retain:
            self.consume(self.wanted(root, targets))
        self.clean = True

    @rule(i=pick, chosen=st.lists(pick, max_size=3), retain=st.booleans())
    def gradients_of(self, i, chosen, retain):
        _, handle = self.choose(i)
        root = handle.node.id
        if self.bound(root) > BOUND:
            return
        targets = [self.choose(j)[1] for j in chosen]
        if self.is_cut(root):
            with pytest.raises(GraphConsumedError):
                run_gradients(handle, targets, retain_graph=retain)
            return
        found = run_gradients(handle, targets, retain_graph=retain)
        ids = [target.node.id for target in targets]
        below = self.ancestors(root)
        assert found == [self.derivative(root, node) if node in below else None for node in ids]
        if not retain:
            self.consume(self.wanted(root, set(ids)))
        self.clean = True

    @rule(max_nodes=st.sampled_from([None, None, 0, 1, 2, 5]))
    def budgeted_sweep(self, max_nodes):
        self.sweep(max_nodes)

    def sweep(self, max_nodes):
        swept = self.registry.swept
        report = self.registry.sweep(max_nodes=max_nodes)
        after = stats(self.registry)
        assert max_nodes is None or report.nodes <= max_nodes
        assert report.nodes == after.swept - swept
        assert report.remaining == sum(after.indexes.values()) - after.nodes
        assert report.remaining == 0 or max_nodes is not None
        self.clean = self.clean or report.remaining == 0

    # What must hold

    @invariant()
    def gradients_are_right(self):
        found = {number: handle._grad for number, handle in self.handles.items()}
        assert found == self.gradients

    def check_counts(self):
        audit(self.registry, lambda: Counter(handle.node for handle in self.handles.values()))
        live = self.live()
        registered = {info.id for info in node_infos(self.registry)}
        assert live <= registered
        found = stats(self.registry)
        assert found.registered == len(self.shadows) == found.nodes + found.consumed + found.swept
        if self.clean:
            assert registered == live
            assert all(info.alive for info in node_infos(self.registry))
            assert found.consumed == len(self.consumed)
            assert found.saved_bytes == sum(self.shadows[n].nbytes for n in live if not self.is_cut(n))
            assert found.variables == sum(self.shadows[n].op == "variable" for n in live)
            assert found.dropped == 0

    def teardown(self):
        self.check_counts()
        self.handles.clear()
        while self.registry.sweep().remaining:
            pass
        audit(self.registry, handles_of(self.registry))
        assert not self.registry.nodes
        self.patch.undo()


class Prompt(Model):
    """Nodes enter the registry as they are made, and are looked at after each step."""

    @invariant()
    def counts_are_right(self):
        self.check_counts()


class Deferred(Model):
    """Nodes wait to enter, and are looked at now and then: looking brings them in."""

    settle_at = 12
    many = 2

    @rule()
    def look(self):
        self.check_counts()


class Interleaved(Model):
    """Another thread acts where this one lets go of the lock for the n-th time from when that was decided."""

    settle_at = 3
    many = 3

    @rule(n=st.integers(0, 6), act=st.sampled_from(["sweep", "sweep one", "orphan", "statistics"]), i=pick, j=pick)
    def meanwhile(self, n, act, i, j):
        releases = itertools.count()

        def released():
            if next(releases) == n:
                self.lock.released = int
                with thread(getattr(self, f"other_{act.partition(' ')[0]}"), act, i, j):
                    pass

        self.lock.released = released

    def other_sweep(self, act, i, j):
        self.registry.sweep(max_nodes=1 if act == "sweep one" else None)

    def other_statistics(self, act, i, j):
        found = stats(self.registry)
        assert found.registered == found.nodes + found.consumed + found.swept

    def other_orphan(self, act, i, j):
        """Results that are dropped at once, of a handle that lives when this comes."""
        if not self.handles:
            return
        x = self.handles[sorted(self.handles)[i % len(self.handles)]]
        v = self.shadows[x.node.id].v
        for count in range(1 + j % 5):
            orphan = record(ADD, x.v * 2, (), x, x, nbytes=count)
            self.shadows[orphan.node.id] = Shadow("add", (x.node.id, x.node.id), 2 * v, count)

    def sweep(self, max_nodes):
        report = self.registry.sweep(max_nodes=max_nodes)
        assert max_nodes is None or report.nodes <= max_nodes

    @rule()
    def look(self):
        self.lock.released = int
        while self.registry.sweep().remaining:
            pass
        self.clean = True
        self.check_counts()

    def teardown(self):
        self.look()
        super().teardown()


TestPrompt = Prompt.TestCase
TestDeferred = Deferred.TestCase
TestInterleaved = Interleaved.TestCase
TestPrompt.settings = TestDeferred.settings = TestInterleaved.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
