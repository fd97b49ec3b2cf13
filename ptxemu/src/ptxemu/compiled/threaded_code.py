"""Blocks as threaded code: records of routines and addresses, instead of Python functions.

What no routine does stays a Python function (`machine.codegen`) between two runs of records.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.compiled import routines
from ptxemu.compiled.lowering import bits_of_type
from ptxemu.machine.blocks import Block
from ptxemu.machine.codegen import BlockFunction, compile_block
from ptxemu.machine.decoded import PureOp
from ptxemu.machine.lanes import FULL, STORAGE, WARP_SIZE, Mask, bits_of
from ptxemu.machine.operands import convert, immediate_lanes
from ptxemu.machine.program import Program
from ptxemu.machine.register_file import ROW_BYTES, SPARE_ROWS, RegisterFile
from ptxemu.machine.special_registers import OF_CTAS, special
from ptxemu.numerics.canonical import bits_of_f32
from ptxemu.syntax import ast

_CHANGING = ("%clock", "%globaltimer", "%envreg")
_CHUNK = 1 << 14
"""Bytes of constants that are taken at once."""
_WIDEST = 2 * ROW_BYTES
Code = Sequence[tuple[ast.Instruction, "PureOp"]]


class _NoRoomError(Exception):
    """The warps' register files are full."""


