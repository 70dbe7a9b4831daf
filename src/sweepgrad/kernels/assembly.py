"""From the source of `kernels.grid` to code for NVIDIA's GPUs, through numba-cuda; needs no GPU, and runs nothing.

Imported where a kernel is not in the cache, or is simulated. The only module beside `kernels.cpu` that executes source.
"""

import math
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from sweepgrad.errors import MissingDependencyError

try:
    # Else what is imported next is Numba's own, which is no longer developed.
    import numba_cuda  # noqa: F401
    from numba import cuda, types
except ImportError as error:
    raise MissingDependencyError(
        'kernels on a GPU need NVIDIA\'s numba-cuda: `pip install "sweepgrad[cu12]"`, or `[cu13]` for CUDA 13 '
        f"({error})"
    ) from error

Capability = tuple[int, int]
"""A GPU's compute capability, such as (9, 0)."""


def function_of(source: str, dtype: str, mathematics: ModuleType | Any = math, rint: Any = None) -> Any:
    """The Python function that a kernel is compiled from; `mathematics` are its functions of floats."""
    if rint is None:
        from numba.cuda import libdevice

        rint = libdevice.rintf if dtype == "float32" else libdevice.rint
    scope = {"__name__": "sweepgrad_cuda", "np": np, "cuda": cuda, "m": mathematics, "rint": rint}
    scope["T"] = scope["A"] = getattr(np, "bool_" if dtype == "bool" else dtype)
    exec(compile(source, "<sweepgrad_cuda>", "exec"), scope)
    return scope["kernel"]


def ptx(source: str, signature: Sequence[str], dtype: str, capability: Capability) -> str:
    """The assembly of a kernel for GPUs of a compute capability."""
    found = tuple(map(_type, signature))
    text: str = cuda.compile(function_of(source, dtype), found, device=False, abi="numba", cc=capability)[0]  # type: ignore[attr-defined]
    return text


def entry_of(text: str) -> str:
    """The name of the kernel in its assembly."""
    found = re.search(r"\.entry\s+([\w$]+)", text)
    assert found, "assembly without an entry"
    return found[1]


def cubin(text: str, capability: Capability) -> bytes:
    """What assembly becomes for GPUs of exactly a compute capability.

    Made here rather than by the GPU's driver, which takes no assembly that is newer than itself.
    """
    from cuda.core import Linker, LinkerOptions, ObjectCode

    linker = Linker(
        ObjectCode.from_ptx(text.encode()), options=LinkerOptions(arch=f"sm_{capability[0]}{capability[1]}")
    )
    return bytes(linker.link("cubin").code)


def _type(name: str) -> Any:
    if name.startswith("*"):
        pointer: Any = types.CPointer
        return pointer(types.uint8 if name == "*bool" else getattr(types, name[1:]))
    return types.boolean if name == "bool" else getattr(types, name)
