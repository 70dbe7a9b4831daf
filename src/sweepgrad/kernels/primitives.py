"""Steps of kernels that Python source cannot say: what the emitted text calls as `p.…`. Imported by kernels alone.

Guarantees
- `add` and `multiply` may be regrouped by the compiler, and only where they combine the partial results of a reduction;
  arithmetic between elements is done as written.
- `take` is atomic, and orders memory: what a worker wrote before it is seen by the worker that takes the next number.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

declare: Any = cgutils.get_or_insert_function

_I64 = ir.IntType(64)

_REGROUPED = ("reassoc", "nsz")


@intrinsic
def add(_: Any, x1: Any, x2: Any) -> Any:
    """The sum of two partial results, in any grouping: that lets the compiler keep many of them."""
    return x1(x1, x2), _combining("fadd", "add")


@intrinsic
def multiply(_: Any, x1: Any, x2: Any) -> Any:
    """The product of two partial results, in any grouping."""
    return x1(x1, x2), _combining("fmul", "mul")


def _combining(floats: str, integers: str) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if isinstance(signature.return_type, types.Float):
            return getattr(builder, floats)(*args, flags=_REGROUPED)
        return getattr(builder, integers)(*args)

    return generate


@intrinsic
def maximum(_: Any, x1: Any, x2: Any) -> Any:
    """The greater partial result, NaN if either is."""
    return x1(x1, x2), _extreme("llvm.maximum", ">")


@intrinsic
def minimum(_: Any, x1: Any, x2: Any) -> Any:
    """The lesser partial result, NaN if either is."""
    return x1(x1, x2), _extreme("llvm.minimum", "<")


def _extreme(function: str, order: str) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = args[0].type
        if isinstance(signature.return_type, types.Float):
            name = f"{function}.{'f32' if signature.return_type.bitwidth == 32 else 'f64'}"
            return builder.call(declare(builder.module, ir.FunctionType(kind, [kind, kind]), name), args)
        signed = getattr(signature.return_type, "signed", False)
        compare = builder.icmp_signed if signed else builder.icmp_unsigned
        return builder.select(compare(order, *args), *args)

    return generate


@intrinsic
def either(_: Any, found: Any, condition: Any) -> Any:
    """`found`, an int32, with its lowest bit set if `condition` holds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bit = builder.trunc(args[1], ir.IntType(1)) if args[1].type.width > 1 else args[1]
        return builder.or_(args[0], builder.zext(bit, args[0].type))

    return found(found, condition), generate


@intrinsic
def select(_: Any, condition: Any, x1: Any, x2: Any) -> Any:
    """`x1` where `condition` holds, else `x2`, without a branch."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        condition = args[0]
        if isinstance(condition.type, (ir.FloatType, ir.DoubleType)):  # what was reduced, or kept in working memory
            condition = builder.fcmp_unordered("!=", condition, ir.Constant(condition.type, 0.0))
        elif condition.type.width > 1:
            condition = builder.trunc(condition, ir.IntType(1))
        return builder.select(condition, args[1], args[2])

    return x1(condition, x1, x1), generate


@intrinsic
def stream(_: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy the first `count` elements of a row past the caches, where `target` begins at a multiple of 32 bytes.

    Such stores are seen late by other threads, but not later than the worker's next `take`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, of = (
            context.make_array(kind)(context, builder, value).data
            for kind, value in zip(signature.args[:2], args[:2], strict=True)
        )
        element = to.type.pointee
        width = _I64(32 // context.get_abi_sizeof(element))
        vector = ir.VectorType(element, width.constant)
        address = builder.ptrtoint(to, _I64)
        aligned = builder.icmp_unsigned("==", builder.and_(address, _I64(31)), _I64(0))
        whole = builder.select(aligned, builder.sdiv(args[2], width), _I64(0))
        mark = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        with cgutils.for_range(builder, whole) as loop:
            at = builder.mul(loop.index, width)
            value = builder.load(builder.bitcast(builder.gep(of, [at]), vector.as_pointer()))
            value.align = 8  # nothing is known of the source; the target was looked at
            store = builder.store(value, builder.bitcast(builder.gep(to, [at]), vector.as_pointer()))
            store.align = 32
            store.set_metadata("nontemporal", mark)
        with cgutils.for_range_slice(builder, builder.mul(whole, width), args[2], _I64(1), _I64) as (at, _):
            builder.store(builder.load(builder.gep(of, [at])), builder.gep(to, [at]))
        return context.get_dummy_value()

    return types.void(target, source, types.int64), generate


@intrinsic
def take(_: Any, task: Any, slot: Any) -> Any:
    """The number in `task[slot]`, an array of int64, which is one greater afterwards."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        pointer = builder.gep(array.data, [args[1]])
        return builder.atomic_rmw("add", pointer, _I64(1), "acq_rel")

    return types.int64(task, types.int64), generate
