"""Loop nests: what they write, and that they write nothing else."""

import numpy as np
import pytest

from sweepgrad.kernels.cpu import compile_kernel
from sweepgrad.kernels.emit import Slot
from sweepgrad.kernels.expr import call, const, reduce, symbol
from sweepgrad.kernels.nest import nest

X, ROW, COLUMN = symbol("x"), symbol("r"), symbol("c")
INPUTS = [Slot("x", "v", "float64"), Slot("r", "r", "float64"), Slot("c", "c", "float64")]
GUARD = 40
"""Elements on each side of an output that have to stay as they are."""

CASES = {
    "zeros of every kind": ([const(0.0)] * 4, lambda x, r, c: (0 * x, 0 * r, 0 * c, 0.0), INPUTS[:1]),
    "one row": ([const(2.0)], lambda x, r, c: (0 * r + 2,), INPUTS[:1]),
    "sums of every kind": (
        [call("multiply", X, ROW), reduce("sum", X, "I"), reduce("sum", X, "J"), reduce("sum", X, "IJ")],
        lambda x, r, c: (x * r, x.sum(0), x.sum(1), x.sum()),
        INPUTS[:2],
    ),
    "rows and columns alone": (
        [call("add", ROW, COLUMN), call("exp", ROW), call("exp", COLUMN), reduce("sum", ROW, "J")],
        lambda x, r, c: (r + c[:, None], np.exp(r), np.exp(c), r.sum()),
        INPUTS[1:],
    ),
}
KINDS = {"one row": "r"}


@pytest.mark.parametrize("columns", [None, 5])
@pytest.mark.parametrize("name", CASES)
def test_a_nest_writes_its_outputs_and_nothing_beside_them(name, columns):
    exprs, expected, inputs = CASES[name]
    rows, n = 7, 5
    rng = np.random.default_rng(0)
    values = {"x": rng.standard_normal((rows, n)), "r": rng.standard_normal(n), "c": rng.standard_normal(rows)}
    outputs = [
        (expr, Slot(f"o{k}", kind, "float64"))
        for k, (expr, kind) in enumerate(zip(exprs, KINDS.get(name, "vrcs"), strict=True))
    ]
    made = nest(outputs, inputs, "float64", chunked=False, columns=columns, short=True)
    assert not made.flat
    sizes = {"v": rows * n, "r": n, "c": rows, "s": 1}
    guarded = [np.full(sizes[slot.kind] + 2 * GUARD, 7.25) for _, slot in outputs]
    temporary = [np.empty((1, n) if row else 1) for _, row in made.partials]
    temporary += [np.empty((1, n)) for _ in range(made.work)]
    kernel = compile_kernel(made.source, made.signature)
    kernel(
        *[values[slot.name].reshape(-1) for slot in inputs], 1, rows, n, *temporary, *[g[GUARD:-GUARD] for g in guarded]
    )
    for whole, right in zip(guarded, expected(**values), strict=True):
        np.testing.assert_allclose(whole[GUARD:-GUARD], np.ravel(right), rtol=1e-13, atol=1e-13)
        assert (whole[:GUARD] == 7.25).all()
        assert (whole[-GUARD:] == 7.25).all()
