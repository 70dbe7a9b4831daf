"""Writes the source of loops from expressions. Text in, text out: nothing is compiled or executed here.

An expression may read an output's symbol: the element that it replaces. `elementwise` writes the plainest of loops, for
few elements, and that for strided data; `kernels.nest` writes all others. An input has a *kind*, which says how the
loop reads it; the simple ones are

    v  every element, contiguous, as a 1-d array       s  one number for the whole loop
    x  with its own strides, as an array of `STRIDED_NDIM` dimensions

A constant is written in the loop's own dtype `T`, so float32 stays float32.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sweepgrad.kernels.expr import Expr, Scalar, topological
from sweepgrad.kernels.scalars import CPU, CPU_BEYOND, CPU_INTEGER, LIMITED

STRIDED_NDIM = 4


@dataclass(frozen=True)
class Slot:
    """An input or output of a loop: its name in the kernel, its kind and its dtype."""

    name: str
    kind: str
    dtype: str


_HEADER = '''"""Written by sweepgrad."""

import numba
import numpy as np
import sweepgrad.kernels.functions as f
import sweepgrad.kernels.primitives as p

T = numba.{dtype}
A = numba.{accumulator}


'''


def header(dtype: str, accumulator: str | None = None) -> str:
    """The module's head: imports, and the types that the loop computes and accumulates in."""
    return _HEADER.format(dtype=_type(dtype), accumulator=_type(accumulator or dtype))


def _type(dtype: str) -> str:
    return "boolean" if dtype == "bool" else dtype


def literal(value: Scalar) -> str:
    """A constant in the loop's dtype, or a truth value."""
    if isinstance(value, bool):
        return repr(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f"T({'np.nan' if math.isnan(value) else 'np.inf' if value > 0 else '-np.inf'})"
    return f"T({value!r})"


def limited(exprs: Iterable[Expr]) -> list[Expr]:
    """Arguments of operations that hold up to some magnitude only.

    A loop first looks whether an argument is beyond. Only then does it call the slower function that holds everywhere,
    since a loop with a choice between the two would not be vectorised.
    """
    return list(dict.fromkeys(expr.args[0] for expr in exprs if expr.op in LIMITED))


def beyond(text: str) -> str:
    """The statement that notes an argument beyond the limit; NaN is not."""
    return f"large = p.either(large, abs({text}) > f.LIMIT)"


def body(outputs: Sequence[Expr], names: dict[str, str], templates: dict[str, str]) -> tuple[list[str], list[str]]:
    """Statements that compute `outputs`, each common part once, and the texts of the results.

    `names` gives the text of each input by its symbol.
    """
    lines: list[str] = []
    texts: dict[Expr, str] = {}
    for expr in topological(outputs):
        if expr.op == "symbol":
            texts[expr] = names[str(expr.value)]
        elif expr.op == "const":
            assert not isinstance(expr.value, (str, type(None)))
            texts[expr] = literal(expr.value)
        else:
            name = f"t{len(lines)}"
            lines.append(f"{name} = {templates[expr.op].format(*(texts[arg] for arg in expr.args))}")
            texts[expr] = name
    return lines, [texts[output] for output in outputs]


def elementwise(outputs: Sequence[tuple[Expr, Slot]], inputs: Sequence[Slot], dtype: str) -> tuple[str, list[str]]:
    """The source and the arguments' types of a kernel for few elements, or with strides: inputs, then outputs."""
    strided = any(slot.kind == "x" for slot in inputs)
    layouts = {"s": "", "x": f":{STRIDED_NDIM}A", "v": ":1C"}
    signature = [slot.dtype + layouts[slot.kind] for slot in inputs]
    signature += [f"{slot.dtype}:{STRIDED_NDIM if strided else 1}C" for _, slot in outputs]
    indices = [f"i{axis}" for axis in range(STRIDED_NDIM if strided else 1)]
    index = ", ".join(indices)
    target = outputs[0][1].name
    arrays = [*inputs, *(slot for _, slot in outputs)]
    names = {slot.name: slot.name if slot.kind == "s" else f"{slot.name}[{index}]" for slot in arrays}
    templates = CPU_INTEGER if "int" in dtype else CPU
    loops = [f"{'    ' * axis}for {i} in range({target}.shape[{axis}]):" for axis, i in enumerate(indices)]

    def loop(templates: dict[str, str]) -> list[str]:
        lines, results = body([expr for expr, _ in outputs], names, templates)
        lines += [f"{slot.name}[{index}] = {result}" for (_, slot), result in zip(outputs, results, strict=True)]
        return [*loops, *("    " * len(indices) + line for line in lines)]

    risky = limited(topological([expr for expr, _ in outputs]))
    if risky:
        look, texts = body(risky, names, templates)
        look += map(beyond, texts)
        lines = ["large = np.int32(0)", *loops, *("    " * len(indices) + line for line in look)]
        lines += ["if large:", *("    " + line for line in loop(templates | CPU_BEYOND))]
        lines += ["else:", *("    " + line for line in loop(templates))]
    else:
        lines = loop(templates)
    arguments = [*(slot.name for slot in inputs), *(slot.name for _, slot in outputs)]
    source = "\n".join([f"def kernel({', '.join(arguments)}):", *(f"    {line}" for line in lines)]) + "\n"
    return header(dtype) + source, signature
