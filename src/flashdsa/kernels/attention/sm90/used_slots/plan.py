"""Budget of the kernel that finds the last used slot of each list, as data."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.plan import Role

WARPS = 4
"""Warps of a CTA, each with a list."""
FIRST_TURNS, TURNS = 8, 32
"""Slots that a lane reads together, in a list's first step and in each further one."""


@dataclass(frozen=True)
class UsedSlotsPlan:
    """The compiled kernel; it has nothing to choose, and takes lists of any width."""

    name: str = "mla_used_slots"
    roles: tuple[Role, ...] = ()
    smem_bytes: int = 0
