"""A kernel's steady state: roles that wait for each other, and units that do one thing at a time.

Every role goes through its steps again and again. A step waits for other steps, then occupies its
unit (first come, first served); who waits for it hears of it `latency` clocks later. MMAs beside
other users of shared memory take longer: they get the rest, as measured on the H200.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache

TENSOR, DSMEM, BULK = "tensor", "dsmem", "bulk reads"
After = tuple[str, int]
"""A step and the number of units ago."""
PIECES = 4
UNITS, ROUNDS = 48, 6
"""Units simulated, of which the later half counts; rounds between period and port pressure."""
ITEM_BLOCKS, ITEMS = 9, 4
"""Blocks of an item whose ends are simulated, enough for a steady state; items."""


class Part(StrEnum):
    """The units of an item in which a step is done. An item of n blocks has n + 1 units: results of
    a block come a unit after its scores."""

    EVERY = "every unit"
    SCORES = "all but the last"
    RESULTS = "all but the first"
    FIRST = "the first"
    LAST = "the last"

    def has(self, unit: int, last: int) -> bool:
        alone = {Part.FIRST: unit == 0, Part.LAST: unit == last}
        return (alone | {Part.SCORES: unit < last, Part.RESULTS: unit > 0}).get(self, True)


@dataclass(frozen=True)
class Step:
    """One thing that a role does in every unit.

    Attributes:
        cycles: for which it occupies its unit: TENSOR, DSMEM, BULK, any other name, "" for none.
        port: clocks of shared memory that an MMA's operands take within them.
        after: steps that must be done. latency: from done to known to others.
        wait: the role waits until it is known.
        starves: (unit, share of its time that it loses while this step runs).
        part: the first or the last unit's alone are left out of the steady state.
    """

    role: str
    name: str
    cycles: float
    unit: str = ""
    port: float = 0
    after: tuple[After, ...] = ()
    latency: float = 0
    wait: bool = True
    starves: tuple[tuple[str, float], ...] = ()
    part: Part = Part.EVERY


@lru_cache(maxsize=512)
def period(steps: tuple[Step, ...], other_port: float = 0) -> float:
    """Count the clocks from one unit to the next; other_port: a unit's clocks of shared memory that
    are not MMA operands."""
    kept = [step for step in steps if step.part not in (Part.FIRST, Part.LAST)]
    names = {step.name for step in kept}
    steady = tuple(
        replace(step, after=tuple(one for one in step.after if one[0] in names)) for step in kept
    )
    found = _simulate(steady, 0)
    for _ in range(ROUNDS):
        found = _simulate(steady, min(other_port / found, 0.9))
    return found


def ends(steps: tuple[Step, ...], other_port: float = 0) -> float:
    """Count the clocks of an item beyond its blocks' periods, when one follows the other; 0 where
    no step belongs to the first or the last unit."""
    if all(step.part is Part.EVERY for step in steps):
        return 0.0
    steady = period(steps, other_port)
    whole = _simulate(steps, min(other_port / steady, 0.9), ITEM_BLOCKS)
    return whole - ITEM_BLOCKS * steady


def transfer(
    role: str,
    name: str,
    cycles: float,
    unit: str,
    *after: After,
    latency: float = 0,
    part: Part = Part.EVERY,
) -> list[Step]:
    """Cut a long transfer into pieces, so that starving its unit meanwhile is felt; the role waits
    for room, until the last piece is on its way."""
    last = Step(role, name, cycles / PIECES, unit, latency=latency, wait=False, part=part)
    names = [f"{name}, piece {piece}" for piece in range(PIECES - 1)]
    first, *others = (replace(last, name=one, latency=0, wait=True) for one in names)
    return [replace(first, after=after), *others, last]


@dataclass
class _Run:
    roles: dict[str, list[Step]]
    units: int
    at: dict[str, int] = field(default_factory=dict)
    free: dict[str, float] = field(default_factory=dict)
    known: dict[tuple[str, int], float] = field(default_factory=dict)
    role_free: dict[str, float] = field(default_factory=dict)


@lru_cache(maxsize=512)
def _simulate(steps: tuple[Step, ...], taken: float, blocks: int = 0) -> float:
    """Count the clocks of a unit, or of an item if its blocks are given."""
    roles: dict[str, list[Step]] = {}
    for step in steps:
        roles.setdefault(step.role, []).append(step)
    run = _Run(roles, ITEMS * (blocks + 1) if blocks else UNITS, dict.fromkeys(roles, 0))
    done = [0.0] * run.units
    while any(at < run.units * len(roles[role]) for role, at in run.at.items()):
        role, start = _next(run)
        unit, index = divmod(run.at[role], len(roles[role]))
        step = roles[role][index]
        run.at[role] += 1
        if blocks and not step.part.has(unit % (blocks + 1), blocks):
            # Who waits for it waits for the time before.
            run.known[step.name, unit] = run.known.get((step.name, unit - 1), 0.0)
            continue
        end = start + max(step.cycles, step.port / (1 - taken))
        if step.unit:
            run.free[step.unit] = end
        for name, share in step.starves:
            run.free[name] = max(run.free.get(name, 0.0), start) + share * (end - start)
        known = end + step.latency
        run.known[step.name, unit] = known
        run.role_free[role] = known if step.wait else start
        done[unit] = max(done[unit], known)
    if blocks:
        return (done[-1] - done[blocks]) / (ITEMS - 1)
    return (done[-1] - done[run.units // 2]) / (run.units - 1 - run.units // 2)


def _next(run: _Run) -> tuple[str, float]:
    """Choose the role that can go on first, of several the one furthest back, and its time."""
    best: tuple[float, int, str] | None = None
    for role, own in run.roles.items():
        unit, index = divmod(run.at[role], len(own))
        if unit >= run.units:
            continue
        step = own[index]
        awaited = [run.known.get((name, unit - ago)) for name, ago in step.after if unit >= ago]
        times = [time for time in awaited if time is not None]
        if len(times) < len(awaited):
            continue
        start = max([run.role_free.get(role, 0.0), run.free.get(step.unit, 0.0), *times])
        if best is None or (start, unit) < best[:2]:
            best = start, unit, role
    if best is None:
        raise ValueError("every role waits for another one: the timeline has a cycle")
    return best[2], best[0]
