"""Weak loads and stores as records of threaded code, between those of pure instructions.

A record names a routine for the kind of access and a descriptor: where the operands are in a
register file, and where the last access went. `CtaContext` says what memory there is.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from ptxemu.compiled.llvm_vectors import bits_of_type, integers, splat
from ptxemu.compiled.memory_code import CACHE_WORDS, TYPE, Context, Shape, accessor
from ptxemu.compiled.native import machine_code
from ptxemu.machine.decoded import PlainAccess
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.regions import shared_region
from ptxemu.machine.register_file import RegisterLayout
from ptxemu.machine.state import Cta
from ptxemu.syntax.ast import Register

SPACES = ("global", "shared::cta", "generic")
_BASE, _OFFSET, LOG, _CACHE = 0, 1, 2, 3
"""LOG: address of 32 words for the addresses of the lanes; 0 if nobody wants them."""
_DATA = _CACHE + CACHE_WORDS
PLACE = slice(_CACHE, _DATA)
"""The allocation in which the last access was."""
_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
ROUTINE = ir.FunctionType(_I32, [_I64, _I64, _I32, _I64])
"""(descriptor, register file, lanes, context): 1 if all went well, else nothing was done."""


class Kind(NamedTuple):
    """Form of access that a routine is made for."""

    shape: Shape
    base_bits: int
    data_bits: tuple[int, ...]
    """Bits of the registers that are loaded or stored."""
    is_signed: bool


def kind_of(access: PlainAccess) -> Kind | None:
    """The kind of an access; None where it is left to its definition."""
    base = access.address.base
    if access.space not in SPACES or access.address.coordinates is not None:
        return None
    registers = (base, *access.registers)
    if not all(isinstance(r, Register) and _is_plain(r) for r in registers):
        return None
    bits = [bits_of_type(r.type) for r in registers if isinstance(r, Register)]
    if bits[0] < 32 or 1 in bits:
        return None
    shape = Shape(access.space, access.element, len(access.registers), access.is_store)
    return Kind(shape, bits[0], tuple(bits[1:]), access.is_signed)


def _is_plain(register: Register) -> bool:
    """Registers of 8 bits are kept in 16, those of 128 in two halves."""
    return register.type != "b128" and bits_of_type(register.type) != 8


def descriptor(access: PlainAccess, layout: RegisterLayout) -> NDArray[np.int64]:
    """The words that a routine needs to know of an access of a known kind."""
    base = access.address.base
    assert isinstance(base, Register)
    slots = [register.slot for register in access.registers if isinstance(register, Register)]
    words = np.zeros(_DATA + len(slots), np.int64)
    words[_BASE], words[_OFFSET] = layout.offsets[base.slot], access.address.offset
    words[_DATA:] = [layout.offsets[slot] for slot in slots]
    return words


_keep: list[Any] = []


@cache
def access_routine(kind: Kind) -> int:
    """The address of the routine of a kind."""
    module = ir.Module(name="access")
    function = ir.Function(module, ROUTINE, name="access")
    name = accessor(kind.shape)
    target = ir.Function(module, TYPE, name=name)
    words, registers, lanes, context = function.args
    b = ir.IRBuilder(function.append_basic_block("entry"))
    words_at = b.inttoptr(words, _I64.as_pointer())

    def word(number: int) -> Any:
        return b.load(b.gep(words_at, [ir.Constant(_I64, number)]))

    def row(number: int, bits: int) -> Any:
        place = b.add(registers, word(number))
        return b.inttoptr(place, integers(bits).as_pointer())

    bits = 8 * kind.shape.element
    addresses = b.alloca(integers(64))
    data = b.alloca(integers(bits), size=kind.shape.count)
    where, log = _addresses(b, b.load(row(_BASE, kind.base_bits)), word(_OFFSET)), word(LOG)
    b.store(where, addresses)
    with b.if_then(b.icmp_unsigned("!=", log, ir.Constant(_I64, 0)), likely=False):
        b.store(where, b.inttoptr(log, where.type.as_pointer()), align=8)
    places = [b.gep(data, [ir.Constant(_I64, n)]) for n in range(kind.shape.count)]
    if kind.shape.is_store:
        for number, (place, width) in enumerate(zip(places, kind.data_bits, strict=True)):
            value = b.load(row(_DATA + number, width))
            b.store(_resized(b, value, bits, is_signed=False), place)
    done = b.call(
        target,
        [
            b.inttoptr(context, _I64.as_pointer()),
            b.gep(words_at, [ir.Constant(_I64, _CACHE)]),
            b.bitcast(addresses, _I64.as_pointer()),
            lanes,
            b.bitcast(data, _I8.as_pointer()),
        ],
    )
    if not kind.shape.is_store:
        with b.if_then(b.icmp_unsigned("!=", done, ir.Constant(_I32, 0))):
            held = b.bitcast(lanes, integers(1))
            for number, (place, width) in enumerate(zip(places, kind.data_bits, strict=True)):
                new = _resized(b, b.load(place), width, is_signed=kind.is_signed)
                to = row(_DATA + number, width)
                b.store(b.select(held, new, b.load(to)), to)
    b.ret(done)
    address, engine = machine_code(module, "access")
    _keep.append(engine)
    return address


def _addresses(b: Any, base: Any, offset: Any) -> Any:
    """A base register and an offset; those of 32 bits wrap around there."""
    width = base.type.element.width
    narrow = b.trunc(offset, base.type.element) if width < 64 else offset
    zero = ir.Constant(_I32, 0)
    vector = b.insert_element(ir.Constant(base.type, ir.Undefined), narrow, zero)
    offsets = b.shuffle_vector(vector, vector, splat(integers(32), 0))
    whole = b.add(base, offsets)
    return b.zext(whole, integers(64)) if width < 64 else whole


def _resized(b: Any, value: Any, bits: int, *, is_signed: bool) -> Any:
    width = value.type.element.width
    if width == bits:
        return value
    if width > bits:
        return b.trunc(value, integers(bits))
    return b.sext(value, integers(bits)) if is_signed else b.zext(value, integers(bits))


class CtaContext:
    """Memory that a CTA's warps can reach, in the form for `memory_code`; no local memory."""

    def __init__(self, cta: Cta) -> None:
        self._memory = cta.machine.memory
        self._words = np.zeros(Context.SIZE, np.uint64)
        self._address = int(self._words.ctypes.data)
        shared = shared_region(cta).words
        self._words[Context.SHARED_FIRST] = shared.base
        self._words[Context.SHARED_END] = shared.end
        delta = int(shared.data.ctypes.data) - shared.base
        self._words[Context.SHARED_DELTA] = delta & (1 << 64) - 1
        self._table = (0, 0)

    def address(self) -> int:
        """Update the context and return its address."""
        table = self._memory.table()
        if table != self._table:
            self._table = table
            self._words[Context.TABLE], self._words[Context.ENTRIES] = table
        return self._address


context_of: EngineState[Cta, CtaContext] = EngineState(CtaContext)
"""The context of a CTA."""
