"""Tensors and numbers that are not there yet: what `fuse` hands to a function to learn what it computes.

A `Traced` tensor has a shape and a dtype, but instead of elements an expression and, for each axis that is longer than
1, a label: the loop in which it is walked. Operations on traced tensors build expressions; where they broadcast, labels
of axes that meet become the same one. What no expression can say raises `FuseError`, which names the operation and the
line.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from sweepgrad.dtypes import DTYPES, DType
from sweepgrad.elements import NOTHING
from sweepgrad.errors import FuseError, site
from sweepgrad.grad_mode import mode
from sweepgrad.kernels.expr import Expr, call, const, reduce, symbol
from sweepgrad.kernels.scalars import REDUCTIONS
from sweepgrad.ops.op import DEFERRED, OPS, Elementwise, Op
from sweepgrad.ops.plan import broadcast_shape, common_dtype
from sweepgrad.tensor import Tensor

Label = int | None

_BOOL = DTYPES["bool"]


FALLBACK = "or use `fuse(f, fallback=True)` to run the function as it is"


def refuse(name: str, why: str, advice: str = "leave it outside") -> FuseError:
    """The error for what cannot be part of a fused function."""
    return FuseError(f"`{name}` at {site()} cannot be fused: {why}; {advice}, {FALLBACK}")


class NeedsValue(Exception):  # noqa: N818  # a signal to the tracer, never seen by users
    """The function asked for the value of numbers that it was passed: they have to be known when it is traced."""

    def __init__(self, numbers: frozenset[int]) -> None:
        super().__init__(numbers)
        self.numbers = numbers


class Trace:
    """What one tracing of a function has found out."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        """That of all floats in the function."""
        self.lengths: list[int] = []
        """Of each label's axis."""
        self._same: list[int] = []
        self.walked: list[tuple[Label, ...]] = []
        """The labels of every tensor's axes."""
        self.numbers: dict[Any, Number] = {}  # by key
        """The numbers that reached an operation on tensors, by what they compute; each is an input of the kernel."""

    def label(self, length: int) -> Label:
        """A new label, or None for an axis of length 1, which needs no loop."""
        if length == 1:
            return None
        self.lengths.append(length)
        self._same.append(len(self._same))
        return len(self._same) - 1

    def find(self, label: int) -> int:
        """The one that stands for all labels that are the same."""
        while self._same[label] != label:
            label = self._same[label]
        return label

    def unite(self, first: int, second: int) -> None:
        """Let two labels be the same."""
        first, second = self.find(first), self.find(second)
        self._same[max(first, second)] = min(first, second)

    def symbol(self, number: Number) -> Expr:
        """The input that stands for a number."""
        self.numbers.setdefault(number.key, number)
        return symbol(f"k{list(self.numbers).index(number.key)}")


class Number:
    """A Python number that the function was passed. Arithmetic on it is done in Python, at each call."""

    __slots__ = ("recipe",)

    def __init__(self, recipe: tuple[Any, ...]) -> None:
        self.recipe = recipe
        """("argument", position), or (function, operands...)."""

    def value(self, arguments: Sequence[Any]) -> Any:
        """What it is for these arguments."""
        head, *rest = self.recipe
        if head == "argument":
            return arguments[rest[0]]
        return head(*(one.value(arguments) if isinstance(one, Number) else one for one in rest))

    @property
    def key(self) -> tuple[Any, ...]:
        """The same for all numbers that are computed in the same way."""
        return tuple([one.key if isinstance(one, Number) else (type(one), repr(one)) for one in self.recipe])

    def __neg__(self) -> Number:
        return Number((operator.neg, self))

    def __pos__(self) -> Number:
        return self

    def __abs__(self) -> Number:
        return Number((operator.abs, self))

    def _positions(self) -> frozenset[int]:
        head, *rest = self.recipe
        if head == "argument":
            return frozenset(rest)
        return frozenset().union(*(one._positions() for one in rest if isinstance(one, Number)))

    def _needed(self, *_: object, **__: object) -> NoReturn:
        raise NeedsValue(self._positions())

    __bool__ = __int__ = __float__ = __index__ = __lt__ = __le__ = __gt__ = __ge__ = __round__ = _needed
    __eq__ = __ne__ = __hash__ = __array__ = __array_ufunc__ = __str__ = _needed
    __floordiv__ = __mod__ = __rfloordiv__ = __rmod__ = __divmod__ = __format__ = __complex__ = _needed


