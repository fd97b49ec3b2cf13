"""tcgen05.ld, st, wait, cp and shift (PTX ISA, "Tensor Memory Load and Store Instructions" and
"Tensor Memory Data Movement Instructions")."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ptxemu.descriptors import Tcgen05Descriptor
from ptxemu.descriptors.matrix_layout import Major
from ptxemu.engines.shared_matrix import read_chunks
from ptxemu.engines.tcgen05 import ctas_of, start_copy, start_shift
from ptxemu.engines.tmem_allocator import access_tmem
from ptxemu.errors import ExecutionError, fault, illegal
from ptxemu.events import AccessKind, Proxy
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.in_flight import claim, release, release_all
from ptxemu.machine.lane_group import Blocked
from ptxemu.machine.lanes import Lanes, Mask, first_lane
from ptxemu.machine.operands import address_reader, elements, reader
from ptxemu.machine.state import AsyncOperation, Cta, Warp
from ptxemu.memory.tmem import (
    COLUMNS,
    COPY_SHAPES,
    LANES,
    MAX_REGISTERS,
    PARTITION,
    REGISTERS_PER_REPEAT,
    Fragment,
    fragment,
    split_address,
)
from ptxemu.numerics import dot
from ptxemu.syntax.ast import Instruction, IntImmediate, Operand, Register

# tcgen05.ld and tcgen05.st: TMEM to registers of a warp and back, asynchronously.

WARP_SIZE = 32
POISON: NDArray[np.uint32] = np.full(WARP_SIZE, 0x7FFFDEAD, dtype=np.uint32)
"""A NaN: what the registers of a tcgen05.ld hold until its step is taken."""
POISON.flags.writeable = False
_SIXTEEN = np.uint32(16)
_LOW_HALF = np.uint32(0xFFFF)


pending_loads: EngineState[Warp, list[AsyncOperation]] = EngineState(lambda warp: [])
"""The tcgen05.ld operations that a warp has not waited for."""
pending_stores: EngineState[Warp, list[AsyncOperation]] = EngineState(lambda warp: [])
"""The tcgen05.st operations that a warp has not waited for."""


def issue_load(
    warp: Warp, instruction: Instruction, fragment: Fragment, slots: tuple[int, ...], address: int
) -> None:
    """Start a tcgen05.ld into registers `slots`.

    Raises:
        ExecutionError: lanes that the warp may not access.
    """
    lane, column = _checked_address(warp, instruction, fragment, address)
    operation = AsyncOperation("tcgen05.ld", warp, instruction)
    pending_loads(warp).append(operation)
    for slot in slots:
        warp.registers[slot] = POISON

    def execute() -> None:
        _report(operation, fragment, AccessKind.READ, lane, column)
        words = _load(warp, fragment, lane, column)
        warp.registers.set_words(slots, words)
        if warp.cta.machine.observer is None:  # else the first touch or wait is reported
            release(warp, operation, slots)

    operation.steps.append(execute)
    claim(warp, operation, slots)
    warp.cta.machine.issue(operation)


def issue_store(
    warp: Warp, instruction: Instruction, fragment: Fragment, values: list[Lanes], address: int
) -> None:
    """Start a tcgen05.st of register values, taken now.

    Raises:
        ExecutionError: lanes that the warp may not access.
    """
    lane, column = _checked_address(warp, instruction, fragment, address)
    operation = AsyncOperation("tcgen05.st", warp, instruction)
    pending_stores(warp).append(operation)

    def execute() -> None:
        _report(operation, fragment, AccessKind.WRITE, lane, column)
        index = _index(fragment, lane, column)
        cells = warp.cta.tmem.reshape(-1)
        words = np.concatenate(values).reshape(index.shape)
        if fragment.is_packed:
            cells[index] = words & _LOW_HALF
            cells[index + 1] = words >> _SIXTEEN
        else:
            cells[index] = words

    operation.steps.append(execute)
    warp.cta.machine.issue(operation)


def _index(fragment: Fragment, lane: int, column: int) -> NDArray[np.int64]:
    return fragment.lanes * COLUMNS + (fragment.columns + (lane * COLUMNS + column))


def _load(warp: Warp, fragment: Fragment, lane: int, column: int) -> NDArray[np.uint32]:
    """The registers' values (registers, 32)."""
    cells = warp.cta.tmem.reshape(-1)
    index = _index(fragment, lane, column)
    words = cells.take(index)
    if fragment.is_packed:
        words = (words & _LOW_HALF) | cells.take(index + 1) << _SIXTEEN
    return words


def _report(
    operation: AsyncOperation, fragment: Fragment, kind: AccessKind, lane: int, column: int
) -> None:
    for part in fragment.rectangles:
        first = lane + part.lane
        lanes, first_column = np.arange(first, first + part.lanes), column + part.column
        access_tmem(
            *(operation, operation.cta, kind, lanes, first_column, part.columns),
            proxy=Proxy.GENERIC,
        )


