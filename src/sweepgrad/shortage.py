"""What is done when memory runs short: all that can be freed is freed, and what needed it is called once more.

Guarantees
- It costs nothing while there is memory: around what asks for it there is a `try`, which is free in Python until
  something is raised.
- What the failed attempt had computed dies before the second one; so do all orphans, those in reference cycles too, and
  what is idle in the pool, and on GPUs.
- There is one second attempt, of the innermost function that can be called again: one that has changed nothing before
  it has all memory that it needs. What then fails raises OutOfMemoryError, and everything is as it was.
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sweepgrad import graph
from sweepgrad.arrays import empty_idle
from sweepgrad.errors import OutOfMemoryError
from sweepgrad.graph import process, report
from sweepgrad.graph.report import count, format_bytes
from sweepgrad.kernels.buffers import pool

P = ParamSpec("P")
R = TypeVar("R")

_NAMED = 3
"""Operations that the error names as those that hold most."""


class _State(threading.local):
    trying = False  # for the second time


_state = _State()


def again(error: MemoryError, op: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of `function`, called once more: for an `except` clause that caught `error` in the operation `op`.

    Raises:
        MemoryError: if there is not enough memory even now (`OutOfMemoryError`).
    """
    if _state.trying or isinstance(error, OutOfMemoryError):
        try:
            raise error
        finally:
            del error  # whose traceback refers to this frame: a cycle would keep what the frames below it made
    error.__traceback__ = None  # whose frames hold what was computed so far
    try:
        _state.trying = True
        _free()
        return function(*args, **kwargs)
    except MemoryError as second:
        second.__traceback__ = None
        raise OutOfMemoryError(_message(op, second)) from None
    finally:
        _state.trying = False


def attempt(op: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of `function`, called once more if memory runs short: as `again`, where a further call matters not."""
    try:
        return function(*args, **kwargs)
    except MemoryError as error:
        return again(error, op, function, *args, **kwargs)


def _free() -> None:
    """Sweep orphans and empty the pool."""
    try:
        pool.clear()  # first, as a sweep needs some memory itself
        graph.sweep(collect_cycles=True)
        pool.clear()
        empty_idle()
    except MemoryError:
        pass  # the second attempt finds what has been freed by then


def _message(op: str, error: MemoryError) -> str:
    """What to tell, as far as there is memory for it."""
    text = f"`{op}` cannot get {_wanted(error)}, although orphans were swept and the pools were emptied"
    try:
        return (
            f"{text}. Graph: {report.stats(process.registry)}{_holders()}. Pool: {pool.stats()}. Drop tensors that are "
            "no longer needed, use `no_grad` where no gradient is wanted, or compute in smaller pieces"
        )
    except MemoryError:
        return text


def _wanted(error: MemoryError) -> str:
    """The bytes that were asked for; NumPy's own error tells shape and dtype."""
    shape, dtype = getattr(error, "shape", None), getattr(error, "dtype", None)
    if shape is None or dtype is None:
        return "memory"
    size = dtype.itemsize
    for length in shape:
        size *= length
    return format_bytes(size)


def _holders() -> str:
    """Which operations have saved most."""
    nodes: Counter[str] = Counter()
    saved: Counter[str] = Counter()
    with process.registry.lock:
        registered = process.registry.snapshot()
    for node in registered:
        nodes[node.rule.name] += 1
        saved[node.rule.name] += node.nbytes
    most = [
        f"`{name}` ({format_bytes(nbytes)} in {count(nodes[name], 'node')})"
        for name, nbytes in saved.most_common(_NAMED)
        if nbytes
    ]
    return f"; most is saved by {', '.join(most)}" if most else ""
