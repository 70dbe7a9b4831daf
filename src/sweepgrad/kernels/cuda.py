"""Kernels on NVIDIA GPUs: from the source of `kernels.grid` to code, and its launches. Imported where first needed.

Sizes alone say how many blocks and threads there are, so a result has the same bits in every run.
"""

import functools
import math
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from sweepgrad.errors import MissingDependencyError
from sweepgrad.kernels.emit import Slot
from sweepgrad.kernels.expr import Expr
from sweepgrad.kernels.grid import Grid, grid

try:
    # Else what is imported next is Numba's own, which is no longer developed.
    import numba_cuda  # noqa: F401
    from numba import cuda, types
    from numba.core import config
except ImportError as error:
    raise MissingDependencyError(
        'kernels on a GPU need NVIDIA\'s numba-cuda: `pip install "sweepgrad[cu12]"`, or `[cu13]` for CUDA 13'
    ) from error

SIMULATED: bool = config.ENABLE_CUDASIM  # type: ignore[attr-defined]
"""Whether `NUMBA_ENABLE_CUDASIM` was set: kernels then run as Python code, on few threads that act as a GPU's."""

_WARP = 4 if SIMULATED else 32
_THREADS = 2 * _WARP if SIMULATED else 256
_PER_THREAD = 8
"""Elements that a thread takes, where there are so many."""

_MOST_CHUNKS = 2 if SIMULATED else 1024
"""Of a group: each leaves a partial result, and one block combines them."""

_ROWS = 64
"""Rows that a thread adds up in a column, where there are so many."""

_MOST_TILES = 2 if SIMULATED else 65535
"""Blocks along the second axis of a grid, on any GPU."""


