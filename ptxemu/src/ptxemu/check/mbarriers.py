"""mbarrier objects: uses are ordered after the initialisation, and phases may be overrun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from ptxemu.check import proxies
from ptxemu.check.actors import ARRIVAL, COMMIT, OperationActor
from ptxemu.check.findings import Findings, Place, Site
from ptxemu.check.races import place
from ptxemu.check.state import Actor, Event, WarpActor
from ptxemu.check.vector_clock import Knowledge
from ptxemu.events import Access
from ptxemu.syntax.ast import Instruction

_BARRIER = (
    "needs a barrier (behind fence.mbarrier_init.release.cluster for other CTAs and the async "
    "proxy)"
)

_Uses = dict["Actor", tuple[int, "Instruction | None", str]]
"""The last arrival or wait of each agent: its clock, the instruction, what it was."""


class Mbarriers:
    """Initialisations and uses of mbarriers, by CTA and offset.

    Several initialisations that nothing orders are one object's where they say the same; who uses
    it must know all of them.
    """

    def __init__(self, findings: Findings, name: Callable[[int], str]) -> None:
        """`name` gives a CTA's name."""
        self._findings = findings
        self._name = name
        self._inits: dict[int, dict[int, tuple[Event, ...]]] = {}
        self._uses: dict[int, dict[int, _Uses]] = {}

    def forget(self, cta: int) -> None:
        """A CTA is gone."""
        self._inits.pop(cta, None)
        self._uses.pop(cta, None)

    def accessed(self, access: Access, event: Event) -> bool:
        """An mbarrier instruction's access to the object; True if it counts as a write."""
        cta, name = access.owner, access.instruction.modifiers[1]
        assert cta is not None
        if name not in ("init", "inval"):
            return False
        event.is_mbarrier = name == "init"
        inits = self._inits.setdefault(cta, {})
        for start in access.starts.tolist():
            self._used_before(cta, start, event)
            before = inits.pop(start, ())
            if name == "init":
                same = [one for one in before if event.is_silent and not event.actor.knows(one)]
                inits[start] = (*same, event)
        return True

    def used(
        self, actor: Actor, instruction: Instruction | None, cta: int, offset: int, action: str
    ) -> None:
        """An arrival at an object, or a wait for it: does the agent know the initialisation?"""
        uses = self._uses.setdefault(cta, {}).setdefault(offset, {})
        if action == "wait":
            # Who knows of the wait knows of the operations that it waited for.
            for other, (clock, _, _) in list(uses.items()):
                if not other.is_warp and actor.knows_past(other, clock):
                    del uses[other]
        uses[actor] = (actor.clock, instruction, action)
        for init in self._inits.get(cta, {}).get(offset, ()):
            if init in actor.inits:
                continue
            ordered, visible = proxies.knows_init(actor, init)
            if not (ordered and visible):
                self._report_init(init, (actor, instruction, action), cta, offset, ordered=ordered)

    def _used_before(self, cta: int, offset: int, event: Event) -> None:
        """An initialisation or an invalidation comes after all uses of the object."""
        for actor, (clock, instruction, action) in self._uses.get(cta, {}).pop(offset, {}).items():
            if event.actor.knows_past(actor, clock):
                continue
            message = lambda a, b: (
                f"{a} of shared memory of {self._name(cta)} 0x{offset:x}, and {b}: needs a "
                f"barrier between {a.where} and {b.where}"
            )
            self._findings.add("race", (actor, instruction, action), place(event), message)

    def _report_init(
        self, init: Event, use: Place, cta: int, offset: int, *, ordered: bool
    ) -> None:
        fence = "needs fence.mbarrier_init.release.cluster (or fence.proxy.async)"
        edge = fence if ordered else _BARRIER
        message = lambda a, b: (
            f"{a} of shared memory of {self._name(cta)} 0x{offset:x}, and {b}: {edge} "
            f"between {a.where} and {b.where}"
        )
        user = use[0]
        is_local = user is not None and user.cta == cta
        if is_local and user is not None and user.is_warp:
            self._findings.add("race", place(init), use, message)
            return
        # Within a CTA, behind a barrier, kernels that ship do without the fence.
        level = "warning" if ordered and is_local else None
        self._findings.add("missing-mbarrier-init-fence", place(init), use, message, level=level)


