"""Attaches arithmetic, methods and properties to `Tensor`: the last of the operations' modules to be imported.

The tables here are all there is; `_attached.pyi`, the declarations that type checkers read, is generated from them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import numpy as np

from sweepgrad.errors import DTypeError, ImmutableError, ShapeError
from sweepgrad.grad_mode import mode
from sweepgrad.ops import device, indexing, shape
from sweepgrad.ops.op import OPS, Elementwise
from sweepgrad.ops.plan import call
from sweepgrad.ops.short import OPERANDS, binary, unknown_operand
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

IN_PLACE = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "matmul": "@",
}  # fmt: skip
"""Operators that change a variable in place under `no_grad`, as in PyTorch."""

NOT_METHODS = {"getitem", "scatter", "expand", "reshape"}


def methods() -> list[str]:
    """Operations that are methods as well: those whose first argument is a tensor called x."""
    return [name for name, row in OPS.items() if "x" in signature(row.function).parameters and name not in NOT_METHODS]


def _checked(name: str, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`function` as an operator: NotImplemented for an operand of a type that it does not know."""

    def operator(self: Tensor, other: Any) -> Any:
        return function(self, other) if isinstance(other, OPERANDS) else unknown_operand(name, other)

    return operator


def _not_implemented(op: str, other: object) -> Any:
    """What a comparison answers, even to a sequence: for Python to ask `other`."""
    return NotImplemented


def _operator(name: str) -> Callable[[Any, Any], Any]:
    row = OPS[name]
    if isinstance(row, Elementwise) and not row.fronted:
        return binary(row, unknown=_not_implemented if row.result == "bool" else unknown_operand)
    return _checked(name, row.function)


def _reflected(name: str) -> Callable[[Any, Any], Any]:
    row = OPS[name]
    if isinstance(row, Elementwise) and not row.fronted:
        return _checked(name, lambda self, other: call(row, (other, self)))
    return _checked(name, lambda self, other: row.function(other, self))


def _in_place(symbol: str, operator: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`x += y`: for a variable a change of its values, which must not be recorded; else it rebinds the name."""

    def operate(self: Tensor, other: Any) -> Any:
        if self._node is None or not self.is_variable:
            return NotImplemented
        if mode.enabled:
            raise ImmutableError(
                f"`{symbol}` on a variable would make its name mean the result of an operation: write "
                f"`y = x {symbol[:-1]} ...` for a new tensor, or update the variable under `no_grad()`"
            )
        result = operator(self, other)
        return result if result is NotImplemented else self.copy_(result)

    return operate


@functools.cache
def _ufunc_table() -> dict[str, str]:
    """Operations by the name of NumPy's universal function of the same name in the array API."""
    found = ((getattr(np, name, None), name) for name in OPS)
    return {ufunc.__name__: name for ufunc, name in found if isinstance(ufunc, np.ufunc)}


def _array_ufunc(self: Tensor, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Tensor:
    """`np.exp(tensor)` and `array * tensor`: the operation of this library that has the same values."""
    _check_target(ufunc.__name__, inputs[0] if method == "at" else kwargs.get("out"))
    name = _ufunc_table().get(ufunc.__name__)
    if name is None or method != "__call__" or kwargs:
        raise DTypeError(
            f"`numpy.{ufunc.__name__}` does not take tensors{_with(method, kwargs) if name else ''}: use "
            f"{f'`sweepgrad.{name}`' if name else 'an operation of sweepgrad'}, or `t.numpy()` for an array"
        )
    result: Tensor = OPS[name].function(*inputs)
    return result


def _with(method: str, kwargs: Any) -> str:
    """What there is in a call of NumPy's that has no counterpart here."""
    return (
        f" in its method `{method}`" if method != "__call__" else f" with {', '.join(f'`{name}`' for name in kwargs)}"
    )


def _check_target(name: str, out: Any) -> None:
    """Raise if `out`, where NumPy's function `name` is to write its result, is or holds a tensor."""
    if isinstance(out, Tensor) or (isinstance(out, tuple) and any(isinstance(one, Tensor) for one in out)):
        raise _no_target(name)


def _no_target(name: str) -> ImmutableError:
    return ImmutableError(
        f"`numpy.{name}` cannot write into a tensor, as tensors are immutable: write into a copy, `t.numpy().copy()`, "
        "or give a variable new values with `t.copy_(value)`"
    )


_ELSEWHERE = {"concatenate": "concat", "dot": "matmul", "amax": "max", "amin": "min", "transpose": "permute_dims"}
"""Operations that have another name in NumPy."""

_DESCRIBING = {"shape", "ndim", "size", "result_type", "zeros_like", "ones_like", "full_like", "empty_like"}
"""NumPy's functions that read no element, and so lose no gradient."""


def _array_function(self: Tensor, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """NumPy's other functions: they take tensors that are not tracked, as arrays."""
    _check_target(func.__name__, kwargs.get("out"))
    stack = [] if func.__name__ in _DESCRIBING else [args, kwargs]
    while stack:
        one = stack.pop()
        if isinstance(one, Tensor) and one.requires_grad:
            own = _ELSEWHERE.get(func.__name__, func.__name__)
            known = f"`sweepgrad.{own}`" if own in OPS else "an operation of sweepgrad"
            raise DTypeError(
                f"`{func.__module__}.{func.__name__}` does not take tensors that require a gradient, since its result "
                f"would silently leave the graph: use {known}, or `t.numpy()` for an array"
            )
        stack.extend(one.values() if isinstance(one, dict) else one if isinstance(one, (list, tuple)) else ())

    def plain(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(plain, value))
        return value.__array__() if isinstance(value, Tensor) else value

    given = [plain(value) for value in args], {name: plain(value) for name, value in kwargs.items()}
    try:
        return func(*given[0], **given[1])
    except (ValueError, TypeError) as error:
        if args and isinstance(args[0], Tensor) and ("read-only" in str(error) or "readonly" in str(error)):
            raise _no_target(func.__name__) from error
        raise


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


def attach() -> bool:
    """Give `Tensor` its operators, methods and properties; whether it did not have them yet."""
    if "__add__" in vars(Tensor):
        return False
    device.serve()
    operators = {f"__{name}__": (_operator(op), op) for name, op in (OPERATORS | COMPARISONS).items()}
    operators |= {f"__r{name}__": (_reflected(op), op) for name, op in OPERATORS.items()}
    for name, symbol in IN_PLACE.items():
        plain, op = operators[f"__{name}__"]
        operators[f"__i{name}__"] = (_in_place(f"{symbol}=", plain), op)
    for name, (function, op) in operators.items():
        function.__name__, function.__qualname__, function.__doc__ = name, f"Tensor.{name}", OPS[op].doc
        setattr(Tensor, name, function)
    for name, op in UNARY.items():
        setattr(Tensor, f"__{name}__", OPS[op].function)
    for name in methods():
        setattr(Tensor, name, OPS[name].function)
    others: dict[str, Any] = {
        "__array_ufunc__": _array_ufunc,
        "__array_function__": _array_function,
        "__getitem__": indexing.getitem,
        "__iter__": _iterate,
        "reshape": _reshape,
        "T": property(_transpose),
        "mT": property(shape.matrix_transpose),
    }
    for name, value in others.items():
        setattr(Tensor, name, value)
    return True
