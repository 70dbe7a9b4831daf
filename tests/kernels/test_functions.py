"""The functions of generated kernels against mpmath, C99's tables, and themselves at other places of an array."""

import importlib.util
import itertools
import math
import re
import subprocess
import sys
from pathlib import Path

import llvmlite.binding
import mpmath
import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sweepgrad.kernels.functions as f
from sweepgrad.kernels import coefficients

MP = mpmath.mp.clone()
MP.prec = 300
INF, NAN = math.inf, math.nan

DTYPES = [np.float32, np.float64]
_INTEGERS = {np.float32: np.int32, np.float64: np.int64}
_QUANTA = {np.float32: (24, -149), np.float64: (53, -1074)}


# References: each takes and gives an mpmath number; what is infinite or undefined is said by the domain.


def _sigmoid(x):
    return 1 / (1 + MP.exp(-x))


def _softplus(x):
    return max(x, MP.zero) + MP.log1p(MP.exp(-abs(x)))


def _atanh(x):
    return (MP.log1p(x) - MP.log1p(-x)) / 2


def _sinh(x):
    return (MP.expm1(x) - MP.expm1(-x)) / 2


def _tanh(x):
    return MP.expm1(2 * x) / (MP.expm1(2 * x) + 2) if x < 1000 else MP.one


def _asinh(x):
    return MP.sign(x) * MP.log1p(abs(x) + x * x / (1 + MP.sqrt(1 + x * x)))


# Name: reference, closed domain, values at its ends where they are not the reference's, range of interest.
UNARY = {
    "exp": (MP.exp, (-INF, INF), {-INF: 0.0, INF: INF}, (-746, 711)),
    "expm1": (MP.expm1, (-INF, INF), {-INF: -1.0, INF: INF}, (-40, 711)),
    "sinh": (_sinh, (-INF, INF), {-INF: -INF, INF: INF}, (-711, 711)),
    "cosh": (MP.cosh, (-INF, INF), {-INF: INF, INF: INF}, (-711, 711)),
    "tanh": (_tanh, (-INF, INF), {-INF: -1.0, INF: 1.0}, (-20, 20)),
    "sigmoid": (_sigmoid, (-INF, INF), {-INF: 0.0, INF: 1.0}, (-746, 40)),
    "softplus": (_softplus, (-INF, INF), {-INF: 0.0, INF: INF}, (-746, 40)),
    "erf": (MP.erf, (-INF, INF), {-INF: -1.0, INF: 1.0}, (-6, 6)),
    "erfc": (MP.erfc, (-INF, INF), {-INF: 2.0, INF: 0.0}, (-6, 27.5)),
    "log": (MP.log, (0, INF), {0.0: -INF, INF: INF}, (0, 4)),
    "log1p": (MP.log1p, (-1, INF), {-1.0: -INF, INF: INF}, (-1, 4)),
    "log2": (lambda x: MP.log(x, 2), (0, INF), {0.0: -INF, INF: INF}, (0, 4)),
    "log10": (MP.log10, (0, INF), {0.0: -INF, INF: INF}, (0, 4)),
    "asinh": (_asinh, (-INF, INF), {-INF: -INF, INF: INF}, (-10, 10)),
    "acosh": (MP.acosh, (1, INF), {INF: INF}, (1, 10)),
    "atanh": (_atanh, (-1, 1), {-1.0: -INF, 1.0: INF}, (-1, 1)),
    "sin": (MP.sin, (-f.LIMIT, f.LIMIT), {}, (-100, 100)),
    "cos": (MP.cos, (-f.LIMIT, f.LIMIT), {}, (-100, 100)),
    "tan": (MP.tan, (-f.LIMIT, f.LIMIT), {}, (-100, 100)),
    "asin": (MP.asin, (-1, 1), {}, (-1, 1)),
    "acos": (MP.acos, (-1, 1), {}, (-1, 1)),
    "atan": (MP.atan, (-INF, INF), {-INF: math.pi / 2 * -1, INF: math.pi / 2}, (-5, 5)),
}
BINARY = ["pow", "atan2", "hypot"]
ODD = ["expm1", "sinh", "tanh", "erf", "log1p", "asinh", "atanh", "sin", "tan", "asin", "atan"]
ANY = {"sin_any": MP.sin, "cos_any": MP.cos, "tan_any": MP.tan}
_LIMITED = ["sin", "cos", "tan"]


