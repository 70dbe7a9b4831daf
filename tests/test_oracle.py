"""Gradients of random graphs against forward mode, written anew here: dual numbers in float64, a formula per operation.

A `Dual` has a value and its derivative by every element of every input. The formulas are NumPy's and SciPy's, and none
is taken from the library. What rounding may do to a gradient is measured: the oracle is run once more with noise in
every intermediate value, and the gradients have to agree as well as that one does.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from scipy import special

import sweepgrad as sg
from strategies import examples, seeds
from sweepgrad.ops.op import OPS, Elementwise
from sweepgrad.ops.structural import Composed

# --- the oracle -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dual:
    """An array, and its derivatives: `tangent[k]` is that by the k-th of all elements of all inputs."""

    value: np.ndarray
    tangent: np.ndarray
    depends: frozenset = frozenset()
    """The inputs from which a cotangent may come back to: all that it was computed from, if only with derivative 0."""

    @property
    def shape(self):
        return self.value.shape


def constant(array, directions):
    array = np.asarray(array, float)
    return Dual(array, np.zeros((directions, *array.shape)))


UNARY = {
    "negative": (lambda x: -x, lambda x: -np.ones_like(x)),
    "positive": (lambda x: x, np.ones_like),
    "square": (np.square, lambda x: x + x),
    "reciprocal": (lambda x: x**-1, lambda x: -(x**-2)),
    "abs": (np.abs, np.sign),
    "sign": (np.sign, np.zeros_like),
    "floor": (np.floor, np.zeros_like),
    "ceil": (np.ceil, np.zeros_like),
    "trunc": (np.trunc, np.zeros_like),
    "round": (np.round, np.zeros_like),
    "sqrt": (np.sqrt, lambda x: 0.5 * x**-0.5),
    "exp": (np.exp, np.exp),
    "expm1": (np.expm1, np.exp),
    "log": (np.log, lambda x: x**-1),
    "log1p": (np.log1p, lambda x: (1 + x) ** -1),
    "log2": (np.log2, lambda x: math.log2(math.e) * x**-1),
    "log10": (np.log10, lambda x: math.log10(math.e) * x**-1),
    "sin": (np.sin, np.cos),
    "cos": (np.cos, lambda x: np.cos(x + math.pi / 2)),
    "tan": (np.tan, lambda x: np.cos(x) ** -2),
    "asin": (np.arcsin, lambda x: (1 - x**2) ** -0.5),
    "acos": (np.arccos, lambda x: -((1 - x**2) ** -0.5)),
    "atan": (np.arctan, lambda x: np.cos(np.arctan(x)) ** 2),
    "sinh": (np.sinh, lambda x: (np.exp(x) + np.exp(-x)) / 2),
    "cosh": (np.cosh, lambda x: (np.exp(x) - np.exp(-x)) / 2),
    "tanh": (np.tanh, lambda x: np.cosh(x) ** -2),
    "asinh": (np.arcsinh, lambda x: (x**2 + 1) ** -0.5),
    "acosh": (np.arccosh, lambda x: (x**2 - 1) ** -0.5),
    "atanh": (np.arctanh, lambda x: (1 - x**2) ** -1),
    "erf": (special.erf, lambda x: 2 / math.sqrt(math.pi) * np.exp(-(x**2))),
    "erfc": (special.erfc, lambda x: -2 / math.sqrt(math.pi) * np.exp(-(x**2))),
    "sigmoid": (special.expit, lambda x: special.expit(x) * special.expit(-x)),
    "relu": (lambda x: np.maximum(x, 0), lambda x: np.heaviside(x, 0)),
    "softplus": (lambda x: np.logaddexp(x, 0), special.expit),
    "gelu": (
        lambda x: x * special.ndtr(x),
        lambda x: special.ndtr(x) + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi),
    ),
}
"""Value and derivative."""

BINARY = {
    "add": (np.add, lambda x, y: (1, 1)),
    "subtract": (np.subtract, lambda x, y: (1, -1)),
    "multiply": (np.multiply, lambda x, y: (y, x)),
    "divide": (np.divide, lambda x, y: (y**-1, -x * y**-2)),
    "floor_divide": (np.floor_divide, lambda x, y: (0, 0)),
    "remainder": (np.remainder, lambda x, y: (1, -np.floor(x / y))),
    "pow": (np.power, lambda x, y: (y * x**y / x, np.log(x) * x**y)),
    "maximum": (np.maximum, lambda x, y: (x > y, y > x)),
    "minimum": (np.minimum, lambda x, y: (x < y, y < x)),
    "logaddexp": (np.logaddexp, lambda x, y: (np.exp(x - np.logaddexp(x, y)), np.exp(y - np.logaddexp(x, y)))),
    "atan2": (np.arctan2, lambda x, y: (y / (x**2 + y**2), -x / (x**2 + y**2))),
    "hypot": (np.hypot, lambda x, y: (np.sin(np.arctan2(x, y)), np.cos(np.arctan2(x, y)))),
}
"""Value and the two derivatives."""


def along(weights, tangent):
    """Tangents scaled by a derivative, both broadcast: shapes meet at the last axis, the directions stay in front."""
    missing = max(np.ndim(weights) - (tangent.ndim - 1), 0)
    return weights * tangent.reshape(tangent.shape[0], *(1,) * missing, *tangent.shape[1:])


def elementwise(function, derivatives, *args):
    value = np.asarray(function(*[arg.value for arg in args]), float)
    tangent = np.zeros((args[0].tangent.shape[0], *value.shape))
    for arg, slope in zip(args, derivatives(*[arg.value for arg in args]), strict=True):
        tangent = tangent + along(np.broadcast_to(slope, value.shape), arg.tangent)
    return Dual(value, tangent, frozenset().union(*(arg.depends for arg in args)))


def linear(function):
    """The rule of an operation for which value and tangents change alike."""

    def rule(*args, **params):
        parts = [function(*[arg.tangent[k] for arg in args], **params) for k in range(args[0].tangent.shape[0])]
        value = np.asarray(function(*[arg.value for arg in args], **params))
        tangent = np.stack(parts) if parts else np.zeros((0, *value.shape))
        return Dual(value, tangent, frozenset().union(*(arg.depends for arg in args)))

    return rule


def bilinear(function):
    """The rule of a product of two: d(a b) = da b + a db."""

    def rule(a, b, **params):
        left = linear(lambda t: function(t, b.value, **params))(a)
        right = linear(lambda t: function(a.value, t, **params))(b)
        return Dual(left.value, left.tangent + right.tangent, a.depends | b.depends)

    return rule


def reducing(function, pushed):
    """The rule of a reduction: `pushed(x, t, axis)` is the derivative along `t`, with the reduced axes kept."""

    def rule(x, axis, keepdims=False, **params):
        value = np.asarray(function(x.value, axis=axis, keepdims=keepdims, **params))
        axes = tuple(range(x.value.ndim)) if axis is None else axis

        def push(t):
            return pushed(x.value, t, axes, **params).reshape(value.shape)

        parts = [push(t) for t in x.tangent]
        return Dual(value, np.stack(parts) if parts else np.zeros((0, *value.shape)), x.depends)

    return rule


def extreme(function):
    return reducing(function, lambda x, t, axis: np.sum(t * (x == function(x, axis=axis, keepdims=True)), axis=axis))


def rows(x, axis):
    """`x` with the axes `axis` as the first one."""
    kept = [length for k, length in enumerate(x.shape) if k not in axis]
    return np.moveaxis(x, axis, range(len(axis))).reshape(math.prod(x.shape[k] for k in axis), *kept)


def product(x, t, axis):
    """Each factor in turn replaced by its tangent."""
    factors, tangents = rows(x, axis), rows(t, axis)
    total = np.zeros(factors.shape[1:])
    for k in range(len(factors)):
        total = total + tangents[k] * np.delete(factors, k, axis=0).prod(axis=0)
    return total


def count(x, axis):
    return math.prod(x.shape[k] for k in axis)


def spread(x, t, axis, correction):
    centred = x - x.mean(axis=axis, keepdims=True)
    return 2 / (count(x, axis) - correction) * np.sum(centred * t, axis=axis)


def deviation(x, t, axis, correction):
    return spread(x, t, axis, correction) / (2 * np.std(x, axis=axis, ddof=correction))


def softmax(x, axis):
    powers = np.exp(x)
    return powers / powers.sum(axis=axis, keepdims=True)


def weighted(x, t, axis):
    return np.sum(softmax(x, axis) * t, axis=axis, keepdims=True)


def normalised(function, pushed):
    def rule(x, axis):
        value = function(x.value, axis)
        parts = [pushed(x.value, t, axis) for t in x.tangent]
        return Dual(value, np.stack(parts) if parts else np.zeros((0, *value.shape)), x.depends)

    return rule


REDUCTIONS = {
    "sum": reducing(np.sum, lambda x, t, axis: np.sum(t, axis=axis)),
    "mean": reducing(np.mean, lambda x, t, axis: np.sum(t, axis=axis) / count(x, axis)),
    "prod": reducing(np.prod, product),
    "max": extreme(np.max),
    "min": extreme(np.min),
    "var": reducing(lambda x, correction, **how: np.var(x, ddof=correction, **how), spread),
    "std": reducing(lambda x, correction, **how: np.std(x, ddof=correction, **how), deviation),
    "logsumexp": reducing(lambda x, **how: np.log(np.sum(np.exp(x), **how)), weighted),
}
NORMALISED = {
    "softmax": normalised(softmax, lambda x, t, axis: softmax(x, axis) * (t - weighted(x, t, axis))),
    "log_softmax": normalised(lambda x, axis: np.log(softmax(x, axis)), lambda x, t, axis: t - weighted(x, t, axis)),
}
OTHERS = {
    "where": lambda c, x, y: elementwise(
        lambda x, y: np.where(c.value > LIMIT, x, y), lambda x, y: (c.value > LIMIT, c.value <= LIMIT), x, y
    ),
    "clip": lambda x, low, high: elementwise(
        np.clip, lambda x, low, high: ((low < x) & (x < high), x < low, x > high), x, low, high
    ),
    "astype": linear(lambda x: x),  # to its own dtype
    "reshape": linear(np.reshape),
    "permute_dims": linear(np.transpose),
    "matrix_transpose": linear(lambda x: np.swapaxes(x, -1, -2)),
    "moveaxis": linear(np.moveaxis),
    "expand_dims": linear(np.expand_dims),
    "squeeze": linear(np.squeeze),
    "broadcast_to": linear(np.broadcast_to),
    "flip": linear(np.flip),
    "roll": linear(np.roll),
    "getitem": linear(lambda x, key: x[key]),
    "take": linear(np.take),
    "concat": linear(lambda *xs, axis: np.concatenate(xs, axis=axis)),
    "stack": linear(lambda *xs, axis: np.stack(xs, axis=axis)),
    "matmul": bilinear(np.matmul),
    "tensordot": bilinear(np.tensordot),
    "vecdot": bilinear(lambda x, y, axis: np.sum(np.moveaxis(x, axis, -1) * np.moveaxis(y, axis, -1), axis=-1)),
}
LIMIT = 0.25
"""Where `where` chooses."""

ORACLE = (
    {name: functools.partial(elementwise, f, lambda x, df=df: (df(x),)) for name, (f, df) in UNARY.items()}
    | {name: functools.partial(elementwise, f, df) for name, (f, df) in BINARY.items()}
    | REDUCTIONS
    | NORMALISED
    | OTHERS
)


def library(name, *args, **params):
    """The operation that is to be tested."""
    if name == "getitem":
        return args[0][params["key"]]
    if name == "where":
        condition, *values = args
        return sg.where(condition > LIMIT, *values)
    if name == "astype":
        return sg.astype(args[0], args[0].dtype)
    if name in ("concat", "stack"):
        return getattr(sg, name)(list(args), **params)
    return getattr(sg, name)(*args, **params)


# --- programs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """An operation on earlier values, which are given by their position, or on numbers."""

    name: str
    args: tuple
    params: tuple = ()


@dataclass(frozen=True)
class Program:
    """Inputs, of which some are variables, and steps; the last value is the result."""

    shapes: tuple
    variables: tuple
    seed: int
    steps: tuple

    def inputs(self, dtype):
        """Numbers that `dtype` has, in float64."""
        rng = np.random.default_rng(self.seed)
        return [rng.uniform(-1.5, 1.5, shape).astype(dtype).astype(float) for shape in self.shapes]

    def run(self, *tensors):
        """The result of the library."""
        values = list(tensors)
        for step in self.steps:
            values.append(library(step.name, *picked(values, step), **dict(step.params)))
        return values[-1]

    def oracle(self, arrays, noise=0.0):
        """All values, as duals; with `noise`, every one is wrong by a random part of itself."""
        rng = np.random.default_rng(1)
        duals = entered(arrays)
        for step in self.steps:
            duals.append(noisy(predicted(duals, step), noise, rng))
        return duals


def picked(values, step):
    return [values[arg] if isinstance(arg, int) else arg for arg in step.args]


def entered(arrays, directions=None):
    """The inputs; each direction is one of their elements, unless there are fewer."""
    sizes = [array.size for array in arrays]
    units = np.eye(sum(sizes))[:directions]
    starts = np.cumsum([0, *sizes])
    return [
        Dual(array, units[:, start : start + array.size].reshape(len(units), *array.shape), frozenset([k]))
        for k, (array, start) in enumerate(zip(arrays, starts, strict=False))
    ]


def predicted(duals, step):
    directions = duals[0].tangent.shape[0]
    args = [arg if isinstance(arg, Dual) else constant(arg, directions) for arg in picked(duals, step)]
    return ORACLE[step.name](*args, **dict(step.params))


def noisy(dual, noise, rng):
    if not noise:
        return dual
    value, tangent = (array * (1 + noise * rng.standard_normal(array.shape)) for array in (dual.value, dual.tangent))
    return Dual(value, tangent, dual.depends)


def gradients(program, arrays, weights, noise=0.0):
    """The gradients of the weighted sum of the result by all inputs."""
    result = program.oracle(arrays, noise)[-1]
    slopes = (result.tangent * weights).sum(axis=tuple(range(1, result.tangent.ndim)))
    parts = np.split(slopes, np.cumsum([array.size for array in arrays])[:-1])
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


# --- which programs ---------------------------------------------------------------------------------------------------

DOMAINS = {
    "reciprocal": [(0.4, 3)], "sqrt": [(0.2, 4)], "log": [(0.2, 4)], "log2": [(0.2, 4)], "log10": [(0.2, 4)],
    "log1p": [(-0.7, 3)], "tan": [(-1.2, 1.2)], "asin": [(-0.9, 0.9)], "acos": [(-0.9, 0.9)], "acosh": [(1.2, 4)],
    "atanh": [(-0.8, 0.8)], "exp": [(-3, 2)], "expm1": [(-3, 2)], "sinh": [(-2, 2)], "cosh": [(-2, 2)],
    "erf": [(-2, 2)], "erfc": [(-2, 2)], "gelu": [(-3, 3)], "sigmoid": [(-4, 4)], "softplus": [(-4, 4)],
    "tanh": [(-3, 3)], "divide": [(), (0.4, 3)], "floor_divide": [(), (0.5, 3)], "remainder": [(), (0.5, 3)],
    "pow": [(0.4, 2.5), (-2, 2)], "atan2": [(), (0.4, 3)], "hypot": [(0.3, 3), (0.3, 3)], "prod": [(-2, 2)],
    "logsumexp": [(-3, 3)], "softmax": [(-3, 3)], "log_softmax": [(-3, 3)],
}  # fmt: skip
"""Where the derivatives are neither huge nor lost in rounding; what lies outside is squashed into it."""

LARGEST = 8.0
"""What lies beyond is squashed, so that a chain of products does not run away."""

CLEARANCE = 0.02
"""How far from a point without a derivative."""


def clear(name, *args, **params):
    """Whether an operation is differentiable at and around the values `args`."""
    x, *others = args
    if name == "where":
        gaps = [x - LIMIT]
    elif name in ("abs", "sign", "relu"):
        gaps = [x]
    elif name in ("floor", "ceil", "trunc"):
        gaps = [x - np.round(x)]
    elif name == "round":
        gaps = [x - np.floor(x) - 0.5]
    elif name in ("floor_divide", "remainder"):
        gaps = [x / others[0] - np.round(x / others[0])]
    elif name in ("maximum", "minimum"):
        gaps = [x - others[0]]
    elif name == "clip":
        gaps = [x - limit for limit in others]
    elif name in ("max", "min"):
        order = np.sort(rows(x, axes_of(x, params)), axis=0)
        gaps = [np.diff(order[-2:] if name == "max" else order[:2], axis=0)]
    elif name == "std":
        gaps = [np.std(x, axis=params["axis"])]
    else:
        gaps = []
    return all(np.all(np.abs(gap) > CLEARANCE) for gap in gaps)


def axes_of(x, params):
    return tuple(range(x.ndim)) if params["axis"] is None else params["axis"]


class Builder:
    """Puts a program together, and knows the values so far."""

    def __init__(self, shapes, variables, seed):
        self.start = Program(tuple(shapes), tuple(variables), seed, ())
        self.values = entered(self.start.inputs("float32"), directions=0)
        self.steps = []

    def program(self):
        return Program(self.start.shapes, self.start.variables, self.start.seed, tuple(self.steps))

    def add(self, name, *args, **params):
        """The position of a new value."""
        step = Step(name, args, tuple(params.items()))
        self.values.append(predicted(self.values, step))
        assert np.all(np.isfinite(self.values[-1].value)), step
        self.steps.append(step)
        return len(self.values) - 1

    def shape(self, k):
        return () if isinstance(k, float) else self.values[k].shape

    def squashed(self, k, low=-LARGEST, high=LARGEST):
        """Value `k`, between the limits, by further steps if need be."""
        x = self.values[k].value
        if np.all((x >= low) & (x <= high)):
            return k
        k = self.add("multiply", self.add("tanh", k), (high - low) / 2)
        return self.add("add", k, (high + low) / 2)

    def apply(self, name, *args, **params):
        """The operation on values in its domain; unless it has a kink near them."""
        domains = DOMAINS.get(name, [()] * len(args))
        args = [
            self.squashed(arg, *limits) if isinstance(arg, int) else float(np.clip(arg, *(limits or (None, None))))
            for arg, limits in zip(args, domains, strict=True)
        ]
        known = [self.values[arg].value if isinstance(arg, int) else np.asarray(arg) for arg in args]
        return self.add(name, *args, **params) if clear(name, *known, **params) else None


def fits(function, *shapes):
    """Whether a function takes arrays of these shapes, and what it makes of them is small."""
    try:
        result = function(*map(np.zeros, shapes))
    except (ValueError, IndexError):
        return False
    return result.size <= MOST and result.ndim <= 4


MOST = 48
FAMILIES = [[(2, 3), (3,), (2, 1), (), (1, 3)]] * 5 + [[(3, 2, 2), (2, 2), (2, 1)]] + [[(0, 3), (3,), (1, 3), ()]]
NUMBERS = st.sampled_from([0.7, 2.0, -1.25])
FLAT = ("floor", "ceil", "trunc", "round", "sign", "floor_divide")
"""What ends a cotangent's way: rare, so that most of a program is tested."""


