"""Collections that grow and shrink piece by piece, however large they are.

A dict or set that outgrows its memory is copied at once, and one that dies is walked: with a million entries that takes
some 40 ms, for which a lock would be held.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Generic, Protocol, TypeAlias, TypeVar, Union

T = TypeVar("T")

BITS = 12
PIECE = 1 << BITS
"""Entries in a piece, at most: those of 4096 numbers that follow each other. To copy one takes 0.1 ms."""

MANY = 256
"""Entries that a set may have."""

_SHRUNK = {1, 16, 256}
"""Sizes at which a piece that shrinks is copied: a dict never gives memory back by itself."""

_NONE: Mapping[int, object] = {}


class Shards(Generic[T]):
    """Entries by number, in dicts of at most `PIECE`. Most numbers should not be far apart.

    Each change is one step, so who is interrupted has made it or not, and no piece is left empty but by `piece`.
    """

    __slots__ = ("pieces",)

    def __init__(self) -> None:
        self.pieces: dict[int, dict[int, T]] = {}

    def piece(self, number: int) -> dict[int, T]:
        """The piece that `number` belongs to, made if need be, to look for its entry and to add it."""
        key = number >> BITS
        pieces = self.pieces
        return pieces[key] if key in pieces else pieces.setdefault(key, {})

    def add(self, number: int, entry: T) -> None:
        """Add an entry, or put it in the place of that which has its number."""
        key = number >> BITS
        if key in self.pieces:
            self.pieces[key][number] = entry
        else:
            self.pieces[key] = {number: entry}

    def discard(self, number: int) -> bool:
        """Take out the entry `number`; False if it is not there."""
        key = number >> BITS
        pieces = self.pieces
        if key not in pieces or number not in (piece := pieces[key]):
            return False
        if len(piece) > 1:
            del piece[number]
            if len(piece) in _SHRUNK:
                pieces[key] = piece.copy()
        else:
            del pieces[key]
        return True

    def discard_unless_only(self, number: int) -> bool:
        """Take out the entry `number`, if it is there; False if it is the only one, and stays."""
        pieces = self.pieces
        if len(pieces) == 1 and number in (piece := pieces.get(number >> BITS, _NONE)) and len(piece) == 1:
            return False
        self.discard(number)
        return True

    def __contains__(self, number: int) -> bool:
        return number in self.pieces.get(number >> BITS, _NONE)

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(map(dict.values, self.pieces.values()))

    def items(self) -> Iterator[tuple[int, T]]:
        """Numbers and entries."""
        return chain.from_iterable(map(dict.items, self.pieces.values()))

    def __bool__(self) -> bool:
        return any(self.pieces.values())

    def __len__(self) -> int:
        return sum(map(len, self.pieces.values()))


class Numbered(Protocol):
    """What has a number of its own."""

    id: int


N = TypeVar("N", bound=Numbered)
Some: TypeAlias = Union[N, set[N], Shards[N]]  # noqa: UP007  # a type variable has no `|` here
"""One, a set of several, or `Shards` of very many: what has one, as most have, takes no room for more."""


def including(some: Some[N], one: N) -> Some[N]:
    """`some`, which has another one, and `one`; it may be changed for that."""
    if isinstance(some, Shards):
        some.add(one.id, one)
    elif not isinstance(some, set):
        return {some, one}
    elif len(some) < MANY:
        some.add(one)
    else:
        shards = Shards[N]()
        for each in (*some, one):
            shards.add(each.id, each)
        return shards
    return some


def others_than(one: N, some: Some[N] | frozenset[N] | None) -> bool:
    """Take `one` out of `some` unless it is the only one there, and say whether it is not.

    So what has some is never left with none: who asks has to put something else in its place.
    """
    if isinstance(some, Shards):
        return some.discard_unless_only(one.id)
    if isinstance(some, set):
        if len(some) == 1 and one in some:
            return False
        some.discard(one)
    return some is not one


def parts(some: Some[N]) -> Iterable[N | dict[int, N]]:
    """What `some` has, one by one, or piece by piece if that is very many."""
    if isinstance(some, Shards):
        return some.pieces.values()
    return some if isinstance(some, set) else (some,)
