"""Writes the source of a loop from expressions. Text in, text out: nothing is compiled or executed here.

An elementwise kernel has inputs, each with a *kind* that says how the loop reads it, and outputs, all of one shape:

    v  every element, contiguous, as a 1-d array       s  one scalar for the whole loop
    r  one row, repeated: element j of (i, j)          c  one column: element i of (i, j)
    x  anything else, as an array of `STRIDED_NDIM` dimensions with its own strides

Only v and s: one loop. r or c among them: two loops, over a matrix whose row length is the argument `n`. x among
them: `STRIDED_NDIM` loops, where every input is x or s. A constant is written in the loop's own dtype `T`, so float32
stays float32.
"""

import math
from collections.abc import Sequence

from sweepgrad.kernels.expr import Expr, Scalar, topological
from sweepgrad.kernels.scalars import CPU, CPU_INTEGER

STRIDED_NDIM = 4

_HEADER = '''"""Written by sweepgrad: {title}."""

import math

import numba
import numpy as np

T = numba.{dtype}
A = numba.{accumulator}


'''


def header(title: str, dtype: str, accumulator: str | None = None) -> str:
    """The module's head: imports, and the types that the loop computes and accumulates in."""
    return _HEADER.format(title=title, dtype=_type(dtype), accumulator=_type(accumulator or dtype))


def _type(dtype: str) -> str:
    return "boolean" if dtype == "bool" else dtype


def literal(value: Scalar, kind: str = "T") -> str:
    """A constant in the dtype that `kind` stands for."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{kind}({'np.nan' if math.isnan(value) else 'np.inf' if value > 0 else '-np.inf'})"
    return f"{kind}({value!r})"


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


def elementwise(outputs: Sequence[Expr], inputs: Sequence[str], kinds: str, dtype: str) -> str:
    """The function `kernel`, whose arguments are the inputs, `n` where there are rows or columns, the outputs."""
    targets = [f"o{k}" for k in range(len(outputs))]
    templates = CPU_INTEGER if "int" in dtype else CPU
    if "x" in kinds:
        lines = _strided(outputs, inputs, kinds, targets, templates)
        arguments = [*inputs, *targets]
    elif "r" in kinds or "c" in kinds:
        lines = _matrix(outputs, inputs, kinds, targets, templates)
        arguments = [*inputs, "n", *targets]
    else:
        names = {name: name if kind == "s" else f"{name}[i]" for name, kind in zip(inputs, kinds, strict=True)}
        lines = [f"for i in range({targets[0]}.size):", *_stores(outputs, names, targets, "i", 1, templates)]
        arguments = [*inputs, *targets]
    return _function(arguments, lines)


def _function(arguments: Sequence[str], lines: Sequence[str]) -> str:
    return "\n".join([f"def kernel({', '.join(arguments)}):", *(f"    {line}" for line in lines)]) + "\n"


def _stores(
    outputs: Sequence[Expr],
    names: dict[str, str],
    targets: Sequence[str],
    index: str,
    depth: int,
    templates: dict[str, str],
) -> list[str]:
    lines, results = body(outputs, names, templates)
    lines += [f"{target}[{index}] = {result}" for target, result in zip(targets, results, strict=True)]
    return [f"{'    ' * depth}{line}" for line in lines]


def _matrix(
    outputs: Sequence[Expr], inputs: Sequence[str], kinds: str, targets: Sequence[str], templates: dict[str, str]
) -> list[str]:
    # Each row is a slice, so the inner index is a plain loop variable: an index that could be negative would cost
    # the vectorisation of the loop.
    names, head = {}, ["start = i * n"]
    for name, kind in zip(inputs, kinds, strict=True):
        if kind == "v":
            head.append(f"{name}_row = {name}[start : start + n]")
        elif kind == "c":
            head.append(f"{name}_item = {name}[i]")
        names[name] = {"v": f"{name}_row[j]", "r": f"{name}[j]", "c": f"{name}_item", "s": name}[kind]
    head += [f"{target}_row = {target}[start : start + n]" for target in targets]
    return [
        f"for i in range({targets[0]}.size // n):",
        *(f"    {line}" for line in head),
        "    for j in range(n):",
        *_stores(outputs, names, [f"{target}_row" for target in targets], "j", 2, templates),
    ]


def _strided(
    outputs: Sequence[Expr], inputs: Sequence[str], kinds: str, targets: Sequence[str], templates: dict[str, str]
) -> list[str]:
    indices = [f"i{axis}" for axis in range(STRIDED_NDIM)]
    index = ", ".join(indices)
    names = {name: name if kind == "s" else f"{name}[{index}]" for name, kind in zip(inputs, kinds, strict=True)}
    loops = [f"{'    ' * axis}for {i} in range({targets[0]}.shape[{axis}]):" for axis, i in enumerate(indices)]
    return [*loops, *_stores(outputs, names, targets, index, STRIDED_NDIM, templates)]


_REDUCTION = """\
def kernel(x, outer, n, inner, out):
    if inner == 1:
        stack = np.empty(64, A)
        for o in range(outer):
            row = x[o * n : o * n + n]
            blocks = 0
            for start in range(0, n, {block}):
                stop = min(start + {block}, n)
                lanes = (stop - start) // {lanes} * {lanes}
{lane_starts}
                for k in range(start, start + lanes, {lanes}):
{lane_steps}
                for k in range(start + lanes, stop):
                    a0 = {step_tail}
{lane_merges}
                level = 0
                filled = blocks
                while filled & 1:
                    a0 = {merge_stack}
                    filled >>= 1
                    level += 1
                stack[level] = a0
                blocks += 1
            a0 = {identity}
            level = 0
            while blocks:
                if blocks & 1:
                    a0 = {merge_stack}
                blocks >>= 1
                level += 1
            out[o] = {finish}
    else:
        total = np.empty(inner, A)
        for o in range(outer):
            for j in range(inner):
                total[j] = {identity}
            for k in range(n):
                start = (o * n + k) * inner
                row = x[start : start + inner]
                for j in range(inner):
                    total[j] = {step_column}
            target = out[o * inner : (o + 1) * inner]
            for j in range(inner):
                a0 = total[j]
                target[j] = {finish}
