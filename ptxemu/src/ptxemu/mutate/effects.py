"""Synchronisation that changed what agents know in a run; all other is redundant in that run.

Only knowledge of what happened counts: an access to memory, an initialisation of an mbarrier, an
arrival. An instruction could have been left out if the agent would know the same of those without
it at its next action (the agent learns them again until then): happens-before of this run is the
same without it, by induction over the run. The measure is taken on the original, whatever the
check says of the mutant.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ptxemu.check import vector_clock
from ptxemu.check.actors import OperationActor
from ptxemu.check.checker import Checker
from ptxemu.check.state import Actor, WarpActor
from ptxemu.check.vector_clock import GENERIC, TCGEN05
from ptxemu.check.wgmma_fences import WgmmaFences
from ptxemu.events import Access, Agent, Fence, FenceKind, Space
from ptxemu.mutate.groups import Groups
from ptxemu.syntax.ast import Instruction, Register

# The tcgen05 fences of a run that ordered something that the fences around them do not.


class Tcgen05Fences:
    """Follows all warps; tells of fences (pc) that had an effect.

    An ::after_thread_sync has one if its warp has learnt something since the fence before, and uses
    TMEM before the next fence, which would order that too. A ::before_thread_sync has one if there
    are tcgen05 operations, the warp's own or known to it, that the one before did not hand on.
    """

    def __init__(self) -> None:
        self._unused: dict[int, int] = {}
        """The last ::after_thread_sync of each warp that has not used TMEM since then."""
        self._fresh: set[int] = set()
        """Warps that have started operations since their last ::before_thread_sync."""
        self._issuers: dict[int, set[int]] = {}
        """Warps (their columns) that have started operations, by cluster."""

    def issued(self, agent_id: int, warp: WarpActor) -> int | None:
        """A warp has started an operation; the fence that orders it, if it is the first use."""
        self._fresh.add(agent_id)
        self._issuers.setdefault(warp.home, set()).add(warp.slot)
        return self.used(agent_id)

    def used(self, agent_id: int) -> int | None:
        """A warp has used TMEM itself (tcgen05.dealloc)."""
        return self._unused.pop(agent_id, None)

    def after(self, agent_id: int, pc: int, has_learnt: bool) -> None:
        """tcgen05.fence::after_thread_sync: whether it has an effect, the next use tells."""
        self._unused.pop(agent_id, None)
        if has_learnt:
            self._unused[agent_id] = pc

    def has_effect_before(self, agent_id: int, warp: WarpActor, tcgen05: int) -> bool:
        """Whether a tcgen05.fence::before_thread_sync, which comes now, has an effect.

        Args:
            tcgen05: which operations of the cluster are tcgen05 instructions, as bits.
        """
        is_fresh = agent_id in self._fresh
        self._fresh.discard(agent_id)
        mine = warp.know.parts[warp.home]
        if is_fresh or mine.done & tcgen05 & ~mine.tcgen05:
            return True
        others = [slot for slot in self._issuers.get(warp.home, ()) if slot != warp.slot]
        return bool((mine.clocks[GENERIC, others] > mine.clocks[TCGEN05, others]).any())


_ARRIVALS = vector_clock.ROWS
"""Row of `_happened` for arrivals; the others are those of the clocks."""
_WAITS = (("mbarrier", "try_wait"), ("mbarrier", "test_wait"))
_ALL_ROWS = (
    vector_clock.GENERIC,
    vector_clock.TENSORMAP,
    vector_clock.TENSORMAP_RELEASED,
    vector_clock.TCGEN05,
    vector_clock.ARRIVED,
)


class Effects(NamedTuple):
    """Effects of the instructions of one or more runs, by pc."""

    executed: frozenset[int] = frozenset()
    of_accesses: frozenset[int] = frozenset()
    """Those that ordered accesses to memory that were not ordered before."""
    of_arrivals: frozenset[int] = frozenset()
    """Those that ordered arrivals that were not ordered before."""

    of_groups: frozenset[tuple[int, str]] = frozenset()
    """Changes of commits and waits of groups that would have had an effect: pc and mutation."""

    def united(self, other: Effects) -> Effects:
        """Return the effects of both runs."""
        return Effects(
            self.executed | other.executed,
            self.of_accesses | other.of_accesses,
            self.of_arrivals | other.of_arrivals,
            self.of_groups | other.of_groups,
        )

    def is_idle_change(self, pc: int, mutation: str) -> bool:
        """Whether a change of a commit or wait of groups would have had no effect."""
        return pc in self.executed and (pc, mutation) not in self.of_groups

    def is_idle(self, pc: int, *, waits: bool) -> bool:
        """Whether the instruction was executed and never ordered anything.

        Args:
            waits: without it an agent would run ahead, so that arrivals count as well: all that
                it waits for had happened before by other ways.
        """
        effective = pc in self.of_accesses or (waits and pc in self.of_arrivals)
        return pc in self.executed and not effective


@dataclass(slots=True)
class _Learnt:
    """An agent's knowledge at its last action, and what it has acquired since, with the sources."""

    base: vector_clock.Knowledge
    lessons: list[tuple[tuple[int, ...], vector_clock.Knowledge]] = field(default_factory=list)
    """The waits (pc, and those of the releases) with what each brought."""


