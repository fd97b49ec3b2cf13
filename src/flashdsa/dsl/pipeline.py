"""Waits and arrivals by the plan's names; the only module with stage and phase arithmetic.

A `plan.Barrier` is one or more mbarriers, one a stage, for one role to arrive at and another one to
wait for. Two of them make a ring of buffers: at `full` the producer says that a stage is filled, at
`empty` the consumers say that it has been read. The uses of a ring have running numbers: use n is
of stage n % stages, and completes phase n // stages of both barriers of that stage. A wait takes
the parity of the phase, which is enough as long as nobody is a whole round late.

Nothing here has a state that changes: a role keeps a running number, or the `PipelineState` that it
stands for, and rebinds it. A function that advances one returns it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass._mlir.dialects import nvvm

from flashdsa.dsl import ptx
from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.static import Static
from flashdsa.hw import WARP_SIZE
from flashdsa.plan import Arrives, Barrier


class PipelineState(NamedTuple):
    """A use's stage and phase in a ring. `Ring` makes it of a running number."""

    stage: Int32
    phase: Int32  # parity bit of the barriers' phases that this use completes
    ring: Static = Static(None)  # the `Ring`; None: a state that is not advanced

    def advanced(self, uses: int = 1) -> "PipelineState":
        """The state `uses` further on, at most the ring's stages: a step of one of several
        consumers that take turns. Cheaper than a new division by the number of stages."""
        return _advance(self, uses, self.ring.value.stages)

    def in_turn(self, use: int, turn: int) -> "PipelineState":
        """The state `use` further on, with no more than an addition at run time.

        The state is of a number that is a multiple of `turn`; `use` is below `turn`. One of `turn`
        and the ring's stages divides the other.
        """
        stages = self.ring.value.stages
        if stages % turn == 0:
            return self._replace(stage=self.stage + use)
        return self._replace(stage=Int32(use % stages), phase=self.phase ^ (use // stages & 1))


@cute.jit
def _advance(
    state: PipelineState, uses: cutlass.Constexpr, stages: cutlass.Constexpr
) -> PipelineState:
    stage, phase = state.stage + uses, state.phase
    if stage >= stages:
        stage -= stages
        phase = phase ^ 1
    return PipelineState(stage, phase, state.ring)


@dataclass(frozen=True)
class Ring:
    """The stages of a ring of buffers, each with the phase of its barriers.

    Attributes:
        stages: how many. first: the stage of use 0; the last use of a round has the one before.
        by_masks: `stages` is a power of two, and numbers are taken apart by shifts and masks, which
            stay in uniform registers.
    """

    stages: int
    first: int = 0
    by_masks: bool = False

    def start(self) -> PipelineState:
        """The state of use 0 of a ring whose first stage is 0."""
        return PipelineState(Int32(0), Int32(0), Static(self))

    def state(self, number: Any) -> PipelineState:
        """The stage of use `number`, not negative, and the phase that it completes."""
        stages = self.stages
        if self.by_masks:
            # Opaque, or each multiple of the stage would be shifted and masked for itself.
            stage = opaque(number & (stages - 1))
            return PipelineState(stage, number >> (stages.bit_length() - 1) & 1, Static(self))
        if stages == 1:
            return PipelineState(Int32(0), number & 1, Static(self))
        stage = (number + self.first if self.first else number) % stages
        return PipelineState(stage, (number // stages) & 1, Static(self))

    def state_of_part(self, part: Any, number: Any) -> PipelineState:
        """The state of use `number` of ring number `part` of several like this one, which lie in
        one barrier's stages one after the other."""
        stage = part * self.stages + number % self.stages
        return PipelineState(stage, (Int32(number) // self.stages) & 1, Static(self))


class Barriers(NamedTuple):
    """The mbarriers of one `plan.Barrier`. It is an event if it has one stage."""

    first: Any  # pointer to the mbarrier of stage 0, shared memory
    static: Static  # the plan.Barrier

    @property
    def planned(self) -> Barrier:
        """Their `plan.Barrier`."""
        return self.static.value

    @property
    def stages(self) -> int:
        return self.planned.stages

    def at(self, stage: Any = 0) -> Any:
        return self.first if isinstance(stage, int) and stage == 0 else self.first + stage

    def behind(self, number: Any) -> "Barriers":
        """The mbarriers `number` further on: those of a `plan.Barrier` like this one, where code
        says at run time which of several it means."""
        return Barriers(self.first + number, self.static)

    def state(self, number: Any) -> PipelineState:
        """The stage of use `number` and the phase that it completes."""
        return Ring(self.stages).state(number)

    def initialise(self) -> None:
        """One thread: initialise every stage, with the arrivals that the plan derives from who
        arrives."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.first + stage, self.planned.arrivals)

    def arrive(self, stage: Any = 0) -> None:
        """Arrive: whoever waits sees what this thread did before."""
        cute.arch.mbarrier_arrive(self.at(stage))

    def arrive_and_expect_tx(self, transaction_bytes: Any = None, stage: Any = 0) -> None:
        """Arrive, and announce bytes that asynchronous copies bring; the plan's if not given."""
        if transaction_bytes is None:
            transaction_bytes = self.planned.transaction_bytes
        cute.arch.mbarrier_arrive_and_expect_tx(self.at(stage), transaction_bytes)

    def expect_tx(self, transaction_bytes: Any, stage: Any = 0) -> None:
        """Announce bytes that asynchronous copies bring in the current phase, without an
        arrival."""
        cute.arch.mbarrier_expect_tx(self.at(stage), transaction_bytes)

    def arrive_at_peer(self, peer: Any, stage: Any = 0) -> None:
        """Arrive at the same barrier of another CTA of the cluster; `peer`: its rank."""
        arrive_at_peer(self.at(stage), peer)

    def arrive_at_peer_for_shared(self, peer: Any, stage: Any = 0) -> None:
        """Same as `arrive_at_peer`, for what this thread did to the shared memory of its own CTA
        only."""
        arrive_at_peer_for_shared(self.at(stage), peer)

    def arrive_at_peer_for_tmem(self, peer: Any, stage: Any = 0) -> None:
        """Same as `arrive_at_peer`, for what this thread did to tensor memory only."""
        arrive_at_peer_for_tmem(self.at(stage), peer)

    def wait(self, phase: Any, stage: Any = 0) -> None:
        """Wait until the phase of that parity is complete: an acquire, at cluster scope if the plan
        has arrivals or bytes from other CTAs."""
        planned = self.planned
        others = planned.from_peer or planned.bytes_from_peer or planned.ctas > 1
        if others or planned.arrives is Arrives.EVERY_CTA:
            wait_at_cluster_scope(self.at(stage), phase)
        else:
            cute.arch.mbarrier_wait(self.at(stage), phase)

    def wait_round(self, number: Any, stage: Any = 0) -> None:
        """Wait until one stage is complete for the time of that number, the first being 0.

        The stages are events of their own and not a ring. Number -1 lets pass.
        """
        self.wait(number & 1, stage)

    def wait_for(self, number: Any) -> None:
        """Wait until use `number` is complete."""
        at = self.state(number)
        self.wait(at.phase, 0 if self.stages == 1 else at.stage)


def arrive_at_peer(barrier: Any, peer: Any) -> None:
    """Arrive at the same barrier of another CTA of the cluster: a release at cluster scope."""
    cute.arch.mbarrier_arrive(barrier, peer, scope=nvvm.MemScopeKind.CLUSTER)


@cute.jit
def arrive_at_peer_for_shared(barrier: Any, peer: Any) -> None:
    """Arrive at the same barrier of another CTA of the cluster: a release at cluster scope of what
    this thread did to the shared memory of its own CTA, and of nothing else.

    PTX ISA, "fence", .sync_restrict::shared::cta. A release of everything becomes a
    MEMBAR.ALL.GPU, which waits for the thread's st.async and writes to device memory too.
    """
    ptx.run(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, {$r0}, {$r1}; "
        "fence.release.sync_restrict::shared::cta.cluster; "
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote]; }",
        Int32(barrier.toint()),
        Int32(peer),
    )


@cute.jit
def arrive_at_peer_for_tmem(barrier: Any, peer: Any) -> None:
    """Arrive at the same barrier of another CTA of the cluster, after a tcgen05.fence that orders
    this thread's loads and stores of tensor memory; the arrival itself orders nothing.

    PTX ISA, "tcgen05 memory consistency model", patterns with tcgen05.fence.
    """
    ptx.run(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, {$r0}, {$r1}; "
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote]; }",
        Int32(barrier.toint()),
        Int32(peer),
    )


@cute.jit
def wait_at_cluster_scope(
    barrier: Any, phase: Int32, order: cutlass.Constexpr[str] = "acquire"
) -> None:
    """Wait for a phase in which other CTAs take part: an acquire at cluster scope, or "relaxed" if
    a tcgen05.fence after it orders all that is waited for."""
    done = Int32(0)
    while done == 0:
        # No time limit: with one, ptxas makes two loops of it, one of them with a sleep.
        done = ptx.word(
            f"{{ .reg .pred p; mbarrier.try_wait.parity.{order}.cluster.shared::cta.b64 p, "
            "[{$r0}], {$r1}; selp.b32 {$w0}, 1, 0, p; }",
            barrier,
            Int32(phase),
        )


class RingProducer(NamedTuple):
    """The end of a ring that fills it: acquire a stage, fill it, commit."""

    full: Barriers
    empty: Barriers

    @property
    def stages(self) -> int:
        return self.full.stages

    def state(self, number: Any) -> PipelineState:
        return self.full.state(number)

    def acquire(self, state: PipelineState) -> None:
        """Wait for `empty`: the consumers have read what the stage held before. Then it may be
        written. The first round has nothing to wait for: a fresh barrier lets pass."""
        self.empty.wait(state.phase ^ 1, state.stage)

    def wait_until_read(self, number: Any) -> None:
        """Wait for `empty` of use `number`: the consumers have read it."""
        self.empty.wait_for(number)

    def commit(self, stage: Any) -> None:
        """Arrive at `full`: this thread's writes to the stage are done."""
        self.full.arrive(stage)

    def expect(self, stage: Any, transaction_bytes: Any = None) -> Any:
        """Arrive at `full` and announce bytes; returns the mbarrier that the copies name.

        Args:
            transaction_bytes: the plan's if not given.
        """
        self.full.arrive_and_expect_tx(transaction_bytes, stage)
        return self.full.at(stage)


@cute.jit
def acquire_reused(ring: RingProducer, state: PipelineState, number: Int32) -> None:
    """`acquire` for use `number`, without the wait in the first round: a branch is some twenty
    clocks shorter than a wait that a fresh barrier lets pass."""
    if number >= ring.stages:
        # The phase of the round before, from the number: fewer instructions than from state.phase.
        ring.empty.wait((number // ring.stages - 1) & 1, state.stage)


class RingConsumer(NamedTuple):
    """The end of a ring that reads it: wait for a stage, read it, release it."""

    full: Barriers
    empty: Barriers

    @property
    def stages(self) -> int:
        return self.full.stages

    def state(self, number: Any) -> PipelineState:
        return self.full.state(number)

    def wait(self, state: PipelineState) -> None:
        """Wait for `full`: the stage holds what the producer wrote in this round."""
        self.full.wait(state.phase, state.stage)

    def release(self, stage: Any) -> None:
        """Arrive at `empty`: this thread, and those for whom it arrives, have read the stage."""
        self.empty.arrive(stage)


@cute.jit
def next_stage(stage: Int32, stages: cutlass.Constexpr) -> Int32:
    """The stage after `stage`, for a ring whose phases are bulk groups and not mbarriers."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
    return stage


class PackedPhases(NamedTuple):
    """Phases of several events, and a running number above their bits: all in one register."""

    bits: Int32
    static: Static  # names of the events, whose phases start with 0

    def phase(self, event: str) -> Int32:
        """Parity with which to wait for the event's next completion."""
        return (self.bits >> self.static.value.index(event)) & 1

    def passed(self, event: str) -> "PackedPhases":
        """The phases after that completion."""
        return self._replace(bits=self.bits ^ (1 << self.static.value.index(event)))

    @property
    def number(self) -> Int32:
        return self.bits >> len(self.static.value)

    def next_number(self) -> "PackedPhases":
        return self._replace(bits=self.bits + (1 << len(self.static.value)))


@cute.jit
def arrive_warp(barriers: Barriers, stage: Any, thread: Int32) -> None:
    """Arrive once for the warp: whoever waits sees what its lanes did before."""
    cute.arch.sync_warp()
    if thread % WARP_SIZE == 0:
        barriers.arrive(stage)
