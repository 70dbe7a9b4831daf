"""How each primitive scalar operation is written for each target: the only place that names a target's functions.

An entry is a template for the arguments' texts. Rows that are not listed are composites: their own function expands
into these. Also how reductions go over elements.
"""

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


@dataclass(frozen=True)
class Reduction:
    """How a reduction goes over elements: templates of the accumulator `{acc}`, the element `{x}`, the `{count}`."""

    start: str
    step: str
    finish: str = "{acc}"
    merge: str = ""
    """How two accumulators become one, if not by a step with the other as the element."""
    accumulator: str = "T"
    """Type of the accumulator: T, the loop's own; A, which is wider for float32; or a dtype's name."""

    def merged(self, acc: str, other: str) -> str:
        """The text of two accumulators as one."""
        return (self.merge or self.step).format(acc=acc, x=other)


REDUCTIONS = {
    "sum": Reduction("A(0)", "p.add({acc}, A({x}))", accumulator="A"),
    "mean": Reduction("A(0)", "p.add({acc}, A({x}))", "{acc} / A({count})", accumulator="A"),
    "prod": Reduction("A(1)", "p.multiply({acc}, A({x}))", accumulator="A"),
    "max": Reduction("LOWEST", "p.maximum({acc}, {x})"),
    "min": Reduction("HIGHEST", "p.minimum({acc}, {x})"),
    "any": Reduction(
        "np.int32(0)", "p.either({acc}, {x} != 0)", "{acc} != 0", merge="{acc} | {x}", accumulator="int32"
    ),
    "all": Reduction(
        "np.int32(0)", "p.either({acc}, {x} == 0)", "{acc} == 0", merge="{acc} | {x}", accumulator="int32"
    ),
}
