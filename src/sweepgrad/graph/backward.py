"""The backward pass, in four steps: `reachable`, `check`, `run`, `commit`.

Guarantees
- A pass does all or nothing: one that raises, whatever raises and wherever, leaves every gradient and the graph as they
  were. (An interrupt that comes after the pass has been decided is raised as well; who asks next finishes the pass.)
- No recursion, and no lock while rules, hooks or additions run. Passes on several threads may share nodes: each adds
  its whole gradient, or raises GraphConsumedError because another pass consumed a node first.
- Only a sum that the pass made itself is ever overwritten, so a rule may pass on the cotangent that it was given.

The pass reads the graph without the lock. That is safe because the root's tensor is alive, so no sweep can take a
node below it; only another pass can consume one, and `run` and `commit` both look.
"""

import itertools
import operator
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

from sweepgrad.graph.node import VARIABLE, Extra, Node
from sweepgrad.graph.registry import Registry
from sweepgrad.graph.report import consumed_error


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a pass computes with cotangents; it never asks what they are."""

    replays: bool = False
    """Whether rules are replayed, for a result that can be differentiated again, or pull back."""
    add: Callable[[Any, Any], Any] = operator.add
    """The sum of two cotangents, as a new one."""
    accumulate: Callable[[Any, Any], Any] = operator.add
    """The sum of two cotangents, of which it may overwrite the first: one that `add` made in this pass."""
    deliver: Callable[[Node, Any], Any] = lambda node, ct: ct
    """A node's cotangent as what hooks, owners and callers get."""
    receive: Callable[[Node, Any], Any] = lambda node, ct: ct
    """The inverse of `deliver`, for what a hook returns."""


PLAIN = Arithmetic()

_NO_SUMS = itertools.repeat(None)


def backward(
    registry: Registry,
    root: Node,
    ct: Any,
    *,
    arithmetic: Arithmetic = PLAIN,
    retain_graph: bool = False,
) -> None:
    """Add to the gradient of every living variable below `root`, whose cotangent is `ct`."""
    version = registry.version
    order = reachable(root)
    owners: dict[Node, Any] = {}
    hooked: list[Node] = []
    wanted: set[Node] | None = None  # every node, as long as every variable is: each node leads to a variable
    for node in order:
        extra = node.extra
        if extra is not None:
            if (owner := extra.owner()) is not None:
                owners[node] = owner
            elif extra.hooks:
                hooked.append(node)
            elif node.rule is VARIABLE:
                wanted = set()
    if wanted is not None:
        wanted = leading(order, {*owners, *hooked})
    registry.check(order)  # after all reading of edges: a node is marked before they are cut, so they were whole
    ran = order if wanted is None else [node for node in order if node in wanted]
    arrived = run(ran, {root: ct}, arithmetic, owners, wanted)
    while True:
        totals = []
        for node, new in arrived.items():
            owner = owners[node]
            old = owner._grad
            totals.append((owner, old, new if old is None else old + new))
        if registry.commit(ran, totals, consume=not retain_graph, version=version):
            break
    registry.retire()


def gradients(
    registry: Registry,
    root: Node,
    ct: Any,
    targets: Iterable[Node],
    *,
    arithmetic: Arithmetic = PLAIN,
    retain_graph: bool = False,
) -> dict[Node, Any]:
    """Cotangents of the nodes `targets` for the cotangent `ct` of `root`; no tensor's gradient changes."""
    version = registry.version
    order = reachable(root)
    targets = set(targets)
    wanted = leading(order, targets)
    registry.check(order)  # after all reading of edges: a node is marked before they are cut, so they were whole
    ran = [node for node in order if node in wanted]
    arrived = run(ran, {root: ct}, arithmetic, targets, wanted)
    registry.commit(ran, [], consume=not retain_graph, version=version)
    registry.retire()
    return arrived


def reachable(root: Node) -> list[Node]:
    """`root` and its ancestors, children before parents (descending order of id)."""
    order = [root]
    seen = {root}
    for node in order:  # grows while it is read
        links = node.links
        for parent in links if isinstance(links, tuple) else (links,):
            if parent not in seen:
                seen.add(parent)
                order.append(parent)
    order.sort(key=operator.attrgetter("id"), reverse=True)
    return order


def leading(order: list[Node], targets: set[Node]) -> set[Node]:
    """The nodes through which a cotangent reaches one of `targets`."""
    wanted: set[Node] = set()
    for node in reversed(order):
        if node in targets or any(parent in wanted for parent in node.parents):
            wanted.add(node)
    return wanted


def run(  # noqa: PLR0912  # a call for each node and each branch would cost a tenth of a pass
    order: list[Node],
    cts: dict[Node, Any],
    arithmetic: Arithmetic,
    keep: Container[Node],
    wanted: Container[Node] | None,
) -> dict[Node, Any]:
    """Push the cotangents `cts` through the nodes of `order`; return those that arrive at the nodes `keep`."""
    replays, add, accumulate = arithmetic.replays, arithmetic.add, arithmetic.accumulate
    arrived = {}
    own = set()  # nodes whose cotangent nobody else has: a sum made by this pass, or a fresh value
    for node in order:
        ct = cts.pop(node, None)
        if ct is None:
            continue
        extra = node.extra
        if extra is not None and extra.hooks:
            ct = call_hooks(extra, node, ct, arithmetic)
        if node in keep:
            arrived[node] = arithmetic.deliver(node, ct)
        saved = node.saved
        if type(saved) is not tuple:
            raise consumed_error(node)
        links: Any = node.links
        if not links:
            continue
        if type(links) is not tuple:
            links = (links,)
        rule: Any = node.rule
        fresh = not replays and rule.fresh
        sums: Any = _NO_SUMS
        if fresh:
            sums = [cts[parent] if parent in own else None for parent in links]
            if len(links) == 2 and links[0] is links[1]:
                sums[1] = None  # two sums at once in one place
            parts = rule.pullback_onto(node, saved, ct, sums)
        else:
            parts = rule.replay(node, saved, ct) if replays else rule.pullback(node, saved, ct)
        for parent, part, known in zip(links, parts, sums):  # noqa: B905  # strict costs 0.1 us
            if known is not None:
                cts[parent] = part
                continue
            if part is None or (wanted is not None and parent not in wanted):
                continue
            earlier = cts.get(parent)
            if earlier is None:
                cts[parent] = part
                if fresh:
                    own.add(parent)
            elif parent in own:
                cts[parent] = accumulate(earlier, part)
            else:
                cts[parent] = add(earlier, part)
                own.add(parent)
    return arrived


def call_hooks(extra: Extra, node: Node, ct: Any, arithmetic: Arithmetic) -> Any:
    """The cotangent after the node's hooks, in the order in which they were registered."""
    for hook in tuple(extra.hooks.values()):
        changed = hook(arithmetic.deliver(node, ct))
        if changed is not None:
            ct = arithmetic.receive(node, changed)
    return ct
