"""Operations that declare their own rule: library calls, changes of shape, indexing.

A structural operation is two functions. `forward` maps arrays and parameters to an array, or to a new tensor where it
has the data as tensors keep it. `vjp(ct, call)` maps a cotangent to the inputs' cotangents, with tensor operations, so
that one rule serves every order of derivative. `call` gives the rule the inputs (tensors where the operation saves
them, otherwise their shape and dtype), the output if it is saved, and the parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from sweepgrad.anomaly import watched
from sweepgrad.arrays import is_on_device
from sweepgrad.dtypes import Array, DType
from sweepgrad.elements import dense, flat
from sweepgrad.errors import AxisError, DTypeError
from sweepgrad.grad_mode import mode
from sweepgrad.graph.node import Node, Rule
from sweepgrad.ops.op import DEFERRED, OPS, Op, describe, reject
from sweepgrad.ops.plan import from_array
from sweepgrad.sharing import as_array
from sweepgrad.shortage import again, attempt
from sweepgrad.tensor import WATCHERS, Tensor, attach, make, record, wrap

F = TypeVar("F", bound=Callable[..., Any])


class Spec:
    """Shape and dtype of an input whose elements the rule does not read."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: DType) -> None:
        self.shape = shape
        self.dtype = dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)


class Call:
    """One call of a structural operation, as its rule sees it."""

    __slots__ = ("inputs", "needed", "output", "params")

    def __init__(self, inputs: Sequence[Any], output: Any, params: dict[str, Any], needed: Sequence[int]) -> None:
        self.inputs = inputs
        self.output = output
        self.params = params
        self.needed = needed


Vjp = Callable[[Tensor, Call], Sequence[Tensor | None]]


@dataclass(eq=False, kw_only=True, repr=False)
class Composed(Op):
    """An operation on whole tensors that is written with other operations, whose rules it uses."""

    cases: tuple[Any, ...]
    """For tests: (shapes of the inputs, parameters)."""
    listed: bool = False
    """Whether the function takes its tensors as one list."""


