"""Where a NaN comes from: within `detect_anomaly`, whatever a thread computes is looked at.

Guarantees
- What is computed has the same bits as without, and no other thread is looked at. As long as any thread is within
  `detect_anomaly`, all threads take the longer of two ways through elementwise operations.
- An error is raised before the operation is recorded, and in a backward pass before a gradient or the graph changes.
- Elsewhere it costs a look at an empty list for what takes microseconds. The functions of `ops.plan`, which are faster
  than that, find their plans in tables: these are emptied, so that they miss and take the longer way.

An operation is at fault if its result has a NaN and its inputs have none, an elementwise one also for an element.
A rule is at fault if a cotangent that it gives has a NaN: those that it is given have none, as all are looked at.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import numpy as np

from sweepgrad import tensor as _tensor
from sweepgrad.arrays import host, is_array
from sweepgrad.dtypes import Array, DType
from sweepgrad.elements import dense, flat
from sweepgrad.errors import AnomalyError, is_inside, site
from sweepgrad.grad_mode import _SetMode
from sweepgrad.graph.backward import Arithmetic, backward, reachable
from sweepgrad.graph.node import VARIABLE, Node, Rule
from sweepgrad.tensor import WATCHERS, Tensor


class _Kind(NamedTuple):
    """A kind of element that is looked for."""

    noun: str
    found: Callable[[Any], Any]
    excused: Callable[[Any], Any]
    """Where an operation was handed what it need not answer for."""


_NAN = _Kind("NaN", np.isnan, np.isnan)
_INFINITY = _Kind("an infinity", np.isinf, lambda x: ~np.isfinite(x))


class _Given(NamedTuple):
    """What a rule gave, without a reference to it."""

    rule: Watched
    parts: tuple[tuple[int, Rule, tuple[int, ...]], ...]
    """Of each cotangent: its id, and the rule and the shape of the node that it belongs to."""


class _State(threading.local):
    kinds: tuple[_Kind, ...] = ()  # what this thread looks for; nothing outside of `detect_anomaly`
    within: Watched | None = None  # the rule that runs; it is looked at as a whole, not the operations it is made of
    last: _Given | None = None  # by the last rule that ran

    def __init__(self) -> None:
        self.before: list[tuple[_Kind, ...]] = []  # what `with` blocks of this thread put back


_state = _State()


class detect_anomaly(_SetMode):  # noqa: N801  # named as in PyTorch, and used like a function
    """Raise where a NaN is first made, on this thread, in a `with` block or a decorated function.

    Results of operations and the cotangents of backward passes are looked at, which takes several times as long as
    to compute them. The error names the operation, forward or backward, and the line that called it: for a NaN in a
    backward pass the line of the forward operation, if that ran within `detect_anomaly` as well.

    A NaN that comes in as data, through `asarray` or as a Python number, is no operation's fault, and may be masked
    later. It is reported where it enters a backward pass.

    Args:
        infinities: raise where an infinity is first made, too.

    Raises:
        FloatingPointError: `AnomalyError`, from the operation or the backward pass; it changed nothing.

    Example:
        >>> import sweepgrad as sg
        >>> x = sg.asarray([0.0, 4.0], requires_grad=True)
        >>> with sg.detect_anomaly():
        ...     try:
        ...         sg.sum(sg.where(x > 0.0, sg.sqrt(x), 0.0) * 0.0).backward()
        ...     except sg.AnomalyError as error:
        ...         print(str(error).split()[0])
        `sqrt`
    """

    def __init__(self, *args: object, infinities: bool = False) -> None:
        super().__init__(*args)
        self._kinds = (_NAN, _INFINITY) if infinities else (_NAN,)

    def __enter__(self) -> None:
        with _lock:
            WATCHERS.append(threading.get_ident())
            for table in _tables:
                table.clear()
        _state.before.append(_state.kinds)
        _state.kinds = self._kinds

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _state.kinds = _state.before.pop()
        with _lock:
            WATCHERS.pop()


def is_watching() -> bool:
    """Whether this thread is within `detect_anomaly`."""
    return bool(_state.kinds)


# --- short ways -----------------------------------------------------------------------------------------------------


# Guards the length of `WATCHERS`, and that no table has an entry while there is one. Reentrant, as the garbage
# collector may run a user's finaliser, and that an operation, while this thread holds it.
_lock = threading.RLock()
_tables: list[dict[DType, Any]] = []


def short_way() -> dict[DType, Any]:
    """A table that `enter` fills, and that is empty as long as a thread is within `detect_anomaly`."""
    _tables.append({})
    return _tables[-1]


def enter(table: dict[DType, Any], dtype: DType, plan: Any) -> None:
    """Put `plan` into the table, unless a thread is within `detect_anomaly`."""
    with _lock:
        if not WATCHERS:
            table[dtype] = plan


def _after_fork_in_child() -> None:
    del WATCHERS[len(_state.before) :]  # those of other threads, which are not here
    _lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_fork_in_child)


# --- operations -----------------------------------------------------------------------------------------------------


def watched(rule: Rule, inputs: Sequence[Any], result: Tensor, *, elementwise: bool = False) -> Rule:
    """The rule with which to record `result`, that of an operation on `inputs`, tensors and numbers.

    Raises:
        FloatingPointError: if the operation is at fault (`AnomalyError`).
    """
    if not _state.kinds:
        return rule
    if _state.within is not None:
        return Watched(rule, _state.within.place, _state.within.of or _state.within.name)
    place = site()
    if result._dtype.kind == "f":
        out = host(dense(result))
        values = [host(dense(value)) if isinstance(value, Tensor) else value for value in inputs]
        for kind in _state.kinds:
            bad = np.asarray(kind.found(out))
            if bad.any() and (bad := _at_fault(kind, bad, values, elementwise)).any():
                raise AnomalyError(_forward_message(rule.name, place, kind, bad, values, elementwise, result._dtype))
    return Watched(rule, place)


def _at_fault(kind: _Kind, bad: Array, values: Iterable[Any], elementwise: bool) -> Array:
    """The elements `bad` of a result without those that its inputs explain."""
    for value in values:
        excused = kind.excused(value)
        if elementwise:
            bad = bad & ~excused
        elif excused.any():
            return np.zeros_like(bad)
    return np.asarray(bad)


def _forward_message(
    name: str, place: str, kind: _Kind, bad: Array, values: Sequence[Any], elementwise: bool, dtype: DType
) -> str:
    if elementwise:
        values = [np.broadcast_to(value, bad.shape)[_first(bad)] for value in values]
        found = "from " + " and ".join(map(str, values))
    else:
        found = "from " + " and ".join(map(_described, values))
    where = f"{_where(bad, dtype, 'its result')}, {found}"
    if _adds_to_a_gradient():
        return (
            f"`{name}` at {place} made {kind.noun} where a pass adds to a `grad` (backward): {where}; set `grad` to "
            f"None between passes, or look at what the earlier one added{_hint(kind, values)}"
        )
    return (
        f"`{name}` at {place} made {kind.noun} (forward): {where}; change its inputs there, for example with `where` "
        f"or `clip` before it{_hint(kind, values)}"
    )


def _where(bad: Array, dtype: DType, of: str) -> str:
    """Which elements are meant."""
    count = f"{bad.sum()} of {bad.size} elements of {of} (shape {bad.shape}, {dtype})"
    return f"{count}, the first at index {_first(bad)}"


def _first(bad: Array) -> tuple[int, ...]:
    return tuple([int(k) for k in np.unravel_index(int(np.argmax(bad)), bad.shape)])


def _described(value: Any) -> str:
    """An input of an operation that is not elementwise."""
    if not isinstance(value, np.ndarray):
        return f"the number {value}"
    count = np.isinf(value).sum()
    return f"an input of shape {value.shape} with {count or 'no'} infinite element{'' if count == 1 else 's'}"


def _hint(kind: _Kind, values: Iterable[Any]) -> str:
    """Where to look next for what made an infinity into NaN."""
    if kind is not _NAN or _INFINITY in _state.kinds or not any(np.isinf(value).any() for value in values):
        return ""
    return "; `detect_anomaly(infinities=True)` says which operation made the infinity"


def _adds_to_a_gradient() -> bool:
    """Whether the operation is the one by which a pass adds to a gradient, rather than a user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_inside(frame):
        if frame.f_code is backward.__code__:
            return True
        frame = frame.f_back
    return False


