"""What an operation is: the row in which all its facts stand, and the table of all rows.

Everything else is derived from the row: kernels, what is saved, derivatives of every order, the gradient check, the
documentation's line.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from sweepgrad.errors import DTypeError
from sweepgrad.kernels.expr import Expr, call, const, is_const, symbol, topological

OPS: dict[str, Op] = {}
"""Every operation by its public name."""

DEFERRED: dict[type, Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = {}
"""Types of arguments on which nothing is computed; called instead with (operation, arguments, parameters)."""


T = TypeVar("T")


class once(Generic[T]):  # noqa: N801  # used like `functools.cached_property`
    """A property that is computed when first asked for, and kept; two threads may both compute it, and get one value.

    No lock: `functools.cached_property` has one for all instances, up to Python 3.11, for which a child that was forked
    while another thread computed would wait for ever.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function = function
        self.name = function.__name__
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        # Only called where the instance has no value of this name yet.
        return instance.__dict__.setdefault(self.name, self.function(instance))  # type: ignore[no-any-return]


@dataclass(eq=False, kw_only=True)
class Op:
    """What all kinds of operation have: a name, a docstring, the function that users call, and what it equals."""

    name: str
    doc: str
    like: str
    """An expression of NumPy (`np`) and SciPy (`special`) that gives the same values: the tests' reference."""
    function: Callable[..., Any] = field(init=False)
    fronted: bool = field(init=False, default=False)
    """Whether `function` checks its arguments and then calls the one that was made from the row."""

    def __post_init__(self) -> None:
        if self.name in OPS:
            raise AssertionError(f"`{self.name}` is declared twice")
        OPS[self.name] = self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class _Build(threading.local):
    whole = False  # whether composites are called as they are rather than expanded


_build = _Build()


def _building(whole: bool, function: Callable[[], T]) -> T:
    """What `function` builds, whatever this thread was building when the collector ran a finaliser that computes."""
    before = _build.whole
    try:
        _build.whole = whole
        return function()
    finally:
        _build.whole = before


Partials = Callable[..., tuple[Any, ...]]
Interval = tuple[float, float]
Kink = tuple[tuple[float, ...], tuple[float, ...]]
Result = Literal["float", "same", "bool"]
Accepts = Literal["numeric", "any", "bits"]


@dataclass(eq=False, kw_only=True, repr=False)
class Elementwise(Op):
    """An operation that acts on each element by itself.

    `scalar` maps symbolic scalars to one; None marks a primitive, which `kernels.scalars` writes for each target.
    `partials` maps (inputs..., output) to the derivative by each input, given each may be differentiated; None leaves
    them to reverse mode on `scalar`'s expression.
    """

    arity: int
    scalar: Callable[..., Any] | None
    partials: Partials | None
    domain: tuple[Interval, ...]
    """For each input the interval from which tests draw."""
    result: Result = "float"
    """`float`: integers become float64; `same`: the inputs' common dtype; `bool`: a truth value, never tracked."""
    condition: bool = False
    """Whether the first input is a truth value that is neither promoted nor differentiated (`where`)."""
    accepts: Accepts = "numeric"
    """The kinds of dtype taken: `numeric`, `any` (bool too), `bits` (bool and integers)."""
    whole: bool = False
    """Whether integers come back as they are (rounding)."""
    kink: Kink | None = None
    """A point where a derivative is absent, and the values that the partials have there."""
    plans: dict[Any, Any] = field(init=False, default_factory=dict)
    """The row's specialisations so far (`ops.plan`)."""

    @property
    def differentiable(self) -> bool:
        """Whether results are tracked."""
        return self.result != "bool" and self.accepts != "bits"

    @property
    def inputs(self) -> list[str]:
        """The inputs' names in expressions."""
        return [f"x{k}" for k in range(self.arity)]

    def expand(self, *args: Any) -> Expr:
        """The expression of this operation on symbolic scalars."""
        if self.scalar is None or _build.whole:
            return call(self.name, *args)
        value = self.scalar(*args)
        return value if isinstance(value, Expr) else const(value)

    @once
    def forward(self) -> Expr:
        """The result, as an expression of the inputs."""
        return _building(False, lambda: self.expand(*map(symbol, self.inputs)))

    @once
    def derivatives(self) -> tuple[Expr, ...]:
        """The partial derivative by each input, as expressions of the inputs and the output `y`, for kernels."""
        return _building(False, self._derivatives)

    @once
    def replayed(self) -> tuple[Expr, ...]:
        """The same for tensors: operations named in `partials` stay whole, so that their own partials are used next.

        The expansion of `sign`, say, is x itself at 0, and would be differentiated to 1.
        """
        if self.partials is None:  # differentiated from its expansion, whose operations are primitives
            return self.derivatives
        return _building(True, self._derivatives)

    def _derivatives(self) -> tuple[Expr, ...]:
        xs = [symbol(name) for name in self.inputs]
        if self.partials is None:
            return differentiate(self.forward, xs)
        values = self.partials(*xs, symbol("y"))
        if not isinstance(values, tuple) or len(values) != self.arity:
            raise AssertionError(f"`partials` of `{self.name}` must return a tuple of {self.arity}; found {values!r}")
        return tuple(value if isinstance(value, Expr) else const(value) for value in values)