@st.composite
def drawn(draw, kinds, families=FAMILIES, size=7):
    """A program of random operations of these kinds: functions that draw a step."""
    family = draw(st.sampled_from(families))
    shapes = draw(st.lists(st.sampled_from(family), min_size=1, max_size=4))
    variables = [True, *(draw(st.integers(0, 3)) > 0 for _ in shapes[1:])]
    builder = Builder(shapes, variables, draw(seeds))
    for _ in range(draw(st.integers(2, size))):
        last = len(builder.values) - 1
        k = builder.squashed(draw(st.one_of(st.just(last), st.integers(0, last))))
        draw(st.sampled_from(kinds))(draw, builder, k)
    return builder.program()


def partner(draw, builder, function, k):
    """The position of a value, perhaps `k` itself, which `function` takes beside it; None if there is none."""
    found = [j for j in range(len(builder.values)) if fits(function, builder.shape(k), builder.shape(j))]
    return draw(st.sampled_from(found)) if found else None


def draw_unary(draw, builder, k):
    flat = draw(st.integers(0, 9)) == 0
    builder.apply(draw(st.sampled_from([name for name in UNARY if (name in FLAT) == flat])), k)


def draw_binary(draw, builder, k):
    name = draw(st.sampled_from([name for name in BINARY if name not in FLAT or draw(st.integers(0, 9)) == 0]))
    other = draw(NUMBERS) if draw(st.integers(0, 3)) == 0 else partner(draw, builder, np.add, k)
    builder.apply(name, *draw(st.permutations([k, other])))


