"""Kernels of a nest on a GPU, real or simulated: what `ops.loop.Loop` is on the CPU. Nothing is loaded before its use.

Sizes alone say how many blocks and threads there are, so a result has the same bits in every run.
"""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from sweepgrad.dtypes import DTYPES, Array, DType
from sweepgrad.kernels.emit import Slot
from sweepgrad.kernels.expr import Expr
from sweepgrad.kernels.grid import LENGTHS, grid, strided

SIMULATE = "NUMBA_ENABLE_CUDASIM"
"""Numba's own variable: with `1` from the start of a process, devices are simulated."""


class Driver(Protocol):
    """What is asked of devices. Each thread has a current one, on which arrays are made and kernels run."""

    array: Any
    """The type of arrays on a device, which have the attributes and methods of NumPy's that are used here."""
    count: int
    """Devices that there are."""
    warp: int
    """Threads that run together."""
    threads: int
    """The most threads of a block."""
    per_thread: int
    """Elements that a thread takes, where there are so many."""
    most_chunks: int
    """Of a group: each leaves a partial result, and one block combines them."""
    most_tiles: int
    """Blocks along the second axis of a grid."""

    def current(self) -> int:
        """The current device of this thread."""

    def on(self, device: int) -> AbstractContextManager[Any]:
        """Within it, `device` is the current one of this thread."""

    def describe(self, device: int) -> str:
        """The device in words."""

    def empty(self, size: int, dtype: DType) -> Any:
        """A flat array on the current device, uninitialised; MemoryError if there is no room."""

    def upload(self, array: Array) -> Any:
        """A contiguous copy on the current device."""

    def download(self, array: Any) -> Array:
        """A contiguous copy in main memory, once what computes it is done."""

    def copy(self, array: Any) -> Any:
        """A contiguous copy, of an array of any device, on the current one."""

    def adopt(self, obj: Any) -> Any:
        """An array over the memory of an object with `__cuda_array_interface__` or `__dlpack__`."""

    def add_at(self, total: Any, key: Any, part: Any) -> None:
        """`total[key] += part`, also where `key` names an element several times."""

    def memory(self, device: int) -> tuple[int, int]:
        """Bytes that arrays have, and bytes that are idle, waiting for others."""

    def free_idle(self) -> int:
        """Give what is idle back to the devices; the bytes."""

    def synchronize(self) -> None:
        """Wait for what the current stream was given to do."""

    def compile(self, source: str, signature: Sequence[str], dtype: str) -> Callable[..., None]:
        """A function of blocks (along x and y), threads of a block and arguments that runs a kernel."""


loaded: Driver | None = None
"""The driver, once a device has been asked for."""


def driver() -> Driver:
    """The driver of this process's devices.

    Raises:
        ImportError: if the packages for GPUs are not installed (`MissingDependencyError`).
        RuntimeError: if there is no GPU, or none that can be used (`DeviceError`).
    """
    global loaded  # noqa: PLW0603  # two threads may both load it: the last one counts
    if loaded is None:
        if os.environ.get(SIMULATE, "0").strip() not in ("", "0"):
            from sweepgrad.kernels.simulator import Simulator

            loaded = Simulator()
        else:
            from sweepgrad.kernels.nvidia import Nvidia

            loaded = Nvidia()
    return loaded


_STRIDED_NDIM = 3
"""Axes for which a strided kernel is compiled by itself; where there are more, as many as there are."""

_KEPT = 1024
"""Sizes for which a launcher remembers how it runs."""

_ROWS = 64
"""Rows that a thread adds up in a column, where there are so many."""


class _Run(NamedTuple):
    """How the kernels of a nest run for one set of sizes."""

    lengths: tuple[Any, ...]
    partials: tuple[tuple[int, DType], ...]
    outs: tuple[tuple[int, DType], ...]
    first: tuple[Callable[..., None], tuple[int, int], int] | None
    last: tuple[Callable[..., None], tuple[int, int], int] | None
    """Kernel, blocks and threads."""


