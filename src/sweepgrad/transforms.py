"""Functional differentiation: a function in, the function of its gradient out.

Gradients are computed for the arguments themselves, so no tensor's `grad` is touched. The arguments enter as new
variables, or, where they are tracked already, as new nodes above them; so transforms nest, and what `f` captures from
outside stays differentiable by whoever is outside.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, overload

from sweepgrad.anomaly import watched_pass
from sweepgrad.dtypes import FLOATS
from sweepgrad.elements import flat
from sweepgrad.errors import ArgumentError, DTypeError, OutOfMemoryError, ShapeError, SweepgradError
from sweepgrad.fusion import Fused
from sweepgrad.grad_mode import enable_grad, mode
from sweepgrad.graph import process
from sweepgrad.graph.backward import gradients, reachable
from sweepgrad.graph.node import VARIABLE
from sweepgrad.ops.creation import asarray, zeros_like
from sweepgrad.ops.elementwise import positive
from sweepgrad.tensor import FIRST_ORDER, HIGHER_ORDER, WATCHERS, Tensor, cotangent, variable


@overload
def grad(f: Callable[..., Any], argnums: int = 0) -> Callable[..., Tensor]: ...
@overload
def grad(f: Callable[..., Any], argnums: Sequence[int]) -> Callable[..., tuple[Tensor, ...]]: ...
def grad(f: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
    """The function that computes the gradient of `f`, a function with a result of one element.

    Args:
        f: takes tensors, arrays or numbers and returns a tensor with one element.
        argnums: position of the argument by which to differentiate, or several positions.

    Returns:
        A function of the same arguments: the gradient as a tensor of the argument's shape and dtype, or a tuple of
        them where `argnums` is a sequence. It is tracked only if it depends on a variable of the caller's: one that
        was passed in, or that `f` captures.

    Raises:
        ValueError: from the returned function, if the result of `f` has several elements or `argnums` does not fit.
        TypeError: if an argument to differentiate by is not a float, or `f` does not return a tensor.

    Example:
        >>> import sweepgrad as sg
        >>> sg.grad(lambda x: (x * x * x).sum())([1.0, 2.0])
        Tensor([ 3., 12.])
        >>> sg.grad(sg.grad(lambda x: x * x * x))(2.0)
        Tensor(12.)
    """
    both = _transformed("grad", f, argnums)

    @functools.wraps(f)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        return both(*args, **kwargs)[1]

    return gradient


@overload
def value_and_grad(f: Callable[..., Any], argnums: int = 0) -> Callable[..., tuple[Tensor, Tensor]]: ...
@overload
def value_and_grad(
    f: Callable[..., Any], argnums: Sequence[int]
) -> Callable[..., tuple[Tensor, tuple[Tensor, ...]]]: ...
def value_and_grad(f: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Callable[..., tuple[Tensor, Any]]:
    """Like `grad`, but the returned function gives the pair (value of `f`, gradient).

    Example:
        >>> import sweepgrad as sg
        >>> sg.value_and_grad(lambda x: (x * x).sum())([1.0, 2.0])
        (Tensor(5.), Tensor([2., 4.]))
    """
    return _transformed("value_and_grad", f, argnums)


def _transformed(name: str, f: Callable[..., Any], argnums: int | Sequence[int]) -> Callable[..., tuple[Tensor, Any]]:
    """`value_and_grad`, or what `grad` is made of, whose errors bear the `name`."""
    if not callable(f):
        raise DTypeError(f"`{name}` needs a function; found {type(f).__name__}")
    several = isinstance(argnums, Sequence)
    positions = _positions(name, argnums if several else (argnums,))  # type: ignore[arg-type]

    @functools.wraps(f)
    def both(*args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        recording = mode.enabled
        inputs = list(args)
        if not all(-len(args) <= k < len(args) for k in positions):
            raise ArgumentError(f"`{name}` got argnums={argnums} for {len(args)} positional arguments")
        chosen = [k % len(args) for k in positions]
        if len(set(chosen)) != len(chosen):
            raise ArgumentError(f"`{name}` got argnums={argnums}, which names one of {len(args)} arguments twice")
        if isinstance(f, Fused) and not kwargs:
            once = f.value_and_grad(args, chosen)
            if once is not None:
                return once[0], (tuple(once[1]) if several else once[1][0])
        for k in chosen:
            inputs[k] = _entered(name, args[k], k)
        with enable_grad():
            value = f(*inputs, **kwargs)
        value, found = _differentiated(name, value, [inputs[k] for k in chosen], recording)
        return value, (tuple(found) if several else found[0])

    return both


def _positions(name: str, argnums: Sequence[int]) -> tuple[int, ...]:
    try:
        positions = tuple(map(operator.index, argnums))
    except TypeError:
        raise DTypeError(f"`{name}` needs argnums as an integer or several; found {argnums!r}") from None
    if len(set(positions)) != len(positions) or not positions:
        raise ArgumentError(f"`{name}` needs argnums that differ, at least one; found {argnums!r}")
    return positions


def _entered(name: str, arg: Any, position: int) -> Tensor:
    """The argument as a tensor with a node of its own."""
    try:
        tensor = arg if isinstance(arg, Tensor) else asarray(arg)
    except OutOfMemoryError:
        raise
    except SweepgradError as error:
        raise DTypeError(
            f"`{name}` by argument {position} needs an array or a number; found {type(arg).__name__} ({error}): pass "
            "several arrays as several arguments, with argnums=(0, 1)"
        ) from None
    if tensor.dtype not in FLOATS:
        raise DTypeError(
            f"`{name}` by argument {position} needs a float dtype; found {tensor.dtype}: convert it, as in 2.0 for 2"
        )
    if not tensor.requires_grad:
        return variable(tensor)
    with enable_grad():
        return positive(tensor)


def _differentiated(name: str, value: Any, inputs: list[Tensor], recording: bool) -> tuple[Tensor, list[Tensor]]:
    """The value and its gradients by `inputs`, both still in the graph if the caller can differentiate them further."""
    if not isinstance(value, Tensor):
        raise DTypeError(f"`{name}` needs a function that returns a tensor; found {type(value).__name__}")
    if value.size != 1:
        raise ShapeError(f"`{name}` needs a function with a result of one element; found shape {value.shape}")
    root = value._node
    if root is None:
        return value, [zeros_like(one) for one in inputs]
    nodes = [one._node for one in inputs if one._node is not None]
    own = {node for node in nodes if node.rule is VARIABLE}
    outside = recording and any(node.rule is VARIABLE and node not in own for node in reachable(root))
    ct = cotangent(value, None)
    arithmetic = HIGHER_ORDER if outside else FIRST_ORDER
    if WATCHERS:
        arithmetic = watched_pass(value, ct, arithmetic)
    cts = gradients(
        process.registry,
        root,
        ct if outside else flat(ct),
        nodes,
        arithmetic=arithmetic,
        retain_graph=outside,
    )
    found = [cts[node] if node in cts else zeros_like(one) for node, one in zip(nodes, inputs, strict=True)]
    return (value if outside else value.detach()), found
