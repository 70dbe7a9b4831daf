"""Operations that declare their own rule: library calls, changes of shape, indexing.

A structural operation is two functions. `forward` maps arrays and parameters to an array; `vjp(ct, call)` maps a
cotangent to the inputs' cotangents, with tensor operations, so that one rule serves every order of derivative. `call`
gives the rule the inputs (tensors where the operation saves them, otherwise their shape and dtype), the output if it is
saved, and the parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from sweepgrad.dtypes import CANONICAL, Array, DType
from sweepgrad.errors import AxisError, DTypeError
from sweepgrad.grad_mode import mode
from sweepgrad.graph import process
from sweepgrad.graph.node import Node
from sweepgrad.ops.op import OPS, Op, describe, reject
from sweepgrad.ops.plan import from_array
from sweepgrad.tensor import Tensor, as_array, attach, dense, flat, make, wrap

_register = process.registry.register

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

    def __init__(self, inputs: Sequence[Any], output: Any, params: dict[str, Any], needed: tuple[int, ...]) -> None:
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

    forward: Callable[..., Array]
    vjp: Vjp | None
    """Cotangents of all inputs, or None for an operation without a derivative."""
    saves: tuple[int, ...] = ()
    """Positions of the inputs whose elements the rule reads."""
    saves_output: bool = False

    def __call__(self, tensors: Sequence[Tensor], **params: Any) -> Tensor:
        """Compute, and record if an input is tracked."""
        result = np.asarray(self.forward(*map(dense, tensors), **params))
        if self.vjp is None or not mode.enabled:
            return wrap(result)
        needed = tuple(k for k, tensor in enumerate(tensors) if tensor._node is not None)
        if not needed or result.dtype.kind != "f":
            return wrap(result)
        # What is saved are tensors without a node, so nothing that the graph holds keeps a handle alive.
        inputs = tuple(
            tensor.detach() if k in self.saves else Spec(tensor._shape, tensor._dtype)
            for k, tensor in enumerate(tensors)
        )
        output = wrap(result) if self.saves_output else None
        nbytes = sum(tensors[k].nbytes for k in self.saves) + (result.nbytes if self.saves_output else 0)
        parents = tuple(tensors[k]._node for k in needed)
        dtype = CANONICAL[result.dtype]
        node = Node(self, (inputs, output, params, needed), parents, nbytes, result.shape, dtype)  # type: ignore[arg-type]
        tensor = wrap(result, node)
        _register(node)
        return tensor

    def pullback(self, node: Node, saved: Any, ct: Array, /) -> tuple[Array | None, ...]:
        """Cotangents of the tracked inputs, flat."""
        inputs, output, params, needed = saved
        tensor = make(ct, None, node.shape, node.dtype, None)
        cts = self._run(tensor, Call(inputs, output, params, needed))
        return tuple([None if one is None else flat(one) for one in cts])

    def replay(self, node: Node, saved: Any, ct: Tensor, /) -> tuple[Tensor | None, ...]:
        """The same, with the saved tensors as handles on the nodes that they were."""
        inputs, output, params, needed = saved
        nodes = dict(zip(needed, node.parents, strict=True))
        handles = [
            attach(value, nodes[k]) if k in nodes and isinstance(value, Tensor) else value
            for k, value in enumerate(inputs)
        ]
        return self._run(ct, Call(handles, None if output is None else attach(output, node), params, needed))

    def _run(self, ct: Tensor, call: Call) -> tuple[Tensor | None, ...]:
        assert self.vjp is not None
        cts = self.vjp(ct, call)
        return tuple([cts[k] for k in call.needed])


def structural(
    *,
    forward: Callable[..., Array],
    vjp: Vjp | None,
    like: str,
    cases: Sequence[Any],
    saves: tuple[int, ...] = (),
    saves_output: bool = False,
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
    row: Any = OPS[name]
    result: Tensor = row(tensors, **params)
    return result


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


def normal_axes(op: str, axis: Any, ndim: int) -> tuple[int, ...]:
    """`axis` (None for all, an int or a tuple) as a tuple of axes counted from the front, each once."""
    if axis is None:
        return tuple(range(ndim))
    axes = tuple(normal_axis(op, one, ndim) for one in (axis if isinstance(axis, (tuple, list)) else (axis,)))
    if len(set(axes)) != len(axes):
        raise AxisError(f"`{op}` got axis {axis}, which names an axis twice")
    return axes
