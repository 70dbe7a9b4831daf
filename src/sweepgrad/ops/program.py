"""Programs: a traced function on loop nests, forward and backward.

A program's expressions are over two axes, I and J (see `kernels.nest`): the labels of a trace, in the order in which
they lie in memory, cut in two. It runs as one nest, or as several where elements depend on a reduction over all rows.
It is the rule of the nodes that it makes; they save its inputs, and its derivative, which computes everything again,
is another program.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sweepgrad.anomaly import watched
from sweepgrad.arrays import as_number, contiguous, filled, together
from sweepgrad.dtypes import Array, DType
from sweepgrad.elements import dense, flat
from sweepgrad.grad_mode import mode
from sweepgrad.graph.node import Node, Rule
from sweepgrad.kernels.expr import Expr, call, const, is_const, reduce, reduction, symbol, symbols, topological
from sweepgrad.kernels.passes import AXES
from sweepgrad.ops.loop import Loop
from sweepgrad.ops.op import OPS, Elementwise, once, scaled
from sweepgrad.shortage import again
from sweepgrad.tensor import WATCHERS, Tensor, attach, make, record

_LENGTH = {"I": symbol("height"), "J": symbol("width")}

UNREAD = "u"
"""The kind of an input that the expressions do not read."""

_KINDS = {axes: kind for kind, axes in AXES.items()}


@dataclass(frozen=True)
class Place:
    """Where an input or an output lies: its shape and dtype, and how it lies in the program's space."""

    shape: tuple[int, ...]
    dtype: DType
    kind: str
    """As nests know it. One that has only some of the labels of I or J is repeated along the others, and so is v."""
    axes: tuple[int, ...]
    """For each axis longer than 1, its position in the space."""
    space: tuple[int, ...]
    """The lengths of the space's axes."""

    @once
    def natural(self) -> bool:
        """Whether its elements, in C order, are what a nest takes."""
        own = sum(length != 1 for length in self.space) if self.kind == "v" else len(self.axes)
        return list(self.axes) == sorted(self.axes) and len(self.axes) == own

    def load(self, array: Array) -> Any:
        """What a nest takes for the elements `array`, flat."""
        if self.kind == "s":
            return as_number(array)
        if self.natural:
            return array
        lengths = [1] * len(self.space)
        for axis in self.axes:
            lengths[axis] = self.space[axis]
        own = array.reshape([self.space[axis] for axis in self.axes]).transpose(np.argsort(self.axes)).reshape(lengths)
        return contiguous(np.broadcast_to(own, self.space) if self.kind == "v" else own)

    def store(self, array: Array) -> Array:
        """The elements, flat, of what a nest gave; summed over the axes along which `load` repeats."""
        if self.natural or self.kind == "s":
            return array
        if self.kind == "v":
            missing = tuple(k for k in range(len(self.space)) if k not in self.axes)
            array = _summed(array, self.space, missing)
        lengths = [self.space[axis] for axis in sorted(self.axes)]
        order = np.argsort(np.argsort(self.axes))
        return contiguous(array.reshape(lengths).transpose(order))  # type: ignore[no-any-return]


def _summed(array: Any, space: tuple[int, ...], axes: tuple[int, ...]) -> Any:
    """`array`, of the lengths `space`, summed over `axes`."""
    if type(array) is np.ndarray:
        return array.reshape(space).sum(axis=axes)
    whole = make(array, None, space, array.dtype, None)
    return dense(OPS["sum"].function(whole, axis=axes))


def place(shape: tuple[int, ...], dtype: DType, axes: tuple[int, ...], space: tuple[int, ...], cut: int) -> Place:
    """The place of a tensor whose axes longer than 1 are `axes` of a space whose first `cut` axes are I."""
    rows, columns = frozenset(range(cut)), frozenset(range(cut, len(space)))
    kinds = {columns: "r", rows: "c", rows | columns: "v", frozenset(): "s"}  # where some are the same, the last counts
    return Place(shape, dtype, kinds.get(frozenset(axes), "v"), axes, space)


