"""Logarithms and what is made of them: inverse hyperbolic functions, softplus, powers.

A number is split into 2**k * (1 + f) with 1 + f between sqrt(1/2) and sqrt(2), and log(1 + f) = f - f**2 / 2 + s *
(f**2 / 2 + R(s**2)), s = f / (2 + f), as in W. J. Cody and W. Waite, "Software Manual for the Elementary Functions"
(1980), and K. C. Ng's FDLIBM (1993); here the leading terms are kept as an unevaluated sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sweepgrad.kernels import coefficients as c
from sweepgrad.kernels.functions_exp import LOWEST, exp_parts, scale, short_exp
from sweepgrad.kernels.machine import (
    V,
    bits,
    copysign,
    estrin,
    fabs,
    fast_two_sum,
    fma,
    from_bits,
    horner,
    is_nan,
    maximum,
    minimum,
    narrow,
    quotient,
    rint,
    root,
    select,
    two_product,
    two_sum,
    widen,
)

_SQRT_HALF_BITS = {32: 0x3F3504F3, 64: 0x3FE6A09E667F3BCD}


def split(x: V) -> tuple[V, V, V]:
    """k, f and 2**-k, so that x = 2**k * (1 + f); x positive, finite and normal. 2**-k is wrong where k > bias."""
    width, mantissa, bias = x.format.bits, x.format.mantissa, x.format.bias
    origin = _SQRT_HALF_BITS[width]
    shifted = bits(x) + ((bias << mantissa) - origin)
    exponent = shifted >> mantissa
    top = 2.0**mantissa
    k = from_bits(exponent | bits(x.like(top))) - (top + bias)
    fraction = from_bits((shifted & ((1 << mantissa) - 1)) + origin) - 1.0
    return k, fraction, from_bits((2 * bias - exponent) << mantissa)


def split_any(x: V) -> tuple[V, V]:
    """k and f, so that x = 2**k * (1 + f); x positive and finite, perhaps subnormal."""
    format = x.format
    tiny = x < format.smallest
    k, f, _ = split(select(tiny, x * 2.0 ** (format.mantissa + 2), x))
    return select(tiny, k - (format.mantissa + 2.0), k), f


def log1p_parts(f: V, f_low: V | None = None) -> tuple[V, V]:
    """log(1 + f + f_low) as a sum, for sqrt(1/2) <= 1 + f <= sqrt(2)."""
    s = f / (2.0 + f)
    z = s * s
    half = 0.5 * f
    square, square_low = two_product(half, f)
    high, low = fast_two_sum(f, -square)
    low = low - square_low
    if f_low is not None:
        low = low + fma(-f, f_low, f_low)
    return high, fma(s, fma(z, estrin(z, c.LOG[f.format.bits]), square), low)


def add_exponent(k: V, high: V, low: V, unit: tuple[float, ...]) -> V:
    """k * unit + high + low, where k is 0 or its term is the largest."""
    total, rest = fast_two_sum(k * unit[0], high)
    return total + (fma(k, unit[1], low) + rest)


def _guard(x: V, value: V) -> V:
    """`value` where x is positive and finite, else what a logarithm is there."""
    special = select(x == 0.0, x.like(-math.inf), select(x < 0.0, x.like(math.nan), x))
    return select((x > 0.0) & (x < math.inf), value, special)


def log(x: V) -> V:
    """Natural logarithm."""
    k, f = split_any(x)
    return _guard(x, add_exponent(k, *log1p_parts(f), c.LN2_SHORT[x.format.bits]))


def _scaled_log(x: V, factor: tuple[float, ...], unit: tuple[float, ...]) -> V:
    k, f = split_any(x)
    high, low = fast_two_sum(*log1p_parts(f))
    first, second = two_product(high, x.like(factor[0]))
    second = second + fma(high, factor[1], low * factor[0])
    return _guard(x, add_exponent(k, first, second, unit))


def log2(x: V) -> V:
    """Logarithm to base 2; exact for powers of two."""
    return _scaled_log(x, c.LOG2_E[x.format.bits], (1.0, 0.0))


def log10(x: V) -> V:
    """Logarithm to base 10."""
    return _scaled_log(x, c.LOG10_E[x.format.bits], c.LOG10_2_SHORT[x.format.bits])


def log_sum(x: V, y: V, y_low: V, more: V | None = None) -> V:
    """log(x + y + y_low) + more * log(2) for x positive and finite, y far below it, or x = 1."""
    k, f, inverse = split(x)
    # 2**-k is not to be had for the largest x; y is long negligible there.
    vast = x > 2.0 ** (2 * x.format.mantissa)
    f, f_low = fast_two_sum(f, select(vast, x.like(0.0), y * inverse))
    f_low = f_low + select(vast, x.like(0.0), y_low * inverse)
    return add_exponent(k if more is None else k + more, *log1p_parts(f, f_low), c.LN2_SHORT[x.format.bits])


def log1p(x: V) -> V:
    """log(1 + x)."""
    total, rest = two_sum(x.like(1.0), x)
    value = _guard(total, log_sum(total, rest, x.like(0.0)))
    return select(x == 0.0, x, value)


def softplus(x: V) -> V:
    """log(1 + e**x)."""
    shifted, high, low = exp_parts(maximum(-fabs(x), LOWEST[x.format.bits]))
    high, low = scale(high, shifted), scale(low, shifted)
    total, rest = fast_two_sum(x.like(1.0), high)
    value = maximum(x, 0.0) + log_sum(total, rest, low)
    return select(is_nan(x), x, value)


def asinh(x: V) -> V:
    """Inverse hyperbolic sine."""
    a = fabs(x)
    # There asinh(a) = log(2 * a) to the last bit, and a * a is far from overflow below.
    big = a > 2.0 ** (x.format.mantissa // 2 + 4)
    square, square_low = two_product(a, a)
    under, under_low = two_sum(x.like(1.0), square)
    first, second = root(under, under_low + square_low)
    t, t_low = two_sum(a, first - 1.0)
    return copysign(_log1p_or_log2x(x, a, big, t, t_low + second), x)


def acosh(x: V) -> V:
    """Inverse hyperbolic cosine."""
    big = x > 2.0 ** (x.format.mantissa // 2 + 4)
    t = x - 1.0
    other, other_low = two_sum(t, x.like(2.0))
    square, square_low = two_product(t, other)
    first, second = root(square, fma(t, other_low, square_low))
    t, t_low = two_sum(t, first)
    return select(x < 1.0, x.like(math.nan), _log1p_or_log2x(x, x, big, t, t_low + second))


def _log1p_or_log2x(x: V, a: V, big: V, t: V, t_low: V) -> V:
    """log(2 * a) where `big`, else log(1 + t + t_low); infinite or NaN where x is."""
    zero = x.like(0.0)
    total, rest = two_sum(x.like(1.0), t)
    value = log_sum(
        select(big, a, total), select(big, zero, rest), select(big, zero, t_low), select(big, x.like(1.0), zero)
    )
    return select(a < math.inf, value, a)


def atanh(x: V) -> V:
    """Inverse hyperbolic tangent."""
    a = fabs(x)
    under, under_low = fast_two_sum(x.like(1.0), -a)
    first, second = quotient(2.0 * a, 0.0, under, under_low)
    total, rest = two_sum(x.like(1.0), first)
    value = 0.5 * log_sum(total, rest, second)
    special = select(a == 1.0, x.like(math.inf), x.like(math.nan))
    return select(x == 0.0, x, copysign(select(a < 1.0, value, special), x))


def _log_pair(x: V) -> tuple[V, V]:
    """log(x) as a sum, relative error about 2**-65; x positive and finite."""
    k, f = split_any(x)
    under, under_low = two_sum(x.like(2.0), f)
    s, s_low = quotient(f, 0.0, under, under_low)
    z, z_low = two_product(s, s)
    z_low = fma(2.0 * s, s_low, z_low)
    third, third_low = c.THIRD[64]
    inner, rest = fast_two_sum(x.like(third), z * estrin(z, c.ATANH[64]))
    product, product_low = two_product(z, inner)
    product_low = product_low + fma(z, rest + third_low, z_low * inner)
    more, more_low = two_product(s, product)
    more_low = more_low + fma(s, product_low, s_low * product)
    high, low = fast_two_sum(s, more)
    high, low = fast_two_sum(high, low + (more_low + s_low))
    unit, unit_low = c.LN2_SHORT[64]
    high, rest = fast_two_sum(k * unit, 2.0 * high)
    return fast_two_sum(high, rest + fma(k, unit_low, 2.0 * low))


def _power(a: V, y: V) -> V:
    """a**y for a positive and finite, y finite or not."""
    log_high, log_low = _log_pair(a)
    high, low = two_product(y, log_high)
    low = low + y * log_low
    clamped = maximum(minimum(high, 750.0), -800.0)
    shifted, first, second = exp_parts(clamped, select(clamped == high, low, 0.0))
    return scale(first + second, shifted)


def _short_power(a: V, y: V) -> V:
    """The same in float64, for a result in float32."""
    k, f, _ = split(a)
    s = f / (2.0 + f)
    z, twice = s * s, s + s
    logarithm = fma(twice * z, fma(z, horner(z, c.ATANH[32]), c.THIRD[64][0]), twice)
    return short_exp(y * fma(k, c.LN2[64][0], logarithm))


def pow(x: V, y: V) -> V:
    """x**y, special cases as in C99."""
    if x.format.bits == 32:
        return narrow(_pow(widen(x), widen(y), _short_power))
    return _pow(x, y, _power)


def _pow(x: V, y: V, power: Callable[[V, V], V]) -> V:
    a = fabs(x)
    zero, one, infinite, nan = (x.like(number) for number in (0.0, 1.0, math.inf, math.nan))
    whole, odd = rint(y) == y, (rint(y) == y) & (rint(0.5 * y) != 0.5 * y)
    value = power(a, y)
    # At 0 and infinity, the result is one or the other by the sign of y.
    value = select((a == 0.0) | (a == math.inf), select((a == 0.0) == (y < 0.0), infinite, zero), value)
    value = select(a == 1.0, one, value)
    value = select(odd, copysign(value, x), value)
    value = select((x < 0.0) & (x > -math.inf) & ~whole, nan, value)
    value = select(is_nan(x) | is_nan(y), nan, value)
    return select((x == 1.0) | (y == 0.0), one, value)
