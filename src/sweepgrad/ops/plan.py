"""How an elementwise row runs on tensors: plans, and the functions that users call.

A plan is a row for one dtype, one kind of each input (see `kernels.emit`) and one set of tracked inputs. It holds the
forward kernel, knows what backward reads and so must be saved, and is the rule of the nodes it makes. Two paths lead
to a plan: the functions made by `unary` and `binary` take the common case, equal shapes or a Python number, in as few
steps as Python allows; `call` does everything else, and everything while a thread is within `detect_anomaly`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sweepgrad.anomaly import enter, watched
from sweepgrad.arrays import as_number, contiguous, filled, is_array
from sweepgrad.dtypes import CANONICAL, DTYPES, Array, DType, refused_dtype
from sweepgrad.elements import dense, flat
from sweepgrad.errors import DTypeError, ShapeError
from sweepgrad.grad_mode import mode
from sweepgrad.graph.node import Node
from sweepgrad.kernels.buffers import empty
from sweepgrad.kernels.expr import call as call_expr
from sweepgrad.kernels.expr import is_const, reduce, symbol, symbols
from sweepgrad.ops.loop import LARGE, Loop, kinds_of, run_strided
from sweepgrad.ops.op import DEFERRED, OPS, Elementwise, evaluate, reject, scaled
from sweepgrad.sharing import as_array, copied
from sweepgrad.shortage import again, attempt
from sweepgrad.tensor import WATCHERS, Tensor, attach, make, record, wrap

BOOL = DTYPES["bool"]
FLOAT64 = DTYPES["float64"]

_empty = np.empty


_CT = symbol("ct")
"""The incoming cotangent, in the expressions of backward kernels."""


# By count of values and positions picked: a lambda for each, since a general one takes four times as long.
_PICKERS: dict[tuple[int, tuple[int, ...]], Callable[..., tuple[Any, ...]]] = {
    (2, ()): lambda x, y: (),
    (2, (0,)): lambda x, y: (x,),
    (2, (1,)): lambda x, y: (y,),
    (2, (0, 1)): lambda x, y: (x, y),
    (3, ()): lambda x1, x2, y: (),
    (3, (0,)): lambda x1, x2, y: (x1,),
    (3, (1,)): lambda x1, x2, y: (x2,),
    (3, (2,)): lambda x1, x2, y: (y,),
    (3, (0, 1)): lambda x1, x2, y: (x1, x2),
    (3, (0, 2)): lambda x1, x2, y: (x1, y),
    (3, (1, 2)): lambda x1, x2, y: (x2, y),
    (3, (0, 1, 2)): lambda x1, x2, y: (x1, x2, y),
}


def _picker(positions: tuple[int, ...], count: int) -> Callable[..., tuple[Any, ...]]:
    """A function of `count` values that returns those at `positions` as a tuple."""
    return _PICKERS.get((count, positions)) or (lambda *values: tuple([values[k] for k in positions]))


class Plan:
    """A row, specialised; the rule of its nodes.

    What a node saves are the values that `saves` lists, by position among (inputs..., output), in the form in which
    the kernel takes them, and, where inputs were broadcast, the inputs' shapes.
    """

    __slots__ = (
        "computed", "dtype", "forward", "fresh", "grads", "kinds", "loops", "merged", "name", "op", "pick",
        "result", "saved_size", "saves", "small", "small_back", "tracked",
    )  # fmt: skip

    def __init__(
        self, op: Elementwise, dtype: DType, kinds: str, tracked: tuple[int, ...], *, merged: bool = False
    ) -> None:
        """`merged`: the inputs are one tensor, whose node is the only parent; it gets the sum of the cotangents."""
        self.op = op
        self.name = op.name
        self.dtype = dtype
        self.kinds = kinds
        self.tracked = tracked
        self.merged = merged
        self.result = BOOL if op.result == "bool" else dtype
        inputs = list(zip(op.inputs, kinds, self._input_dtypes(), strict=True))
        self.forward = Loop([op.forward], inputs, dtype.name, self.result.name)
        partials = [op.derivatives[k] for k in tracked]
        grads = [scaled(_CT, partial) for partial in partials]
        self.grads = [functools.reduce(operator.add, grads)] if merged else grads
        self.computed = [grad for grad in self.grads if grad is not _CT]
        read = symbols(partials)
        values = [*op.inputs, "y"]
        self.saves = tuple(k for k, name in enumerate(values) if name in read)
        self.pick = _picker(self.saves, len(values))
        self.saved_size = dtype.itemsize * sum(k == len(kinds) or kinds[k] != "s" for k in self.saves)
        # One or two, as nearly all have: more would need a kernel for each combination of sums.
        self.fresh = 0 < len(self.computed) == len(self.grads) <= 2
        self.loops: dict[int, Loop] = {}  # for backward, by the outputs that are added to: bit k for output k
        self.small: Any = None  # the kernels for few elements, once they are compiled: forward, and backward by loop
        self.small_back: dict[int, Any] = {}

    def _input_dtypes(self) -> list[str]:
        names = [self.dtype.name] * self.op.arity
        if self.op.condition:
            names[0] = "bool"
        return names

    def _backward_loop(self, added: int = 0) -> Loop:
        loop = self.loops.get(added)
        if loop is None:
            whole = "x" if "x" in self.kinds else "v"
            names, kinds = [*self.op.inputs, "y"], [*self.kinds, whole]
            dtypes = [*self._input_dtypes(), self.dtype.name]
            inputs = [("ct", whole, self.dtype.name)] + [(names[k], kinds[k], dtypes[k]) for k in self.saves]
            outputs = [
                call_expr("add", symbol(f"o{k}"), grad) if added >> k & 1 else grad
                for k, grad in enumerate(self.computed)
            ]
            results = [(kind, self.dtype.name) for kind in self._result_kinds()]
            loop = self.loops[added] = Loop(outputs, inputs, self.dtype.name, results)
        return loop

    def _result_kinds(self) -> str:
        """The kinds of what backward kernels compute."""
        return "v" * len(self.computed)

    def pullback(self, node: Node, saved: tuple[Any, ...], ct: Array, /) -> tuple[Array, ...]:
        """Cotangents of the tracked inputs, all in one kernel; every input has the result's shape or is a number."""
        try:
            if not self.computed:
                return (ct,) * len(self.grads)
            return self._arranged(self._backward_loop().run(ct.size, ct, *saved), ct)
        except MemoryError as error:
            return again(error, self.name, self.pullback, node, saved, ct)

    def pullback_onto(
        self, node: Node, saved: tuple[Any, ...], ct: Array, sums: list[Array | None], /
    ) -> tuple[Array, ...]:
        """The same, added to `sums` where there are any.

        All memory is asked for before the kernel runs: what raises MemoryError has added nothing yet.
        """
        try:
            size = ct.size
            one = sums[0]
            if len(sums) == 1:
                added = 0 if one is None else 1
                kernel = self.small_back.get(added)
                if kernel is None or size >= LARGE:
                    return self._pull(added, size, ct, saved, sums)
                if one is None:
                    one = _empty(size, self.dtype)
                outs = (one,)
                kernel(ct, *saved, one)
                return outs
            two = sums[1]
            added = (one is not None) + 2 * (two is not None)
            kernel = self.small_back.get(added)
            if kernel is None or size >= LARGE:
                return self._pull(added, size, ct, saved, sums)
            if one is None:
                one = _empty(size, self.dtype)
            if two is None:
                two = _empty(size, self.dtype)
            both = one, two
            kernel(ct, *saved, one, two)
            return both
        except MemoryError as error:
            return again(error, self.name, self.pullback_onto, node, saved, ct, sums)

    def _pull(
        self, added: int, size: int, ct: Array, saved: tuple[Any, ...], sums: list[Array | None]
    ) -> tuple[Array, ...]:
        loop = self._backward_loop(added)
        if size < LARGE:
            self.small_back[added] = loop.kernel()
        if not added:
            return tuple(loop.over((ct, *saved), size))
        outs = tuple([empty(size, self.dtype) if one is None else one for one in sums])
        loop.over((ct, *saved), size, outs=outs)
        return outs

    def _arranged(self, outs: Sequence[Array], ct: Array) -> tuple[Array, ...]:
        """The kernel's outputs, and the incoming cotangent where that is an input's whole share."""
        results = iter(outs)
        return tuple([ct if grad is _CT else next(results) for grad in self.grads])

    def replay(self, node: Node, saved: tuple[Any, ...], ct: Tensor, /) -> tuple[Tensor, ...]:
        """The same from tracked tensors, by the operations that the partial derivatives are made of."""
        shapes = [node.shape] * (self.op.arity + 1)
        return attempt(self.name, self._replay, node, saved, ct, shapes)

    def _replay(
        self, node: Node, saved: Sequence[Any], ct: Tensor, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Tensor, ...]:
        nodes = dict(zip(self.tracked, node.parents * 2 if self.merged else node.parents, strict=True))
        nodes[self.op.arity] = node
        values: dict[str, Any] = {"ct": ct}
        names, dtypes = [*self.op.inputs, "y"], [*self._input_dtypes(), self.dtype.name]
        for k, value in zip(self.saves, saved, strict=True):
            if not is_array(value) and k not in nodes:
                values[names[k]] = value
                continue
            array = value if is_array(value) else np.full(1, value, self.dtype)
            tensor = _view(array, shapes[k], DTYPES[dtypes[k]])
            values[names[k]] = attach(tensor, nodes[k]) if k in nodes else tensor
        parts = [scaled(_CT, self.op.replayed[k]) for k in self.tracked]
        if self.merged:
            parts = [functools.reduce(operator.add, parts)]
        there = dense(ct)
        grads = evaluate(parts, values, lambda one: wrap(filled(1, one, self.dtype, there).reshape(())))
        zero = make(filled(math.prod(node.shape), 0, self.dtype, there), None, node.shape, self.dtype, None)
        return tuple(grad if isinstance(grad, Tensor) else zero for grad in grads)


