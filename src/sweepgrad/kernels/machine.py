"""A language of scalar values for writing mathematical functions that LLVM's loop vectoriser can take.

A function over `V` values runs once for each compilation and writes straight-line LLVM IR: no branch, no call into a
library, no permission to reassociate or contract. So a loop that calls it becomes packed instructions, and an element's
result is the same bits in a vector lane, in the remainder loop and in a scalar call (of a NaN, only that it is one).
What is written as `fma` is one rounding on every machine; without the instruction it is a slow library call.

Imports Numba and llvmlite: only generated kernel source and the functions it calls may import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: its width and the numbers that bit tricks need."""

    bits: int
    mantissa: int
    bias: int

    @property
    def magic(self) -> float:
        """1.5 * 2**mantissa: added to a small number, it rounds it and leaves the integer in the low bits."""
        return 1.5 * 2.0**self.mantissa

    @property
    def smallest(self) -> float:
        """The smallest normal number."""
        return 2.0 ** (1 - self.bias)


F32 = Format(bits=32, mantissa=23, bias=127)
F64 = Format(bits=64, mantissa=52, bias=1023)

_FLOATS: dict[int, Any] = {32: ir.FloatType(), 64: ir.DoubleType()}
_INTEGERS: dict[int, Any] = {32: ir.IntType(32), 64: ir.IntType(64)}
_FORMATS = {_FLOATS[32]: F32, _FLOATS[64]: F64}

Number = float | int


class V:
    """One value in the function being written: a float, an integer of the same width, or a mask (a comparison).

    Python numbers beside it become constants of its type. Comparisons are false for NaN, except `!=`.
    """

    __slots__ = ("builder", "value")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder = builder
        self.value = value

    @property
    def type(self) -> Any:
        """The LLVM type."""
        return self.value.type

    @property
    def format(self) -> Format:
        """The floating-point format of this value."""
        return _FORMATS[self.type]

    def of(self, value: Any) -> V:
        """Another value of the same function."""
        return V(self.builder, value)

    def like(self, other: V | Number) -> V:
        """`other`, which is a constant of this value's type if it is a Python number."""
        return other if isinstance(other, V) else self.of(ir.Constant(self.type, other))

    def _apply(self, floating: str, integer: str, other: V | Number) -> V:
        name = floating if self.type in _FORMATS else integer
        return self.of(getattr(self.builder, name)(self.value, self.like(other).value))

    def _compare(self, symbol: str, other: V | Number) -> V:
        if self.type not in _FORMATS:
            return self.of(self.builder.icmp_signed(symbol, self.value, self.like(other).value))
        compare = self.builder.fcmp_unordered if symbol == "!=" else self.builder.fcmp_ordered
        return self.of(compare(symbol, self.value, self.like(other).value))

    # fmt: off
    def __add__(self, other: V | Number) -> V: return self._apply("fadd", "add", other)
    def __sub__(self, other: V | Number) -> V: return self._apply("fsub", "sub", other)
    def __mul__(self, other: V | Number) -> V: return self._apply("fmul", "mul", other)
    def __truediv__(self, other: V | Number) -> V: return self._apply("fdiv", "", other)
    def __radd__(self, other: Number) -> V: return self.like(other) + self
    def __rsub__(self, other: Number) -> V: return self.like(other) - self
    def __rmul__(self, other: Number) -> V: return self.like(other) * self
    def __rtruediv__(self, other: Number) -> V: return self.like(other) / self
    def __neg__(self) -> V: return self.of(self.builder.fneg(self.value))
    def __and__(self, other: V | Number) -> V: return self._apply("", "and_", other)
    def __or__(self, other: V | Number) -> V: return self._apply("", "or_", other)
    def __xor__(self, other: V | Number) -> V: return self._apply("", "xor", other)
    def __lshift__(self, other: V | Number) -> V: return self._apply("", "shl", other)
    def __rshift__(self, other: V | Number) -> V: return self._apply("", "lshr", other)
    def __invert__(self) -> V: return self.of(self.builder.not_(self.value))
    def __lt__(self, other: V | Number) -> V: return self._compare("<", other)
    def __le__(self, other: V | Number) -> V: return self._compare("<=", other)
    def __gt__(self, other: V | Number) -> V: return self._compare(">", other)
    def __ge__(self, other: V | Number) -> V: return self._compare(">=", other)
    def __eq__(self, other: V | Number) -> V: return self._compare("==", other)  # type: ignore[override]
    def __ne__(self, other: V | Number) -> V: return self._compare("!=", other)  # type: ignore[override]
    # fmt: on


def _call(name: str, x: V, *others: V | Number) -> V:
    arguments = [x.value, *(x.like(other).value for other in others)]
    declared = x.builder.module.declare_intrinsic(name, [x.type], ir.FunctionType(x.type, [x.type] * len(arguments)))
    return x.of(x.builder.call(declared, arguments))


def fma(x: V, y: V | Number, z: V | Number) -> V:
    """x * y + z, rounded once."""
    return _call("llvm.fma", x, y, z)


def rint(x: V) -> V:
    """The nearest integer, of two the even one."""
    return _call("llvm.rint", x)


