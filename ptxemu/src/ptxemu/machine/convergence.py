"""Lanes that execute an instruction together: all live ones (`.aligned`) or a member mask's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ptxemu.machine.lanes import ALL_BITS, Mask, mask_of
from ptxemu.machine.operands import reader
from ptxemu.syntax.ast import Instruction, IntImmediate

if TYPE_CHECKING:
    from ptxemu.machine.state import Warp

RequiredLanes: TypeAlias = Callable[["Warp", Mask], Mask]

_WITH_MEMBERS = ("shfl", "vote", "match", "redux", "elect")
_CTA_BARRIERS = ("sync", "arrive", "red", "cta")


@dataclass(frozen=True, slots=True)
class Together:
    """The lanes that an instruction wants at its pc before it executes.

    A warp's lanes that are still on their way there (blocked in a branch that only they took, say)
    are waited for, as compiled code does at the point where control flow joins.
    """

    lanes: RequiredLanes
    is_aligned: bool
    """`.aligned`: every live lane of the warp; otherwise the lanes of the member mask."""
    joins_elsewhere: bool = False
    """bar.warp.sync: the members may stand at different instructions."""


def together(instruction: Instruction) -> Together | None:
    """Return the lanes that must be together at an instruction; None if every lane may go alone."""
    base, *rest = instruction.modifiers
    if "aligned" in rest or (base == "bar" and rest[0] in _CTA_BARRIERS):
        return Together(lambda warp, mask: warp.alive, is_aligned=True)
    if base == "bar" and rest[0] == "warp":
        return Together(_members(instruction), is_aligned=False, joins_elsewhere=True)
    if base in _WITH_MEMBERS and rest[0] == "sync":
        return Together(_members(instruction), is_aligned=False)
    return None


def _members(instruction: Instruction) -> RequiredLanes:
    """The lanes of the member mask, which is the last operand."""
    operand = instruction.operands[-1]
    if isinstance(operand, IntImmediate) and operand.value & ALL_BITS == ALL_BITS:
        return lambda warp, mask: warp.alive
    read = reader(operand, "u32")

    def lanes(warp: Warp, mask: Mask) -> Mask:
        bits = int(np.bitwise_or.reduce(read(warp)[mask]))
        return mask_of(bits) & warp.alive

    return lanes