# Phases of mbarriers that may be overrun: the next one completes before a wait has seen this one.
#
# A wait names a parity. If phase n + 1 completes before a warp's wait for phase n looks, the wait
# sees the parity of n again and blocks, or takes a later phase for its own. So every wait for phase
# n must have happened before phase n + 1 completes: one of its arrivals must come after the wait.
#
# An arrival counts for the phase that it finds. So one of phase n + 1 must come after all arrivals
# of phase n, in time at least: else it may be early and complete phase n instead of another one.

Object: TypeAlias = tuple[int, int]
"""An mbarrier: index of its CTA and offset."""
OperationsOf = Callable[[int, int], list[OperationActor]]
"""A cluster's operations of a set of bits."""


class Phases:
    """Waits for phases of mbarriers, until the next phase is complete."""

    def __init__(
        self, findings: Findings, name: Callable[[int], str], operations: OperationsOf
    ) -> None:
        """`name` gives a CTA's name."""
        self._findings = findings
        self._name = name
        self._operations = operations
        self._waits: dict[Object, dict[int, dict[WarpActor, tuple[int, Instruction]]]] = {}
        self._arrivals: dict[Object, dict[int, Place | None]] = {}
        """Last arrival by object and phase; None if one was relaxed, which tells nothing."""
        self._members: dict[Object, dict[int, dict[Actor, tuple[int, Place]]]] = {}
        """Agents that arrived or delivered bytes, with the clock, by object and phase; only the
        latest two phases."""

    def forget(self, cta: int) -> None:
        """A CTA is gone."""
        for objects in (self._waits, self._arrivals, self._members):
            for key in [key for key in objects if key[0] == cta]:
                del objects[key]

    def initialised(self, cta: int, offset: int) -> None:
        """An object begins, with phase 0."""
        self._waits.pop((cta, offset), None)
        self._arrivals.pop((cta, offset), None)
        self._members.pop((cta, offset), None)

    def waited(
        self, warp: WarpActor, cta: int, offset: int, phase: int, instruction: Instruction
    ) -> None:
        """A warp's wait has seen that `phase` is complete, and the next one is not."""
        waits = self._waits.setdefault((cta, offset), {})
        waits.setdefault(phase, {})[warp] = warp.clock, instruction

    def arrived(
        self,
        actor: Actor,
        cta: int,
        offset: int,
        phase: int,
        *,
        is_relaxed: bool,
        before: Knowledge | None,
    ) -> None:
        """An arrival in `phase`; `before`: what was released in the phase before, now complete."""
        self._is_in_time(actor, cta, offset, phase)
        arrivals = self._arrivals.setdefault((cta, offset), {})
        if phase not in arrivals:
            self.completed(cta, offset, phase - 1, before)
            arrivals[phase] = actor, actor.instruction, "arrival"
        if is_relaxed:
            arrivals[phase] = None
        elif arrivals[phase] is not None:
            arrivals[phase] = actor, actor.instruction, "arrival"

    def _is_in_time(self, actor: Actor, cta: int, offset: int, phase: int) -> None:
        """Report an arrival that may come before those of the phase before."""
        phases = self._members.setdefault((cta, offset), {})
        arrived = phases.get(phase)
        if arrived is None:
            arrived = phases[phase] = {}
            phases.pop(phase - 2, None)
        mine = actor, actor.instruction, "arrival"
        if actor not in arrived and (
            not isinstance(actor, OperationActor) or actor.kind in (COMMIT, ARRIVAL)
        ):
            for other, (clock, before) in phases.get(phase - 1, {}).items():
                if not actor.has_seen(other, clock):
                    self._report_early(cta, offset, before, mine)
        arrived[actor] = actor.clock, mine

    def may_mistake(self, actor: Actor, cta: int, offset: int, last: int, phase: int) -> str | None:
        """Why a wait of `actor`, who saw phase `last` before, may take another one for `phase`.

        None if the phases before it are complete, in time, before the wait: then nothing else can
        answer it.
        """
        phases = self._members.get((cta, offset), {})
        if any(actor.has_seen(one, clock) for one, (clock, _) in phases.get(phase, {}).items()):
            return None  # who arrived in it found it begun
        before = phases.get(phase - 1, {}).items()
        if before and all(actor.has_seen(one, clock) for one, (clock, _) in before):
            return None
        return (
            f"the wait for parity {phase & 1} of the mbarrier at shared 0x{offset:x} matches phase "
            f"{phase}, but this warp last saw phase {last}: phases were missed, and a wait for the "
            "other parity would have blocked"
        )

    def completed(self, cta: int, offset: int, phase: int, released: Knowledge | None) -> None:
        """`phase` is complete: do its arrivals know of the waits for the phase before?"""
        waits = self._waits.get((cta, offset), {}).pop(phase - 1, {})
        arrival = self._arrivals.get((cta, offset), {}).pop(phase, None)
        if released is None or arrival is None:
            return
        for warp, (clock, instruction) in waits.items():
            if not self._is_known(released, warp, clock):
                self._report(cta, offset, (warp, instruction, "wait"), arrival)

    def _is_known(self, released: Knowledge, warp: WarpActor, clock: int) -> bool:
        """Whether the warp's wait, or what it issued after it, is known to an arrival."""
        if released.has_seen(warp.home, warp.slot, clock):
            return True
        part = released.parts.get(warp.home)
        if part is None:
            return False
        return any(
            operation.issuer_slot == warp.slot and operation.issuer_clock >= clock
            for operation in self._operations(warp.home, part.done | part.reads)
        )

    def _report(self, cta: int, offset: int, wait: Place, arrival: Place) -> None:
        message = lambda a, b: (
            f"{a} for a phase of the mbarrier at shared 0x{offset:x} of {self._name(cta)}, and "
            f"{b} in the next phase: nothing keeps the next phase from completing before the "
            "wait has seen this one (the phase is overrun): needs an arrival of the next phase "
            "behind the wait"
        )
        self._findings.add("mbarrier-overrun", wait, arrival, message)

    def _report_early(self, cta: int, offset: int, before: Place, early: Place) -> None:
        message = lambda a, b: (
            f"{b} at the mbarrier at shared 0x{offset:x} of {self._name(cta)}, and {a} in the "
            "phase before: nothing keeps the first from coming before the second, and it would "
            "count for that phase then: needs a wait in front of it"
        )
        self._findings.add("mbarrier-early-arrival", before, early, message)