# --- rules ----------------------------------------------------------------------------------------------------------


class Watched:
    """A rule that is looked at while its pass runs within `detect_anomaly`, and the line that called its operation."""

    __slots__ = ("name", "of", "place", "rule")

    def __init__(self, rule: Rule, place: str | None, of: str | None = None) -> None:
        """`of` is the operation called at `place`, if this one is a part of its derivative."""
        self.rule = rule
        self.name = rule.name
        self.place = place
        self.of = of

    @property
    def fresh(self) -> bool:
        """Whether the rule is an `Adding` rule."""
        return self.rule.fresh

    @property
    def title(self) -> str:
        """What messages call it."""
        name = f"`{self.name}`" if self.of is None else f"`{self.name}`, in the derivative of `{self.of}`,"
        if self.place is None:
            return f"{name} called outside of `detect_anomaly` (compute it within to see the line)"
        return f"{name} at {self.place}"

    def pullback(self, node: Node, saved: Any, ct: Any, /) -> tuple[Any, ...]:
        """As the rule; raises if it is at fault."""
        return self._run(self.rule.pullback, node, saved, ct)

    def pullback_onto(self, node: Node, saved: Any, ct: Any, sums: list[Any], /) -> tuple[Any, ...]:
        """As the rule; raises if it, or the addition, is at fault."""
        return self._run(self.rule.pullback_onto, node, saved, ct, sums)  # type: ignore[attr-defined]

    def replay(self, node: Node, saved: Any, ct: Any, /) -> tuple[Any, ...]:
        """As the rule; raises if it is at fault."""
        return self._run(self.rule.replay, node, saved, ct)

    def _run(
        self, pull: Callable[..., tuple[Any, ...]], node: Node, saved: Any, ct: Any, *sums: Any
    ) -> tuple[Any, ...]:
        if not _state.kinds:
            return pull(node, saved, ct, *sums)
        outer, _state.within = _state.within, self
        try:
            parts = pull(node, saved, ct, *sums)
            for k, part in enumerate(parts):
                kind = None if part is None else _kind_in(part)
                if kind is not None:
                    added = bool(sums) and sums[0][k] is not None
                    alone = self.rule.pullback(node, saved, ct)[k] if added else part
                    raise AnomalyError(self._message(kind, node, saved, ct, k, alone, part))
        finally:
            _state.within = outer
        parents = zip(parts, node.parents, strict=True)
        _state.last = _Given(self, tuple([(id(part), parent.rule, parent.shape) for part, parent in parents]))
        return parts

    def _message(self, kind: _Kind, node: Node, saved: Any, ct: Any, k: int, alone: Any, part: Any) -> str:
        """The message for cotangent number `k`, `alone` and as the sum `part` with others."""
        parent = node.parents[k]
        bad = kind.found(_elements(alone)).reshape(parent.shape)
        if not bad.any():  # of infinities with opposite signs, or of two that are too large
            return _sum_message(kind, _elements(part), parent.shape, [_title(parent.rule, parent.shape)])
        at = int(np.argmax(bad))
        read = list(_saved(saved))
        alike = [one for one in (_elements(ct), *read) if np.ndim(one) == 0 or one.size == bad.size]
        there = [str(one if np.ndim(one) == 0 else one.reshape(-1)[at]) for one in alike]
        found = f", from cotangent and saved values {', '.join(there)}" if there else ""
        where = f"{_where(bad, parent.dtype, 'the cotangent of an input')}{found}"
        if any(np.any(kind.excused(one)) for one in read):
            return (
                f"{self.title} has a derivative with {kind.noun} (backward): {where}; so had its inputs or its result, "
                "and no operation made it within `detect_anomaly`: it came in as data, or was computed before"
            )
        return (
            f"{self.title} made {kind.noun} in its derivative (backward): {where}; put another input in this one's "
            f"place with `where` before it, as a mask after it comes too late{_hint(kind, [_elements(ct), *read])}"
        )