def _compile(names, arguments):
    """A function that writes a row of `out` for each of `names`."""
    lines = [f"def kernel({', '.join(arguments)}, out):"]
    for row, name in enumerate(names):
        call = f"f.{name}({', '.join(f'{a}[i]' for a in arguments)})"
        lines += [f"    row{row} = out[{row}]", f"    for i in range(x.size): row{row}[i] = {call}"]
    namespace = {"f": f}
    exec("\n".join(lines), namespace)
    return numba.njit(error_model="numpy")(namespace["kernel"])


_unary = _compile(UNARY, ["x"])
_binary = _compile(BINARY, ["x", "y"])
_any = _compile(ANY, ["x"])


def values(x):
    """Results of every function of one argument, by name."""
    out = np.empty((len(UNARY), x.size), x.dtype)
    _unary(x, out)
    return dict(zip(UNARY, out, strict=True))


def values2(x, y):
    """Results of every function of two arguments, by name."""
    out = np.empty((len(BINARY), x.size), x.dtype)
    _binary(x, y, out)
    return dict(zip(BINARY, out, strict=True))


def rounded(value, dtype):
    """The mpmath number in the dtype: to nearest even, with subnormals and overflow."""
    if not MP.isnormal(value):
        return dtype(float(value))
    digits, least = _QUANTA[dtype]
    quantum = max(int(MP.frexp(value)[1]) - digits, least)
    whole = int(MP.nint(MP.ldexp(value, -quantum)))
    try:
        wide = math.ldexp(whole, quantum)
    except OverflowError:
        wide = math.copysign(INF, whole)
    with np.errstate(over="ignore"):
        return dtype(wide)


def ordinal(x):
    """Position among the floats of its dtype: neighbours differ by one, and -0 is 0."""
    bits = x.view(_INTEGERS[x.dtype.type]).astype(object)
    return np.where(bits < 0, -(bits & (2 ** (8 * x.itemsize - 1) - 1)), bits)


def expected(name, x):
    """The correctly rounded result for the float x."""
    dtype = type(x)
    reference, (low, high), ends, _ = UNARY[name]
    if float(x) in ends:
        return dtype(ends[float(x)])
    if not low <= x <= high:
        return dtype(NAN)
    if abs(float(x)) > 1e5 and name in ("exp", "expm1", "sinh", "cosh", "sigmoid", "softplus", "erf", "erfc", "tanh"):
        # Long at the limit, and slow to tell.
        limit = ends[math.copysign(INF, x)]
        return x if name == "softplus" and x > 0 else dtype(limit)
    return rounded(reference(MP.mpf(float(x))), dtype)


def assert_close(got, want, ulps, where):
    """No element of `got` is further from `want` than `ulps` floats."""
    if not got.size:
        return
    distance = np.abs(ordinal(got) - ordinal(want))
    distance[np.isnan(got) & np.isnan(want)] = 0
    distance[np.isnan(got) != np.isnan(want)] = 10**9
    worst = int(np.argmax(distance))
    assert distance[worst] <= ulps, f"{where(worst)}: got {got[worst]!r}, want {want[worst]!r}: {distance[worst]} ulp"


def check_unary(x, names=UNARY):
    results = values(x)
    for name in names:
        known = np.abs(x) <= f.LIMIT if name in _LIMITED else np.ones(x.size, bool)
        points = x[known]
        want = np.array([expected(name, point) for point in points], x.dtype)
        assert_close(results[name][known], want, 2, lambda k, name=name, points=points: f"{name}({points[k]!r})")


