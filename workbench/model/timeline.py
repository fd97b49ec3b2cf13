"""A kernel's steady state: roles that wait for each other, and units that do one thing at a time.

Every role goes through its steps again and again. A step waits for other steps, then occupies its
units (first come, first served) and is done when the last of them is; who waits for it hears of it
`latency` clocks later. MMAs beside other users of shared memory take longer: they get what
the others leave, as measured on the H200, where MMAs come first but the port's time adds up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache

from workbench.model.machine import GpuModel
from workbench.model.traffic import Matmul

TENSOR, DSMEM, BULK, RED = "tensor", "dsmem", "bulk reads", "red"
SATURATED = 0.9
"""Of shared memory's time: MMAs that take more starve whoever else reads it for the network."""
PIECES = 4
UNITS = 48
"""Units simulated; the period is that of the later half."""
ROUNDS = 6
"""Of the fixed point between period and port pressure."""
ITEM_BLOCKS = 9
"""Of an item whose ends are simulated: the steady state is reached between them."""
ITEMS = 4


class Part(StrEnum):
    """In which units of an item a step is done. An item of n blocks has n + 1 units: results of a
    block come a unit behind its scores."""

    EVERY = "every unit"
    SCORES = "all but the last"
    RESULTS = "all but the first"
    FIRST = "the first"
    LAST = "the last"

    def has(self, place: int, last: int) -> bool:
        """Whether the unit of that place is one of them; `last`: of the last unit."""
        return {
            Part.EVERY: True,
            Part.SCORES: place < last,
            Part.RESULTS: place > 0,
            Part.FIRST: place == 0,
            Part.LAST: place == last,
        }[self]


@dataclass(frozen=True)
class Step:
    """One thing that a role does in every unit.

    Attributes:
        cycles: for which it occupies its unit: TENSOR, DSMEM, BULK, any other name; "" is none but
            the role itself.
        port: clocks of shared memory that an MMA's operands take within them.
        after: (step, how many units ago), all of which must be done.
        starves: (unit, share of its time that it loses while this step runs).
        latency: from done to known to others. wait: whether the role waits until it is known.
        part: of an item's units those that have it; what the first or the last one alone has is
            left out of the steady state.
    """

    role: str
    name: str
    cycles: float
    unit: str = ""
    port: float = 0
    after: tuple[tuple[str, int], ...] = ()
    latency: float = 0
    wait: bool = True
    starves: tuple[tuple[str, float], ...] = ()
    part: Part = Part.EVERY


@dataclass
class _Run:
    free: dict[str, float] = field(default_factory=dict)
    known: dict[tuple[str, int], float] = field(default_factory=dict)
    role_free: dict[str, float] = field(default_factory=dict)


@lru_cache(maxsize=512)
def period(steps: tuple[Step, ...], other_port: float = 0) -> float:
    """Clocks from one unit to the next.

    Args:
        other_port: clocks of shared memory a unit that are not MMA operands.
    """
    steady = _between_ends(steps)
    found = _simulate(steady, 0)
    for _ in range(ROUNDS):
        found = _simulate(steady, min(other_port / found, 0.9))
    return found


