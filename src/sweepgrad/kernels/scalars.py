"""How each primitive scalar operation is written for each target: the only place that names a target's functions.

An entry is a template for the arguments' texts. Rows that are not listed are composites: their own function expands
into these. Also how reductions go over elements.
"""

from collections.abc import Mapping
from dataclasses import dataclass

CPU = {
    "add": "({} + {})",
    "subtract": "({} - {})",
    "multiply": "({} * {})",
    "divide": "({} / {})",
    "floor_divide": "({} // {})",
    "remainder": "np.copysign(np.remainder({0}, {1}), {1})",
    "pow": "f.pow({}, {})",
    "negative": "(-{})",
    "positive": "{}",
    "equal": "({} == {})",
    "not_equal": "({} != {})",
    "less": "({} < {})",
    "less_equal": "({} <= {})",
    "greater": "({} > {})",
    "greater_equal": "({} >= {})",
    "logical_and": "(({} != 0) & ({} != 0))",
    "logical_or": "(({} != 0) | ({} != 0))",
    "logical_xor": "(({} != 0) ^ ({} != 0))",
    "logical_not": "({} == 0)",
    "bitwise_and": "({} & {})",
    "bitwise_or": "({} | {})",
    "bitwise_xor": "({} ^ {})",
    "bitwise_invert": "(~{})",
    "where": "p.select({0}, {1}, {2})",
    "detached": "{}",
    "isnan": "np.isnan({})",
    "isinf": "np.isinf({})",
    "isfinite": "np.isfinite({})",
    "abs": "abs({})",
    "floor": "np.floor({})",
    "ceil": "np.ceil({})",
    "trunc": "np.trunc({})",
    "round": "np.rint({})",
    "sqrt": "np.sqrt({})",
    "exp": "f.exp({})",
    "expm1": "f.expm1({})",
    "log": "f.log({})",
    "log1p": "f.log1p({})",
    "log2": "f.log2({})",
    "log10": "f.log10({})",
    "sin": "f.sin({})",
    "cos": "f.cos({})",
    "tan": "f.tan({})",
    "asin": "f.asin({})",
    "acos": "f.acos({})",
    "atan": "f.atan({})",
    "sinh": "f.sinh({})",
    "cosh": "f.cosh({})",
    "tanh": "f.tanh({})",
    "asinh": "f.asinh({})",
    "acosh": "f.acosh({})",
    "atanh": "f.atanh({})",
    "atan2": "f.atan2({}, {})",
    "hypot": "f.hypot({}, {})",
    "erf": "f.erf({})",
    "erfc": "f.erfc({})",
    "sigmoid": "f.sigmoid({})",
    "softplus": "f.softplus({})",
}

CUDA = CPU | {
    # The quotient may be too large for a whole number; what is left of it is exact.
    "remainder": "m.copysign(m.fmod({0}, {1}) + ({1} if m.fmod({0}, {1}) * {1} < 0 else T(0)), {1})",
    "where": "({1} if {0} else {2})",
    "pow": "m.pow({}, {})",
    "round": "rint({})",
    "sigmoid": "(T(1) / (T(1) + m.exp(-{})))",
    "softplus": "(({0} if {0} > 0 else T(0)) + m.log1p(m.exp(-abs({0}))))",
    **{name: f"m.{name}({{}})" for name in ("isnan", "isinf", "isfinite", "floor", "ceil", "trunc", "sqrt")},
    **{name: f"m.{name}({{}})" for name in ("exp", "expm1", "log", "log1p", "log2", "log10", "erf", "erfc")},
    **{name: f"m.{name}({{}})" for name in ("sin", "cos", "tan", "asin", "acos", "atan")},
    **{name: f"m.{name}({{}})" for name in ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh")},
    **{name: f"m.{name}({{}}, {{}})" for name in ("atan2", "hypot")},
}
"""On a GPU: functions of `m`, the module `math`, are those of NVIDIA's library."""

CPU_INTEGER = CPU | {
    "pow": "({} ** {})",
    # The processor's division traps at the least integer divided by -1.
    "floor_divide": "(-{0} if {1} == -1 else np.floor_divide({0}, {1}))",
    "remainder": "np.remainder({0}, T(1) if {1} == -1 else {1})",
}
"""The same where the loop computes in integers."""

LIMITED = ("sin", "cos", "tan")
"""Operations whose template holds for arguments of a magnitude up to `f.LIMIT`."""

CPU_BEYOND = {name: f"f.{name}_any({{}})" for name in LIMITED}
"""What holds beyond, with the same bits below, one element at a time."""


_ARITHMETIC = ("add", "subtract", "multiply", "negative", "positive", "abs", "floor", "ceil", "trunc", "round")
_COMPARING = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "isnan", "isinf", "isfinite")
_LOGICAL = ("logical_and", "logical_or", "logical_xor", "logical_not", "where", "detached")
_BITS = ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_invert")

