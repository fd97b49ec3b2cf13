"""PTX ISA "Data Movement and Conversion Instructions: cvt"."""

from __future__ import annotations

from functools import partial

import numpy as np

from ptxemu.isa.forms import Function, assemble, build_relaxed, types_of, width_of
from ptxemu.isa.registry import Modifiers, pure, unsupported
from ptxemu.machine.decoded import PureOp, identity
from ptxemu.machine.lanes import VALUE
from ptxemu.numerics import bf16, exact, f16, narrow, tf32
from ptxemu.numerics import rounding as rnd
from ptxemu.numerics.canonical import bits_of_f32, quieted
from ptxemu.numerics.dtypes import F2, F4, F8, U1, U2, U4, Array, constant, interleave, split
from ptxemu.numerics.minifloat import FORMATS
from ptxemu.syntax.ast import Instruction

# PTX ISA "Data Movement and Conversion Instructions: cvt" of packed types, and cvt.pack.
#
# Conversions to .s2f6x2 are not there: they are refused at load.

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


# cvt between single numbers.

_INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
_FLOATS = ("f16", "bf16", "f32", "f64")
_FLOAT_MODES = ("rn", "rz", "rm", "rp")
_INTEGRAL: dict[str, Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@pure("cvt")
def cvt(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """A value of one type as another, rounded and clamped as the modifiers say ("...: cvt")."""
    types = types_of(instruction)
    result_type, _, source_type = types.partition(".")
    if result_type in PACKED_FORMS or source_type in PACKED_FORMS:
        return packed_cvt(instruction, modifiers)
    modifiers.type()
    modifiers.type()
    if result_type == "tf32":
        return _to_tf32(instruction, modifiers)
    if result_type in _INTEGERS and source_type in _INTEGERS:
        return _integer_to_integer(instruction, modifiers, result_type, source_type)
    if result_type in _INTEGERS and source_type in _FLOATS:
        return _float_to_integer(instruction, modifiers, result_type, source_type)
    if result_type in _FLOATS and source_type in _INTEGERS:
        return _integer_to_float(instruction, modifiers, result_type, source_type)
    if result_type in _FLOATS and source_type in _FLOATS:
        return _float_to_float(instruction, modifiers, result_type, source_type)
    unsupported(instruction, f"a conversion from .{source_type} to .{result_type}")


def _integer_to_integer(
    instruction: Instruction, modifiers: Modifiers, result_type: str, source_type: str
) -> PureOp:
    """Truncated or extended; with .sat clamped to what the result can hold."""
    saturates = modifiers.flag("sat")
    result, source = VALUE[result_type], VALUE[source_type]
    if saturates:
        to, of = np.iinfo(result), np.iinfo(source)
        if to.min <= of.min and of.max <= to.max:
            unsupported(instruction, ".sat where nothing can be clamped")
        low = source.type(max(int(to.min), int(of.min)))
        high = source.type(min(int(to.max), int(of.max)))
        function: Function = lambda a: np.minimum(np.maximum(a, low), high).astype(result)
        return build_relaxed(instruction, function, result_type, (source_type,))
    if result.itemsize == source.itemsize and result.itemsize > 1:
        # A register wider than the type is truncated, and the result extended by its own sign.
        return build_relaxed(instruction, lambda a: a.view(result), result_type, (source_type,))
    return build_relaxed(instruction, lambda a: a.astype(result), result_type, (source_type,))


def _widened(type_: str, *, ftz: bool) -> Function:
    """Return the function that turns a float of any type into float64, exactly."""
    if type_ == "bf16":
        return lambda a: bf16.widen(a).astype(F8)
    if type_ == "f32" and ftz:
        return lambda a: rnd.flush_f32(a).astype(F8)
    return identity if type_ == "f64" else (lambda a: a.astype(F8))


def _float_to_integer(
    instruction: Instruction, modifiers: Modifiers, result_type: str, source_type: str
) -> PureOp:
    """Rounded to an integer and clamped to the result's range.

    NaN gives 0, or with a 64-bit side the upper bit alone (ISA, "Integer Notes").
    """
    round_ = _INTEGRAL[modifiers.one_of(*_INTEGRAL)]
    ftz = source_type == "f32" and modifiers.flag("ftz")
    if source_type != "bf16":
        modifiers.flag("sat")  # it clamps anyway
    widen = _widened(source_type, ftz=ftz)
    is_long = source_type == "f64" or result_type in ("s64", "u64")
    clamp = _clamping(result_type, is_long=is_long)
    return build_relaxed(
        instruction, lambda a: clamp(round_(widen(a))), result_type, (source_type,)
    )


def _clamping(type_: str, *, is_long: bool) -> Function:
    """Return the function from integral float64 to integers of a type, clamped to its range."""
    dtype = VALUE[type_]
    limits = np.iinfo(dtype)
    low, high = float(limits.min), float(limits.max)
    bits = int(limits.bits)
    nan = (int(limits.min) or 1 << (bits - 1)) if is_long else 0
    if bits < 64:

        def narrow(values: Array) -> Array:
            result = np.minimum(np.maximum(values, low), high).astype(dtype)
            nans = values != values
            return np.where(nans, dtype.type(nan), result) if np.count_nonzero(nans) else result

        return narrow

    largest = np.nextafter(high, 0.0)  # below 2^63 or 2^64, which the type cannot hold

    def wide(values: Array) -> Array:
        result = np.minimum(np.maximum(values, low), largest).astype(dtype)
        result = np.where(values >= high, dtype.type(limits.max), result)
        return np.where(values != values, dtype.type(nan), result)

    return wide


def _integer_to_float(
    instruction: Instruction, modifiers: Modifiers, result_type: str, source_type: str
) -> PureOp:
    """Rounded once, in a mode that must be there."""
    mode = modifiers.one_of(*_FLOAT_MODES)
    if result_type == "f32":
        modifiers.flag("ftz")  # no integer is subnormal
    saturates = result_type != "bf16" and modifiers.flag("sat")
    function = _from_integer(result_type, mode, is_long=width_of(source_type) == 64)
    if saturates:
        plain = function
        function = lambda a: rnd.saturate(plain(a))
    return build_relaxed(instruction, function, result_type, (source_type,))


def _from_integer(type_: str, mode: str, *, is_long: bool) -> Function:
    if type_ == "f64":
        if mode == "rn" or not is_long:
            return lambda a: a.astype(F8)
        return partial(exact.integer_to_f64_in, mode=mode)
    if type_ == "f32" and mode == "rn":
        return lambda a: a.astype(F4)
    widen: Function = rnd.integer_to_odd_f64 if is_long else (lambda a: a.astype(F8))
    narrow = _narrowing(type_, mode)
    return lambda a: narrow(widen(a))


def _narrowing(type_: str, mode: str) -> Function:
    """Return the function that rounds float64 to a smaller type in a mode."""
    if type_ == "f32":
        return partial(rnd.narrow_f32, mode=mode)
    if type_ == "f16":
        return f16.narrow if mode == "rn" else partial(f16.narrow_exact, mode=mode)
    return partial(bf16.narrow_exact, mode=mode)


def _float_to_float(
    instruction: Instruction, modifiers: Modifiers, result_type: str, source_type: str
) -> PureOp:
    """Widened exactly, rounded once to a smaller type, or rounded to an integral value."""
    ftz = "f32" in (result_type, source_type) and modifiers.flag("ftz")
    saturates = "bf16" not in (result_type, source_type) and modifiers.flag("sat")
    # The ISA asks for a mode wherever rounding is possible; ptxas does not between these two.
    default = "rn" if {result_type, source_type} == {"f16", "bf16"} else ""
    mode = modifiers.one_of(*_FLOAT_MODES, *_INTEGRAL, default=default)
    clamps = source_type == "f32" and result_type in ("f16", "bf16") and mode in ("rn", "rz")
    clamps = clamps and not ftz and not saturates
    relu, satfinite = clamps and modifiers.flag("relu"), clamps and modifiers.flag("satfinite")
    if result_type == source_type:
        function = _same_type(instruction, result_type, mode, ftz=ftz)
    elif mode in _INTEGRAL:
        unsupported(instruction, f".{mode} between types of different size")
    elif _is_exact(result_type, source_type):
        if mode and "bf16" not in (result_type, source_type):
            unsupported(instruction, f".{mode} where nothing is rounded")
        function = _widening(result_type, source_type, ftz=ftz)
    elif not mode:
        unsupported(instruction, "it needs a rounding mode")
    elif relu or satfinite:
        narrow_exact = f16.narrow_exact if result_type == "f16" else bf16.narrow_exact
        function = lambda a: narrow_exact(a.astype(F8), mode, satfinite=satfinite, relu=relu)
    else:
        function = _rounding(result_type, source_type, mode, ftz=ftz)
    if saturates:
        plain = function
        function = lambda a: rnd.saturate(plain(a))
    moves = (result_type, source_type) == ("f32", "bf16") and not ftz
    if not saturates and (source_type == "f64" or moves):
        function, result_type = _keeping_payloads(function, result_type, source_type)
    return build_relaxed(instruction, function, result_type, (source_type,))


def _keeping_payloads(
    function: Function, result_type: str, source_type: str
) -> tuple[Function, str]:
    """The conversions whose NaN keep their payload's upper bits (measured on an H200), as bits."""
    if result_type == "f64":
        return function, result_type
    bits = np.dtype(f"u{width_of(result_type) // 8}")
    if source_type == "bf16" or result_type == "f32":
        return lambda a: function(a).view(bits), f"b{8 * bits.itemsize}"
    natural: Function = lambda a: quieted(a).astype(F2).view(U2)
    if result_type == "bf16":
        natural = lambda a: split(a.astype(F4), U2)[1::2]

    def apply(a: Array) -> Array:
        result: Array = function(a).view(U2)
        nan = a != a
        return np.where(nan, natural(a), result) if np.count_nonzero(nan) else result

    return apply, "b16" if result_type == "f16" else result_type


def _same_type(instruction: Instruction, type_: str, mode: str, *, ftz: bool) -> Function:
    prepare = rnd.flush_f32 if ftz else identity
    if not mode:
        return prepare
    if mode not in _INTEGRAL:
        unsupported(instruction, f".{mode} between equal types")
    round_ = _INTEGRAL[mode]
    if type_ == "bf16":
        return lambda a: bf16.narrow(round_(bf16.widen(a)))
    return lambda a: round_(prepare(a))


def _is_exact(result_type: str, source_type: str) -> bool:
    """Whether every number of one type is one of the other."""
    order = {"f16": ("f32", "f64"), "bf16": ("f32", "f64"), "f32": ("f64",), "f64": ()}
    return result_type in order[source_type]


def _widening(result_type: str, source_type: str, *, ftz: bool) -> Function:
    if result_type == "f32" and source_type == "bf16":
        return (lambda a: rnd.flush_f32(bf16.widen(a))) if ftz else bf16.widen
    if result_type == "f32":
        return lambda a: a.astype(F4)
    widen = _widened(source_type, ftz=ftz)
    if source_type == "f16":
        return lambda a: quieted(widen(a))
    if ftz:  # as if by an f32 instruction, whose NaN is the canonical one
        return lambda a: bits_of_f32(rnd.flush_f32(a)).view(F4).astype(F8)
    return widen


def _rounding(result_type: str, source_type: str, mode: str, *, ftz: bool) -> Function:
    """Return the rounding to a smaller type; f32 to f16 or bf16, to nearest, needs no float64."""
    if source_type == "f32" and mode == "rn":
        return f16.narrow if result_type == "f16" else bf16.narrow  # both lose subnormals of f32
    widen = _widened(source_type, ftz=ftz)
    narrow = _narrowing(result_type, mode)
    if result_type == "f32" and ftz:
        return lambda a: rnd.flush_f32(narrow(widen(a)))
    return lambda a: narrow(widen(a))


def _to_tf32(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """cvt.{rna,rn,rz}{.satfinite}{.relu}.tf32.f32"""
    if types_of(instruction) != "tf32.f32":
        unsupported(instruction, "tf32 comes from f32")
    mode = modifiers.one_of("rna", "rn", "rz")
    satfinite = modifiers.flag("satfinite")
    relu = mode != "rna" and modifiers.flag("relu")
    function = partial(tf32.narrow, mode=mode, satfinite=satfinite, relu=relu)
    return build_relaxed(instruction, lambda a: function(a).view(np.uint32), "b32", ("f32",))
