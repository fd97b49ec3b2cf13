"""Roles, and the barriers between them: arrival counts follow from who arrives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from flashdsa import hw
from flashdsa.plan.smem import BudgetError


class Arrives(StrEnum):
    """Who of a role arrives in each phase of a barrier."""

    ONE_THREAD = "one thread"
    EVERY_THREAD = "every thread"
    EVERY_WARP = "a lane of each warp"
    EVERY_LANE_OF_ONE_WARP = "the lanes of one warp"
    COMMIT = "tcgen05.commit"
    WARPS_OF_ONE_GROUP = "a lane of each warp of one warpgroup"
    THREADS_OF_ONE_GROUP = "every thread of one warpgroup"
    EVERY_CTA = "a thread of each CTA of the largest cluster"


@dataclass(frozen=True)
class Role:
    """Warps of a CTA that run the same code.

    Attributes:
        registers: at most, of each thread. does: for people.
    """

    name: str
    threads: int
    registers: int
    does: str

    @property
    def warps(self) -> int:
        return self.threads // hw.WARP_SIZE


@dataclass(frozen=True)
class Barrier:
    """mbarriers, one a stage, of which one role waits for another.

    Attributes:
        name: of its region in shared memory. stages: how many.
        producer: the role that arrives. arrives: who of it. consumer: the role that waits.
        transaction_bytes: that asynchronous copies bring in a phase, too.
        completed: what a completed phase says.
        also_produced_by: another role that arrives. also_arrives: who of it; None: as of the first.
        others: further roles that arrive, as the first.
        also_awaited_by: another role that waits.
        from_peer: the producer is the role of the cluster's other CTA. bytes_from_peer: the
            producer arrives in its own CTA, and the other one writes the bytes.
        ctas: of the cluster in which the producers arrive, all at the barrier of the first one.
    """

    name: str
    stages: int
    producer: Role
    arrives: Arrives
    consumer: Role
    transaction_bytes: int
    completed: str
    also_produced_by: Role | None = None
    also_awaited_by: tuple[Role, ...] = ()
    from_peer: bool = False
    bytes_from_peer: bool = False
    also_arrives: Arrives | None = None
    ctas: int = 1
    others: tuple[Role, ...] = ()

    @property
    def arrivals(self) -> int:
        """Arrivals that complete a phase: the count that the barrier is initialised with."""
        return self.ctas * sum(_arrivals_of(role, arrives) for role, arrives in self.arriving)

    @property
    def arriving(self) -> tuple[tuple[Role, Arrives], ...]:
        """The roles that arrive, and who of each."""
        every = [(self.producer, self.arrives)]
        if self.also_produced_by is not None:
            every.append((self.also_produced_by, self.also_arrives or self.arrives))
        return (*every, *((role, self.arrives) for role in self.others))


def _arrivals_of(role: Role, arrives: Arrives) -> int:
    return {
        Arrives.ONE_THREAD: 1,
        Arrives.COMMIT: 1,
        Arrives.EVERY_THREAD: role.threads,
        Arrives.EVERY_WARP: role.warps,
        Arrives.EVERY_LANE_OF_ONE_WARP: hw.WARP_SIZE,
        Arrives.WARPS_OF_ONE_GROUP: hw.WARPGROUP_SIZE // hw.WARP_SIZE,
        Arrives.THREADS_OF_ONE_GROUP: hw.WARPGROUP_SIZE,
        Arrives.EVERY_CTA: hw.MAX_CLUSTER_SIZE,
    }[arrives]


def check_registers(roles: Sequence[Role], registers: int) -> None:
    """Hold the roles' register counts against what setmaxnreg takes and the CTA has.

    Raises:
        BudgetError: names the role.
    """
    for role in roles:
        if role.registers % hw.REGISTER_STEP or not 24 <= role.registers <= hw.MAX_REGISTERS:
            raise BudgetError(
                f"registers: {role.name} has {role.registers} a thread; setmaxnreg takes "
                f"multiples of {hw.REGISTER_STEP} from 24 to {hw.MAX_REGISTERS}"
            )
    total = sum(role.threads * role.registers for role in roles)
    if total > registers:
        largest = max(roles, key=lambda role: role.threads * role.registers)
        table = "; ".join(f"{role.name} {role.threads} x {role.registers}" for role in roles)
        raise BudgetError(
            f"registers: {total} planned, {registers} available; {largest.name} takes most. {table}"
        )


def registers_each(threads: int, registers: int) -> int:
    """Registers that each of `threads` can have at launch, of an SM's `registers`.

    Warps are spread over the SM's partitions, each with its share of the registers: of 17 warps 5
    are in one partition, and their threads get 65,536 / 4 / (5 * 32) in steps of 8, which is 96
    and not 65,536 / 544 = 120. ptxas derives the same cap from .reqntid.
    """
    warps = -(-threads // hw.WARP_SIZE)
    of_one = -(-warps // hw.SM_PARTITIONS)
    share = registers // hw.SM_PARTITIONS // (of_one * hw.WARP_SIZE)
    return min(share // hw.REGISTER_STEP * hw.REGISTER_STEP, hw.MAX_REGISTERS)


def check_barriers(barriers: Sequence[Barrier], roles: Sequence[Role]) -> None:
    """Hold every barrier against the roles of its kernel.

    Raises:
        BudgetError: names the barrier.
    """
    for barrier in barriers:
        producers = [role for role, _ in barrier.arriving]
        for role in (*producers, barrier.consumer, *barrier.also_awaited_by):
            if role not in roles:
                raise BudgetError(f"barriers: {barrier.name}: the kernel has no role {role}")
        for role, arrives in barrier.arriving:
            _check_producer(barrier, role, arrives)
        for what, number in (("arrivals", barrier.arrivals), ("bytes", barrier.transaction_bytes)):
            if number > hw.MAX_MBARRIER_COUNT:
                raise BudgetError(
                    f"barriers: {barrier.name}: {number} {what} in a phase; "
                    f"at most {hw.MAX_MBARRIER_COUNT}"
                )


def _check_producer(barrier: Barrier, role: Role, arrives: Arrives) -> None:
    of_group = (Arrives.WARPS_OF_ONE_GROUP, Arrives.THREADS_OF_ONE_GROUP)
    least = hw.WARPGROUP_SIZE if arrives in of_group else hw.WARP_SIZE
    if role.threads % hw.WARP_SIZE or role.threads < least:
        raise BudgetError(
            f"barriers: {barrier.name}: {arrives} of {role.name} cannot arrive: "
            f"it has {role.threads} threads"
        )
    if arrives is Arrives.COMMIT and barrier.transaction_bytes:
        raise BudgetError(
            f"barriers: {barrier.name}: a commit of {role.name} announces no bytes, "
            f"but {barrier.transaction_bytes} are to come"
        )


def check_arrivals(barriers: Sequence[Barrier], counts: Mapping[str, Sequence[int]]) -> None:
    """Hold the counts that barriers are initialised with against who arrives.

    Args:
        counts: for each barrier one a stage.

    Raises:
        BudgetError: names the barrier.
    """
    for barrier in barriers:
        given = list(counts.get(barrier.name, ()))
        if given != [barrier.arrivals] * barrier.stages:
            producers = [role.name for role, _ in barrier.arriving]
            raise BudgetError(
                f"barriers: {barrier.name}: initialised with {given}; {barrier.arrives} of "
                f"{' and '.join(producers)}: {barrier.arrivals}, {barrier.stages} times"
            )
    unknown = sorted(counts.keys() - {barrier.name for barrier in barriers})
    if unknown:
        raise BudgetError(f"barriers: {unknown[0]}: initialised, but not planned")