CHEAP = frozenset(_ARITHMETIC + _COMPARING + _LOGICAL + _BITS)
"""Operations that take about as long as reading a number from the nearest cache: computed again rather than kept."""


CUDA_INTEGER = CUDA | {
    "pow": "({} ** {})",
    "floor_divide": "(-{0} if {1} == -1 else {0} // {1})",
    "remainder": "({0} % (T(1) if {1} == -1 else {1}))",
}

CPU_COMBINING = {
    "add": "p.add({}, {})",
    "multiply": "p.multiply({}, {})",
    "maximum": "p.maximum({}, {})",
    "minimum": "p.minimum({}, {})",
    "either": "p.either({}, {})",
    "union": "({} | {})",
}
"""How the accumulators of reductions take in an element, or another accumulator."""

CUDA_COMBINING = {
    "add": "({} + {})",
    "multiply": "({} * {})",
    "maximum": "({0} if {0} >= {1} or {0} != {0} else {1})",
    "minimum": "({0} if {0} <= {1} or {0} != {0} else {1})",
    "either": "np.int32({} | (1 if {} else 0))",
    "union": "np.int32({} | {})",
}


@dataclass(frozen=True)
class Reduction:
    """How a reduction goes over elements: templates of the accumulator `{acc}`, the element `{x}`, the `{count}`."""

    start: str
    combine: str
    """What takes an element in, by its name in the target's table."""
    element: str = "{x}"
    finish: str = "{acc}"
    merge: str = ""
    """What makes one of two accumulators, if not `combine` with the other as the element."""
    accumulator: str = "T"
    """Type of the accumulator: T, the loop's own; A, which is wider for float32; or a dtype's name."""

    def step(self, acc: str, x: str, combining: Mapping[str, str] = CPU_COMBINING) -> str:
        """The text of an accumulator that has taken in `x`."""
        return combining[self.combine].format(acc, self.element.format(x=x))

    def merged(self, acc: str, other: str, combining: Mapping[str, str] = CPU_COMBINING) -> str:
        """The text of two accumulators as one."""
        return combining[self.merge].format(acc, other) if self.merge else self.step(acc, other, combining)


REDUCTIONS = {
    "sum": Reduction("A(0)", "add", "A({x})", accumulator="A"),
    "mean": Reduction("A(0)", "add", "A({x})", "{acc} / A({count})", accumulator="A"),
    "prod": Reduction("A(1)", "multiply", "A({x})", accumulator="A"),
    "max": Reduction("LOWEST", "maximum"),
    "min": Reduction("HIGHEST", "minimum"),
    "any": Reduction("np.int32(0)", "either", "{x} != 0", "{acc} != 0", merge="union", accumulator="int32"),
    "all": Reduction("np.int32(0)", "either", "{x} == 0", "{acc} == 0", merge="union", accumulator="int32"),
}
