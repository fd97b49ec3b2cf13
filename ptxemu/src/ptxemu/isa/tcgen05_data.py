"""tcgen05.ld, st, wait, cp and shift (PTX ISA, "Tensor Memory Load and Store Instructions" and
"Tensor Memory Data Movement Instructions")."""

from __future__ import annotations

import numpy as np

from ptxemu.engines import tmem_registers
from ptxemu.engines.tcgen05_copy import DECOMPRESSED_BITS, issue_copy, issue_shift
from ptxemu.errors import fault, illegal
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.in_flight import release_all
from ptxemu.machine.lane_group import Blocked
from ptxemu.machine.lanes import Lanes, Mask, first_lane
from ptxemu.machine.operands import address_reader, elements, reader
from ptxemu.machine.state import Warp
from ptxemu.memory.tmem import COPY_SHAPES, MAX_REGISTERS, REGISTERS_PER_REPEAT, Fragment, fragment
from ptxemu.syntax.ast import Instruction, IntImmediate, Operand, Register

_REPEATS = ("x1", "x2", "x4", "x8", "x16", "x32", "x64", "x128")


@visible("tcgen05.ld")
def tcgen05_ld(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Registers of a warp from TMEM, asynchronously; each warp has 32 lanes of its own."""
    r, taddr, *split = instruction.operands
    cells = _fragment(instruction, modifiers, "pack::16b", split)
    registers = elements(r)
    _check_count(instruction, cells, registers)
    if not all(isinstance(register, Register) for register in registers):
        unsupported(instruction, "expected registers as the destination")
    slots = tuple(register.slot for register in registers)
    address = address_reader(taddr)

    def step(warp: Warp, mask: Mask) -> None:
        where = _uniform_address(warp, mask, instruction, address(warp))
        tmem_registers.issue_load(warp, instruction, cells, slots, where)

    return step


@visible("tcgen05.st")
def tcgen05_st(instruction: Instruction, modifiers: Modifiers) -> Step:
    """TMEM from registers of a warp, asynchronously; each warp has 32 lanes of its own."""
    taddr, *rest = instruction.operands
    cells = _fragment(instruction, modifiers, "unpack::16b", rest[:-1])
    registers = elements(rest[-1])
    _check_count(instruction, cells, registers)
    readers = [reader(register, "u32") for register in registers]
    address = address_reader(taddr)

    def step(warp: Warp, mask: Mask) -> None:
        where = _uniform_address(warp, mask, instruction, address(warp))
        values = [read(warp) for read in readers]
        tmem_registers.issue_store(warp, instruction, cells, values, where)

    return step


@visible("tcgen05.wait::ld", "tcgen05.wait::st")
def tcgen05_wait(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Waits for all tcgen05.ld, or all tcgen05.st, that the thread has issued."""
    name = instruction.modifiers[1]
    modifiers.expect("sync", "aligned")
    pending = tmem_registers.pending_loads if name == "wait::ld" else tmem_registers.pending_stores

    def step(warp: Warp, mask: Mask) -> Blocked | None:
        waited = pending(warp)
        if not waited:
            return None

        def join() -> None:
            observer = warp.cta.machine.observer
            if observer is not None:
                for operation in waited:
                    release_all(warp, operation)
                    observer.async_joined(warp, operation, False)
            waited.clear()

        return Blocked(
            ready=lambda: all(operation.completed for operation in waited),
            reason=lambda: f"tcgen05.{name}: {len(waited)} of them are under way",
            resume=join,
            until=tuple(operation.steps_taken for operation in waited),
        )

    return step


@visible("tcgen05.cp")
def tcgen05_cp(instruction: Instruction, modifiers: Modifiers) -> Step:
    """TMEM from shared memory by one thread, asynchronously."""
    cta_group = int(modifiers.one_of("cta_group::1", "cta_group::2")[-1])
    shape = modifiers.one_of(*dict.fromkeys(shape for shape, _ in COPY_SHAPES))
    multicast = modifiers.one_of("warpx2::02_13", "warpx2::01_23", "warpx4", default="")
    source_format = modifiers.one_of(*DECOMPRESSED_BITS, default="")
    if source_format:
        modifiers.one_of("b8x16")
    form = (shape, multicast)
    if form not in COPY_SHAPES:
        illegal(
            instruction,
            f".{shape} with .{multicast or 'no multicast'}: .64x128b needs "
            '.warpx2, .32x128b .warpx4, the others neither (PTX ISA, "tcgen05.cp")',
        )
    taddr, s_desc = instruction.operands
    address, descriptor = address_reader(taddr), reader(s_desc, "u64")

    def step(warp: Warp, mask: Mask) -> None:
        where, values = address(warp), descriptor(warp)
        for lane in np.flatnonzero(mask):
            issue_copy(
                warp,
                int(lane),
                instruction,
                cta_group,
                form,
                source_format,
                int(where[lane]),
                int(values[lane]),
            )

    return step


@visible("tcgen05.shift")
def tcgen05_shift(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Rows of TMEM move down by one lane, by one thread, asynchronously."""
    cta_group = int(modifiers.one_of("cta_group::1", "cta_group::2")[-1])
    modifiers.one_of("down")
    address = address_reader(instruction.operands[0])

    def step(warp: Warp, mask: Mask) -> None:
        where = address(warp)
        for lane in np.flatnonzero(mask):
            issue_shift(warp, int(lane), instruction, cta_group, int(where[lane]))

    return step


def _fragment(
    instruction: Instruction, modifiers: Modifiers, packing: str, split: list[Operand]
) -> Fragment:
    if modifiers.flag("red"):
        unsupported(instruction, "tcgen05.ld.red needs sm_103")
    modifiers.expect("sync", "aligned")
    shape = modifiers.one_of(*REGISTERS_PER_REPEAT)
    repeat = int(modifiers.one_of(*_REPEATS)[1:])
    is_packed = modifiers.flag(packing)
    modifiers.one_of("b32")
    opcode = ".".join(instruction.modifiers[:2])
    if repeat * REGISTERS_PER_REPEAT[shape] > MAX_REGISTERS:
        illegal(instruction, f'.{shape} has no .x{repeat} (PTX ISA, "{opcode}")')
    if (shape == "16x32bx2") != bool(split):
        illegal(instruction, "immHalfSplitoff belongs to .16x32bx2")
    half = 0
    if split:
        (operand,) = split
        if not isinstance(operand, IntImmediate):
            unsupported(instruction, "immHalfSplitoff must be an immediate")
        half = operand.value
    return fragment(shape, repeat, is_packed, half)


def _check_count(instruction: Instruction, cells: Fragment, registers: tuple[object, ...]) -> None:
    if len(registers) != len(cells.lanes):
        illegal(instruction, f"expected {len(cells.lanes)} registers; got {len(registers)}")


def _uniform_address(warp: Warp, mask: Mask, instruction: Instruction, addresses: Lanes) -> int:
    """PTX ISA: all threads of the warp must give the same taddr."""
    address = int(addresses[first_lane(mask)])
    if not bool((addresses[mask] == address).all()):
        fault(instruction, f"{warp.label}: taddr is not the same in all threads of the warp")
    return address
