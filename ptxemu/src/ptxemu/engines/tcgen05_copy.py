"""tcgen05.cp, shared memory to TMEM, and tcgen05.shift, rows of TMEM by one lane."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ptxemu.descriptors import Tcgen05Descriptor
from ptxemu.descriptors.matrix_layout import Major
from ptxemu.engines.shared_matrix import read_chunks
from ptxemu.engines.tcgen05 import ctas_of, start_copy, start_shift
from ptxemu.engines.tmem_access import access_tmem
from ptxemu.errors import ExecutionError, fault
from ptxemu.events import AccessKind
from ptxemu.machine.state import AsyncOperation, Cta, Warp
from ptxemu.memory.tmem import COPY_SHAPES, LANES, PARTITION, split_address
from ptxemu.numerics import dot
from ptxemu.syntax.ast import Instruction

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
        access_tmem(cta, operation, operation.instruction, AccessKind.WRITE, lanes, column, columns)
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
                access_tmem(cta, operation, instruction, kind, touched, column, SHIFT_COLUMNS)
            part = cta.tmem[:, column : column + SHIFT_COLUMNS]
            part[lanes[1:]] = part[lanes[:-1]]

    operation.steps.append(execute)
    warp.cta.machine.issue(operation)
