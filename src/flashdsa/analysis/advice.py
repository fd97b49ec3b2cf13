"""Grade of a role's register use, and one sentence on what to change."""

from __future__ import annotations

from enum import StrEnum

from flashdsa.hw import MAX_REGISTERS, REGISTER_STEP

TIGHT_SHARE = 0.9
"""Share of the budget: if more registers are live, one more variable may spill."""
SPARE_STEPS = 3
"""Register steps that a role may leave unused before the report offers them to others."""


class Grade(StrEnum):
    """Grades from good to bad."""

    OK = "ok"
    TIGHT = "tight"
    SPILLS = "spills"


def grade_of(live: int, budget: int, local_accesses: int) -> Grade:
    """The risk of a role."""
    if local_accesses:
        return Grade.SPILLS
    return Grade.TIGHT if live > TIGHT_SHARE * budget else Grade.OK


def advise(
    grade: Grade,
    live: int,
    budget: int,
    *,
    stack_bytes: int,
    most: str,
    free: int | None,
    threads: int | None,
    by_setmaxnreg: bool,
) -> str:
    """Say what to change.

    Args:
        most: the line that holds most of the peak; "": not known. free: registers of the CTA that
            no role has. by_setmaxnreg: whether the budget is.
    """
    line = f"; {most}" if most else ""
    steps = free // (threads * REGISTER_STEP) if free and threads else 0
    more = min(budget + steps * REGISTER_STEP, MAX_REGISTERS // REGISTER_STEP * REGISTER_STEP)
    if grade is Grade.SPILLS:
        slots = -(-stack_bytes // 4)
        need = (
            f"{slots} values of a thread lie in local memory" if slots else "local memory is used"
        )
        if by_setmaxnreg and more > budget:
            return f"{need}: raise setmaxnreg to {more}, which the CTA has free{line}"
        where = " or take registers from another role" if by_setmaxnreg else ""
        return (
            f"{need}: hold less at once (smaller tile, fewer values loaded together){where}{line}"
        )
    if grade is Grade.TIGHT:
        if by_setmaxnreg and more > budget:
            return f"{budget - live} left: setmaxnreg could be {more}{line}"
        return f"{budget - live} left: nothing to change now, but add no variable{line}"
    spare = (budget - live) // REGISTER_STEP
    if by_setmaxnreg and spare > SPARE_STEPS:
        least = max(24, -(-round(live / TIGHT_SHARE) // REGISTER_STEP) * REGISTER_STEP)
        return (
            f"{budget - live} left: setmaxnreg {least} would do, the rest could go to other roles"
        )
    return f"{budget - live} left: nothing to change"
