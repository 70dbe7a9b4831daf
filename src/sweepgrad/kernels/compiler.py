"""Compiles kernel source to object code, with Numba's front end and optimiser. Only imported to compile.

A kernel is compiled without Numba's own wrappers. In their place come two that read arguments as Python keeps them in
memory: two variants cost 60 % of what `numba.njit` takes for one, and a call with three arrays 40 % of its entry
point's. All that Numba's dispatcher and cache would need to be loaded again is left out, too.
"""

import struct
from collections.abc import Sequence
from typing import Any

import numba.core.compiler
import numba.core.registry
from llvmlite import ir
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock

from sweepgrad.kernels.loader import ARRAY_TYPE, SUFFIXES, Code

_numba: Any = numba.core  # whose types are unfinished
types: Any = numba.types

_OBJECT = object.__basicsize__ // struct.calcsize("P")  # pointers in an object's head, of which the last is its type
_I1, _I8, _I32 = ir.IntType(1), ir.IntType(8), ir.IntType(32)
_I64, _FLOAT, _DOUBLE = ir.IntType(64), ir.FloatType(), ir.DoubleType()
_SIZE = ir.IntType(8 * struct.calcsize("P"))
_POINTER = _I8.as_pointer()
_POINTERS = _POINTER.as_pointer()


def compile_code(name: str, function: Any, signature: Sequence[str]) -> Code:
    """The code of `function` for arguments of the types `signature`; it allocates nothing."""
    argtypes = tuple(numba_type(one) for one in signature)
    flags = _numba.compiler.Flags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model = "numpy"
    flags.noalias = True
    flags.no_rewrites = True  # of expressions with whole arrays, of which kernels have none: 5 % of a compilation
    flags.nrt = False  # reference counts would cost time, even if only to be removed
    cpu = _numba.registry.cpu_target
    typing, target = cpu.typing_context, cpu.target_context
    with global_compiler_lock:
        typing.refresh()
        target.refresh()
        library: Any = _Library(target.codegen(), name)  # type: ignore[no-untyped-call]
        result = _numba.compiler.compile_extra(
            typing, target, function, argtypes, types.void, flags, {}, library=library
        )
        module = library.create_ir_module(f"{name}_wrappers")
        for suffix, released in zip(SUFFIXES, (False, True), strict=True):
            _Wrapper(target, module, result.fndesc).build(name + suffix, released=released)
        library.add_ir_module(module)
        library.exported = {name + suffix for suffix in SUFFIXES}
        library.finalize()
    return Code(name, tuple(library.needs), library.binary)


def numba_type(name: str) -> Any:
    """Numba's type of `float32`, `bool:1C` and the like."""
    dtype, _, layout = name.partition(":")
    scalar = types.boolean if dtype == "bool" else getattr(types, dtype)
    return types.Array(scalar, int(layout[:-1]), layout[-1]) if layout else scalar


class _Library(JITCodeLibrary):
    """Numba's code library, except that it ends with object code, in which only the wrappers can be seen.

    The names that Numba makes up are unique in a process, not among the entries of a cache.
    """

    exported: set[str]
    needs: list[str]
    binary: bytes

    def _optimize_functions(self, module: Any) -> None:
        # Numba optimises each function before the whole. Without that a compilation takes 9 % less time, and of 23
        # kernels none ran slower.
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        module = self._final_module
        for kind in (module.functions, module.global_variables):
            for value in kind:
                if not value.is_declaration and value.name not in self.exported:
                    value.linkage = "internal"
        super()._optimize_final_module()  # type: ignore[no-untyped-call]

    def _finalize_final_module(self) -> None:
        module = self._final_module
        names = [v.name for kind in (module.functions, module.global_variables) for v in kind if v.is_declaration]
        self.needs = sorted(name for name in names if not name.startswith("llvm."))
        self.binary = self._codegen._tm.emit_object(module)
        self._finalized = True


