"""Holds and runs compiled loops: kernels for few and for many elements, and the forms in which they take inputs.

Where the arrays are on a GPU, a loop hands over to its `Launcher`, which takes the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from sweepgrad.arrays import is_on_device
from sweepgrad.dtypes import DTYPES, Array, DType
from sweepgrad.kernels import emit, gpu, workers
from sweepgrad.kernels.buffers import POOLED_FROM, empty
from sweepgrad.kernels.cpu import Kernel, compile_kernel
from sweepgrad.kernels.emit import Slot, elementwise
from sweepgrad.kernels.expr import Expr, topological
from sweepgrad.kernels.nest import Nest, nest
from sweepgrad.kernels.passes import BLOCK
from sweepgrad.kernels.scalars import CHEAP
from sweepgrad.kernels.workers import crew, new_task
from sweepgrad.tensor import Tensor

LARGE = 1 << 15
"""Elements from which a kernel releases the interpreter's lock: below, handing it over costs more than the loop."""


SHORT = 16
"""Rows of at most so many elements are compiled for their length where they are reduced: 3x faster for rows of 8."""

_CHUNK = 1 << 15
"""Elements in a chunk: 10 us or more of work, against 0.1 us to take one."""

_MOST_ELEMENTS, _MOST_ROWS = 1 << 18, 1 << 10
"""Of a chunk with a row of partial results, which have to be combined at the end."""


_KEPT = 1024
"""Sizes for which a loop remembers how it runs."""


_STREAMED = 1 << 24
"""Bytes of whole outputs from which they are written past the caches, where that is all that a loop waits for.

A product of 4M float64 takes 0.87 of the time; but an exponential 1.1, as it is no longer computed while memory is
written.
"""


class _Run(NamedTuple):
    """How a loop runs for one set of sizes."""

    kernel: Kernel
    lengths: tuple[int, ...]
    """The kernel's arguments between its inputs and its arrays."""
    temporary: Sequence[tuple[Any, DType]]
    """Shapes and dtypes of arrays that each call needs."""
    working: Sequence[tuple[int, DType]]
    """Lengths and dtypes of arrays of which each worker needs one."""
    outs: Sequence[tuple[Callable[..., Array], int, DType]]
    """How to make each output, its size and its dtype."""
    chunks: int
    """Chunks that workers may take; 0 for a kernel that runs as a whole."""