def sqrt(x: V) -> V:
    """The square root, correctly rounded."""
    return _call("llvm.sqrt", x)


def fabs(x: V) -> V:
    """The absolute value."""
    return _call("llvm.fabs", x)


def copysign(x: V, sign: V) -> V:
    """The magnitude of x with the sign bit of `sign`."""
    return _call("llvm.copysign", x, sign)


def select(mask: V, x: V, y: V | Number) -> V:
    """x where the mask holds, else y; both are computed."""
    return x.of(x.builder.select(mask.value, x.value, x.like(y).value))


def is_nan(x: V) -> V:
    """Whether x is NaN."""
    return x != x  # noqa: PLR0124 - the definition of NaN


def minimum(x: V, y: V | Number) -> V:
    """The smaller; x where it is NaN."""
    return select(x > y, x.like(y), x)


def maximum(x: V, y: V | Number) -> V:
    """The larger; x where it is NaN."""
    return select(x < y, x.like(y), x)


def bits(x: V) -> V:
    """The bits of a float as an integer of the same width."""
    return x.of(x.builder.bitcast(x.value, _INTEGERS[x.format.bits]))


def from_bits(x: V) -> V:
    """The float of the same width that has these bits."""
    return x.of(x.builder.bitcast(x.value, _FLOATS[x.type.width]))


def widen(x: V) -> V:
    """The float64 equal to a float32; a float64 stays as it is."""
    return x if x.format is F64 else x.of(x.builder.fpext(x.value, _FLOATS[64]))


def narrow(x: V) -> V:
    """The float32 nearest to a float64."""
    return x.of(x.builder.fptrunc(x.value, _FLOATS[32]))


def horner(x: V, coefficients: Sequence[float]) -> V:
    """The polynomial with these coefficients, the constant one first; where |x| reaches 1, this rounds least."""
    total = x.like(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = fma(total, x, coefficient)
    return total


def two_horners(x: V, coefficients: Sequence[float]) -> V:
    """The same as the even and the odd part, which do not wait for each other; rounds nearly as little."""
    square = x * x
    return fma(x, horner(square, coefficients[1::2]), horner(square, coefficients[::2]))


def estrin(x: V, coefficients: Sequence[float]) -> V:
    """The same by G. Estrin's scheme, whose steps do not wait for each other: 10 to 20 % off a function's time."""
    terms = [x.like(coefficient) for coefficient in coefficients]
    if len(terms) < 6:
        return horner(x, coefficients)
    while len(terms) > 1:
        paired = [fma(high, x, low) for low, high in zip(terms[::2], terms[1::2], strict=False)]
        terms = paired + terms[2 * len(paired) :]
        x = x * x
    return terms[0]


def two_sum(x: V, y: V) -> tuple[V, V]:
    """x + y, and what its rounding lost (D. Knuth)."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def fast_two_sum(x: V, y: V) -> tuple[V, V]:
    """The same where x is 0 or not below y in magnitude (T. J. Dekker)."""
    total = x + y
    return total, y - (total - x)


def two_product(x: V, y: V) -> tuple[V, V]:
    """x * y, and what its rounding lost."""
    product = x * y
    return product, fma(x, y, -product)


def quotient(x: V, x_low: V | Number, y: V, y_low: V | Number) -> tuple[V, V]:
    """(x + x_low) / (y + y_low) as a sum, with one division."""
    inverse = 1.0 / y
    first = x * inverse
    return first, (fma(-first, y, x) + x_low - first * y_low) * inverse


def root(x: V, x_low: V | Number) -> tuple[V, V]:
    """The square root of x + x_low as a sum."""
    first = sqrt(x)
    return first, (fma(-first, first, x) + x_low) * (0.5 / maximum(first, x.format.smallest))


def power_of_two(shifted: V) -> V:
    """2**n of `shifted` = n + magic, for n between 1 - bias and bias."""
    format = shifted.format
    return from_bits((bits(shifted) << format.mantissa) + (format.bias << format.mantissa))


def _signature(arguments: tuple[Any, ...]) -> Any:
    single = all(argument == types.float32 for argument in arguments)
    real = types.float32 if single else types.float64
    return real(*(real for _ in arguments))


def _generate(function: Callable[..., V]) -> Callable[..., Any]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        return function(*(V(builder, argument) for argument in arguments)).value

    return generate


def unary(function: Callable[[V], V]) -> Any:
    """The function as one that Numba code can call: float32 gives float32, every other number float64."""

    def typed(typingctx: Any, x: Any) -> Any:
        return _signature((x,)), _generate(function)

    return _intrinsic(function, typed)


def binary(function: Callable[[V, V], V]) -> Any:
    """The same for two arguments: two float32 give float32, every other pair of numbers float64."""

    def typed(typingctx: Any, x: Any, y: Any) -> Any:
        return _signature((x, y)), _generate(function)

    return _intrinsic(function, typed)


def _intrinsic(function: Callable[..., V], typed: Callable[..., Any]) -> Any:
    typed.__name__, typed.__qualname__, typed.__doc__ = function.__name__, function.__qualname__, function.__doc__
    return intrinsic(typed)
