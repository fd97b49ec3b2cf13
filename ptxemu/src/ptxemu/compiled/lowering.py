"""One pure instruction on vectors of 32 lanes in LLVM, for the instructions that are simple there.

Integers and predicates are vectors of their bits, f64 too; an f32 operand is a vector of float.
`lowered` knows an instruction by its modifiers; types of operands are those that its decoder chose
(`PureOp`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeAlias

from llvmlite import ir

from ptxemu.machine.decoded import PureOp, identity
from ptxemu.machine.lanes import VALUE, WARP_SIZE

# LLVM's types for the 32 lanes of a warp.

Vector: TypeAlias = Any
"""An llvmlite value of a vector type of 32 lanes."""
Builder: TypeAlias = Any
Lower: TypeAlias = Callable[[Builder, Sequence[Vector]], Any]
"""Writer of an instruction: gives its result, or a tuple of results."""
FLOATS = ir.VectorType(ir.FloatType(), WARP_SIZE)


def bits_of_type(type_: str) -> int:
    """Bits of a value of a PTX type; 1 of a predicate."""
    return 1 if type_ == "pred" else 8 * int(VALUE[type_].itemsize)


def integers(bits: int) -> Any:
    """The LLVM type of 32 lanes of so many bits."""
    return ir.VectorType(ir.IntType(bits), WARP_SIZE)


def splat(type_: Any, value: int) -> Vector:
    """A constant in every lane."""
    return ir.Constant(type_, [value] * WARP_SIZE)


def intrinsic(builder: Builder, name: str, type_: Any, arity: int) -> Any:
    """LLVM's function of that name on operands of one type."""
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(type_, [type_] * arity), name=name)
    return function


# Arithmetic on f64, and conversions between integers and floats, on vectors of 32 lanes in LLVM.
#
# An f64 operand is a vector of its bits, as is an f64 result; of f32 `lowering` says more.

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


_SIGNED = ("s16", "s32", "s64")
_INTEGERS = ("u16", "u32", "u64", *_SIGNED)
_BITS = ("b16", "b32", "b64", "pred")
_SAME_ADDRESS = (("cvta", "to", "global", "u64"), ("cvta", "global", "u64"))
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED_COMPARISONS = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


def lowered(modifiers: tuple[str, ...], op: PureOp) -> Lower | None:
    """Return the writer of the instruction; None if only its definition can execute it."""
    name, *rest = modifiers
    if name == "mov" and max(len(op.sources), len(op.destinations)) == 2:
        return _pack if len(op.sources) == 2 else _unpack
    if len(op.destinations) != 1:
        return None
    if op.function is identity or modifiers in _SAME_ADDRESS:
        return lambda b, v: v[0]
    if type_of(rest) == "f64" and name in ("add", "sub", "mul", "fma"):
        return arithmetic_f64(name, rest)
    type_ = type_of(rest)
    if type_ == "f32" and name in ("min", "max"):
        return extreme_f32(name, rest)
    if type_ == "f32" and name in _F32:
        exact = _F32[name]
        return exact if tuple(rest) in (("f32",), ("rn", "f32")) else None
    for table in (_integer, _logic, _compare, _select, _convert):
        found = table(name, rest, type_)
        if found is not None:
            return found
    return None


def type_of(rest: Sequence[str]) -> str:
    """The last modifier."""
    return rest[-1] if rest else ""


def _pack(builder: Builder, v: Sequence[Vector]) -> Vector:
    """mov d, {low, high}"""
    bits = v[0].type.element.width
    low, high = (builder.zext(part, integers(2 * bits)) for part in v)
    return builder.or_(low, builder.shl(high, splat(high.type, bits)))


def _unpack(builder: Builder, v: Sequence[Vector]) -> tuple[Vector, Vector]:
    """mov {low, high}, a"""
    bits = v[0].type.element.width // 2
    high = builder.lshr(v[0], splat(v[0].type, bits))
    return builder.trunc(v[0], integers(bits)), builder.trunc(high, integers(bits))


def _fma(builder: Builder, v: Sequence[Vector]) -> Vector:
    return builder.call(intrinsic(builder, f"llvm.fma.v{WARP_SIZE}f32", FLOATS, 3), v)


_F32: dict[str, Lower] = {
    "add": lambda b, v: b.fadd(v[0], v[1]),
    "sub": lambda b, v: b.fsub(v[0], v[1]),
    "mul": lambda b, v: b.fmul(v[0], v[1]),
    "fma": _fma,
    "neg": lambda b, v: b.fneg(v[0]),
    "abs": lambda b, v: b.call(intrinsic(b, f"llvm.fabs.v{WARP_SIZE}f32", FLOATS, 1), v),
}


def _integer(name: str, rest: Sequence[str], type_: str) -> Lower | None:
    if type_ not in _INTEGERS:
        return None
    signed, bits = type_ in _SIGNED, bits_of_type(type_)
    plain: dict[str, Lower] = {
        "add": lambda b, v: b.add(v[0], v[1]),
        "sub": lambda b, v: b.sub(v[0], v[1]),
        "neg": lambda b, v: b.neg(v[0]),
        "min": lambda b, v: b.select(_less(b, v, signed=signed), v[0], v[1]),
        "max": lambda b, v: b.select(_less(b, v, signed=signed), v[1], v[0]),
        "shr": lambda b, v: _shift_right(b, v, signed=signed),
    }
    if len(rest) == 1:
        return plain.get(name)
    if name not in ("mul", "mad") or len(rest) != 2:
        return None
    product: Lower
    if rest[0] == "lo":
        product = lambda b, v: b.mul(v[0], v[1])
    elif rest[0] == "wide" and bits <= 32:
        product = lambda b, v: _wide_product(b, v, signed=signed)
    elif rest[0] == "hi" and bits <= 32 and name == "mul":
        product = lambda b, v: b.trunc(
            b.lshr(_wide_product(b, v, signed=signed), splat(integers(2 * bits), bits)),
            integers(bits),
        )
    else:
        return None
    return product if name == "mul" else lambda b, v: b.add(product(b, v), v[2])