_SUMMED = {"r": "I", "c": "J", "s": "IJ"}
"""The axes along which an input of a kind was repeated."""


class BroadcastPlan(Plan):
    """A plan whose inputs have other shapes than the result: cotangents are summed over what was broadcast."""

    __slots__ = ()

    def __init__(self, op: Elementwise, dtype: DType, kinds: str, tracked: tuple[int, ...]) -> None:
        super().__init__(op, dtype, kinds, tracked)
        self.fresh = False
        if "x" not in kinds:
            pairs = [(grad, kinds[k]) for grad, k in zip(self.grads, tracked, strict=True)]
            self.grads = [
                reduce("sum", grad, _SUMMED[kind]) if kind != "v" and not is_const(grad) else grad
                for grad, kind in pairs
            ]
            self.computed = [grad for grad in self.grads if grad is not _CT]

    def _result_kinds(self) -> str:
        if "x" in self.kinds:
            return super()._result_kinds()
        kinds = [self.kinds[k] for grad, k in zip(self.grads, self.tracked, strict=True) if grad is not _CT]
        return "".join(kinds)

    def pullback(self, node: Node, saved: tuple[Any, ...], ct: Array, /) -> tuple[Array, ...]:
        """Cotangents of the tracked inputs: in the kernel summed to their shapes, or, of strided ones, afterwards."""
        try:
            return self._summed(node, saved, ct)
        except MemoryError as error:
            return again(error, self.name, self._summed, node, saved, ct)

    def _summed(self, node: Node, saved: tuple[Any, ...], ct: Array) -> tuple[Array, ...]:
        *values, row, shapes = saved
        shape, size = node.shape, ct.size
        if not size:
            return tuple([filled(math.prod(shapes[k]), 0, self.dtype, ct) for k in self.tracked])
        outs: Sequence[Array] = ()
        if "x" not in self.kinds:
            if self.computed:
                outs = self._backward_loop().run(size, ct, *values, row=row)
            return self._arranged(outs, ct)
        if self.computed:
            outs = run_strided(self._backward_loop(), [ct.reshape(shape), *values], shape)
        cts = [make(one, None, shape, self.dtype, None) for one in self._arranged(outs, ct)]
        return tuple([flat(unbroadcast(one, shapes[k])) for one, k in zip(cts, self.tracked, strict=True)])

    def replay(self, node: Node, saved: tuple[Any, ...], ct: Tensor, /) -> tuple[Tensor, ...]:
        """The same from tracked tensors."""
        *values, _, shapes = saved
        grads = attempt(self.name, self._replay, node, values, ct, [*shapes, node.shape])
        return tuple(unbroadcast(grad, shapes[k]) for grad, k in zip(grads, self.tracked, strict=True))


