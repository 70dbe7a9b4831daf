"""`fuse`: a whole function as one kernel, and its derivative as another.

A function is traced once for each combination of its arguments' shapes and dtypes, and of the arguments that are not
tensors, arrays or floats; what it computes then is a `Program`. Kernels depend on ranks and on the pattern of
broadcasting only, so a new length compiles nothing; but see `ops.loop.SHORT`, and floats whose values are asked for.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np

from sweepgrad.anomaly import is_watching
from sweepgrad.dtypes import DTYPES, FLOATS, DType
from sweepgrad.elements import flat
from sweepgrad.errors import AnomalyError, DTypeError, FuseError, site
from sweepgrad.grad_mode import enable_grad, no_grad
from sweepgrad.kernels.expr import Expr, reduction, symbol, symbols, topological
from sweepgrad.ops.plan import from_array
from sweepgrad.ops.program import UNREAD, Place, Program, Space, place, rebuilt
from sweepgrad.ops.traced import FALLBACK, NeedsValue, Number, Trace, Traced, refuse, traced
from sweepgrad.sharing import as_array
from sweepgrad.tensor import Tensor, make

_KEPT = 256
"""Traces that a fused function keeps, the newest: a loop over ever new shapes would fill memory."""


@overload
def fuse(f: Callable[..., Any], *, fallback: bool = False) -> Fused: ...
@overload
def fuse(f: None = None, *, fallback: bool = False) -> Callable[[Callable[..., Any]], Fused]: ...
def fuse(f: Callable[..., Any] | None = None, *, fallback: bool = False) -> Any:
    """Let `f` run as one kernel, and its derivative as another. A function, or a decorator.

    The first call for new shapes or dtypes traces `f`: it runs once, with tensors that have no elements yet. Tensors,
    arrays and floats among the arguments, also in lists, tuples and dictionaries, are inputs of the kernel; everything
    else is fixed at tracing, as is what `f` reads from outside, such as a global number. Elementwise results are the
    same, bit for bit, as those of `f` itself.

    Args:
        f: a function of tensors, made of elementwise operations and reductions over the last axes, the first, or all,
            that returns a tensor, or a tuple or list of tensors.
        fallback: run `f` as it is, after one warning, where it cannot be fused, rather than raise an error.

    Returns:
        A function of the same arguments. Its results are each one node of the graph, which saves the arguments alone.

    Raises:
        TypeError: from the returned function (`FuseError`), where `f` has something that one kernel cannot do: matrix
            products, a Python `if` on a tensor's elements, tensors that are not arguments. It names operation and line.

    Example:
        >>> import sweepgrad as sg
        >>> @sg.fuse
        ... def loss(x, y):
        ...     return sg.sum(sg.exp(-(x * x)) * y)
        >>> loss(sg.asarray([0.0, 1.0]), sg.asarray([1.0, 0.0]))
        Tensor(1.)
    """
    if f is None:
        return functools.partial(fuse, fallback=fallback)
    if not callable(f):
        raise DTypeError(f"`fuse` needs a function; found {type(f).__name__}")
    return Fused(f, fallback)


def in_float64(f: Callable[..., Any]) -> Fused:
    """`f`, fused, with everything between its arguments and its result in float64."""
    return Fused(f, False, wide=True)


def _fused(f: Callable[..., Any], fallback: bool, wide: bool) -> Fused:
    return Fused(f, fallback, wide=wide)


class _Form:
    """How a traced function's results are put together: a tensor, or a tuple or list."""

    def __init__(self, program: Program, kind: type | None, recipes: list[Number]) -> None:
        self.program = program
        self.kind = kind
        self.recipes = recipes

    def built(self, results: list[Tensor]) -> Any:
        return results[0] if self.kind is None else self.kind(results)


