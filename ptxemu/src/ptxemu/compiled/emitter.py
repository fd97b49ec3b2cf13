"""Pure instructions written as LLVM code on registers that lie in a buffer, 32 lanes each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from llvmlite import ir

from ptxemu.compiled.llvm_vectors import FLOATS, Lower, Vector, bits_of_type, integers, splat
from ptxemu.compiled.lowering import lowered
from ptxemu.machine.decoded import identity
from ptxemu.machine.lanes import STORAGE, VALUE, WARP_SIZE
from ptxemu.machine.operands import convert, immediate_lanes
from ptxemu.machine.special_registers import special
from ptxemu.syntax.ast import (
    FloatImmediate,
    Guard,
    Instruction,
    IntImmediate,
    NegatedRegister,
    Register,
    Scalar,
    Sink,
    SpecialRegister,
    Symbol,
)

if TYPE_CHECKING:
    from ptxemu.machine.decoded import PureOp

_CHANGING = ("%clock", "%globaltimer", "%envreg")
_ALIGNMENT = 64
_NAN_F32 = 0x7FFFFFFF
MASK = "mask"
"""Key of the lanes that execute, where they are given from outside."""
I64 = ir.IntType(64)
Key: TypeAlias = "int | str | tuple[str, str]"
"""A register's slot, `MASK`, or an operand's text and type."""


class UnknownToMachineCodeError(Exception):
    """There is something that only the instructions' definitions know."""


