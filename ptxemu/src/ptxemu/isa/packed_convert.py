"""PTX ISA "Data Movement and Conversion Instructions: cvt" of packed types, and cvt.pack.

Conversions to .s2f6x2 are not there: they are refused at load.
"""

from __future__ import annotations

import numpy as np

from ptxemu.isa.forms import Function, assemble, build_relaxed
from ptxemu.isa.registry import Modifiers, pure, unsupported
from ptxemu.machine.decoded import PureOp
from ptxemu.numerics import bf16, f16, narrow
from ptxemu.numerics.dtypes import F8, U1, U2, U4, Array, constant, interleave, split
from ptxemu.numerics.minifloat import FORMATS
from ptxemu.syntax.ast import Instruction

_NARROW = {"e4m3x2": "e4m3", "e5m2x2": "e5m2", "e2m1x2": "e2m1", "e2m3x2": "e2m3", "e3m2x2": "e3m2"}
"""Packed types whose codes take a byte each (a nibble for e2m1)."""
PACKED_FORMS = frozenset(
    ("f16x2", "bf16x2", "ue8m0x2", "s2f6x2", *_NARROW, "e2m1x4", "e4m3x4", "e5m2x4", "e2m3x4")
) | {"e3m2x4"}
_SCALED = "scaled::n2::ue8m0"
_FOUR = constant(4, U1)


