"""PTX ISA "Comparison and Selection Instructions", of half precision too."""

from __future__ import annotations

import numpy as np

from ptxemu.isa.forms import Function, assemble, build, select, width_of
from ptxemu.isa.registry import Modifiers, pure, unsupported
from ptxemu.machine.decoded import PureOp
from ptxemu.numerics import bf16, f16
from ptxemu.numerics.dtypes import F2, F4, U2, U4, Array, constant, split
from ptxemu.numerics.rounding import flush_f32
from ptxemu.syntax.ast import Instruction, Operand, Pair, Sink

_BITS = ("b16", "b32", "b64")
_SIGNED = ("s16", "s32", "s64")
_UNSIGNED = ("u16", "u32", "u64")
_FLOATS = ("f16", "f32", "f64", "bf16")
_PACKED = ("f16x2", "bf16x2")

_EQUALITY: dict[str, Function] = {"eq": np.equal, "ne": np.not_equal}
_ORDER: dict[str, Function] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED_ORDER: dict[str, Function] = {
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_FLOAT: dict[str, Function] = {
    **_ORDER,
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
}
_COMBINE: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(operator: str, type_: str, *, ftz: bool) -> Function | None:
    """The function that compares two operands of a type; None if there is no such comparison."""
    if type_ in _BITS:
        return _EQUALITY.get(operator)
    if type_ in _SIGNED:
        return _EQUALITY.get(operator) or _ORDER.get(operator)
    if type_ in _UNSIGNED:
        found = _EQUALITY.get(operator) or _ORDER.get(operator)
        return found or _UNSIGNED_ORDER.get(operator)
    compare = _FLOAT.get(operator)
    if compare is None:
        return None
    prepare = _preparation(type_, ftz=ftz)
    if prepare is None:
        return compare
    return lambda a, b: compare(prepare(a), prepare(b))


def _preparation(type_: str, *, ftz: bool) -> Function | None:
    """Return the function that makes an operand comparable; None if it is so already."""
    if type_ == "bf16":
        return bf16.widen
    if type_ == "bf16x2":
        return lambda a: bf16.widen(split(a, U2))
    if type_ == "f16x2":
        return (lambda a: f16.flush(split(a, F2))) if ftz else (lambda a: split(a, F2))
    if not ftz or type_ == "f64":
        return None
    return flush_f32 if type_ == "f32" else f16.flush


def _view_type(type_: str, operator: str) -> str:
    """The type to read operands as: equality of integers needs no signed view."""
    if type_ in _SIGNED and operator in _EQUALITY:
        return f"u{type_[1:]}"
    return type_


class _Comparison:
    """The modifiers of set and setp: CmpOp, BoolOp, .ftz, and the compared type."""

    def __init__(self, instruction: Instruction, modifiers: Modifiers) -> None:
        self.type = modifiers.type()
        if self.type not in (*_BITS, *_SIGNED, *_UNSIGNED, *_FLOATS, *_PACKED):
            unsupported(instruction, f"a comparison of type .{self.type}")
        self.ftz = self.type in ("f32", "f16", "f16x2") and modifiers.flag("ftz")
        self.combine = _COMBINE.get(modifiers.one_of(*_COMBINE, default=""))
        operators = (*_FLOAT, *_UNSIGNED_ORDER)
        self.operator = modifiers.one_of(*operators)
        compare = comparison(self.operator, self.type, ftz=self.ftz)
        if compare is None:
            unsupported(instruction, f".{self.operator} of type .{self.type}")
        self.compare = compare
        view = _view_type(self.type, self.operator)
        self.source_types = (view, view) if self.combine is None else (view, view, "pred")


@pure("setp")
def setp(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """p = BoolOp(a CmpOp b, c), q the same of the complement ("...: setp").

    Of packed halves p is of the low ones and q of the high ones.
    """
    form = _Comparison(instruction, modifiers)
    destination, *sources = instruction.operands
    if form.type in _PACKED:
        return _packed_setp(instruction, form)
    compare, combine = form.compare, form.combine
    if not isinstance(destination, Pair):
        if combine is None:
            single: Function = compare
        else:
            single = lambda a, b, c: combine(compare(a, b), c)
        return build(instruction, single, "pred", form.source_types)
    if form.type in ("f16", "bf16") and not isinstance(destination.second, Sink):
        unsupported(instruction, f"two destinations of a comparison of type .{form.type}")

    def both(a: Array, b: Array, *c: Array) -> tuple[Array, Array]:
        holds = compare(a, b)
        if combine is None:
            return holds, ~holds
        return combine(holds, *c), combine(~holds, *c)

    return _to_predicates(instruction, destination, both, sources, form)


def _to_predicates(
    instruction: Instruction,
    destination: Pair,
    function: Function,
    sources: list[Operand],
    form: _Comparison,
) -> PureOp:
    destinations = (destination.first, destination.second)
    return assemble(
        instruction, function, destinations, ("pred", "pred"), sources, form.source_types
    )


def _packed_setp(instruction: Instruction, form: _Comparison) -> PureOp:
    destination, *sources = instruction.operands
    if not isinstance(destination, Pair):
        unsupported(instruction, "expected destinations p|q")
    compare, combine = form.compare, form.combine

    def function(a: Array, b: Array, *c: Array) -> tuple[Array, Array]:
        holds = compare(a, b)
        low, high = holds[0::2].copy(), holds[1::2].copy()
        if combine is not None:
            low, high = combine(low, *c), combine(high, *c)
        return low, high

    return _to_predicates(instruction, destination, function, sources, form)


_TRUE: dict[str, Array] = {
    "u32": constant(0xFFFFFFFF, U4),
    "s32": constant(0xFFFFFFFF, U4),
    "f32": constant(0x3F800000, U4),
    "u16": constant(0xFFFF, U2),
    "s16": constant(0xFFFF, U2),
    "f16": constant(0x3C00, U2),
    "bf16": constant(0x3F80, U2),
    "f16x2": constant(0x3C00, U2),
    "bf16x2": constant(0x3F80, U2),
}
"""Values that `set` writes where the comparison holds; elsewhere it writes 0."""


_RESULTS: dict[str, tuple[str, ...]] = {
    "f16": ("u32", "s32", "u16", "s16", "f16", "bf16"),
    "bf16": ("u32", "s32", "u16", "s16", "bf16"),
}
"""Types that `set` may write when it compares halves."""


@pure("set")
def set_(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """All ones, or 1.0, where BoolOp(a CmpOp b, c) holds, else 0 ("...: set")."""
    form = _Comparison(instruction, modifiers)
    result_type = modifiers.type()
    if form.type in _PACKED:
        return _packed_set(instruction, form, result_type)
    if result_type not in _RESULTS.get(form.type, ("u32", "s32", "f32", "f16", "bf16")):
        unsupported(instruction, f"a result of type .{result_type}")
    true = _TRUE[result_type]
    compare, combine = form.compare, form.combine
    zero = true.dtype.type(0)

    def function(a: Array, b: Array, *c: Array) -> Array:
        holds = compare(a, b)
        if combine is not None:
            holds = combine(holds, *c)
        return np.where(holds, true, zero)

    return build(instruction, function, f"b{width_of(result_type)}", form.source_types)


def _packed_set(instruction: Instruction, form: _Comparison, result_type: str) -> PureOp:
    """Each half of the result, 1.0 or all ones, is of one comparison."""
    if result_type not in (form.type, "u32", "s32"):
        unsupported(instruction, f"a result of type .{result_type}")
    true = _TRUE[result_type if result_type == form.type else "u16"]
    compare, combine = form.compare, form.combine
    zero = U2.type(0)

    def function(a: Array, b: Array, *c: Array) -> Array:
        holds = compare(a, b)
        if combine is not None:
            holds = combine(holds, np.repeat(c[0], 2))
        return np.where(holds, true, zero).view(U4)

    return build(instruction, function, "b32", form.source_types)


@pure("selp")
def selp(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """d = c ? a : b ("...: selp")."""
    type_ = modifiers.one_of(*_BITS, *_UNSIGNED, *_SIGNED, "f32", "f64")
    bits = f"b{width_of(type_)}"
    return build(instruction, lambda a, b, c: select(c, a, b), bits, (bits, bits, "pred"))


@pure("slct")
def slct(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """d = c >= 0 ? a : b; of floats -0 counts as 0 and NaN as negative ("...: slct")."""
    tested = modifiers.type()
    if tested not in ("s32", "f32"):
        unsupported(instruction, f"a test of type .{tested}")
    ftz = tested == "f32" and modifiers.flag("ftz")
    type_ = modifiers.one_of(*_BITS, *_UNSIGNED, *_SIGNED, "f32", "f64")
    bits = f"b{width_of(type_)}"
    zero = constant(0, F4 if tested == "f32" else np.dtype(np.int32))
    prepare: Function = flush_f32 if ftz else (lambda c: c)
    function = lambda a, b, c: select(prepare(c) >= zero, a, b)
    return build(instruction, function, bits, (bits, bits, tested))