def scaled(ct: Expr, partial: Expr) -> Expr:
    """`ct * partial`, where a branch of 0 stays 0 and one of 1 stays `ct`: infinity times 0 would be NaN."""
    if is_const(partial, 0):
        return const(0.0)
    if partial.op == "where":
        condition, x1, x2 = partial.args
        return call("where", condition, scaled(ct, x1), scaled(ct, x2))
    return call("multiply", ct, partial)


def differentiate(output: Expr, xs: Sequence[Expr]) -> tuple[Expr, ...]:
    """Reverse mode on an expression: the derivative of `output` by each of the symbols `xs`."""
    adjoints: dict[Expr, Expr] = {output: const(1.0)}
    for expr in reversed(list(topological([output]))):
        adjoint = adjoints.get(expr)
        if adjoint is None or not expr.args:
            continue
        row = OPS[expr.op]
        if not isinstance(row, Elementwise) or row.result == "bool":
            continue
        assert row.partials is not None, f"the primitive `{row.name}` has no partials"
        for arg, partial in zip(expr.args, row.partials(*expr.args, expr), strict=True):
            if isinstance(partial, (int, float)) and partial == 0:
                continue
            part = call("multiply", adjoint, partial)
            adjoints[arg] = call("add", adjoints[arg], part) if arg in adjoints else part
    return tuple(adjoints.get(x, const(0.0)) for x in xs)


def evaluate(outputs: Sequence[Expr], values: dict[str, Any], typed: Callable[[Any], Any]) -> list[Any]:
    """`outputs` computed with the operations themselves on `values`, tensors or numbers, given by symbol.

    `typed` gives a number the dtype of the computation, for an operation on numbers alone, which has no other.
    """
    results: dict[Expr, Any] = {}
    for expr in topological(outputs):
        if expr.op == "symbol":
            results[expr] = values[str(expr.value)]
        elif expr.op == "const":
            results[expr] = expr.value
        else:
            args = [results[arg] for arg in expr.args]
            first = int(expr.op == "where")  # whose condition has a dtype of its own
            if all(isinstance(arg, (int, float)) for arg in args[first:]):
                args[first] = typed(args[first])
            results[expr] = OPS[expr.op].function(*args)
    return [results[output] for output in outputs]


DEFERRED[Expr] = lambda op, args, params: op.expand(*args)


def describe(function: Callable[..., Any]) -> tuple[str, str, int]:
    """Name, docstring and number of parameters of a function that declares a row."""
    doc = inspect.getdoc(function) or ""
    if not doc and sys.flags.optimize < 2:  # which leaves docstrings out
        raise AssertionError(f"`{function.__name__}` has no docstring")
    return function.__name__, doc, len(inspect.signature(function).parameters)


def reject(op: str, value: object) -> DTypeError:
    """The error for an argument of a type that no operation takes."""
    return DTypeError(
        f"`{op}` takes tensors, NumPy arrays and Python numbers; found {type(value).__name__} "
        "(convert it with `sweepgrad.asarray`)"
    )
