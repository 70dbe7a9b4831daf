"""The dtypes that tensors can have, and the types that stand for arrays in annotations."""

from typing import Any

import numpy as np
import numpy.typing as npt

from sweepgrad.errors import DTypeError

Array = npt.NDArray[Any]
DType = np.dtype[Any]

FLOATS: tuple[DType, ...] = (np.dtype(np.float32), np.dtype(np.float64))
DTYPES: dict[str, DType] = {
    name: np.dtype(name)
    for name in (
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float32",
        "float64",
    )
}

CANONICAL: dict[DType, DType] = {dtype: dtype for dtype in DTYPES.values()}
"""The one object that stands for each dtype, so that `is` compares them; a dtype's `name` takes 2 us to look up."""


def refused_dtype(op: str, found: object) -> DTypeError:
    """The error for a dtype that tensors cannot have."""
    return DTypeError(f"`{op}` got dtype {found}; accepted are {', '.join(DTYPES)}")


def as_dtype(op: str, dtype: Any) -> DType:
    """`dtype` as one that tensors can have."""
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise refused_dtype(op, repr(dtype)) from None
    if found not in CANONICAL:
        raise refused_dtype(op, found)
    return CANONICAL[found]