def _arithmetic(name: str, row: str) -> None:
    function: Callable[..., Any] = getattr(operator, name)

    def forward(self: Number, other: Any) -> Any:
        if isinstance(other, (Number, int, float)) and not isinstance(other, np.generic):
            return Number((function, self, other))
        return OPS[row].function(self, other) if isinstance(other, Tensor) else NotImplemented

    def reflected(self: Number, other: Any) -> Any:
        if isinstance(other, (int, float)) and not isinstance(other, np.generic):
            return Number((function, other, self))
        return OPS[row].function(other, self) if isinstance(other, Tensor) else NotImplemented

    setattr(Number, f"__{name}__", forward)
    setattr(Number, f"__r{name}__", reflected)


for _name, _row in {"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "pow": "pow"}.items():
    _arithmetic(_name, _row)


class Traced(Tensor, internal=True):
    """A tensor whose elements are an expression."""

    __slots__ = ("axes", "expr", "trace")

    axes: tuple[Label, ...]
    """The label of each axis; None for one of length 1."""
    expr: Expr
    trace: Trace

    def detach(self) -> Tensor:
        """The same, but constant as far as derivatives go."""
        return traced(self.trace, call("detached", self.expr), self._shape, self.axes, self._dtype)

    def _unknown(self, name: str) -> NoReturn:
        raise refuse(name, "the function reads elements of a tensor, and what it does next may depend on them")

    def _outside(self, name: str) -> NoReturn:
        raise refuse(
            name,
            "gradients are no part of what is fused",
            "apply `sweepgrad.grad` to the fused function, or `backward` to its result",
        )

    @property
    def requires_grad(self) -> bool:
        """Not known: the same kernel serves tensors that require a gradient and others."""
        self._outside("requires_grad")

    is_variable = requires_grad
    grad = requires_grad  # type: ignore[assignment]

    # fmt: off
    def __bool__(self) -> bool: self._unknown("bool")  # noqa: PLE0304
    def __float__(self) -> float: self._unknown("float")
    def __int__(self) -> int: self._unknown("int")
    def __index__(self) -> int: self._unknown("index")  # noqa: PLE0305
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any: self._unknown("__array__")
    def numpy(self) -> Any: self._unknown("numpy")  # noqa: D102
    def item(self) -> Any: self._unknown("item")  # noqa: D102
    def tolist(self) -> Any: self._unknown("tolist")  # noqa: D102
    def backward(self, *args: Any, **kwargs: Any) -> None: self._outside("backward")  # noqa: D102
    def requires_grad_(self, requires_grad: bool = True) -> Tensor: self._outside("requires_grad_")  # noqa: D102
    def register_hook(self, hook: Any) -> Any: self._outside("register_hook")  # noqa: D102
    def retain_grad(self) -> None: self._outside("retain_grad")  # noqa: D102
    def copy_(self, source: Any) -> Tensor: self._unknown("copy_")  # noqa: D102
    def __repr__(self) -> str: return f"<traced tensor of shape {self._shape}, {self._dtype}>"
    # fmt: on


def traced(trace: Trace, expr: Expr, shape: tuple[int, ...], axes: tuple[Label, ...], dtype: DType) -> Traced:
    """A traced tensor from its parts."""
    tensor: Traced = object.__new__(Traced)
    tensor._node = tensor._flat = tensor._array = tensor._grad = None
    tensor._handle = NOTHING
    tensor._shape, tensor._dtype = shape, dtype
    # What a program computes under `no_grad` is constant as far as derivatives go.
    tensor.trace, tensor.axes = trace, axes
    trace.walked.append(axes)
    tensor.expr = expr if mode.enabled or not expr.args else call("detached", expr)
    return tensor


# --- operations -----------------------------------------------------------------------------------------------------


def _deferred(op: Op, args: Sequence[Any], params: dict[str, Any]) -> Any:
    """What an operation on traced tensors and numbers gives."""
    if isinstance(op, Elementwise):
        return _elementwise(op, args)
    form = _FORMS.get(op.name)
    if (form is None and op.name not in REDUCTIONS) or op.name == "prod":
        raise refuse(op.name, "only elementwise operations, reductions and axes of length 1 can be")
    (x,) = args
    return _reduction(op.name, x, **params) if form is None else form(x, **params)


DEFERRED[Traced] = DEFERRED[Number] = _deferred


def _elementwise(op: Elementwise, args: Sequence[Any]) -> Any:
    tensors = [arg for arg in args if type(arg) is Traced]
    for arg in args:
        if isinstance(arg, (Tensor, np.ndarray)) and type(arg) is not Traced:
            raise refuse(
                op.name, "the function uses a tensor or an array that it was not passed", "make it an argument"
            )
    if not tensors:
        raise refuse(op.name, "it is applied to a number alone", "use the function of Python's `math`")
    trace = tensors[0].trace
    if op.name == "pow" and type(args[1]) is Number:
        args[1]._needed()  # some powers are computed in a way of their own
    dtype = common_dtype(op, [1.0 if type(arg) is Number else arg for arg in args])
    if dtype not in (trace.dtype, _BOOL):
        raise refuse(
            op.name,
            f"it computes in {dtype}, where the function's floats are {trace.dtype}",
            "convert with `astype` outside",
        )
    shape = broadcast_shape(op.name, [tensor._shape for tensor in tensors])
    operands = []
    for k, arg in enumerate(args):
        if op.condition and k == 0:
            operands.append(_condition(arg))
        elif type(arg) is Number:
            operands.append(trace.symbol(arg))
        elif type(arg) is not Traced:
            number = arg.item() if isinstance(arg, np.generic) else arg
            operands.append(const(number if dtype is _BOOL else float(number)))
        elif arg._dtype is _BOOL and dtype is not _BOOL:
            operands.append(call("where", arg.expr, 1.0, 0.0))
        else:
            operands.append(arg.expr)
    result = _BOOL if op.result == "bool" else dtype
    return traced(trace, call(op.name, *operands), shape, _met(trace, tensors, len(shape)), result)


def _condition(arg: Any) -> Expr:
    """A truth value, where `where` takes one: of anything else, whether it is not 0."""
    if type(arg) is Traced:
        return arg.expr if arg._dtype is _BOOL else call("not_equal", arg.expr, 0.0)
    return const(bool(arg))


def _met(trace: Trace, tensors: Sequence[Traced], ndim: int) -> tuple[Label, ...]:
    """The labels of the axes of a result to which `tensors` are broadcast."""
    axes: list[Label] = [None] * ndim
    for tensor in tensors:
        for k, label in enumerate(reversed(tensor.axes), 1):
            if label is None:
                continue
            own = axes[-k]
            if own is None:
                axes[-k] = label
            else:
                trace.unite(own, label)
    return tuple(axes)


def _reduction(kind: str, x: Traced, axes: tuple[int, ...], keepdims: bool, dtype: Any = None) -> Traced:
    over = [str(x.axes[k]) for k in axes if x.axes[k] is not None]
    if over:
        expr = reduce(kind, x.expr, ".".join(sorted(over)))
    else:
        expr = call("not_equal", x.expr, 0) if kind in ("any", "all") else x.expr
    kept = [k for k in range(x.ndim) if keepdims or k not in axes]
    shape = tuple(1 if k in axes else x._shape[k] for k in kept)
    labels = tuple(None if k in axes else x.axes[k] for k in kept)
    return traced(x.trace, expr, shape, labels, _BOOL if kind in ("any", "all") else x._dtype)


def _reshape(x: Traced, shape: tuple[int, ...]) -> Traced:
    if [length for length in x._shape if length != 1] != [length for length in shape if length != 1]:
        raise refuse(
            "reshape", f"from {x._shape} to {tuple(shape)} it is more than adding or removing axes of length 1"
        )
    labels = iter(label for label, length in zip(x.axes, x._shape, strict=True) if length != 1)
    axes = tuple(None if length == 1 else next(labels) for length in shape)
    return traced(x.trace, x.expr, tuple(shape), axes, x._dtype)


def _permute_dims(x: Traced, axes: Sequence[int]) -> Traced:
    return traced(x.trace, x.expr, tuple(x._shape[k] for k in axes), tuple(x.axes[k] for k in axes), x._dtype)


def _broadcast_to(x: Traced, shape: tuple[int, ...]) -> Traced:
    lead = len(shape) - len(x._shape)
    own = (None,) * lead + x.axes
    have = (1,) * lead + x._shape
    axes = tuple(
        label if length == full else x.trace.label(full) for label, length, full in zip(own, have, shape, strict=True)
    )
    return traced(x.trace, x.expr, tuple(shape), axes, x._dtype)


def _getitem(x: Traced, key: tuple[Any, ...], basic: bool) -> Traced:
    if not all(part is None or part is Ellipsis or part == slice(None) for part in key) or not basic:
        raise refuse("getitem", "of indices, only `:`, `...` and None can be")
    shape = np.broadcast_to(np.zeros(()), x._shape)[key].shape
    return _reshape(x, shape)


def _astype(x: Traced, dtype: DType) -> Traced:
    if dtype != x._dtype:
        raise refuse("astype", f"it converts {x._dtype} to {dtype}")
    return x


_FORMS: dict[str, Callable[..., Traced]] = {
    "reshape": _reshape,
    "permute_dims": _permute_dims,
    "broadcast_to": _broadcast_to,
    "getitem": _getitem,
    "astype": _astype,
}
