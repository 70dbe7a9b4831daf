"""What a tensor tells of its elements, to users and to the other modules; it changes none and knows no arithmetic.

Data is kept flat, as a contiguous 1-d array in C order beside the shape, since that is what kernels take; a view with
other strides is kept as it is. All other modules read it through `flat` and `dense`.
"""

import math
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from sweepgrad.arrays import CPU, contiguous
from sweepgrad.dtypes import Array, DType
from sweepgrad.errors import ArgumentError, DTypeError, ImmutableError, ShapeError, VariableError
from sweepgrad.graph.node import VARIABLE, Node
from sweepgrad.sharing import outgoing
from sweepgrad.shortage import again, attempt

if TYPE_CHECKING:
    from sweepgrad.tensor import Tensor


class _Nothing:
    """In the place of a node, of which nobody has to be told."""

    __slots__ = ()
    leaves = None


NOTHING = _Nothing()


class Elements:
    """The half of `Tensor` that is about its elements."""

    __slots__ = ("__weakref__", "_array", "_dtype", "_flat", "_grad", "_handle", "_node", "_shape")

    _flat: Array | None
    _array: Array | None
    _shape: tuple[int, ...]
    _dtype: DType
    _node: Node | None
    _handle: "Node | _Nothing"
    """What is told when this tensor dies: its node, or nothing."""
    _grad: "Tensor | None"

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis."""
        return self._shape

    @property
    def dtype(self) -> DType:
        """NumPy dtype of the elements."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self._shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * int(self._dtype.itemsize)

    @property
    def device(self) -> str:
        """Where the elements are: `"cpu"`, or `"cuda:0"` and so on for a GPU."""
        return CPU

    # --- its elements -----------------------------------------------------------------------------------------------

    def numpy(self) -> Array:
        """The elements as a read-only NumPy array, which shares memory if it is large; `.copy()` it to write.

        From a GPU they are copied, once they are computed.

        Example:
            >>> import sweepgrad as sg
            >>> sg.asarray([1.0, 2.0]).numpy()
            array([1., 2.])
        """
        try:
            return outgoing(dense(self))
        except MemoryError as error:
            return again(error, "numpy", outgoing, dense(self))

    def item(self) -> float | int | bool:
        """The only element, as a Python number.

        Raises:
            ValueError: if there is not exactly one element.
        """
        return self._single("item")

    def tolist(self) -> Any:
        """The elements as nested lists of Python numbers, or one number for 0 dimensions."""
        return self._host().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if self._node is not None:
            raise VariableError(
                "`__array__` of a tensor that requires a gradient: it is not converted to a NumPy array implicitly, "
                "since the array would silently leave the graph; use `t.numpy()` or `t.detach()`, or `stack` and "
                "`concat` to join tensors"
            )
        array = self.numpy()
        if dtype is not None and np.dtype(dtype) != array.dtype:
            if copy is False:
                raise ArgumentError(
                    f"`__array__` with copy=False cannot convert {array.dtype} to {np.dtype(dtype)} without a copy; "
                    "leave out `copy` or `dtype`"
                )
            return attempt("__array__", array.astype, dtype)
        return attempt("__array__", array.copy) if copy else array

    def __len__(self) -> int:
        if not self._shape:
            raise DTypeError("`len` of a 0-d tensor: it has no axis; its number of elements is `t.size`")
        return self._shape[0]

    def __bool__(self) -> bool:
        return bool(self._single("bool"))

    def __float__(self) -> float:
        return float(self._single("float"))

    def __int__(self) -> int:
        return int(self._single("int"))

    def __index__(self) -> int:
        if self._dtype.kind not in "iu" or self._shape:
            raise DTypeError(
                f"`__index__` needs a 0-d integer tensor; found shape {self._shape}, {self._dtype}: use `int(t)`"
            )
        return int(self.item())

    def _single(self, what: str) -> float | int | bool:
        if self.size != 1:
            hint = "use `any` or `all`" if what == "bool" else "index it, or use `tolist()`"
            raise ShapeError(f"`{what}` needs a tensor with one element; found shape {self._shape}: {hint}")
        return self._host().item()  # type: ignore[no-any-return]

    def _host(self) -> Array:
        """The elements in main memory."""
        return dense(self)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return dense(self).__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        self._check_leaves("__dlpack__")
        array = self.numpy()
        if (options.get("max_version") or (0, 0)) < (1, 0):
            array = attempt("__dlpack__", array.copy)  # an older consumer would take it for writable
        return array.__dlpack__(**options)

    def _check_leaves(self, name: str) -> None:
        """Raise if the elements would leave the graph unseen."""
        if self._node is not None:
            raise VariableError(
                f"`{name}` of a tensor that requires a gradient: what is made of it would silently leave the graph; "
                "hand over `t.detach()`"
            )

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise ImmutableError(
            "`t[key] = value` on a tensor: tensors are immutable, so that saved values stay true; build a new one, for "
            "example with `where(mask, value, t)` or `concat`, or give a variable new values with `t.copy_(value)`"
        )

    def __delitem__(self, key: object) -> NoReturn:
        raise ImmutableError("`del t[key]` on a tensor: tensors are immutable; take the others with `t[mask]`")

    def __repr__(self) -> str:
        text = np.array2string(self._host(), separator=", ", prefix="Tensor(")
        dtype = "" if self._dtype in (np.float64, np.int64, np.bool_) else f", dtype={self._dtype}"
        dtype += "" if self.device == CPU else f', device="{self.device}"'
        if self._node is None:
            return f"Tensor({text}{dtype})"
        rule = self._node.rule
        origin = ", requires_grad=True" if rule is VARIABLE else f", op={rule.name}"
        return f"Tensor({text}{dtype}{origin})"

    def __format__(self, spec: str) -> str:
        if spec and self.size == 1:
            return format(self.item(), spec)
        try:
            return format(repr(self), spec)
        except ValueError:
            raise ShapeError(
                f"`format` with {spec!r} needs a tensor with one element; found shape {self._shape}: index it first"
            ) from None


def dense(tensor: "Elements") -> Array:
    """The elements as an n-dimensional array, contiguous or strided, which must not be written to."""
    array = tensor._array
    while array is None:
        flat = tensor._flat
        assert flat is not None
        tensor._array = array = flat.reshape(tensor._shape)
        if tensor._flat is not flat:  # replaced by another thread, whose array was overwritten here
            array = None
    return array


def flat(tensor: "Elements") -> Array:
    """The elements as a contiguous 1-d array in C order, copied if the tensor is a strided view."""
    if tensor._flat is not None:
        return tensor._flat
    try:
        return contiguous(dense(tensor))  # type: ignore[no-any-return]
    except MemoryError as error:
        return again(error, "contiguous copy", flat, tensor)