def partners(draw, builder, k):
    """The positions of two values that broadcast with `k`, and with each other."""
    other, third = (partner(draw, builder, np.add, k) for _ in range(2))
    together = fits(lambda x, y, z: x + y + z, *map(builder.shape, (k, other, third)))
    return other, third if together else other


def draw_where(draw, builder, k):
    builder.apply("where", *draw(st.permutations([k, *partners(draw, builder, k)])))


def draw_clip(draw, builder, k):
    if draw(st.booleans()):
        builder.apply("clip", k, -0.6, 0.8)
    else:
        low, high = partners(draw, builder, k)
        builder.apply("clip", k, builder.squashed(low, -2.0, -0.5), builder.squashed(high, 0.5, 2.0))


def draw_reduction(draw, builder, k):
    x = builder.values[k].value
    axes = draw(st.sets(st.sampled_from(range(x.ndim)), min_size=1)) if x.ndim else set()
    reduce_over(draw, builder, k, tuple(sorted(axes)) if axes and draw(st.booleans()) else None, draw(st.booleans()))


def reduce_over(draw, builder, k, axis, keepdims, names=(*REDUCTIONS, *NORMALISED)):
    x = builder.values[k].value
    length = count(x, axes_of(x, {"axis": axis}))
    name = draw(st.sampled_from(names if x.size else ("sum", "prod")))
    params = {"axis": axis}
    if name not in NORMALISED:
        params["keepdims"] = keepdims
    elif axis is None:
        params["axis"] = tuple(range(x.ndim))
    if name in ("var", "std"):
        params["correction"] = draw(st.sampled_from([0, 1])) if length > 1 else 0
    if name in NORMALISED and not x.ndim:
        name, params = "positive", {}
    builder.apply(name, k, **params)


