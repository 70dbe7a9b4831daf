"""The tensor: an immutable array, and its handle on a node of the graph. No arithmetic; `ops.operators` attaches that.

Guarantees
- A tensor's elements never change, so what a rule saved is what the operation saw. Arrays are copied on the way in, and
  go out such that nobody can write to them (`sharing`). An optimiser's update gives a variable a new array.
- Dropping a tensor appends its node to the registry's queue and does nothing else.
- A tensor on a GPU is a `DeviceTensor`. The short ways through operations ask for exactly a `Tensor`, so that what is
  in main memory pays nothing for there being devices.
"""

import functools
import gc
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sweepgrad import sums
from sweepgrad.arrays import CPU, device_of, filled, host, is_on_device, moved, resolved
from sweepgrad.dtypes import CANONICAL, FLOATS, Array, DType
from sweepgrad.elements import NOTHING, Elements, dense, flat
from sweepgrad.errors import (
    DeviceError,
    DTypeError,
    NotTrackedError,
    ShapeError,
    VariableError,
)
from sweepgrad.grad_mode import mode
from sweepgrad.graph import process
from sweepgrad.graph.backward import Arithmetic, backward
from sweepgrad.graph.node import VARIABLE, Extra, Node, Rule, nobody
from sweepgrad.hooks import HookHandle, add
from sweepgrad.sharing import as_array, check, copied, owners
from sweepgrad.shortage import attempt

if TYPE_CHECKING:
    from sweepgrad._attached import Attached as _Operators
else:
    _Operators = object

_registry = process.registry
_register = process.registry.register
_dropped = process.registry.dropped.append
_new: Callable[[Any], "Tensor"] = object.__new__