class Program:
    """Expressions, and the places of what they read and give."""

    fresh = False  # a cotangent may be the one that came in

    def __init__(
        self,
        name: str,
        dtype: DType,
        inputs: Sequence[Place],
        numbers: int,
        outputs: Sequence[tuple[Expr, Place]],
        rows: int,
        n: int,
    ) -> None:
        """The expressions read the inputs as x0, x1, ... and the numbers as k0, k1, ..."""
        self.name = name
        self.dtype = dtype
        self.inputs = tuple(inputs)
        self.numbers = numbers
        self.outputs = tuple(outputs)
        self.rows = rows
        self.n = n
        self._derived: dict[tuple[tuple[int, ...], bool], Program] = {}

    def __repr__(self) -> str:
        return f"<Program {self.name}>"

    @once
    def slots(self) -> dict[str, tuple[str, str]]:
        """Kind and dtype of everything that the expressions read."""
        found = {f"x{k}": (one.kind, one.dtype.name) for k, one in enumerate(self.inputs) if one.kind != UNREAD}
        numbers = [f"k{k}" for k in range(self.numbers)]
        return found | dict.fromkeys((*numbers, "height", "width"), ("s", self.dtype.name))

    @once
    def stages(self) -> list[Stage]:
        """The nests, in the order in which they run."""
        return _stages(self)

    def run(self, arrays: Sequence[Array], numbers: Sequence[float]) -> list[Array]:
        """The outputs, flat, for inputs that are flat."""
        try:
            with together(self.name, arrays):
                return self._run(arrays, numbers)
        except MemoryError as error:
            return again(error, self.name, self._run, arrays, numbers)

    def _run(self, arrays: Sequence[Array], numbers: Sequence[float]) -> list[Array]:
        env: dict[str, Any] = {"height": float(self.rows), "width": float(self.n)}
        for k, (one, array) in enumerate(zip(self.inputs, arrays, strict=True)):
            if one.kind != UNREAD:
                env[f"x{k}"] = one.load(array)
        for k, number in enumerate(numbers):
            env[f"k{k}"] = number
        for stage in self.stages:
            inputs = [as_number(env[name]) if name in stage.numbers else env[name] for name in stage.reads]
            env.update(zip(stage.writes, stage.loop.over(inputs, self.n, rows=self.rows), strict=True))
        return [
            filled(math.prod(one.shape), 0, one.dtype, arrays[0]) if one.kind == UNREAD else one.store(env[f"o{k}"])
            for k, (_, one) in enumerate(self.outputs)
        ]

    def __call__(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> list[Tensor]:
        """The outputs; tracked if an input is: then one node for each, which saves the inputs."""
        arrays = tuple(map(flat, tensors))
        outs = self.run(arrays, numbers)
        results = [
            make(out, None, one.shape, one.dtype, None) for out, (_, one) in zip(outs, self.outputs, strict=True)
        ]
        rules: Sequence[Rule] = ()
        if WATCHERS:
            rules = [
                watched(rule, (*tensors, *numbers), result) for rule, result in zip(self.singles, results, strict=True)
            ]
        tracked = tuple([k for k, t in enumerate(tensors) if t._node is not None]) if mode.enabled else ()
        if tracked:
            links: Any = tuple([tensors[k]._node for k in tracked])
            saved = (arrays, tuple(numbers), tracked)
            nbytes = sum([array.nbytes for array in arrays])
            for rule, result in zip(rules or self.singles, results, strict=True):
                if result._dtype.kind == "f":
                    record(result, rule, saved, links if len(links) > 1 else links[0], nbytes)
        return results

    @once
    def singles(self) -> list[Program]:
        """A program for each output."""
        if len(self.outputs) == 1:
            return [self]
        return [
            Program(self.name, self.dtype, self.inputs, self.numbers, [output], self.rows, self.n)
            for output in self.outputs
        ]

    def derivative(self, wanted: tuple[int, ...], *, value: bool = False) -> Program:
        """The program of the only output's cotangents by the inputs `wanted`.

        It takes the output's cotangent as a further input; or, with `value`, none: the output has one element, whose
        cotangent is 1, and is the first output of this program as well.
        """
        key = (wanted, value)
        found = self._derived.get(key)
        if found is None:
            ((expr, of),) = self.outputs
            ct = const(1.0) if value else symbol(f"x{len(self.inputs)}")
            slots = {name: kind for name, (kind, _) in self.slots.items()}
            slots[f"x{len(self.inputs)}"] = of.kind
            cts = cotangents(expr, ct, [symbol(f"x{k}") for k in wanted], Space(slots))
            outputs = [(one, self.inputs[k]) for one, k in zip(cts, wanted, strict=True)]
            found = self._derived[key] = Program(
                self.name,
                self.dtype,
                self.inputs if value else [*self.inputs, of],
                self.numbers,
                [*self.outputs, *outputs] if value else outputs,
                self.rows,
                self.n,
            )
        return found

    # --- the rule of its nodes --------------------------------------------------------------------------------------

    def pullback(self, node: Node, saved: Any, ct: Array, /) -> tuple[Array, ...]:
        """Cotangents of the tracked inputs, all in one pass."""
        arrays, numbers, tracked = saved
        return tuple(self.derivative(tracked).run([*arrays, ct], numbers))

    def replay(self, node: Node, saved: Any, ct: Tensor, /) -> tuple[Tensor, ...]:
        """The same, tracked: a program for each input."""
        arrays, numbers, tracked = saved
        nodes = dict(zip(tracked, node.parents, strict=True))
        tensors = []
        for k, (array, one) in enumerate(zip(arrays, self.inputs, strict=True)):
            tensor = make(array, None, one.shape, one.dtype, None)
            tensors.append(attach(tensor, nodes[k]) if k in nodes else tensor)
        return tuple(self.derivative((k,))([*tensors, ct], numbers)[0] for k in tracked)


# --- expressions over I and J ---------------------------------------------------------------------------------------


class Space:
    """Knows on which axes an expression depends."""

    def __init__(self, kinds: dict[str, str]) -> None:
        """`kinds` of the symbols; others are numbers."""
        self._kinds = kinds
        self._axes: dict[Expr, frozenset[str]] = {}

    def axes(self, expr: Expr) -> frozenset[str]:
        """I, J, both or none."""
        found = self._axes.get(expr)
        if found is not None:
            return found
        for part in topological([expr]):
            if part not in self._axes:
                if part.op == "symbol":
                    own = frozenset(AXES[self._kinds.get(str(part.value), "s")])
                else:
                    own = frozenset[str]().union(*(self._axes[arg] for arg in part.args))
                    if part.op == "reduce":
                        own -= set(reduction(part)[1])
                self._axes[part] = own
        return self._axes[expr]

    def reduced(self, kind: str, expr: Expr, over: Iterable[str]) -> Expr:
        """`expr` reduced over axes on some of which it may not depend."""
        own = self.axes(expr)
        over = sorted(over)
        present = "".join(axis for axis in over if axis in own)
        result = reduce(kind, expr, present) if present else expr
        if not present and kind in ("any", "all"):
            result = call("not_equal", expr, 0)
        if kind == "sum":
            for axis in over:
                if axis not in own:
                    result = call("multiply", result, _LENGTH[axis])
        return result


def rebuilt(roots: Sequence[Expr], change: Callable[[Expr, tuple[Expr, ...]], Expr | None]) -> list[Expr]:
    """`roots` with every part replaced by what `change` makes of it and its new arguments; None keeps its operation."""
    new: dict[Expr, Expr] = {}
    for expr in topological(roots):
        args = tuple(new[arg] for arg in expr.args)
        changed = change(expr, args)
        if changed is None:
            if not args:
                changed = expr
            elif expr.op == "reduce":
                kind, over = reduction(expr)
                changed = reduce(kind, args[0], over)
            else:
                changed = call(expr.op, *args)
        new[expr] = changed
    return [new[root] for root in roots]


def substituted(expr: Expr, values: dict[str, Expr]) -> Expr:
    """`expr` with symbols replaced."""
    return rebuilt([expr], lambda part, _: values.get(str(part.value)) if part.op == "symbol" else None)[0]


def expanded(roots: Sequence[Expr]) -> list[Expr]:
    """`roots` with composite operations written out, as kernels need them."""

    def change(expr: Expr, args: tuple[Expr, ...]) -> Expr | None:
        row = OPS.get(expr.op)
        if not isinstance(row, Elementwise) or row.scalar is None:
            return None
        return substituted(row.forward, dict(zip(row.inputs, args, strict=True)))

    return rebuilt(roots, change)


def cotangents(output: Expr, ct: Expr, wanted: Sequence[Expr], space: Space) -> list[Expr]:
    """Reverse mode on an expression: the cotangents of the symbols `wanted` for the cotangent `ct` of `output`."""
    order = list(topological([output]))
    leads = set(wanted)
    for expr in order:
        if expr.op != "detached" and any(arg in leads for arg in expr.args):
            leads.add(expr)
    # The output may be whole although it depends on fewer axes, along which it was repeated.
    found: dict[Expr, Expr] = {output: space.reduced("sum", ct, space.axes(ct) - space.axes(output))}

    def push(arg: Expr, part: Expr, axes: frozenset[str]) -> None:
        if is_const(part, 0):
            return
        part = space.reduced("sum", part, axes - space.axes(arg))
        found[arg] = call("add", found[arg], part) if arg in found else part

    for expr in reversed(order):
        own = found.get(expr)
        if own is None or expr not in leads or not expr.args:
            continue
        if expr.op == "reduce":
            (arg,) = expr.args
            push(arg, _reduced_cotangent(expr, own, space), space.axes(arg))
            continue
        row = OPS[expr.op]
        assert isinstance(row, Elementwise)
        if not row.differentiable:
            continue
        values = dict(zip(row.inputs, expr.args, strict=True)) | {"y": expr}
        for arg, partial in zip(expr.args, row.replayed, strict=True):
            if arg in leads:
                push(arg, scaled(own, substituted(partial, values)), space.axes(expr))
    return [found.get(one, const(0.0)) for one in wanted]


def _reduced_cotangent(expr: Expr, ct: Expr, space: Space) -> Expr:
    """The cotangent of what was reduced; equal extreme elements share it."""
    kind, over = reduction(expr)
    (x,) = expr.args
    if kind == "sum":
        return ct
    if kind == "mean":
        for axis in over:
            ct = call("divide", ct, _LENGTH[axis])
        return ct
    if kind in ("any", "all"):
        return const(0.0)
    equal = call("equal", x, expr)
    count = space.reduced("sum", call("where", equal, 1.0, 0.0), over)
    return call("where", equal, call("divide", ct, count), 0.0)


# --- nests ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A nest of a program, and the names of what it reads and writes."""

    loop: Loop
    reads: tuple[str, ...]
    numbers: frozenset[str]
    """Those of them that an earlier nest wrote as an array of one element, and this one takes as a number."""
    writes: tuple[str, ...]


def _stages(program: Program) -> list[Stage]:
    """Cut a program where elements depend on a reduction over I, whose result is then an input of the next nest."""
    exprs = expanded([expr for expr, _ in program.outputs])
    kinds = {name: kind for name, (kind, _) in program.slots.items()}
    space = Space(kinds)
    level: dict[Expr, int] = {}
    for expr in topological(exprs):
        total = expr.op == "reduce" and "I" in reduction(expr)[1]
        level[expr] = max((level[arg] for arg in expr.args), default=0) + total
    due: dict[int, list[tuple[str, Expr, str, str]]] = {}  # by stage: name, expression, kind and dtype of an output
    for k, (expr, (_, one)) in enumerate(zip(exprs, program.outputs, strict=True)):
        if one.kind == UNREAD:
            continue
        stage = level[expr] if one.kind in "vc" else max(0, level[expr] - 1)
        due.setdefault(stage, []).append((f"o{k}", expr, one.kind, one.dtype.name))
    slots = dict(program.slots)
    names: dict[Expr, str] = {}
    stages = []
    for stage in range(max(due, default=-1), -1, -1):
        wanted = due.get(stage, [])

        def change(expr: Expr, args: tuple[Expr, ...], stage: int = stage) -> Expr | None:
            if expr.op != "reduce" or "I" not in reduction(expr)[1] or level[expr] > stage:
                return None
            if expr not in names:
                names[expr] = f"u{len(names)}"
                kind = _KINDS["".join(sorted(space.axes(expr)))]
                slots[names[expr]] = (kind, program.dtype.name)
                due.setdefault(level[expr] - 1, []).append((names[expr], expr, kind, program.dtype.name))
            return symbol(names[expr])

        cut = rebuilt([expr for _, expr, _, _ in wanted], change)
        if not cut:
            continue
        reads = tuple(sorted(symbols(cut) & slots.keys()))
        inputs = [(name, *slots[name]) for name in reads]
        loop = _loop(tuple(cut), tuple(inputs), program.dtype.name, tuple((k, d) for _, _, k, d in wanted))
        numbers = frozenset(name for name in reads if name.startswith("u") and slots[name][0] == "s")
        stages.append(Stage(loop, reads, numbers, tuple(name for name, _, _, _ in wanted)))
    return stages[::-1]


@functools.lru_cache(maxsize=1024)
def _loop(outputs: Any, inputs: Any, dtype: str, results: Any) -> Loop:
    return Loop(outputs, inputs, dtype, results)