def _checked_address(
    warp: Warp, instruction: Instruction, fragment: Fragment, address: int
) -> tuple[int, int]:
    """PTX ISA, "Access restrictions": warp w of a warpgroup reaches lanes 32w to 32w + 31.

    Other lanes are undefined behaviour. Hardware goes to the same lane of the warp's own 32, and
    programs that leave the warp's part of the address out rely on that; so does this.
    """
    lane, column = split_address(address)
    own = PARTITION * (warp.index % 4)
    height = fragment.rectangles[0].lanes
    where = f"{instruction.opcode}: {warp.label} may access TMEM lanes {own} to "
    where += f"{own + PARTITION - 1}; the address has lane {lane}"
    section = '(PTX ISA, "tcgen05.ld", "Access restrictions")'
    if lane % PARTITION not in (0, PARTITION - height):
        raise ExecutionError(f"{instruction.span}: {where} and the shape {height} lanes {section}")
    if lane - lane % PARTITION != own:
        level = "error" if lane >= PARTITION else "warning"
        warp.cta.machine.complain(level, "tmem-lanes", f"{where} {section}", warp, instruction)
    return own + lane % PARTITION, column


# tcgen05.cp, shared memory to TMEM, and tcgen05.shift, rows of TMEM by one lane.

SHIFT_COLUMNS = 8
"""tcgen05.shift moves 32 bytes of every row."""
DECOMPRESSED_BITS = {"b4x16_p64": 4, "b6x16_p32": 6}
"""Source formats of .b8x16: 16 elements at the start of every 16 bytes."""


def issue_copy(
    warp: Warp,
    lane: int,
    instruction: Instruction,
    cta_group: int,
    shape: tuple[str, str],
    source_format: str,
    address: int,
    value: int,
) -> None:
    """Start a tcgen05.cp for one thread.

    Args:
        shape: .shape and .multicast; source_format: "" or one of DECOMPRESSED_BITS.
        address: of the destination in TMEM; value: the shared memory descriptor.

    Raises:
        ExecutionError: a descriptor or an address that the ISA does not allow.
    """
    try:
        descriptor = Tcgen05Descriptor.decode(value)
    except ValueError as error:
        raise ExecutionError(f"{instruction.span}: {instruction.opcode}: {error}") from error
    if split_address(address)[0] and shape[0].startswith("128"):
        fault(instruction, f"TMEM address 0x{address:x}: expected lane 0")
    ctas = ctas_of(warp.cta, cta_group, instruction, warp)
    operation = start_copy(warp, lane, instruction, cta_group, address, ".".join(shape))
    operation.shape = ".".join(filter(None, shape))

    def execute() -> None:
        for cta in ctas:
            _copy(operation, cta, shape, source_format, address, descriptor)

    operation.steps.append(execute)
    warp.cta.machine.issue(operation)


def _copy(
    operation: AsyncOperation,
    cta: Cta,
    shape: tuple[str, str],
    source_format: str,
    address: int,
    descriptor: Tcgen05Descriptor,
) -> None:
    form = COPY_SHAPES[shape]
    first_lane, column = split_address(address)
    raw = read_chunks(operation, cta, descriptor, Major.K, form.rows, form.bits // 128)
    if source_format:
        raw = _decompressed(raw, DECOMPRESSED_BITS[source_format])
    words = np.ascontiguousarray(raw).view(np.uint32)
    columns = words.shape[1]
    for copy in form.lanes:
        lanes = first_lane + copy
        if lanes.max() >= LANES:
            fault(
                operation.instruction,
                f"TMEM address "
                f"0x{address:x}: lane {lanes.max()} is beyond the last one, {LANES - 1}",
            )
        access_tmem(operation, cta, AccessKind.WRITE, lanes, column, columns)
        cta.tmem[lanes, column : column + columns] = words


def _decompressed(raw: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """16 elements of `bits` bits at the start of every 16 bytes, one a byte: 6 bits in bits 0 to 5,
    4 bits in bits 2 to 5 (PTX ISA, "Optional Decompression")."""
    codes = dot.padded_codes(raw, bits)
    return codes << np.uint8(2) if bits == 4 else codes


def issue_shift(
    warp: Warp, lane: int, instruction: Instruction, cta_group: int, address: int
) -> None:
    """Start a tcgen05.shift.down: of 32 lanes, row i goes to row i + 1; row 0 stays.

    The ISA says that all rows but the last move down by one; the direction is inferred from
    tcgen05.cp.4x256b, which refreshes the first lane of each group of 32.

    Raises:
        ExecutionError: the lane is not a multiple of 32.
    """
    first, column = split_address(address)
    if first % PARTITION or first >= LANES:
        fault(
            instruction,
            f"the lane of the address must be a multiple "
            f'of 32; got {first} (PTX ISA, "tcgen05.shift")',
        )
    ctas = ctas_of(warp.cta, cta_group, instruction, warp)
    operation = start_shift(warp, lane, instruction, cta_group, address)
    operation.shape = "32x256b"
    lanes = np.arange(first, first + PARTITION)

    def execute() -> None:
        for cta in ctas:
            for kind, touched in ((AccessKind.READ, lanes[:-1]), (AccessKind.WRITE, lanes[1:])):
                access_tmem(operation, cta, kind, touched, column, SHIFT_COLUMNS)
            part = cta.tmem[:, column : column + SHIFT_COLUMNS]
            part[lanes[1:]] = part[lanes[:-1]]

    operation.steps.append(execute)
    warp.cta.machine.issue(operation)


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
        issue_load(warp, instruction, cells, slots, where)

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
        issue_store(warp, instruction, cells, values, where)

    return step


@visible("tcgen05.wait::ld", "tcgen05.wait::st")
def tcgen05_wait(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Waits for all tcgen05.ld, or all tcgen05.st, that the thread has issued."""
    name = instruction.modifiers[1]
    modifiers.expect("sync", "aligned")
    pending = pending_loads if name == "wait::ld" else pending_stores

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
