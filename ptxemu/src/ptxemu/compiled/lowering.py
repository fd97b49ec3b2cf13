"""One pure instruction on vectors of 32 lanes in LLVM, for the instructions that are simple there.

Integers and predicates are vectors of their bits, f64 too; an f32 operand is a vector of float.
`lowered` knows an instruction by its modifiers; types of operands are those that its decoder chose
(`PureOp`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ptxemu.compiled import float_lowering
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
from ptxemu.machine.decoded import PureOp, identity
from ptxemu.machine.lanes import WARP_SIZE

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
        return float_lowering.arithmetic_f64(name, rest)
    type_ = type_of(rest)
    if type_ == "f32" and name in ("min", "max"):
        return float_lowering.extreme_f32(name, rest)
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
        compare = float_lowering.comparison_f32(operator)
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
    return None if symbol is None else float_lowering.comparison_f64(symbol)


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
        return float_lowering.conversion(rest)
    bits = bits_of_type(rest[0])

    def convert(builder: Builder, v: Sequence[Vector]) -> Vector:
        if v[0].type.element.width > bits:
            return builder.trunc(v[0], integers(bits))
        if v[0].type.element.width == bits:
            return v[0]
        widen = builder.sext if type_ in _SIGNED else builder.zext
        return widen(v[0], integers(bits))

    return convert