"""

_BLOCK, _LANES = 256, 8


def reduction(mapped: Expr, identity: Scalar, combined: Expr, finished: Expr) -> str:
    """The function `kernel(x, outer, n, inner, out)`: the middle axis of a contiguous (outer, n, inner) is reduced.

    The expressions read the symbols `x` (element), `a` and `b` (partial results), `n` (count). Along a contiguous
    axis, blocks of eight lanes are combined pairwise, so rounding errors grow with the logarithm of `n`.
    """

    def inline(expr: Expr, **names: str) -> str:
        texts: dict[Expr, str] = {}
        for part in topological([expr]):
            if part.op == "symbol":
                texts[part] = names[str(part.value)]
            elif part.op == "const":
                texts[part] = literal(part.value, "A")  # type: ignore[arg-type]
            else:
                texts[part] = CPU[part.op].format(*(texts[arg] for arg in part.args))
        return texts[expr]

    def step(total: str, element: str) -> str:
        return inline(combined, a=total, b=f"A({inline(mapped, x=element)})")

    merges = []
    width = _LANES
    while width > 1:
        width //= 2
        merges += [f"a{k} = {inline(combined, a=f'a{k}', b=f'a{k + width}')}" for k in range(width)]
    return _REDUCTION.format(
        block=_BLOCK,
        lanes=_LANES,
        identity=literal(identity, "A"),
        lane_starts="\n".join(f"                a{k} = {literal(identity, 'A')}" for k in range(_LANES)),
        lane_steps="\n".join(f"                    a{k} = {step(f'a{k}', f'row[k + {k}]')}" for k in range(_LANES)),
        lane_merges="\n".join(f"                {line}" for line in merges),
        step_tail=step("a0", "row[k]"),
        merge_stack=inline(combined, a="stack[level]", b="a0"),
        step_column=step("total[j]", "row[j]"),
        finish=inline(finished, a="a0", n="n"),
    )
