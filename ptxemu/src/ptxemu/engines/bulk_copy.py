"""Bulk copies: where they may read and write, and whom they signal."""

from __future__ import annotations

from ptxemu.engines.copy_operation import Signal
from ptxemu.errors import fault
from ptxemu.machine.regions import locate_shared
from ptxemu.machine.state import Cta
from ptxemu.syntax.ast import Instruction

UNIT = 16
"""Bulk copies move multiples of this many bytes between multiples of it."""
LOW_WORD = 0xFFFF_FFFF


def check_unit(instruction: Instruction, what: str, value: int) -> None:
    """Refuse an address or a size that is no multiple of 16."""
    if value % UNIT:
        kind = "is not a multiple of" if what == "size" else "is not aligned to"
        shown = str(value) if what == "size" else f"0x{value:x}"
        fault(instruction, f"{what} {shown} {kind} {UNIT} bytes (CUDA_ERROR_MISALIGNED_ADDRESS)")


def shared_place(
    cta: Cta, address: int, size: int, instruction: Instruction, *, own: bool
) -> tuple[Cta, int]:
    """The CTA and the offset that a shared address names.

    Args:
        own: the operand is of shared::cta, so another CTA's address is an error.
    """
    owner, offset = locate_shared(cta, address & LOW_WORD, size, instruction)
    if own and owner is not cta:
        fault(
            instruction,
            f"shared::cta address 0x{address & LOW_WORD:x} is that of cta {owner.ctaid}, not of "
            f"the executing cta {cta.ctaid}",
        )
    return owner, offset


def destinations(cta: Cta, owner: Cta, cta_mask: int | None, instruction: Instruction) -> list[Cta]:
    """The CTAs that a copy writes to: `owner`, or with .multicast::cluster those of the mask.

    An empty mask is none; one of CTAs that the cluster does not have traps (both on an H200).
    """
    if cta_mask is None:
        return [owner]
    ctas = cta.cluster.ctas
    if cta_mask >> len(ctas):
        fault(instruction, f"CTA mask 0x{cta_mask:x} for a cluster of {len(ctas)} CTAs")
    return [c for c in ctas if cta_mask >> c.rank & 1]


def signal_of(
    destination: Cta,
    barrier: tuple[Cta, int],
    count: int,
    instruction: Instruction,
    *,
    multicast: bool,
    cta_group: int,
) -> Signal:
    """The mbarrier that a copy into `destination` completes `count` bytes on.

    With multicast each destination's own, at the same offset. The mbarrier must be in the
    destination's CTA, or with .cta_group::2 in its pair: then the parity of the rank that the
    address names chooses the CTA of the pair.
    """
    owner, offset = barrier
    if not multicast:
        apart = owner.rank ^ destination.rank
        if apart > (1 if cta_group == 2 else 0):
            fault(
                instruction,
                f"the mbarrier is in cta {owner.ctaid}, the destination in cta "
                f"{destination.ctaid}: "
                + ("not of its pair" if cta_group == 2 else "not the same"),
            )
        return Signal(owner, offset, count)
    if cta_group == 2:
        rank = destination.rank & ~1 | owner.rank & 1
        return Signal(destination.cluster.ctas[rank], offset, count)
    return Signal(destination, offset, count)