class Fused:
    """A function that `fuse` made; call it like the function itself."""

    def __init__(self, f: Callable[..., Any], fallback: bool, *, wide: bool = False) -> None:
        """With `wide`, everything is computed in float64, whatever the dtype of arguments and results."""
        functools.update_wrapper(self, f)
        self.__name__: str = getattr(f, "__name__", type(f).__name__)
        self._f = f
        self._fallback = fallback
        self._wide = wide
        self._warned = False
        # No lock, for which a child that is forked meanwhile would wait: two threads may trace the same, and either
        # trace serves. Positions that are lost where both add some are asked for again.
        self._forms: dict[Any, _Form | None] = {}
        self._fixed: frozenset[int] = frozenset()  # positions of floats whose values the function asks for

    def __repr__(self) -> str:
        return f"<fused {getattr(self._f, '__qualname__', self._f)}>"

    def __copy__(self) -> Fused:
        return self  # as functions are copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Fused:
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        # As functions are: by the name, if it leads here; else as what `fuse` makes of the function.
        name = getattr(self, "__qualname__", "")
        found: Any = sys.modules.get(self.__module__)
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (_fused, (self._f, self._fallback, self._wide))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        leaves, form = self._prepared(args, kwargs)
        if form is None:  # also within another function that is being traced
            return self._f(*args, **kwargs)
        numbers = self._numbers(form, leaves)
        try:
            return form.built(form.program(_tensors(leaves), numbers))
        except AnomalyError:
            with no_grad():
                self._f(*args, **kwargs)  # to raise at the operation within that is at fault, if one is by itself
            raise

    def _numbers(self, form: _Form, leaves: Sequence[Any]) -> list[float]:
        """What the kernel is handed besides tensors."""
        numbers = [recipe.value(leaves) for recipe in form.recipes]
        for number in numbers:
            if isinstance(number, complex):
                raise DTypeError(f"`{self.__name__}` computes {number!r} from its arguments; needed are real numbers")
        return [float(number) for number in numbers]

    @property
    def plain(self) -> Callable[..., Any]:
        """The function as it was."""
        return self._f

    def value_and_grad(self, args: Sequence[Any], argnums: Sequence[int]) -> tuple[Tensor, list[Tensor]] | None:
        """The value, which must have one element, and its gradients by some of `args`, in one pass; nothing is tracked.

        None where that takes more than one kernel: an argument is tracked, or is no array of floats, or `f` is not
        fused. Or where each is looked at by itself, within `detect_anomaly`.
        """
        if is_watching():
            return None
        if not all(isinstance(args[k], (Tensor, np.ndarray)) for k in argnums):
            return None
        if any(isinstance(arg, (list, tuple, dict)) for arg in args):
            return None
        leaves, form = self._prepared(tuple(args), {})
        if form is None or form.kind is not None or math.prod(form.program.outputs[0][1].shape) != 1:
            return None
        tensors = _tensors(leaves)
        if any(t._node is not None for t in tensors):
            return None
        at = [sum(map(_is_leaf, args[:k])) for k in argnums]
        if any(leaves[k]._dtype not in FLOATS for k in at):
            return None
        wanted = tuple(len(_tensors(leaves[:k])) for k in at)
        program = form.program.derivative(wanted, value=True)
        outs = program.run([flat(t) for t in tensors], self._numbers(form, leaves))
        made = [make(out, None, of.shape, of.dtype, None) for out, (_, of) in zip(outs, program.outputs, strict=True)]
        return made[0], made[1:]

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], _Form | None]:
        """The arguments' leaves, and what is to be done with them."""
        while True:
            fixed = self._fixed
            leaves: list[Any] = []
            try:
                key: Any = (_structure(args, leaves, fixed), _structure(kwargs, leaves, fixed))
            except FuseError as error:
                if not self._fallback:
                    raise
                self._warn(str(error).removesuffix(f", {FALLBACK}"))
                return leaves, None
            if any(type(leaf) is Traced for leaf in leaves):
                return leaves, None
            try:
                return leaves, self._forms[key]
            except KeyError:
                pass
            except TypeError:
                key = None  # an argument that is not hashable, such as a set
            form: _Form | None = None
            try:
                if key is None:
                    raise refuse(self.__name__, "an argument is neither input nor hashable", "pass its parts")
                form = self._traced(args, kwargs, leaves, fixed)
            except NeedsValue as needed:
                self._fixed |= needed.numbers
                continue
            except FuseError as error:
                if not self._fallback:
                    raise
                self._warn(str(error).removesuffix(f", {FALLBACK}"))
                if key is None:
                    return leaves, None
            for old in list(self._forms)[: 1 - _KEPT]:
                self._forms.pop(old, None)
            self._forms[key] = form

    def _warn(self, why: str) -> None:
        """Say once, at the user's line, that the function is not fused."""
        if not self._warned:
            self._warned = True
            path, _, line = site().rpartition(":")
            warnings.warn_explicit(f"{self!r} runs as it is: {why}", RuntimeWarning, path, int(line))

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], fixed: frozenset[int]) -> _Form:
        """Run the function on traced tensors."""
        tensors = _tensors(leaves)
        dtype = _float_dtype(self.__name__, tensors)
        computed = DTYPES["float64"] if self._wide else dtype
        trace = Trace(computed)
        inputs: list[Traced] = []
        stand_ins: list[Any] = []
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                axes = tuple(map(trace.label, leaf._shape))
                inputs.append(
                    traced(
                        trace,
                        symbol(f"x{len(inputs)}"),
                        leaf._shape,
                        axes,
                        computed if leaf._dtype is dtype else leaf._dtype,
                    )
                )
                stand_ins.append(inputs[-1])
            else:
                stand_ins.append(Number(("argument", k)))
        rest = iter(stand_ins)
        given = _filled(args, rest, fixed), _filled(kwargs, rest, fixed)
        with enable_grad():
            value = self._f(*given[0], **given[1])
        kind = type(value) if type(value) in (tuple, list) else None
        results = list(value) if kind else [value]
        for result in results:
            if type(result) is not Traced:
                raise refuse(
                    self.__name__,
                    f"it returned {type(result).__name__} that is not computed from its arguments",
                    "return a tensor, or a tuple or list of tensors, and take gradients of the fused function",
                )
        program = _program(self.__name__, trace, dtype, inputs, results)
        return _Form(program, kind, list(trace.numbers.values()))