def draw_shape(draw, builder, k):
    shape = builder.shape(k)
    ndim = len(shape)
    forms = [
        ("astype", {}),
        ("reshape", {"shape": (math.prod(shape),)}),
        ("reshape", {"shape": shape[::-1]}),
        ("permute_dims", {"axes": tuple(range(ndim))[::-1]}),
        ("expand_dims", {"axis": draw(st.integers(0, ndim))}),
        ("flip", {"axis": None}),
    ]
    if math.prod(shape) * 2 <= MOST and ndim < 4:
        forms += [("broadcast_to", {"shape": (2, *shape)})] * 2
    if 1 in shape:
        forms += [("squeeze", {"axis": shape.index(1)})] * 2
    if ndim:
        axis = draw(st.integers(-ndim, ndim - 1))
        forms += [("moveaxis", {"source": 0, "destination": -1}), ("roll", {"shift": 1, "axis": axis})]
        forms += [("flip", {"axis": axis})]
    if ndim > 1:
        forms += [("matrix_transpose", {})] * 2
    name, params = draw(st.sampled_from(forms))
    builder.add(name, k, **params)


def draw_index(draw, builder, k):
    shape = builder.shape(k)
    keys = [(None, Ellipsis), Ellipsis]
    if shape:
        keys += [slice(None, None, -1), slice(1, None), (Ellipsis, slice(0, 2)), np.arange(shape[0]) % 2 == 0]
    if shape and math.prod(shape):
        repeated = np.array([0, -1, 0])
        keys += [0, (Ellipsis, -1), repeated, (slice(None), *(None,), Ellipsis), (Ellipsis, repeated)]
        if draw(st.booleans()):
            builder.add("take", k, indices=repeated, axis=draw(st.integers(0, len(shape) - 1)))
            return
    builder.add("getitem", k, key=draw(st.sampled_from(keys)))