class Loop:
    """A kernel for one set of expressions, compiled when first needed, in the variants that sizes ask for."""

    __slots__ = (
        "_build", "_launcher", "_plain", "_plain_source", "_runs", "_streams", "_variants", "_whole", "kinds",
        "results",
    )  # fmt: skip

    def __init__(
        self,
        outputs: Sequence[Expr],
        inputs: Sequence[tuple[str, str, str]],
        dtype: str,
        results: str | Sequence[tuple[str, str]],
    ) -> None:
        """`inputs` are (name, kind, dtype), `results` (kind, dtype) for each output or one dtype for all."""
        self.kinds = "".join(kind for _, kind, _ in inputs)
        if isinstance(results, str):
            results = [("v", results)] * len(outputs)
        self.results = [(kind, DTYPES[name]) for kind, name in results]
        reduces = any(expr.op == "reduce" for expr in topological(outputs))
        self._streams = all(expr.op in CHEAP or not expr.args for expr in topological(outputs))
        self._whole = not reduces and all(kind == "v" for kind, _ in results)
        slots = [Slot(name, kind, of) for name, kind, of in inputs]
        targets = [(e, Slot(f"o{k}", *result)) for k, (e, result) in enumerate(zip(outputs, results, strict=True))]
        self._build: Callable[..., Nest] = functools.partial(nest, targets, slots, dtype)
        self._variants: dict[tuple[bool, int | None, bool, bool], tuple[Nest, Kernel]] = {}
        self._runs: dict[tuple[int, int, int], _Run] = {}
        self._plain: Kernel | None = None
        self._plain_source = functools.partial(elementwise, targets, slots, dtype)
        self._launcher: gpu.Launcher | None = None

    def kernel(self) -> Kernel:
        """The entry point for few elements where nothing is reduced: takes the inputs and the outputs.

        Every input is v or s, or x or s.
        """
        if self._plain is None:
            self._plain = compile_kernel(*self._plain_source())
        return self._plain

    def run(self, size: int, *inputs: Any, row: int = 0) -> Sequence[Array]:
        """The outputs, flat, of an elementwise loop over `size` elements, in rows of `row` where inputs are r or c."""
        return self.over(inputs, row or size, rows=size // row if row else 1)

    def over(
        self,
        inputs: Sequence[Any],
        n: int,
        *,
        rows: int = 1,
        groups: int = 1,
        outs: Sequence[Array] = (),
    ) -> Sequence[Array]:
        """The outputs, flat, from inputs in the form of their kinds: `groups` times `rows` rows of `n` elements.

        `outs` are arrays to be written to instead of new ones, none of which may share memory with an input.
        """
        if gpu.loaded is not None and any(map(is_on_device, inputs)):
            return self.launcher().over(inputs, n, rows=rows, groups=groups, outs=outs)
        key = (n, rows, groups)
        run = self._runs.get(key) or self._prepared(*key)
        given = outs or [make(size, dtype) for make, size, dtype in run.outs]
        if not run.chunks:
            run.kernel(*inputs, *run.lengths, *[np.empty(shape, dtype) for shape, dtype in run.temporary], *given)
            return given
        count = crew(groups * rows * n, run.chunks)
        task = new_task()
        temporary = [np.empty(shape, dtype) for shape, dtype in run.temporary]
        temporary += [np.empty((count, length), dtype) for length, dtype in run.working]
        workers.run(run.kernel, (*inputs, *run.lengths, task, *temporary, *given), task, count)
        return given

    def launcher(self) -> gpu.Launcher:
        """The same for arrays on a GPU."""
        if self._launcher is None:
            targets, slots, dtype = self._build.args  # type: ignore[attr-defined]
            self._launcher = gpu.Launcher(targets, slots, dtype)
        return self._launcher

    def _prepared(self, n: int, rows: int, groups: int) -> _Run:
        """What runs for these sizes, found once: on few elements it takes longer to find than to run."""
        key = (n, rows, groups)
        size = groups * rows * n
        sizes = {"v": size, "c": groups * rows, "r": groups * n, "s": groups}
        outs = []
        for kind, dtype in self.results:
            small = sizes[kind] * dtype.itemsize < POOLED_FROM
            outs.append((np.empty if small else empty, sizes[kind], dtype))
        if self._whole and size < LARGE and not ("r" in self.kinds or "c" in self.kinds):
            run = _Run(self.kernel(), (), [], [], outs, 0)
        else:
            chunked = size >= LARGE
            columns = n if n <= SHORT and not self._whole else None
            short = n <= BLOCK and not chunked
            whole = sum(sizes["v"] * dtype.itemsize for kind, dtype in self.results if kind == "v")
            made, kernel = self._variant(chunked, columns, short, self._streams and whole >= _STREAMED)
            if made.flat:
                rows, n = -(-size // BLOCK), size
                step = _CHUNK // BLOCK
            elif any(row for _, row in made.partials):
                step = max(1, min(_MOST_ELEMENTS // max(n, 1), _MOST_ROWS))
            else:
                step = max(1, _CHUNK // max(n, 1))
            chunks = groups * max(1, -(-rows // step)) if chunked else groups
            temporary: list[Any] = [((chunks, n) if row else chunks, DTYPES[dtype]) for dtype, row in made.partials]
            working = [(length, DTYPES[made.dtype]) for length in [n] * made.work + [BLOCK] * made.blocks]
            if not chunked:
                temporary += [((1, length), dtype) for length, dtype in working]
            lengths = (groups, rows, n, step) if chunked else (groups, rows, n)
            run = _Run(kernel, lengths, temporary, working, outs, chunks if chunked else 0)
        if len(self._runs) >= _KEPT:
            self._runs.clear()
        self._runs[key] = run
        return run

    def _variant(self, chunked: bool, columns: int | None, short: bool, streamed: bool) -> tuple[Nest, Kernel]:
        key = (chunked, columns, short, streamed)
        found = self._variants.get(key)
        if found is None:
            made = self._build(chunked=chunked, columns=columns, short=short, streamed=streamed)
            kernel = compile_kernel(made.source, made.signature, nogil=chunked)
            found = self._variants[key] = made, kernel
        return found


def _kind(tensor: Tensor, shape: tuple[int, ...], size: int) -> tuple[str, int]:
    """How a kernel can read `tensor` within a result of `shape`: kind, and for r and c the row's length."""
    if math.prod(tensor._shape) == 1 and size != 1:
        return "s", 0
    if tensor._flat is None:
        return "x", 0
    if tensor._shape == shape or size == 1:
        return "v", 0
    # Axes of length 1 in the result carry no information; without them, what is left is a row or a column.
    lead = len(shape) - len(tensor._shape)
    have = (1,) * lead + tensor._shape
    own = [length for length, full in zip(have, shape, strict=True) if full != 1]
    full = [length for length in shape if length != 1]
    split = next((k for k, length in enumerate(own) if length != 1), len(own))
    if own[split:] == full[split:]:
        return ("r", math.prod(full[split:])) if split else ("v", 0)
    split = len(own) - next((k for k, length in enumerate(reversed(own)) if length != 1), len(own))
    if own[:split] == full[:split]:
        return "c", math.prod(full[split:])
    return "x", 0


def kinds_of(args: Sequence[Any], shape: tuple[int, ...]) -> tuple[str, int]:
    """The kinds of all inputs together, and the row length where there are rows or columns."""
    size = math.prod(shape)
    found = [_kind(arg, shape, size) if isinstance(arg, Tensor) else ("s", 0) for arg in args]
    lengths = {length for _, length in found if length}
    kinds = "".join(kind for kind, _ in found)
    if "x" in kinds or len(lengths) > 1 or size == 0:
        return "".join("s" if kind == "s" else "x" for kind in kinds), 0
    return kinds, lengths.pop() if lengths else 0


def run_strided(loop: Loop, values: Sequence[Any], shape: tuple[int, ...]) -> Sequence[Array]:
    """The outputs, flat, of a kernel of strided inputs: arrays that broadcast to `shape`, or numbers."""
    views = [
        np.broadcast_to(value, shape) if kind == "x" else value for value, kind in zip(values, loop.kinds, strict=True)
    ]
    arrays = [view for view, kind in zip(views, loop.kinds, strict=True) if kind == "x"]
    lengths, strides = _coalesce(shape, [array.strides for array in arrays])
    if any(map(is_on_device, arrays)):
        steps = [[step // x.dtype.itemsize for step in own] for own, x in zip(strides, arrays, strict=True)]
        return loop.launcher().strided(views, lengths, steps)
    size = math.prod(shape)
    outs = [empty(size, dtype) for _, dtype in loop.results]
    missing = emit.STRIDED_NDIM - len(lengths)
    lengths = [1] * missing + lengths
    strides = [[0] * missing + list(own) for own in strides]
    arrays = [as_strided(array, lengths, own) for array, own in zip(arrays, strides, strict=True)]
    targets = [out.reshape(lengths) for out in outs]
    kernel = loop.kernel()
    lead = len(lengths) - emit.STRIDED_NDIM
    for index in np.ndindex(*lengths[:lead]):  # a single pass unless more axes are left than the kernel has loops
        rest = iter(arrays)
        kernel(
            *[next(rest)[index] if isinstance(view, np.ndarray) else view for view in views],
            *[target[index] for target in targets],
        )
    return outs


def _coalesce(shape: tuple[int, ...], strides: Sequence[tuple[int, ...]]) -> tuple[list[int], list[list[int]]]:
    """`shape` with neighbouring axes joined wherever every array walks both in one stride, and the new strides."""
    lengths: list[int] = []
    joined: list[list[int]] = [[] for _ in strides]
    for axis, length in enumerate(shape):
        if length == 1:
            continue
        if lengths and all(new[-1] == own[axis] * length for new, own in zip(joined, strides, strict=True)):
            lengths[-1] *= length
            for new, own in zip(joined, strides, strict=True):
                new[-1] = own[axis]
        else:
            lengths.append(length)
            for new, own in zip(joined, strides, strict=True):
                new.append(own[axis])
    return lengths, joined
