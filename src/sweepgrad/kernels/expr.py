"""Symbolic scalars: what a row's function returns when it is called to be compiled rather than computed.

An `Expr` is an immutable node of an expression graph, hash-consed: equal expressions are the same object, so common
parts are computed once. Arithmetic and comparison operators build more of them, with the algebra that is exact for
every float (x*1, x+0 is not: it would lose the sign of -0; constants are folded only where NumPy would do the same).
An `Expr` has no truth value: the scalar language has `where` instead of `if`.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator

from sweepgrad.errors import DTypeError

Scalar = float | int | bool

# No lock, for which a child that is forked meanwhile would wait: each step is one call into C.
_interned: weakref.WeakValueDictionary[tuple[object, ...], Expr] = weakref.WeakValueDictionary()

_FOLDED: dict[str, Callable[[Scalar, Scalar], Scalar]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
}


class Expr:
    """An operation's name and its arguments; a constant or an input has no arguments but a value or a name."""

    __slots__ = ("__weakref__", "args", "op", "value")

    op: str
    args: tuple[Expr, ...]
    value: Scalar | str | None

    def __bool__(self) -> bool:
        raise DTypeError("a symbolic scalar has no truth value: use `where(condition, x, y)` instead of `if`")

    def __repr__(self) -> str:
        if not self.args:
            return str(self.value)
        return f"{self.op}({', '.join(map(repr, self.args))})"

    # fmt: off
    def __add__(self, other: Expr | Scalar) -> Expr: return call("add", self, other)
    def __radd__(self, other: Scalar) -> Expr: return call("add", other, self)
    def __sub__(self, other: Expr | Scalar) -> Expr: return call("subtract", self, other)
    def __rsub__(self, other: Scalar) -> Expr: return call("subtract", other, self)
    def __mul__(self, other: Expr | Scalar) -> Expr: return call("multiply", self, other)
    def __rmul__(self, other: Scalar) -> Expr: return call("multiply", other, self)
    def __truediv__(self, other: Expr | Scalar) -> Expr: return call("divide", self, other)
    def __rtruediv__(self, other: Scalar) -> Expr: return call("divide", other, self)
    def __pow__(self, other: Expr | Scalar) -> Expr: return call("pow", self, other)
    def __neg__(self) -> Expr: return call("negative", self)
    def __lt__(self, other: Expr | Scalar) -> Expr: return call("less", self, other)
    def __le__(self, other: Expr | Scalar) -> Expr: return call("less_equal", self, other)
    def __gt__(self, other: Expr | Scalar) -> Expr: return call("greater", self, other)
    def __ge__(self, other: Expr | Scalar) -> Expr: return call("greater_equal", self, other)
    def __and__(self, other: Expr | Scalar) -> Expr: return call("logical_and", self, other)
    def __or__(self, other: Expr | Scalar) -> Expr: return call("logical_or", self, other)
    # fmt: on


def _make(op: str, args: tuple[Expr, ...], value: Scalar | str | None) -> Expr:
    # repr tells 0.0 from -0.0, and type(...) 1 from 1.0 and True, which compare equal
    key = (op, *map(id, args), type(value), repr(value))
    found = _interned.get(key)
    if found is not None:
        return found
    made = object.__new__(Expr)
    made.op, made.args, made.value = op, args, value
    reference = weakref.KeyedRef(made, _interned._remove, key)  # type: ignore[attr-defined]
    while True:
        # Another thread, or a finaliser that ran on this one, may have made the same: the first counts.
        held = _interned.data.setdefault(key, reference)  # type: ignore[attr-defined]
        found = held()
        if found is not None:
            return found  # type: ignore[no-any-return]
        _interned._remove(held)  # type: ignore[attr-defined]  # it died just now; nothing else is removed


def const(value: Scalar) -> Expr:
    """A constant."""
    return _make("const", (), value)


def symbol(name: str) -> Expr:
    """An input, known by its name in the kernel."""
    return _make("symbol", (), name)


def call(op: str, *args: Expr | Scalar) -> Expr:
    """The operation `op` on `args`, simplified where that changes no result."""
    exprs = tuple(arg if isinstance(arg, Expr) else const(arg) for arg in args)
    simpler = _simplified(op, exprs)
    return _make(op, exprs, None) if simpler is None else simpler


def reduce(kind: str, x: Expr, over: str) -> Expr:
    """`x` reduced by a kind in `REDUCTIONS`; `over` names axes: I, J or IJ in a loop nest, labels in a trace."""
    return _make("reduce", (x,), f"{kind} {over}")


def reduction(expr: Expr) -> tuple[str, str]:
    """Kind and axes of an expression that `reduce` made."""
    kind, over = str(expr.value).split()
    return kind, over


def is_const(expr: Expr, value: Scalar | None = None) -> bool:
    """Whether `expr` is a constant, and, if `value` is given, that one."""
    return expr.op == "const" and (value is None or expr.value == value)


def _simplified(op: str, args: tuple[Expr, ...]) -> Expr | None:
    if op in _FOLDED and all(map(is_const, args)):
        return const(_FOLDED[op](args[0].value, args[1].value))  # type: ignore[arg-type]
    if op == "multiply":
        if is_const(args[0], 1):
            return args[1]
        if is_const(args[1], 1):
            return args[0]
        # A sign moves outwards, where it meets another or is one cheap instruction.
        if is_const(args[0], -1):
            return call("negative", args[1])
        if is_const(args[1], -1):
            return call("negative", args[0])
    if op == "divide" and is_const(args[1], 1):
        return args[0]
    if op == "negative":
        if args[0].op == "negative":
            return args[0].args[0]
        if is_const(args[0]):
            return const(-args[0].value)  # type: ignore[operator]
    return None


def topological(roots: Iterable[Expr]) -> Iterator[Expr]:
    """Every node below `roots`, arguments before what uses them, each once."""
    done: set[Expr] = set()
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        expr, expanded = stack.pop()
        if expr in done:
            continue
        if expanded:
            done.add(expr)
            yield expr
        else:
            stack.append((expr, True))
            stack.extend((arg, False) for arg in reversed(expr.args) if arg not in done)


def symbols(roots: Iterable[Expr]) -> set[str]:
    """Names of the inputs that `roots` read."""
    return {str(expr.value) for expr in topological(roots) if expr.op == "symbol"}
