"""Reaching memory from steps and engines: shared addresses to CTAs, and reports to the observer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ptxemu.errors import ExecutionError
from ptxemu.events import Access, AccessKind, Agent, Proxy, Space
from ptxemu.memory.address import SHARED_OFFSET_MASK, SHARED_RANK_SHIFT

if TYPE_CHECKING:
    from ptxemu.machine.state import Cta, Machine
    from ptxemu.syntax.ast import Instruction

TMEM_LANE_BYTES = 2048
"""Bytes of one TMEM lane: 512 columns of 32 bits. TMEM byte = lane * 2048 + column * 4."""


def report(
    machine: Machine,
    agent: Agent,
    space: Space,
    owner: Cta | None,
    starts: NDArray[np.int64],
    size: int,
    kind: AccessKind,
    instruction: Instruction,
    *,
    proxy: Proxy = Proxy.GENERIC,
    order: tuple[str, str] = ("weak", ""),
) -> None:
    """Tell the observer, if there is one, of an access.

    Args:
        starts: first byte of each piece (see `events.Access.starts`); size: bytes of each piece.
        order: memory order and scope.
    """
    if machine.observer is not None:
        index = None if owner is None else owner.index
        machine.observer.accessed(
            Access(agent, space, index, starts, size, kind, proxy, instruction, *order)
        )


def locate_shared(cta: Cta, address: int, size: int, instruction: Instruction) -> tuple[Cta, int]:
    """The CTA and the offset in its shared memory that a 32-bit shared address names.

    Args:
        cta: the CTA that executes; its own addresses carry its rank (`memory.address`).

    Raises:
        ExecutionError: no such CTA in the cluster, or not all bytes in its shared memory.
    """
    rank, offset = address >> SHARED_RANK_SHIFT, address & SHARED_OFFSET_MASK
    if not 0 <= rank < len(cta.cluster.ctas):
        raise ExecutionError(
            f"{instruction.span}: {instruction.opcode}: shared address 0x{address:x} names CTA "
            f"rank {rank} of a cluster of {len(cta.cluster.ctas)}"
        )
    target = cta.cluster.ctas[rank]
    if offset + size > len(target.shared):
        raise ExecutionError(
            f"{instruction.span}: {instruction.opcode}: shared address 0x{offset:x} + {size} bytes "
            f"is beyond the CTA's {len(target.shared)} bytes"
        )
    if target.exited:
        cta.machine.complain(
            "error",
            "exited-cta",
            f"access to shared memory of cta {target.ctaid}, which has exited",
            None,
            instruction,
        )
    return target, offset
