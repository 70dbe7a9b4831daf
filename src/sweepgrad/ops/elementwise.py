"""The elementwise operations, a row each: meaning, derivative, domain, reference and documentation.

In `partials`, `x` or `x1`, `x2` are the inputs and `y` the output. A row without a body is a primitive, which
`kernels.scalars` writes for each target. Names and signatures follow the Python array API standard where it has them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec

import numpy as np

from sweepgrad.arrays import host
from sweepgrad.dtypes import FLOATS, DType
from sweepgrad.elements import dense
from sweepgrad.errors import ArgumentError
from sweepgrad.kernels.scalars import CPU
from sweepgrad.ops.op import DEFERRED, OPS, Accepts, Elementwise, Interval, Kink, Partials, Result, describe
from sweepgrad.ops.short import binary, ternary, unary
from sweepgrad.shortage import again
from sweepgrad.tensor import DeviceTensor, Tensor

P = ParamSpec("P")

_MAKERS: dict[int, Callable[[Elementwise], Callable[..., Any]]] = {1: unary, 2: binary, 3: ternary}


def elementwise(
    *,
    like: str,
    domain: Interval | tuple[Interval, ...] = (-3, 3),
    partials: Partials | None = None,
    result: Result = "float",
    accepts: Accepts = "numeric",
    condition: bool = False,
    whole: bool = False,
    kink: Kink | None = None,
    name: str = "",
) -> Callable[[Callable[P, Any]], Callable[P, Tensor]]:
    """Declare a row; the parameters are the facts that `Elementwise` explains.

    The decorated function is the expression, unless `kernels.scalars` writes an operation of its name for each target.
    """

    def declare(function: Callable[P, Any]) -> Callable[P, Tensor]:
        own, doc, arity = describe(function)
        row = Elementwise(
            name=name or own,
            doc=doc,
            like=like,
            arity=arity,
            scalar=None if (name or own) in CPU else function,
            partials=partials,
            domain=(domain,) * arity if isinstance(domain[0], (int, float)) else domain,
            result=result,
            accepts=accepts,
            condition=condition,
            whole=whole,
            kink=kink,
        )
        row.function = functools.wraps(function)(_MAKERS[arity](row))
        row.function.__doc__ = _documentation(row)
        return row.function

    return declare


def front(inner: Callable[..., Any]) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Make the decorated function what users call in place of `inner`, a row's own, which it checks arguments for."""

    def put(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
        row = OPS[function.__name__]
        assert row.function is inner
        row.function, row.fronted = function, True
        function.__doc__ = inner.__doc__
        return function

    return put


def _documentation(row: Elementwise) -> str:
    """The docstring of a row's function: what it says itself, and what follows from its facts."""
    numbers = {"numeric": "numbers", "any": "numbers or truth values", "bits": "integers or truth values"}[row.accepts]
    dtype = {
        "float": "the inputs' common dtype, float64 for integers",
        "same": "the inputs' common dtype",
        "bool": "bool",
    }[row.result]
    lines = [
        row.doc,
        "",
        f"Args: tensors, arrays or Python numbers of any shape, {numbers}; shapes broadcast, dtypes are promoted as in",
        f"NumPy 2. Returns a tensor of dtype {dtype}. Same values as `{row.like}`.",
    ]
    if row.kink:
        lines.append(f"At {row.kink[0]} a derivative does not exist; taken there is {row.kink[1]}.")
    if not row.differentiable:
        lines.append("The result is never tracked.")
    lines += ["", "Raises:", "    TypeError: for other dtypes and types."]
    if row.arity > 1:
        lines.append("    ValueError: if the shapes do not broadcast.")
    return "\n".join(lines)


# --- comparisons, logic, bits ---------------------------------------------------------------------------------------


@elementwise(like="np.equal(x1, x2)", result="bool", accepts="any")
def equal(x1, x2, /):
    """Whether x1 and x2 are equal."""


@elementwise(like="np.not_equal(x1, x2)", result="bool", accepts="any")
def not_equal(x1, x2, /):
    """Whether x1 and x2 differ."""


@elementwise(like="np.less(x1, x2)", result="bool", accepts="any")
def less(x1, x2, /):
    """Whether x1 is less than x2."""


@elementwise(like="np.less_equal(x1, x2)", result="bool", accepts="any")
def less_equal(x1, x2, /):
    """Whether x1 is less than x2 or equal to it."""


@elementwise(like="np.greater(x1, x2)", result="bool", accepts="any")
def greater(x1, x2, /):
    """Whether x1 is greater than x2."""


@elementwise(like="np.greater_equal(x1, x2)", result="bool", accepts="any")
def greater_equal(x1, x2, /):
    """Whether x1 is greater than x2 or equal to it."""


@elementwise(like="np.logical_and(x1, x2)", result="bool", accepts="any")
def logical_and(x1, x2, /):
    """Whether both are nonzero."""


@elementwise(like="np.logical_or(x1, x2)", result="bool", accepts="any")
def logical_or(x1, x2, /):
    """Whether at least one is nonzero."""


@elementwise(like="np.logical_xor(x1, x2)", result="bool", accepts="any")
def logical_xor(x1, x2, /):
    """Whether exactly one is nonzero."""


@elementwise(like="np.logical_not(x)", result="bool", accepts="any")
def logical_not(x, /):
    """Whether x is zero."""


@elementwise(like="np.bitwise_and(x1, x2)", result="same", accepts="bits")
def bitwise_and(x1, x2, /):
    """Bits set in both; for truth values, logical and."""


@elementwise(like="np.bitwise_or(x1, x2)", result="same", accepts="bits")
def bitwise_or(x1, x2, /):
    """Bits set in at least one; for truth values, logical or."""


@elementwise(like="np.bitwise_xor(x1, x2)", result="same", accepts="bits")
def bitwise_xor(x1, x2, /):
    """Bits set in exactly one; for truth values, exclusive or."""


@elementwise(like="np.bitwise_invert(x)", result="same", accepts="bits")
def bitwise_invert(x, /):
    """Every bit inverted; for truth values, logical not."""


@elementwise(like="np.isnan(x)", result="bool")
def isnan(x, /):
    """Whether x is NaN."""


@elementwise(like="np.isinf(x)", result="bool")
def isinf(x, /):
    """Whether x is infinite."""


@elementwise(like="np.isfinite(x)", result="bool")
def isfinite(x, /):
    """Whether x is neither infinite nor NaN."""


@elementwise(
    like="np.where(x1, x2, x3)",
    result="same",
    accepts="any",
    condition=True,
    partials=lambda c, x1, x2, y: (0, where(c, 1, 0), where(c, 0, 1)),
)
def where(condition, x1, x2, /):
    """x1 where `condition` holds, else x2."""


# --- arithmetic -----------------------------------------------------------------------------------------------------


@elementwise(like="x1 + x2", result="same", partials=lambda x1, x2, y: (1, 1))
def add(x1, x2, /):
    """Sum."""


@elementwise(like="x1 - x2", result="same", partials=lambda x1, x2, y: (1, -1))
def subtract(x1, x2, /):
    """Difference."""


@elementwise(like="x1 * x2", result="same", partials=lambda x1, x2, y: (x2, x1))
def multiply(x1, x2, /):
    """Product."""


@elementwise(like="x1 / x2", domain=((-3, 3), (0.5, 3)), partials=lambda x1, x2, y: (1 / x2, -y / x2))
def divide(x1, x2, /):
    """Quotient."""


@elementwise(like="x1 // x2", result="same", domain=((0.1, 0.9), (1, 3)), partials=lambda x1, x2, y: (0, 0))
def floor_divide(x1, x2, /):
    """Quotient rounded down; its derivative is 0 wherever it exists."""


@elementwise(
    like="x1 % x2",
    result="same",
    domain=((0.1, 0.9), (1, 3)),
    partials=lambda x1, x2, y: (1, -floor_divide(x1, x2)),
)
def remainder(x1, x2, /):
    """Remainder of `floor_divide`, with the sign of x2."""


def _power_of_one_less(x1, x2):
    """x1 ** (x2 - 1); of an x2 so large that x2 - 1 is not exact, hence even, with the sign of an odd power."""
    flipped = logical_and(less(x1, 0), not_equal(x2 - (x2 - 1), 1))
    return where(flipped, -1, 1) * pow(x1, x2 - 1)


@elementwise(
    name="pow",
    like="x1 ** x2",
    result="same",
    domain=((0.3, 3), (-2, 3)),
    partials=lambda x1, x2, y: (
        where(equal(x2, 0), 0, x2 * _power_of_one_less(x1, x2)),
        where(equal(x1, 0), 0, y * log(where(equal(x1, 0), 1, x1))),
    ),
)
def _pow(x1, x2, /):
    """x1 raised to the power x2; the derivative by x2 at x1 = 0 is taken as 0."""


@elementwise(like="-x", result="same", partials=lambda x, y: (-1,))
def negative(x, /):
    """x with the other sign."""


@elementwise(like="+x", result="same", partials=lambda x, y: (1,))
def positive(x, /):
    """x itself."""


@elementwise(like="np.square(x)", result="same", partials=lambda x, y: (2 * x,))
def square(x, /):
    """x times x."""
    return x * x


@elementwise(like="1 / x", domain=(0.3, 3), partials=lambda x, y: (-(y * y),))
def reciprocal(x, /):
    """1 divided by x."""
    return 1 / x


@elementwise(like="np.abs(x)", result="same", partials=lambda x, y: (sign(x),), kink=((0,), (0,)))
def abs(x, /):
    """Magnitude of x."""


@elementwise(like="np.sign(x)", result="same", domain=(0.1, 3), partials=lambda x, y: (0,), kink=((0,), (0,)))
def sign(x, /):
    """-1, 0 or 1, as x is negative, zero or positive."""
    return where(x > 0, 1, where(x < 0, -1, x))


@elementwise(
    like="np.maximum(x1, x2)",
    result="same",
    partials=lambda x1, x2, y: (
        where(x1 > x2, 1, where(equal(x1, x2), 0.5, 0)),
        where(x2 > x1, 1, where(equal(x1, x2), 0.5, 0)),
    ),
    kink=((1, 1), (0.5, 0.5)),
)
def maximum(x1, x2, /):
    """The greater of the two, NaN if either is; where they are equal each has half of the derivative."""
    return where((x1 >= x2) | not_equal(x1, x1), x1, x2)


@elementwise(
    like="np.minimum(x1, x2)",
    result="same",
    partials=lambda x1, x2, y: (
        where(x1 < x2, 1, where(equal(x1, x2), 0.5, 0)),
        where(x2 < x1, 1, where(equal(x1, x2), 0.5, 0)),
    ),
    kink=((1, 1), (0.5, 0.5)),
)
def minimum(x1, x2, /):
    """The lesser of the two, NaN if either is; where they are equal each has half of the derivative."""
    return where((x1 <= x2) | not_equal(x1, x1), x1, x2)


@elementwise(
    name="clip",
    like="np.clip(x1, x2, x3)",
    result="same",
    domain=((-3, 3), (-2, -1), (1, 2)),
    partials=lambda x, low, high, y: (
        where((x >= low) & (x <= high), 1, 0),
        where((x < low) & (low <= high), 1, 0),
        where((x > high) | ((x < low) & (low > high)), 1, 0),
    ),
    kink=((1, 1, 2), (1, 0, 0)),
)
def _clip(x, min, max, /):
    """x limited to the interval from `min` to `max`; a limit that is None does not limit."""
    raised = where((x < min) | not_equal(min, min), min, x)
    return where((raised > max) | not_equal(max, max), max, raised)


# --- rounding -------------------------------------------------------------------------------------------------------


@elementwise(like="np.floor(x)", result="same", whole=True, domain=(0.1, 0.9), partials=lambda x, y: (0,))
def floor(x, /):
    """Greatest integer that is not greater than x."""


@elementwise(like="np.ceil(x)", result="same", whole=True, domain=(0.1, 0.9), partials=lambda x, y: (0,))
def ceil(x, /):
    """Least integer that is not less than x."""


@elementwise(like="np.trunc(x)", result="same", whole=True, domain=(0.1, 0.9), partials=lambda x, y: (0,))
def trunc(x, /):
    """x without its fraction."""


@elementwise(like="np.round(x)", result="same", whole=True, domain=(0.6, 1.4), partials=lambda x, y: (0,))
def round(x, /):
    """Nearest integer, the even one if two are equally near."""


# --- powers, exponentials, logarithms -------------------------------------------------------------------------------


@elementwise(like="np.sqrt(x)", domain=(0.3, 4), partials=lambda x, y: (0.5 / y,))
def sqrt(x, /):
    """Square root."""


@elementwise(like="np.exp(x)", partials=lambda x, y: (y,))
def exp(x, /):
    """Exponential."""


@elementwise(like="np.expm1(x)", partials=lambda x, y: (y + 1,))
def expm1(x, /):
    """exp(x) - 1, precise near 0."""


@elementwise(like="np.log(x)", domain=(0.2, 4), partials=lambda x, y: (1 / x,))
def log(x, /):
    """Natural logarithm."""


@elementwise(like="np.log1p(x)", domain=(-0.7, 3), partials=lambda x, y: (1 / (1 + x),))
def log1p(x, /):
    """log(1 + x), precise near 0."""


@elementwise(like="np.log2(x)", domain=(0.2, 4), partials=lambda x, y: (1 / math.log(2) / x,))
def log2(x, /):
    """Logarithm to base 2."""


@elementwise(like="np.log10(x)", domain=(0.2, 4), partials=lambda x, y: (1 / math.log(10) / x,))
def log10(x, /):
    """Logarithm to base 10."""


@elementwise(
    like="np.logaddexp(x1, x2)",
    partials=lambda x1, x2, y: (sigmoid(x1 - x2), sigmoid(x2 - x1)),
)
def logaddexp(x1, x2, /):
    """log(exp(x1) + exp(x2)), without overflow."""
    return where(equal(x1, x2), x1 + math.log(2), maximum(x1, x2) + log1p(exp(-abs(x1 - x2))))


# --- trigonometric and hyperbolic functions -------------------------------------------------------------------------


@elementwise(like="np.sin(x)", partials=lambda x, y: (cos(x),))
def sin(x, /):
    """Sine of x in radians."""


@elementwise(like="np.cos(x)", partials=lambda x, y: (-sin(x),))
def cos(x, /):
    """Cosine of x in radians."""


@elementwise(like="np.tan(x)", domain=(-1.2, 1.2), partials=lambda x, y: (1 + y * y,))
def tan(x, /):
    """Tangent of x in radians."""


@elementwise(like="np.arcsin(x)", domain=(-0.9, 0.9), partials=lambda x, y: (1 / sqrt((1 - x) * (1 + x)),))
def asin(x, /):
    """Inverse sine, in radians."""


@elementwise(like="np.arccos(x)", domain=(-0.9, 0.9), partials=lambda x, y: (-1 / sqrt((1 - x) * (1 + x)),))
def acos(x, /):
    """Inverse cosine, in radians."""


@elementwise(like="np.arctan(x)", partials=lambda x, y: (1 / (1 + x * x),))
def atan(x, /):
    """Inverse tangent, in radians."""


def _distance(x1, x2):
    """sqrt(x1**2 + x2**2), but 1 where that is 0."""
    distance = hypot(x1, x2)
    return where(equal(distance, 0), 1, distance)


@elementwise(
    like="np.arctan2(x1, x2)",
    domain=((-3, 3), (0.3, 3)),
    # Divided by the distance twice: its square would overflow and underflow.
    partials=lambda x1, x2, y: (
        x2 / _distance(x1, x2) / _distance(x1, x2),
        -x1 / _distance(x1, x2) / _distance(x1, x2),
    ),
    kink=((0, 0), (0, 0)),
)
def atan2(x1, x2, /):
    """Angle in radians between the first axis and the point (x2, x1)."""


@elementwise(
    like="np.hypot(x1, x2)",
    domain=(0.3, 3),
    partials=lambda x1, x2, y: (x1 / where(equal(y, 0), 1, y), x2 / where(equal(y, 0), 1, y)),
    kink=((0, 0), (0, 0)),
)
def hypot(x1, x2, /):
    """sqrt(x1**2 + x2**2), without overflow."""


@elementwise(like="np.sinh(x)", partials=lambda x, y: (cosh(x),))
def sinh(x, /):
    """Hyperbolic sine."""


@elementwise(like="np.cosh(x)", partials=lambda x, y: (sinh(x),))
def cosh(x, /):
    """Hyperbolic cosine."""


@elementwise(like="np.tanh(x)", partials=lambda x, y: (1 - y * y,))
def tanh(x, /):
    """Hyperbolic tangent."""


@elementwise(like="np.arcsinh(x)", partials=lambda x, y: (1 / hypot(x, 1),))
def asinh(x, /):
    """Inverse hyperbolic sine."""


@elementwise(
    like="np.arccosh(x)",
    domain=(1.2, 4),
    partials=lambda x, y: (1 / (sqrt(x - 1) * sqrt(x + 1)),),  # the root of the product would overflow
)
def acosh(x, /):
    """Inverse hyperbolic cosine."""


@elementwise(like="np.arctanh(x)", domain=(-0.8, 0.8), partials=lambda x, y: (1 / ((1 - x) * (1 + x)),))
def atanh(x, /):
    """Inverse hyperbolic tangent."""


# --- special functions and activations ------------------------------------------------------------------------------


@elementwise(like="special.erf(x)", partials=lambda x, y: (2 / math.sqrt(math.pi) * exp(-x * x),))
def erf(x, /):
    """Error function."""


@elementwise(like="special.erfc(x)", partials=lambda x, y: (-2 / math.sqrt(math.pi) * exp(-x * x),))
def erfc(x, /):
    """1 - erf(x), precise for large x."""


@elementwise(like="special.expit(x)", partials=lambda x, y: (y * (1 - y),))
def sigmoid(x, /):
    """Logistic function, 1 / (1 + exp(-x))."""


@elementwise(like="np.maximum(x, 0)", result="same", partials=lambda x, y: (where(x > 0, 1, 0),), kink=((0,), (0,)))
def relu(x, /):
    """x where it is positive, else 0; the derivative at 0 is 0."""
    return where((x > 0) | not_equal(x, x), x, 0)


@elementwise(like="np.logaddexp(x, 0)", partials=lambda x, y: (sigmoid(x),))
def softplus(x, /):
    """log(1 + exp(x)), without overflow."""


@elementwise(like="x * special.ndtr(x)")
def gelu(x, /):
    """x times the normal distribution's cumulative probability at x (Gaussian error linear unit, exact form).

    Source: Hendrycks and Gimpel, arXiv:1606.08415.
    """
    return 0.5 * x * erfc(-math.sqrt(0.5) * x)


# --- signatures beyond the row's ------------------------------------------------------------------------------------


@front(_clip)
def clip(x: Any, /, min: Any = None, max: Any = None) -> Tensor:  # noqa: D103  # the row's docstring
    low, high = _bounds(x, min, max) if min is None or max is None else (min, max)
    return _clip(x, low if min is None else min, high if max is None else max)


def _bounds(*values: Any) -> tuple[float, float]:
    """The least and the greatest number of the dtype to which `values` are promoted."""
    known = [v for v in values if isinstance(v, (Tensor, np.ndarray, np.generic, bool, int, float))]
    dtype: DType = np.result_type(*(getattr(v, "dtype", v) for v in known)) if known else FLOATS[-1]
    return (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.kind in "iu" else (-math.inf, math.inf)


@front(_pow)
def pow(x1: Any, x2: Any, /) -> Tensor:  # noqa: D103  # the row's docstring
    # The powers that have an operation of their own: exact, and without a call into the mathematical library.
    if type(x2) in (int, float) and isinstance(x1, (Tensor, np.ndarray)) and x1.dtype.kind == "f":
        own = {2: square, 0.5: sqrt, 1: positive, -1: reciprocal}.get(x2)
        if own is not None:
            return own(x1)
    try:
        _refuse_negative_exponents(x1, x2)
    except MemoryError as error:
        again(error, "pow", _refuse_negative_exponents, x1, x2)
    return _pow(x1, x2)


def _refuse_negative_exponents(x1: Any, x2: Any) -> None:
    if any(type(x) in DEFERRED and type(x) is not DeviceTensor for x in (x1, x2)):
        return
    base, exponent = (dense(x) if isinstance(x, Tensor) else np.asarray(x) for x in (x1, x2))
    if base.dtype.kind in "biu" and exponent.dtype.kind in "iu" and host(exponent).min(initial=0) < 0:
        raise ArgumentError("`pow` of integers to a negative integer power: convert the base to a float dtype first")
