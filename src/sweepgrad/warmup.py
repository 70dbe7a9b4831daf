"""Compiles the common kernels ahead, by calling the public operations as programs call them.

What is compiled is whatever kernels the calls here need. A *task* is one operation, or one common use of several, in
one dtype. A task whose kernels are in the cache only loads them.
"""

import math
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import numpy as np

import sweepgrad as sg
from sweepgrad.config import usable_cores
from sweepgrad.kernels.cpu import COUNTS
from sweepgrad.ops.op import OPS, Elementwise, Op
from sweepgrad.tensor import Tensor

SHAPES = ((4, 6), (512, 1024))
"""A small one and one that is large enough for every other way of running a loop."""

Task = tuple[str, str]
"""The name of an operation or a use, and a dtype."""

_ARITHMETIC = ("add", "subtract", "multiply", "divide")
"""Operations that are common in every form: broadcast, with a number first, with either input tracked."""


def tasks(dtypes: Sequence[str]) -> list[Task]:
    """All tasks for `dtypes`, those that others build on first."""
    rows = [name for name, op in OPS.items() if isinstance(op, Elementwise) and op.accepts != "bits"]
    return [(name, dtype) for dtype in dtypes for name in (*_USES, *rows)]


@dataclass(frozen=True)
class Outcome:
    """What became of a task: the kernels that it compiled, those of them that could not be kept, those it loaded."""

    task: Task
    compiled: int = 0
    lost: int = 0
    loaded: int = 0
    error: str | None = None


def perform(task: Task) -> Outcome:
    """Make the calls of one task."""
    name, dtype = task
    before = dict(COUNTS)
    error = None
    try:
        for shape in SHAPES:
            if name in _USES:
                _USES[name](shape, dtype)
            else:
                _elementwise(OPS[name], shape, dtype)
    except Exception as fault:  # the other tasks are none the worse for it
        error = f"{type(fault).__name__}: {fault}"
    return Outcome(task, **{key: count - before[key] for key, count in COUNTS.items()}, error=error)


def perform_all(todo: Sequence[Task], jobs: int) -> Iterator[Outcome]:
    """Perform tasks in `jobs` processes, and tell of each as it is done."""
    if jobs == 1:
        yield from map(perform, todo)
        return
    # Not forked: threads may be running here, and Numba in the middle of something. Ctrl-C is for this process.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        futures = [pool.submit(perform, task) for task in todo]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            # Entries of the cache are made whole or not at all, so nothing is lost but the kernels under way.
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def default_jobs() -> int:
    """One process for each processor that this one may use, but no more than 8, as each takes some 200 MB."""
    return min(8, usable_cores())


# --- elementwise rows -----------------------------------------------------------------------------------------------


def _elementwise(row: Op, shape: tuple[int, ...], dtype: str) -> None:
    assert isinstance(row, Elementwise)
    function = row.function
    first = int(row.condition)
    low = [max(interval[0], -4.0) for interval in row.domain]
    high = [min(interval[1], 4.0) for interval in row.domain]
    numbers = [0.7 * low + 0.3 * high for low, high in zip(low, high, strict=True)]

    def tensor(position: int, *, tracked: bool = True, shape: tuple[int, ...] = shape) -> Tensor:
        if position < first:
            return sg.full(shape, True)
        return _spread(shape, dtype, low[position], high[position], tracked=tracked and row.differentiable)

    def use(*args: Any) -> None:
        _backward(function(*args))

    positions = range(row.arity)
    use(*map(tensor, positions))
    if row.arity > 1 + first:
        use(*[tensor(k) if k <= first else numbers[k] for k in positions])
    if row.name in _ARITHMETIC:
        use(numbers[0], tensor(1))
        for other in (shape, shape[1:], (shape[0], 1)):
            use(tensor(0), tensor(1, shape=other))
            use(tensor(0), tensor(1, shape=other, tracked=False))
            use(tensor(0, tracked=False), tensor(1, shape=other))


def _spread(
    shape: tuple[int, ...], dtype: str, low: float = 0.75, high: float = 1.25, *, tracked: bool = True
) -> Tensor:
    """A tensor of numbers between `low` and `high`."""
    values = np.linspace(low, high, math.prod(shape) + 2)[1:-1].reshape(shape)
    return sg.asarray(values, dtype=dtype, requires_grad=tracked)


def _backward(result: Tensor) -> None:
    """Compute `result`, and run backward through it if it is tracked."""
    if result.requires_grad:
        result.backward(sg.full(result.shape, 0.5, dtype=result.dtype))


# --- everything else ------------------------------------------------------------------------------------------------


def _reduction(name: str) -> Callable[[tuple[int, ...], str], None]:
    def use(shape: tuple[int, ...], dtype: str) -> None:
        for axis in (None, -1, 0):
            _backward(getattr(sg, name)(_spread(shape, dtype), axis=axis))

    return use


def _layer(shape: tuple[int, ...], dtype: str) -> None:
    """A layer with a bias and a non-linearity, and the loss of a classifier."""
    weights, bias = _spread((shape[1], 8), dtype), _spread((8,), dtype)
    scores = sg.relu(_spread(shape, dtype, tracked=False) @ weights + bias)
    labels = np.zeros(shape[0], "int64")
    (-sg.log_softmax(scores)[np.arange(shape[0]), labels].mean()).backward()


def _regression(shape: tuple[int, ...], dtype: str) -> None:
    """The loss of a regression with a penalty, and data brought to one scale."""
    x, target = _spread(shape, dtype), _spread(shape, dtype, 0.0, tracked=False)
    (sg.mean(sg.square(x - target)) + 1e-4 * sg.sqrt(sg.sum(x * x))).backward()
    _backward((x - sg.mean(x, axis=0)) / sg.std(x, axis=0))


def _updates(shape: tuple[int, ...], dtype: str) -> None:
    """The optimisers, and a second backward pass, which adds to the first one's gradient."""
    for optimizer in (sg.optim.SGD, sg.optim.Adam, sg.optim.AdamW):
        x = _spread(shape, dtype)
        for _ in range(2):
            sg.sum(x * x).backward()
        optimizer([x], lr=1e-3).step()


_USES: dict[str, Callable[[tuple[int, ...], str], None]] = {
    "layers and losses": _layer,
    "regressions": _regression,
    "updates": _updates,
    **{
        name: _reduction(name)
        for name in ("sum", "mean", "max", "min", "prod", "var", "std", "logsumexp", "softmax", "log_softmax")
    },
}
"""What has no elementwise row, and common combinations."""
