"""Writes the source of CUDA kernels from the expressions of a loop nest. Text in, text out.

What a nest is, `kernels.nest` says: axes I and J, kinds of inputs and outputs, reductions over J, I and IJ. Here it is
spread over a grid of blocks in one of three ways:

    elements   nothing is reduced over J or I alone: a thread takes elements a grid's width apart, whatever their row
    columns    rows are reduced to one row, and nothing along J: a thread takes columns, and goes down the rows
    rows       a block takes whole rows; its threads walk along J, and reduce what they found by warp shuffles

Rows come in chunks, one for each block along x, and each chunk leaves partial results of what is reduced over I or IJ.
A second kernel, one block for each group, combines them in the order of the chunks and computes what depends on them.
So results depend on the number of chunks and of threads, which the caller chooses by sizes, and on no order of events.

float32 is accumulated in float32, since many threads add up few numbers each, and most GPUs are slow in float64.
Nothing is kept from one walk along J to the next: to compute a value again costs a GPU less than memory.

Arrays are handed over as pointers, of truth values as pointers to bytes. An input of kind s is a number, or a pointer
to one that is on the device already, which then need not be fetched. `strided` writes the kernel for inputs of kind x.

A kernel sees `m` (the module math), `np`, `cuda`, `rint` for its dtype, and its types `T` and `A`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from sweepgrad.kernels.emit import Slot
from sweepgrad.kernels.expr import Expr, reduction, symbol
from sweepgrad.kernels.passes import AXES
from sweepgrad.kernels.scalars import CUDA, CUDA_COMBINING, CUDA_INTEGER, REDUCTIONS, Reduction
from sweepgrad.kernels.text import Text

_AHEAD = 4
"""Elements that a thread reads before it computes with the first of them."""

LENGTHS = ("groups", "rows", "n", "chunks", "tiles")
"""The numbers that each kernel of a nest is handed after its inputs: see `Grid`."""


@dataclass(frozen=True)
class Grid:
    """The kernels of one nest, and their arguments' types: a dtype's name for a number, `*float32` for a pointer.

    Both take: the inputs; `groups`, `rows`, `n`; `chunks`, those of each group, and `tiles`, the blocks that share a
    chunk in the first kernel; an array for each of `partials`; the outputs. Partial results that are numbers have a
    place for each block of the first kernel; those that are rows, for each chunk.
    """

    way: str
    first: str
    last: str | None
    """The kernel that combines partial results; None if there is nothing to do after the first."""
    tiled: bool
    """Whether several blocks of it may share a row."""
    types: tuple[str, ...]
    partials: tuple[tuple[str, bool], ...]
    """For each: dtype, and whether it is a row rather than a number."""
    outputs: tuple[tuple[str, str], ...]
    """Kind and dtype of each."""


def grid(
    outputs: Sequence[tuple[Expr, Slot]],
    inputs: Sequence[Slot],
    dtype: str,
    warp: int,
    pointed: frozenset[str] = frozenset(),
) -> Grid:
    """The kernels that compute `outputs` in `dtype`; every slot is v, r, c or s.

    `warp` is how many threads run together, a power of two; a block has a multiple of them, at most their square.
    `pointed` names the inputs of kind s that come as pointers.
    """
    writer = _Writer(outputs, inputs, dtype, warp, pointed)
    partials = tuple((writer.accumulator(rule), row) for _, rule, row in writer.totals.values())
    return Grid(
        writer.way,
        writer.first(),
        writer.last(),
        not any(writer.region[expr] != "row" for expr in writer.sums),
        (
            *(slot.dtype if slot.kind == "s" and slot.name not in pointed else f"*{slot.dtype}" for slot in inputs),
            *["int64"] * len(LENGTHS),
            *(f"*{dtype}" for dtype, _ in partials),
            *(f"*{slot.dtype}" for _, slot in outputs),
        ),
        partials,
        tuple((slot.kind, slot.dtype) for _, slot in outputs),
    )


@dataclass(frozen=True)
class Strided:
    """A kernel for inputs with strides of their own.

    It takes: the inputs, pointers for kind x; the number of elements; the length of every axis; for each input of kind
    x its strides, in elements; the outputs, contiguous.
    """

    source: str
    types: tuple[str, ...]


def strided(
    outputs: Sequence[tuple[Expr, Slot]],
    inputs: Sequence[Slot],
    dtype: str,
    ndim: int,
    pointed: frozenset[str] = frozenset(),
) -> Strided:
    """The kernel that computes `outputs` in `dtype` over `ndim` axes; inputs are x or s, and nothing is reduced."""
    own = [slot for slot in inputs if slot.kind == "x"]
    axes = range(ndim)
    writer = _Elements(
        [(expr, replace(slot, kind="v")) for expr, slot in outputs],
        [replace(slot, kind="v") if slot in own else slot for slot in inputs],
        dtype,
        pointed,
    )
    names = [slot.name for slot in inputs] + ["size"] + [f"n{k}" for k in axes]
    names += [f"{slot.name}_{k}" for slot in own for k in axes] + [slot.name for _, slot in outputs]
    texts = writer.opened(names)
    writer.put("wide = np.int64(threads) * cuda.gridDim.x")
    with writer.walk("e", "np.int64(cuda.blockIdx.x) * threads + tid", "size", "wide"):
        writer.put("rest = e")
        for k in reversed(axes):
            writer.put(f"i{k} = rest % n{k}" if k else "i0 = rest")
            if k:
                writer.put(f"rest //= n{k}")
        roots = [expr for expr, _ in outputs]
        needed = writer.needed(roots, texts)
        for slot in own:
            if symbol(slot.name) in needed:
                at = " + ".join(f"i{k} * {slot.name}_{k}" for k in axes)
                writer.put(f"{slot.name}_ = {writer.read(slot, f'{slot.name}[{at}]')}")
                texts[symbol(slot.name)] = f"{slot.name}_"
        writer.compute(needed, texts, writer.templates)
        for expr, slot in outputs:
            writer.store(slot, "e", texts[expr])
    types = [slot.dtype if slot.kind == "s" and slot.name not in pointed else f"*{slot.dtype}" for slot in inputs]
    types += ["int64"] * (1 + ndim + ndim * len(own)) + [f"*{slot.dtype}" for _, slot in outputs]
    return Strided(writer.written(), tuple(types))


class _Elements(Text):
    """What all kernels are written with."""

    def __init__(
        self, outputs: Sequence[tuple[Expr, Slot]], inputs: Sequence[Slot], dtype: str, pointed: frozenset[str]
    ) -> None:
        super().__init__(outputs, inputs, dtype)
        self.templates = CUDA_INTEGER if "int" in dtype else CUDA
        self.pointed = [slot for slot in inputs if slot.name in pointed]

    @contextmanager
    def walk(self, index: str, first: str, end: str, step: str) -> Iterator[None]:
        """A loop whose index is as wide as its bounds."""
        self.put(f"{index} = {first}")
        with self.block(f"while {index} < {end}:"):
            yield
            self.put(f"{index} += {step}")

    @contextmanager
    def ahead(
        self, index: str, first: str, end: str, step: str, reads: Sequence[tuple[Slot, str]], texts: dict[Expr, str]
    ) -> Iterator[None]:
        """The same, in which a thread reads several elements before it computes with the first of them.

        `reads` are the inputs, with their indices as texts with `{at}` in the place of the walk's own. A GPU's memory
        is kept busy only if a thread has several reads under way, and the compiler does not see to that by itself: it
        cannot know that what is stored in between changes nothing that is read later.
        """
        with self.walk(f"{index}_0", first, end, f"{_AHEAD} * ({step})"):
            for k in range(_AHEAD):
                if reads:
                    self.put(f"{index}_{k}_ = min({index}_0 + {k} * ({step}), {end} - 1)")
                for slot, at in reads:
                    text = self.read(slot, f"{slot.name}[{at.format(at=f'{index}_{k}_')}]")
                    self.put(f"{slot.name}_{k} = {text}")
            with self.block(f"for ahead in range({_AHEAD}):"):
                self.put(f"{index} = {index}_0 + ahead * ({step})")
                with self.block(f"if {index} < {end}:"):
                    for slot, _ in reads:
                        chosen = "".join(f"{slot.name}_{k} if ahead == {k} else " for k in range(_AHEAD - 1))
                        self.put(f"{slot.name}_ = {chosen}{slot.name}_{_AHEAD - 1}")
                        texts[symbol(slot.name)] = f"{slot.name}_"
                    yield

    def opened(self, names: Iterable[str]) -> dict[Expr, str]:
        """Begin a new function of the arguments `names`; the texts of the numbers that are behind pointers."""
        self.begin()
        self.put(f"def kernel({', '.join(names)}):")
        self.indent = 1
        self.put("tid, threads = cuda.threadIdx.x, cuda.blockDim.x")
        texts: dict[Expr, str] = {}
        for slot in self.pointed:
            if symbol(slot.name) in self.axes:
                self.put(f"{slot.name}_ = {self.read(slot, f'{slot.name}[0]')}")
                texts[symbol(slot.name)] = f"{slot.name}_"
        return texts

    def read(self, slot: Slot, text: str) -> str:
        """An input's element in the nest's own dtype; a truth value is behind its pointer as a byte."""
        return f"({text} != 0)" if slot.dtype == "bool" and "[" in text else super().read(slot, text)

    def store(self, slot: Slot, at: str, text: str) -> None:
        """Write an output's element."""
        self.put(f"{slot.name}[{at}] = {f'np.uint8(1 if {text} else 0)' if slot.dtype == 'bool' else text}")

    def needed(self, roots: Iterable[Expr], texts: dict[Expr, str]) -> list[Expr]:
        """What has to be computed for `roots`, in topological order: nothing below a reduction or what has a text."""
        need: set[Expr] = set()
        stack = list(roots)
        while stack:
            expr = stack.pop()
            if expr not in need and expr not in texts:
                need.add(expr)
                stack.extend(expr.args if expr.op != "reduce" else ())
        return [expr for expr in self.order if expr in need]


