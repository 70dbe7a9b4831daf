"""Turns object code into functions that Python can call, with LLVM's linker alone: Numba is not imported.

Guarantees
- Where a symbol is missing, UnresolvedError is raised. LLVM itself would end the process.
- What is loaded stays loaded: functions are never left without their code, not even while Python shuts down.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

Kernel = Callable[..., None]

ARRAY_TYPE = "sweepgrad_ndarray"
"""The symbol of NumPy's array type."""

_METH_FASTCALL = 0x80  # CPython's flag for functions of (self, arguments, their number)


class UnresolvedError(Exception):
    """The code refers to symbols that this process does not have."""


@dataclass(frozen=True)
class Code:
    """The machine code of one kernel: what the cache keeps.

    It defines two functions of (self, arguments, their number), called `name` with the suffixes of `SUFFIXES`.
    """

    name: str
    needs: tuple[str, ...]
    """Symbols that it refers to."""
    binary: bytes
    """The object file."""

    def pack(self) -> bytes:
        """As bytes, without the name."""
        return " ".join(self.needs).encode() + b"\n" + self.binary

    @staticmethod
    def unpack(name: str, content: bytes) -> "Code":
        """The inverse of `pack`."""
        needs, _, binary = content.partition(b"\n")
        return Code(name, tuple(needs.decode().split()), binary)


SUFFIXES = ("_held", "_released")
"""Of the function that keeps the interpreter's lock, and of the one that lets other threads run meanwhile."""


def load(code: Code) -> tuple[Kernel, Kernel]:
    """The entry points of `code`: with the interpreter's lock held, and released. One thread at a time."""
    import llvmlite.binding as llvm

    missing = [name for name in code.needs if not _resolve(name)]
    if missing:
        _start_numba()
        if not all(map(_resolve, missing)):
            raise UnresolvedError(f"no symbol {', '.join(missing)}")
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code.binary))
    engine.finalize_object()
    held, released = (engine.get_function_address(code.name + suffix) for suffix in SUFFIXES)
    if not held or not released:
        raise UnresolvedError(f"no function {code.name}")
    return _function(held), _function(released)


@cache
def target() -> tuple[str, str, str]:
    """This machine as LLVM knows it: the triple, the processor's name and its features."""
    import llvmlite.binding as llvm

    try:
        features = llvm.get_host_cpu_features().flatten()
    except RuntimeError:  # LLVM cannot tell on this platform
        features = ""
    return llvm.get_process_triple(), llvm.get_host_cpu_name(), features


@cache
def _engine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple, cpu, features = target()
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, codemodel="jitdefault", jit=True
    )
    module = llvm.parse_assembly("")
    module.triple = triple
    return llvm.create_mcjit_compiler(module, machine)


@cache
def _python_address(name: str) -> int | None:
    try:
        return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
    except AttributeError:
        return None


def _resolve(name: str) -> bool:
    """Let LLVM find the symbol `name`, or tell that it cannot."""
    import llvmlite.binding as llvm

    if llvm.address_of_symbol(name) is not None:
        return True
    address = id(np.ndarray) if name == ARRAY_TYPE else _python_address(name) if name.startswith("Py") else None
    if address is None:
        return False
    llvm.add_symbol(name, address)
    return True


@cache
def _start_numba() -> None:
    """Make the symbols known that Numba brings along: its allocator, its own versions of some functions."""
    import numba.core.registry
    import numba.core.runtime

    core: Any = numba.core
    core.runtime.rtsys.initialize(core.registry.cpu_target.target_context)


class _MethodDef(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_new_function = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
    ("PyCFunction_NewEx", ctypes.pythonapi)
)
_definitions: list[_MethodDef] = []  # which the functions refer to


def _function(address: int) -> Kernel:
    """A built-in function that runs the code at `address`, whose `self` is None, which it returns."""
    definition = _MethodDef(b"kernel", address, _METH_FASTCALL, None)
    _definitions.append(definition)
    return _new_function(ctypes.addressof(definition), None, None)  # type: ignore[no-any-return]
