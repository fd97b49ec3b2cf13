"""A block as one function of machine code on the lanes of a warp; loops of one block included.

The registers that a block needs are copied into a buffer, whose addresses are constants in the
code, and what it has written is copied out again: arrays of registers never change in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from ptxemu.compiled.lowering import (
    FLOATS,
    Lower,
    Vector,
    bits_of_type,
    integers,
    lowered,
    splat,
)
from ptxemu.machine.blocks import Block, FastFunction
from ptxemu.machine.lanes import STORAGE, VALUE, WARP_SIZE
from ptxemu.machine.operands import convert, immediate_lanes
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
    from numpy.typing import NDArray

    from ptxemu.machine.decoded import PureOp

_CHANGING = ("%clock", "%globaltimer", "%envreg")
_ALIGNMENT = 64
_NAN_F32 = 0x7FFFFFFF
_I64 = ir.IntType(64)


class _UnsupportedError(Exception):
    """The block holds what only its definitions know."""


def compile_block(block: Block, *, masked: bool) -> FastFunction | None:
    """Machine code for a block; None where an instruction of it is not known here."""
    try:
        function = _Function(block, masked=masked)
    except _UnsupportedError:
        return None
    return function.finish()


class _Function:
    """The code of one block in the making."""

    def __init__(self, block: Block, *, masked: bool) -> None:
        steps = [(i, op, _lower(i, op)) for i, op in block.code]
        self._block = block
        self._masked = masked
        self._slots: dict[Any, tuple[int, str]] = {}
        """Offset in the buffer and PTX type by register slot, or by an operand's own key."""
        self._size = 0
        self._inputs: dict[Any, str] = {}
        """By key of a slot the Python expression of what is copied in."""
        self._names: dict[str, Any] = {"convert": convert, "full": np.full}
        self._values: dict[int, Vector] = {}
        """Bits of registers that are known, by slot."""
        self._floats: dict[int, Vector] = {}
        """Registers that hold float results, whose NaN are not the canonical ones yet."""
        self._written: dict[int, Register] = {}
        self._stores: list[tuple[Vector, Any]] = []
        self._begin()
        for instruction, op, lower in steps:
            self._emit(instruction, op, lower)
        self._end()

    def _begin(self) -> None:
        self._module = ir.Module(name="block")
        type_ = ir.FunctionType(_I64, [ir.IntType(8).as_pointer(), _I64])
        self._function = ir.Function(self._module, type_, name="run")
        self._buffer, self._rounds = self._function.args
        entry = self._function.append_basic_block("entry")
        self._body = self._function.append_basic_block("body")
        self._builder = ir.IRBuilder(entry)
        self._builder.branch(self._body)
        self._builder.position_at_end(self._body)
        self._round = self._builder.phi(_I64)
        self._round.add_incoming(ir.Constant(_I64, 0), entry)
        self._mask = self._load("mask", "pred") if self._masked else None
        if self._masked:
            self._inputs["mask"] = "m"

    def _end(self) -> None:
        """Store what was written; go round again while the loop's guard holds in all lanes."""
        for slot, register in self._written.items():
            if slot in self._block.temporaries:
                continue
            value = self._bits(register)
            if self._mask is not None:
                value = self._builder.select(self._mask, value, self._previous(register))
            self._stores.append((value, self._place(slot, register.type)))
        loop = self._block.loop
        again = None if loop is None else self._all_hold(loop)
        for value, place in self._stores:
            if value.type == integers(1):
                value = self._builder.zext(value, integers(8))
            self._builder.store(value, place)
        done = self._builder.add(self._round, ir.Constant(_I64, 1))
        if again is None:
            self._builder.ret(done)
            return
        more = self._builder.icmp_unsigned("<", done, self._rounds)
        out = self._function.append_basic_block("out")
        self._round.add_incoming(done, self._body)
        self._builder.cbranch(self._builder.and_(again, more), self._body, out)
        ir.IRBuilder(out).ret(done)

    def finish(self) -> FastFunction:
        """The function in Python that copies in, calls and copies out."""
        code, engine = _machine_code(self._module)
        buffer = np.zeros(self._size + _ALIGNMENT, dtype=np.uint8)
        start = -buffer.ctypes.data % _ALIGNMENT
        names = self._names
        names["call"] = _bound(code, buffer[start:], engine)

        def row(key: Any) -> str:
            offset, type_ = self._slots[key]
            dtype = STORAGE[type_] if isinstance(key, int) or key == "mask" else VALUE[type_]
            size = WARP_SIZE * dtype.itemsize
            name = f"b{offset}"
            names[name] = buffer[start + offset : start + offset + size].view(dtype)
            return name

        lines = ["R = warp.registers"]
        lines += [f"{row(key)}[:] = {value}" for key, value in self._inputs.items()]
        lines.append("done = call(rounds)")
        lines += [
            f"R[{slot}] = {row(slot)}.copy()"
            for slot in self._written
            if slot not in self._block.temporaries
        ]
        body = "\n    ".join([*lines, "return done"])
        source = f"def block(warp, m, rounds):\n    {body}\n"
        exec(compile(source, f"<compiled block {self._block.first}>", "exec"), names)
        function: FastFunction = names["block"]
        return function

    def _emit(self, instruction: Instruction, op: PureOp, lower: Lower) -> None:
        values = [self._source(o, t) for o, t in zip(op.sources, op.source_types, strict=True)]
        (destination,), (type_,) = op.destinations, op.result_types
        if isinstance(destination, Sink):
            return
        assert isinstance(destination, Register)
        _require_plain(destination)
        result = lower(self._builder, values)
        is_float = result.type == FLOATS
        width = 32 if is_float else result.type.element.width
        if width != bits_of_type(destination.type) or width != bits_of_type(type_):
            raise _UnsupportedError
        slot = destination.slot
        if instruction.guard is not None:
            old = self._bits(destination)
            if is_float:
                result, is_float = self._canonical(result), False
            result = self._builder.select(self._holds(instruction.guard), result, old)
        self._values.pop(slot, None)
        self._floats.pop(slot, None)
        (self._floats if is_float else self._values)[slot] = result
        self._written[slot] = destination

    def _holds(self, guard: Guard) -> Vector:
        held = self._bits(guard.register)
        return self._builder.not_(held) if guard.negated else held

    def _all_hold(self, guard: Guard) -> Any:
        """Whether the branch back is taken by all lanes that are here."""
        held = self._holds(guard)
        if self._mask is not None:
            held = self._builder.or_(held, self._builder.not_(self._mask))
        as_number = self._builder.bitcast(held, ir.IntType(WARP_SIZE))
        return self._builder.icmp_unsigned("==", as_number, ir.Constant(as_number.type, -1))

    def _bits(self, register: Register) -> Vector:
        slot = register.slot
        if slot not in self._values:
            if slot in self._floats:
                self._values[slot] = self._canonical(self._floats[slot])
            else:
                self._values[slot] = self._previous(register)
        return self._values[slot]

    def _previous(self, register: Register) -> Vector:
        """A register as it was before the block."""
        _require_plain(register)
        self._inputs[register.slot] = f"R[{register.slot}]"
        return self._load(register.slot, register.type)

    def _canonical(self, value: Vector) -> Vector:
        is_nan = self._builder.fcmp_unordered("uno", value, value)
        bits = self._builder.bitcast(value, integers(32))
        return self._builder.select(is_nan, splat(integers(32), _NAN_F32), bits)

    def _source(self, operand: Scalar, type_: str) -> Vector:
        bits = bits_of_type(type_)
        if isinstance(operand, Register):
            if type_ == "f32" and operand.slot in self._floats:
                return self._floats[operand.slot]
            value = self._bits(operand)
        elif isinstance(operand, NegatedRegister):
            value = self._builder.not_(self._bits(operand.register))
        elif isinstance(operand, IntImmediate | FloatImmediate):
            unsigned = np.dtype(f"u{max(bits, 8) // 8}")
            lanes = immediate_lanes(operand, type_).view(unsigned)
            value = splat(integers(bits), int(lanes[0]))
        else:
            value = self._from_python(operand, type_)
        if value.type.element.width != bits:
            raise _UnsupportedError
        return self._builder.bitcast(value, FLOATS) if type_ == "f32" else value

    def _from_python(self, operand: Scalar, type_: str) -> Vector:
        key = (str(operand), type_)
        if isinstance(operand, SpecialRegister) and not operand.name.startswith(_CHANGING):
            expression = f"convert(warp.special({operand.name!r}), {type_!r})"
        elif isinstance(operand, Symbol):
            address = f"warp.symbol_address({operand.name!r}) + {operand.addend}"
            expression = f"convert(full(32, {address}, 'uint64'), {type_!r})"
        else:
            raise _UnsupportedError
        self._inputs[key] = expression
        return self._load(key, type_)

    def _place(self, key: Any, type_: str) -> Any:
        """A pointer to where a register or an operand is in the buffer."""
        bits = max(bits_of_type(type_), 8) if key == "mask" or not isinstance(key, int) else 0
        bits = bits or 8 * int(STORAGE[type_].itemsize)
        if key not in self._slots:
            self._slots[key] = (self._size, type_)
            self._size += -(-WARP_SIZE * bits // 8 // _ALIGNMENT) * _ALIGNMENT
        offset = ir.Constant(_I64, self._slots[key][0])
        pointer = self._builder.gep(self._buffer, [offset])
        return self._builder.bitcast(pointer, integers(bits).as_pointer())

    def _load(self, key: Any, type_: str) -> Vector:
        value = self._builder.load(self._place(key, type_))
        if type_ == "pred":
            return self._builder.icmp_unsigned("!=", value, splat(integers(8), 0))
        return value


def _lower(instruction: Instruction, op: PureOp) -> Lower:
    found = lowered(instruction.modifiers, op)
    if found is None:
        raise _UnsupportedError
    return found


def _require_plain(register: Register) -> None:
    """Registers of 8 bits are kept in 16, those of 128 in two halves."""
    if register.type == "b128" or bits_of_type(register.type) == 8:
        raise _UnsupportedError


@cache
def _host() -> tuple[str, str]:
    """Name and features of this machine's processor; LLVM is ready to make code for it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _machine_code(module: Any) -> tuple[int, Any]:
    """The address of the function `run`, and what keeps it alive."""
    cpu, features = _host()
    # The engine owns its target machine: each has one of its own.
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, opt=1, jit=True
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), target)
    engine.finalize_object()
    return int(engine.get_function_address("run")), engine


def _bound(code: int, buffer: NDArray[np.uint8], engine: Any) -> Callable[[int], int]:
    prototype = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
    function = prototype(code)
    address = int(buffer.ctypes.data)

    def call(rounds: int) -> int:
        done: int = function(address, rounds)
        return done

    call.keep = (engine, buffer)  # type: ignore[attr-defined]
    return call
