"""A driver that compiles what it is given to run to the assembly of two kinds of GPU, and to machine code of one.

Arrays are those of the simulated devices, so all goes as on a GPU but for what is computed: ones.
"""

import re

from sweepgrad.kernels import assembly  # isort: skip  # first, as it brings NVIDIA's numba.cuda
from numba.cuda import compiler

from sweepgrad.kernels.simulator import Simulator

CAPABILITIES = [(8, 0), (9, 0)]

DOUBLES = ("sin", "cos", "tan", "pow")
"""Whose functions of float32 in NVIDIA's library take a few steps in float64."""


class Assembler(Simulator):
    warp, threads, most_chunks, most_tiles = 32, 256, 1024, 65535  # as of a GPU

    def __init__(self):
        self.compiled = {}

    def compile(self, source, signature, dtype):
        key = source, signature, dtype
        if key not in self.compiled:
            self.compiled[key] = assembled(*key)
            for capability, text in self.compiled[key].items():
                check(source, signature, text, capability)
            assert assembly.cubin(self.compiled[key][CAPABILITIES[-1]], CAPABILITIES[-1])[:4] == b"\x7fELF"
        end = len(signature) - signature[::-1].index("int64")  # behind the lengths come the arrays that are written to

        def launch(blocks, threads, arguments):
            assert len(arguments) == len(signature)
            assert threads % self.warp == 0
            assert 0 < threads <= self.threads
            for array in arguments[end:]:
                array.fill(1)

        return launch


def assembled(source, signature, dtype):
    """The assembly by capability. Numba's front end, 4/5 of the time, serves both where Numba is inside as expected."""
    try:
        types = tuple(map(assembly._type, signature))
        library, _ = compiler._compile_pyfunc_with_fixup(
            assembly.function_of(source, dtype), types, device=False, abi="numba", cc=CAPABILITIES[0]
        )
        return {capability: library.get_asm_str(cc=capability) for capability in CAPABILITIES}
    except (AttributeError, TypeError):
        return {capability: assembly.ptx(source, signature, dtype, capability) for capability in CAPABILITIES}


WIDTHS = {"float32": ".f32", "float64": ".f64", "bool": ".u8", "int8": ".u8", "uint8": ".u8", "int16": ".u16"}
WIDTHS |= {"uint16": ".u16", "int32": ".u32", "uint32": ".u32", "int64": ".u64", "uint64": ".u64"}


def check(source, signature, text, capability):
    assert f".target sm_{capability[0]}{capability[1]}" in text
    entry = assembly.entry_of(text)
    (parameters,) = re.findall(rf"\.entry {re.escape(entry)}\((.*?)\)", text, re.DOTALL)
    # As CuPy hands them over: an address for each array, and each number in its own width.
    assert re.findall(r"\.param (\.\w+)", parameters) == [WIDTHS.get(name, ".u64") for name in signature]
    names = {name.strip("*") for name in signature}
    if (
        "float32" in names
        and names <= {"float32", "int64"}
        and not any(f"m.{function}(" in source for function in DOUBLES)
    ):
        assert ".f64" not in text, source