def _between_ends(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Without what the first or the last unit of an item alone has, and without waits for it."""
    kept = [step for step in steps if step.part not in (Part.FIRST, Part.LAST)]
    names = {step.name for step in kept}
    return tuple(
        replace(step, after=tuple(one for one in step.after if one[0] in names)) for step in kept
    )


def ends(steps: tuple[Step, ...], other_port: float = 0) -> float:
    """Clocks that an item takes beyond its blocks' periods, when one follows the other; 0 where no
    step belongs to the first or the last unit. Arguments as of `period`."""
    if all(step.part is Part.EVERY for step in steps):
        return 0.0
    steady = period(steps, other_port)
    whole = _simulate(steps, min(other_port / steady, 0.9), ITEM_BLOCKS)
    return whole - ITEM_BLOCKS * steady


def mma_step(
    machine: GpuModel,
    role: str,
    name: str,
    matmuls: tuple[Matmul, ...],
    *after: tuple[str, int],
    wait: bool = True,
) -> Step:
    """A role's MMAs, one after the other."""
    cycles = sum(matmul.cycles(machine) for matmul in matmuls)
    port = sum(matmul.port_cycles(machine) for matmul in matmuls)
    latency = machine.mma_latency.value
    lost: tuple[tuple[str, float], ...] = ()
    if port > SATURATED * cycles:
        stores = 1 - machine.dsmem_starved.value  # of threads: they leave the SM the same way
        lost = ((DSMEM, stores), (RED, stores), (BULK, 1 - machine.bulk_starved.value))
    return Step(role, name, cycles, TENSOR, port, after, latency, wait, lost)


def transfer(
    role: str,
    name: str,
    cycles: float,
    unit: str,
    *after: tuple[str, int],
    latency: float = 0,
) -> tuple[Step, ...]:
    """A long transfer in pieces, so that what starves its unit meanwhile is felt.

    Args:
        role: whose threads issue it: they wait for room, until the last piece is on its way.
    """
    pieces = [
        Step(role, f"{name}, piece {piece}", cycles / PIECES, unit, 0, after if piece == 0 else ())
        for piece in range(PIECES - 1)
    ]
    return (*pieces, Step(role, name, cycles / PIECES, unit, 0, (), latency, wait=False))


def slowed(step: Step, taken: float) -> float:
    """Clocks of a step when others take that share of shared memory."""
    return max(step.cycles, step.port / (1 - taken))


def _simulate(steps: tuple[Step, ...], taken: float, blocks: int = 0) -> float:
    """Clocks of a unit; of an item of so many blocks, if they are given."""
    names = [step.name for step in steps]
    if len(set(names)) != len(names):
        raise ValueError(f"two steps of one name: {names}")
    roles: dict[str, list[Step]] = {}
    for step in steps:
        roles.setdefault(step.role, []).append(step)
    place = dict.fromkeys(roles, 0)
    run = _Run()
    units = ITEMS * (blocks + 1) if blocks else UNITS
    done: list[float] = [0.0] * units
    while any(at < units * len(roles[role]) for role, at in place.items()):
        role, start = _next(roles, place, run, units)
        unit, index = divmod(place[role], len(roles[role]))
        step = roles[role][index]
        if blocks and not step.part.has(unit % (blocks + 1), blocks):
            # Who waits for it waits for the time before.
            run.known[step.name, unit] = run.known.get((step.name, unit - 1), 0.0)
            place[role] += 1
            continue
        end = start + slowed(step, taken)
        if step.unit:
            run.free[step.unit] = end
        for unit_name, share in step.starves:
            lost = share * (end - start)
            run.free[unit_name] = max(run.free.get(unit_name, 0.0), start) + lost
        known = end + step.latency
        run.known[step.name, unit] = known
        run.role_free[role] = known if step.wait else start
        place[role] += 1
        done[unit] = max(done[unit], known)
    if blocks:
        return (done[-1] - done[blocks]) / (ITEMS - 1)
    return (done[-1] - done[units // 2]) / (units - 1 - units // 2)


def _next(
    roles: Mapping[str, list[Step]], place: Mapping[str, int], run: _Run, units: int
) -> tuple[str, float]:
    """The role that can go on first, of several the one furthest behind, and when."""
    best: tuple[float, int, str] | None = None
    for role, own in roles.items():
        unit, index = divmod(place[role], len(own))
        if unit >= units:
            continue
        step = own[index]
        awaited = [run.known.get((name, unit - ago)) for name, ago in step.after if unit >= ago]
        if None in awaited:
            continue
        times = [time for time in awaited if time is not None]
        start = max([run.role_free.get(role, 0.0), run.free.get(step.unit, 0.0), *times])
        if best is None or (start, unit) < best[:2]:
            best = start, unit, role
    if best is None:
        raise ValueError("every role waits for another one: the timeline has a cycle")
    return best[2], best[0]
