"""The graph's one record: a node, and the rule that says how to differentiate it.

A node is plain data. It never acts by itself, takes no lock and knows nothing of arrays; the registry changes it,
under the registry's lock, and a backward pass reads it.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from sweepgrad.shards import Shards


class Rule(Protocol):
    """How one operation maps the cotangent of its result to the cotangents of a node's parents.

    Rules are shared and have no state; what one call has to remember is in the node's `saved`.
    """

    @property
    def fresh(self) -> bool:
        """Whether what `pullback` returns are new values, which nobody else has: then it is an `Adding` rule."""

    @property
    def name(self) -> str:
        """The operation's name, as reports and errors show it."""

    def pullback(self, node: "Node", saved: Any, ct: Any, /) -> tuple[Any, ...]:
        """Parents' cotangents, in the order of `node.parents`; None where one is zero."""

    def replay(self, node: "Node", saved: Any, ct: Any, /) -> tuple[Any, ...]:
        """The same as `pullback`, computed from tracked values, so that the result can be differentiated again."""


class Adding(Rule, Protocol):
    """A rule that can add to sums: a value's cotangents from all its uses then take one buffer, and no extra pass."""

    def pullback_onto(self, node: "Node", saved: Any, ct: Any, sums: list[Any], /) -> tuple[Any, ...]:
        """As `pullback`; where `sums` has a value, not None, the sum of that and the cotangent, made in its place."""


class Gone(str):
    """Stands where saved values were; its text names the operation that a pass consumed or a sweep removed."""

    __slots__ = ()


CONSUMED = Gone("consumed")
"""Stands where a backward pass used up a node's saved values: one for all, as a pass has to store it in each node."""


class Unavailable(Gone):
    """One of this node's ancestors was consumed, so what it saved was released."""

    __slots__ = ()


class Variable:
    """The rule of variables: they have no parents and their cotangent goes to their owner's gradient."""

    __slots__ = ()
    name = "variable"
    fresh = False

    def pullback(self, node: "Node", saved: Any, ct: Any, /) -> tuple[Any, ...]:
        """Return nothing, as there is no parent."""
        return ()

    replay = pullback


VARIABLE = Variable()

REMOVED: frozenset["Node"] = frozenset()
"""Stands in `Node.children` once no pass can run through the node: what is computed from it is then released."""


def nobody() -> None:
    """The owner of a node that has none."""


class Extra:
    """What only some nodes have, every variable among them: an owner to receive the gradient, and hooks."""

    __slots__ = ("hooks", "owner")

    def __init__(self, owner: Callable[[], Any] = nobody) -> None:
        self.owner = owner  # a weak reference: the graph keeps no tensor alive
        self.hooks: dict[int, Callable[[Any], Any]] = {}


class Node:
    """One tracked operation or variable.

    `links` are the parents: one node by itself, or a tuple of them. Most nodes have one, and a tuple for it would be
    one more object for the collector to visit: without it a chain of a million is 10 % faster and 16 % smaller.
    `saved` is a tuple while the node can run, and a `Gone` afterwards. `children` is None, the one child, a set once
    there were several, `Shards` once there were very many: most nodes have one, and a set of one takes 216 bytes.
    `handles` counts living tensors, less those still waiting in the registry's `dropped` queue.
    Reading `leaves` puts the node into that queue: a property whose getter is in C, for tensors that die.
    """

    leaves: ClassVar[property]
    on_device: ClassVar[bool] = False  # whether what it saved is in the memory of a GPU
    __slots__ = ("children", "dtype", "extra", "handles", "id", "links", "nbytes", "rule", "saved", "shape")

    def __init__(
        self,
        rule: Rule,
        saved: tuple[Any, ...],
        links: "Node | tuple[Node, ...]",
        nbytes: int = 0,
        shape: tuple[int, ...] = (),
        dtype: Any = None,
    ) -> None:
        self.id = 0
        self.rule = rule
        self.saved: tuple[Any, ...] | Gone = saved
        self.links = links
        self.children: Node | set[Node] | Shards[Node] | frozenset[Node] | None = None
        self.handles = 1
        self.extra: Extra | None = None
        self.nbytes = nbytes
        self.shape = shape
        self.dtype = dtype

    @property
    def parents(self) -> tuple["Node", ...]:
        """The nodes from which this one was computed, one for each tracked input."""
        links = self.links
        return links if isinstance(links, tuple) else (links,)

    def __repr__(self) -> str:
        return f"<Node {self.id} {self.rule.name}>"