class ThreadedCode:
    """The records of one kernel: its constants, and values that each warp has once."""

    def __init__(self, program: Program) -> None:
        self._layout = program.layout
        self._constants: dict[tuple[ast.Scalar, str], int] = {}
        self._kept: list[NDArray[Any]] = []
        """Arrays whose addresses are in records."""
        self._chunk, self._used = _aligned(0), 0
        self._scratch = _aligned(64 * _WIDEST)
        self._spare: dict[tuple[ast.Scalar, str], int] = {}
        """Offset in a register file of a value that each warp has once, by operand and type."""
        self._spare_end = self._layout.spare
        self.num_spare = 0
        """Values that each warp has once."""
        self._launch: object = None
        self._alike: dict[tuple[int, int], NDArray[np.uint8]] = {}
        """Such values of a warp of the launch, by its number in the CTA and how many they are."""
        self._assemblers: dict[int, _Assembler | None] = {}
        """Assemblers by a block's first pc; None: the block is left as it is."""
        self.nowhere, _ = self._take(_WIDEST)
        """The word of a record for results that nobody wants."""
        blocks = [node for node in program.nodes if isinstance(node, Block)]
        routines.make_routines(pair for block in blocks for pair in block.code)

    def block(self, block: Block) -> BlockFunction | None:
        """A block; None where it is better left as it is."""
        assembler = self._assembled(block)
        return None if assembler is None else assembler.finish()

    def parts(self, block: Block) -> tuple[Part, ...] | None:
        """Return a block's parts, to be run one after another; None if it is better left."""
        assembler = self._assembled(block)
        return None if assembler is None else assembler.parts

    def _assembled(self, block: Block) -> _Assembler | None:
        if block.first not in self._assemblers:
            is_changing = any(_is_changing(o) for _, op in block.code for o in op.sources)
            try:
                self._assemblers[block.first] = None if is_changing else _Assembler(self, block)
            except _NoRoomError:
                self._assemblers[block.first] = None
        return self._assemblers[block.first]

    def fill(self, warp: Any, registers: RegisterFile) -> None:
        """Put what a warp has once into its register file, as far as it is not there yet."""
        launch, key = warp.cta.machine.launch, (warp.index, self.num_spare)
        if launch is not self._launch:
            self._launch, self._alike = launch, {}
        missing = list(self._spare.items())[registers.num_spare :]
        alike = None if registers.num_spare else self._alike.get(key)
        if alike is not None:
            registers.fill_spare(self._layout.spare, alike)
            missing = [one for one in missing if _is_of_cta(one[0][0])]
        for (operand, type_), offset in missing:
            if isinstance(operand, ast.SpecialRegister):
                lanes = special(warp, operand.name)
            else:
                assert isinstance(operand, ast.Symbol)
                address = warp.symbol_address(operand.name) + operand.addend
                lanes = np.full(WARP_SIZE, address, dtype=np.uint64)
            registers.fill_spare(offset, convert(lanes, type_))
        registers.num_spare = self.num_spare
        if alike is None:
            self._alike[key] = registers.spare(self._layout.spare, self._spare_end)

    def register(self, slot: int) -> int:
        """The word for a register of the warp."""
        return self._layout.offsets[slot] + 1

    def scratch(self, number: int) -> int:
        """The word for a value that matters only inside a block."""
        if (number + 1) * _WIDEST > len(self._scratch):
            self._kept.append(self._scratch)
            self._scratch = _aligned(4 * (number + 1) * _WIDEST)
        return int(self._scratch.ctypes.data) + number * _WIDEST

    def constant(self, operand: ast.IntImmediate | ast.FloatImmediate, type_: str) -> int:
        """The word for a constant."""
        key = operand, type_
        if key not in self._constants:
            lanes = immediate_lanes(operand, type_)
            self._constants[key], room = self._take(lanes.nbytes)
            room[:] = lanes.view(np.uint8)
        return self._constants[key]

    def own(self, operand: ast.SpecialRegister | ast.Symbol, type_: str) -> int:
        """The word for a special register or an address, which each warp has once."""
        key = operand, type_
        if key not in self._spare:
            end = self._spare_end + (_WIDEST if bits_of_type(type_) > 32 else ROW_BYTES)
            if end > self._layout.spare + SPARE_ROWS * ROW_BYTES:
                raise _NoRoomError
            self._spare[key], self._spare_end = self._spare_end, end
            self.num_spare = len(self._spare)
        return self._spare[key] + 1

    def _take(self, size: int) -> tuple[int, NDArray[np.uint8]]:
        """Return the address of `size` bytes that never move, and the bytes."""
        if self._used + _WIDEST > len(self._chunk):
            self._chunk, self._used = _aligned(_CHUNK), 0
            self._kept.append(self._chunk)
        start = self._used
        self._used += -(-size // ROW_BYTES) * ROW_BYTES
        return int(self._chunk.ctypes.data) + start, self._chunk[start : start + size]


def _aligned(size: int) -> NDArray[np.uint8]:
    data = np.zeros(size + ROW_BYTES, np.uint8)
    return data[-int(data.ctypes.data) % ROW_BYTES :][:size]


def _is_changing(operand: ast.Scalar) -> bool:
    return isinstance(operand, ast.SpecialRegister) and operand.name.startswith(_CHANGING)


def _is_of_cta(operand: ast.Scalar) -> bool:
    """Whether its value is another one in other CTAs."""
    return not isinstance(operand, ast.SpecialRegister) or operand.name.startswith(OF_CTAS)


def _has_routine(instruction: ast.Instruction, op: PureOp) -> bool:
    """Whether a routine does it, and its registers are as wide as its types."""
    if routines.routine(routines.kind_of(instruction, op)) is None:
        return False
    typed = [*zip(op.sources, op.source_types, strict=True)]
    typed += zip(op.destinations, op.result_types, strict=True)
    for operand, type_ in typed:
        register = operand.register if isinstance(operand, ast.NegatedRegister) else operand
        if isinstance(register, ast.Register) and (
            register.type == "b128" or _width(register) != bits_of_type(type_)
        ):
            return False
    return True


def _width(register: ast.Register) -> int:
    """Bits in which it is kept; 1 of a predicate."""
    return 1 if register.type == "pred" else 8 * int(STORAGE[register.type].itemsize)


def _phases(block: Block, known: Sequence[bool]) -> list[list[tuple[ast.Instruction, PureOp]]]:
    """The instructions in an order that does the same, those with and without routines in turns.

    Of those without, none depends on another one of its turn.
    """
    phases: list[list[tuple[ast.Instruction, PureOp]]] = [[]]
    written: dict[int, int] = {}
    read: dict[int, int] = {}
    for pair, is_known, (_, reads, writes) in zip(block.code, known, block.slots, strict=True):
        phase = max((written.get(slot, 0) for slot in reads | writes), default=0)
        phase = max((phase, *(read.get(slot, 0) for slot in writes)))
        phase += phase % 2 if is_known else 1 + phase % 2
        written.update(dict.fromkeys(writes, phase))
        read.update({slot: max(phase, read.get(slot, 0)) for slot in reads})
        phases += [[] for _ in range(phase + 1 - len(phases))]
        phases[phase].append(pair)
    return phases


def _unary(pair: tuple[ast.Instruction, PureOp]) -> tuple[str, ...] | None:
    """The modifiers of a function from f32 to f32 in all lanes; None of others."""
    instruction, op = pair
    if instruction.guard is not None or (op.source_types, op.result_types) != (("f32",), ("f32",)):
        return None
    if any(
        not isinstance(o, ast.Register) or _width(o) != 32 for o in (*op.sources, *op.destinations)
    ):
        return None
    return instruction.modifiers


class _Assembler:
    """The records of one block."""

    def __init__(self, code: ThreadedCode, block: Block) -> None:
        self._code = code
        known = [_has_routine(*pair) for pair in block.code]
        outside: set[int] = set()
        for is_known, (_, reads, writes) in zip(known, block.slots, strict=True):
            outside |= set() if is_known else reads | writes
        # A temporary is nobody's outside the block, and Python's functions know no scratch memory.
        own = sorted(block.temporaries - outside)
        self._scratch = {slot: code.scratch(number) for number, slot in enumerate(own)}
        self._parts: list[Part] = []
        for number, pairs in enumerate(_phases(block, known)):
            if not number % 2:
                self._parts += [self._records(pairs)] if pairs else []
                continue
            for function, group in groupby(pairs, _unary):
                same = list(group)
                self._parts.append(_InPython(same) if function is None else _Together(same))

    @property
    def parts(self) -> tuple[Part, ...]:
        """The block, part by part."""
        return tuple(self._parts)

    def finish(self) -> BlockFunction:
        """The block as a function."""
        code, parts = self._code, self.parts
        if len(parts) == 1 and isinstance(parts[0], Records):
            return parts[0].as_function(code)

        def run(warp: Any, mask: Mask) -> None:
            for part in parts:
                part.run(code, warp, mask)

        return run

    def _records(self, pairs: Code) -> Records:
        records = np.array([self._record(*pair) for pair in pairs], np.int64)
        return Records(records)

    def _record(self, instruction: ast.Instruction, op: PureOp) -> list[int]:
        address = routines.routine(routines.kind_of(instruction, op))
        assert address is not None
        to = [self._place(operand) for operand in op.destinations]
        of = [
            self._source(operand, type_)
            for operand, type_ in zip(op.sources, op.source_types, strict=True)
        ]
        nowhere, guard = self._code.nowhere, instruction.guard
        to += [nowhere] * (routines.MOST_DESTINATIONS - len(to))
        of += [nowhere] * (routines.MOST_SOURCES - len(of))
        if guard is None:
            return [address, *to, *of, 0, 0]
        return [address, *to, *of, self._place(guard.register), -int(guard.negated)]

    def _source(self, operand: ast.Scalar, type_: str) -> int:
        if isinstance(operand, ast.NegatedRegister):
            return self._place(operand.register)
        if isinstance(operand, ast.IntImmediate | ast.FloatImmediate):
            return self._code.constant(operand, type_)
        if isinstance(operand, ast.SpecialRegister | ast.Symbol):
            return self._code.own(operand, type_)
        return self._place(operand)

    def _place(self, operand: ast.Scalar) -> int:
        """The word for a register, or for a result that nobody wants."""
        if isinstance(operand, ast.Sink):
            return self._code.nowhere
        assert isinstance(operand, ast.Register)
        scratch = self._scratch.get(operand.slot)
        return self._code.register(operand.slot) if scratch is None else scratch


class Records:
    """Instructions that routines do."""

    def __init__(self, records: NDArray[np.int64]) -> None:
        self.records = records
        self._first = int(records.ctypes.data)
        self._count = len(records)
        self._call = routines.caller()

    def run(self, code: ThreadedCode, warp: Any, mask: Mask, context: int = 0) -> int:
        """Run the records and return how many were done; fewer than all if an access failed.

        `context`: what accesses need, see `access_records`.
        """
        registers = warp.registers
        if registers.num_spare != code.num_spare:
            code.fill(warp, registers)
        lanes = -1 if mask is FULL else bits_of(mask)
        return self._call(self._first, self._count, registers.address, lanes, context)

    def as_function(self, code: ThreadedCode) -> BlockFunction:
        """`run` of a block that is no more than this."""
        call, first, count = self._call, self._first, self._count

        def run(warp: Any, mask: Mask) -> None:
            registers = warp.registers
            if registers.num_spare != code.num_spare:
                code.fill(warp, registers)
            call(first, count, registers.address, -1 if mask is FULL else bits_of(mask), 0)

        run.kept = self  # type: ignore[attr-defined]
        return run


class _InPython:
    """Instructions that Python does."""

    def __init__(self, pairs: Code) -> None:
        self._pairs = pairs
        self._full: BlockFunction | None = None
        self._masked: BlockFunction | None = None

    def run(self, code: ThreadedCode, warp: Any, mask: Mask, context: int = 0) -> int:
        if mask is FULL:
            if self._full is None:
                self._full = compile_block(self._pairs, frozenset(), masked=False)
            self._full(warp, mask)
        else:
            if self._masked is None:
                self._masked = compile_block(self._pairs, frozenset(), masked=True)
            self._masked(warp, mask)
        return 1


class _Together:
    """Instructions of one kind, from f32 to f32, that do not depend on each other."""

    def __init__(self, pairs: Code) -> None:
        self._function = pairs[0][1].function
        self._from, self._to = (
            tuple(o.slot for operands in all_ for o in operands if isinstance(o, ast.Register))
            for all_ in ([op.sources for _, op in pairs], [op.destinations for _, op in pairs])
        )

    def run(self, code: ThreadedCode, warp: Any, mask: Mask, context: int = 0) -> int:
        words = warp.registers.words(self._from)
        with_nan = self._function(words.reshape(-1).view(np.float32))
        results = bits_of_f32(with_nan).reshape(-1, WARP_SIZE)
        if mask is not FULL:
            results = np.where(mask, results, warp.registers.words(self._to))
        warp.registers.set_words(self._to, results)
        return 1


Part = _Together | Records | _InPython
