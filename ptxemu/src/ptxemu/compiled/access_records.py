"""Weak loads and stores as records of threaded code, between those of pure instructions.

A record names a routine for the kind of access and a descriptor: where the operands are in a
register file, and where the last access went. `CtaContext` says what memory there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from ptxemu.compiled.lowering import bits_of_type, integers, splat
from ptxemu.compiled.native import add_symbol, machine_code
from ptxemu.machine.decoded import PlainAccess
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.lanes import WARP_SIZE
from ptxemu.machine.regions import shared_region
from ptxemu.machine.register_file import RegisterLayout
from ptxemu.machine.state import Cta
from ptxemu.memory.address import SHARED_WINDOW, WINDOW_BYTES
from ptxemu.memory.global_memory import TABLE_WORDS
from ptxemu.syntax.ast import Register

# Loads and stores of 32 lanes as functions of machine code, made once a process for each shape.
#
# A launch's memory is described in a context of 64-bit words (`Context`): a table of allocations,
# and the CTA's shared memory. An access that is misaligned or outside of all of them changes
# nothing and says so: the interpreter then repeats it and words the error.

I1, I8, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))
_WORDS = I64.as_pointer()
TYPE = ir.FunctionType(I32, [_WORDS, _WORDS, _WORDS, I32, I8.as_pointer()])
"""(context, cache, addresses, mask, data): 1 if all went well; the addresses are overwritten.
Data are `count` rows of 32 words."""
CACHE_WORDS = 3
"""First address, end, and what is added to an address: where an instruction's last access went."""


class Context(IntEnum):
    """Words of a context."""

    TABLE = 0
    ENTRIES = 1
    SHARED_FIRST = 2
    SHARED_END = 3
    SHARED_DELTA = 4
    SIZE = 5


@dataclass(frozen=True, slots=True)
class Shape:
    """Form of access that a function is made for."""

    space: str
    """global, shared::cta or generic."""
    element: int
    count: int
    is_store: bool

    @property
    def size(self) -> int:
        """Bytes of a lane."""
        return self.element * self.count

    @property
    def name(self) -> str:
        """Name of the function."""
        kind = "store" if self.is_store else "load"
        return f"ptxemu_{kind}_{self.space.replace(':', '_')}_{self.element}_{self.count}"


_keep: list[Any] = []


@cache
def accessor(shape: Shape) -> str:
    """The name by which machine code calls the function of a shape."""
    module = ir.Module(name=shape.name)
    _Accessor(module, shape)
    address, engine = machine_code(module, shape.name)
    _keep.append(engine)
    add_symbol(shape.name, address)
    return shape.name


def _word(value: int) -> Any:
    return ir.Constant(I64, value)


