"""Attaches arithmetic, methods and properties to `Tensor`: the last of the operations' modules to be imported.

`OPERATORS` and `METHODS` are all there is; `attached.py`, the declarations that type checkers read, is generated from
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sweepgrad.errors import DTypeError, ShapeError
from sweepgrad.ops import indexing, shape
from sweepgrad.ops.op import OPS, Elementwise
from sweepgrad.ops.plan import OPERANDS, binary, call, unknown_operand
from sweepgrad.tensor import Tensor

OPERATORS = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "pow",
    "matmul": "matmul",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}
"""Binary operators, which have a reflected form."""

COMPARISONS = {
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
}
UNARY = {"neg": "negative", "pos": "positive", "abs": "abs", "invert": "bitwise_invert"}

METHODS = (
    "sum", "mean", "prod", "max", "min", "var", "std", "argmax", "argmin", "all", "any", "logsumexp", "softmax",
    "log_softmax", "exp", "log", "sqrt", "square", "abs", "tanh", "sin", "cos", "sigmoid", "relu", "clip", "round",
    "squeeze", "astype", "take",
)  # fmt: skip
"""Operations that are methods as well, with the tensor as their first argument."""


def _checked(name: str, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`function` as an operator: NotImplemented for an operand of a type that it does not know."""

    def operator(self: Tensor, other: Any) -> Any:
        return function(self, other) if isinstance(other, OPERANDS) else unknown_operand(name, other)

    return operator


def _operator(name: str) -> Callable[[Any, Any], Any]:
    row = OPS[name]
    if isinstance(row, Elementwise) and name != "pow":
        return binary(row, operator=True)
    return _checked(name, row.function)


def _reflected(name: str) -> Callable[[Any, Any], Any]:
    row = OPS[name]
    if isinstance(row, Elementwise) and name != "pow":
        return _checked(name, lambda self, other: call(row, (other, self)))
    return _checked(name, lambda self, other: row.function(other, self))


def _reshape(self: Tensor, *lengths: Any, copy: bool | None = None) -> Tensor:
    """`reshape(x, shape)`; the lengths may be given one by one."""
    return shape.reshape(self, lengths[0] if len(lengths) == 1 else lengths, copy=copy)


def _transpose(self: Tensor) -> Tensor:
    """The transpose of a matrix; use `mT` for stacks of matrices."""
    if self.ndim != 2:
        raise ShapeError(f"`T` needs 2 dimensions; found shape {self.shape}: use `mT` or `permute_dims`")
    return shape.matrix_transpose(self)


def _iterate(self: Tensor) -> Iterator[Tensor]:
    if not self.shape:
        raise DTypeError("a 0-d tensor cannot be iterated over")
    return (indexing.getitem(self, k) for k in range(self.shape[0]))


def attach() -> None:
    """Give `Tensor` its operators, methods and properties."""
    for name, op in (OPERATORS | COMPARISONS).items():
        setattr(Tensor, f"__{name}__", _operator(op))
    for name, op in OPERATORS.items():
        setattr(Tensor, f"__r{name}__", _reflected(op))
    for name, op in UNARY.items():
        setattr(Tensor, f"__{name}__", OPS[op].function)
    for name in METHODS:
        setattr(Tensor, name, OPS[name].function)
    others: dict[str, Any] = {
        "__getitem__": indexing.getitem,
        "__iter__": _iterate,
        "reshape": _reshape,
        "T": property(_transpose),
        "mT": property(shape.matrix_transpose),
    }
    for name, value in others.items():
        setattr(Tensor, name, value)
    Tensor.__hash__ = object.__hash__  # type: ignore[method-assign,assignment]  # by identity, in spite of `__eq__`