def draw_joined(draw, builder, k):
    other = partner(draw, builder, lambda x, y: np.stack([x, y, x]), k)
    if other is None:
        return
    ndim = len(builder.shape(k))
    if ndim and draw(st.booleans()):
        builder.add("concat", k, other, k, axis=draw(st.integers(-ndim, ndim - 1)))
    else:
        builder.add("stack", k, other, k, axis=draw(st.integers(0, ndim)))


def draw_product(draw, builder, k):
    shape = builder.shape(k)
    if not shape:
        return
    name = draw(st.sampled_from(["matmul", "matmul", "tensordot", "vecdot"]))
    if name == "matmul":
        if len(shape) > 1 and draw(st.booleans()):
            k = builder.add("matrix_transpose", k)
        other = partner(draw, builder, np.matmul, k)
        params = {}
    elif name == "tensordot":
        axes = (draw(st.integers(0, len(shape) - 1)),)
        params = {"axes": (axes, axes)}
        other = partner(draw, builder, lambda x, y: np.tensordot(x, y, **params), k)
    else:
        other = partner(draw, builder, lambda x, y: np.vecdot(x, y) if x.ndim == y.ndim else np.zeros(MOST + 1), k)
        params = {"axis": -1}
    if other is not None:
        builder.apply(name, k, other, **params)