def _program(name: str, trace: Trace, dtype: DType, inputs: Sequence[Traced], results: Sequence[Traced]) -> Program:
    """The program of a trace, for floats of `dtype`: labels become axes of a space, which is cut into I and J."""
    exprs = [result.expr for result in results]
    read = symbols(exprs)
    found = [tuple(trace.find(label) for label in one.axes if label is not None) for one in (*inputs, *results)]
    for k in range(len(inputs)):
        if f"x{k}" not in read:
            found[k] = ()
    for axes in trace.walked:
        walked = [trace.find(label) for label in axes if label is not None]
        if len(set(walked)) != len(walked):
            raise refuse(name, "it walks two axes of one tensor that are the same axis elsewhere, as x * x.T does")
    sums = {
        expr: {trace.find(int(k)) for k in reduction(expr)[1].split(".")}
        for expr in topological(exprs)
        if expr.op == "reduce"
    }
    order = _ordered(found[: len(inputs)], {label for labels in (*found, *sums.values()) for label in labels})
    cut = _cut(name, order, found, list(sums.items()))
    position = {label: k for k, label in enumerate(order)}
    lengths = tuple(trace.lengths[label] for label in order)
    places = [
        place(
            one._shape,
            dtype if one._dtype is trace.dtype else one._dtype,
            tuple(position[label] for label in labels),
            lengths,
            cut,
        )
        if k >= len(inputs) or f"x{k}" in read
        else Place(one._shape, dtype if one._dtype is trace.dtype else one._dtype, UNREAD, (), ())
        for k, (one, labels) in enumerate(zip((*inputs, *results), found, strict=True))
    ]
    partly = [of for of, labels in zip(places, found, strict=True) if of.kind == "v" and len(labels) != len(order)]
    if partly and (partly[-1] in places[len(inputs) :] or not _meet(exprs, found, sums, order)):
        raise refuse(name, f"a tensor of shape {partly[-1].shape} has some of the axes that are walked together")
    space = Space({f"x{k}": one.kind for k, one in enumerate(places[: len(inputs)])})
    halves = {"I": set(order[:cut]), "J": set(order[cut:])}

    def lowered(expr: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if expr.op != "reduce":
            return None
        over = [axis for axis, labels in halves.items() if labels and labels <= sums[expr]]
        # Where there are no rows, all is one row, and a reduction over all is one over both axes.
        return space.reduced(reduction(expr)[0], args[0], over if cut else ["I", "J"])

    exprs = rebuilt(exprs, lowered)
    outputs = list(zip(exprs, places[len(inputs) :], strict=True))
    rows, n = math.prod(lengths[:cut]), math.prod(lengths[cut:])
    return Program(name, trace.dtype, places[: len(inputs)], len(trace.numbers), outputs, rows, n)


def _meet(
    exprs: Sequence[Expr],
    found: Sequence[tuple[int, ...]],
    sums: dict[Expr, set[int]],
    order: Sequence[int],
) -> bool:
    """Whether some value has all axes, so that a loop over all of them is what the function asks for."""
    axes: dict[Expr, set[int]] = {}
    for expr in topological(exprs):
        axes[expr] = set[int]().union(*(axes[arg] for arg in expr.args)) - sums.get(expr, set())
        if expr.op == "symbol" and str(expr.value).startswith("x"):
            axes[expr] = set(found[int(str(expr.value)[1:])])
    return any(len(own) == len(order) for own in axes.values())


def _ordered(inputs: Sequence[tuple[int, ...]], labels: set[int]) -> list[int]:
    """All labels in an order that agrees with how the inputs lie in memory; one that it contradicts will be copied."""
    after: dict[int, set[int]] = {label: set() for label in labels}
    for own in inputs:
        for first, second in itertools.pairwise(own):
            after[second].add(first)
    order: list[int] = []
    while after:
        free = [label for label, before in after.items() if not before - set(order)]
        order.append(min(free or after))
        del after[order[-1]]
    return order


def _cut(name: str, order: list[int], places: Sequence[tuple[int, ...]], sums: Sequence[tuple[Expr, set[int]]]) -> int:
    """How many of the axes, from the front, are rows: such that every reduction is over I, J or both."""
    best: tuple[int, int] | None = None
    for cut in range(len(order)):
        rows, columns = set(order[:cut]), set(order[cut:])
        allowed = (rows, columns, rows | columns)
        if all(over in allowed for _, over in sums):
            fit: tuple[set[int], ...] = (rows, columns, rows | columns, set())
            cost = sum(set(labels) not in fit for labels in places)
            best = min(best or (cost, cut), (cost, cut))
    if best is None and order:
        kinds = sorted({reduction(expr)[0] for expr, _ in sums})
        raise refuse(
            " and ".join(kinds), "only reductions over the last axes, the first, or all can be, and over the same ones"
        )
    return best[1] if best else 0


# --- arguments ------------------------------------------------------------------------------------------------------


def _is_leaf(value: Any) -> bool:
    """Whether an argument is an input of the kernel, rather than a container or a part of the trace."""
    return isinstance(value, (Tensor, float, np.ndarray, np.generic))


def _structure(value: Any, leaves: list[Any], fixed: frozenset[int]) -> Any:
    """What of `value` a trace depends on; the leaves, tensors and numbers, are added to `leaves`."""
    kind = type(value)
    if _is_leaf(value):
        if isinstance(value, float) and not isinstance(value, np.generic):
            leaves.append(value)
            return value.hex() if len(leaves) - 1 in fixed else float
        tensor = value if isinstance(value, Tensor) else from_array("fuse", as_array("fuse", value))
        leaves.append(tensor)
        return tensor._shape, tensor._dtype
    if isinstance(value, (tuple, list)):
        return (kind, *[_structure(one, leaves, fixed) for one in value])
    if isinstance(value, dict):
        return (kind, *[(name, _structure(one, leaves, fixed)) for name, one in value.items()])
    by_identity = kind.__hash__ is object.__hash__  # type: ignore[comparison-overlap]
    if by_identity and not callable(value) and value not in (None, Ellipsis):
        # Told apart by what it is, not by what it holds, which may change unseen.
        raise refuse(
            "fuse", f"an argument is an object of {kind.__name__}", "pass the numbers and tensors that it holds"
        )
    return kind, value


def _filled(value: Any, leaves: Iterator[Any], fixed: frozenset[int]) -> Any:
    """`value` with its leaves replaced, but for the numbers that are fixed."""
    kind = type(value)
    if _is_leaf(value):
        leaf = next(leaves)
        return value if isinstance(leaf, Number) and leaf.recipe[1] in fixed else leaf
    if isinstance(value, (tuple, list)):
        parts = [_filled(one, leaves, fixed) for one in value]
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)  # a named tuple takes them one by one
    if isinstance(value, dict):
        return {name: _filled(one, leaves, fixed) for name, one in value.items()}
    return value


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _float_dtype(name: str, tensors: Sequence[Tensor]) -> DType:
    """The one dtype of all floats among the arguments."""
    if not tensors:
        raise refuse(name, "it got no tensor or array", "pass one")
    floats = {t._dtype for t in tensors if t._dtype in FLOATS}
    others = {t._dtype for t in tensors} - floats - {DTYPES["bool"]}
    if len(floats) != 1 or others:
        found = ", ".join(sorted(str(t._dtype) for t in tensors))
        raise refuse(
            name,
            f"its arguments must have one float dtype, or be truth values; found {found}",
            "convert them with `astype`",
        )
    return floats.pop()
