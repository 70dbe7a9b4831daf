"""Every exception that sweepgrad raises on purpose.

Each type derives from `SweepgradError` and from the built-in exception that fits, so both kinds of `except` work.
Messages name the operation or setting in backticks, say what was found, what was needed, and what to do.
"""


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


class AuditError(SweepgradError, AssertionError):
    """The registry's counts differ from what a full mark finds: a fault in sweepgrad, please report it."""