def any_floats(rng, count, dtype):
    """Floats of all exponents, subnormal and NaN too: random bits."""
    return rng.integers(0, 256, count * np.dtype(dtype).itemsize, np.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ulp_over_all_exponents(dtype):
    rng = np.random.default_rng()
    check_unary(np.concatenate([any_floats(rng, 150, dtype), dtype([0.0, INF, -INF, NAN])]))
    check_unary((rng.choice([-1, 1], 150) * np.exp2(rng.uniform(-30, 10, 150))).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UNARY)
def test_two_ulp_where_it_matters(name, dtype):
    rng = np.random.default_rng()
    low, high = UNARY[name][3]
    shrink = 0.15 if dtype is np.float32 and high > 100 else 1.0
    check_unary((rng.uniform(low, high, 300) * shrink).astype(dtype), [name])
    check_unary(rng.uniform(max(low, -2), min(high, 3), 300).astype(dtype), [name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_near_one(dtype):
    rng = np.random.default_rng()
    x = 1 + rng.choice([-1, 1], 200) * np.exp2(rng.uniform(-53 if dtype is np.float64 else -24, -2, 200))
    check_unary(x.astype(dtype), ["log", "log2", "log10", "acosh", "atanh", "asin", "acos", "erf"])
    check_unary(-x.astype(dtype), ["log1p", "atanh", "acos"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_near_multiples_of_half_pi(dtype):
    rng = np.random.default_rng()
    n = np.rint(np.exp2(rng.uniform(0, 39, 200)))
    x = (n * (math.pi / 2)).astype(dtype)
    check_unary(np.concatenate([x, np.nextafter(x, dtype(0)), -x]), _LIMITED)


# Numerators of good fractions for pi, and so close to multiples of pi/2; powers of two; pi/2 itself and its half.
HARD = [11.0, 22.0, 333.0, 355.0, 103993.0, 104348.0, 5419351.0, 245850922.0, 411557987.0, 2.0**39, 2.0**40]


def test_hard_arguments():
    for dtype in DTYPES:
        check_unary(np.array([*HARD, math.pi / 2, math.pi / 4, math.pi], dtype), _LIMITED)


# Arguments around which a function first gives infinity, a subnormal, zero or its limit, or changes its formula: for
# float32, for float64.
CROSSINGS = {
    "exp": ([88.72284, -87.33655, -103.97208], [709.782712893384, -708.396418532264, -745.1332191019412]),
    "expm1": ([88.72284, -17.32868], [709.782712893384, -37.42994775023705]),
    "sinh": ([89.41599, -89.41599], [710.4758600739439, -710.4758600739439]),
    "cosh": ([89.41599, -89.41599], [710.4758600739439, -710.4758600739439]),
    "tanh": ([9.010913], [19.06154746539849]),
    "sigmoid": ([-87.33655, -103.97208, 17.32868], [-708.396418532264, -745.1332191019412, 37.43]),
    "softplus": ([-87.33655, -103.97208, 17.32868], [-708.396418532264, -745.1332191019412, 37.43]),
    "erf": ([3.919206, 1.0], [5.9215871957945074, 1.0]),
    "erfc": ([9.194549, 10.054861, 10.1, 0.0], [26.543258, 27.226017, 27.3, 0.0]),
    "asinh": ([2.0**15], [2.0**30]),
    "acosh": ([2.0**15], [2.0**30]),
    "asin": ([0.5, 1.0], [0.5, 1.0]),
    "acos": ([0.5, -0.5, 1.0], [0.5, -0.5, 1.0]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UNARY)
def test_crossings(name, dtype):
    points = np.array(CROSSINGS.get(name, ([1.0], [1.0]))[dtype is np.float64], dtype)
    around = [points]
    for toward in (INF, -INF):
        step = points
        for _ in range(6):
            step = np.nextafter(step, dtype(toward))
            around.append(step)
    check_unary(np.concatenate(around), [name])


@settings(max_examples=120, deadline=None)
@given(x=st.floats())
def test_any_double(x):
    check_unary(np.array([x]))


@settings(max_examples=120, deadline=None)
@given(x=st.floats(width=32))
def test_any_float32(x):
    check_unary(np.array([x], np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_signed_zeros(dtype):
    results = values(np.array([0.0, -0.0], dtype))
    for name in ODD:
        assert results[name].tolist() == [0, 0]
        assert np.signbit(results[name]).tolist() == [False, True], name
    for name in ("log", "log2", "log10"):
        assert results[name].tolist() == [-INF, -INF]


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_results(dtype):
    whole = np.arange(-126, 128).astype(dtype)
    assert np.array_equal(values(np.exp2(whole))["log2"], whole)
    tens = np.arange(0, 11).astype(dtype)
    assert np.array_equal(values(np.array([10.0**n for n in range(11)], dtype))["log10"], tens)
    assert values(np.array([1], dtype))["log"][0] == 0
    assert values(np.array([1], dtype))["acos"][0] == 0
    assert values(np.array([0], dtype))["sigmoid"][0] == 0.5
    assert values(np.array([0, -0.0, INF, -INF], dtype))["erfc"].tolist() == [1, 1, 0, 2]


def test_sines_of_infinity_are_nan():
    for dtype in DTYPES:
        results = values(np.array([INF, -INF, NAN], dtype))
        for name in _LIMITED:
            assert np.isnan(results[name]).all()


# C99's table (annex F.9.4.4) as far as it is not computed.
POW = [
    *[(0.0, y, INF) for y in (-1.0, -3.0, -2.0, -0.5, -1e30, -INF)],
    *[(-0.0, y, -INF) for y in (-1.0, -3.0)],
    *[(-0.0, y, INF) for y in (-2.0, -0.5, -1e30, -INF)],
    *[(0.0, y, 0.0) for y in (1.0, 3.0, 2.0, 0.5, 1e30, INF)],
    *[(-0.0, y, -0.0) for y in (1.0, 3.0)],
    *[(-0.0, y, 0.0) for y in (2.0, 0.5, 1e30, INF)],
    *[(-1.0, y, 1.0) for y in (INF, -INF, 2.0, 1e30)],
    *[(1.0, y, 1.0) for y in (INF, -INF, NAN, 0.0, 3.7)],
    *[(x, y, 1.0) for x in (0.0, -0.0, 5.0, -5.0, INF, -INF, NAN) for y in (0.0, -0.0)],
    *[(x, y, NAN) for x in (-2.0, -0.3, -1e-30, -1e30) for y in (0.5, -0.5, 1.5, -2.5)],
    *[(x, -INF, INF) for x in (0.5, -0.5)],
    *[(x, INF, 0.0) for x in (0.5, -0.5)],
    *[(x, -INF, 0.0) for x in (2.0, -2.0, INF, -INF)],
    *[(x, INF, INF) for x in (2.0, -2.0, INF, -INF)],
    *[(-INF, y, -0.0) for y in (-1.0, -3.0)],
    *[(-INF, y, 0.0) for y in (-2.0, -0.5)],
    *[(-INF, y, -INF) for y in (1.0, 3.0)],
    *[(-INF, y, INF) for y in (2.0, 0.5)],
    *[(INF, y, 0.0) for y in (-1.0, -0.5)],
    *[(INF, y, INF) for y in (1.0, 0.5)],
    *[(x, NAN, NAN) for x in (0.0, 2.0, -1.0, INF)],
    *[(NAN, y, NAN) for y in (1.0, -2.5, INF)],
    (-2.0, 3.0, -8.0),
    (-2.0, -3.0, -0.125),
    (-2.0, 2.0, 4.0),
    (3.0, 4.0, 81.0),
    (2.0, -149.0, 2.0**-149),
    (-1.0, 2.0**23 + 1, -1.0),
]
_PI = math.pi
# C99's table (annex F.9.1.4).
ATAN2 = [
    (0.0, -0.0, _PI),
    (-0.0, -0.0, -_PI),
    (0.0, 0.0, 0.0),
    (-0.0, 0.0, -0.0),
    *[(s * 0.0, -x, s * _PI) for s in (1, -1) for x in (1.0, 1e-30, INF)],
    *[(s * 0.0, x, s * 0.0) for s in (1, -1) for x in (1.0, 1e-30, INF)],
    *[(s * y, z, s * _PI / 2) for s in (1, -1) for y in (1.0, INF) for z in (0.0, -0.0)],
    *[(s * 2.0, -INF, s * _PI) for s in (1, -1)],
    *[(s * 2.0, INF, s * 0.0) for s in (1, -1)],
    *[(s * INF, x, s * _PI / 2) for s in (1, -1) for x in (3.0, -3.0)],
    *[(s * INF, -INF, s * 3 * _PI / 4) for s in (1, -1)],
    *[(s * INF, INF, s * _PI / 4) for s in (1, -1)],
    *[(s, s2, s * (_PI / 4 if s2 > 0 else 3 * _PI / 4)) for s in (1.0, -1.0) for s2 in (1.0, -1.0)],
    (NAN, 1.0, NAN),
    (1.0, NAN, NAN),
    (NAN, INF, NAN),
]
HYPOT = [
    *[(x, y, INF) for x in (INF, -INF) for y in (0.0, 1.0, NAN, -INF)],
    *[(y, x, INF) for x in (INF, -INF) for y in (0.0, 1.0, NAN, -INF)],
    (NAN, 1.0, NAN),
    (1.0, NAN, NAN),
    (0.0, -0.0, 0.0),
    (-3.0, 4.0, 5.0),
    (0.0, -2.0, 2.0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "table"), [("pow", POW), ("atan2", ATAN2), ("hypot", HYPOT)])
def test_special_values_of_two_arguments(name, table, dtype):
    x, y, want = (np.array(column, dtype) for column in zip(*table, strict=True))
    got = values2(x, y)[name]
    for k in range(len(table)):
        assert got[k] == want[k] or (np.isnan(got[k]) and np.isnan(want[k])), (name, table[k], got[k])
        assert np.isnan(want[k]) or np.signbit(got[k]) == np.signbit(want[k]), (name, table[k], got[k])


def _pow(x, y):
    if MP.fabs(y * MP.log(abs(x))) > 5000:
        return MP.inf if (y > 0) == (abs(x) > 1) else MP.zero
    return MP.power(x, y)


REFERENCES2 = {
    "pow": _pow,
    "atan2": MP.atan2,
    "hypot": lambda x, y: MP.sqrt(x * x + y * y),
}


def check_binary(name, x, y):
    assert np.isfinite(x).all()
    assert np.isfinite(y).all()
    want = [
        rounded(REFERENCES2[name](MP.mpf(float(a)), MP.mpf(float(b))), x.dtype.type) for a, b in zip(x, y, strict=True)
    ]
    got = values2(x, y)[name]
    assert_close(got, np.array(want, x.dtype), 2, lambda k: f"{name}({x[k]!r}, {y[k]!r})")


@pytest.mark.parametrize("dtype", DTYPES)
def test_pow(dtype):
    rng = np.random.default_rng()
    top = 700 if dtype is np.float64 else 85
    x = np.exp(rng.uniform(-top, top, 500)).astype(dtype)
    check_binary("pow", x, (rng.uniform(-top * 1.06, top * 1.02, 500) / np.log(x)).astype(dtype))
    x = (1 + rng.choice([-1, 1], 300) * np.exp2(rng.uniform(-22, -2, 300))).astype(dtype)
    check_binary("pow", x, (rng.uniform(-top * 1.06, top * 1.02, 300) / np.log(x.astype(float))).astype(dtype))
    check_binary("pow", np.abs(any_numbers(rng, 200, dtype)), any_numbers(rng, 200, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pow_of_negative_numbers(dtype):
    rng = np.random.default_rng()
    x, y = -np.exp(rng.uniform(-2, 2, 200)).astype(dtype), rng.integers(-40, 40, 200).astype(dtype)
    check_binary("pow", x, y)


def any_numbers(rng, count, dtype):
    """`any_floats` that are finite and not zero."""
    x = any_floats(rng, 2 * count, dtype)
    return x[np.isfinite(x) & (x != 0)][:count].copy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["atan2", "hypot"])
def test_two_ulp_of_two_arguments(name, dtype):
    rng = np.random.default_rng()
    check_binary(name, any_numbers(rng, 300, dtype), any_numbers(rng, 300, dtype))
    x = any_numbers(rng, 300, dtype)
    with np.errstate(over="ignore"):
        y = (x * np.exp(rng.normal(size=300) * 2)).astype(dtype)
    near = np.isfinite(y) & (y != 0)
    check_binary(name, x[near], y[near])
    check_binary(name, rng.normal(size=300).astype(dtype), rng.normal(size=300).astype(dtype))
    scale = np.finfo(dtype).smallest_subnormal
    subnormal = [(rng.integers(-(2**22), 2**22, 200) * scale).astype(dtype) for _ in range(2)]
    check_binary(name, *(np.where(part == 0, scale, part) for part in subnormal))


def same_bits(a, b):
    """Equal bit for bit, NaNs of any kind equal."""
    integer = _INTEGERS[a.dtype.type]
    return bool(((a.view(integer) == b.view(integer)) | (np.isnan(a) & np.isnan(b))).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_depend_on_the_element_alone(dtype):
    rng = np.random.default_rng()
    x = np.concatenate([any_floats(rng, 60, dtype), rng.uniform(-3, 3, 60).astype(dtype)])
    y = rng.permutation(x)
    whole, whole2 = values(x), values2(x, y)
    for start, size in itertools.product((0, 1, 3, 8), (1, 2, 3, 7, 8, 15, 33, 64, 97)):
        part = slice(start, start + size)
        for name, row in values(x[part]).items():
            assert same_bits(row, whole[name][part]), (name, start, size)
        for name, row in values2(x[part], y[part]).items():
            assert same_bits(row, whole2[name][part]), (name, start, size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_arrays_give_the_same_bits(dtype):
    rng = np.random.default_rng()
    spread = rng.uniform(-3, 3, 300).astype(dtype)
    x = spread[::3]
    out = np.empty((len(UNARY), x.size), dtype)
    _unary(x, out)
    for name, row in values(x.copy()).items():
        assert same_bits(row, out[list(UNARY).index(name)]), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_argument_of_sines(dtype):
    rng = np.random.default_rng()
    limit = f.LIMIT
    x = np.concatenate([any_numbers(rng, 150, dtype), rng.uniform(-10, 10, 50).astype(dtype), dtype([limit, -limit])])
    x = np.concatenate([x, np.nextafter(x[-2:], dtype(INF) * np.sign(x[-2:])), dtype([INF, NAN])])
    out = np.empty((len(ANY), x.size), dtype)
    _any(x, out)
    fast, within = values(x), np.abs(x) <= limit
    for (name, reference), row in zip(ANY.items(), out, strict=True):
        assert same_bits(row[within], fast[name.removesuffix("_any")][within])
        assert np.isnan(row[-2:]).all()
        want = np.array([rounded(reference(MP.mpf(float(v))), dtype) for v in x[:-2]], dtype)
        assert_close(row[:-2], want, 2, lambda k, name=name: f"{name}({x[k]!r})")


@numba.njit
def _typed(integer, truth, single):
    powers = f.pow(single, single), f.pow(single, 2.0), f.pow(integer, single)
    return f.exp(integer), f.exp(truth), *powers, f.sin_any(integer), f.cos_any(single)


def test_float32_stays_and_every_other_type_becomes_float64():
    results = _typed(1, True, np.float32(2))
    assert results == pytest.approx((math.e, math.e, 4, 4, 1, math.sin(1), math.cos(2)), rel=1e-6)
    wide, single = numba.float64, numba.float32
    [signature] = _typed.nopython_signatures
    assert tuple(signature.return_type) == (wide, wide, single, wide, wide, wide, single)


def _packed(name, dtype):
    arguments = ["x", "y"] if name in BINARY else ["x"]
    real = numba.from_dtype(np.dtype(dtype))
    kernel = _compile([name], arguments)
    kernel.compile((real[::1],) * len(arguments) + (real[:, ::1],))
    [assembly] = kernel.inspect_asm().values()
    return len(re.findall(r"v(?:fn?m(?:add|sub)\d*|mul|add)p[sd]\s.*[yz]mm", assembly))


@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_loops_are_vectorised(name):
    features = llvmlite.binding.get_host_cpu_features()
    if not features.get("avx2") or not features.get("fma"):
        pytest.skip("the host has no AVX2 with FMA, whose packed instructions this test looks for")
    for dtype in DTYPES:
        assert _packed(name, dtype) > 3


def test_coefficients_are_what_their_script_makes():
    path = Path(__file__).parents[2] / "docs" / "coefficients.py"
    specification = importlib.util.spec_from_file_location("make_coefficients", path)
    script = importlib.util.module_from_spec(specification)
    sys.modules["make_coefficients"] = script
    try:
        specification.loader.exec_module(script)
        made = {}
        exec(script.module(), made)
    finally:
        del sys.modules["make_coefficients"]
    names = [name for name in vars(coefficients) if name.isupper()]
    assert sorted(names) == sorted(name for name in made if name.isupper())
    for name in names:
        assert getattr(coefficients, name) == made[name], name


def test_importing_sweepgrad_does_not_import_them():
    code = "import sys, sweepgrad; sys.exit('sweepgrad.kernels.machine' in sys.modules or 'llvmlite' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
