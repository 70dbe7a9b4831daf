"""Exponentials and what is made of them: hyperbolic functions, the logistic function, the error functions.

Arguments are reduced to n * log(2) + r, |r| <= log(2) / 2, by Cody and Waite's method; with fused multiply-add the
difference x - n * log(2) is exact. Results are kept as unevaluated sums of two floats up to the last rounding where
one float would cost more than an ulp.
"""

from __future__ import annotations

from sweepgrad.kernels import coefficients as c
from sweepgrad.kernels.machine import (
    V,
    copysign,
    estrin,
    fabs,
    fast_two_sum,
    fma,
    maximum,
    minimum,
    power_of_two,
    quotient,
    select,
    two_horners,
    two_product,
)

LOWEST = {32: -105.0, 64: -747.0}
"""Where exp has long been 0: arguments are clamped there, so that n stays in range."""
HIGHEST = {32: 89.0, 64: 710.0}
"""Where exp is infinite, and n not yet bias + 2."""
ERFC_HIGHEST = {32: 10.1, 64: 27.3}
"""Where erfc is 0."""


def reduce(x: V, x_low: V | None = None) -> tuple[V, V, V]:
    """n + magic and r = r_high + r_low, so that x + x_low = n * log(2) + r."""
    width, magic = x.format.bits, x.format.magic
    high, low = c.LN2[width]
    shifted = fma(x, c.LOG2_E[width][0], magic)
    n = shifted - magic
    r_low = n * -low
    return shifted, fma(n, -high, x), r_low if x_low is None else r_low + x_low


def excess(r_high: V, r_low: V) -> V:
    """exp(r_high + r_low) - 1 - r_high."""
    r = r_high + r_low
    return fma(r * r, estrin(r, c.EXP[r.format.bits]), r_low)


def scale(x: V, shifted: V) -> V:
    """x * 2**n of `shifted` = n + magic, rounded once, into subnormals and infinity too."""
    magic = x.format.magic
    n = shifted - magic
    half = fma(n, 0.5, magic)
    return x * power_of_two(half) * power_of_two(n - (half - magic) + magic)


def exp_parts(x: V, x_low: V | None = None) -> tuple[V, V, V]:
    """n + magic and high + low, so that exp(x + x_low) = (high + low) * 2**n."""
    shifted, r_high, r_low = reduce(x, x_low)
    high, rest = fast_two_sum(x.like(1.0), r_high)
    high, low = fast_two_sum(high, rest + excess(r_high, r_low))
    return shifted, high, low


def exp(x: V) -> V:
    """e**x."""
    width = x.format.bits
    shifted, r_high, r_low = reduce(maximum(minimum(x, HIGHEST[width]), LOWEST[width]))
    r = r_high + r_low
    return scale(1.0 + fma(r * r, estrin(r, c.EXP[width]), r), shifted)


def half_expm1(x: V) -> tuple[V, V]:
    """(exp(x) - 1) / 2 as a sum; x not below -bias * log(2)."""
    shifted, r_high, r_low = reduce(x)
    half = power_of_two(shifted - 1.0)
    high, low = fast_two_sum(half - 0.5, half * r_high)
    return high, fma(half, excess(r_high, r_low), low)


def expm1(x: V) -> V:
    """e**x - 1."""
    high, low = half_expm1(maximum(minimum(x, HIGHEST[x.format.bits]), -40.0))
    return select(fabs(x) < 2.0 ** (-x.format.mantissa - 2), x, 2.0 * (high + low))


