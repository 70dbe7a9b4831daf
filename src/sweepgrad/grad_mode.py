"""Whether operations are recorded: a flag of each thread, changed by `no_grad` and `enable_grad`."""

import functools
import inspect
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from sweepgrad.errors import DTypeError

P = ParamSpec("P")
R = TypeVar("R")


class _Mode(threading.local):
    enabled = True

    def __init__(self) -> None:
        self.before: list[bool] = []  # what `with` blocks of this thread put back


mode = _Mode()


class _SetMode:
    """Sets the flag within a `with` block or a decorated function, and puts back what was there before.

    What was there is kept with the thread, not here: one object may be entered many times, on any threads.
    """

    _enabled: bool

    def __init__(self, *args: object) -> None:
        if args:
            name = type(self).__name__
            raise DTypeError(f"`{name}` takes no arguments; found {type(args[0]).__name__}: decorate with `@{name}()`")

    def __enter__(self) -> None:
        mode.before.append(mode.enabled)
        mode.enabled = self._enabled

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        mode.enabled = mode.before.pop()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if not callable(function):
            raise DTypeError(f"`{type(self).__name__}` decorates a function; found {type(function).__name__}")
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_kind(function) for is_kind in kinds):
            raise DTypeError(
                f"`{type(self).__name__}` cannot decorate {function!r}, a generator or coroutine, which would "
                "run in its caller's mode between steps; use `with` inside it"
            )

        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
            with self:
                return function(*args, **kwargs)

        return wrapped


class no_grad(_SetMode):  # noqa: N801  # named as in PyTorch, and used like a function
    """Do not record operations, on this thread, in a `with` block or a decorated function.

    Example:
        >>> import sweepgrad as sg
        >>> x = sg.ones((2,), requires_grad=True)
        >>> with sg.no_grad():
        ...     y = x * 2.0
        >>> y.requires_grad
        False
    """

    _enabled = False


class enable_grad(_SetMode):  # noqa: N801
    """Record operations, on this thread, in a `with` block or a decorated function inside a `no_grad`."""

    _enabled = True


def is_grad_enabled() -> bool:
    """Whether operations on this thread are recorded."""
    return mode.enabled


def set_grad_enabled(enabled: bool, /) -> None:
    """Record operations on this thread from now on, or do not: for threads that take over another one's mode.

    A new thread records, whatever the mode of the thread that starts it. Within a function use `no_grad` or
    `enable_grad`, which put back what was there before.

    Raises:
        TypeError: if `enabled` is not a bool.

    Example:
        >>> import sweepgrad as sg
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> with sg.no_grad():
        ...     pool = ThreadPoolExecutor(initializer=sg.set_grad_enabled, initargs=(sg.is_grad_enabled(),))
        >>> pool.submit(sg.is_grad_enabled).result()
        False
        >>> pool.shutdown()
    """
    if not isinstance(enabled, bool):
        raise DTypeError(f"`set_grad_enabled` needs True or False; found {enabled!r}")
    mode.enabled = enabled
