"""Grade of a role's register use, and a sentence on what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from flashdsa.hw import MAX_REGISTERS, REGISTER_STEP

TIGHT_SHARE = 0.9
"""Share of the budget: if more registers are live, one more variable may spill."""
LARGEST_BUDGET = MAX_REGISTERS // REGISTER_STEP * REGISTER_STEP
"""The largest setmaxnreg: a multiple of `REGISTER_STEP`."""
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


class Option(NamedTuple):
    """A change, and about how many registers of a thread it frees or adds."""

    registers: int
    change: str


class Room(NamedTuple):
    """Registers of the CTA that a role could have.

    Attributes:
        free: that no role has. spare: role -> registers of a thread that it does not need, of as
            many threads. threads: of the role. by_setmaxnreg: whether its budget is.
    """

    free: int | None
    spare: Mapping[str, int]
    threads: int | None
    by_setmaxnreg: bool

    def more(self, budget: int) -> int:
        """Registers of a thread by which the budget can grow, as no role has them."""
        if not self.by_setmaxnreg or not self.threads:
            return 0
        free = (self.free or 0) // (self.threads * REGISTER_STEP) * REGISTER_STEP
        return max(0, min(free, LARGEST_BUDGET - budget))

    def options(self, budget: int) -> Iterator[Option]:
        if not self.by_setmaxnreg or not self.threads:
            return
        if more := self.more(budget):
            yield Option(more, f"raise setmaxnreg to {budget + more}, which the CTA has free")
        for role, spare in self.spare.items():
            given = min(spare // REGISTER_STEP * REGISTER_STEP, LARGEST_BUDGET - budget)
            if given > 0:
                yield Option(given, f"take {given} registers from {role}, which has {spare} left")


def advise(
    grade: Grade,
    live: int,
    budget: int,
    *,
    stack_bytes: int,
    holders: Sequence[tuple[str, str, int]],
    room: Room,
) -> str:
    """Say what to change; where a role spills, each change that helps, the most effective first.

    Args:
        holders: ("made" or "needed", line, registers of the peak), the most first; a line is known.
    """
    verbs = {"made": "makes", "needed": "needs"}
    line = "".join(
        f"; {place} {verbs[how]} {count} of the {live}" for how, place, count in holders[:1]
    )
    if grade is Grade.SPILLS:
        slots = -(-stack_bytes // 4)
        need = (
            f"{slots} values of a thread lie in local memory" if slots else "local memory is used"
        )
        options = sorted((*room.options(budget), *_fewer_values(holders)), reverse=True)
        if not options:
            return f"{need}: hold less at once (smaller tile, fewer values loaded together)"
        listed = "; ".join(f"{option.change} (about {option.registers})" for option in options)
        return f"{need}; what helps, by its effect: {listed}"
    if grade is Grade.TIGHT:
        if more := room.more(budget):
            return f"{budget - live} left: setmaxnreg could be {budget + more}{line}"
        return f"{budget - live} left: nothing to change now, but add no variable{line}"
    spare = (budget - live) // REGISTER_STEP
    if room.by_setmaxnreg and spare > SPARE_STEPS:
        return (
            f"{budget - live} left: setmaxnreg {least_budget(live)} would do, "
            "the rest could go to other roles"
        )
    return f"{budget - live} left: nothing to change"


def least_budget(live: int) -> int:
    """The smallest setmaxnreg with which a role that holds `live` is not tight."""
    return max(24, -(-round(live / TIGHT_SHARE) // REGISTER_STEP) * REGISTER_STEP)


def _fewer_values(holders: Sequence[tuple[str, str, int]]) -> Iterator[Option]:
    """Changes of the lines that hold most: a smaller tile, shorter lives."""
    for how, place, count in holders:
        if how == "made" and count > 1:
            yield Option(count // 2, f"a tile half as large at {place}, which makes {count}")
            break
    for how, place, count in holders:
        if how == "needed":
            yield Option(count, f"make the {count} values that {place} needs just before it")
            break
