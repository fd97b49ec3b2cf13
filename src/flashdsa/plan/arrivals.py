"""Check of barriers against roles: whoever arrives exists, and as often as the count says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashdsa.hw import MAX_MBARRIER_COUNT, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.plan.lifetimes import BudgetError
from flashdsa.plan.roles import Arrives, Barrier, Role


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
        for what, number in (
            ("arrivals", barrier.arrivals),
            ("bytes", barrier.transaction_bytes),
        ):
            if number > MAX_MBARRIER_COUNT:
                raise BudgetError(
                    f"barriers: {barrier.name}: {number} {what} in a phase; "
                    f"at most {MAX_MBARRIER_COUNT}"
                )


def _check_producer(barrier: Barrier, role: Role, arrives: Arrives) -> None:
    of_group = (Arrives.WARPS_OF_ONE_GROUP, Arrives.THREADS_OF_ONE_GROUP)
    least = WARPGROUP_SIZE if arrives in of_group else WARP_SIZE
    if role.threads % WARP_SIZE or role.threads < least:
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
