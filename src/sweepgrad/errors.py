"""Every exception that sweepgrad raises on purpose.

Each type derives from `SweepgradError` and from the built-in exception that fits, so both kinds of `except` work.
Messages name the operation or setting in backticks, say what was found, what was needed, and what to do.
"""

import sys
from types import FrameType

_PACKAGE = __name__.rpartition(".")[0]


def is_inside(frame: FrameType) -> bool:
    """Whether the frame is of this package's code."""
    # By the module's name: the file's may lead through links, or be missing. Code handed to `exec` may have no module.
    return f"{frame.f_globals.get('__name__')}.".startswith(f"{_PACKAGE}.")


def site() -> str:
    """File and line of the innermost caller outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_inside(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class SweepgradError(Exception):
    """Base of all exceptions that sweepgrad raises on purpose."""


class GraphConsumedError(SweepgradError, RuntimeError):
    """A backward pass needs a node whose saved values an earlier pass has used up."""


class NotTrackedError(SweepgradError, RuntimeError):
    """A gradient was asked of a tensor that is not part of any graph."""


class VariableError(SweepgradError, RuntimeError):
    """Something that only a variable can do was asked of the result of an operation, or the reverse."""


class ShapeError(SweepgradError, ValueError):
    """Shapes, axes or sizes do not fit together."""


class ArgumentError(SweepgradError, ValueError):
    """An argument or a setting has a value outside what is accepted."""


class DTypeError(SweepgradError, TypeError):
    """An operation was given a type or a dtype that it does not accept."""


class AxisError(SweepgradError, IndexError, ValueError):
    """An axis or an index lies outside the array (also a `ValueError`, as `numpy.exceptions.AxisError` is)."""


class ImmutableError(SweepgradError, TypeError):
    """A tensor's elements were to be written in place."""


class FuseError(SweepgradError, TypeError):
    """A function that was to be fused does what no single kernel can do."""


class OutOfMemoryError(SweepgradError, MemoryError):
    """An operation cannot get the memory it needs, although orphans were swept and the pool of buffers was emptied."""


class AnomalyError(SweepgradError, FloatingPointError):
    """Under `detect_anomaly`, a NaN or an infinity was made, or a backward pass met one."""


class DeviceError(SweepgradError, RuntimeError):
    """Tensors of one operation are on different devices, or a device cannot be used."""


class MissingDependencyError(SweepgradError, ImportError):
    """A package that comes with one of sweepgrad's extras is not installed."""


class AuditError(SweepgradError, AssertionError):
    """The registry's counts differ from what a full mark finds: a fault in sweepgrad, please report it."""