def packed_cvt(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """Two numbers at once; of two operands the first goes to the upper half ("...: cvt")."""
    source_type, result_type = modifiers.type(), modifiers.type()
    if modifiers.flag("rs"):
        return _stochastic(instruction, modifiers, result_type, source_type)
    if result_type == "bf16x2" and (source_type in _NARROW or source_type == "s2f6x2"):
        return _to_bf16(instruction, modifiers, source_type)
    if result_type in ("f16x2", "bf16x2") and source_type == "f32":
        return _two_halves(instruction, modifiers, result_type)
    if result_type in _NARROW and source_type in ("f32", "f16x2", "bf16x2"):
        return _to_narrow(instruction, modifiers, result_type, source_type)
    if result_type == "f16x2" and source_type in _NARROW:
        modifiers.one_of("rn")
        table = narrow.pairs_as_f16x2(_NARROW[source_type], modifiers.flag("relu"))
        return _from_table(instruction, table, "b8" if source_type == "e2m1x2" else "b16")
    if result_type == "bf16x2" and source_type == "ue8m0x2":
        modifiers.one_of("rn")
        return _from_table(instruction, narrow.ue8m0_pairs_as_bf16x2(), "b16")
    if result_type == "ue8m0x2" and source_type in ("f32", "bf16x2"):
        mode = modifiers.one_of("rz", "rp")
        table = narrow.codes_of_bf16("ue8m0", mode, modifiers.flag("satfinite"), False)
        return _by_table(instruction, table, result_type, source_type)
    unsupported(instruction, f"a conversion from .{source_type} to .{result_type}")


_RANDOM_BITS = {
    **{"f16x2": (16, 13), "bf16x2": (16, 16)},
    **dict.fromkeys(("e4m3x4", "e5m2x4", "e2m3x4", "e3m2x4"), (16, 16)),
    "e2m1x4": (8, 8),
}
"""Distance between the random bits of operands, and bits of each (PTX ISA, "cvt": .rs)."""


def _stochastic(
    instruction: Instruction, modifiers: Modifiers, result_type: str, source_type: str
) -> PureOp:
    """cvt.rs{.relu}{.satfinite}: two or four f32, the first one highest, and a word of random bits.

    Four numbers of 8 or 6 bits share them: the upper half is the first pair's, the lower half the
    second's.
    """
    if result_type not in _RANDOM_BITS or source_type != "f32":
        unsupported(instruction, f"a conversion from .{source_type} to .{result_type}")
    relu, satfinite = modifiers.flag("relu"), modifiers.flag("satfinite")
    element, _, count = result_type.rpartition("x")
    form, amount = FORMATS[element], int(count)
    if amount == 4 and not satfinite:
        unsupported(instruction, "it needs .satfinite")
    apart, width = _RANDOM_BITS[result_type]
    shared = amount * apart // 32
    code_bits = {"e2m1": 4}.get(element, 32 // amount)

    def function(*operands: Array) -> Array:
        *numbers, random = operands
        packed = np.zeros(random.shape, U4)
        for place, values in enumerate(reversed(numbers)):
            bits = (random >> U4.type(apart * (place // shared))) & U4.type((1 << width) - 1)
            rounded = form.stochastic(values.astype(F8), bits / float(1 << width))
            codes = form.encode(rounded, "rn", satfinite=satfinite, relu=relu)
            packed = packed | (codes << U4.type(code_bits * place))
        return packed.astype(U2) if element == "e2m1" else packed

    sources = ("f32",) * amount + ("b32",)
    result = "b16" if element == "e2m1" else "b32"
    return build_relaxed(instruction, function, result, sources)


def _to_bf16(instruction: Instruction, modifiers: Modifiers, source_type: str) -> PureOp:
    """cvt.rn{.relu}{.satfinite}{.scaled::n2::ue8m0}.bf16x2 d, a{, scales}

    s2f6 is a signed byte in units of 2^-6. A scale is a power of two for each number.
    """
    modifiers.one_of("rn")
    relu, satfinite = modifiers.flag("relu"), modifiers.flag("satfinite")
    is_scaled = modifiers.flag(_SCALED)
    width = 4 if source_type == "e2m1x2" else 8
    if source_type == "s2f6x2":
        numbers = np.arange(256).astype(U1).view(np.int8) / 64.0
    else:
        numbers = narrow.values_of(_NARROW[source_type]).astype(F8)
    scales = narrow.values_of("ue8m0").astype(F8)
    mask = len(numbers) - 1

    def function(a: Array, *scale: Array) -> Array:
        found = np.zeros(a.shape, U4)
        for place in range(2):
            values = numbers[(a >> (width * place)) & mask]
            if is_scaled:
                values = values * scales[(scale[0] >> (8 * place)) & 0xFF]
            codes = bf16.narrow_exact(values, "rn", satfinite=satfinite, relu=relu)
            found = found | (codes.astype(U4) << U4.type(16 * place))
        return found

    source = "b8" if source_type == "e2m1x2" else "b16"
    return build_relaxed(instruction, function, "b32", (source, "b16") if is_scaled else (source,))


def _two_halves(instruction: Instruction, modifiers: Modifiers, type_: str) -> PureOp:
    """cvt.{rn,rz}{.relu}{.satfinite}.{f16x2,bf16x2}.f32 d, a, b"""
    mode = modifiers.one_of("rn", "rz")
    relu, satfinite = modifiers.flag("relu"), modifiers.flag("satfinite")
    form = f16 if type_ == "f16x2" else bf16
    if mode == "rn" and not relu and not satfinite:
        convert: Function = form.narrow
    else:
        convert = lambda values: form.narrow_exact(
            values.astype(F8), mode, satfinite=satfinite, relu=relu
        )
    function = lambda a, b: convert(interleave(b, a)).view(U4)
    return build_relaxed(instruction, function, "b32", ("f32", "f32"))


def _to_narrow(
    instruction: Instruction, modifiers: Modifiers, result_type: str, source_type: str
) -> PureOp:
    """cvt.rn.satfinite{.relu} to two codes, from two f32 or a packed pair"""
    modifiers.expect("rn", "satfinite")
    relu = modifiers.flag("relu")
    tables = narrow.codes_of_f16 if source_type == "f16x2" else narrow.codes_of_bf16
    table = tables(_NARROW[result_type], "rn", True, relu)
    return _by_table(instruction, table, result_type, source_type)


def _by_table(instruction: Instruction, table: Array, result_type: str, source_type: str) -> PureOp:
    if source_type == "f32":
        codes: Function = lambda a, b: table[narrow.odd_bf16(interleave(b, a))]
        sources: tuple[str, ...] = ("f32", "f32")
    else:
        codes = lambda a: table[split(a, U2)]
        sources = ("b32",)
    if result_type == "e2m1x2":
        return build_relaxed(instruction, lambda *a: _nibbles(codes(*a)), "b8", sources)
    return build_relaxed(instruction, lambda *a: codes(*a).view(U2), "b16", sources)


def _nibbles(codes: Array) -> Array:
    return codes[0::2] | (codes[1::2] << _FOUR)


def _from_table(instruction: Instruction, table: Array, source_type: str) -> PureOp:
    return build_relaxed(instruction, lambda a: table[a], "b32", (source_type,))


_PACK_TYPES = ("u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2")


@pure("cvt.pack")
def cvt_pack(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """Two s32 clamped to a narrow type, a above b, above them c's low bits ("...: cvt.pack")."""
    modifiers.one_of("sat")
    merges = modifiers.flag("b32")
    modifiers.one_of("s32")
    type_ = modifiers.one_of(*(_PACK_TYPES[2:] if merges else _PACK_TYPES[:2]))
    bits = int(type_[1:])
    low = -(1 << (bits - 1)) if type_[0] == "s" else 0
    high = low + (1 << bits) - 1
    mask, shift = constant((1 << bits) - 1, U4), constant(bits, U4)

    def function(a: Array, b: Array, *c: Array) -> Array:
        upper, lower = (np.clip(x, low, high).view(U4) & mask for x in (a, b))
        both = (upper << shift) | lower
        return both | (c[0] << constant(2 * bits, U4)) if merges else both

    destination, *sources = instruction.operands
    types = ("s32", "s32", "b32") if merges else ("s32", "s32")
    return assemble(instruction, function, (destination,), ("b32",), sources, types)
