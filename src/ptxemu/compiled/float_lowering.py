"""Arithmetic on f64, and conversions between integers and floats, on vectors of 32 lanes in LLVM.

An f64 operand is a vector of its bits, as is an f64 result; of f32 `lowering` says more.
"""

from __future__ import annotations

from collections.abc import Sequence

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
_NAN_ORDER = {"add": (1, 0), "sub": (1, 0), "mul": (1, 0), "fma": (1, 2, 0)}
"""Whose NaN is the result's, as `ptxemu.isa.floating` has it."""
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


def comparison_f64(symbol: str) -> Lower:
    """setp of f64: false where an operand is NaN."""
    return lambda b, v: b.fcmp_ordered(symbol, b.bitcast(v[0], _DOUBLES), b.bitcast(v[1], _DOUBLES))


def conversion(rest: Sequence[str]) -> Lower | None:
    """cvt.rn from an integer to f32 or f64; f32 to f64; f64 to f32, to nearest."""
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


def _is_nan(builder: Builder, number: Vector) -> Vector:
    return builder.fcmp_unordered("uno", number, number)
