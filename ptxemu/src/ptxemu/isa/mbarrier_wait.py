"""Waiting for phases of mbarriers (PTX ISA, "mbarrier.test_wait, mbarrier.try_wait")."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ptxemu.engines.mbarrier import Mbarrier, Mbarriers
from ptxemu.isa.mbarrier import Keys, Target, phase_of_state, phases_of_states, take_scope
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.lane_group import Blocked
from ptxemu.machine.lanes import FULL, NOBODY, Mask
from ptxemu.machine.operands import in_lane, reader, writer
from ptxemu.machine.state import Warp
from ptxemu.syntax.ast import Instruction, Operand

_last_seen: EngineState[Warp, dict[tuple[int, int], tuple[Mbarrier, int]]] = EngineState(
    lambda warp: {}
)
"""The object that a warp last saw and its latest phase, by the object's CTA and offset."""

_PARITY = np.array(1, dtype=np.uint32)


@dataclass(slots=True, eq=False)
class _Wait:
    """The lanes that wait for one phase of one object."""

    lanes: Mask
    barriers: Mbarriers
    offset: int
    parity: int | None
    """Parity of the awaited phase; None where a state names the phase itself."""
    phase: int

    def is_complete(self) -> bool:
        """Whether the phase has completed."""
        if self.parity is not None:
            return self.barriers.has_completed(self.offset, self.parity)
        return self.barriers.at(self.offset).phase > self.phase

    def matched(self) -> int:
        """The completed phase that answers the wait; -1 for that before the first."""
        return self.barriers.at(self.offset).phase - 1 if self.parity is not None else self.phase

    def describe(self) -> str:
        """Return a text for the deadlock report."""
        wanted = f"parity {self.parity}" if self.parity is not None else f"phase {self.phase}"
        return f"mbarrier wait for {wanted}: {self.barriers.describe(self.offset)}"


@visible("mbarrier.test_wait", "mbarrier.try_wait")
def wait(instruction: Instruction, modifiers: Modifiers) -> Step:
    """p = whether the phase has completed. test_wait answers at once; try_wait blocks until it is
    true, or gives up when nothing else can go on (its time limit)."""
    name = instruction.modifiers[1]
    by_parity = modifiers.flag("parity")
    scope = take_scope(modifiers, "acquire")
    if scope == "cta" and scope not in instruction.modifiers:
        scope = ""
    destination, address, operand, *hint = instruction.operands
    target = Target(instruction, address, modifiers)
    modifiers.one_of("b64")
    if target.is_cluster:
        unsupported(instruction, "a wait is for an object in .shared::cta")
    if hint and name == "test_wait":
        unsupported(instruction, "test_wait has no time limit")
    write = writer(destination)
    keys = _parities(operand) if by_parity else _phases(operand)

    def waits(warp: Warp, mask: Mask) -> list[_Wait]:
        found = []
        for lanes, barriers, offset, key in target.groups(warp, mask, keys):
            if offset not in barriers.by_offset:
                with target.naming(warp):
                    barriers.at(offset)
            found.append(_Wait(lanes, barriers, offset, key if by_parity else None, key))
        return found

    def settle(warp: Warp, wanted: list[_Wait]) -> None:
        for one in wanted:
            held = one.is_complete()
            write(warp, FULL if held else NOBODY, one.lanes)
            if held:
                _succeeded(warp, one, scope, target)

    def step(warp: Warp, mask: Mask) -> Blocked | None:
        wanted = waits(warp, mask)
        missing = [one for one in wanted if not one.is_complete()]
        if not missing or name == "test_wait":
            settle(warp, wanted)
            return None
        only = missing[0]
        return Blocked(
            only.is_complete
            if len(missing) == 1
            else lambda: any(m.is_complete() for m in missing),
            lambda: "; ".join(one.describe() for one in missing),
            lambda: settle(warp, wanted),
            lambda: settle(warp, wanted),
            tuple(one.barriers.at(one.offset).phase_changed for one in missing),
        )

    return step


def _parities(operand: Operand) -> Keys:
    read, in_one = reader(operand, "u32"), in_lane(operand, "u32")
    return Keys(lambda warp: read(warp) & _PARITY, lambda warp, lane: in_one(warp, lane) & 1)


def _phases(operand: Operand) -> Keys:
    read, in_one = reader(operand, "u64"), in_lane(operand, "u64")
    return Keys(
        lambda warp: phases_of_states(read(warp)),
        lambda warp, lane: phase_of_state(in_one(warp, lane)),
    )


def _succeeded(warp: Warp, wait: _Wait, scope: str, target: Target) -> None:
    """Learn what the phases up to the matched one released; look for phases that were missed.

    Arrivals are read-modify-writes of one object, so whoever sees a phase complete also knows what
    earlier phases released.
    """
    barriers, offset, machine = wait.barriers, wait.offset, warp.cta.machine
    matched, barrier = wait.matched(), barriers.at(offset)
    seen = _last_seen(warp)
    key = (barriers.cta.index, offset)
    last_barrier, last = seen.get(key, (None, None))
    if last_barrier is not barrier:
        last = None
    seen[key] = (barrier, matched if last is None else max(matched, last))
    if machine.observer is None:
        return
    owner = barriers.cta.index
    # A wait of the same parity as the last one is for the same phase or the next but one.
    if wait.parity is not None and last is not None:
        latest_meant = last + 2 if (last & 1) == wait.parity else last + 1
        if matched >= latest_meant + 2:
            machine.observer.phases_missed(warp, owner, offset, last, matched, target.instruction)
    machine.observer.phase_seen(warp, owner, offset, matched, target.instruction)
    for phase in range(0 if last is None else last + 1, matched + 1):
        machine.observer.acquired(warp, barriers.token(offset, phase), scope)
    if last is not None and last == matched:
        machine.observer.acquired(warp, barriers.token(offset, matched), scope)
