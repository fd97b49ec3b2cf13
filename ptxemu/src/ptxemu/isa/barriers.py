"""Barriers of a CTA and of a cluster (PTX ISA, "Parallel Synchronization and Communication
Instructions": bar, barrier, barrier.cluster)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ptxemu.engines.named_barrier import Generation, cluster_barrier, named_barriers
from ptxemu.errors import ExecutionError, fault
from ptxemu.events import Fence, FenceKind, Space
from ptxemu.isa.memory_operands import SCOPES
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.lane_group import Blocked
from ptxemu.machine.lanes import WARP_SIZE, Lanes, Mask
from ptxemu.machine.operands import address_reader, reader, writer
from ptxemu.machine.state import Warp
from ptxemu.syntax.ast import Instruction, IntImmediate, Operand

Finish = Callable[["Warp", Mask, Generation], None]


@visible("bar", "barrier")
def cta_barrier(instruction: Instruction, modifiers: Modifiers) -> Step:
    """sync: arrive and wait; arrive: go on; red: sync and reduce a predicate of all threads."""
    modifiers.flag("cta")
    is_aligned = modifiers.flag("aligned") or instruction.modifiers[0] == "bar"
    mode = modifiers.one_of("sync", "arrive", "red")
    operands = list(instruction.operands)
    if mode == "red":
        return _reduction(instruction, modifiers, is_aligned=is_aligned)
    arrive = _arrival(instruction, operands[0], operands[1:], is_aligned=is_aligned)
    if mode == "sync":
        return _synchronise(arrive, lambda warp, mask, generation: None)
    if len(operands) == 1:
        unsupported(instruction, "expected a thread count")

    def step(warp: Warp, mask: Mask) -> None:
        number, generation = arrive(warp, mask)
        named_barriers(warp.cta).try_complete(number, generation)

    return step


def _reduction(instruction: Instruction, modifiers: Modifiers, *, is_aligned: bool) -> Step:
    operation = modifiers.one_of("popc", "and", "or")
    modifiers.one_of("u32" if operation == "popc" else "pred")
    destination, number, *count, predicate = instruction.operands
    arrive = _arrival(instruction, number, count, is_aligned=is_aligned)
    write, read = writer(destination), reader(predicate, "pred")

    def contribute(warp: Warp, mask: Mask) -> tuple[int, Generation]:
        id_, generation = arrive(warp, mask)
        held = read(warp)[mask]
        generation.num_holding += int(held.sum())
        generation.all_hold = generation.all_hold and bool(held.all())
        return id_, generation

    def finish(warp: Warp, mask: Mask, generation: Generation) -> None:
        if operation == "popc":
            write(warp, np.full(WARP_SIZE, generation.num_holding, dtype=np.uint32), mask)
        else:
            held = generation.all_hold if operation == "and" else generation.num_holding > 0
            write(warp, np.full(WARP_SIZE, held), mask)

    return _synchronise(contribute, finish)


def _arrival(
    instruction: Instruction, number: Operand, count: list[Operand], *, is_aligned: bool
) -> Callable[[Warp, Mask], tuple[int, Generation]]:
    read_number = reader(number, "u32")
    read_count = reader(count[0], "u32") if count else None

    def arrive(warp: Warp, mask: Mask) -> tuple[int, Generation]:
        id_ = _same(instruction, read_number(warp)[mask])
        threads = None if read_count is None else _same(instruction, read_count(warp)[mask])
        try:
            barriers = named_barriers(warp.cta)
            return id_, barriers.arrive(warp, id_, threads, mask, is_aligned=is_aligned)
        except ExecutionError as error:
            raise ExecutionError(f"{instruction.span}: {warp.label}: {error}") from None

    return arrive


def _same(instruction: Instruction, values: Lanes) -> int:
    value = int(values[0])
    if (values != value).any():
        raise ExecutionError(f"{instruction.span}: the lanes give different barriers or counts")
    return value


def _synchronise(arrive: Callable[[Warp, Mask], tuple[int, Generation]], finish: Finish) -> Step:
    """Arrive, wait for the release, learn what was released."""

    def step(warp: Warp, mask: Mask) -> Blocked:
        barriers = named_barriers(warp.cta)
        number, generation = arrive(warp, mask)

        def resume() -> None:
            observer = warp.cta.machine.observer
            if observer is not None:
                observer.acquired(warp, barriers.token(number, generation), "cta")
            finish(warp, mask, generation)

        return Blocked(
            lambda: barriers.try_complete(number, generation),
            lambda: barriers.describe(number, generation),
            resume,
            until=(generation.completed, warp.cta.cluster.lanes_exited),
        )

    return step


@dataclass(slots=True)
class _ClusterArrivals:
    """A warp's arrivals at the cluster's barrier."""

    phase: int
    not_waited: Mask
    """Lanes that have arrived and not waited since."""
    arrived_twice: Mask
    """Those of `not_waited` with two waits to come: for the phase before, and for `phase`."""


_NOBODY = np.zeros(WARP_SIZE, dtype=np.bool_)
_cluster_arrivals: EngineState[Warp, _ClusterArrivals] = EngineState(
    lambda warp: _ClusterArrivals(0, _NOBODY, _NOBODY)
)


@visible("barrier.cluster.arrive")
def cluster_arrive(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Arrive at the cluster's barrier; .relaxed orders no memory access."""
    order = modifiers.one_of("release", "relaxed", default="release")
    modifiers.flag("aligned")

    def step(warp: Warp, mask: Mask) -> None:
        barrier = cluster_barrier(warp.cta.cluster)
        machine = warp.cta.machine
        own = _cluster_arrivals(warp)
        own.phase = barrier.arrive(warp, mask)
        if machine.observer is not None:
            scope = "cluster" if order == "release" else "relaxed"
            machine.observer.released(warp, barrier.token(own.phase), scope)
        again = own.not_waited & mask
        own.not_waited = own.not_waited | mask
        if again.any():
            own.arrived_twice = own.arrived_twice | again
            # FlashAttention-4's latent attention does, with as many waits behind: it works.
            message = (
                "a second barrier.cluster.arrive before the wait for the first; the ISA does not "
                "define it, here it counts for the phase behind"
            )
            machine.complain("warning", "cluster-barrier-arrived-twice", message, warp, instruction)

    return step


@visible("barrier.cluster.wait")
def cluster_wait(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Wait for the phase that this thread has arrived at."""
    modifiers.flag("acquire")
    modifiers.flag("aligned")

    def step(warp: Warp, mask: Mask) -> Blocked:
        barrier = cluster_barrier(warp.cta.cluster)
        machine = warp.cta.machine
        own = _cluster_arrivals(warp)
        if (mask & ~own.not_waited).any():
            raise ExecutionError(
                f"{instruction.span}: {warp.label}: barrier.cluster.wait without an arrive"
            )
        twice = own.arrived_twice & mask
        awaited = own.phase - 1 if twice.any() else own.phase
        own.not_waited = own.not_waited & ~mask | twice
        own.arrived_twice = own.arrived_twice & ~mask

        def resume() -> None:
            if machine.observer is not None:
                machine.observer.acquired(warp, barrier.token(awaited), "cluster")

        return Blocked(
            lambda: barrier.has_completed(awaited),
            lambda: barrier.describe(awaited),
            resume,
            until=barrier.changed,
        )

    return step


# Fences (PTX ISA, "Parallel Synchronization and Communication Instructions: membar, fence").
#
# Memory here is always coherent, so a fence has no effect of its own: it is told to the observer.

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
