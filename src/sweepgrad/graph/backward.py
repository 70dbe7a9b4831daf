"""The backward pass, in four steps: `reachable`, `validate`, `run`, `commit`.

Guarantees
- A pass that raises, whatever raises and wherever, leaves every gradient and the graph as they were.
- No recursion, and no lock while rules, hooks or additions run. Passes on several threads may share nodes: each adds
  its whole gradient, or raises GraphConsumedError because another pass consumed a node first.
- Cotangents are only ever added with `+` and are never changed, so a rule may pass on the one it was given.

The pass reads the graph without the lock. That is safe because the root's tensor is alive, so no sweep can take a
node below it; only another pass can consume one, and `run` and `commit` both look.
"""

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from sweepgrad.graph.node import VARIABLE, Extra, Node
from sweepgrad.graph.registry import Registry, consumed_error

PULLBACK: Callable[[Node], Any] = attrgetter("rule.pullback")
REPLAY: Callable[[Node], Any] = attrgetter("rule.replay")

_BY_ID = attrgetter("id")


def backward(
    registry: Registry,
    root: Node,
    ct: Any,
    *,
    method: Callable[[Node], Any] = PULLBACK,
    retain_graph: bool = False,
) -> None:
    """Add to the gradient of every living variable below `root`, whose cotangent is `ct`."""
    order = reachable(root)
    validate(order)
    owners: dict[Node, Any] = {}
    hooked: list[Node] = []
    for node in order:
        if node.extra is not None:
            if (owner := node.extra.owner()) is not None:
                owners[node] = owner
            elif node.extra.hooks:
                hooked.append(node)
    targets = {*owners, *hooked}
    wanted = None if _all_lead(order, targets) else leading(order, targets)
    arrived = run(order, {root: ct}, method, owners, wanted)
    ran = order if wanted is None else [node for node in order if node in wanted]
    while True:
        totals = []
        for node, new in arrived.items():
            owner = owners[node]
            old = owner._grad
            totals.append((owner, old, new if old is None else old + new))
        if registry.commit(ran, totals, consume=not retain_graph):
            break
    registry.retire()


def gradients(
    registry: Registry,
    root: Node,
    ct: Any,
    targets: Iterable[Node],
    *,
    method: Callable[[Node], Any] = PULLBACK,
    retain_graph: bool = False,
) -> dict[Node, Any]:
    """Cotangents of the nodes `targets` for the cotangent `ct` of `root`; no tensor's gradient changes."""
    order = reachable(root)
    validate(order)
    targets = set(targets)
    wanted = leading(order, targets)
    arrived = run(order, {root: ct}, method, targets, wanted)
    registry.commit([node for node in order if node in wanted], [], consume=not retain_graph)
    registry.retire()
    return arrived


def reachable(root: Node) -> list[Node]:
    """`root` and its ancestors, children before parents (descending order of id)."""
    order = [root]
    seen = set()
    for node in order:  # grows while it is read
        for parent in node.parents:
            # A node with a single child has a single edge, and is met once: only the others must be remembered.
            if type(parent.children) is set:
                if parent in seen:
                    continue
                seen.add(parent)
            order.append(parent)
    order.sort(key=_BY_ID, reverse=True)
    return order


def validate(order: Iterable[Node]) -> None:
    """Raise GraphConsumedError if one of the nodes can no longer run."""
    for node in order:
        if type(node.saved) is not tuple:
            raise consumed_error(node)


def _all_lead(order: list[Node], targets: set[Node]) -> bool:
    """Whether every variable is wanted: then so is every node, since each leads to a variable."""
    return sum(node.rule is VARIABLE for node in order) == sum(node.rule is VARIABLE for node in targets)


def leading(order: list[Node], targets: set[Node]) -> set[Node]:
    """The nodes through which a cotangent reaches one of `targets`."""
    wanted: set[Node] = set()
    for node in reversed(order):
        if node in targets or any(parent in wanted for parent in node.parents):
            wanted.add(node)
    return wanted


def run(
    order: list[Node],
    cts: dict[Node, Any],
    method: Callable[[Node], Any],
    keep: Any,
    wanted: set[Node] | None,
) -> dict[Node, Any]:
    """Push the cotangents `cts` through the nodes of `order`; return those that arrive at the nodes `keep`."""
    arrived = {}
    for node in order:
        ct = cts.pop(node, None)
        if ct is None:
            continue
        if node.extra is not None:
            ct = call_hooks(node.extra, ct)
        if node in keep:
            arrived[node] = ct
        saved = node.saved
        if type(saved) is not tuple:
            raise consumed_error(node)
        for parent, part in zip(node.parents, method(node)(node, saved, ct), strict=True):
            if part is None or (wanted is not None and parent not in wanted):
                continue
            earlier = cts.get(parent)
            cts[parent] = part if earlier is None else earlier + part
    return arrived


def call_hooks(extra: Extra, ct: Any) -> Any:
    """The cotangent after the node's hooks, in the order in which they were registered."""
    for hook in tuple(extra.hooks.values()):
        changed = hook(ct)
        if changed is not None:
            ct = changed
    return ct