class Layout:
    """Offsets of registers and other operands in a buffer, and expressions that fill them in."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes so far."""
        self.inputs: dict[Key, str] = {}
        """Python expressions of the values that are copied in, by key."""
        self.names: dict[str, Any] = {"convert": convert, "full": np.full, "special": special}
        """Names that the expressions use."""
        self._places: dict[Key, tuple[int, str]] = {}

    def place(self, key: Key, type_: str) -> int:
        """The offset of a register or an operand of a PTX type, which gets room if it has none."""
        if key not in self._places:
            self._places[key] = (self.size, type_)
            self.reserve(WARP_SIZE * self.dtype(key, type_).itemsize)
        return self._places[key][0]

    def reserve(self, size: int) -> int:
        """The offset of so many bytes for other uses."""
        offset = self.size
        self.size += -(-size // _ALIGNMENT) * _ALIGNMENT
        return offset

    def rows(self, buffer: Any) -> Iterator[tuple[Key, Any]]:
        """Yield each key with its part of a buffer (bytes), as an array of 32."""
        for key, (offset, type_) in self._places.items():
            dtype = self.dtype(key, type_)
            yield key, buffer[offset : offset + WARP_SIZE * dtype.itemsize].view(dtype)

    @staticmethod
    def dtype(key: Key, type_: str) -> np.dtype[Any]:
        """Return the dtype in which a register or an operand is kept."""
        return STORAGE[type_] if isinstance(key, int) or key == MASK else VALUE[type_]


class Emitter:
    """Writes instructions one after another; registers go back to the buffer with `flush`."""

    def __init__(self, layout: Layout, builder: Any, buffer: Any, mask: Vector | None) -> None:
        """`mask`: the lanes that execute, the others keep their registers; None: all."""
        self.layout = layout
        self.builder = builder
        self.mask = mask
        self._buffer = buffer
        self._values: dict[int, Vector] = {}
        """Bits of registers that are known, by slot."""
        self._floats: dict[int, Vector] = {}
        """Registers that hold float results, whose NaN are not the canonical ones yet."""
        self.written: dict[int, Register] = {}

    def emit(self, instruction: Instruction, op: PureOp, lower: Lower) -> None:
        """Write one pure instruction.

        Raises:
            UnknownToMachineCodeError: its operands are of kinds that are not known here.
        """
        if instruction.modifiers[0] == "cvt":  # which keeps a NaN's payload
            for register in (o for o in op.sources if isinstance(o, Register)):
                self._floats.pop(self._settled(register), None)
        types = op.source_types
        if op.function is identity:  # as does one that is moved
            types = tuple("b32" if type_ == "f32" else type_ for type_ in types)
        values = [self.source(o, t) for o, t in zip(op.sources, types, strict=True)]
        results = lower(self.builder, values)
        if len(op.destinations) == 1:
            results = (results,)
        for destination, type_, result in zip(
            op.destinations, op.result_types, results, strict=True
        ):
            if not isinstance(destination, Sink):
                self._put(instruction, destination, type_, result)

    def _settled(self, register: Register) -> int:
        """The slot of a register whose bits are known now."""
        self.bits(register)
        return register.slot

    def _put(self, instruction: Instruction, destination: Scalar, type_: str, result: Any) -> None:
        """A result goes to its register, in the lanes in which the guard holds."""
        assert isinstance(destination, Register)
        require_plain(destination)
        is_float = result.type == FLOATS
        width = 32 if is_float else result.type.element.width
        if width != bits_of_type(destination.type) or width != bits_of_type(type_):
            raise UnknownToMachineCodeError
        if instruction.guard is not None:
            old = self.bits(destination)
            if is_float:
                result, is_float = self._canonical(result), False
            result = self.builder.select(self.holds(instruction.guard), result, old)
        self.set(destination, result, is_float=is_float)

    def set(self, register: Register, value: Vector, *, is_float: bool = False) -> None:
        """A register's new bits, or a float result."""
        slot = register.slot
        self._values.pop(slot, None)
        self._floats.pop(slot, None)
        (self._floats if is_float else self._values)[slot] = value
        self.written[slot] = register

    def flush(self, except_for: Iterable[int] = ()) -> None:
        """Store the registers that were written, but not those in the slots `except_for`."""
        kept = [r for slot, r in self.written.items() if slot not in except_for]
        stores = []
        for register in kept:
            value = self.bits(register)
            if self.mask is not None:
                value = self.builder.select(self.mask, value, self._previous(register))
            stores.append((value, self._pointer(register.slot, register.type)))
        for value, pointer in stores:
            if value.type == integers(1):
                value = self.builder.zext(value, integers(8))
            self.builder.store(value, pointer)

    def holds(self, guard: Guard) -> Vector:
        """The lanes in which a guard holds."""
        held = self.bits(guard.register)
        return self.builder.not_(held) if guard.negated else held

    def all_hold(self, guard: Guard) -> Any:
        """Whether it holds in all lanes that execute."""
        held = self.holds(guard)
        if self.mask is not None:
            held = self.builder.or_(held, self.builder.not_(self.mask))
        as_number = self.builder.bitcast(held, ir.IntType(WARP_SIZE))
        return self.builder.icmp_unsigned("==", as_number, ir.Constant(as_number.type, -1))

    def bits(self, register: Register) -> Vector:
        """A register's bits."""
        slot = register.slot
        if slot not in self._values:
            if slot in self._floats:
                self._values[slot] = self._canonical(self._floats[slot])
            else:
                self._values[slot] = self._previous(register)
        return self._values[slot]

    def source(self, operand: Scalar, type_: str) -> Vector:
        """An operand as an instruction of a type sees it."""
        bits = bits_of_type(type_)
        if isinstance(operand, Register):
            if type_ == "f32" and operand.slot in self._floats:
                return self._floats[operand.slot]
            value = self.bits(operand)
        elif isinstance(operand, NegatedRegister):
            value = self.builder.not_(self.bits(operand.register))
        elif isinstance(operand, IntImmediate | FloatImmediate):
            unsigned = np.dtype(f"u{max(bits, 8) // 8}")
            lanes = immediate_lanes(operand, type_).view(unsigned)
            value = splat(integers(bits), int(lanes[0]))
        else:
            value = self._from_python(operand, type_)
        if value.type.element.width != bits:
            raise UnknownToMachineCodeError
        return self.builder.bitcast(value, FLOATS) if type_ == "f32" else value

    def load(self, key: Key, type_: str) -> Vector:
        """Return the value of a register or an operand in the buffer."""
        value = self.builder.load(self._pointer(key, type_))
        if type_ == "pred":
            return self.builder.icmp_unsigned("!=", value, splat(integers(8), 0))
        return value

    def _previous(self, register: Register) -> Vector:
        """A register as it was before."""
        require_plain(register)
        self.layout.inputs[register.slot] = f"R[{register.slot}]"
        return self.load(register.slot, register.type)

    def _canonical(self, value: Vector) -> Vector:
        is_nan = self.builder.fcmp_unordered("uno", value, value)
        bits = self.builder.bitcast(value, integers(32))
        return self.builder.select(is_nan, splat(integers(32), _NAN_F32), bits)

    def _from_python(self, operand: Scalar, type_: str) -> Vector:
        key = (str(operand), type_)
        if isinstance(operand, SpecialRegister) and not operand.name.startswith(_CHANGING):
            expression = f"convert(special(warp, {operand.name!r}), {type_!r})"
        elif isinstance(operand, Symbol):
            address = f"warp.symbol_address({operand.name!r}) + {operand.addend}"
            expression = f"convert(full(32, {address}, 'uint64'), {type_!r})"
        else:
            raise UnknownToMachineCodeError
        self.layout.inputs[key] = expression
        return self.load(key, type_)

    def _pointer(self, key: Key, type_: str) -> Any:
        """Return a pointer to a register or an operand in the buffer."""
        offset = ir.Constant(I64, self.layout.place(key, type_))
        bits = 8 * int(self.layout.dtype(key, type_).itemsize)
        pointer = self.builder.gep(self._buffer, [offset])
        return self.builder.bitcast(pointer, integers(bits).as_pointer())


def lowering(instruction: Instruction, op: PureOp) -> Lower:
    """Return the function that writes an instruction as machine code.

    Raises:
        UnknownToMachineCodeError: only its definition can execute the instruction.
    """
    found = lowered(instruction.modifiers, op)
    if found is None:
        raise UnknownToMachineCodeError
    return found


def require_plain(register: Register) -> None:
    """Registers of 8 bits are kept in 16, those of 128 in two halves.

    Raises:
        UnknownToMachineCodeError: it is one of these.
    """
    if register.type == "b128" or bits_of_type(register.type) == 8:
        raise UnknownToMachineCodeError
