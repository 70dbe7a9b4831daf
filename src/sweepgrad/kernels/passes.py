"""Puts the expressions of a loop nest (see `kernels.nest`) in order: what is computed where, and what is kept."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from sweepgrad.kernels.emit import Slot
from sweepgrad.kernels.expr import Expr, reduction, topological
from sweepgrad.kernels.scalars import CHEAP, CPU, CPU_BEYOND, CPU_INTEGER, REDUCTIONS, Reduction

BLOCK = 1024
"""Elements of a loop that accumulates, and of a row of flat data: slices cost little, rounding errors stay small."""

_CHEAP_ENOUGH = 3
"""Cheap operations that take no longer than to write a value to the nearest cache and read it again."""

_COSTLY = 10
"""Cheap operations in the time of one that is not."""

AXES = {"v": "IJ", "r": "J", "c": "I", "s": ""}


@dataclass
class Total:
    """A reduction over I or IJ, and the name of its partial results."""

    expr: Expr
    rule: Reduction
    row: bool
    name: str


@dataclass
class Pass:
    """What one walk along J does."""

    sums: list[Expr] = field(default_factory=list)  # reductions over J
    totals: list[Total] = field(default_factory=list)
    stores: list[tuple[Expr, Slot]] = field(default_factory=list)
    keeps: list[Expr] = field(default_factory=list)  # values to be put into working memory
    staged: dict[Expr, str] = field(default_factory=dict)  # values that a second loop accumulates, and where they wait

    def roots(self) -> list[Expr]:
        """What the walk has to compute."""
        reduced = [*self.sums, *(total.expr for total in self.totals)]
        return [*(expr.args[0] for expr in reduced), *(expr for expr, _ in self.stores), *self.keeps]


class Regions:
    """Where in a nest each expression is computed: `before` any row, in each `row`, or `after` all rows.

    Each region walks along J as often as reductions over J depend on each other.
    """

    def __init__(self, outputs: Sequence[tuple[Expr, Slot]], inputs: Sequence[Slot], dtype: str) -> None:
        self.outputs, self.inputs, self.dtype = outputs, inputs, dtype
        self.order = list(topological([expr for expr, _ in outputs]))
        self.axes: dict[Expr, str] = {}
        self.depth: dict[Expr, int] = {}
        """Walks along J that have to come before, within the expression's region."""
        self.region: dict[Expr, str] = {}
        self.slots = {slot.name: slot for slot in (*inputs, *(slot for _, slot in outputs))}
        kinds = {slot.name: slot.kind for slot in self.slots.values()}
        for expr in self.order:
            self._analyse(expr, kinds)
        self.walks = 1 + max(self.depth.values())

    def start(self, rule: Reduction) -> str:
        """An accumulator's text before the first element."""
        bounds = {"LOWEST": ("-np.inf", "min"), "HIGHEST": ("np.inf", "max")}
        if rule.start not in bounds:
            return rule.start
        real, whole = bounds[rule.start]
        return f"T({real if self.dtype.startswith('float') else getattr(np.iinfo(self.dtype), whole)})"

    def _analyse(self, expr: Expr, kinds: dict[str, str]) -> None:
        axes = {axis for arg in expr.args for axis in self.axes[arg]}
        late = any(self.region[arg] == "after" for arg in expr.args)
        over = ""
        if expr.op == "symbol":
            axes = set(AXES[kinds.get(str(expr.value), "s")])
        elif expr.op == "reduce":
            over = reduction(expr)[1]
            assert set(over) <= axes, f"{expr} reduces an axis on which its argument does not depend"
            axes -= set(over)
        late = late or "I" in over
        assert not (late and "I" in axes), f"{expr} needs all rows before the first"
        self.axes[expr] = "".join(sorted(axes))
        self.region[expr] = "after" if late else "row" if "I" in axes else "before"
        same = [self.depth[arg] for arg in expr.args if self.region[arg] == self.region[expr]]
        self.depth[expr] = max(same, default=0) + (over == "J")


