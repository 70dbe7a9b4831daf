"""Elementary and special functions for generated kernels: `import sweepgrad.kernels.functions as f`, `f.exp(x)`.

Each takes float32 to float32 and every other number to float64, within 2 ulp of the correctly rounded result, with
subnormals, infinities, NaN and signed zeros as in C99. In a loop they are vectorised by LLVM. sin, cos and tan hold up
to `LIMIT`; `sin_any`, `cos_any` and `tan_any` give the same bits up to there, and the
C library's result beyond, one element at a time.
"""

from __future__ import annotations

import math
from typing import Any

import numba
from numba.core import types
from numba.extending import intrinsic

from sweepgrad.kernels import functions_exp, functions_log, functions_trig
from sweepgrad.kernels.machine import binary, unary

LIMIT = 2.0**40
"""The largest magnitudes for which sin, cos and tan are right: beyond, x * 2/pi is not known to a fraction of one."""

exp = unary(functions_exp.exp)
expm1 = unary(functions_exp.expm1)
sinh = unary(functions_exp.sinh)
cosh = unary(functions_exp.cosh)
tanh = unary(functions_exp.tanh)
sigmoid = unary(functions_exp.sigmoid)
erf = unary(functions_exp.erf)
erfc = unary(functions_exp.erfc)

log = unary(functions_log.log)
log1p = unary(functions_log.log1p)
log2 = unary(functions_log.log2)
log10 = unary(functions_log.log10)
asinh = unary(functions_log.asinh)
acosh = unary(functions_log.acosh)
atanh = unary(functions_log.atanh)
softplus = unary(functions_log.softplus)
pow = binary(functions_log.pow)

sin = unary(functions_trig.sin)
cos = unary(functions_trig.cos)
tan = unary(functions_trig.tan)
asin = unary(functions_trig.asin)
acos = unary(functions_trig.acos)
atan = unary(functions_trig.atan)
atan2 = binary(functions_trig.atan2)
hypot = binary(functions_trig.hypot)

_njit: Any = numba.njit


def _rounded_type(typingctx: Any, x: Any, like: Any) -> Any:
    """The float64 x as a float32 if `like` is one."""
    result = types.float32 if like == types.float32 else types.float64

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.cast(builder, arguments[0], types.float64, result)

    return result(types.float64, like), generate


_rounded: Any = intrinsic(_rounded_type)


@_njit
def sin_any(x):  # type: ignore[no-untyped-def]
    """sin(x) for every x."""
    return sin(x) if abs(x) <= LIMIT else _rounded(math.sin(numba.float64(x)), x)


@_njit
def cos_any(x):  # type: ignore[no-untyped-def]
    """cos(x) for every x."""
    return cos(x) if abs(x) <= LIMIT else _rounded(math.cos(numba.float64(x)), x)


@_njit
def tan_any(x):  # type: ignore[no-untyped-def]
    """tan(x) for every x."""
    return tan(x) if abs(x) <= LIMIT else _rounded(math.tan(numba.float64(x)), x)