class EffectRecorder(Checker):
    """A checker that also notes which instructions had an effect."""

    def __init__(self, kernel: str) -> None:
        super().__init__(kernel)
        self._executed: set[int] = set()
        self._ordered: tuple[set[int], set[int]] = (set(), set())
        """Instructions with an effect, on accesses and on arrivals."""
        self._happened: dict[tuple[int, int], list[list[int]]] = {}
        """Clocks at which something happened, by cluster and slot of a warp, for each row."""
        self._generic_operations: dict[int, int] = {}
        """Bits of the operations of the generic proxy, by cluster."""
        self._releasers: dict[Hashable, set[int]] = {}
        self._open_waits: dict[int, Instruction] = {}
        """The last mbarrier.try_wait of each agent, until it succeeds."""
        self._without: dict[int, WgmmaFences] = {}
        """The rule of wgmma.fence without one wgmma.fence, by the pc of that fence."""
        self._tcgen05_fences = Tcgen05Fences()
        self._groups: Groups | None = None
        self._learnt: dict[int, _Learnt] = {}
        """Knowledge that each agent has learnt since it last did something."""

    @property
    def effects(self) -> Effects:
        """Effects of the run so far."""
        accesses, arrivals = map(frozenset, self._ordered)
        changes = frozenset() if self._groups is None else frozenset(self._groups.effective)
        return Effects(frozenset(self._executed), accesses, arrivals, changes)

    def cta_started(self, cta: Any) -> None:
        """Find the wgmma.fence and the groups that there are."""
        super().cta_started(cta)
        if self._groups is None:
            self._groups = Groups(cta.warps[0].program.function)
        if self._wgmma is not None and not self._without:
            program = cta.warps[0].program
            for instruction in program.function.instructions:
                if instruction.modifiers[:2] == ("wgmma", "fence"):
                    self._without[instruction.pc] = WgmmaFences(program)

    def block_executed(self, agent: Agent, first_pc: int, count: int, lanes: int) -> None:
        """Registers may be used."""
        super().block_executed(agent, first_pc, count, lanes)
        self._touch_registers(agent, first_pc, count)
        for fences in self._without.values():
            fences.executed(agent.agent_id, first_pc, count)

    def _touch_registers(self, agent: Agent, first_pc: int, count: int) -> None:
        groups, wgmma = self._groups, self._wgmma
        if groups is not None and wgmma is not None and groups.is_pending(agent.agent_id):
            groups.touched(agent.agent_id, wgmma.registers_used(first_pc, count))

    def instruction_executed(self, agent: Agent, instruction: Instruction, lanes: int) -> None:
        """Remember it; a wait that was given up held its warp up: something else waits instead."""
        wait = self._open_waits.pop(agent.agent_id, None)
        if wait is not None and wait.pc != instruction.pc and not _succeeded(agent, wait):
            self._note(wait.pc, accesses=False, arrivals=True)
        self._executed.add(instruction.pc)
        self._touch_registers(agent, instruction.pc, 1)
        if self._groups is not None:
            self._groups.executed(agent.agent_id, instruction)
        for fences in self._without.values():
            fences.executed(agent.agent_id, instruction.pc)
        kind = instruction.modifiers[:2]
        if kind == ("mbarrier", "try_wait"):
            self._open_waits[agent.agent_id] = instruction
        elif kind == ("mbarrier", "test_wait"):
            self._note(instruction.pc, accesses=False, arrivals=True)
        super().instruction_executed(agent, instruction, lanes)

    def accessed(self, access: Access) -> None:
        """An access happens; a strong one may acquire."""
        actor = self._actors[access.agent.agent_id]
        if access.instruction.modifiers[:2] in _WAITS:
            super().accessed(access)  # of an object that every wait may read at any time
            return
        self._settle(access.agent.agent_id)
        if actor.is_warp and self._groups is not None:
            self._groups.accessed(access.agent.agent_id, access.space)
        if actor.is_warp and access.space is Space.TMEM:
            self._note_effect(self._tcgen05_fences.used(access.agent.agent_id))
        rows = list(_ALL_ROWS)
        if access.space is Space.SHARED:
            rows.append(vector_clock.ASYNC_SHARED)
        elif access.space is Space.GLOBAL:
            rows.append(vector_clock.ASYNC_GLOBAL)
        if access.instruction.modifiers[:2] == ("mbarrier", "init"):
            rows.append(vector_clock.MBARRIER_INIT)
        self._happens(actor, rows)
        if access.order == "weak":
            super().accessed(access)
            return
        before = actor.know.copy()
        super().accessed(access)
        is_release = access.order in ("release", "acq_rel", "seq_cst")
        gains = any(self._gains(before, actor.know, vector_clock.GENERIC))
        self._note(access.instruction.pc, accesses=gains or is_release, arrivals=gains)

    def released(self, agent: Agent, token: Hashable, scope: str) -> None:
        """An arrival happens; bar.sync's own does not count, for it goes with its wait."""
        self._settle(agent.agent_id)
        if self._groups is not None:
            self._groups.handed_on(agent.agent_id)
        actor = self._actors[agent.agent_id]
        instruction = actor.instruction
        if instruction is not None:
            self._releasers.setdefault(_family(token), set()).add(instruction.pc)
            if not ("sync" in instruction.modifiers and _is_barrier(token)):
                self._happens(actor, (_ARRIVALS,))
        super().released(agent, token, scope)

    def acquired(self, agent: Agent, token: Hashable, scope: str) -> None:
        """Keep what is learnt apart until the agent does something."""
        actor = self._actors[agent.agent_id]
        instruction = actor.instruction
        self._open_waits.pop(agent.agent_id, None)
        held = self._tokens.get(actor.home, {}).get(token)
        if instruction is not None and held is not None:
            pcs = (instruction.pc, *self._releasers.get(_family(token), ()))
            if scope == "relaxed":  # a fence later on decides
                for pc in pcs:
                    self._note(pc, accesses=True, arrivals=True)
            else:
                learnt = self._learnt.get(agent.agent_id)
                if learnt is None:
                    learnt = self._learnt[agent.agent_id] = _Learnt(actor.know.copy())
                learnt.lessons.append((pcs, held.copy()))
        super().acquired(agent, token, scope)

    def cta_exited(self, cta: Any) -> None:
        """Count the knowledge of the warps at their exit, too."""
        for warp in cta.warps:
            self._settle(warp.agent_id)
            if self._groups is not None:
                self._groups.handed_on(warp.agent_id)
        super().cta_exited(cta)

    def _settle(self, agent_id: int) -> None:
        """The agent does something: which of its waits is it that it could not do without?"""
        learnt = self._learnt.pop(agent_id, None)
        if learnt is None:
            return
        known = learnt.base.copy()
        for _, lesson in learnt.lessons:
            known.unite(lesson)
        for pc in {pcs[0] for pcs, _ in learnt.lessons}:
            without = learnt.base.copy()
            for pcs, lesson in learnt.lessons:
                if pcs[0] != pc:
                    without.unite(lesson)
            accesses, arrivals = self._gains(without, known, *range(vector_clock.ROWS))
            if accesses or arrivals:
                for pcs, _ in learnt.lessons:
                    if pcs[0] == pc:
                        for each in pcs:
                            self._note(each, accesses=accesses, arrivals=arrivals)

    def fenced(self, agent: Agent, fence: Fence, instruction: Instruction) -> None:
        """Compare what is known for each proxy before and after."""
        self._settle(agent.agent_id)
        actor = self._actors[agent.agent_id]
        before = actor.know.copy()
        has_learnt = actor.unfenced_tcgen05
        kind = fence.kind
        if kind is FenceKind.TCGEN05_BEFORE and isinstance(actor, WarpActor):
            operations = self._tcgen05.get(actor.home, 0)
            effect = self._tcgen05_fences.has_effect_before(agent.agent_id, actor, operations)
            self._note(instruction.pc, accesses=effect, arrivals=effect)
        super().fenced(agent, fence, instruction)
        if kind is FenceKind.MEMORY:
            effect = True
        elif kind is FenceKind.WGMMA:
            for pc, fences in self._without.items():
                if pc != instruction.pc:
                    fences.fenced(agent.agent_id)
            return  # whether it had an effect is seen when products start
        elif kind is FenceKind.TCGEN05_AFTER:
            self._tcgen05_fences.after(agent.agent_id, instruction.pc, has_learnt)
            return
        elif kind is FenceKind.TCGEN05_BEFORE:
            return
        else:
            effect = any(self._gains(before, actor.know, *range(1, vector_clock.ROWS)))
        self._note(instruction.pc, accesses=effect, arrivals=effect)

    def async_issued(self, operation: Any, issuer: Agent) -> None:
        """An operation of the tensor core is ordered by its issue."""
        self._settle(issuer.agent_id)
        if self._groups is not None:
            if operation.kind != "wgmma":  # a product hands nothing on: it writes registers
                self._groups.handed_on(issuer.agent_id)
            self._groups.issued(issuer.agent_id, operation)
        if operation.kind == "wgmma":
            for pc, fences in self._without.items():
                started = (issuer.agent_id, operation.instruction, operation.registers)
                if fences.started(*started) is not None:
                    self._note(pc, accesses=True, arrivals=True)
        warp = self._actors[issuer.agent_id]
        if operation.kind.startswith("tcgen05") and isinstance(warp, WarpActor):
            self._happens(warp, _ALL_ROWS)
            self._note_effect(self._tcgen05_fences.issued(issuer.agent_id, warp))
        super().async_issued(operation, issuer)
        actor = self._actors[operation.agent_id]
        if isinstance(actor, OperationActor) and not actor.uses_async_proxy:
            bits = self._generic_operations.get(actor.home, 0)
            self._generic_operations[actor.home] = bits | 1 << actor.slot

    def async_joined(self, agent: Agent, operation: Any, reads_only: bool) -> None:
        """Compare what is known; an operation on registers is always waited for to some effect."""
        self._settle(agent.agent_id)
        actor = self._actors[agent.agent_id]
        before = actor.know.copy()
        super().async_joined(agent, operation, reads_only)
        if actor.instruction is None:
            return
        effect = any(self._gains(before, actor.know, *range(vector_clock.ROWS)))
        if operation.issuer is agent and operation.kind in ("wgmma", "tcgen05.ld"):
            effect = True
        if operation.kind == "wgmma":
            # One warp's wait is enough here, by the ISA's letter each waits: what tells others that
            # this warp has is not redundant.
            self._happens(actor, (vector_clock.GENERIC,))
        self._note(actor.instruction.pc, accesses=effect, arrivals=effect)

    def _note(self, pc: int, *, accesses: bool, arrivals: bool) -> None:
        for has_effect, noted in zip((accesses, arrivals), self._ordered, strict=True):
            if has_effect:
                noted.add(pc)

    def _note_effect(self, pc: int | None) -> None:
        if pc is not None:
            self._note(pc, accesses=True, arrivals=True)

    def _happens(self, actor: Actor, rows: Iterable[int]) -> None:
        if not actor.is_warp:
            return
        happened = self._happened.get((actor.home, actor.slot))
        if happened is None:
            happened = [[] for _ in range(vector_clock.ROWS + 1)]
            self._happened[actor.home, actor.slot] = happened
        for row in rows:
            clocks = happened[row]
            if not clocks or clocks[-1] != actor.clock:
                clocks.append(actor.clock)

    def _gains(
        self, before: vector_clock.Knowledge, after: vector_clock.Knowledge, *rows: int
    ) -> tuple[bool, bool]:
        """Whether accesses, and whether arrivals, are known after and were not before."""
        accesses = arrivals = False
        for home, part in after.parts.items():
            old = before.parts.get(home)
            if old is None:
                old = type(part)(part.clocks.shape[1])
            if vector_clock.GENERIC in rows:
                new = part.done & ~old.done | part.reads & ~(old.reads | old.done)
                accesses |= bool(new)
            if part.fenced & ~old.fenced & self._generic_operations.get(home, 0):
                accesses = True
            raised = np.argwhere(part.clocks > old.clocks).tolist()
            for row, slot in raised:
                happened = self._happened.get((home, slot))
                if row not in rows or happened is None:
                    continue
                low, high = old.clocks.item(row, slot), part.clocks.item(row, slot)
                accesses |= _any_in(happened[row], low, high)
                if row == vector_clock.GENERIC:
                    arrivals |= _any_in(happened[_ARRIVALS], low, high)
        return accesses, arrivals


def _any_in(clocks: list[int], low: int, high: int) -> bool:
    """Whether one of the clocks, which ascend, is above `low` and not above `high`."""
    return bisect_right(clocks, high) > bisect_right(clocks, low)


def _is_barrier(token: Hashable) -> bool:
    return isinstance(token, tuple) and token[0] == "barrier"


def _family(token: Hashable) -> Hashable:
    """Return the token without an mbarrier's phase: each phase knows what earlier ones released."""
    return token[:-1] if isinstance(token, tuple) and token[0] == "mbarrier" else token


def _succeeded(agent: Agent, wait: Instruction) -> bool:
    """Whether a wait for an mbarrier came true (for a fresh one it does so without a phase)."""
    predicate = wait.operands[0]
    registers = getattr(agent, "registers", None)
    if registers is None or not isinstance(predicate, Register):
        return False
    return bool(np.any(registers[predicate.slot]))
