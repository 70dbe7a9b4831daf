"""How arrays go out and come in without a copy, such that nobody can write to what a rule has saved.

Guarantees
- What `outgoing` gives cannot be made writable: neither the array nor anything that its bases and exports lead to. A
  small one shares no memory at all, so that not even code that does not ask whether an array is read-only does harm.
- What `adopted` gives is a view of its own: an owner who gives his array another shape or dtype does not change it.
- An array that its owner could make writable again is adopted only where he asks for it, and only if it is read-only.
  From then on `check` finds it if it is writable when a backward pass begins.
- Nothing here costs anything where nothing is shared.
"""

import functools
import gc
import operator
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from sweepgrad import arrays
from sweepgrad.dtypes import Array, DType, refused_dtype
from sweepgrad.errors import DTypeError, ImmutableError, ShapeError, VariableError
from sweepgrad.graph.backward import reachable
from sweepgrad.graph.node import Node
from sweepgrad.shortage import again

owners: dict[int, weakref.ref[Array]] = {}
"""The living arrays that own memory which a tensor shares, by id."""


_COPIED = 1 << 14
"""Bytes up to which an array that goes out is a copy: one takes 1 us at most, and `Sealed` 1.3 us."""


class Sealed(tuple[Any]):
    """Stands between an array that goes out and the one it is made of, to which it leads nobody.

    NumPy makes an array from the capsule that it finds here, and takes this object as its base. The capsule holds the
    array inside, and Python code cannot open it. As this object exports no buffer, NumPy refuses to make anything that
    is made of it writable.
    """

    __slots__ = ()
    __array_struct__ = property(operator.itemgetter(0))


def outgoing(array: Array) -> Array:
    """A read-only array with the elements of `array`, which shares its memory if it is large."""
    if array.nbytes <= _COPIED:
        copy = array.copy()
        copy.setflags(write=False)
        return copy
    view = array.view()
    view.setflags(write=False)
    return np.asarray(Sealed((view.__array_struct__,)))


def is_constant(array: Array) -> bool:
    """Whether nobody can write to the memory of `array`: it belongs to a tensor, or to bytes."""
    base = _outermost(array)
    if type(base) is memoryview:
        base = base.obj
    elif type(base) is tuple:  # newer versions of NumPy keep the capsule beside the object that they had it from
        base = base[0]
    return type(base) in (Sealed, bytes)


def adopted(array: Array) -> Array | None:
    """A view of `array`, which its owner will be watched for; None if it can be written to already."""
    base = _outermost(array)
    if type(base) is not np.ndarray:
        return array.view() if is_constant(array) else None
    owners[id(base)] = weakref.ref(base, functools.partial(_forget, id(base)))
    return array.view()


def _forget(key: int, gone: object) -> None:
    owners.pop(key, None)


def _outermost(array: Array) -> Any:
    """The last of the bases of `array`, an array if it owns its memory; None if one of them can be written to."""
    base: Any = array
    while type(base) is np.ndarray:  # others may say of themselves what they like
        if base.flags.writeable:
            return None
        if base.base is None:
            return base
        base = base.base
    return base


def check(root: Node) -> None:
    """Raise ImmutableError if an operation below `root` has saved an array that its owner can write to again."""
    writable = [owner for one in tuple(owners.values()) if (owner := one()) is not None and owner.flags.writeable]
    if not writable:
        return
    for node in reachable(root):
        for array in _arrays(node.saved):
            if any(np.may_share_memory(array, owner) for owner in writable):
                raise ImmutableError(
                    f"`backward` through `{node.rule.name}`, which saved an array that `asarray(..., copy=False)` "
                    "shares with its owner, who has made it writable again: what was saved may have changed. Leave "
                    "the array read-only until the pass is done, or leave out `copy`"
                )


def _arrays(saved: Any) -> Iterator[Array]:
    """The arrays in what a node saved, whatever holds them."""
    seen: set[int] = set()
    stack = [saved]
    while stack:
        one = stack.pop()
        kind = type(one)
        if kind is np.ndarray:
            yield one
        elif id(one) not in seen and (kind in (tuple, list, dict) or _is_own(kind)):
            seen.add(id(one))
            stack.extend(gc.get_referents(one))


def _is_own(kind: type) -> bool:
    return kind is not Node and kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def as_array(op: str, obj: Any) -> Array:
    """`obj`, an array, a number or nested lists of numbers, as an array of numbers."""
    ma = sys.modules.get("numpy.ma")  # not imported here: a fork meanwhile would leave the import's lock held
    if ma is not None and isinstance(obj, ma.MaskedArray):
        raise DTypeError(f"`{op}` got a masked array, and tensors have no mask: fill it first, with `a.filled(value)`")
    try:
        array = np.asarray(obj)
    except VariableError:
        raise VariableError(
            f"`{op}` of a list that holds tensors which require a gradient would cut them from the graph; join them "
            "with `stack` or `concat`"
        ) from None
    except ValueError as error:
        raise ShapeError(f"`{op}` cannot make a regular array: {error}") from None
    except MemoryError as error:
        array = again(error, op, np.asarray, obj)
    if array.dtype.kind not in "biuf":
        raise refused_dtype(op, f"{array.dtype} (from {type(obj).__name__})")
    return array


def copied(op: str, array: Array, dtype: DType) -> Array:
    """A contiguous copy of `array` in `dtype`, on the same device."""
    try:
        return arrays.copied(array, dtype)  # type: ignore[no-any-return]
    except MemoryError as error:
        return again(error, op, copied, op, array, dtype)