@dataclass(eq=False, kw_only=True, repr=False)
class Structural(Composed):
    """An operation with its own forward function and rule; it is the rule of its nodes."""

    fresh: bool = field(init=False)
    forward: Callable[..., Array | Tensor]
    """From arrays and parameters: an array, or a new plain tensor where the data is at hand as tensors keep it."""
    vjp: Vjp | None
    """Cotangents of all inputs, or None for an operation without a derivative."""
    saves: tuple[int, ...] = ()
    """Positions of the inputs whose elements the rule reads."""
    saves_output: bool = False
    onto: Callable[..., None] | None = None
    """Where a cotangent is zeros but for a part: from the sum of the only input's cotangents, the cotangent that came
    in and the parameters, adds that part to the sum. Many parts then take as long as one whole."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fresh = self.onto is not None  # else a cotangent may be the one that came in, or share its memory

    def compute(self, tensors: Sequence[Tensor], params: dict[str, Any]) -> Tensor:
        """Compute, and record if an input is tracked."""
        arrays = [dense(tensor) for tensor in tensors]
        found = self.forward(*arrays, **params)
        result = found if isinstance(found, Tensor) else wrap(found if is_on_device(found) else np.asarray(found))
        rule = watched(self, tensors, result) if WATCHERS else self
        if not mode.enabled or self.vjp is None or result._dtype.kind != "f":
            return result
        for tensor in tensors:
            if tensor._node is not None:
                return self._recorded(result, rule, tensors, arrays, params)
        return result

    def _recorded(
        self, result: Tensor, rule: Rule, tensors: Sequence[Tensor], arrays: Sequence[Array], params: dict[str, Any]
    ) -> Tensor:
        # What is saved are tensors without a node, so nothing that the graph holds keeps a handle alive.
        inputs: list[Tensor | Spec] = []
        links: list[Node] = []
        needed: list[int] = []
        nbytes, output = 0, None
        for k, tensor in enumerate(tensors):
            if (node := tensor._node) is not None:
                links.append(node)
                needed.append(k)
            if k in self.saves:
                kept = tensor.detach()
                if kept._array is not arrays[k]:  # another thread has given it new elements meanwhile
                    kept = wrap(arrays[k])
                inputs.append(kept)
                nbytes += tensor.nbytes
            else:
                inputs.append(Spec(tensor._shape, tensor._dtype))
        if self.saves_output:
            output = result.detach()
            nbytes += result.nbytes
        saved = (Call(inputs, output, params, needed),)
        return record(result, rule, saved, links[0] if len(links) == 1 else tuple(links), nbytes)

    def pullback(self, node: Node, saved: Any, ct: Array, /) -> tuple[Array | None, ...]:
        """Cotangents of the tracked inputs, flat."""
        (call,) = saved
        try:
            cts = self.vjp(make(ct, None, node.shape, node.dtype, None), call)  # type: ignore[misc]
            return tuple([None if (one := cts[k]) is None else flat(one) for k in call.needed])
        except MemoryError as error:
            return again(error, self.name, self.pullback, node, saved, ct)

    def pullback_onto(self, node: Node, saved: Any, ct: Array, sums: list[Array | None], /) -> tuple[Array | None, ...]:
        """The same, added to the sum if there is one."""
        (call,), (total,) = saved, sums
        if total is None:
            return self.pullback(node, saved, ct)
        self.onto(total.reshape(call.inputs[0].shape), ct.reshape(node.shape), **call.params)  # type: ignore[misc]
        return (total,)

    def replay(self, node: Node, saved: Any, ct: Tensor, /) -> tuple[Tensor | None, ...]:
        """The same, with the saved tensors as handles on the nodes that they were."""
        (call,) = saved
        nodes = dict(zip(call.needed, node.parents, strict=True))
        handles = [
            attach(value, nodes[k]) if k in nodes and isinstance(value, Tensor) else value
            for k, value in enumerate(call.inputs)
        ]
        output = None if call.output is None else attach(call.output, node)
        cts = attempt(self.name, self.vjp, ct, Call(handles, output, call.params, call.needed))  # type: ignore[arg-type]
        return tuple([cts[k] for k in call.needed])


def structural(
    *,
    forward: Callable[..., Array | Tensor],
    vjp: Vjp | None,
    like: str,
    cases: Sequence[Any],
    saves: tuple[int, ...] = (),
    saves_output: bool = False,
    onto: Callable[..., None] | None = None,
    listed: bool = False,
) -> Callable[[F], F]:
    """Declare a structural operation: the decorated function is what users call, checks and normalises, then `run`s."""

    def declare(function: F) -> F:
        name, doc, _ = describe(function)
        row = Structural(
            name=name,
            doc=doc,
            like=like,
            forward=forward,
            vjp=vjp,
            cases=tuple(cases),
            saves=saves,
            saves_output=saves_output,
            onto=onto,
            listed=listed,
        )
        row.function = function
        return function

    return declare


def composed(*, like: str, cases: Sequence[Any], listed: bool = False) -> Callable[[F], F]:
    """Declare an operation that is written with other operations."""

    def declare(function: F) -> F:
        name, doc, _ = describe(function)
        Composed(name=name, doc=doc, like=like, cases=tuple(cases), listed=listed).function = function
        return function

    return declare


def run(name: str, tensors: Sequence[Tensor], **params: Any) -> Tensor:
    """Call the structural operation `name`."""
    row: Structural = OPS[name]  # type: ignore[assignment]
    for tensor in tensors:
        if type(tensor) in DEFERRED:
            return DEFERRED[type(tensor)](row, tensors, params)  # type: ignore[no-any-return]
    try:
        return row.compute(tensors, params)
    except MemoryError as error:
        return again(error, name, row.compute, tensors, params)


def argument(op: str, value: Any) -> Tensor:
    """`value` as a tensor: a tensor itself, an array, or a Python number as a 0-d tensor."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (np.ndarray, np.generic, bool, int, float)):
        return from_array(op, as_array(op, value))
    raise reject(op, value)


def normal_axis(op: str, axis: Any, ndim: int) -> int:
    """`axis` counted from the front."""
    try:
        index = operator.index(axis)
    except TypeError:
        raise DTypeError(f"`{op}` needs an integer axis; found {type(axis).__name__} {axis!r}") from None
    if not -ndim <= index < ndim:
        needed = f"an axis from {-ndim} to {ndim - 1}" if ndim else "no axis, as there are 0 dimensions"
        raise AxisError(f"`{op}` got axis {index} for {ndim} dimension{'' if ndim == 1 else 's'}; needed is {needed}")
    return index % ndim if ndim else index


_EVERY_AXIS = [tuple(range(ndim)) for ndim in range(65)]  # as many as NumPy allows; made anew, one takes 0.2 us


def normal_axes(op: str, axis: Any, ndim: int) -> tuple[int, ...]:
    """`axis` (None for all, an int or a tuple) as a tuple of axes counted from the front, each once."""
    if axis is None:
        return _EVERY_AXIS[ndim]
    axes = tuple(normal_axis(op, one, ndim) for one in (axis if isinstance(axis, (tuple, list)) else (axis,)))
    if len(set(axes)) != len(axes):
        raise AxisError(f"`{op}` got axis {axis}, which names an axis twice")
    return axes
