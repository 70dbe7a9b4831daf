"""Trigonometric functions, their inverses, and hypot.

sin, cos and tan reduce by Cody and Waite's method with pi/2 in three parts; with fused multiply-add the first
difference is exact. float32 results are computed in float64, with polynomials as short as float32 needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sweepgrad.kernels import coefficients as c
from sweepgrad.kernels.machine import (
    F64,
    V,
    bits,
    copysign,
    estrin,
    fabs,
    fast_two_sum,
    fma,
    from_bits,
    is_nan,
    maximum,
    minimum,
    narrow,
    quotient,
    root,
    select,
    sqrt,
    two_product,
    two_sum,
    widen,
)


def _in_float64(function: Callable[..., V], *arguments: V) -> V:
    width = arguments[0].format.bits
    value = function(*map(widen, arguments), width)
    return narrow(value) if width == 32 else value


Sum = tuple[V, V]


def _sin_cos(x: V, width: int) -> tuple[V, Sum, Sum]:
    """n + magic, sin(r) and cos(r) as sums, so that x = n * pi/2 + r."""
    shifted = fma(x, c.TWO_OVER_PI[64][0], F64.magic)
    n = shifted - F64.magic
    first, second, third = c.HALF_PI[64]
    r = fma(n, -first, x)
    product, product_low = two_product(n, x.like(second))
    r, r_low = two_sum(r, -product)
    r_low = r_low - fma(n, third, product_low)
    z = r * r
    head, rest = fast_two_sum(x.like(1.0), -0.5 * z)
    cosine = head, rest + fma(z * z, estrin(z, c.COS[width]), -(r * r_low))
    return shifted, (r, fma(r * z, estrin(z, c.SIN[width]), r_low)), cosine


def _rotated(shifted: V, even: V, odd: V) -> V:
    """+even, +odd, -even, -odd for n = 0, 1, 2, 3 modulo 4."""
    n = bits(shifted)
    value = select((n & 1) == 0, even, odd)
    return from_bits(bits(value) ^ ((n & 2) << 62))


def _sin(x: V, width: int) -> V:
    shifted, (sine, sine_low), (cosine, cosine_low) = _sin_cos(x, width)
    return select(x == 0.0, x, _rotated(shifted, sine + sine_low, cosine + cosine_low))


def _cos(x: V, width: int) -> V:
    shifted, (sine, sine_low), (cosine, cosine_low) = _sin_cos(x, width)
    return _rotated(shifted, cosine + cosine_low, -(sine + sine_low))


def _tan(x: V, width: int) -> V:
    shifted, sine_parts, cosine_parts = _sin_cos(x, width)
    (sine, sine_low), (cosine, cosine_low) = fast_two_sum(*sine_parts), fast_two_sum(*cosine_parts)
    even = (bits(shifted) & 1) == 0
    top, bottom = select(even, sine, -cosine), select(even, cosine, sine)
    if width == 32:
        value = top / bottom
    else:
        top_low, bottom_low = select(even, sine_low, -cosine_low), select(even, cosine_low, sine_low)
        first, second = quotient(top, top_low, bottom, bottom_low)
        value = first + second
    return select(x == 0.0, x, value)


def sin(x: V) -> V:
    """Sine; |x| up to LIMIT."""
    return _in_float64(_sin, x)


def cos(x: V) -> V:
    """Cosine; |x| up to LIMIT."""
    return _in_float64(_cos, x)


def tan(x: V) -> V:
    """Tangent; |x| up to LIMIT."""
    return _in_float64(_tan, x)


def _arc_sine(x: V, width: int) -> tuple[V, V, V, V]:
    """Where |x| > 1/2, and asin of q = sqrt((1 - |x|) / 2) there, of q = |x| elsewhere, as a sum q + low; |x|."""
    a = fabs(x)
    far = a > 0.5
    z = select(far, 0.5 * (1.0 - a), a * a)
    first, second = root(z, 0.0)
    q = select(far, first, a)
    return far, q, fma(q * z, estrin(z, c.ASIN[width]), select(far, second, 0.0)), a


def _asin(x: V, width: int) -> V:
    far, q, low, _ = _arc_sine(x, width)
    high, rest = c.HALF_PI[64][:2]
    head, head_low = fast_two_sum(x.like(high), -2.0 * q)
    return copysign(select(far, head + (head_low + fma(low, -2.0, rest)), q + low), x)


def _acos(x: V, width: int) -> V:
    far, q, low, _ = _arc_sine(x, width)
    negative = x < 0.0
    factor = select(far, x.like(2.0), 1.0)
    offset = select(far, select(negative, x.like(c.PI[64][0]), 0.0), c.HALF_PI[64][0])
    offset_low = select(far, select(negative, x.like(c.PI[64][1]), 0.0), c.HALF_PI[64][1])
    factor = select(far == negative, -factor, factor)
    head, rest = two_sum(offset, factor * q)
    return head + (rest + fma(factor, low, offset_low))


def asin(x: V) -> V:
    """Inverse sine."""
    return _in_float64(_asin, x)


def acos(x: V) -> V:
    """Inverse cosine."""
    return _in_float64(_acos, x)


def _arc_tangent(q: V, q_low: V, width: int) -> tuple[V, V]:
    """atan(q + q_low) as a sum, for q between 0 and 1."""
    z = q * q
    return q, fma(q * z, estrin(z, c.ATAN[width]), fma(-z * 0.5, q_low, q_low))


def _atan(x: V, width: int) -> V:
    a = fabs(x)
    far = a > 1.0
    first, second = quotient(x.like(1.0), 0.0, minimum(maximum(a, 1.0), 2.0**100), 0.0)
    q, low = _arc_tangent(select(far, first, a), select(far, second, 0.0), width)
    high, rest = c.HALF_PI[64][:2]
    head, head_low = fast_two_sum(x.like(high), -q)
    return copysign(select(far, head + (head_low + (rest - low)), q + low), x)


def atan(x: V) -> V:
    """Inverse tangent."""
    return _in_float64(_atan, x)


def _atan2(y: V, x: V, width: int) -> V:
    a, b = fabs(y), fabs(x)
    steep = a > b
    top, bottom = select(steep, b, a), select(steep, a, b)
    # Powers of two that keep the quotient's parts away from overflow and underflow.
    factor = select(bottom > 2.0**900, x.like(2.0**-200), select(bottom < 2.0**-800, x.like(2.0**200), 1.0))
    top, bottom = top * factor, bottom * factor
    first, second = quotient(top, 0.0, maximum(bottom, F64.smallest), 0.0)
    same = (top == bottom) & (bottom > 0.0)
    first = select(same, x.like(1.0), first)
    second = select(same | (bottom == math.inf), x.like(0.0), second)
    q, low = _arc_tangent(first, second, width)
    left = bits(x) < 0
    offset, offset_low = (
        select(steep, x.like(half), select(left, x.like(whole), 0.0))
        for half, whole in zip(c.HALF_PI[64][:2], c.PI[64], strict=True)
    )
    turned = steep != left
    head, rest = fast_two_sum(offset, select(turned, -q, q))
    value = head + (rest + (offset_low + select(turned, -low, low)))
    return copysign(select(is_nan(x) | is_nan(y), x.like(math.nan), value), y)


def atan2(y: V, x: V) -> V:
    """The angle of the point (x, y), as in C99."""
    return _in_float64(_atan2, y, x)


def _hypot(x: V, y: V, width: int) -> V:
    a, b = fabs(x), fabs(y)
    if width == 32:
        value = sqrt(fma(a, a, b * b))
    else:
        top, bottom = maximum(a, b), minimum(b, a)
        factor = select(top > 2.0**510, x.like(2.0**-600), select(top < 2.0**-420, x.like(2.0**600), 1.0))
        back = select(top > 2.0**510, x.like(2.0**600), select(top < 2.0**-420, x.like(2.0**-600), 1.0))
        top, bottom = top * factor, bottom * factor
        high, low = two_product(top, top)
        other, other_low = two_product(bottom, bottom)
        total, rest = fast_two_sum(high, other)
        first, second = root(total, rest + (low + other_low))
        value = (first + second) * back
    return select((a == math.inf) | (b == math.inf), x.like(math.inf), value)


def hypot(x: V, y: V) -> V:
    """sqrt(x**2 + y**2), without overflow on the way."""
    return _in_float64(_hypot, x, y)