# Barriers that only some warps of a CTA execute: what is unordered there has one all the same.

BARRIERS = ("bar", "barrier")
"""Opcodes; barrier.cluster, which all threads execute or none, is not meant."""


class BarrierUsers:
    """Barriers that the warps of each CTA have executed."""

    def __init__(self) -> None:
        self._users: dict[tuple[int, ...], dict[int, set[int]]] = {}
        """Warps that have executed a barrier, by CTA and by the barrier's pc."""
        self._warps: dict[tuple[int, ...], set[int]] = {}
        self._instructions: dict[int, Instruction] = {}

    def started(self, cta: Any) -> None:
        """A CTA became resident."""
        self._warps[cta.ctaid] = {warp.index for warp in cta.warps}

    def executed(self, warp: Actor, instruction: Instruction) -> None:
        """A warp executes a barrier."""
        if "cluster" in instruction.modifiers:
            return
        self._instructions[instruction.pc] = instruction
        self._users.setdefault(warp.ctaid, {}).setdefault(instruction.pc, set()).add(warp.warp)

    def explanation(self, code: str, first: Site, second: Site) -> str:
        """Return a note on a barrier that only one of the two warps executes; empty if none.

        The note explains two unordered accesses of one CTA.
        """
        if first.cta is None or first.cta != second.cta or first.warp == second.warp:
            return ""
        pcs = sorted(site.pc for site in (first, second) if site.pc is not None)
        skipped = [
            (pc, users)
            for pc, users in self._users.get(first.cta, {}).items()
            if (first.warp in users) != (second.warp in users)
        ]
        # The one between the two accesses is meant, where there is one.
        skipped.sort(key=lambda one: not (len(pcs) == 2 and pcs[0] < one[0] < pcs[1]))
        for pc, users in skipped[:1]:
            instruction = self._instructions[pc]
            absent = ", ".join(map(str, sorted(self._warps[first.cta] - users)))
            return (
                f"; the barrier at {instruction.span} does not order them: only warps "
                f"{', '.join(map(str, sorted(users)))} of the CTA execute it, and warps {absent} "
                "do not"
            )
        return ""
