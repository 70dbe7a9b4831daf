"""Writes `src/sweepgrad/kernels/coefficients.py`: `python docs/coefficients.py`, a few seconds, needs mpmath.

Each polynomial is the best one in the relative sense: Remez's exchange algorithm on a grid, in 45 digits (N. Brisebarre
and J.-M. Muller, "Elementary Functions", chapter 3, tells it well). Each constant is split into parts of its format.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mpmath as mp

mp.mp.dps = 45
TARGET = Path(__file__).parents[1] / "src" / "sweepgrad" / "kernels" / "coefficients.py"

HEADER = '''"""Constants and polynomials of the functions. Written by `docs/coefficients.py`: change that, not this.

By the precision of the result in bits: 32 or 64. Polynomials have the constant coefficient first.
"""

'''


@dataclass(frozen=True)
class Polynomial:
    """`function` on an interval, so that |weight * (function - polynomial)| is least; `terms` for 32 and 64 bits."""

    meaning: str
    function: Callable[[mp.mpf], mp.mpf]
    weight: Callable[[mp.mpf], mp.mpf]
    interval: tuple[float, float] | dict[int, tuple[float, float]]
    terms: tuple[int, int]
    native: bool = True  # whether float32 results are computed in float32


def remez(p: Polynomial, low: float, high: float, terms: int) -> list[mp.mpf]:
    """Coefficients of the polynomial with `terms` terms."""
    low, high, size = mp.mpf(low), mp.mpf(high), 24 * terms
    grid = [(low + high) / 2 - (high - low) / 2 * mp.cos(mp.pi * (2 * i + 1) / (2 * size)) for i in range(size)]
    values, weights = [p.function(t) for t in grid], [p.weight(t) for t in grid]
    extrema = [round(i * (size - 1) / terms) for i in range(terms + 1)]
    while True:
        rows = [[grid[k] ** j for j in range(terms)] + [(-1) ** i / weights[k]] for i, k in enumerate(extrema)]
        solution = list(mp.lu_solve(mp.matrix(rows), mp.matrix([values[k] for k in extrema])))
        errors = [
            weight * (mp.fsum(c * t**k for k, c in enumerate(solution[:-1])) - value)
            for t, value, weight in zip(grid, values, weights, strict=True)
        ]
        runs = [[0]]
        for k in range(1, size):
            if (errors[k] > 0) != (errors[k - 1] > 0):
                runs.append([])
            runs[-1].append(k)
        found = [max(run, key=lambda k: abs(errors[k])) for run in runs]
        if found == extrema or len(found) != terms + 1:
            return solution[:-1]
        extrema = found


def odd(function: Callable[[mp.mpf], mp.mpf]) -> Callable[[mp.mpf], mp.mpf]:
    """g with function(x) = x * (1 + z * g(z)), z = x * x."""
    return lambda z: (function(mp.sqrt(z)) / mp.sqrt(z) - 1) / z


HALF_LN2 = mp.log(2) / 2
LOG_Z = (3 - 2 * mp.sqrt(2)) ** 2
OCTANT = (mp.pi / 4) ** 2
# Of the multiples of 1/128 around here, the one whose coefficients lose least by rounding, to either format.
ERFC_SHIFT = 1.8671875


def scaled_erfc(u: mp.mpf) -> mp.mpf:
    """exp(x**2) * erfc(x) * (x + shift), by u = x / (x + shift) - 1/2."""
    part = u + mp.mpf(1) / 2
    x = ERFC_SHIFT * part / (1 - part)
    return mp.exp(x * x) * mp.erfc(x) * (x + ERFC_SHIFT)


POLYNOMIALS = {
    "EXP": Polynomial(
        "exp(r) = 1 + r + r**2 * p(r)",
        lambda r: (mp.expm1(r) - r) / r**2,
        lambda r: r**2 / mp.exp(r),
        (-HALF_LN2, HALF_LN2),
        (5, 10),
    ),
    "COSH": Polynomial(
        "cosh(r) = 1 + z * p(z), z = r**2",
        lambda z: (mp.cosh(mp.sqrt(z)) - 1) / z,
        lambda z: z,
        (0, HALF_LN2**2),
        (3, 5),
    ),
    "SINH": Polynomial("sinh(r) = r + r * z * p(z)", odd(mp.sinh), lambda z: z, (0, HALF_LN2**2), (3, 5)),
    "LOG": Polynomial(
        "2 * atanh(s) = 2 * s + s * z * p(z), z = s**2",
        lambda z: 2 * odd(mp.atanh)(z),
        lambda z: z,
        (0, LOG_Z),
        (3, 7),
    ),
    "ATANH": Polynomial(
        "atanh(s) = s * (1 + z * (1/3 + z * p(z)))",
        lambda z: (odd(mp.atanh)(z) - mp.mpf(1) / 3) / z,
        lambda z: z**2,
        (0, LOG_Z),
        (3, 8),
        native=False,
    ),
    "SIN": Polynomial("sin(r) = r + r * z * p(z)", odd(mp.sin), lambda z: z, (0, OCTANT), (4, 6), native=False),
    "COS": Polynomial(
        "cos(r) = 1 - z / 2 + z**2 * p(z)",
        lambda z: (mp.cos(mp.sqrt(z)) - 1 + z / 2) / z**2,
        lambda z: z**2,
        (0, OCTANT),
        (4, 6),
        native=False,
    ),
    "ATAN": Polynomial("atan(q) = q + q * z * p(z)", odd(mp.atan), lambda z: z, (0, 1), (10, 21), native=False),
    "ASIN": Polynomial("asin(q) = q + q * z * p(z)", odd(mp.asin), lambda z: z, (0, 0.25), (6, 13), native=False),
    "ERF": Polynomial(
        "erf(x) = x + x * p(x**2), x <= 1",
        lambda z: mp.erf(mp.sqrt(z)) / mp.sqrt(z) - 1,
        lambda z: mp.sqrt(z) / mp.erf(mp.sqrt(z)),
        (0, 1),
        (7, 12),
    ),
    "ERF_TAIL": Polynomial(
        "erf(x) = 1 - exp(-p(x)), x >= 1",
        lambda x: -mp.log(mp.erfc(x)),
        lambda x: mp.erfc(x) / mp.erf(x),
        {32: (1, 4), 64: (1, 6)},
        (8, 21),
    ),
    "ERFC": Polynomial(
        "erfc(x) = exp(-x**2) / (x + shift) * p(x / (x + shift) - 1/2), x >= 0 up to where it is 0",
        scaled_erfc,
        lambda u: 1 / scaled_erfc(u),
        {bits: (-0.5, top / (top + ERFC_SHIFT) - 0.5) for bits, top in ((32, 10.1), (64, 27.3))},
        (11, 26),
    ),
}

# Name, meaning, value, bits of each part by format: fewer than the format has where a product must be exact.
CONSTANTS = (
    ("LOG2_E", "log2(e)", 1 / mp.log(2), {32: (24, 24), 64: (53, 53)}),
    ("LN2", "log(2)", mp.log(2), {32: (24, 24), 64: (53, 53)}),
    ("LN2_SHORT", "log(2), exact times an exponent", mp.log(2), {32: (16, 24), 64: (42, 53)}),
    ("LOG10_E", "log10(e)", 1 / mp.log(10), {32: (24, 24), 64: (53, 53)}),
    ("LOG10_2_SHORT", "log10(2), exact times an exponent", mp.log10(2), {32: (16, 24), 64: (42, 53)}),
    ("HALF_PI", "pi / 2", mp.pi / 2, {64: (53, 53, 53)}),
    ("PI", "pi", mp.pi, {64: (53, 53)}),
    ("TWO_OVER_PI", "2 / pi", 2 / mp.pi, {64: (53,)}),
    ("THIRD", "1 / 3", mp.mpf(1) / 3, {64: (53, 53)}),
    ("ERFC_SHIFT", "of the argument of ERFC", mp.mpf(ERFC_SHIFT), {32: (24,), 64: (53,)}),
)


def split(value: mp.mpf, parts: tuple[int, ...]) -> list[float]:
    """Floats that add up to `value`, each the nearest of so many bits."""
    out = []
    for part in parts:
        with mp.workprec(part):
            nearest = +value
        out.append(float(nearest))
        value -= nearest
    return out


def text(values: list[float], *, single: bool) -> str:
    """A tuple of floats, with as many digits as they need."""
    return "".join(f"{float(v):.9g}, " if single else f"{float(v)!r}, " for v in values)


def module() -> str:
    """The source of the module."""
    lines = [HEADER]
    for name, meaning, value, formats in CONSTANTS:
        entries = [f"{bits}: ({text(split(value, parts), single=bits == 32)})" for bits, parts in formats.items()]
        lines.append(f'{name} = {{{", ".join(entries)}}}\n"""{meaning}"""\n')
    for name, p in POLYNOMIALS.items():
        lines.append(f"{name} = {{")
        for bits, terms in zip((32, 64), p.terms, strict=True):
            interval = p.interval[bits] if isinstance(p.interval, dict) else p.interval
            lines.append(f"{bits}: ({text(remez(p, *interval, terms), single=bits == 32 and p.native)}),")
        lines.append(f'}}\n"""{p.meaning}"""\n')
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(module())
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", str(TARGET)], check=True)