KINDS = [
    draw_unary, draw_unary, draw_unary, draw_binary, draw_binary, draw_binary, draw_where, draw_clip, draw_reduction,
    draw_reduction, draw_shape, draw_index, draw_joined, draw_product,
]  # fmt: skip


# --- the comparison ---------------------------------------------------------------------------------------------------

NOISE = {"float64": 1e-9, "float32": 1e-6}
ALLOWED = {"float64": 1e-3, "float32": 10.0}
"""Times what the noise changes: that of 1e-12 and 1e-5 in every value."""
LEAST = {"float64": 1e-12, "float32": 1e-5}


def check(program, run, dtype="float64", *, ways=("backward", "create_graph", "grad")):
    arrays = program.inputs("float32")
    duals = program.oracle(arrays)
    result = duals[-1]
    weights = np.random.default_rng(program.seed + 1).uniform(0.5, 1.5, result.shape).astype("float32").astype(float)
    expected = gradients(program, arrays, weights)
    rough = gradients(program, arrays, weights, NOISE[dtype])
    tensors = [sg.asarray(array, dtype=dtype) for array in arrays]
    scale = np.abs(result.value).max(initial=1.0)
    found = run(*tensors)
    assert (found.shape, found.dtype) == (result.shape, dtype)
    np.testing.assert_allclose(found.numpy(), result.value, atol=scale * (1e-10 if dtype == "float64" else 1e-2))
    chosen = [k for k, variable in enumerate(program.variables) if variable]
    for way in ways:
        for k, gradient in zip(chosen, obtained(way, run, tensors, chosen, weights.astype(dtype)), strict=True):
            if gradient is None:
                assert k not in result.depends, f"{way}: no gradient by input {k}"
                continue
            # `grad` fills in zeros, and a fused function is one operation of all its arguments.
            assert k in result.depends or way == "grad" or run != program.run, f"{way}: a gradient by input {k}"
            assert (gradient.shape, gradient.dtype) == (arrays[k].shape, dtype)
            changed = np.abs(rough[k] - expected[k]).max(initial=0.0)
            largest = np.abs(expected[k]).max(initial=1.0)
            np.testing.assert_allclose(
                gradient.numpy(),
                expected[k],
                rtol=0,
                atol=ALLOWED[dtype] * changed + LEAST[dtype] * largest,
                err_msg=f"{way}, by input {k}",
            )