def _less(builder: Builder, v: Sequence[Vector], *, signed: bool) -> Vector:
    compare = builder.icmp_signed if signed else builder.icmp_unsigned
    return compare("<", v[0], v[1])


def _wide_product(builder: Builder, v: Sequence[Vector], *, signed: bool) -> Vector:
    wide = integers(2 * v[0].type.element.width)
    widen = builder.sext if signed else builder.zext
    return builder.mul(widen(v[0], wide), widen(v[1], wide))


def _amount(builder: Builder, value: Vector, amount: Vector) -> tuple[Vector, Vector, int]:
    """The amount in the value's type, and whether it is less than the value's width."""
    width = value.type.element.width
    fits = builder.icmp_unsigned("<", amount, splat(amount.type, width))
    if amount.type.element.width < width:
        amount = builder.zext(amount, value.type)
    elif amount.type.element.width > width:
        amount = builder.trunc(amount, value.type)
    return builder.and_(amount, splat(value.type, width - 1)), fits, width


def _shift_left(builder: Builder, v: Sequence[Vector]) -> Vector:
    amount, fits, _ = _amount(builder, v[0], v[1])
    return builder.select(fits, builder.shl(v[0], amount), splat(v[0].type, 0))


def _shift_right(builder: Builder, v: Sequence[Vector], *, signed: bool) -> Vector:
    amount, fits, width = _amount(builder, v[0], v[1])
    if signed:
        amount = builder.select(fits, amount, splat(v[0].type, width - 1))
        return builder.ashr(v[0], amount)
    return builder.select(fits, builder.lshr(v[0], amount), splat(v[0].type, 0))


def _logic(name: str, rest: Sequence[str], type_: str) -> Lower | None:
    if type_ not in _BITS or len(rest) != 1:
        return None
    of_predicates_too: dict[str, Lower] = {
        "and": lambda b, v: b.and_(v[0], v[1]),
        "or": lambda b, v: b.or_(v[0], v[1]),
        "xor": lambda b, v: b.xor(v[0], v[1]),
        "not": lambda b, v: b.not_(v[0]),
    }
    if name in of_predicates_too or type_ == "pred":
        return of_predicates_too.get(name)
    return {
        "shl": _shift_left,
        "shr": lambda b, v: _shift_right(b, v, signed=False),
        "popc": _count_ones,
    }.get(name)


def _count_ones(builder: Builder, v: Sequence[Vector]) -> Vector:
    """Count the ones as u32, for any width of the operand."""
    type_ = v[0].type
    name = f"llvm.ctpop.v{WARP_SIZE}i{type_.element.width}"
    count = builder.call(intrinsic(builder, name, type_, 1), v)
    return count if type_ == integers(32) else builder.trunc(count, integers(32))


def _compare(name: str, rest: Sequence[str], type_: str) -> Lower | None:
    if name != "setp" or not 2 <= len(rest) <= 3:
        return None
    operator, *combine = rest[:-1]
    if type_ == "f32":
        compare = comparison_f32(operator)
    elif type_ == "f64":
        compare = _comparison_f64(operator)
    else:
        compare = _integer_comparison(operator, type_)
    if compare is None or not combine:
        return compare
    joins: dict[str, Lower] = {
        "and": lambda b, v: b.and_(compare(b, v), v[2]),
        "or": lambda b, v: b.or_(compare(b, v), v[2]),
        "xor": lambda b, v: b.xor(compare(b, v), v[2]),
    }
    return joins.get(combine[0])


def _comparison_f64(operator: str) -> Lower | None:
    symbol = _COMPARISONS.get(operator)
    return None if symbol is None else comparison_f64(symbol)


def _integer_comparison(operator: str, type_: str) -> Lower | None:
    if type_ not in _INTEGERS and (type_ not in _BITS[:3] or operator not in ("eq", "ne")):
        return None
    if type_ in _SIGNED:
        symbol = _COMPARISONS.get(operator)
        return None if symbol is None else lambda b, v: b.icmp_signed(symbol, v[0], v[1])
    symbol = _COMPARISONS.get(operator) or _UNSIGNED_COMPARISONS.get(operator)
    return None if symbol is None else lambda b, v: b.icmp_unsigned(symbol, v[0], v[1])


def _select(name: str, rest: Sequence[str], type_: str) -> Lower | None:
    if name != "selp" or len(rest) != 1:
        return None
    return lambda b, v: b.select(v[2], v[0], v[1])


def _convert(name: str, rest: Sequence[str], type_: str) -> Lower | None:
    if name != "cvt":
        return None
    if len(rest) != 2 or not {*rest} <= {*_INTEGERS}:
        return conversion(rest)
    bits = bits_of_type(rest[0])

    def convert(builder: Builder, v: Sequence[Vector]) -> Vector:
        if v[0].type.element.width > bits:
            return builder.trunc(v[0], integers(bits))
        if v[0].type.element.width == bits:
            return v[0]
        widen = builder.sext if type_ in _SIGNED else builder.zext
        return widen(v[0], integers(bits))

    return convert
