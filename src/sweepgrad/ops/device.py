"""Operations on tensors that are on a GPU: the same plans and rules, once it is seen to that all are on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sweepgrad.arrays import empty, mixed, moved, on
from sweepgrad.dtypes import CANONICAL, Array
from sweepgrad.graph.node import Node
from sweepgrad.ops.op import DEFERRED, Elementwise
from sweepgrad.ops.plan import Plan, as_operand, computed
from sweepgrad.shortage import again, attempt
from sweepgrad.tensor import DeviceTensor, Tensor, wrap


class DevicePlan(Plan):
    """A plan on a GPU, where nothing has the forms that are short for few elements."""

    __slots__ = ()

    def pullback_onto(
        self, node: Node, saved: tuple[Any, ...], ct: Array, sums: list[Array | None], /
    ) -> tuple[Array, ...]:
        """Cotangents of the tracked inputs, added to `sums` where there are any."""
        try:
            loop = self._backward_loop(sum(1 << k for k, one in enumerate(sums) if one is not None))
            outs = [empty(ct.size, self.dtype, ct) if one is None else one for one in sums]
            return tuple(loop.over((ct, *saved), ct.size, outs=outs))
        except MemoryError as error:
            return again(error, self.name, self.pullback_onto, node, saved, ct, sums)


def _on_device(op: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
    """What is done with arguments one of which is a tensor on a GPU."""
    other = next((type(arg) for arg in args if type(arg) is not DeviceTensor and type(arg) in DEFERRED), None)
    if other is not None:
        return DEFERRED[other](op, args, params)
    device = next(arg.device for arg in args if type(arg) is DeviceTensor)
    values = [_there(op.name, arg, device) for arg in args]
    check_together(op.name, values)
    with on(device):
        if isinstance(op, Elementwise):
            return computed(op, values, DevicePlan)
        return attempt(op.name, op.compute, values, params)


def serve() -> None:
    """From now on, operations take tensors on a GPU."""
    DEFERRED[DeviceTensor] = _on_device


def _there(op: str, value: Any, device: str) -> Any:
    """An argument, of which NumPy's numbers, which are nowhere, go to where they are needed."""
    if isinstance(value, np.generic):
        return wrap(moved(np.asarray(value), device)) if value.dtype in CANONICAL else as_operand(op, value)
    return as_operand(op, value)


def check_together(op: str, values: Sequence[Any]) -> None:
    """Raise DeviceError unless all tensors are on one device."""
    found = dict.fromkeys([value.device for value in values if isinstance(value, Tensor)])
    if len(found) > 1:
        raise mixed(op, list(found))