def _title(rule: Rule, shape: tuple[int, ...]) -> str:
    """What a sum of cotangents belongs to."""
    if rule is VARIABLE:
        return f"a variable of shape {shape}"
    return f"the result of {rule.title if isinstance(rule, Watched) else rule.name}"


def _sum_message(kind: _Kind, total: Array, shape: tuple[int, ...], titles: Sequence[str]) -> str:
    where = _where(kind.found(total).reshape(shape), total.dtype, "the sum")
    return (
        f"adding the cotangents of {' or '.join(titles)} made {kind.noun} (backward): {where}; those that were added "
        "are infinite of both signs, or too large: look at the derivatives of the operations that use it"
    )


def _elements(value: Any) -> Array:
    """Those of a cotangent: an array, or a tensor where the pass can be differentiated."""
    return host(flat(value) if isinstance(value, Tensor) else value)


def _kind_in(value: Any) -> _Kind | None:
    """The first kind of element that is looked for and found."""
    return next((kind for kind in _state.kinds if kind.found(_elements(value)).any()), None)


def _saved(value: Any) -> Iterator[Any]:
    """The arrays and numbers in what a node saved."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from _saved(one)
    elif isinstance(value, Tensor):
        yield host(dense(value))
    elif is_array(value) or isinstance(value, float):
        yield host(value)
    elif hasattr(value, "inputs"):  # the call of a structural operation
        yield from _saved((*value.inputs, value.output))


# --- passes ---------------------------------------------------------------------------------------------------------


class _Sums:
    """The additions of a pass, looked at."""

    __slots__ = ("plain",)

    def __init__(self, plain: Arithmetic) -> None:
        self.plain = plain

    def add(self, total: Any, part: Any) -> Any:
        """The sum, as a new value."""
        return self._sum(self.plain.add, total, part)

    def accumulate(self, total: Any, part: Any) -> Any:
        """The sum, in the place of `total`."""
        return self._sum(self.plain.accumulate, total, part)

    def _sum(self, add: Callable[[Any, Any], Any], total: Any, part: Any) -> Any:
        last = _state.last
        assert last is not None, "a rule has given `part`"
        outer, _state.within = _state.within, last.rule
        try:
            total = add(total, part)
        finally:
            _state.within = outer
        if (kind := _kind_in(total)) is not None:
            belongs = [(rule, shape) for given, rule, shape in last.parts if given == id(part)]
            titles = [_title(rule, shape) for rule, shape in belongs]
            raise AnomalyError(_sum_message(kind, _elements(total), belongs[0][1], titles))
        return total

    def receive(self, node: Node, changed: Tensor) -> Any:
        """What a hook returned."""
        if (kind := _kind_in(changed)) is not None:
            bad = kind.found(host(dense(changed)))
            raise AnomalyError(
                f"a hook of {_title(node.rule, node.shape)} returned {kind.noun} (backward): "
                f"{_where(bad, changed._dtype, 'the cotangent')}; it was given one without: return another, or None"
            )
        return self.plain.receive(node, changed)


def watched_pass(result: Tensor, ct: Tensor, arithmetic: Arithmetic) -> Arithmetic:
    """The arithmetic of a pass from `result`, whose cotangent is `ct`; every rule that may run is a `Watched` one.

    Raises:
        FloatingPointError: if the pass would begin with what is looked for (`AnomalyError`).
    """
    if not _state.kinds:
        return arithmetic
    assert result._node is not None
    given, value = host(dense(ct)), host(dense(result))
    for kind in _state.kinds:
        if (bad := np.asarray(kind.found(given))).any():
            where = _where(bad, given.dtype, "`gradient`")
            raise AnomalyError(f"`backward` at {site()} was given {kind.noun}: {where}; pass one without")
        if (bad := kind.found(value) & (given != 0)).any():
            where = _where(bad, value.dtype, _title(result._node.rule, result._shape))
            raise AnomalyError(
                f"`backward` at {site()} begins at {kind.noun}: {where}; no operation made it within `detect_anomaly`: "
                "it came in as data, or was computed before"
            )
    for node in reachable(result._node):
        # Without the registry's lock: whoever reads the rule meanwhile is served by either.
        if node.links and not isinstance(node.rule, Watched):
            node.rule = Watched(node.rule, None)
    sums = _Sums(arithmetic)
    return replace(arithmetic, add=sums.add, accumulate=sums.accumulate, receive=sums.receive)


_tensor.watched_pass = watched_pass