class _Writer(_Elements):
    def __init__(
        self,
        outputs: Sequence[tuple[Expr, Slot]],
        inputs: Sequence[Slot],
        dtype: str,
        warp: int,
        pointed: frozenset[str],
    ) -> None:
        super().__init__(outputs, inputs, dtype, pointed)
        self.warp = warp
        self.sums: dict[Expr, str] = {}  # reductions over J
        self.totals: dict[Expr, tuple[str, Reduction, bool]] = {}  # those over I and IJ: name, rule, whether a row
        for expr in self.order:
            if expr.op == "reduce":
                kind, over = reduction(expr)
                if over == "J":
                    self.sums[expr] = f"a{len(self.sums)}"
                else:
                    row = "J" in self.axes[expr]
                    self.totals[expr] = (f"p{len(self.totals)}", REDUCTIONS[kind], row)
        assert not any(slot.kind != "v" and symbol(slot.name) in self.axes for _, slot in outputs), "only v is added to"
        self.way = self._way()

    def _way(self) -> str:
        by_row = any(slot.kind == "c" for _, slot in self.outputs)
        by_row = by_row or any(self.axes[expr.args[0]] == "I" for expr in self.totals)
        if by_row or any(self.region[expr] != "after" for expr in self.sums):
            return "rows"
        return "columns" if any(row for _, _, row in self.totals.values()) else "elements"

    def accumulator(self, rule: Reduction) -> str:
        """The dtype of a reduction's accumulator."""
        return {"A": self.dtype, "T": self.dtype}.get(rule.accumulator, rule.accumulator)

    # Text

    def _function(self) -> dict[Expr, str]:
        """Begin one of the two kernels, which take the same."""
        names = [slot.name for slot in self.inputs] + list(LENGTHS)
        return self.opened([*names, *(name for name, _, _ in self.totals.values()), *(s.name for _, s in self.outputs)])

    def reads(self, kinds: str, texts: dict[Expr, str], exprs: Iterable[Expr], **index: str) -> None:
        """Read the elements of inputs, and of outputs that expressions read, that `exprs` need."""
        for slot, at in self.reading(kinds, texts, exprs, **index):
            self.put(f"{slot.name}_ = {self.read(slot, f'{slot.name}[{at}]')}")
            texts[symbol(slot.name)] = f"{slot.name}_"

    def reading(
        self, kinds: str, texts: dict[Expr, str], exprs: Iterable[Expr], **index: str
    ) -> list[tuple[Slot, str]]:
        """What `reads` reads, and at which index."""
        need = set(exprs)
        return [
            (slot, index[slot.kind])
            for slot in self.slots.values()
            if slot.kind in kinds and symbol(slot.name) in need and symbol(slot.name) not in texts
        ]

    # Reductions within a block

    def accumulate(self, name: str, rule: Reduction, text: str) -> None:
        """One element more."""
        self.put(f"{name} = {rule.step(name, text, CUDA_COMBINING)}")

    def share(self, rules: Iterable[Reduction], places: int) -> None:
        """Shared memory for reductions, with so many places."""
        for dtype in dict.fromkeys(map(self.accumulator, rules)):
            self.put(f"shared_{dtype} = cuda.shared.array({places}, np.{dtype})")

    def block_reduce(self, name: str, rule: Reduction) -> None:
        """Make `name`, which each thread has its own of, the block's: first within each warp, then of all warps."""
        dtype = self.accumulator(rule)
        self.put(f"{name} = np.{dtype}({name})")
        self._warp_reduce(name, rule)
        with self.block(f"if tid % {self.warp} == 0:"):
            self.put(f"shared_{dtype}[tid // {self.warp}] = {name}")
        self.put("cuda.syncthreads()")
        self.put(f"{name} = np.{dtype}({self.start(rule)})")
        with self.block(f"if tid % {self.warp} * {self.warp} < threads:"):
            self.put(f"{name} = shared_{dtype}[tid % {self.warp}]")
        self._warp_reduce(name, rule)
        self.put("cuda.syncthreads()")  # before another reduction writes there
        self.put(f"{name} = {self._shuffled('shfl_sync', name, rule, 0)}")

    def _warp_reduce(self, name: str, rule: Reduction) -> None:
        distance = self.warp // 2
        while distance:
            self.put(f"other = {self._shuffled('shfl_down_sync', name, rule, distance)}")
            self.put(f"{name} = np.{self.accumulator(rule)}({rule.merged(name, 'other', CUDA_COMBINING)})")
            distance //= 2

    def _shuffled(self, shuffle: str, name: str, rule: Reduction, lane: int) -> str:
        """Another thread's `name`, which has to travel as a float or as a whole number with a sign."""
        dtype = self.accumulator(rule)
        carrier = dtype if dtype.startswith("float") else "int64" if dtype.endswith("64") else "int32"
        return f"np.{dtype}(cuda.{shuffle}(0xffffffff, np.{carrier}({name}), {lane}))"

    # The first kernel

    def first(self) -> str:
        """What computes elements and rows, and leaves partial results."""
        texts = self._function()
        numbers = [(expr, name, rule) for expr, (name, rule, row) in self.totals.items() if not row]
        inside = [REDUCTIONS[reduction(expr)[0]] for expr in self.sums if self.region[expr] != "after"]
        if self.way == "columns":  # a place for each thread, else for each warp
            self.share([rule for _, rule, _ in self.totals.values()], self.warp * self.warp)
        else:
            self.share([*inside, *(rule for _, _, rule in numbers)], self.warp)
        self.put("chunk = np.int64(cuda.blockIdx.x)")
        self.put("group = chunk // chunks")
        self._place()
        self.region_before(texts)
        for _, name, rule in numbers:
            self.put(f"{name}_acc = {self.start(rule)}")
        getattr(self, f"_by_{self.way}")(texts)
        for _, name, rule in numbers:
            self.block_reduce(f"{name}_acc", rule)
            with self.block("if tid == 0:"):
                self.put(f"{name}[chunk * tiles + cuda.blockIdx.y] = {name}_acc")
        return self.written()

    def _place(self) -> None:
        """Which columns, or elements, a thread takes of those that blocks along y share."""
        self.put("wide = np.int64(threads) * cuda.gridDim.y")
        self.put("left = np.int64(cuda.blockIdx.y) * threads + tid")

    def region_before(self, texts: dict[Expr, str]) -> None:
        """Numbers that depend on no row; along J only what is reduced, since the rest is computed where it is read."""
        self._passes("before", texts, "", (), [])

    def _stores(self, region: str, kinds: str) -> list[tuple[Expr, Slot]]:
        return [(expr, slot) for expr, slot in self.outputs if slot.kind in kinds and region == _where(slot)]

    def _chunk_bounds(self) -> None:
        self.put("step = (rows + chunks - 1) // chunks")
        self.put("begin = group * rows + chunk % chunks * step")
        self.put("end = min(begin + step, (group + 1) * rows)")

    def _by_elements(self, texts: dict[Expr, str]) -> None:
        roots = [expr for expr, slot in self.outputs if slot.kind == "v"] + [expr.args[0] for expr in self.totals]
        if not roots:
            return
        self.put("own = chunk % chunks * wide + left")
        own = dict(texts)
        needed = self.needed(roots, own)
        reads = self.reading("vrc", own, needed, v="{at}", r="{at} % n", c="{at} // n")
        with self.ahead("e", "group * rows * n + own", "(group + 1) * rows * n", "chunks * wide", reads, own):
            self.compute(needed, own, self.templates)
            for expr, (name, rule, _) in self.totals.items():
                self.accumulate(f"{name}_acc", rule, own[expr.args[0]])
            for expr, slot in self._stores("row", "v"):
                self.store(slot, "e", own[expr])

    def _by_columns(self, texts: dict[Expr, str]) -> None:
        rows = {expr: (f"{name}_row", rule) for expr, (name, rule, row) in self.totals.items() if row}
        self._chunk_bounds()
        # Where columns are so few that a block has threads for them several times, each takes its share of the rows.
        self.put("lanes = max(1, np.int64(threads) // max(n, 1))")
        self.put("lane = np.int64(tid) // max(n, 1) if lanes > 1 else 0")
        self.put("column = np.int64(tid) % max(n, 1) if lanes > 1 else left")
        for name, rule in rows.values():
            self.put(f"{name} = np.{self.accumulator(rule)}({self.start(rule)})")
        with self.walk("j", "column if lane < lanes else n", "n", "wide"):
            outer = dict(texts)
            roots = [expr for expr, slot in self.outputs if slot.kind == "v"] + [expr.args[0] for expr in self.totals]
            needed = self.needed(roots, outer)
            self.reads("r", outer, needed, r="j")
            self.compute([expr for expr in needed if self.axes[expr] == "J"], outer, self.templates)
            for name, rule in rows.values():
                self.put(f"{name} = np.{self.accumulator(rule)}({self.start(rule)})")
            own = dict(outer)
            reads = self.reading("vc", own, needed, v="{at} * n + j", c="{at}")
            with self.ahead("i", "begin + lane", "end", "lanes", reads, own):
                self.compute(needed, own, self.templates)
                for expr, (name, rule, row) in self.totals.items():
                    self.accumulate(f"{name}_row" if row else f"{name}_acc", rule, own[expr.args[0]])
                for expr, slot in self._stores("row", "v"):
                    self.store(slot, "i * n + j", own[expr])
            with self.block("if lanes == 1:"):
                for expr, (name, _) in rows.items():
                    self.put(f"{self.totals[expr][0]}[chunk * n + j] = {name}")
        with self.block("if lanes > 1:"):
            for expr, (name, rule) in rows.items():
                shared = f"shared_{self.accumulator(rule)}"
                self.put(f"{shared}[tid] = {name}")
                self.put("cuda.syncthreads()")
                with self.block("if tid < n:"):
                    with self.walk("k", "np.int64(tid) + n", "lanes * n", "n"):
                        merged = rule.merged(name, f"{shared}[k]", CUDA_COMBINING)
                        self.put(f"{name} = np.{self.accumulator(rule)}({merged})")
                    self.put(f"{self.totals[expr][0]}[chunk * n + tid] = {name}")
                self.put("cuda.syncthreads()")  # before another reduction writes there

    def _by_rows(self, texts: dict[Expr, str]) -> None:
        self._chunk_bounds()
        for name, rule, row in self.totals.values():
            if row:
                with self.walk("j", "tid", "n", "threads"):
                    self.put(f"{name}[chunk * n + j] = {self.start(rule)}")
        with self.walk("i", "begin", "end", "1"):
            own = dict(texts)
            self.reads("c", own, self.order, c="i")
            self._passes("row", own, "i * n + j", self._stores("row", "vc"), list(self.totals))

    def _passes(
        self,
        region: str,
        texts: dict[Expr, str],
        at: str,
        stores: Sequence[tuple[Expr, Slot]],
        totals: Sequence[Expr],
    ) -> None:
        """A region's numbers and walks along J; `at` is where a whole array has the element."""

        def due(expr: Expr) -> int:
            return self.depth[expr] if self.region[expr] == region else 0

        for depth in range(self.walks):
            here = [expr for expr in self.order if self.region[expr] == region and self.depth[expr] == depth]
            numbers = [expr for expr in here if "J" not in self.axes[expr] and expr.op != "reduce"]
            self.compute(numbers, texts, self.templates)
            own = [(expr, slot) for expr, slot in stores if due(expr) == depth]
            adds = [expr for expr in totals if due(expr.args[0]) == depth]
            sums = [expr for expr in self.sums if self.region[expr] == region and self.depth[expr] == depth + 1]
            self._once(
                texts,
                [(expr, slot) for expr, slot in own if slot.kind in "cs"],
                [expr for expr in adds if "J" not in self.axes[expr.args[0]]],
            )
            self._walk_row(
                texts,
                at,
                [(expr, slot) for expr, slot in own if slot.kind in "vr"],
                [expr for expr in adds if "J" in self.axes[expr.args[0]]],
                sums,
            )

    def _once(self, texts: dict[Expr, str], stores: Sequence[tuple[Expr, Slot]], adds: Sequence[Expr]) -> None:
        """What one thread does with numbers of the whole row."""
        if not (stores or adds):
            return
        needed = self.needed([*(expr for expr, _ in stores), *(expr.args[0] for expr in adds)], texts)
        self.compute(needed, texts, self.templates)
        with self.block("if left == 0:"):
            for expr in adds:
                name, rule, _ = self.totals[expr]
                self.accumulate(f"{name}_acc", rule, texts[expr.args[0]])
            for expr, slot in stores:
                self.store(slot, "i" if slot.kind == "c" else "group", texts[expr])

    def _walk_row(
        self,
        texts: dict[Expr, str],
        at: str,
        stores: Sequence[tuple[Expr, Slot]],
        adds: Sequence[Expr],
        sums: Sequence[Expr],
    ) -> None:
        """One walk along J of a block's threads."""
        if not (stores or adds or sums):
            return
        rules = {expr: REDUCTIONS[reduction(expr)[0]] for expr in sums}
        for expr, rule in rules.items():
            self.put(f"{self.sums[expr]} = {self.start(rule)}")
        own = dict(texts)
        roots = [*(expr for expr, _ in stores), *(expr.args[0] for expr in (*adds, *sums))]
        needed = self.needed(roots, own)
        reads = self.reading("vr", own, needed, v=at.replace("j", "{at}"), r="{at}")
        with self.ahead("j", "left", "n", "wide", reads, own):
            self._totals_at_column([expr for expr in needed if expr in self.totals], own)
            self.compute(self.needed(roots, own), own, self.templates)
            for expr, rule in rules.items():
                self.accumulate(self.sums[expr], rule, own[expr.args[0]])
            for expr in adds:
                name, rule, row = self.totals[expr]
                self.accumulate(f"{name}[chunk * n + j]" if row else f"{name}_acc", rule, own[expr.args[0]])
            for expr, slot in stores:
                self.store(slot, at if slot.kind == "v" else "group * n + j", own[expr])
        for expr, rule in rules.items():
            name = self.sums[expr]
            self.block_reduce(name, rule)
            self.put(f"{name} = T({rule.finish.format(acc=name, count='n')})")
            texts[expr] = name

    # The second kernel

    def last(self) -> str | None:
        """What combines partial results, and computes what depends on them."""
        stores = self._stores("after", "rs")
        if not stores:
            return None
        texts = self._function()
        self.share(
            [
                *(rule for _, rule, row in self.totals.values() if not row),
                *(REDUCTIONS[reduction(expr)[0]] for expr in self.sums if self.region[expr] != "row"),
            ],
            self.warp,
        )
        self.put("group = np.int64(cuda.blockIdx.x)")
        self._place()
        self.region_before(texts)
        for expr, (name, rule, row) in self.totals.items():
            if not row:
                self.put(f"{name}_acc = {self.start(rule)}")
                self.put("per = chunks * tiles")
                with self.walk("k", "np.int64(tid)", "per", "threads"):
                    self.put(f"{name}_acc = {rule.merged(f'{name}_acc', f'{name}[group * per + k]', CUDA_COMBINING)}")
                self.block_reduce(f"{name}_acc", rule)
                self.put(f"{name}_end = T({rule.finish.format(acc=f'{name}_acc', count=self._elements(expr))})")
                texts[expr] = f"{name}_end"
        self._passes("after", texts, "", stores, [])
        return self.written()

    def _elements(self, expr: Expr) -> str:
        """How many elements a reduction over I or IJ takes in."""
        return "rows" if reduction(expr)[1] == "I" else "rows * n"

    def _totals_at_column(self, exprs: Iterable[Expr], texts: dict[Expr, str]) -> None:
        """The whole of what chunks have left at one column, in their order."""
        for expr in exprs:
            name, rule, _ = self.totals[expr]
            self.put(f"{name}_col = {self.start(rule)}")
            with self.walk("k", "group * chunks", "(group + 1) * chunks", "1"):
                self.put(f"{name}_col = {rule.merged(f'{name}_col', f'{name}[k * n + j]', CUDA_COMBINING)}")
            self.put(f"{name}_fin = T({rule.finish.format(acc=f'{name}_col', count=self._elements(expr))})")
            texts[expr] = f"{name}_fin"


def _where(slot: Slot) -> str:
    return "row" if "I" in AXES[slot.kind] else "after"