class Launcher:
    """The kernels of one set of expressions on devices, compiled when first needed."""

    def __init__(self, outputs: Sequence[tuple[Expr, Slot]], inputs: Sequence[Slot], dtype: str) -> None:
        self._of = outputs, inputs, dtype
        # The inputs of kind s, each with what makes a number one that a kernel takes.
        self._numbers = [(k, slot.name, DTYPES[slot.dtype].type) for k, slot in enumerate(inputs) if slot.kind == "s"]
        self._grids: dict[frozenset[str], tuple[Any, ...]] = {}
        self._strided: dict[tuple[int, frozenset[str]], Callable[..., None]] = {}
        self._runs: dict[Any, _Run] = {}

    def over(
        self, inputs: Sequence[Any], n: int, *, rows: int = 1, groups: int = 1, outs: Sequence[Any] = ()
    ) -> Sequence[Any]:
        """The outputs, flat arrays on the device of the inputs: `groups` times `rows` rows of `n` elements.

        Inputs are flat arrays on one device, or numbers; one of kind s may be either. `outs` are arrays to be written
        to instead of new ones.
        """
        devices = driver()
        device = next(x for x in inputs if isinstance(x, devices.array)).device.id
        if device != devices.current():
            with devices.on(device):
                return self.over(inputs, n, rows=rows, groups=groups, outs=outs)
        given, pointed = self._arguments(inputs, devices.array)
        key = (n, rows, groups, pointed)
        run = self._runs.get(key) or self._prepared(*key)
        results = list(outs) or [devices.empty(size, dtype) for size, dtype in run.outs]
        if run.first is None:
            return results
        partials = [devices.empty(size, dtype) for size, dtype in run.partials]
        arguments = (*given, *run.lengths, *partials, *results)
        kernel, blocks, threads = run.first
        kernel(blocks, threads, arguments)
        if run.last is not None:
            kernel, blocks, threads = run.last
            kernel(blocks, threads, arguments)
        return results

    def strided(self, inputs: Sequence[Any], lengths: Sequence[int], strides: Sequence[Sequence[int]]) -> Sequence[Any]:
        """The outputs, flat, over axes of `lengths`; `strides`, in elements, are those of each input that has any."""
        devices = driver()
        device = next(x for x in inputs if isinstance(x, devices.array)).device.id
        if device != devices.current():
            with devices.on(device):
                return self.strided(inputs, lengths, strides)
        given, pointed = self._arguments(inputs, devices.array)
        missing = max(0, _STRIDED_NDIM - len(lengths))
        ndim = missing + len(lengths)
        kernel = self._strided.get((ndim, pointed))
        if kernel is None:
            outputs, slots, dtype = self._of
            made = strided(outputs, slots, dtype, ndim, pointed)
            kernel = self._strided[ndim, pointed] = devices.compile(made.source, made.types, dtype)
        size = math.prod(lengths)
        results = [devices.empty(size, DTYPES[slot.dtype]) for _, slot in self._of[0]]
        numbers = [size, *[1] * missing, *lengths]
        for own in strides:
            numbers += [*[0] * missing, *own]
        blocks = _between(-(-size // (devices.threads * devices.per_thread)), devices.most_chunks)
        kernel((blocks, 1), devices.threads, (*given, *map(_int64, numbers), *results))
        return results

    def _arguments(self, inputs: Sequence[Any], array: Any) -> tuple[list[Any], frozenset[str]]:
        """The inputs as kernels take them, and the names of those of kind s that are arrays."""
        given = list(inputs)
        pointed = []
        for k, name, number in self._numbers:
            if isinstance(given[k], array):
                pointed.append(name)
            else:
                given[k] = number(given[k])
        return given, frozenset(pointed)

    def _prepared(self, n: int, rows: int, groups: int, pointed: frozenset[str]) -> _Run:
        """What runs for these sizes."""
        devices = driver()
        made = self._grids.get(pointed)
        if made is None:
            outputs, inputs, dtype = self._of
            one = grid(outputs, inputs, dtype, devices.warp, pointed)
            compiled = [devices.compile(text, one.types, dtype) if text else None for text in (one.first, one.last)]
            made = self._grids[pointed] = (one, *compiled)
        one, first, last = made
        lengths = {"v": groups * rows * n, "c": groups * rows, "r": groups * n, "s": groups}
        outs = tuple((lengths[kind], DTYPES[dtype]) for kind, dtype in one.outputs)
        if not any(size for size, _ in outs):
            run = _Run((), (), outs, None, None)
        else:
            by_row = any(row for _, row in one.partials)
            chunks, tiles, threads = _shape(devices, one.way, by_row, groups, rows, n)
            partials = tuple((groups * chunks * (n if row else tiles), DTYPES[dtype]) for dtype, row in one.partials)
            end = None
            if last is not None:
                width = _threads(devices, max(n, chunks * tiles))
                across = _between(-(-n // width), devices.most_tiles) if one.tiled else 1
                end = (last, (groups, across), width)
            numbers = tuple(map(_int64, (groups, rows, n, chunks, tiles)))
            assert len(numbers) == len(LENGTHS)
            run = _Run(numbers, partials, outs, (first, (groups * chunks, tiles), threads), end)
        if len(self._runs) >= _KEPT:
            self._runs.clear()
        self._runs[n, rows, groups, pointed] = run
        return run


_int64 = DTYPES["int64"].type


def _shape(devices: Driver, way: str, leaves_rows: bool, groups: int, rows: int, n: int) -> tuple[int, int, int]:
    """Chunks of a group, blocks that share a chunk, and threads of a block."""
    most = max(1, devices.most_chunks // groups)
    if way == "elements":
        return _between(-(-rows * n // (devices.threads * devices.per_thread)), most), 1, devices.threads
    if way == "columns":
        threads = _threads(devices, n if 2 * n > devices.threads else devices.threads)
        lanes = max(1, threads // max(n, 1))  # rows that a block takes side by side
        tiles = _between(-(-n // threads), devices.most_tiles)
        return _between(-(-rows // (_ROWS * lanes)), max(1, most // tiles)), tiles, threads
    threads = _threads(devices, -(-n // 4))
    most = most * (devices.threads // threads)
    return _between(-(-rows // _ROWS) if leaves_rows else rows, most), 1, threads


def _threads(devices: Driver, wanted: int) -> int:
    """Whole warps for so many threads."""
    return _between(-(-wanted // devices.warp), devices.threads // devices.warp) * devices.warp


def _between(wanted: int, most: int) -> int:
    return max(1, min(wanted, most))