class Tensor(Elements, _Operators):
    """An immutable n-dimensional array that can take part in differentiation.

    Made by `asarray` and the other creation functions, or as the result of an operation.
    """

    __slots__ = ()

    __hash__ = object.__hash__  # by identity: `==` compares elements

    def __new__(cls, *args: Any, **kwargs: Any) -> "Tensor":
        """Refuse: tensors come from `asarray` and from operations."""
        raise DTypeError("`Tensor` is not called directly; make one with `sweepgrad.asarray(data, requires_grad=...)`")

    def __init_subclass__(cls, *, internal: bool = False) -> None:
        if internal:
            return
        raise DTypeError("`Tensor` cannot be subclassed; write functions that take tensors instead")

    # The garbage collector may call this anywhere, also on a thread that holds the registry's lock: it appends the node
    # to the queue of dropped ones, and does nothing else. It is put together from functions in C, so that there is no
    # Python frame in which a KeyboardInterrupt could be raised, which Python would swallow, and the drop be lost.
    __del__ = functools.lru_cache(maxsize=0)(operator.attrgetter("_handle.leaves"))

    @property
    def requires_grad(self) -> bool:
        """Whether a backward pass can run through this tensor."""
        return self._node is not None

    @property
    def is_variable(self) -> bool:
        """Whether this tensor was made with `requires_grad=True`, rather than computed."""
        return self._node is not None and self._node.rule is VARIABLE

    @property
    def grad(self) -> "Tensor | None":
        """The accumulated gradient of a variable, or of a tensor after `retain_grad()`; None before any."""
        if _registry.decided is not None:
            _registry.finish()
        return self._grad

    @grad.setter
    def grad(self, value: "Tensor | None") -> None:
        if value is not None:
            _check_like("`grad`", value, self._shape, self._dtype, self.device)
        _registry.set_gradients((self,), value)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._node is not None and not self.is_variable:
            raise VariableError(
                f"the result of `{self._node.rule.name}` is part of a graph, which is not copied or pickled; "
                "use `t.detach()`"
            )
        array = attempt("copy", dense(self).copy) if self.device == CPU else self._host()
        return _rebuild, (array, self._node is not None, self.device)

    # --- its place in the graph -------------------------------------------------------------------------------------

    def requires_grad_(self, requires_grad: bool = True) -> "Tensor":
        """Make this tensor a variable, or a plain tensor again; returns it.

        Raises:
            TypeError: if the dtype is not a float.
            RuntimeError: if it is the result of a tracked operation and `requires_grad` is False.
        """
        if requires_grad and self._node is None:
            make_variable(self)
        elif not requires_grad and self._node is not None:
            if not self.is_variable:
                raise VariableError(
                    f"`requires_grad_(False)` on the result of `{self._node.rule.name}`: only variables can be "
                    "changed; use `t.detach()`"
                )
            node = self._node
            _registry.extra(node).owner = nobody  # a graph built before has no gradient for it any more
            if self._node is node:  # else another thread has done it
                self._node, self._handle = None, NOTHING
                _dropped(node)
        return self

    def detach(self) -> "Tensor":
        """A tensor with the same elements that is not part of any graph; nothing is copied."""
        alike = make_here if type(self) is Tensor else make
        return alike(self._flat, self._array, self._shape, self._dtype, None)

    def copy_(self, source: "Tensor | Array | float") -> "Tensor":
        """Give this variable or plain tensor new elements: what an optimiser's step does. Returns this tensor.

        Graphs that were built from it before keep the values they saw. It stays on its device, wherever `source` is.

        Args:
            source: broadcast to this tensor's shape and converted to its dtype.

        Raises:
            RuntimeError: if it is the result of a tracked operation.
            TypeError: if `source` is not made of numbers.
            ValueError: if `source` does not broadcast to this shape, or is a ragged list.
        """
        if self._node is not None and not self.is_variable:
            raise VariableError(
                f"`copy_` into the result of `{self._node.rule.name}`: only variables can be changed; use `t.detach()`"
            )
        given = dense(source) if isinstance(source, Tensor) else as_array("copy_", source)
        if device_of(given) != self.device:
            given = attempt("copy_", moved, given, self.device)
        try:
            array = np.broadcast_to(given, self._shape)
        except ValueError:
            raise ShapeError(f"`copy_` cannot broadcast shape {given.shape} to {self._shape}") from None
        array = copied("copy_", array, self._dtype)
        self._replace(array.reshape(-1), array)
        return self

    def _replace(self, flat: Array, array: Array) -> None:
        """Take as the elements what nobody else may write to: `flat`, and the same with this tensor's shape."""
        dense(self)  # so that `_array` is set, and a reader on another thread does not set it after us
        self._flat, self._array = flat, array

    def backward(
        self,
        gradient: "Tensor | Array | float | None" = None,
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Add d self / d v to the `grad` of every living variable v from which this tensor was computed.

        If anything raises on the way, a hook included, every `grad` and the graph stay as they were.

        Args:
            gradient: cotangent of this tensor, of its shape; needed unless the tensor has one element.
            retain_graph: keep what the operations saved, so that backward can run through them again.
            create_graph: make the gradients differentiable themselves, under `no_grad` too; keeps the graph as well.

        Raises:
            RuntimeError: if this tensor is not tracked (`NotTrackedError`), or needs an operation that an earlier
                pass consumed (`GraphConsumedError`).
            ValueError: if `gradient` is missing or has the wrong shape.

        Example:
            >>> import sweepgrad as sg
            >>> x = sg.asarray([1.0, 2.0], requires_grad=True)
            >>> (x * x).sum().backward()
            >>> x.grad
            Tensor([2., 4.])
        """
        node = self._node
        if node is None:
            raise NotTrackedError(
                "`backward` on a tensor that is not tracked: nothing it was computed from requires a gradient, or it "
                "was made under `no_grad` or by `detach`; make the inputs with requires_grad=True"
            )
        ct = cotangent(self, gradient)
        arithmetic = HIGHER_ORDER if create_graph else FIRST_ORDER
        if WATCHERS:
            arithmetic = watched_pass(self, ct, arithmetic)
        # Whatever the caller's mode: the pass, its hooks and the additions to `grad` are recorded to be differentiated
        # again, or not at all. Set by hand, since a `with` block costs a microsecond.
        recording, mode.enabled = mode.enabled, create_graph
        try:
            backward(
                _registry,
                node,
                ct if create_graph else flat(ct),
                arithmetic=arithmetic,
                retain_graph=retain_graph or create_graph,
            )
        finally:
            mode.enabled = recording

    def retain_grad(self) -> None:
        """Let backward passes set `grad` on this tensor although it is not a variable.

        Raises:
            RuntimeError: if the tensor is not tracked.
        """
        _registry.extra(self._tracked("retain_grad")).owner = weakref.ref(self)

    def register_hook(self, hook: "Callable[[Tensor], Tensor | None]") -> "HookHandle":
        """Call `hook(cotangent)` when a backward pass has this tensor's whole cotangent; returns a removable handle.

        What the hook returns, unless None, replaces the cotangent: a tensor of the same shape and dtype. Operations in
        the hook are recorded if the pass was called with `create_graph`, or under `enable_grad`.

        Raises:
            RuntimeError: if the tensor is not tracked.

        Example:
            >>> import sweepgrad as sg
            >>> x = sg.ones((2,), requires_grad=True)
            >>> handle = x.register_hook(lambda ct: ct * 10.0)
            >>> x.sum().backward()
            >>> x.grad
            Tensor([10., 10.])
            >>> handle.remove()
        """
        if not callable(hook):
            raise DTypeError(f"`register_hook` needs a function; found {type(hook).__name__}")
        node, device = self._tracked("register_hook"), self.device
        return add(
            _registry.extra(node).hooks, hook, lambda name, ct: _check_like(name, ct, node.shape, node.dtype, device)
        )

    def _tracked(self, name: str) -> Node:
        if self._node is None:
            raise NotTrackedError(
                f"`{name}` on a tensor that is not tracked: it was not computed from any variable; make the inputs "
                "with requires_grad=True"
            )
        return self._node


class DeviceNode(Node):
    """A node whose tensor is on a GPU: what it saved is counted apart."""

    __slots__ = ()
    on_device = True


class DeviceTensor(Tensor, internal=True):
    """A tensor whose elements are on a GPU. Only what asks for them waits for the GPU."""

    __slots__ = ()

    @property
    def device(self) -> str:
        """The GPU where the elements are."""
        return device_of(self._array if self._flat is None else self._flat)

    @property
    def __cuda_array_interface__(self) -> Any:
        self._check_leaves("__cuda_array_interface__")
        array: Any = dense(self)
        return array.__cuda_array_interface__

    def numpy(self) -> Array:
        """A copy of the elements as a read-only NumPy array, once they are computed."""
        array = self._host()
        array.setflags(write=False)
        return array

    def _host(self) -> Array:
        return attempt("numpy", host, dense(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        raise DeviceError(
            f"`__array__` of a tensor on {self.device}: it is not copied to main memory implicitly; use `t.numpy()`, "
            "or an operation of sweepgrad for what NumPy's was to do"
        )

    def __dlpack__(self, **options: Any) -> Any:
        self._check_leaves("__dlpack__")
        return dense(self).__dlpack__(**options)


# --- for the other modules ------------------------------------------------------------------------------------------


def make(flat: Array | None, array: Array | None, shape: tuple[int, ...], dtype: DType, node: Node | None) -> Tensor:
    """A tensor from its parts, unchecked, for elements wherever they are; see `make_here`."""
    tensor = make_here(flat, array, shape, dtype, node)
    if type(array if flat is None else flat) is not np.ndarray and is_on_device(array if flat is None else flat):
        tensor.__class__ = DeviceTensor
    return tensor


def make_here(
    flat: Array | None, array: Array | None, shape: tuple[int, ...], dtype: DType, node: Node | None
) -> Tensor:
    """A tensor of elements in main memory, from its parts, unchecked.

    With a node, the tensor is the handle that the node counts as its first.
    """
    tensor = _new(Tensor)
    tensor._node = node
    tensor._handle = NOTHING if node is None else node
    tensor._flat = flat
    tensor._array = array
    tensor._shape = shape
    tensor._dtype = dtype
    tensor._grad = None
    return tensor


def wrap(array: Array) -> Tensor:
    """A tensor around `array`, wherever it is, which nobody else may write to from now on."""
    flat = None
    if array.flags.c_contiguous:
        flat = array if array.ndim == 1 else array.reshape(-1)
    return make(flat, array, array.shape, CANONICAL[array.dtype], None)


def attach(tensor: Tensor, node: Node) -> Tensor:
    """A second handle on `node`, with the elements of `tensor`: how a rule sees its inputs when it is replayed."""
    second = make(tensor._flat, tensor._array, tensor._shape, tensor._dtype, None)
    with _registry.lock:
        node.handles, second._node, second._handle = node.handles + 1, node, node
    return second


def variable(tensor: Tensor) -> Tensor:
    """A new variable with the elements of `tensor`."""
    return make_variable(tensor.detach())


def make_variable(tensor: Tensor) -> Tensor:
    """`tensor` itself, which has no node yet, as a variable."""
    if tensor._dtype not in _FLOATS:
        raise DTypeError(
            f"`requires_grad` needs a float dtype; found {tensor._dtype}: only float32 and float64 have "
            'derivatives; make it with dtype="float64"'
        )
    node = _node_of(tensor)(VARIABLE, (), (), 0, tensor._shape, tensor._dtype)
    node.extra = Extra(weakref.ref(tensor))
    process.survive_forks()
    try:
        tensor._node = tensor._handle = node
        _register(node)
    except BaseException:
        tensor._node, tensor._handle = None, NOTHING
        _dropped(node)
        raise
    return tensor


def record(result: Tensor, rule: Rule, saved: tuple[Any, ...], links: "Node | tuple[Node, ...]", nbytes: int) -> Tensor:
    """`result`, new and without a node, wherever it is, as the result of a tracked operation; see `record_here`."""
    if type(result) is Tensor:
        return record_here(result, rule, saved, links, nbytes)
    node = DeviceNode(rule, saved, links, nbytes, result._shape, result._dtype)
    result._node = result._handle = node
    _register(node)
    return result


def record_here(
    result: Tensor, rule: Rule, saved: tuple[Any, ...], links: "Node | tuple[Node, ...]", nbytes: int
) -> Tensor:
    """The same for what is in main memory.

    The caller keeps the inputs' tensors, and so the nodes `links`, alive until this returns. The node has its handle
    before it is registered: if this is interrupted, the tensor drops the node again.
    """
    node = Node(rule, saved, links, nbytes, result._shape, result._dtype)
    result._node = result._handle = node
    _register(node)
    return result


def _node_of(tensor: Tensor) -> type[Node]:
    return Node if type(tensor) is Tensor else DeviceNode


def cotangent(result: Tensor, gradient: Any) -> Tensor:
    """What a pass from `result` begins with: `gradient` as a tensor, or ones if it is None and there is one element.

    Raises:
        TypeError: if an array that the graph saved has been made writable meanwhile.
    """
    if owners and result._node is not None:
        check(result._node)
    if gradient is None:
        if result._shape and result.size != 1:
            raise ShapeError(
                f"`backward` on a tensor of shape {result._shape} needs a `gradient` of that shape; "
                "only a tensor with one element has a default (reduce it first, for example with `sum()`)"
            )
        one = _ONE[result._dtype]
        if type(result) is not Tensor:
            one = attempt("gradient", filled, 1, 1.0, result._dtype, dense(result))
        return make(one, None, result._shape, result._dtype, None)
    if isinstance(gradient, Tensor):
        given = gradient
    else:
        try:
            # An array first: of an object, `np.array` takes what its `__array__` gives for a copy.
            array = attempt("gradient", np.asarray, gradient)
            given = wrap(attempt("gradient", moved, copied("gradient", array, result._dtype), result.device))
        except (TypeError, ValueError) as error:
            raise DTypeError(
                f"`gradient` must be a tensor or an array of shape {result._shape}; found {type(gradient).__name__}"
            ) from error
    _check_like("`gradient`", given, result._shape, result._dtype, result.device)
    return given


_FLOATS = frozenset(FLOATS)
_ONE = {dtype: np.ones(1, dtype) for dtype in FLOATS}
"""The cotangent that a pass begins with, made once, as `np.ones` takes 1.3 us and nobody writes to a tensor's array."""


FIRST_ORDER = Arithmetic(
    add=sums.add,
    accumulate=sums.accumulate,
    deliver=lambda node, ct: make(ct, None, node.shape, node.dtype, None),
    receive=lambda node, ct: flat(ct),
)
"""A pass whose result is not differentiated again: cotangents are flat arrays, which spares a tensor for each."""

HIGHER_ORDER = Arithmetic(
    replays=True,
    # A tensor of its own for each owner: a rule may hand one cotangent to several.
    deliver=lambda node, ct: ct.detach() if ct._node is None else attach(ct, ct._node),
)
"""A pass on tensors, whose result can be differentiated again."""

WATCHERS: list[int] = []
"""An entry for each `detect_anomaly` that some thread is in. An empty list costs nothing but a look at it."""


def watched_pass(result: Tensor, ct: Tensor, arithmetic: Arithmetic) -> Arithmetic:
    """What a pass computes with that begins at `result`, if there are `WATCHERS`; the anomaly module replaces this."""
    return arithmetic


def _check_like(subject: str, value: object, shape: tuple[int, ...], dtype: DType, device: str) -> None:
    """Raise unless `value` is a tensor of the shape and dtype of the tensor that it belongs to, and where that is."""
    if not isinstance(value, Tensor):
        raise DTypeError(
            f"{subject} must be a Tensor or None; found {type(value).__name__}: convert it with `sweepgrad.asarray`"
        )
    if value._shape != shape:
        raise ShapeError(f"{subject} has shape {value._shape}; needed is the tensor's own shape {shape}")
    if value._dtype != dtype:
        raise DTypeError(f"{subject} has dtype {value._dtype}; needed is the tensor's own dtype {dtype}: use `astype`")
    if value.device != device:
        raise DeviceError(
            f"{subject} is on {value.device}; needed is the tensor's own device {device}: use `to_device`"
        )


def _rebuild(array: Array, requires_grad: bool, device: str = CPU) -> Tensor:
    # A copy, since pickle may have made the array over memory that its caller has.
    tensor = wrap(attempt("copy", moved, attempt("copy", np.array, array, order="C"), resolved("pickle", device)))
    return make_variable(tensor) if requires_grad else tensor


_KINDS = (Tensor, DeviceTensor)


def _find_handles() -> Mapping[Node, int]:
    nodes = (getattr(tensor, "_node", None) for tensor in gc.get_objects() if type(tensor) in _KINDS)
    return Counter(node for node in nodes if node is not None)  # None too: a tensor that another thread is making


process.find_handles = _find_handles
