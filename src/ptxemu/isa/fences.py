"""Fences (PTX ISA, "Parallel Synchronization and Communication Instructions: membar, fence").

Memory here is always coherent, so a fence has no effect of its own: it is told to the observer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptxemu.errors import ExecutionError
from ptxemu.isa.memory_operands import SCOPES
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lanes import Mask
from ptxemu.machine.operands import address_reader
from ptxemu.syntax.ast import Instruction, IntImmediate

if TYPE_CHECKING:
    from ptxemu.machine.warp import Warp

_SECTION = "Parallel Synchronization and Communication Instructions: membar, fence"
_PROXIES = (
    "alias",
    "async",
    "async.global",
    "async.shared::cta",
    "async.shared::cluster",
)
_RESTRICTED = {
    "async::generic.acquire.sync_restrict::shared::cluster.cluster",
    "async::generic.release.sync_restrict::shared::cta.cluster",
}
_TENSORMAP_BYTES = 128


def _told(kind: str, instruction: Instruction) -> Step:
    def step(warp: Warp, mask: Mask) -> None:
        observer = warp.cta.machine.observer
        if observer is not None:
            observer.fenced(warp, kind, instruction)

    return step


@visible("fence", section=_SECTION)
def thread_fence(instruction: Instruction) -> Step:
    """Order this thread's accesses at a scope; .acquire and .release order one way."""
    modifiers = Modifiers(instruction, "fence")
    order = modifiers.one_of("acq_rel", "sc", "acquire", "release", default="acq_rel")
    if order == "acquire":
        modifiers.flag("sync_restrict::shared::cluster")
    if order == "release":
        modifiers.flag("sync_restrict::shared::cta")
    scope = modifiers.one_of(*SCOPES)
    modifiers.done()
    return _told(f"{order}.{scope}", instruction)


@visible("membar", section=_SECTION)
def memory_barrier(instruction: Instruction) -> Step:
    """The old spelling of fence.sc."""
    modifiers = Modifiers(instruction, "membar")
    scope = {"cta": "cta", "gl": "gpu", "sys": "sys"}[modifiers.one_of("cta", "gl", "sys")]
    modifiers.done()
    return _told(f"sc.{scope}", instruction)


@visible("fence.mbarrier_init", section=_SECTION)
def init_fence(instruction: Instruction) -> Step:
    """Order this thread's mbarrier.init before later uses in the cluster."""
    modifiers = Modifiers(instruction, "fence.mbarrier_init")
    modifiers.one_of("release")
    modifiers.one_of("cluster")
    modifiers.done()
    return _told("mbarrier_init", instruction)


@visible("fence.proxy", "membar.proxy", section=_SECTION)
def proxy_fence(instruction: Instruction) -> Step:
    """Order accesses of different proxies; both ways, or as .release and .acquire say."""
    kind = ".".join(instruction.modifiers[2:])
    if kind not in _PROXIES and kind not in _RESTRICTED:
        unsupported(instruction, f"proxy .{kind}")
    return _told(f"proxy.{kind}", instruction)


@visible("fence.proxy.tensormap::generic", section=_SECTION)
def tensormap_fence(instruction: Instruction) -> Step:
    """Order generic writes of tensor maps before their use; .acquire names the map's 128 bytes."""
    modifiers = Modifiers(instruction, "fence.proxy.tensormap::generic")
    order = modifiers.one_of("release", "acquire")
    scope = modifiers.one_of(*SCOPES)
    modifiers.done()
    told = _told(f"proxy.tensormap::generic.{order}.{scope}", instruction)
    if order == "release":
        return told
    address, size = instruction.operands
    if size != IntImmediate(_TENSORMAP_BYTES):
        unsupported(instruction, f"expected a size of {_TENSORMAP_BYTES}")
    read = address_reader(address)

    def step(warp: Warp, mask: Mask) -> None:
        if (read(warp)[mask] % _TENSORMAP_BYTES).any():
            raise ExecutionError(
                f"{instruction.span}: {instruction.opcode}: {warp.label}: the address is not "
                f"aligned to {_TENSORMAP_BYTES} bytes"
            )
        told(warp, mask)

    return step
