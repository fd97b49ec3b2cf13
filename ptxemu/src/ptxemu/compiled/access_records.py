"""Weak loads and stores as records of threaded code, between those of pure instructions.

A record names a routine for the kind of access and a descriptor: where the operands are in a
register file, and where the last access went. `CtaContext` says what memory there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from ptxemu.compiled.builtins import add_symbol, machine_code
from ptxemu.compiled.loops import (
    I8,
    I32,
    I64,
    Value,
    Variable,
    constant,
    counted,
    endless,
    require,
    when,
)
from ptxemu.compiled.lowering import bits_of_type, integers, splat
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


class _Accessor:
    """One function in the making."""

    def __init__(self, module: Any, shape: Shape) -> None:
        self._shape = shape
        function = ir.Function(module, TYPE, name=shape.name)
        self._b = b = ir.IRBuilder(function.append_basic_block("entry"))
        self._failed = function.append_basic_block("failed")
        ir.IRBuilder(self._failed).ret(ir.Constant(I32, 0))
        *words, mask, self._data = function.args
        self._context, self._cache, self._addresses = (
            Value(b, b.ptrtoint(pointer, I64)) for pointer in words
        )
        self._mask = Value(b, b.zext(mask, I64))
        self._each_lane(self._resolve_lane)
        self._each_lane(self._move_lane)
        b.ret(ir.Constant(I32, 1))

    def _each_lane(self, body: Callable[[Value], None]) -> None:
        """A loop over the lanes of the mask."""
        with counted(self._b, WARP_SIZE) as lane, when((self._mask >> lane) & 1 != 0):
            body(lane)

    def _resolve_lane(self, lane: Value) -> None:
        """Replace the lane's address by where the bytes are."""
        address, size, space = self._addresses[lane], self._shape.size, self._shape.space
        if size > 1:
            require((address & (size - 1)) == 0, self._failed)
        if space == "generic":
            low = address & (WINDOW_BYTES - 1)
            is_shared = address - low == SHARED_WINDOW
            with self._b.if_else(is_shared.ir) as (then, otherwise):
                with then:
                    self._addresses[lane] = self._in_shared(low)
                with otherwise:
                    self._addresses[lane] = self._in_table(address)
        elif space == "shared::cta":
            self._addresses[lane] = self._in_shared(address)
        else:
            self._addresses[lane] = self._in_table(address)

    def _in_shared(self, address: Value) -> Any:
        first, end = self._context[Context.SHARED_FIRST], self._context[Context.SHARED_END]
        require(self._is_inside(address, first, end), self._failed)
        return address + self._context[Context.SHARED_DELTA]

    def _in_table(self, address: Value) -> Any:
        """Find an address in the allocation of the instruction's last access, or in another one."""
        with when(~self._is_inside(address, self._cache[0], self._cache[1])):
            self._search(address)
        return address + self._cache[2]

    def _search(self, address: Value) -> None:
        """Put the allocation that holds the address into the cache."""
        b = self._b
        number = Variable(Value(b, constant(0)))
        with endless(b) as leave_if:
            require(number.value < self._context[Context.ENTRIES], self._failed)
            entry = self._context[Context.TABLE] + number.value * (8 * TABLE_WORDS)
            words = [entry[k] for k in range(TABLE_WORDS)]
            is_it = self._is_inside(address, words[0], words[1])
            leave_if(is_it & (words[3] != 0) if self._shape.is_store else is_it)
            number.value += 1
        for k in range(CACHE_WORDS):
            self._cache[k] = words[k]

    def _move_lane(self, lane: Value) -> None:
        b, element = self._b, ir.IntType(8 * self._shape.element)
        data = b.bitcast(self._data, element.as_pointer())
        for number in range(self._shape.count):
            there = self._addresses[lane].pointer(element, number)
            here = b.gep(data, [(lane + WARP_SIZE * number).ir])
            of, to = (here, there) if self._shape.is_store else (there, here)
            b.store(b.load(of), to)

    def _is_inside(self, address: Value, first: Value, end: Value) -> Any:
        return ~address.is_below(first) & ~end.is_below(address + self._shape.size)


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
