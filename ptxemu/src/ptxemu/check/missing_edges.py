"""The edge that is missing between two accesses in no order: its code, and words for it."""

from __future__ import annotations

from ptxemu.check import tcgen05_order
from ptxemu.check.actors import OperationActor
from ptxemu.check.state import Actor, Event, WarpActor
from ptxemu.check.vector_clock import OUT_OF_SCOPE, RELAXED
from ptxemu.events import AccessKind, Proxy, Space


def unordered(first: Event, second: Event, space: Space) -> tuple[str, str]:
    """The code and the missing edge of two unordered accesses."""
    if space is Space.TMEM:
        return tcgen05_order.unordered(first, second)
    if isinstance(second.actor, WarpActor) and second.actor.knows_by_other_lanes(first):
        return "race", "only other lanes of the warp have acquired it: needs bar.warp.sync"
    if isinstance(first.actor, OperationActor) and not first.actor.is_awaited(first):
        edge = f"needs {completion(first, first.actor)}"
        if not same_warp(first.actor, second.actor):
            edge += ", known to the second"
        return "missing-wait", edge
    edge = "needs a barrier, or a release and an acquire"
    if first.actor.cta != second.actor.cta:
        edge += " of cluster scope or wider"
    if second.proxy is Proxy.ASYNC and first.proxy is Proxy.GENERIC:
        if writes(first):
            edge += " (and fence.proxy.async)"
        elif isinstance(second.actor, OperationActor):
            wait = completion(second, second.actor)
            edge += f" (or, if the read is of what the second writes, {wait} before it)"
    if second.actor.knows_by(first, OUT_OF_SCOPE):
        return "narrow-wait-race", (
            "only an mbarrier wait of .cta scope stands between them, and another CTA arrived: "
            "needs .acquire.cluster"
        )
    if second.actor.knows_by(first, RELAXED):
        return "relaxed-barrier-race", (
            "only a relaxed barrier.cluster.arrive stands between them, which orders no memory: "
            "needs .release"
        )
    if first.reach and second.reach:
        return "scope-race", f"neither scope reaches the other CTA: {edge}"
    if first.reach or second.reach:
        if writes(first) and writes(second):
            return "lost-update", f"one of the two updates may be lost: {edge}"
        if space is Space.GLOBAL:
            return "mixed-race", edge
    return "race", edge


def writes(event: Event) -> bool:
    """Whether it is no read."""
    return event.kind is not AccessKind.READ


def same_warp(one: Actor, other: Actor) -> bool:
    """Whether two agents are of one warp."""
    return (one.cta, one.warp) == (other.cta, other.warp)


def completion(event: Event, operation: OperationActor) -> str:
    """The instruction that waits for an operation."""
    kind, modifiers = operation.kind, event.instruction.modifiers
    if kind.startswith("wgmma"):
        return "wgmma.wait_group"
    if kind in ("tcgen05.ld", "tcgen05.st"):
        return kind.replace(".", ".wait::")
    if kind.startswith("tcgen05"):
        return "tcgen05.commit and a wait on its mbarrier"
    if "bulk_group" in modifiers:
        read = ".read" if event.kind is AccessKind.READ else ""
        return f"cp.async.bulk.wait_group{read}"
    if kind.startswith("cp.async") and "bulk" not in modifiers:
        return "cp.async.wait_group"
    return "a wait on the mbarrier that it completes"
