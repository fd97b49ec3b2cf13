"""A warp goes on by machine code: chains of blocks and weak accesses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptxemu.machine.lane_group import Group
    from ptxemu.machine.state import Warp


def run_code(warp: Warp, group: Group, *, is_heard: bool) -> bool | None:
    """Let the lanes go on by machine code: whether the warp's turn is over then.

    No register belongs to an operation.

    Args:
        is_heard: the observer is told of loads in a row (`Observer.loaded`); else there is none.

    Returns:
        None where there is none for what is next; nothing was done then.
    """
    program = warp.program
    chain = program.chain(group.pc, is_heard=is_heard)
    if (
        chain is None
        or group.pc == warp.access_alone
        or warp.cta.machine.memory.allow_unregistered
        or (len(warp.groups) > 1 and _meets_others(warp, group, chain.end))
    ):
        return None
    if not chain.run(warp, group):
        warp.access_alone = group.pc
        return False
    return len(warp.groups) > 1


def _meets_others(warp: Warp, group: Group, end: int) -> bool:
    """Whether other lanes of the warp are before `end`."""
    return any(other is not group and other.pc < end for other in warp.groups)
