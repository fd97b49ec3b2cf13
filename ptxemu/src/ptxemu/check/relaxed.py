"""Relaxed arrivals and waits: what they order by themselves, and what fences around them add.

For memory they order nothing until a fence (PTX ISA, "mbarrier.try_wait": .relaxed). But whoever
sees a phase complete knows that the operations which completed it have read their sources, and
tcgen05 instructions are ordered by tcgen05.fence::before_thread_sync before the arrival (which
tcgen05.commit implies) and tcgen05.fence::after_thread_sync after the wait (PTX ISA, "TensorCore
5th Generation Memory Consistency Model Operations", canonical synchronization patterns).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from ptxemu.check.state import CLUSTER, CTA, WarpActor
from ptxemu.check.vector_clock import (
    ARRIVED,
    GENERIC,
    MBARRIER_INIT,
    RELAXED,
    SEEN,
    TCGEN05,
    Knowledge,
)


def release(warp: WarpActor, held: Knowledge, *, at_mbarrier: bool, is_remote: bool) -> None:
    """A relaxed arrival: leave at a token what earlier fences released.

    Args:
        is_remote: who waits may be in another CTA.
        at_mbarrier: who sees the phase knows that arrivals at this object have happened. Of a
            barrier of the CTA or the cluster that says nothing of arrivals at mbarriers before.
    """
    held.unite_row(warp.know, MBARRIER_INIT)
    held.unite_row(warp.know, TCGEN05)
    held.unite_row(warp.know, SEEN)
    if not at_mbarrier:
        for home, part in warp.know.parts.items():
            seen = held.part(home, part.clocks.shape[1]).clocks[RELAXED]
            np.maximum(seen, part.clocks[[GENERIC, RELAXED]].max(axis=0), out=seen)
    mine, left = warp.know.parts[warp.home], held.parts[warp.home]
    left.done |= mine.tcgen05
    left.handed_on |= mine.tcgen05
    left.seen |= mine.seen | mine.done
    if at_mbarrier:
        left.clocks[ARRIVED, warp.slot] = max(left.clocks.item(ARRIVED, warp.slot), warp.clock)
    fenced = warp.fenced[CLUSTER if is_remote else CTA]
    if fenced is not None:
        held.unite(fenced.know)
    warp.tick()


def completes_mbarriers(operation: Any) -> bool:
    """Whether an operation, or the commit after it, completes a phase of an mbarrier.

    The others' end is told of by the arrival of a warp that waited for them: tcgen05.ld and
    tcgen05.st, wgmma, copies in groups.
    """
    kind, modifiers = operation.kind, operation.instruction.modifiers
    return kind not in ("tcgen05.ld", "tcgen05.st", "wgmma") and "bulk_group" not in modifiers


def acquire(warp: WarpActor, place: Hashable, held: Knowledge, no_mbarrier: int) -> None:
    """A relaxed wait: a fence will acquire what was left at the token.

    Args:
        place: the mbarrier, a later phase of which holds what earlier ones do.
        no_mbarrier: which operations complete no mbarrier, so that the phase says nothing of them.
    """
    warp.pending.see_latest(CTA, place, held)
    warp.know.unite_row(held, SEEN)
    left = held.parts.get(warp.home)
    if left is not None:
        mine = warp.know.parts[warp.home]
        mine.reads |= (left.done | left.reads) & ~no_mbarrier
        mine.seen |= left.seen | left.done


def before_thread_sync(warp: WarpActor, tcgen05: int) -> None:
    """tcgen05.fence::before_thread_sync; `tcgen05`: which operations are tcgen05 instructions."""
    mine = warp.know.parts[warp.home]
    mine.tcgen05 |= mine.done & tcgen05
    mine.handed_on |= mine.tcgen05
    np.maximum(mine.clocks[TCGEN05], mine.clocks[GENERIC], out=mine.clocks[TCGEN05])
    warp.tick()


def after_thread_sync(warp: WarpActor, tcgen05: int) -> None:
    """tcgen05.fence::after_thread_sync."""
    mine = warp.know.parts[warp.home]
    for pending in warp.pending.all():
        seen = pending.parts.get(warp.home)
        if seen is None:
            continue
        mine.done |= seen.done & tcgen05
        mine.handed_on |= seen.handed_on
        for row in (GENERIC, TCGEN05):
            np.maximum(mine.clocks[TCGEN05], seen.clocks[row], out=mine.clocks[TCGEN05])