def check_twice(program, run):
    """The derivative of the gradient along a random direction, against differences of the oracle's gradients."""
    arrays = program.inputs("float32")
    rng = np.random.default_rng(program.seed + 2)
    weights = rng.uniform(0.5, 1.5, program.oracle(arrays)[-1].shape)
    toward = [rng.uniform(-1.0, 1.0, array.shape) for array in arrays]
    chosen = range(len(arrays))

    def slope(*tensors):
        found = sg.grad(lambda *args: sg.sum(run(*args) * weights), argnums=chosen)(*tensors)
        return functools.reduce(sg.add, [sg.sum(one * way) for one, way in zip(found, toward, strict=True)])

    def differences(step):
        ends = [[a + sign * step * way for a, way in zip(arrays, toward, strict=True)] for sign in (1, -1)]
        high, low = (gradients(program, end, weights) for end in ends)
        return [(one - other) / (2 * step) for one, other in zip(high, low, strict=True)]

    wide, expected = differences(2e-5), differences(1e-5)
    for k, found in enumerate(sg.grad(slope, argnums=chosen)(*arrays)):
        error = np.abs(wide[k] - expected[k]).max(initial=0.0)
        largest = np.abs(expected[k]).max(initial=1.0)
        np.testing.assert_allclose(
            found.numpy(), expected[k], rtol=0, atol=10 * error + 1e-6 * largest, err_msg=f"second, by input {k}"
        )


def obtained(way, run, tensors, chosen, weights):
    """The gradients by the inputs `chosen`, in one of the ways to them."""
    if way == "grad":
        return sg.grad(lambda *args: sg.sum(run(*args) * weights), argnums=chosen)(*tensors)
    inputs = [sg.asarray(tensor.numpy(), requires_grad=k in chosen) for k, tensor in enumerate(tensors)]
    result = run(*inputs)
    if result.requires_grad:
        result.backward(weights, create_graph=way == "create_graph")
    return [inputs[k].grad for k in chosen]


# --- each operation ---------------------------------------------------------------------------------------------------

PARAMS = {
    **{name: {"axis": (1,), "keepdims": True} for name in REDUCTIONS},
    **{name: {"axis": (1,)} for name in NORMALISED},
    "var": {"axis": (0,), "keepdims": False, "correction": 1},
    "std": {"axis": None, "keepdims": False, "correction": 0.5},
    "reshape": {"shape": (3, 2)}, "permute_dims": {"axes": (1, 2, 0)},
    "moveaxis": {"source": 0, "destination": -1}, "expand_dims": {"axis": 1}, "squeeze": {},
    "broadcast_to": {"shape": (4, 2, 3)}, "flip": {"axis": 1}, "roll": {"shift": 2, "axis": 1},
    "getitem": {"key": (np.array([0, 1, 0]), np.array([2, 1, 2]))}, "take": {"indices": np.array([2, 0, 2]), "axis": 1},
    "concat": {"axis": 1}, "stack": {"axis": 1}, "tensordot": {"axes": ((0, 1), (0, 1))}, "vecdot": {"axis": -1},
}  # fmt: skip
ARITY = dict.fromkeys(UNARY, 1) | dict.fromkeys(BINARY, 2) | {"where": 3, "clip": 3, "concat": 2, "stack": 2}
ARITY |= {"matmul": 2, "tensordot": 2, "vecdot": 2}


