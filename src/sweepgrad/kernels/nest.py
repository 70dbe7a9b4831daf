"""Writes the source of a loop nest, elementwise work and reductions together, from expressions. Text in, text out.

A nest has two axes: I counts rows and J the elements of a row. Each input and output has a *kind*, which says how the
nest walks it, and with it on which axes it depends:

    v  every element, contiguous (I and J)      s  one number (neither)
    r  one row, the same for all I (J)          c  one number for each row (I)

Expressions may contain `reduce` over J (one number for each row), I (one row) or IJ (one number). What depends on a
reduction over J comes in a further *pass* over the same row, while it is in the nearest cache; a costly value that a
later pass needs is kept in a row of working memory. What does not depend on I is computed before the first row. What
depends on a reduction over I or IJ must not depend on I again: it is computed after the last row. Where all inputs and
outputs are v or s and nothing is reduced over I or J alone, the data is *flat*, and rows are stretches of it.

Rows are taken in chunks. A chunk has partial results of its own for every reduction over I or IJ, which are combined
pairwise when all are there, so results depend on the number of rows in a chunk, never on which worker took it.
Numbers are added up in lanes within at most `BLOCK` elements, these sums one after the other within a row and a chunk.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sweepgrad.kernels.emit import Slot, beyond, header, limited
from sweepgrad.kernels.expr import Expr, reduction, symbol
from sweepgrad.kernels.passes import BLOCK, Pass, Passes, Total
from sweepgrad.kernels.scalars import LIMITED, REDUCTIONS, Reduction
from sweepgrad.kernels.text import Text


@dataclass(frozen=True)
class Nest:
    """A kernel's source, its arguments' types, and what a call has to allocate.

    Arguments: the inputs; `groups`, `rows`, `n`; if chunked, `step`, which is the rows in a chunk, and `task` (see
    `kernels.workers`); one array of partial results for each of `partials`; working memory, a row for each worker; the
    outputs.
    """

    source: str
    signature: tuple[str, ...]
    flat: bool
    partials: tuple[tuple[str, bool], ...]
    """For each: dtype, and whether it is a row rather than a number."""
    work: int
    """How many arrays of working memory there are with rows as long as J."""
    blocks: int
    """And with rows of `BLOCK` elements."""
    dtype: str
    """Of the working memory."""


def nest(
    outputs: Sequence[tuple[Expr, Slot]],
    inputs: Sequence[Slot],
    dtype: str,
    *,
    chunked: bool,
    columns: int | None = None,
    short: bool = False,
    streamed: bool = False,
) -> Nest:
    """The kernel that computes `outputs` in `dtype`.

    `columns` is the length of J where that is compiled in; `short` promises that it is at most `BLOCK`; `streamed`
    writes whole outputs past the caches, which would not hold them until they are used: so memory is not read first.
    """
    writer = _Writer(outputs, inputs, dtype, chunked, columns, short, streamed)
    wide = "float64" if dtype == "float32" else dtype
    source = header(dtype, wide) + writer.write()
    layouts = {"v": ":1C", "r": ":1C", "c": ":1C", "s": ""}
    signature = [slot.dtype + layouts[slot.kind] for slot in inputs] + ["int64"] * 3
    if chunked:
        signature += ["int64", "int64:1C"]
    partials = []
    for total in writer.totals:
        if not chunked and not total.row:
            continue
        accumulator = {"A": wide, "T": dtype}.get(total.rule.accumulator, total.rule.accumulator)
        partials.append((accumulator, total.row))
        signature.append(f"{accumulator}:{2 if total.row else 1}C")
    signature += [f"{dtype}:2C"] * (len(writer.work) + len(writer.blocks))
    signature += [slot.dtype + ":1C" for _, slot in outputs]
    return Nest(source, tuple(signature), writer.flat, tuple(partials), len(writer.work), len(writer.blocks), dtype)


class _Writer(Passes, Text):
    """Writes the text of what `Passes` has put in order."""

    def write(self) -> str:
        """The whole function."""
        self.begin()
        names = [slot.name for slot in self.inputs] + ["groups", "rows", "n"]
        names += ["step", "task"] if self.chunked else []
        memory = [*self.work.values(), *sorted(self.blocks)]
        names += [total.name for total in self.totals if self.chunked or total.row] + [f"{name}_all" for name in memory]
        with self.block(f"def kernel({', '.join([*names, *(slot.name for _, slot in self.outputs)])}):"):
            if self.columns is not None:
                self.put(f"n = {self.columns}")
            if memory:
                self.put(f"worker = {'p.take(task, 2)' if self.chunked else '0'}")
                for name in memory:
                    self.put(f"{name} = {name}_all[worker]")
            texts: dict[Expr, str] = {}
            self._region("before", texts, "")
            if self.chunked:
                self._chunks(texts)
                self.put("p.take(task, 3)")
            elif self._ends():
                with self.block("for g in range(groups):"):
                    self._begin("g")
                    self._rows("g * rows", "(g + 1) * rows", texts)
                    self._end(texts)
            else:
                self._rows("0", "groups * rows", texts)
        return self.written()

    def _ends(self) -> bool:
        """Whether there is anything to do after all rows of a group."""
        return bool(self.totals) or any(slot.kind in "rs" for _, slot in self.outputs)

    def _chunks(self, before: dict[Expr, str]) -> None:
        """Take chunks as long as there are any; the worker that finishes the last one does what comes at the end."""
        self.put("per = max(1, (rows + step - 1) // step)")
        self.put("finished = False")
        with self.block("while True:"):
            self.put("c = p.take(task, 0)")
            with self.block("if c >= groups * per:"):
                self.put("break")
            self.put("first = c // per * rows + c % per * step")
            self._begin("c")
            self._rows("first", "min(first + step, (c // per + 1) * rows)", before)
            for total in self.totals:
                if not total.row:
                    self.put(f"{total.name}[c] = {total.name}_sum")
            with self.block("if p.take(task, 1) == groups * per - 1:"):
                self.put("finished = True")
        with self.block("if not finished:"):
            self.put("return")
        if self._ends():
            with self.block("for g in range(groups):"):
                for total in self.totals:
                    self._combine(total)
                self._end(before)

    def _begin(self, index: str) -> None:
        """Partial results as they are before the first row."""
        for total in self.totals:
            if total.row:
                self.put(f"{total.name}_all = {total.name}[{index}]")
                with self.block("for j in range(n):"):
                    self.put(f"{total.name}_all[j] = {self.start(total.rule)}")
            else:
                self.put(f"{total.name}_sum = {self.start(total.rule)}")

    def _rows(self, first: str, last: str, before: dict[Expr, str]) -> None:
        if self.chunked and self._adds_rows_alone():
            self._four_rows(first, last, before)
            first = "odd"
        with self.block(f"for i in range({first}, {last}):"):
            texts, empty = dict(before), len(self.lines)
            for slot in self.inputs:
                if slot.kind == "c":
                    self.put(f"{slot.name}_i = {slot.name}[i]")
                    texts[symbol(slot.name)] = self.read(slot, f"{slot.name}_i")
            self._region("row", texts, f"i * {BLOCK if self.flat else 'n'}")
            if len(self.lines) == empty:
                self.put("pass")

    def _adds_rows_alone(self) -> bool:
        """Whether rows are only added to rows of partial results."""
        first, *others = self.passes["row"]
        return (
            bool(first.totals)
            and all(total.row for total in self.totals)
            and not (first.sums or first.stores or first.keeps or first.staged or any(one.roots() for one in others))
            and not any(slot.kind == "c" for slot in (*self.inputs, *(slot for _, slot in self.outputs)))
            and not any(expr.op in LIMITED for expr in self.order)
        )

    def _four_rows(self, first: str, last: str, before: dict[Expr, str]) -> None:
        """Take rows by fours: partial results are read and written a quarter as often, 1.5x faster for float32."""
        one = self.passes["row"][0]
        known = self._known(one)
        inner = set(self._inner(one.roots(), known))
        ordered = [expr for expr in self.order if expr in inner]
        self.put(f"last = {last}")
        self.put(f"odd = last - (last - {first}) % 4")
        with self.block(f"for i in range({first}, odd, 4):"):
            self.put("m = n")
            copies = []
            for k in range(4):
                copies.append(dict(before) | {expr: f"{self.work[expr]}_[j]" for expr in known & inner})
                self._slices(one, inner, copies[-1], f"(i + {k}) * n", "0", tail=str(k))
            with self.block("for j in range(m):"):
                for texts in copies:
                    self.compute([expr for expr in ordered if expr not in texts], texts, self.templates)
                for total in one.totals:
                    step = f"{total.name}_[j]"
                    for texts in copies:
                        step = total.rule.step(step, texts[total.expr.args[0]])
                    self.put(f"{total.name}_[j] = {step}")

    def _combine(self, total: Total) -> None:
        """Combine the partial results of a group's chunks, pairwise."""
        name, rule = total.name, total.rule
        self.put(f"{name}_own = {name}[g * per : (g + 1) * per]")
        self.put("m = per")
        with self.block("while m > 1:"):
            self.put("half = (m + 1) // 2")
            with self.block("for k in range(m - half):"):
                if total.row:
                    self.put(f"{name}_to, {name}_from = {name}_own[k], {name}_own[k + half]")
                    with self.block("for j in range(n):"):
                        self.put(f"{name}_to[j] = {rule.merged(f'{name}_to[j]', f'{name}_from[j]')}")
                else:
                    self.put(f"{name}_own[k] = {rule.merged(f'{name}_own[k]', f'{name}_own[k + half]')}")
            self.put("m = half")
        self.put(f"{name}_{'all' if total.row else 'sum'} = {name}_own[0]")

    def _end(self, before: dict[Expr, str]) -> None:
        """What depends on all rows of a group."""
        texts = dict(before)
        for total in self.totals:
            over = reduction(total.expr)[1]
            count = "rows" if over == "I" else "n" if self.flat else "rows * n"
            last = f"{total.name}_[j]" if total.row else f"{total.name}_sum"
            texts[total.expr] = f"T({total.rule.finish.format(acc=last, count=count)})"
            if not total.row:
                self.put(f"{total.name}_end = {texts[total.expr]}")
                texts[total.expr] = f"{total.name}_end"
        self._region("after", texts, "g * n")
        for expr, slot in self.outputs:
            if slot.kind == "s":
                self.put(f"{slot.name}[g] = {texts[expr]}")

    def _region(self, region: str, texts: dict[Expr, str], start: str) -> None:
        """All of a region's statements: in turn numbers that do not depend on J, and walks along J."""
        for depth, one in enumerate(self.passes[region]):
            self.compute(
                [
                    expr
                    for expr in self.order
                    if self.region[expr] == region and "J" not in self.axes[expr] and self.depth[expr] == depth
                ],
                texts,
                self.everywhere,
            )
            if region == "row":
                self._at_row(depth, texts)
            if one.roots():
                self._walk(one, texts, start)

    def _at_row(self, depth: int, texts: dict[Expr, str]) -> None:
        for total in self.totals:
            arg = total.expr.args[0]
            if self.axes[arg] == "I" and self.depth[arg] == depth:
                self.put(f"{total.name}_sum = {total.rule.step(f'{total.name}_sum', texts[arg])}")
        for expr, slot in self.outputs:
            own = self.depth[expr] if self.region[expr] == "row" else 0
            if slot.kind == "c" and own == depth:
                self.put(f"{slot.name}[i] = {texts[expr]}")

    def _walk(self, one: Pass, texts: dict[Expr, str], start: str) -> None:
        """One walk along J, in stretches of at most `BLOCK` elements where something is accumulated."""
        names = [self.sums[expr] for expr in one.sums]
        rules = [REDUCTIONS[reduction(expr)[0]] for expr in one.sums]
        for name, rule in zip(names, rules, strict=True):
            self.put(f"{name}_sum = {self.start(rule)}")
        accumulates = one.sums or any(not total.row for total in one.totals)
        if self.flat:
            self.put(f"m = min({BLOCK}, n - {start})")
            self._stretch(one, texts, start, "0")
        elif (accumulates or one.staged or (self.streams and one.stores)) and not self.short:
            with self.block(f"for q in range(0, n, {BLOCK}):"):
                self.put(f"m = min({BLOCK}, n - q)")
                self._stretch(one, texts, f"{start} + q" if start else "q", "q")
        else:
            self.put("m = n")
            self._stretch(one, texts, start, "0")
        for name, rule, expr in zip(names, rules, one.sums, strict=True):
            self.put(f"{name}_end = T({rule.finish.format(acc=f'{name}_sum', count='n')})")
            texts[expr] = f"{name}_end"

    def _stretch(self, one: Pass, outer: dict[Expr, str], start: str, column: str) -> None:
        """The loop over `m` elements, from `start` in whole arrays and from `column` in a row."""
        known = self._known(one)
        inner = set(self._inner(one.roots(), known))
        texts = dict(outer)
        self._slices(one, inner, texts, start, column)
        texts |= {expr: f"{self.work[expr]}_[j]" for expr in known & inner}
        steps = [(f"{self.sums[expr]}_acc", REDUCTIONS[reduction(expr)[0]], expr.args[0]) for expr in one.sums]
        steps += [(f"{t.name}_[j]" if t.row else f"{t.name}_acc", t.rule, t.expr.args[0]) for t in one.totals]
        accumulators = [(target, rule) for target, rule, _ in steps if target.endswith("_acc")]
        for target, rule in accumulators:
            self.put(f"{target} = {self.start(rule)}")
        ordered = [expr for expr in self.order if expr in inner and expr not in texts]
        risky = limited(ordered)
        if risky:
            self.put("large = np.int32(0)")
            with self.block("for j in range(m):"):
                trial = dict(texts)
                self.compute(self._below(risky, ordered), trial, self.everywhere)
                for arg in risky:
                    self.put(beyond(trial[arg]))
            with self.block("if large:"):
                self._loop(one, ordered, dict(texts), steps, self.everywhere)
            with self.block("else:"):
                self._loop(one, ordered, dict(texts), steps, self.templates)
        else:
            self._loop(one, ordered, dict(texts), steps, self.templates)
        if one.staged:
            texts |= {arg: f"{name}[j]" for arg, name in one.staged.items() if name}
            with self.block("for j in range(m):"):
                for target, rule, arg in steps:
                    if arg in one.staged:
                        self.put(f"{target} = {rule.step(target, texts[arg])}")
        for _, slot in one.stores:
            if slot.name in self.streams:
                self.put(f"p.stream({slot.name}_, {self.streams[slot.name]}, m)")
        for target, rule in accumulators:
            into = f"{target.removesuffix('_acc')}_sum"
            self.put(f"{into} = {rule.merged(into, target)}")

    def _below(self, roots: Iterable[Expr], ordered: Sequence[Expr]) -> list[Expr]:
        """Those of `ordered` that `roots` need."""
        need = set(roots)
        for expr in reversed(ordered):
            if expr in need:
                need.update(expr.args)
        return [expr for expr in ordered if expr in need]

    def _loop(
        self,
        one: Pass,
        ordered: Sequence[Expr],
        texts: dict[Expr, str],
        steps: Sequence[tuple[str, Reduction, Expr]],
        templates: dict[str, str],
    ) -> None:
        with self.block("for j in range(m):"):
            self.compute(ordered, texts, templates)
            for target, rule, arg in steps:
                if rule.accumulator != "A" or arg not in one.staged:
                    self.put(f"{target} = {rule.step(target, texts[arg])}")
            for arg, name in one.staged.items():
                if name:
                    self.put(f"{name}[j] = {texts[arg]}")
            for expr in one.keeps:
                self.put(f"{self.work[expr]}_[j] = {texts[expr]}")
            for expr, slot in one.stores:
                self.put(f"{self.streams.get(slot.name, slot.name + '_')}[j] = {texts[expr]}")

    def _slices(
        self, one: Pass, inner: set[Expr], texts: dict[Expr, str], start: str, column: str, tail: str = ""
    ) -> None:
        """Slices of all arrays that a stretch walks: so the index is a plain loop variable.

        One that could be negative would cost the loop its vectorisation.
        """
        reads = {str(expr.value) for expr in inner if expr.op == "symbol"}
        for slot in self.slots.values():
            if slot.name in reads:
                texts[symbol(slot.name)] = self.read(slot, f"{slot.name}_{tail if slot.kind == 'v' else ''}[j]")
        whole = [slot.name for slot in self.inputs if slot.kind == "v" and slot.name in reads]
        whole += [slot.name for _, slot in one.stores]
        rows = [slot.name for slot in self.inputs if slot.kind == "r" and slot.name in reads]
        rows += [name for expr, name in self.work.items() if expr in inner]
        begin = start or column
        for name in whole:
            self.put(f"{name}_{tail} = {name}[{begin} : {begin} + m]")
        for name in rows:
            self.put(f"{name}_ = {name}[{column} : {column} + m]")
        used = [total for total in one.totals if total.row] + [
            total for total in self.totals if total.row and total.expr in inner
        ]
        for total in used:
            self.put(f"{total.name}_ = {total.name}_all[{column} : {column} + m]")
