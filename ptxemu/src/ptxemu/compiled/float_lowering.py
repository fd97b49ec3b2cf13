"""Arithmetic on f64, and conversions between integers and floats, on vectors of 32 lanes in LLVM.

An f64 operand is a vector of its bits, as is an f64 result; of f32 `lowering` says more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from llvmlite import ir

from ptxemu.compiled.llvm_vectors import (
    FLOATS,
    Builder,
    Lower,
    Vector,
    bits_of_type,
    integers,
    intrinsic,
    splat,
)
from ptxemu.machine.lanes import WARP_SIZE

_DOUBLES = ir.VectorType(ir.DoubleType(), WARP_SIZE)
_INVALID = 0xFFF8 << 48
_QUIET = 1 << 51
_NAN_BF16 = 0x7FFF
_NAN_ORDER = {"add": (1, 0), "sub": (1, 0), "mul": (1, 0), "fma": (1, 2, 0)}
"""Operands in the order in which their NaN becomes the result, as in `ptxemu.isa.floating`."""
_ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "num": "ord"}
_UNORDERED = {
    "equ": "==",
    "neu": "!=",
    "ltu": "<",
    "leu": "<=",
    "gtu": ">",
    "geu": ">=",
    "nan": "uno",
}
_INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")


def arithmetic_f64(name: str, rest: Sequence[str]) -> Lower | None:
    """add, sub, mul and fma of f64, to nearest."""
    if name not in _NAN_ORDER or tuple(rest) not in (("f64",), ("rn", "f64")):
        return None

    def lower(builder: Builder, v: Sequence[Vector]) -> Vector:
        numbers = [builder.bitcast(bits, _DOUBLES) for bits in v]
        if name == "fma":
            fma = intrinsic(builder, f"llvm.fma.v{WARP_SIZE}f64", _DOUBLES, 3)
            result = builder.call(fma, numbers)
        else:
            result = getattr(builder, f"f{name}")(*numbers)
        nan: Vector = splat(integers(64), _INVALID)
        for index in reversed(_NAN_ORDER[name]):
            quiet = builder.or_(v[index], splat(integers(64), _QUIET))
            nan = builder.select(_is_nan(builder, numbers[index]), quiet, nan)
        bits = builder.bitcast(result, integers(64))
        return builder.select(_is_nan(builder, result), nan, bits)

    return lower


def comparison_f32(operator: str) -> Lower | None:
    """setp of f32: with an operand that is NaN false, or true (.equ, .ltu ...)."""
    if operator in _ORDERED:
        return lambda b, v: b.fcmp_ordered(_ORDERED[operator], v[0], v[1])
    if operator in _UNORDERED:
        return lambda b, v: b.fcmp_unordered(_UNORDERED[operator], v[0], v[1])
    return None


def extreme_f32(name: str, rest: Sequence[str]) -> Lower | None:
    """min and max of two or three f32: a number rather than NaN, and -0 is below +0."""
    if tuple(rest) != ("f32",):
        return None
    return lambda b, v: reduce(lambda one, other: _extreme(b, name, one, other), v)


def _extreme(builder: Builder, name: str, one: Vector, other: Vector) -> Vector:
    symbol, combine = (">", builder.and_) if name == "max" else ("<", builder.or_)
    chosen = builder.select(builder.fcmp_ordered(symbol, one, other), one, other)
    chosen = builder.select(_is_nan(builder, other), one, chosen)
    zero = ir.Constant(FLOATS, [0.0] * WARP_SIZE)
    zeros = builder.and_(*(builder.fcmp_ordered("==", x, zero) for x in (one, other)))
    signs = combine(*(builder.bitcast(x, integers(32)) for x in (one, other)))
    return builder.select(zeros, builder.bitcast(signs, FLOATS), chosen)


def comparison_f64(symbol: str) -> Lower:
    """setp of f64: false where an operand is NaN."""
    return lambda b, v: b.fcmp_ordered(symbol, b.bitcast(v[0], _DOUBLES), b.bitcast(v[1], _DOUBLES))


def conversion(rest: Sequence[str]) -> Lower | None:
    """cvt.rn from an integer to f32 or f64; f32 to f64; f64 to f32, to nearest; bf16."""
    if tuple(rest) == ("rn", "bf16x2", "f32"):
        return _to_bf16x2
    if tuple(rest) == ("f32", "bf16"):
        return _from_bf16
    if tuple(rest) == ("rn", "bf16", "f32"):
        return lambda b, v: b.trunc(_bf16_code(b, v[0]), integers(16))
    if tuple(rest) == ("f64", "f32"):
        return lambda b, v: b.bitcast(b.fpext(v[0], _DOUBLES), integers(64))
    if tuple(rest) == ("rn", "f32", "f64"):
        return lambda b, v: b.bitcast(b.fptrunc(b.bitcast(v[0], _DOUBLES), FLOATS), integers(32))
    if len(rest) != 3 or rest[0] != "rn" or rest[1] not in ("f32", "f64"):
        return None
    to, of = rest[1:]
    if of not in _INTEGERS:
        return None
    floats = FLOATS if to == "f32" else _DOUBLES
    is_signed = of.startswith("s")

    def lower(builder: Builder, v: Sequence[Vector]) -> Vector:
        convert = builder.sitofp if is_signed else builder.uitofp
        number = convert(v[0], floats)
        return builder.bitcast(number, integers(bits_of_type(to)))

    return lower


def _to_bf16x2(builder: Builder, v: Sequence[Vector]) -> Vector:
    """Two f32 as bf16, the first one in the upper half."""
    high, low = (_bf16_code(builder, value) for value in v)
    return builder.or_(builder.shl(high, splat(integers(32), 16)), low)


def _from_bf16(builder: Builder, v: Sequence[Vector]) -> Vector:
    """The bits of an f32; a NaN keeps its payload."""
    return builder.shl(builder.zext(v[0], integers(32)), splat(integers(32), 16))


def _bf16_code(builder: Builder, value: Vector) -> Vector:
    """f32 to the nearest bf16, ties to even, as words; `ptxemu.numerics.bf16.narrow` says why."""
    word = integers(32)
    moved = builder.add(builder.bitcast(value, word), splat(word, 0x8000))
    code = builder.lshr(moved, splat(word, 16))
    is_tie = builder.icmp_unsigned("==", builder.trunc(moved, integers(16)), splat(integers(16), 0))
    even = builder.and_(code, splat(word, 0xFFFE))
    code = builder.select(is_tie, even, code)
    return builder.select(_is_nan(builder, value), splat(word, _NAN_BF16), code)


def _is_nan(builder: Builder, number: Vector) -> Vector:
    return builder.fcmp_unordered("uno", number, number)