def unbroadcast(ct: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`ct` summed over the axes along which an input of `shape` was repeated."""
    if ct._shape == shape:
        return ct
    lead = len(ct._shape) - len(shape)
    inner = [lead + k for k, length in enumerate(shape) if length == 1 != ct._shape[lead + k]]
    summed = OPS["sum"].function(ct, axis=(*range(lead), *inner), keepdims=bool(inner))
    return summed if summed._shape == shape else OPS["reshape"].function(summed, shape)  # type: ignore[no-any-return]


def _view(array: Array, shape: tuple[int, ...], dtype: DType) -> Tensor:
    """A plain tensor of `shape` around an array that a node saved: flat, or strided with the right shape already."""
    if array.ndim == 1 and array.flags.c_contiguous:
        return make(array, None, shape, dtype, None)
    return make(None, array, shape, dtype, None)


# --- the general call -----------------------------------------------------------------------------------------------


def call(op: Elementwise, args: Sequence[Any]) -> Any:
    """`op` on any mixture of tensors, arrays and numbers: promotes, broadcasts, computes, records."""
    try:
        return _called(op, args)
    except MemoryError as error:
        return again(error, op.name, _called, op, args)


def _called(op: Elementwise, args: Sequence[Any]) -> Any:
    for arg in args:
        if type(arg) in DEFERRED:
            return DEFERRED[type(arg)](op, args, {})
    return computed(op, [as_operand(op.name, arg) for arg in args])


def computed(op: Elementwise, values: list[Any], plan_kind: type[Plan] = Plan) -> Tensor:
    """`op` on tensors, all on one device, and Python numbers."""
    if op.result == "bool":
        values = _comparable(values)
    dtype = common_dtype(op, values)
    values = [_converted(op.name, value, BOOL if op.condition and k == 0 else dtype) for k, value in enumerate(values)]
    if not any([isinstance(value, Tensor) for value in values]):  # noqa: C419  # a generator takes longer
        values[0] = wrap(np.asarray(values[0], BOOL if op.condition else dtype))
    if op.whole and dtype.kind in "iu":
        return values[0]  # type: ignore[no-any-return]
    shape, size, kinds, row, plain = _layout(op.name, values)
    tracked: tuple[int, ...] = ()
    if op.differentiable and mode.enabled:
        tracked = tuple([k for k, v in enumerate(values) if isinstance(v, Tensor) and v._node is not None])
        if op.condition and tracked[:1] == (0,):
            tracked = tracked[1:]
    merged = plain and op.arity == len(tracked) == 2 and values[0]._node is values[1]._node
    plan = plan_for(op, dtype, kinds, tracked, plain=plain, merged=merged, kind=plan_kind)
    parts = [_part(value, kind) for value, kind in zip(values, kinds, strict=True)]
    if not size:
        out = contiguous(dense(next(v for v in values if isinstance(v, Tensor))))[:0].astype(plan.result)
    elif "x" in kinds:
        (out,) = run_strided(plan.forward, parts, shape)
    else:
        (out,) = plan.forward.run(size, *parts, row=row)
    result = make(out, None, shape, plan.result, None)
    rule = watched(plan, values, result, elementwise=True) if WATCHERS else plan
    if not tracked:
        return result
    saved = plan.pick(*parts, out if "x" not in kinds else out.reshape(shape))
    nbytes = sum([value.nbytes for value in saved if is_array(value)])
    if not plain:
        saved = (*saved, row, tuple([v._shape if isinstance(v, Tensor) else () for v in values]))
    links = tuple([values[k]._node for k in (tracked[:1] if merged else tracked)])
    return record(result, rule, saved, links if len(links) > 1 else links[0], nbytes)


_Layout = tuple[tuple[int, ...], int, str, int, bool]

_layouts: dict[tuple[tuple[tuple[int, ...], bool] | None, ...], _Layout] = {}
"""Layouts found so far: to find one takes ten times as long as a small kernel."""

_MOST_LAYOUTS = 4096


def _layout(op: str, values: Sequence[Any]) -> _Layout:
    """The result's shape and size, the inputs' kinds, the length of a row, and whether nothing is broadcast."""
    key = tuple([(v._shape, v._flat is None) if isinstance(v, Tensor) else None for v in values])
    found = _layouts.get(key)
    if found is None:
        shape = broadcast_shape(op, [part[0] for part in key if part is not None])
        kinds, row = kinds_of(values, shape)
        plain = all(
            kind == "s" if part is None else kind == "v" and part[0] == shape
            for part, kind in zip(key, kinds, strict=True)
        )
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        found = _layouts[key] = shape, math.prod(shape), kinds, row, plain
    return found


def plan_for(
    op: Elementwise,
    dtype: DType,
    kinds: str,
    tracked: tuple[int, ...],
    *,
    plain: bool,
    merged: bool = False,
    kind: type[Plan] = Plan,
    table: dict[DType, Plan] | None = None,
) -> Plan:
    """The plan for these kinds, made when first asked for; `plain` if nothing is broadcast.

    With `table`, the plan is also entered there by its dtype, with its small kernel compiled, for the short way.
    """
    key = (dtype, kinds, tracked, plain, merged, kind)
    plan: Plan | None = op.plans.get(key)
    if plan is None:
        plan = kind(op, dtype, kinds, tracked, merged=merged) if plain else BroadcastPlan(op, dtype, kinds, tracked)
        op.plans[key] = plan
    if table is not None:
        plan.small = plan.forward.kernel()
        enter(table, dtype, plan)
    return plan


def _part(value: Any, kind: str) -> Any:
    """What the kernel is handed for one input."""
    if not isinstance(value, Tensor):
        return value
    if kind == "x":
        return dense(value)
    if kind == "s":
        return as_number(dense(value))
    return value._flat


def as_operand(op: str, value: Any) -> Any:
    """`value` as a tensor or a Python number."""
    if isinstance(value, (Tensor, bool, int, float)) and not isinstance(value, np.generic):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return from_array(op, as_array(op, value))
    raise reject(op, value)


def from_array(op: str, array: Array) -> Tensor:
    """A plain tensor with a copy of `array`, whose owner may go on writing to it."""
    dtype = array.dtype.newbyteorder("=")
    if dtype not in CANONICAL:
        raise refused_dtype(op, array.dtype)
    return wrap(copied(op, array, CANONICAL[dtype]))


def common_dtype(op: Elementwise, values: Sequence[Any]) -> DType:
    """The dtype in which `op` computes: NumPy 2's promotion, where Python numbers are weak."""
    if op.condition:
        values = values[1:]
    found = [value._dtype if isinstance(value, Tensor) else value for value in values]
    first = found[0]
    alike = isinstance(first, np.dtype) and all([other is first for other in found])  # noqa: C419  # as in most calls
    dtype = first if alike else np.result_type(*found)
    if op.accepts == "bits":
        if dtype.kind == "f":
            raise DTypeError(f"`{op.name}` takes truth values and integers; found {_dtypes(values)}")
        return dtype
    if dtype.kind == "b" and op.accepts == "numeric":
        if op.result == "float":
            return FLOAT64
        raise DTypeError(
            f"`{op.name}` takes numbers; found {_dtypes(values)}: use logical_and, logical_or, or astype first"
        )
    if op.result == "float" and dtype.kind != "f":
        return FLOAT64
    return CANONICAL[dtype]


def _comparable(values: list[Any]) -> list[Any]:
    """Python integers that the tensors' dtype cannot hold become infinite, which compares the same."""
    dtypes = [value._dtype for value in values if isinstance(value, Tensor)]
    if not dtypes or (dtype := np.result_type(*dtypes)).kind not in "iu":
        return values
    bounds = np.iinfo(dtype)
    return [
        value if not isinstance(value, int) or bounds.min <= value <= bounds.max else math.copysign(math.inf, value)
        for value in values
    ]


def _dtypes(values: Sequence[Any]) -> str:
    return " and ".join(str(v._dtype) if isinstance(v, Tensor) else type(v).__name__ for v in values)


def _converted(op: str, value: Any, dtype: DType) -> Any:
    if isinstance(value, Tensor):
        return value if value._dtype is dtype else OPS["astype"].function(value, dtype)
    if dtype.kind in "iub":
        try:
            return dtype.type(value).item()
        except OverflowError:
            raise DTypeError(f"`{op}`: the Python integer {value} does not fit into {dtype}") from None
    return float(value)


def broadcast_shape(op: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape to which all `shapes` broadcast."""
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    try:
        return attempt(op, np.broadcast_shapes, *shapes)
    except ValueError:
        raise ShapeError(
            f"`{op}` cannot broadcast shapes {' and '.join(map(str, shapes))}: aligned at the last axis, lengths must "
            "be equal or 1"
        ) from None