class _Accessor:
    """One function in the making."""

    def __init__(self, module: Any, shape: Shape) -> None:
        self._shape = shape
        self._function = ir.Function(module, TYPE, name=shape.name)
        self._context, self._cache, self._addresses, self._mask, self._data = self._function.args
        entry = self._function.append_basic_block("entry")
        self._failed = self._function.append_basic_block("failed")
        ir.IRBuilder(self._failed).ret(ir.Constant(I32, 0))
        self._builder = ir.IRBuilder(entry)
        self._each_lane(self._resolve_lane)
        self._each_lane(self._move_lane)
        self._builder.ret(ir.Constant(I32, 1))

    def _each_lane(self, body: Any) -> None:
        """A loop over the lanes of the mask."""
        b = self._builder
        before = b.block
        head = self._function.append_basic_block("lane")
        active = self._function.append_basic_block("active")
        following = self._function.append_basic_block("following")
        out = self._function.append_basic_block("out")
        b.branch(head)
        b.position_at_end(head)
        lane = b.phi(I32)
        lane.add_incoming(ir.Constant(I32, 0), before)
        bit = b.and_(b.lshr(self._mask, lane), ir.Constant(I32, 1))
        b.cbranch(b.icmp_unsigned("!=", bit, ir.Constant(I32, 0)), active, following)
        b.position_at_end(active)
        body(lane)
        b.branch(following)
        b.position_at_end(following)
        after = b.add(lane, ir.Constant(I32, 1))
        lane.add_incoming(after, following)
        b.cbranch(b.icmp_unsigned("<", after, ir.Constant(I32, WARP_SIZE)), head, out)
        b.position_at_end(out)

    def _resolve_lane(self, lane: Any) -> None:
        """Replace the lane's address by where the bytes are."""
        b, size = self._builder, self._shape.size
        place = b.gep(self._addresses, [b.zext(lane, I64)])
        address = b.load(place)
        if size > 1:
            rest = b.and_(address, _word(size - 1))
            self._require(b.icmp_unsigned("==", rest, _word(0)))
        space = self._shape.space
        if space == "generic":
            self._resolve_generic(place, address)
        elif space == "shared::cta":
            b.store(self._in_shared(address), place)
        else:
            b.store(self._in_table(address), place)

    def _resolve_generic(self, place: Any, address: Any) -> None:
        b = self._builder
        low = b.and_(address, _word(WINDOW_BYTES - 1))
        top = b.sub(address, low)
        with b.if_else(b.icmp_unsigned("==", top, _word(SHARED_WINDOW))) as (then, otherwise):
            with then:
                b.store(self._in_shared(low), place)
            with otherwise:
                b.store(self._in_table(address), place)

    def _in_shared(self, address: Any) -> Any:
        b = self._builder
        first, end = self._field(Context.SHARED_FIRST), self._field(Context.SHARED_END)
        self._require(self._is_inside(address, first, end))
        return b.add(address, self._field(Context.SHARED_DELTA))

    def _in_table(self, address: Any) -> Any:
        """Find an address in the allocation of the instruction's last access, or in another one."""
        b = self._builder
        hit = self._function.append_basic_block("hit")
        search = self._function.append_basic_block("search")
        words = [b.load(b.gep(self._cache, [_word(k)])) for k in range(2)]
        b.cbranch(self._is_inside(address, *words), hit, search)
        b.position_at_end(search)
        self._search(address, hit)
        b.position_at_end(hit)
        return b.add(address, b.load(b.gep(self._cache, [_word(2)])))

    def _search(self, address: Any, hit: Any) -> None:
        """Put the allocation that holds the address into the cache, and go on at `hit`."""
        b = self._builder
        head, look, found, following = (
            self._function.append_basic_block(name) for name in ("head", "look", "found", "on")
        )
        before = b.block
        table = b.inttoptr(self._field(Context.TABLE), _WORDS)
        entries = self._field(Context.ENTRIES)
        b.branch(head)
        b.position_at_end(head)
        number = b.phi(I64)
        number.add_incoming(_word(0), before)
        b.cbranch(b.icmp_unsigned("<", number, entries), look, self._failed)
        b.position_at_end(look)
        entry = b.gep(table, [b.mul(number, _word(TABLE_WORDS))])
        words = [b.load(b.gep(entry, [_word(k)])) for k in range(TABLE_WORDS)]
        is_it = self._is_inside(address, words[0], words[1])
        if self._shape.is_store:
            is_it = b.and_(is_it, b.icmp_unsigned("!=", words[3], _word(0)))
        b.cbranch(is_it, found, following)
        b.position_at_end(following)
        number.add_incoming(b.add(number, _word(1)), following)
        b.branch(head)
        b.position_at_end(found)
        for k in range(CACHE_WORDS):
            b.store(words[k], b.gep(self._cache, [_word(k)]))
        b.branch(hit)

    def _move_lane(self, lane: Any) -> None:
        b, element = self._builder, ir.IntType(8 * self._shape.element)
        wide = b.zext(lane, I64)
        at = b.inttoptr(b.load(b.gep(self._addresses, [wide])), element.as_pointer())
        data = b.bitcast(self._data, element.as_pointer())
        for number in range(self._shape.count):
            there = b.gep(at, [_word(number)])
            here = b.gep(data, [b.add(wide, _word(WARP_SIZE * number))])
            if self._shape.is_store:
                b.store(b.load(here), there)
            else:
                b.store(b.load(there), here)

    def _is_inside(self, address: Any, first: Any, end: Any) -> Any:
        b = self._builder
        behind = b.add(address, _word(self._shape.size))
        starts = b.icmp_unsigned(">=", address, first)
        return b.and_(starts, b.icmp_unsigned("<=", behind, end))

    def _field(self, number: Context) -> Any:
        return self._builder.load(self._builder.gep(self._context, [_word(number)]))

    def _require(self, condition: Any) -> None:
        """Fail where it does not hold."""
        on = self._function.append_basic_block("on")
        self._builder.cbranch(condition, on, self._failed)
        self._builder.position_at_end(on)


SPACES = ("global", "shared::cta", "generic")
_BASE, _OFFSET, LOG, _CACHE = 0, 1, 2, 3
"""LOG: address of 32 words for the addresses of the lanes; 0 if nobody wants them."""
_DATA = _CACHE + CACHE_WORDS
PLACE = slice(_CACHE, _DATA)
"""The allocation in which the last access was."""
ROUTINE = ir.FunctionType(I32, [I64, I64, I32, I64])
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


@cache
def access_routine(kind: Kind) -> int:
    """The address of the routine of a kind."""
    module = ir.Module(name="access")
    function = ir.Function(module, ROUTINE, name="access")
    name = accessor(kind.shape)
    target = ir.Function(module, TYPE, name=name)
    words, registers, lanes, context = function.args
    b = ir.IRBuilder(function.append_basic_block("entry"))
    words_at = b.inttoptr(words, I64.as_pointer())

    def word(number: int) -> Any:
        return b.load(b.gep(words_at, [ir.Constant(I64, number)]))

    def row(number: int, bits: int) -> Any:
        place = b.add(registers, word(number))
        return b.inttoptr(place, integers(bits).as_pointer())

    bits = 8 * kind.shape.element
    addresses = b.alloca(integers(64))
    data = b.alloca(integers(bits), size=kind.shape.count)
    where, log = _addresses(b, b.load(row(_BASE, kind.base_bits)), word(_OFFSET)), word(LOG)
    b.store(where, addresses)
    with b.if_then(b.icmp_unsigned("!=", log, ir.Constant(I64, 0)), likely=False):
        b.store(where, b.inttoptr(log, where.type.as_pointer()), align=8)
    places = [b.gep(data, [ir.Constant(I64, n)]) for n in range(kind.shape.count)]
    if kind.shape.is_store:
        for number, (place, width) in enumerate(zip(places, kind.data_bits, strict=True)):
            value = b.load(row(_DATA + number, width))
            b.store(_resized(b, value, bits, is_signed=False), place)
    done = b.call(
        target,
        [
            b.inttoptr(context, I64.as_pointer()),
            b.gep(words_at, [ir.Constant(I64, _CACHE)]),
            b.bitcast(addresses, I64.as_pointer()),
            lanes,
            b.bitcast(data, I8.as_pointer()),
        ],
    )
    if not kind.shape.is_store:
        with b.if_then(b.icmp_unsigned("!=", done, ir.Constant(I32, 0))):
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
    zero = ir.Constant(I32, 0)
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
