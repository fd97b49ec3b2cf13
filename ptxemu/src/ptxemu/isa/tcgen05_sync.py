"""tcgen05.alloc, dealloc, relinquish_alloc_permit, commit and fence (PTX ISA, "Tensor Memory
Allocation and Management Instructions", "Async Synchronization" and "Specialized Synchronization
Operations for TensorCore 5th Generation")."""

from __future__ import annotations

import numpy as np

from ptxemu.engines import tcgen05
from ptxemu.engines.tmem_allocator import pair, tmem_allocator
from ptxemu.events import AccessKind, Fence, FenceKind, Space
from ptxemu.isa.registry import Modifiers, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lane_group import Blocked
from ptxemu.machine.lanes import Mask, first_lane
from ptxemu.machine.operands import address_reader, reader, uniform
from ptxemu.machine.regions import locate_shared, report
from ptxemu.machine.state import Warp
from ptxemu.memory.address import SHARED_RANK_SHIFT, SHARED_WINDOW, in_window
from ptxemu.memory.tmem import LANE_BYTES, LANES, split_address
from ptxemu.syntax.ast import Instruction

_MULTICAST = "multicast::cluster"


@visible("tcgen05.alloc")
def tcgen05_alloc(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Allocates columns, waiting for free ones, and writes their address to shared memory."""
    cta_group = _management(modifiers)
    modifiers.flag("shared::cta")
    modifiers.one_of("b32")
    dst, count = instruction.operands
    address, columns = address_reader(dst), uniform(count, "u32")

    def step(warp: Warp, mask: Mask) -> Blocked:
        allocator = tmem_allocator(warp.cta)
        wanted = columns(warp, mask)
        target = int(address(warp)[first_lane(mask)])
        allocator.check_count(wanted, instruction)
        request = allocator.request(wanted, cta_group, warp, instruction)

        def finish() -> None:
            assert request.start is not None
            observer = warp.cta.machine.observer
            if observer is not None:
                observer.acquired(warp, ("tmem", warp.cta.index), "cta")
            _store_address(warp, instruction, target, request.start)

        return Blocked(
            ready=lambda: allocator.ready(request, cta_group),
            reason=lambda: (
                f"tcgen05.alloc waits for {wanted} free TMEM columns"
                + ("" if len(request.arrived) == 2 else " and for the peer CTA's tcgen05.alloc")
            ),
            resume=finish,
        )

    return step


@visible("tcgen05.dealloc")
def tcgen05_dealloc(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Frees columns. Reported as a write of all of them: nothing may use them any more.

    With .cta_group::2 that holds in both CTAs from the first one's instruction on: the ISA does not
    say that it waits for the other's.
    """
    cta_group = _management(modifiers)
    modifiers.one_of("b32")
    taddr, count = instruction.operands
    address, columns = uniform(taddr, "u32"), uniform(count, "u32")

    def step(warp: Warp, mask: Mask) -> None:
        where, freed = address(warp, mask), columns(warp, mask)
        allocator = tmem_allocator(warp.cta)
        allocator.check_count(freed, instruction)
        machine = warp.cta.machine
        frees = allocator.dealloc(where, freed, cta_group, warp, instruction)
        if machine.observer is not None and frees:
            first = split_address(where)[1]
            starts = np.arange(LANES, dtype=np.int64) * LANE_BYTES + first * 4
            owners = [warp.cta]
            if cta_group == 2:
                others = (cta for cta in pair(warp.cta) if cta is not warp.cta)
                owners += [cta for cta in others if first in tmem_allocator(cta).allocations]
            for owner in owners:
                tmem, written = Space.TMEM, AccessKind.WRITE
                report(warp, owner, starts, freed * 4, written, instruction, space=tmem)
            machine.observer.released(warp, ("tmem", warp.cta.index), "cta")

    return step


@visible("tcgen05.relinquish_alloc_permit")
def tcgen05_relinquish_alloc_permit(instruction: Instruction, modifiers: Modifiers) -> Step:
    """The CTA allocates no more."""
    _management(modifiers)

    def step(warp: Warp, mask: Mask) -> None:
        tmem_allocator(warp.cta).relinquished = True

    return step


@visible("tcgen05.commit")
def tcgen05_commit(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Arrives on mbarriers when the thread's tcgen05.mma, cp and shift so far have completed."""
    modifiers.one_of("cta_group::1", "cta_group::2")
    modifiers.one_of("mbarrier::arrive::one")
    modifiers.flag("shared::cluster")
    is_multicast = modifiers.flag(_MULTICAST)
    modifiers.one_of("b64")
    mbar, *mask_operand = instruction.operands
    address = address_reader(mbar)
    cta_mask = reader(mask_operand[0], "u16") if is_multicast else None

    def step(warp: Warp, mask: Mask) -> None:
        addresses = address(warp)
        for lane in np.flatnonzero(mask):
            where = _shared_address(int(addresses[lane]))
            ctas = None if cta_mask is None else int(cta_mask(warp)[lane])
            home, offset = locate_shared(warp.cta, where, 8, instruction)
            targets = [(home, offset)]
            if ctas is not None:
                ranks = [r for r in range(16) if ctas >> r & 1]
                targets = [
                    locate_shared(warp.cta, (r << SHARED_RANK_SHIFT) | offset, 8, instruction)
                    for r in ranks
                ]
            tcgen05.commit(warp, int(lane), instruction, targets)

    return step


@visible("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def tcgen05_fence(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Orders asynchronous tcgen05 operations around a synchronisation between threads."""
    name = instruction.modifiers[1]
    is_before = "before" in name
    effect = tcgen05.fence_before if is_before else tcgen05.fence_after
    fence = Fence(FenceKind.TCGEN05_BEFORE if is_before else FenceKind.TCGEN05_AFTER)

    def step(warp: Warp, mask: Mask) -> None:
        effect(warp, np.flatnonzero(mask).tolist())
        observer = warp.cta.machine.observer
        if observer is not None:
            observer.fenced(warp, fence, instruction)

    return step


def _management(modifiers: Modifiers) -> int:
    """The modifiers that all allocation instructions have; gives the cta_group."""
    cta_group = int(modifiers.one_of("cta_group::1", "cta_group::2")[-1])
    modifiers.expect("sync", "aligned")
    return cta_group


def _shared_address(address: int) -> int:
    """A shared::cluster address from one, or from a generic address."""
    return address - SHARED_WINDOW if in_window(address, SHARED_WINDOW) else address


def _store_address(warp: Warp, instruction: Instruction, target: int, start: int) -> None:
    cta, offset = locate_shared(warp.cta, _shared_address(target), 4, instruction)
    report(warp, cta, offset, 4, AccessKind.WRITE, instruction)
    cta.shared_words[offset >> 2] = start
