"""Proxies: which fence makes which accesses known to whom (PTX ISA, "Proxies", "fence")."""

from __future__ import annotations

import numpy as np

from ptxemu.check import vector_clock
from ptxemu.check.actors import OperationActor
from ptxemu.check.state import Actor, Event, WarpActor
from ptxemu.events import AccessKind, Fence, FenceKind, Proxy, Space

ROW_OF_SPACE = {Space.SHARED: vector_clock.ASYNC_SHARED, Space.GLOBAL: vector_clock.ASYNC_GLOBAL}
"""Rows of accesses that are ordered for the async proxy too, by space."""


def apply_fence(warp: WarpActor, fence: Fence) -> None:
    """Give the warp's knowledge for the generic proxy to the fence's proxies too.

    An acquire for the tensormap proxy gives what fences have released to that proxy.
    """
    source, kind = vector_clock.GENERIC, fence.kind
    rows: tuple[int, ...] = ()
    if kind is FenceKind.ASYNC_PROXY:
        rows = tuple(row for space, row in ROW_OF_SPACE.items() if space in fence.spaces)
    elif kind is FenceKind.MBARRIER_INIT:
        rows = (vector_clock.MBARRIER_INIT,)
    elif kind is FenceKind.TENSORMAP_RELEASE:
        rows = (vector_clock.TENSORMAP_RELEASED,)
    elif kind is FenceKind.TENSORMAP_ACQUIRE:
        source, rows = vector_clock.TENSORMAP_RELEASED, (vector_clock.TENSORMAP,)
    if not rows:
        return
    for part in warp.know.parts.values():
        for row in rows:
            np.maximum(part.clocks[row], part.clocks[source], out=part.clocks[row])
        if vector_clock.ASYNC_SHARED in rows:
            part.fenced |= part.done
    warp.tick()


def missing_fence(first: Event, second: Event, space: Space) -> tuple[str, str] | None:
    """The code of the finding and the fence that is missing between two ordered accesses."""
    if first.proxy is not Proxy.GENERIC or second.proxy is Proxy.GENERIC:
        return None
    if second.proxy is Proxy.TENSORMAP:
        if second.actor.knows(first, vector_clock.TENSORMAP):
            return None
        if second.actor.knows(first, vector_clock.TENSORMAP_RELEASED):
            return "missing-tensormap-fence", "fence.proxy.tensormap::generic.acquire by the issuer"
        return "missing-tensormap-fence", "fence.proxy.tensormap::generic.release by the writer"
    row = ROW_OF_SPACE.get(space)
    if row is None or second.actor.knows(first, row):
        return None
    if first.kind is AccessKind.READ:
        return "missing-proxy-fence-after-read", "fence.proxy.async"
    if _is_copy_that_arrived(first.actor) and _is_of_tensor_cores(second.actor):
        return "missing-proxy-fence-after-cp-async", "fence.proxy.async"
    return "missing-proxy-fence", "fence.proxy.async"


def _is_copy_that_arrived(actor: Actor) -> bool:
    """Whether this is a cp.async that no warp waited for: its mbarrier arrival told of it.

    By the ISA it needs the fence as any generic write does, but NVIDIA's own tensor core
    kernels (CUTLASS's cp.async main loops for sm_90 and sm_100) rely on the arrival alone.
    """
    return isinstance(actor, OperationActor) and actor.kind == "cp.async" and not actor.joined


def _is_of_tensor_cores(actor: Actor) -> bool:
    kinds = ("wgmma", "tcgen05.mma", "tcgen05.cp")
    return isinstance(actor, OperationActor) and actor.kind.startswith(kinds)


def knows_init(actor: Actor, init: Event) -> tuple[bool, bool]:
    """Whether `actor` may use an mbarrier that `init` initialised.

    Returns:
        whether the initialisation happened before, and whether it is visible where it must be: to
        the async proxy, to other CTAs of the cluster.
    """
    if init in actor.inits:
        return True, True
    fenced = actor.knows(init, vector_clock.MBARRIER_INIT)
    ordered = fenced or actor.knows(init)
    is_async = isinstance(actor, OperationActor) and actor.uses_async_proxy
    visible = fenced or (actor.knows(init, vector_clock.ASYNC_SHARED) if is_async else ordered)
    if ordered and visible:
        actor.inits.add(init)
    return ordered, visible