def around(name):
    """A program in which the operation stands between others, and what it reads is used again."""
    for seed in range(100):
        builder = Builder([(2, 3), (2, 3), (2, 3)], [True] * 3, seed)
        args = [builder.add("multiply", k, 1.5) for k in range(ARITY.get(name, 1))]
        if name == "squeeze":
            args = [builder.add("expand_dims", args[0], axis=1)]
        if name == "permute_dims":  # one whose inverse is another one
            args = [builder.add("broadcast_to", args[0], shape=(4, 2, 3))]
        if name == "matmul":
            args[1] = builder.add("matrix_transpose", args[1])
        if name == "clip":
            args[1:] = builder.squashed(args[1], -0.8, -0.3), builder.squashed(args[2], 0.3, 0.8)
        result = builder.apply(name, *args, **PARAMS.get(name, {}))
        if result is not None:
            total = builder.add("sum", builder.add("multiply", result, builder.add("sin", result)), axis=None)
            builder.add("add", builder.add("multiply", total, args[0]), args[-1] if name != "matmul" else args[0])
            return builder.program()
    raise AssertionError(f"no numbers for `{name}`")


def test_every_operation_with_a_derivative_has_a_formula():
    rows = {row.name for row in OPS.values() if isinstance(row, Elementwise) and row.differentiable}
    rows |= {row.name for row in OPS.values() if isinstance(row, Composed) and getattr(row, "vjp", True)}
    # The first two are rules, of `getitem` and `sum`; where there is one device, the last does nothing (tests/cuda).
    assert rows - {"scatter", "expand", "to_device"} == set(ORACLE)


@pytest.mark.parametrize("name", ORACLE)
def test_each_operation_among_others(name):
    program = around(name)
    check(program, program.run)
    if name not in UNARY and name not in BINARY:  # of which both derivatives come from one formula
        check_twice(program, program.run)


@pytest.mark.parametrize("name", ORACLE)
def test_each_formula_against_its_own_differences(name):
    """That the oracle is right: its tangents are the slopes of its values."""
    program, step = around(name), 1e-6
    arrays = program.inputs("float32")
    weights = np.random.default_rng(5).standard_normal(program.oracle(arrays)[-1].shape)
    for k, gradient in enumerate(gradients(program, arrays, weights)):
        toward = np.random.default_rng(k).standard_normal(arrays[k].shape)
        ends = [[*arrays[:k], arrays[k] + sign * step * toward, *arrays[k + 1 :]] for sign in (1, -1)]
        high, low = (np.sum(program.oracle(end)[-1].value * weights) for end in ends)
        np.testing.assert_allclose(np.sum(gradient * toward), (high - low) / (2 * step), rtol=1e-6, atol=1e-6)


# --- random graphs ----------------------------------------------------------------------------------------------------


@examples(45)
@given(drawn(KINDS))
def test_random_graphs(program):
    check(program, program.run)


@examples(6)
@given(drawn(KINDS, size=4))
def test_random_graphs_differentiated_twice(program):
    check_twice(program, program.run)


@examples(6)
@given(drawn(KINDS))
def test_random_graphs_in_float32(program):
    check(program, program.run, "float32")


# --- fused ------------------------------------------------------------------------------------------------------------

FUSED_REDUCTIONS = tuple(name for name in (*REDUCTIONS, *NORMALISED) if name != "prod")


def draw_fused_reduction(axis):
    """A reduction of what has two axes, as a fused function takes them: all over the same one, or over both."""

    def step(draw, builder, k):
        if builder.shape(k) == (2, 3):
            reduce_over(draw, builder, k, axis, True, FUSED_REDUCTIONS)

    return step


@st.composite
def fusable(draw):
    kinds = [
        draw_unary,
        draw_binary,
        draw_where,
        draw_clip,
        draw_fused_reduction(draw(st.sampled_from([(0,), (1,), (0, 1)]))),
    ]
    return draw(drawn(kinds, FAMILIES[:1], size=5))


@pytest.mark.parametrize("name", [*FUSED_REDUCTIONS, "where", "clip", "pow"])
def test_each_kind_of_operation_fused_with_others(name):
    program = around(name)
    check(program, sg.fuse(program.run), ways=["backward"])


@examples(6)
@given(fusable())
def test_random_graphs_fused(program):
    try:
        check(program, sg.fuse(program.run), ways=["backward", "create_graph"])
    except sg.FuseError:  # what is reduced does not share its axis with the others
        reject()
