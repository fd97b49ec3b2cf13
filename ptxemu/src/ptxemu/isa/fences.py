"""Fences (PTX ISA, "Parallel Synchronization and Communication Instructions: membar, fence").

Memory here is always coherent, so a fence has no effect of its own: it is told to the observer.
"""

from __future__ import annotations

from ptxemu.errors import fault
from ptxemu.events import Fence, FenceKind, Space
from ptxemu.isa.memory_operands import SCOPES
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lanes import Mask
from ptxemu.machine.operands import address_reader
from ptxemu.machine.state import Warp
from ptxemu.syntax.ast import Instruction, IntImmediate

_ASYNC = Fence(FenceKind.ASYNC_PROXY)
_ASYNC_SHARED = Fence(FenceKind.ASYNC_PROXY, spaces=frozenset((Space.SHARED,)))
_PROXIES = {
    "alias": Fence(FenceKind.ALIAS_PROXY),
    "async": _ASYNC,
    "async.global": Fence(FenceKind.ASYNC_PROXY, spaces=frozenset((Space.GLOBAL,))),
    "async.shared::cta": _ASYNC_SHARED,
    "async.shared::cluster": _ASYNC_SHARED,
    "async::generic.acquire.sync_restrict::shared::cluster.cluster": _ASYNC_SHARED,
    "async::generic.release.sync_restrict::shared::cta.cluster": _ASYNC_SHARED,
}
_TENSORMAP_BYTES = 128


def _told(fence: Fence, instruction: Instruction) -> Step:
    def step(warp: Warp, mask: Mask) -> None:
        observer = warp.cta.machine.observer
        if observer is not None:
            observer.fenced(warp, fence, instruction)

    return step


@visible("fence")
def thread_fence(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Order this thread's accesses at a scope; .acquire and .release order one way."""
    order = modifiers.one_of("acq_rel", "sc", "acquire", "release", default="acq_rel")
    if order == "acquire":
        modifiers.flag("sync_restrict::shared::cluster")
    if order == "release":
        modifiers.flag("sync_restrict::shared::cta")
    scope = modifiers.one_of(*SCOPES)
    return _told(Fence(FenceKind.MEMORY, order, scope), instruction)


@visible("membar")
def memory_barrier(instruction: Instruction, modifiers: Modifiers) -> Step:
    """The old spelling of fence.sc."""
    scope = {"cta": "cta", "gl": "gpu", "sys": "sys"}[modifiers.one_of("cta", "gl", "sys")]
    return _told(Fence(FenceKind.MEMORY, "sc", scope), instruction)


@visible("fence.mbarrier_init")
def init_fence(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Order this thread's mbarrier.init before later uses in the cluster."""
    modifiers.expect("release", "cluster")
    return _told(Fence(FenceKind.MBARRIER_INIT), instruction)


@visible("fence.proxy", "membar.proxy")
def proxy_fence(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Order accesses of different proxies; both ways, or as .release and .acquire say."""
    kind = modifiers.all_left()
    if kind not in _PROXIES:
        unsupported(instruction, f"proxy .{kind}")
    return _told(_PROXIES[kind], instruction)


@visible("fence.proxy.tensormap::generic")
def tensormap_fence(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Order generic writes of tensor maps before their use; .acquire names the map's 128 bytes."""
    order = modifiers.one_of("release", "acquire")
    scope = modifiers.one_of(*SCOPES)
    is_release = order == "release"
    kind = FenceKind.TENSORMAP_RELEASE if is_release else FenceKind.TENSORMAP_ACQUIRE
    told = _told(Fence(kind, scope=scope), instruction)
    if is_release:
        return told
    address, size = instruction.operands
    if size != IntImmediate(_TENSORMAP_BYTES):
        unsupported(instruction, f"expected a size of {_TENSORMAP_BYTES}")
    read = address_reader(address)

    def step(warp: Warp, mask: Mask) -> None:
        if (read(warp)[mask] % _TENSORMAP_BYTES).any():
            fault(
                instruction, f"{warp.label}: the address is not aligned to {_TENSORMAP_BYTES} bytes"
            )
        told(warp, mask)

    return step