class Launcher:
    """The kernels of one set of expressions, compiled when first needed: what `ops.loop.Loop` is on the CPU."""

    def __init__(
        self,
        outputs: Sequence[tuple[Expr, Slot]],
        inputs: Sequence[Slot],
        dtype: str,
    ) -> None:
        self.grid = grid(outputs, inputs, dtype, _WARP)
        self.dtype = dtype
        self._kernels: tuple[Any, Any] | None = None

    def over(
        self, inputs: Sequence[Any], n: int, *, rows: int = 1, groups: int = 1, outs: Sequence[Any] = ()
    ) -> Sequence[Any]:
        """The outputs, flat arrays on the device: `groups` times `rows` rows of `n` elements.

        `outs` are arrays to be written to instead of new ones.
        """
        sizes = (groups, rows, n)
        lengths = {"v": groups * rows * n, "c": groups * rows, "r": groups * n, "s": groups}
        given = list(outs) or [cuda.device_array(lengths[kind], dtype) for kind, dtype in self.grid.outputs]
        if not any(lengths[kind] for kind, _ in self.grid.outputs):
            return given
        chunks, tiles, threads = _shape(self.grid.way, any(row for _, row in self.grid.partials), *sizes)
        partials = [
            cuda.device_array(groups * chunks * (n if row else tiles), dtype) for dtype, row in self.grid.partials
        ]
        numbers = (np.dtype(dtype).type if kind == "s" else None for kind, dtype in self.grid.inputs)
        own = [x if number is None else number(x) for x, number in zip(inputs, numbers, strict=True)]
        arguments = (*own, *sizes, chunks, *partials, *given)
        first, last = self._kernels = self._kernels or self._compiled()
        first[(groups * chunks, tiles), threads](*arguments)
        if last is not None:
            threads = _threads(max(n, chunks * tiles))
            last[(groups, _between(-(-n // threads), _MOST_TILES) if self.grid.tiled else 1), threads](*arguments)
        return given

    def _compiled(self) -> tuple[Any, Any]:
        jit: Any = cuda.jit
        texts = (self.grid.first, self.grid.last)
        first, last = (text and jit(function_of(text, self.dtype)) for text in texts)
        return first, last


def function_of(source: str, dtype: str) -> Any:
    """The Python function that a kernel is compiled from."""
    scope = {"__name__": "sweepgrad_cuda", "np": np, "cuda": cuda, "m": _mathematics(), "rint": _rint(dtype)}
    scope["T"] = scope["A"] = getattr(np, "bool_" if dtype == "bool" else dtype)
    exec(compile(source, "<sweepgrad_cuda>", "exec"), scope)
    return scope["kernel"]


def signature_of(made: Grid) -> tuple[Any, ...]:
    """The types of both kernels' arguments."""
    inputs = [_scalar(dtype) if kind == "s" else _array(dtype) for kind, dtype in made.inputs]
    partials = [_array(dtype) for dtype, _ in made.partials]
    return (*inputs, *[types.int64] * 4, *partials, *[_array(dtype) for _, dtype in made.outputs])


def ptx(made: Grid, dtype: str, capability: tuple[int, int]) -> list[str]:
    """The assembly of a nest's kernels for GPUs of a compute capability; needs no GPU."""
    compile_ptx: Any = cuda.compile_ptx  # type: ignore[attr-defined]
    return [
        compile_ptx(function_of(source, dtype), signature_of(made), cc=capability)[0]
        for source in (made.first, made.last)
        if source is not None
    ]


def _scalar(dtype: str) -> Any:
    return types.boolean if dtype == "bool" else getattr(types, dtype)


def _array(dtype: str) -> Any:
    return types.Array(_scalar(dtype), 1, "C")


@functools.lru_cache(maxsize=1024)
def _shape(way: str, leaves_rows: bool, groups: int, rows: int, n: int) -> tuple[int, int, int]:
    """Chunks of a group, blocks that share a chunk, and threads of a block."""
    most = max(1, _MOST_CHUNKS // groups)
    if way == "elements":
        return _between(-(-rows * n // (_THREADS * _PER_THREAD)), most), 1, _THREADS
    if way == "columns":
        threads = _threads(min(n, _THREADS))
        tiles = _between(-(-n // threads), _MOST_TILES)
        return _between(-(-rows // _ROWS), max(1, most // tiles)), tiles, threads
    threads = _threads(-(-n // 4))
    return _between(-(-rows // _ROWS) if leaves_rows else rows, most * (_THREADS // threads)), 1, threads


def _threads(wanted: int) -> int:
    """Whole warps for so many threads."""
    return _between(-(-wanted // _WARP), _THREADS // _WARP) * _WARP


def _between(wanted: int, most: int) -> int:
    return max(1, min(wanted, most))


# --- the simulator ----------------------------------------------------------------------------------------------------


def _rint(dtype: str) -> Any:
    if SIMULATED:
        return np.rint
    from numba.cuda import libdevice

    return libdevice.rintf if dtype == "float32" else libdevice.rint


@functools.cache
def _mathematics() -> Any:
    """The module `math`; for the simulator functions that keep float32, and raise nothing."""
    if not SIMULATED:
        return math
    _teach_simulator()
    names = "isnan isinf isfinite floor ceil trunc sqrt exp expm1 log log1p log2 log10 sin cos tan sinh cosh tanh"
    names += " hypot fmod copysign"
    found = {name: getattr(np, name) for name in names.split()}
    found |= {f"a{name}": getattr(np, f"arc{name}") for name in ["sin", "cos", "tan", "sinh", "cosh", "tanh", "tan2"]}
    found |= {name: functools.partial(_typed, getattr(math, name)) for name in ("erf", "erfc")}
    return SimpleNamespace(pow=np.power, **found)


def _typed(function: Any, x: Any) -> Any:
    return type(x)(function(x))


def _teach_simulator() -> None:
    """Give it shuffles between the threads of a warp, which it lacks, and one shared array for all who ask at once."""
    from numba.cuda.simulator import kernelapi

    module: Any = kernelapi.FakeCUDAModule
    shared: Any = kernelapi.FakeCUDAShared
    lock = threading.Lock()

    def allocate_once(self: Any, shape: Any, dtype: Any) -> Any:
        with lock:
            arrays = vars(self).setdefault("_by_dtype", {})
            if dtype not in arrays:
                arrays[dtype] = np.empty(shape, dtype)
            return arrays[dtype]

    def exchange(self: Any, value: Any, distance: int | None, source: int) -> Any:
        own = self.threadIdx.x
        lanes = vars(self).setdefault("_lanes", {})
        lanes[own] = value
        self.syncthreads()
        found = lanes.get(own + distance if distance is not None else own // _WARP * _WARP + source, value)
        self.syncthreads()
        return found

    shared.array = allocate_once
    module.shfl_down_sync = lambda self, mask, value, distance: exchange(self, value, distance, 0)
    module.shfl_sync = lambda self, mask, value, source: exchange(self, value, None, source)
