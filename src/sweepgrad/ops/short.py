"""The functions that users call: the short ways to a plan, and the long one, `ops.plan.call`.

What `unary` and `binary` make takes the common case, equal shapes or a Python number, in main memory, in as few steps
as Python allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sweepgrad.anomaly import short_way
from sweepgrad.dtypes import FLOATS, DType
from sweepgrad.grad_mode import mode
from sweepgrad.ops.loop import LARGE
from sweepgrad.ops.op import Elementwise, reject
from sweepgrad.ops.plan import Plan, call, plan_for
from sweepgrad.shortage import again
from sweepgrad.tensor import Tensor, make_here, record_here

_empty = np.empty

OPERANDS = (Tensor, bool, int, float, np.ndarray, np.generic)
"""Types that operators take beside a tensor."""


def unknown_operand(op: str, other: object) -> Any:
    """What arithmetic answers: NotImplemented, for Python to ask `other`, but not a sequence, which repeats itself."""
    if isinstance(other, (list, tuple, str, bytes, bytearray)):
        raise reject(op, other)
    return NotImplemented


def unary(op: Elementwise) -> Callable[[Any], Any]:
    """The function of one input."""
    untracked: dict[DType, Plan] = short_way()
    tracked: dict[DType, Plan] = short_way()
    keep = op.differentiable
    quick = FLOATS if op.accepts != "bits" else ()

    def function(x, /):  # type: ignore[no-untyped-def]
        try:
            if type(x) is Tensor and (a := x._flat) is not None:
                parent: Any = x._node
                track = parent is not None and keep and mode.enabled
                plan = (tracked if track else untracked).get(x._dtype)
                if plan is not None:
                    size = a.size
                    if size < LARGE:
                        out = _empty(size, plan.result)
                        plan.small(a, out)
                    else:
                        (out,) = plan.forward.run(size, a)
                    result = make_here(out, None, x._shape, plan.result, None)
                    return (
                        record_here(result, plan, plan.pick(a, out), parent, plan.saved_size * size)
                        if track
                        else result
                    )
                if x._dtype in quick:
                    table = tracked if track else untracked
                    plan_for(op, x._dtype, "v", (0,) if track else (), plain=True, table=table)
        except MemoryError as error:
            return again(error, op.name, function, x)
        return call(op, (x,))

    return function


def binary(  # noqa: PLR0915  # as below
    op: Elementwise, *, unknown: Callable[[str, Any], Any] | None = None
) -> Callable[[Any, Any], Any]:
    """The function of two inputs; an operator has `unknown` to answer to a type that it does not know."""
    # By which inputs are tracked (bit 0: first, bit 1: second), for two tensors and for a tensor and a number.
    both: tuple[dict[DType, Plan], ...] = tuple(short_way() for _ in range(5))  # the last for one tensor twice
    number: tuple[dict[DType, Plan], ...] = (short_way(), short_way())
    keep = op.differentiable
    quick = FLOATS if op.accepts != "bits" else ()

    def function(x1, x2, /):  # type: ignore[no-untyped-def]  # noqa: PLR0912  # a call for each branch costs 5 %
        try:
            if type(x1) is Tensor and (a := x1._flat) is not None:
                shape = x1._shape
                dtype = x1._dtype
                b: Any
                parents: Any = None
                plans: Any = None
                if type(x2) is Tensor:
                    if x2._shape == shape and x2._dtype is dtype and (b := x2._flat) is not None:
                        first = x1._node
                        second = x2._node
                        if (first is None and second is None) or not keep or not mode.enabled:
                            plans = both[0]
                        elif second is None:
                            plans, parents = both[1], first
                        elif first is None:
                            plans, parents = both[2], second
                        elif first is second:
                            plans, parents = both[4], first
                        else:
                            plans, parents = both[3], (first, second)
                elif type(x2) is float or type(x2) is int:
                    b = x2 if type(x2) is float else float(x2)
                    first = x1._node
                    if first is None or not keep or not mode.enabled:
                        plans = number[0]
                    else:
                        plans, parents = number[1], first
                if plans is not None:
                    plan = plans.get(dtype)
                    if plan is not None:
                        size = a.size
                        if size < LARGE:
                            out = _empty(size, plan.result)
                            plan.small(a, b, out)
                        else:
                            (out,) = plan.forward.run(size, a, b)
                        result = make_here(out, None, shape, plan.result, None)
                        if parents is None:
                            return result
                        return record_here(result, plan, plan.pick(a, b, out), parents, plan.saved_size * size)
                    if dtype in quick:
                        kinds = "vv" if type(x2) is Tensor else "vs"
                        tracked = tuple(k for k, x in enumerate((x1, x2)) if parents and type(x) is Tensor and x._node)
                        plan_for(op, dtype, kinds, tracked, plain=True, merged=plans is both[4], table=plans)
        except MemoryError as error:
            return again(error, op.name, function, x1, x2)
        if unknown is not None and not isinstance(x2, OPERANDS):
            return unknown(op.name, x2)
        return call(op, (x1, x2))

    return function


def ternary(op: Elementwise) -> Callable[[Any, Any, Any], Any]:
    """The function of three inputs."""

    def function(x1, x2, x3, /):  # type: ignore[no-untyped-def]
        return call(op, (x1, x2, x3))

    return function