class Passes(Regions):
    """What each walk along J computes, reduces, stores and keeps."""

    def __init__(
        self,
        outputs: Sequence[tuple[Expr, Slot]],
        inputs: Sequence[Slot],
        dtype: str,
        chunked: bool,
        columns: int | None,
        short: bool,
        streamed: bool,
    ) -> None:
        super().__init__(outputs, inputs, dtype)
        self.chunked = chunked
        self.templates = CPU_INTEGER if "int" in dtype else CPU
        self.everywhere = self.templates | CPU_BEYOND  # outside of loops that are to be vectorised
        self.flat = {slot.kind for slot in self.slots.values()} <= {"v", "s"} and all(
            reduction(expr)[1] == "IJ" for expr in self.order if expr.op == "reduce"
        )
        self.sums: dict[Expr, str] = {}
        self.columns = None if self.flat else columns
        self.short = short or self.columns is not None
        self.totals: list[Total] = []
        self.work: dict[Expr, str] = {}
        self.passes = {region: [Pass() for _ in range(self.walks)] for region in ("before", "row", "after")}
        streams = [slot.name for _, slot in outputs if streamed and slot.kind == "v" and slot.dtype == dtype != "bool"]
        self.streams = {name: f"s{k}" for k, name in enumerate(streams)}
        self._plan()
        self._keep()
        self.blocks: set[str] = set(self.streams.values())
        for one in itertools.chain(*self.passes.values()):
            self._stage(one)

    def _plan(self) -> None:
        """Put every reduction and output where it belongs."""
        for expr in self.order:
            if expr.op != "reduce":
                continue
            kind, over = reduction(expr)
            arg = expr.args[0]
            if over == "J":
                self.passes[self.region[expr]][self.depth[expr] - 1].sums.append(expr)
                self.sums[expr] = f"a{len(self.sums)}"
                continue
            total = Total(expr, REDUCTIONS[kind], "J" in self.axes[expr], f"p{len(self.totals)}")
            self.totals.append(total)
            if "J" in self.axes[arg]:
                self.passes["row"][self.depth[arg]].totals.append(total)
        for expr, slot in self.outputs:
            if "J" in AXES[slot.kind]:
                own = self.depth[expr] if self.region[expr] == ("row" if slot.kind == "v" else "after") else 0
                self.passes["row" if slot.kind == "v" else "after"][own].stores.append((expr, slot))

    def _keep(self) -> None:
        """Choose what is put into working memory: what is needed again, by a pass or by every row, and costs more."""
        costs = self._costs()
        first: dict[Expr, int] = {}  # the pass that computes a value first
        for number, one in enumerate(self.passes["row"]):
            stack, done = one.roots(), set(self.work)
            while stack:
                expr = stack.pop()
                if expr in done or "J" not in self.axes[expr]:
                    continue
                done.add(expr)
                by_all = self.axes[expr] == "J" and costs[expr] >= _COSTLY
                if by_all or (costs[expr] > _CHEAP_ENOUGH and first.get(expr, number) < number):
                    self.work[expr] = f"w{len(self.work)}"
                    where = self.passes["before"][self.depth[expr]] if by_all else self.passes["row"][first[expr]]
                    where.keeps.append(expr)
                    continue
                first.setdefault(expr, number)
                if expr.op != "reduce":
                    stack.extend(expr.args)

    def _costs(self) -> dict[Expr, int]:
        """What it takes to compute each value of a row again, in cheap operations."""
        costs: dict[Expr, int] = {}
        for expr in self.order:
            own = 0 if not expr.args or expr.op == "reduce" or "J" not in self.axes[expr] else 1
            if own and expr.op not in CHEAP:
                own = _COSTLY
            costs[expr] = own + (sum(costs[arg] for arg in expr.args) if own else 0)
        return costs

    def _stage(self, one: Pass) -> None:
        """Choose what is accumulated in a second loop over the same stretch.

        A loop goes over as many elements at once as the widest type in it allows: functions of float32 take twice
        as long beside an accumulator of float64.
        """
        known = self._known(one)
        wide = [
            expr.args[0]
            for expr in (*one.sums, *(total.expr for total in one.totals))
            if REDUCTIONS[reduction(expr)[0]].accumulator == "A"
        ]
        computed = [expr for expr in self._inner(one.roots(), known) if expr not in known]
        if self.dtype != "float32" or not wide or all(map(self._cheap, computed)):
            return
        for arg in wide:
            if arg in known or not arg.args:
                one.staged[arg] = ""  # can be read again
            elif arg not in one.staged:
                one.staged[arg] = f"b{sum(map(bool, one.staged.values()))}"
        self.blocks |= set(filter(None, one.staged.values()))

    def _known(self, one: Pass) -> set[Expr]:
        """Values that a pass finds in working memory."""
        return {expr for expr in self.work if expr not in one.keeps}

    def _cheap(self, expr: Expr) -> bool:
        return not expr.args or expr.op in CHEAP or expr.op == "reduce"

    def _inner(self, roots: Iterable[Expr], known: set[Expr]) -> Iterator[Expr]:
        """What a loop over J computes for `roots`: nothing below a reduction, nor below what is `known`."""
        done: set[Expr] = set()
        stack = list(roots)
        while stack:
            expr = stack.pop()
            if expr in done or "J" not in self.axes[expr]:
                continue
            done.add(expr)
            yield expr
            if expr not in known and expr.op != "reduce":
                stack.extend(expr.args)