class _Wrapper:
    """Writes the function of (self, arguments, their number) that calls a compiled kernel and returns self."""

    def __init__(self, target: Any, module: Any, kernel: Any) -> None:
        self.target = target
        self.module = module
        self.kernel = kernel

    def build(self, name: str, *, released: bool) -> None:
        """Add the function `name`, which calls the kernel with the interpreter's lock `released` or not."""
        argtypes = self.kernel.argtypes
        wrapper = ir.Function(self.module, ir.FunctionType(_POINTER, [_POINTER, _POINTERS, _SIZE]), name)
        itself, arguments, count = wrapper.args
        start, self.refusal, failure, end = (wrapper.append_basic_block() for _ in range(4))
        self.builder = builder = ir.IRBuilder(start)
        self._demand(builder.icmp_unsigned("==", count, _SIZE(len(argtypes))))
        objects = [builder.load(builder.gep(arguments, [_SIZE(k)])) for k in range(len(argtypes))]
        self.doubtful = _I1(0)
        values = [self._value(one, argtype) for one, argtype in zip(objects, argtypes, strict=True)]
        with builder.if_then(self.doubtful, likely=False):
            error = self._call("PyErr_Occurred", _POINTER)
            with builder.if_then(builder.icmp_unsigned("!=", error, _POINTER(None))):
                builder.ret(_POINTER(None))
        thread = self._call("PyEval_SaveThread", _POINTER) if released else None
        convention = self.target.call_conv
        callee = self._function(self.kernel.llvm_func_name, convention.get_function_type(self.kernel.restype, argtypes))
        # Both wrappers call the one copy, so that what is optimised does not depend on which of them is used.
        status, _ = convention.call_function(
            builder, callee, self.kernel.restype, argtypes, values, attrs=("noinline",)
        )
        if released:
            self._call("PyEval_RestoreThread", ir.VoidType(), thread)
        builder.cbranch(status.is_error, failure, end)
        builder.position_at_end(end)
        self._call("Py_IncRef", ir.VoidType(), itself)
        builder.ret(itself)
        builder.position_at_end(self.refusal)
        self._call("PyErr_BadArgument", _I32)
        builder.ret(_POINTER(None))
        builder.position_at_end(failure)  # which no kernel of ours comes to: division and indexing are unchecked
        self._call("PyErr_NoMemory", _POINTER)
        builder.ret(_POINTER(None))

    def _function(self, name: str, function_type: Any) -> Any:
        found = self.module.globals.get(name)
        return ir.Function(self.module, function_type, name) if found is None else found

    def _call(self, name: str, result: Any, *args: Any) -> Any:
        function = self._function(name, ir.FunctionType(result, [_POINTER] * len(args)))
        return self.builder.call(function, args)

    def _demand(self, condition: Any) -> None:
        following = self.builder.append_basic_block()
        self.builder.cbranch(condition, following, self.refusal)
        self.builder.position_at_end(following)

    def _value(self, one: Any, argtype: Any) -> Any:
        """The kernel's argument from the Python object `one`."""
        if isinstance(argtype, types.Array):
            return self._array(one, argtype)
        builder = self.builder
        if argtype == types.boolean:
            truth = self._call("PyObject_IsTrue", _I32, one)
            self._doubt(builder.icmp_signed("<", truth, _I32(0)))
            return builder.icmp_unsigned("!=", truth, _I32(0))
        if isinstance(argtype, types.Float):
            real = self._call("PyFloat_AsDouble", _DOUBLE, one)
            self._doubt(builder.fcmp_ordered("==", real, _DOUBLE(-1.0)))
            return builder.fptrunc(real, _FLOAT) if argtype == types.float32 else real
        signed = argtype.signed or argtype.bitwidth < 64
        whole = self._call("PyLong_AsLongLong" if signed else "PyLong_AsUnsignedLongLong", _I64, one)
        self._doubt(builder.icmp_unsigned("==", whole, _I64(-1)))
        return builder.trunc(whole, ir.IntType(argtype.bitwidth)) if argtype.bitwidth < 64 else whole

    def _doubt(self, condition: Any) -> None:
        """`condition` holds where the conversion may have raised."""
        self.doubtful = self.builder.or_(self.doubtful, condition)

    def _array(self, one: Any, argtype: Any) -> Any:
        """Numba's view of a NumPy array, whose fields lie behind the object's head: data, ndim, shape, strides."""
        builder = self.builder
        fields = builder.bitcast(one, _POINTERS)

        def field(position: int) -> Any:
            return builder.load(builder.gep(fields, [_SIZE(position)]))

        if ARRAY_TYPE not in self.module.globals:
            ir.GlobalVariable(self.module, _I8, ARRAY_TYPE)
        self._demand(builder.icmp_unsigned("==", field(_OBJECT - 1), self.module.globals[ARRAY_TYPE]))
        element = self.target.get_data_type(argtype.dtype)
        data = builder.bitcast(field(_OBJECT), element.as_pointer())
        shape, strides = (builder.bitcast(field(_OBJECT + k), _SIZE.as_pointer()) for k in (2, 3))
        # meminfo and parent stay null: nobody counts references to it
        view = ir.Constant(self.target.get_value_type(argtype), None)
        size = _SIZE(1)
        for axis in range(argtype.ndim):
            length, stride = (builder.load(builder.gep(of, [_SIZE(axis)])) for of in (shape, strides))
            size = builder.mul(size, length) if axis else length
            view = builder.insert_value(view, length, [5, axis])
            view = builder.insert_value(view, stride, [6, axis])
        itemsize = _SIZE(self.target.get_abi_sizeof(element))
        for position, value in ((2, size), (3, itemsize), (4, data)):
            view = builder.insert_value(view, value, position)
        return view
