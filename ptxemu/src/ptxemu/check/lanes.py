"""Lanes of a warp that have not acquired what others of them have: a missing bar.warp.sync.

The check takes a warp as one agent, with one exception. An acquire, or a wait for an mbarrier,
orders what follows in its own threads only. Behind one that some lanes execute, the others know
what the warp knew before it, until the warp's lanes are synchronised. So as to report nothing that
is sound, anything else by which a warp learns ends that, too, and so does a shuffle or a vote,
though the ISA says of bar.warp.sync only that it orders memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ptxemu.check.lane_notes import lanes_of
from ptxemu.events import Access, Agent

if TYPE_CHECKING:
    from ptxemu.check.state import WarpActor


def acquires(warp: WarpActor, agent: Agent) -> None:
    """Some or all lanes are about to acquire: note what the others know."""
    active, alive = lanes_of(agent)
    before = warp.know
    if warp.lagging is not None:
        earlier, before = warp.lagging
        active |= earlier
    elif alive & ~active:
        before = before.copy()
    warp.lagging = (active, before) if alive & ~active else None


def divided(warp: WarpActor, access: Access) -> tuple[Access | None, Access | None]:
    """The parts of an access by the lanes that know all that the warp knows, and by the others."""
    active, _ = lanes_of(access.agent)
    if warp.lagging is None or not active & ~warp.lagging[0]:
        return access, None
    order = [lane for lane in range(active.bit_length()) if active >> lane & 1]
    if len(order) != len(access.starts):
        return access, None
    knows = np.array([bool(warp.lagging[0] >> lane & 1) for lane in order])
    if not knows.any():
        return None, access
    return (
        replace(access, starts=access.starts[knows]),
        replace(access, starts=access.starts[~knows]),
    )
