"""The checker: listens to a run, keeps clocks and shadow memory, collects findings."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from ptxemu.check import lanes as lane_order
from ptxemu.check import proxies, relaxed
from ptxemu.check.actors import OperationActor
from ptxemu.check.earlier_grid import EarlierGrid
from ptxemu.check.findings import Finding, Findings
from ptxemu.check.flags import Flags, reach_of
from ptxemu.check.lane_races import LaneRaces, makes_lanes_meet
from ptxemu.check.lifetime import Lifetimes
from ptxemu.check.mbarriers import BARRIERS, BarrierUsers, Mbarriers, Phases
from ptxemu.check.races import Races
from ptxemu.check.shadow import Blank
from ptxemu.check.shadow_memory import ShadowMemory
from ptxemu.check.state import Actor, Event, WarpActor
from ptxemu.check.tcgen05_order import DEALLOC, TmemLoads
from ptxemu.check.tokens import Neighbours, Tokens, is_mbarrier_token, new_token
from ptxemu.check.vector_clock import ARRIVED, GENERIC, NOTHING, OUT_OF_SCOPE
from ptxemu.check.weak_orders import WeakOrders
from ptxemu.check.wgmma_fences import WgmmaFences
from ptxemu.events import Access, AccessKind, Agent, Fence, FenceKind, Loads, Observer, Space
from ptxemu.global_writes import Earlier
from ptxemu.syntax.ast import Instruction

SUPERSEDED = ("exited-cta", "mbarrier-overwritten")  # the check tells more of these itself
CHECKED_SPACES = (Space.GLOBAL, Space.SHARED, Space.TMEM)


class Checker(Observer):
    """Happens-before with proxies over global memory, shared memory and TMEM of one launch."""

    def __init__(
        self,
        kernel: str,
        blank: Blank = (),
        *,
        warp_lanes: bool = True,
        earlier: Earlier | None = None,
    ) -> None:
        """Args:
        blank: global memory that nobody has written before the launch.
        earlier: a launch before, which may still write until griddepcontrol.wait.
        warp_lanes: lanes of a warp are ordered by what makes them wait for each other alone.
        """
        self.kernel = kernel
        self.takes_loads = earlier is None
        self._collected = Findings(kernel)
        self._earlier = None if earlier is None else EarlierGrid(self._collected, earlier)
        self._lifetimes = Lifetimes(self._collected)
        self._flags = Flags()
        self._weak_orders = WeakOrders(self._collected)
        self._actors: dict[int, Actor] = {}
        self._neighbours = Neighbours()
        self._tokens: dict[int, Tokens] = {}
        """Tokens by cluster; no other cluster can reach them."""
        self._widths: dict[int, int] = {}
        self._operations: dict[int, list[int]] = {}
        """Agent ids of each cluster's operations; the index is the bit."""
        self._tcgen05: dict[int, int] = {}
        self._no_mbarrier: dict[int, int] = {}
        """Bits of a cluster's operations: tcgen05 instructions; what completes no mbarrier."""
        self._cta_names: dict[int, str] = {}
        self._races = Races(self._collected)
        self._meets: dict[int, bool] = {}
        """Whether lanes meet at an instruction, by its pc."""
        self._undetermined = self._races.undetermined
        self._lane_races = LaneRaces(self._collected, self._races) if warp_lanes else None
        self._memory = ShadowMemory(self._races, self._cta_names.__getitem__, blank)
        self._mbarriers = Mbarriers(self._collected, self._cta_names.__getitem__)
        self._phases = Phases(self._collected, self._cta_names.__getitem__, self._operations_of)
        self._barrier_users = BarrierUsers()
        self._tmem_loads = TmemLoads(self._collected)
        self._leaving: dict[int, tuple[int, Any]] = {}
        """Clusters that have exited, with their operations in flight, by index."""
        self._gone: set[int] = set()
        """CTAs whose clusters are gone; what still accesses them is a matter of lifetimes."""
        self._time = 0
        self._wgmma: WgmmaFences | None = None

    @property
    def findings(self) -> list[Finding]:
        """Findings so far; call `finish` at the end of the run."""
        return self._collected.all()

    @property
    def changes(self) -> int:
        """Grows with each new finding: cheaper to ask than `findings`."""
        return self._collected.changes

    def stop(self) -> None:
        """The run was cut off: judge what was to be judged later."""
        if self._lane_races is not None:
            self._lane_races.finish()
        self._collected.settle()

    def finish(self) -> None:
        """The run is over: report what can only be told now."""
        self.stop()
        self._memory.drop_all()
        self._lifetimes.finish()
        self._collected.explain(self._barrier_users.explanation)

    def judge_unwritten(self, reached: Callable[[], str]) -> None:
        """See `Findings`."""
        self._collected.judge_unwritten(reached)

    def cta_started(self, cta: Any) -> None:
        """A CTA became resident: its warps get their columns in the cluster's clocks."""
        home = cta.cluster.index
        width = self._widths.setdefault(home, len(cta.cluster.ctas) * len(cta.warps))
        name = f"cta ({','.join(map(str, cta.ctaid))})"
        self._cta_names[cta.index] = name
        self._lifetimes.started(cta)
        self._barrier_users.started(cta)
        if cta.index == 0:
            program = getattr(cta.warps[0], "program", None)
            self._wgmma = WgmmaFences.of(program)
            self._races.started(program)
            self._weak_orders.started(program)
            self._neighbours.started(program)
        first = cta.rank * len(cta.warps)
        for warp in cta.warps:
            self._actors[warp.agent_id] = WarpActor(
                warp.agent_id, home, cta.index, cta.ctaid, warp.index, first + warp.index, width
            )

    def cta_exited(self, cta: Any) -> None:
        """A CTA has exited: its shared memory and TMEM are gone when its cluster is.

        What the cluster has left in flight is judged by what happened to its memory before.
        """
        actors = [self._actors[warp.agent_id] for warp in cta.warps]
        self._lifetimes.exited(cta, [actor for actor in actors if isinstance(actor, WarpActor)])
        for actor in actors:
            self._tmem_loads.handed_on(actor, "the exit")
            if self._lane_races is not None and isinstance(actor, WarpActor):
                self._lane_races.exited(actor)
        if all(other.exited for other in cta.cluster.ctas):
            home = cta.cluster.index
            issued = self._operations.get(home, ())
            left = sum(self._actors[agent_id].know is not NOTHING for agent_id in issued)
            if left:
                self._leaving[home] = (left, cta.cluster)
            else:
                self._retire(cta.cluster)

    def _retire(self, cluster: Any) -> None:
        """A cluster has exited and all its operations are over."""
        self._tokens.pop(cluster.index, None)
        for agent_id in self._operations.get(cluster.index, ()):
            del self._actors[agent_id]
        for cta in cluster.ctas:
            self._gone.add(cta.index)
            self._mbarriers.forget(cta.index)
            self._phases.forget(cta.index)
            self._memory.drop(Space.SHARED, cta.index)
            self._memory.drop(Space.TMEM, cta.index)

    def instruction_executed(self, agent: Agent, instruction: Instruction, lanes: int) -> None:
        """Remember what the agent is at: synchronisation calls name no instruction."""
        actor = self._actors[agent.agent_id]
        actor.instruction = instruction
        if isinstance(actor, WarpActor):
            meets = self._meets.get(instruction.pc)
            if meets is None:
                meets = self._meets[instruction.pc] = makes_lanes_meet(instruction)
            if meets:
                actor.lagging = None
                self._lifetimes.pairs(actor, instruction)
                if self._lane_races is not None:
                    self._lane_races.met(actor, agent, lanes, instruction)
        if self._earlier is not None:
            self._earlier.executed(actor, instruction)
        if instruction.modifiers[0] in BARRIERS:
            self._barrier_users.executed(actor, instruction)
        if self._wgmma is not None:
            self._wgmma.executed(agent.agent_id, instruction.pc)

    def block_executed(self, agent: Agent, first_pc: int, count: int, lanes: int) -> None:
        """Pure instructions matter to what wgmma.fence orders."""
        if self._wgmma is not None:
            self._wgmma.executed(agent.agent_id, first_pc, count)

    def accessed(self, access: Access) -> None:
        """Judge an access against what happened to its bytes before."""
        if access.space not in CHECKED_SPACES or not len(access.starts):
            return
        actor, races = self._actors[access.agent.agent_id], self._lane_races
        if races is not None and isinstance(actor, WarpActor):
            races.accessed(actor, access)
        for part in access.by_silence():
            event = self._judge(part)
            if races is not None and isinstance(actor, WarpActor):
                races.releases.wrote(actor, access, event)

    def loaded(self, agent: Agent, owner: int, loads: Loads, count: int) -> None:
        """Judge weak loads of a whole warp."""
        actor = self._actors[agent.agent_id]
        assert isinstance(actor, WarpActor)
        assert actor.cta == owner
        if count:
            actor.instruction = loads.instructions[count - 1]
        if self._wgmma is not None:
            self._wgmma.executed(agent.agent_id, loads.first, loads.end_of(count) - loads.first)
        if self._lane_races is not None:
            self._lane_races.loaded(actor, loads, count)
        if actor.lagging is not None:
            for number in range(count):
                self._judge(loads.access(agent, owner, number))
            return
        self._memory.loaded(actor, agent, loads, count, self._time)
        self._time += count

    def _judge(self, access: Access) -> Event:
        actor = self._actors[access.agent.agent_id]
        self._time += 1
        strong = access.order != "weak" or access.kind is AccessKind.ATOMIC
        event = actor.event(access, reach_of(access.scope) if strong else 0, self._time)
        if self._earlier is not None:
            self._earlier.accessed(access, event)
        if event.adds_floats and actor.is_warp:
            self._undetermined.lanes(event, access)
        if strong and isinstance(actor, WarpActor):
            if access.order in ("acquire", "acq_rel", "seq_cst"):
                self._lanes_acquire(actor, access.agent)
            if access.order in ("release", "acq_rel", "seq_cst"):
                self._withhold(actor, access.agent)
            self._weak_orders.accessed(actor, access, event, self._time)
            self._flags.accessed(actor, access)
        if access.owner is not None and (access.owner != actor.cta or not actor.is_warp):
            if access.instruction.modifiers[:2] != DEALLOC:  # which ends a lifetime itself
                self._lifetimes.touched(access.owner, event)
            if access.owner in self._gone:
                return event
        if access.instruction.modifiers[0] == "mbarrier":
            self._apply_to_mbarrier(access, event)
        elif actor.lagging is not None and isinstance(actor, WarpActor):
            self._apply_by_lanes(actor, access, event)
        else:
            self._memory.apply(access, event)
        return event

    def _withhold(self, warp: Actor, agent: Agent) -> None:
        """Some lanes release, and the warp's clock will tick: what do they not speak for?"""
        if self._lane_races is not None and isinstance(warp, WarpActor):
            for event in self._lane_races.releases.withheld(warp, agent):
                self._memory.postpone(event)

    def _lanes_acquire(self, warp: WarpActor, agent: Agent) -> None:
        """Some or all lanes of a warp are about to acquire."""
        lane_order.acquires(warp, agent)
        if self._lane_races is not None:
            self._lane_races.acquires(warp, agent)

    def _apply_to_mbarrier(self, access: Access, event: Event) -> None:
        if access.instruction.modifiers[1] == "init":
            assert access.owner is not None
            for start in access.starts.tolist():
                self._phases.initialised(access.owner, start)
        if self._mbarriers.accessed(access, event):
            self._memory.apply(access, event)

    def _apply_by_lanes(self, warp: WarpActor, access: Access, event: Event) -> None:
        """Lanes that have not acquired what others have do not know it."""
        known, lagging = lane_order.divided(warp, access)
        if known is not None:
            self._memory.apply(known, event)
        if lagging is not None and warp.lagging is not None:
            know = warp.know
            warp.leading, warp.know = know, warp.lagging[1]
            self._memory.apply(lagging, event.of_lanes(lagging))
            warp.know, warp.leading = know, None

    def released(self, agent: Agent, token: Hashable, scope: str) -> None:
        """Leave the agent's knowledge at the token."""
        actor = self._actors[agent.agent_id]
        tokens = self._tokens.setdefault(actor.home, {})
        self._signal(actor, token, arrives=True)
        self._tmem_loads.handed_on(actor, "arrival")
        if self._lane_races is not None and isinstance(actor, WarpActor):
            self._lane_races.released(actor)
            if scope != "relaxed":
                self._lane_races.at_barrier(actor, agent, token, waits=False)
        if is_mbarrier_token(token):
            self._withhold(actor, agent)
            self._arrived(actor, token, scope, tokens)
        held = tokens.get(token) or new_token(tokens, token)
        if scope in ("", "relaxed"):
            if isinstance(actor, WarpActor):
                at_mbarrier = is_mbarrier_token(token)
                is_remote = not at_mbarrier or token[1] != actor.cta  # type: ignore[index]
                relaxed.release(actor, held, at_mbarrier=at_mbarrier, is_remote=is_remote)
            return
        if is_mbarrier_token(token):
            self._neighbours.arrived(actor, token, held)
        held.unite(actor.know)
        if isinstance(actor, WarpActor):
            actor.tick()
        else:
            held.parts[actor.home].done |= 1 << actor.slot

    def acquired(self, agent: Agent, token: Hashable, scope: str) -> None:
        """Take what was left at the token; after a relaxed wait with the next fence only."""
        actor = self._actors[agent.agent_id]
        self._signal(actor, token, arrives=False)
        if (races := self._lane_races) is not None and isinstance(actor, WarpActor):
            races.at_barrier(actor, agent, token, waits=True)
        held = self._tokens.get(actor.home, {}).get(token)
        if held is not None and scope == "relaxed" and isinstance(actor, WarpActor):
            assert isinstance(token, tuple)
            no_mbarrier = self._no_mbarrier.get(actor.home, 0)
            relaxed.acquire(actor, token[:-1], held, no_mbarrier)
        elif held is not None:
            if isinstance(actor, WarpActor) and is_mbarrier_token(token):
                self._lanes_acquire(actor, agent)
                near = self._neighbours.known(token) if scope == "cta" else None
                if near is not None:
                    actor.know.unite_row(held, OUT_OF_SCOPE, GENERIC)
                    actor.know.unite_row(held, ARRIVED, GENERIC)
                    held = near
            actor.know.unite(held)
            actor.unfenced_tcgen05 = True

    def _signal(self, actor: Actor, token: Hashable, *, arrives: bool) -> None:
        """An arrival at an mbarrier or a wait for it: may the agent use the object?"""
        if not is_mbarrier_token(token):
            return
        assert isinstance(token, tuple)
        _, cta, offset, _ = token
        instruction = actor.instruction
        action = "arrival" if arrives else "wait"
        if arrives and (not actor.is_warp or actor.cta != cta):
            self._lifetimes.signalled(cta, actor, (actor, instruction, action))
        if cta not in self._gone:
            self._mbarriers.used(actor, instruction, cta, offset, action)

    def _arrived(self, actor: Actor, token: Any, scope: str, tokens: Tokens) -> None:
        """An arrival at an mbarrier: it belongs to a phase, and the one before is complete."""
        _, cta, offset, phase = token
        if cta not in self._gone:
            is_relaxed = scope in ("", "relaxed") and actor.is_warp
            before = tokens.get(("mbarrier", cta, offset, phase - 1))
            self._phases.arrived(actor, cta, offset, phase, is_relaxed=is_relaxed, before=before)

    def phase_seen(
        self, agent: Agent, owner: int, offset: int, phase: int, instruction: Instruction
    ) -> None:
        """A wait for an mbarrier came true: the phase is complete and the next one is not."""
        warp = self._actors[agent.agent_id]
        assert isinstance(warp, WarpActor)
        tokens = self._tokens.get(warp.home, {})
        held = tokens.get(("mbarrier", owner, offset, phase))
        self._phases.completed(owner, offset, phase, held)
        self._phases.waited(warp, owner, offset, phase, instruction)

    def phases_missed(
        self, agent: Agent, owner: int, offset: int, last: int, phase: int, instruction: Instruction
    ) -> None:
        """A wait for a parity passed over phases: harmless if it comes after them."""
        warp = self._actors[agent.agent_id]
        why = self._phases.may_mistake(warp, owner, offset, last, phase)
        if why is not None:
            self.complained("warning", "mbarrier-phase-aliasing", why, agent, instruction)

    def _operations_of(self, home: int, bits: int) -> list[OperationActor]:
        """The operations of a cluster whose bits are set."""
        ids = enumerate(self._operations.get(home, ()))
        actors = (self._actors[agent_id] for slot, agent_id in ids if bits >> slot & 1)
        return [actor for actor in actors if isinstance(actor, OperationActor)]

    def fenced(self, agent: Agent, fence: Fence, instruction: Instruction) -> None:
        """A fence of a warp."""
        actor, kind = self._actors[agent.agent_id], fence.kind
        if not isinstance(actor, WarpActor):
            return
        actor.lagging = None
        if kind is FenceKind.MEMORY:
            if fence.order != "release" and actor.pending:
                self._lanes_acquire(actor, agent)
            self._withhold(actor, agent)
            self._flags.fenced(actor, fence)
        elif kind is FenceKind.TCGEN05_BEFORE:
            relaxed.before_thread_sync(actor, self._tcgen05.get(actor.home, 0))
        elif kind is FenceKind.TCGEN05_AFTER:
            relaxed.after_thread_sync(actor, self._tcgen05.get(actor.home, 0))
            actor.unfenced_tcgen05 = False
        elif kind is FenceKind.WGMMA:
            if self._wgmma is not None:
                self._wgmma.fenced(agent.agent_id)
        else:
            proxies.apply_fence(actor, fence)

    def async_issued(self, operation: Any, issuer: Agent) -> None:
        """An operation starts with its issuer's knowledge, and after those it is ordered after."""
        warp = self._actors[issuer.agent_id]
        assert isinstance(warp, WarpActor)
        if self._lane_races is not None and operation.mbarriers:
            self._lane_races.released(warp)
        issued = self._operations.setdefault(warp.home, [])
        self._time += 1
        actor = OperationActor(operation.agent_id, operation.kind, warp, len(issued), self._time)
        issued.append(operation.agent_id)
        if operation.kind.startswith("tcgen05."):
            self._tcgen05[warp.home] = self._tcgen05.get(warp.home, 0) | 1 << actor.slot
        if not relaxed.completes_mbarriers(operation):
            others = self._no_mbarrier.get(warp.home, 0)
            self._no_mbarrier[warp.home] = others | 1 << actor.slot
        if self._wgmma is not None and operation.kind == "wgmma":
            self._wgmma_started(warp, issuer, operation)
        actor.instruction = operation.instruction
        self._actors[operation.agent_id] = actor
        actor.signals_peers = any(cta != warp.cta for cta, _ in operation.mbarriers)
        ordering = operation.ordering
        for other in ordering.after:
            actor.complete_after(self._actors[other.agent_id])
        for other in ordering.in_practice:
            actor.complete_after_in_practice(self._actors[other.agent_id])
        for other in ordering.if_synced:
            first = self._actors[other.agent_id]
            if isinstance(first, OperationActor) and actor.knows_issue(first):
                actor.complete_after(first)

    def _wgmma_started(self, warp: Actor, issuer: Agent, operation: Any) -> None:
        assert self._wgmma is not None
        place = warp, operation.instruction, ""
        why = self._wgmma.started(issuer.agent_id, operation.instruction, operation.registers)
        if why is not None:
            text = f"needs wgmma.fence before it: {why}"
            self._collected.add("wgmma-fence-missing", place, None, lambda a, _: f"{a}: {text}")

    def async_completed(self, operation: Any) -> None:
        """Nobody asks any more what a completed operation knew."""
        actor = self._actors[operation.agent_id]
        assert isinstance(actor, OperationActor)
        actor.forget()
        if actor.home in self._leaving:
            left, cluster = self._leaving.pop(actor.home)
            if left > 1:
                self._leaving[actor.home] = (left - 1, cluster)
            else:
                self._retire(cluster)

    def async_joined(self, agent: Agent, operation: Any, reads_only: bool) -> None:
        """A warp has waited for an operation."""
        actor = self._actors[agent.agent_id]
        joined = self._actors[operation.agent_id]
        if isinstance(actor, WarpActor):
            actor.lagging = None
        self._tmem_loads.joined(actor, operation)
        assert isinstance(joined, OperationActor)
        part = actor.know.part(joined.home, self._widths[joined.home])
        if reads_only:
            joined.joined_reads = True
            part.reads |= 1 << joined.slot
        else:
            joined.joined = True
            part.done |= joined.take_past()

    def async_result_touched(self, agent: Agent, operation: Any) -> None:
        """Something was computed with registers of a tcgen05.ld that was not waited for."""
        load, warp = self._actors[operation.agent_id], self._actors[agent.agent_id]
        warp.know.part(load.home, self._widths[load.home]).touched |= 1 << load.slot

    def async_result_used(self, agent: Agent, operation: Any) -> None:
        """Registers of a tcgen05.ld that was not waited for were needed."""
        load, warp = self._actors[operation.agent_id], self._actors[agent.agent_id]
        warp.know.part(load.home, self._widths[load.home]).used |= 1 << load.slot
        self._tmem_loads.used(warp, operation)

    def complained(
        self,
        level: str,
        code: str,
        message: str,
        agent: Agent | None,
        instruction: Instruction | None,
    ) -> None:
        """A fault that the machine found."""
        if code in SUPERSEDED:
            return
        actor = None if agent is None else self._actors.get(agent.agent_id)
        self._collected.add(
            code,
            (actor, instruction, ""),
            None,
            lambda first, _: message if instruction is None else f"{first}: {message}",
            level=level,
            about="" if instruction is not None else message,
        )