def tanh(x: V) -> V:
    """Hyperbolic tangent."""
    high, low = fast_two_sum(*half_expm1(2.0 * minimum(fabs(x), 22.0)))
    denominator, rest = fast_two_sum(maximum(high, 1.0), minimum(high, 1.0))
    first, second = quotient(high, low, denominator, rest + low)
    return select(fabs(x) < 2.0 ** (-x.format.mantissa // 2 - 2), x, copysign(first + second, x))


def sigmoid(x: V) -> V:
    """1 / (1 + e**-x)."""
    shifted, high, low = exp_parts(maximum(-fabs(x), LOWEST[x.format.bits]))
    high, low = scale(high, shifted), scale(low, shifted)
    denominator, rest = fast_two_sum(x.like(1.0), high)
    negative = x < 0.0
    first, second = quotient(select(negative, high, 1.0), select(negative, low, 0.0), denominator, rest + low)
    return first + second


def _hyperbolic(x: V) -> tuple[V, V, V, V, V, V]:
    """2**(n-2), 2**(-n-2), r_high, r_low, cosh(r) - 1, sinh(r) - r of |x| = n * log(2) + r."""
    width, magic = x.format.bits, x.format.magic
    shifted, r_high, r_low = reduce(minimum(fabs(x), HIGHEST[width] + 0.65))
    growing = power_of_two(shifted - 2.0)
    # 2**(-n-2) is far below half an ulp of 2**(n-2) where n > 60, and must not underflow.
    falling = power_of_two((magic - 2.0) - minimum(shifted - magic, 60.0))
    r = r_high + r_low
    z = r * r
    return growing, falling, r_high, r_low, z * estrin(z, c.COSH[width]), r * (z * estrin(z, c.SINH[width]))


def _combine(even: tuple[V, V], odd: V, r_high: V, r_low: V, cosh1: V, sinh1: V) -> V:
    """2 * (even * cosh(r) + odd * sinh(r)), where even, a sum, is 0 or above odd * r."""
    product, product_low = two_product(odd, r_high)
    high, low = fast_two_sum(even[0], product)
    low = low + (product_low + even[1])
    return 2.0 * (high + (low + fma(even[0], cosh1, odd * (sinh1 + r_low))))


def sinh(x: V) -> V:
    """Hyperbolic sine."""
    growing, falling, *rest = _hyperbolic(x)
    value = _combine(fast_two_sum(growing, -falling), growing + falling, *rest)
    return select(fabs(x) < 2.0 ** (-x.format.mantissa // 2 - 2), x, copysign(value, x))


def cosh(x: V) -> V:
    """Hyperbolic cosine."""
    growing, falling, *rest = _hyperbolic(x)
    return _combine(fast_two_sum(growing, falling), growing - falling, *rest)


def erf(x: V) -> V:
    """Error function."""
    width = x.format.bits
    a = fabs(x)
    near = fma(x, two_horners(x * x, c.ERF[width]), x)
    exponent = two_horners(minimum(a, {32: 4.0, 64: 6.0}[width]), c.ERF_TAIL[width])
    shifted, r_high, r_low = reduce(-exponent)
    power = power_of_two(shifted)
    far = 1.0 - fma(power, r_high + excess(r_high, r_low), power)
    return select(a > 1.0, copysign(far, x), near)


def erfc(x: V) -> V:
    """1 - erf(x), also where that is tiny."""
    width, scaling = x.format.bits, x.format.bias // 2
    a = minimum(fabs(x), ERFC_HIGHEST[width])
    square, square_low = two_product(a, a)
    shift, middle, middle_slope, *terms = *c.ERFC_SHIFT[width], *c.ERFC[width]
    bottom = a + shift
    inverse = 1.0 / bottom
    u = fma(a, inverse, -0.5)
    slope = fma(u, two_horners(u, terms), middle_slope)
    p = fma(u, slope, middle)
    p_low = fma(u, slope, middle - p)
    first, first_low = two_product(inverse, p)
    first_low = fma(inverse, p_low, first_low)
    # 1 / (a + shift) is inverse * (1 + lost). The error of u offsets part of that in p: 0.42 - u is about what is left,
    # and goes into the exponent.
    lost = fma((bottom - shift) - a, inverse, fma(-bottom, inverse, 1.0))
    shifted, r_high, r_low = reduce(-square, fma(lost, 0.42 - u, -square_low))
    total = first + fma(first, r_high, fma(first, excess(r_high, r_low), first_low))
    # In two steps, of which the first is exact: n alone is out of range where the result is subnormal.
    far = total * power_of_two(shifted + float(scaling)) * 2.0**-scaling
    return select(x < 0.0, 2.0 - far, far)


def short_exp(x: V) -> V:
    """exp(x) in float64 with as many terms as a result in float32 needs; 0 or infinite there where |x| > 700."""
    shifted, r, r_low = reduce(maximum(minimum(x, 700.0), -700.0))
    power = power_of_two(shifted)
    return fma(fma(r * r, estrin(r, c.EXP[32]), r + r_low), power, power)
