"""The checker: listens to a run, keeps clocks and shadow memory, collects findings."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxemu.check import proxies
from ptxemu.check.actors import Actor, Event, OperationActor, WarpActor
from ptxemu.check.findings import Finding, Findings, Place, Site
from ptxemu.check.flags import Flags
from ptxemu.check.lifetime import Lifetimes
from ptxemu.check.races import Races, Spot, place
from ptxemu.check.shadow import Region, States
from ptxemu.check.vector_clock import MBARRIER_INIT, NOTHING, Knowledge
from ptxemu.events import Access, AccessKind, Agent, Observer, Space

if TYPE_CHECKING:
    from ptxemu.syntax.ast import Instruction

GLOBAL_PAGE_BITS = 16
SHARED_PAGE_BITS = 14
TMEM_BITS = 18
KEPT_GENERATIONS = 4
"""Phases of a barrier whose knowledge is kept; nobody can wait for older ones."""
STATES_BEFORE_COMPACTION = 200_000
SUPERSEDED = ("exited-cta", "mbarrier-overwritten")
"""Complaints of the machine about what the check tells itself, and tells more of."""
CHECKED_SPACES = (Space.GLOBAL, Space.SHARED, Space.TMEM)


class Checker(Observer):
    """Happens-before with proxies over global memory, shared memory and TMEM of one launch."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self._collected = Findings(kernel)
        self._races = Races(self._collected)
        self._lifetimes = Lifetimes(self._collected)
        self._flags = Flags()
        self._states = States()
        self._compact_at = STATES_BEFORE_COMPACTION
        self._regions: dict[tuple[Space, int | None], Region] = {}
        self._actors: dict[int, Actor] = {}
        self._tokens: dict[int, dict[Hashable, Knowledge]] = {}
        """What was left at tokens, by cluster: nobody of another cluster gets at them."""
        self._inits: dict[int, dict[int, Event]] = {}
        """Initialisations of mbarriers by CTA and offset."""
        self._widths: dict[int, int] = {}
        self._operations: dict[int, list[int]] = {}
        """Agent ids of each cluster's operations; the index is the bit."""
        self._cta_names: dict[int, str] = {}
        self._gone: set[int] = set()
        """CTAs whose clusters are gone; what still accesses them is a matter of lifetimes."""
        self._time = 0

    @property
    def findings(self) -> list[Finding]:
        """What was found so far; call `finish` at the end of the run."""
        return self._collected.all()

    def finish(self) -> None:
        """The run is over: report what can only be told now."""
        for key in list(self._regions):
            self._drop(key)
        self._lifetimes.finish()

    def cta_started(self, cta: Any) -> None:
        """A CTA became resident: its warps get their columns in the cluster's clocks."""
        home = cta.cluster.index
        width = self._widths.setdefault(home, len(cta.cluster.ctas) * len(cta.warps))
        name = f"cta ({','.join(map(str, cta.ctaid))})"
        self._cta_names[cta.index] = name
        self._lifetimes.started(cta)
        first = cta.rank * len(cta.warps)
        for warp in cta.warps:
            self._actors[warp.agent_id] = WarpActor(
                home, cta.index, cta.ctaid, warp.index, first + warp.index, width
            )

    def cta_exited(self, cta: Any) -> None:
        """A CTA has exited: its shared memory and TMEM are gone when its cluster is."""
        self._lifetimes.exited(cta, [self._actors[warp.agent_id] for warp in cta.warps])
        if all(other.exited for other in cta.cluster.ctas):
            home = cta.cluster.index
            self._tokens.pop(home, None)
            for agent_id in self._operations.get(home, ()):
                if self._actors[agent_id].know is NOTHING:
                    del self._actors[agent_id]
            for other in cta.cluster.ctas:
                self._gone.add(other.index)
                self._inits.pop(other.index, None)
                self._drop((Space.SHARED, other.index))
                self._drop((Space.TMEM, other.index))

    def _drop(self, key: tuple[Space, int | None]) -> None:
        """Memory that ceases to exist: reads of it that no write came before are final."""
        region = self._regions.pop(key, None)
        if region is None or key[0] is Space.GLOBAL:
            return
        for page in region.pages.values():
            spot = Spot(key[0], region, page, slice(0, len(page.ids)), page.ids)
            for number in np.unique(page.ids).tolist():
                self._races.forget(self._states.table[number], spot)

    def instruction_executed(self, agent: Agent, instruction: Instruction, lanes: int) -> None:
        """Remember what the agent is at: synchronisation calls name no instruction."""
        self._actors[agent.agent_id].instruction = instruction

    def accessed(self, access: Access) -> None:
        """Judge an access against what happened to its bytes before."""
        space = access.space
        if space not in CHECKED_SPACES or not len(access.starts):
            return
        actor = self._actors[access.agent.agent_id]
        self._time += 1
        strong = access.order != "weak" or access.kind is AccessKind.ATOMIC
        event = actor.event(access, strong, self._time)
        if strong and isinstance(actor, WarpActor):
            self._flags.accessed(actor, access)
        if access.owner is not None and (access.owner != actor.cta or not actor.is_warp):
            self._lifetimes.touched(access.owner, event)
            if access.owner in self._gone:
                return
        if access.instruction.modifiers[0] != "mbarrier" or self._mbarrier(access, event):
            self._apply(access, event)

    def _apply(self, access: Access, event: Event) -> None:
        region = self._region(access.space, access.owner)
        states, table, apply = self._states, self._states.table, self._races.apply
        distinct = not event.actor.is_warp
        for page, array, index in region.select(access.starts, access.size, distinct=distinct):
            ids = array[index]
            spot = Spot(access.space, region, page, index, ids)
            first = int(ids.flat[0])
            if ids.size == 1 or (ids == first).all():
                new = states.number(apply(table[first], event, spot))
                if new != first:
                    array[index] = new
                continue
            old, where = np.unique(ids, return_inverse=True)
            numbers = [states.number(apply(table[n], event, spot)) for n in old.tolist()]
            if numbers.count(numbers[0]) == len(numbers):
                array[index] = numbers[0]
            else:
                array[index] = np.array(numbers, dtype=np.int32)[where].reshape(ids.shape)
        if len(states.table) > self._compact_at:
            states.compact([p for r in self._regions.values() for p in r.pages.values()])
            self._compact_at = 2 * len(states.table) + STATES_BEFORE_COMPACTION

    def _region(self, space: Space, owner: int | None) -> Region:
        region = self._regions.get((space, owner))
        if region is None:
            if space is Space.GLOBAL:
                region = Region("global memory", GLOBAL_PAGE_BITS, self._states.initialised.id)
            else:
                assert owner is not None
                nobody = self._states.uninitialised.id
                name = self._cta_names[owner]
                if space is Space.SHARED:
                    region = Region(f"shared memory of {name}", SHARED_PAGE_BITS, nobody)
                else:
                    region = Region(f"TMEM of {name}", TMEM_BITS, nobody, is_tmem=True)
            self._regions[space, owner] = region
        return region

    def _mbarrier(self, access: Access, event: Event) -> bool:
        """An mbarrier instruction's access to the object; True if it counts as a write."""
        assert access.owner is not None
        name = access.instruction.modifiers[1]
        for start in access.starts.tolist():
            if name == "init":
                event.is_mbarrier = True
                self._inits.setdefault(access.owner, {})[start] = event
            elif name == "inval":
                self._inits.get(access.owner, {}).pop(start, None)
        return name in ("init", "inval")

    def released(self, agent: Agent, token: Hashable, scope: str) -> None:
        """Leave the agent's knowledge at the token."""
        actor = self._actors[agent.agent_id]
        self._signal(actor, token, arrives=True)
        tokens = self._tokens.setdefault(actor.home, {})
        held = tokens.get(token)
        if held is None:
            held = tokens[token] = _new_token(tokens, token)
        if scope in ("", "relaxed"):
            if not isinstance(actor, WarpActor):
                return
            held.unite_row(actor.know, MBARRIER_INIT)
            if actor.released_by_fence is not None:
                held.unite(actor.released_by_fence[0])
            return
        held.unite(actor.know)
        if isinstance(actor, WarpActor):
            actor.tick()
        else:
            held.parts[actor.home].done |= 1 << actor.slot

    def acquired(self, agent: Agent, token: Hashable, scope: str) -> None:
        """Take what was left at the token; after a relaxed wait with the next fence only."""
        actor = self._actors[agent.agent_id]
        self._signal(actor, token, arrives=False)
        held = self._tokens.get(actor.home, {}).get(token)
        if held is not None and scope == "relaxed" and isinstance(actor, WarpActor):
            if actor.to_acquire is None:
                actor.to_acquire = Knowledge()
            actor.to_acquire.unite(held)
        elif held is not None:
            actor.know.unite(held)
            actor.unfenced_tcgen05 = True

    def _signal(self, actor: Actor, token: Hashable, *, arrives: bool) -> None:
        """An arrival at an mbarrier or a wait for it: may the agent use the object?"""
        if not isinstance(token, tuple) or token[0] != "mbarrier":
            return
        _, cta, offset, _ = token
        instruction = actor.instruction
        action = "arrival" if arrives else "wait"
        if arrives and (not actor.is_warp or actor.cta != cta):
            self._lifetimes.signalled(cta, actor, (actor, instruction, action))
        init = self._inits.get(cta, {}).get(offset)
        if init is None or init in actor.inits:
            return
        ordered, visible = proxies.knows_init(actor, init, cta)
        if ordered and visible:
            return
        self._report_init(init, (actor, instruction, action), cta, offset, ordered=ordered)

    def _report_init(
        self, init: Event, use: Place, cta: int, offset: int, *, ordered: bool
    ) -> None:
        edge = (
            "needs fence.mbarrier_init.release.cluster (or fence.proxy.async)"
            if ordered
            else "needs a barrier (behind fence.mbarrier_init.release.cluster for other CTAs and "
            "the async proxy)"
        )

        def message(a: Site | None, b: Site | None) -> str:
            assert a is not None and b is not None
            return (
                f"{a} of shared memory of {self._cta_names[cta]} 0x{offset:x}, and {b}: {edge} "
                f"between {a.where} and {b.where}"
            )

        user = use[0]
        is_local = user is not None and user.cta == cta
        if is_local and user is not None and user.is_warp:
            self._collected.add("race", place(init), use, message)
            return
        # Within a CTA, behind a barrier, kernels that ship do without the fence.
        level = "warning" if ordered and is_local else None
        self._collected.add("missing-mbarrier-init-fence", place(init), use, message, level=level)

    def fenced(self, agent: Agent, kind: str, instruction: Instruction) -> None:
        """A fence of a warp."""
        actor = self._actors[agent.agent_id]
        if not isinstance(actor, WarpActor):
            return
        name, _, scope = kind.partition(".")
        if name in ("acq_rel", "sc", "acquire", "release"):
            self._flags.fenced(actor, scope)
        elif kind == "tcgen05.after_thread_sync":
            actor.unfenced_tcgen05 = False
        else:
            proxies.apply_fence(actor, kind)

    def async_issued(self, operation: Any, issuer: Agent) -> None:
        """An operation starts with its issuer's knowledge, and after those it is ordered after."""
        warp = self._actors[issuer.agent_id]
        assert isinstance(warp, WarpActor)
        issued = self._operations.setdefault(warp.home, [])
        self._time += 1
        actor = OperationActor(operation.agent_id, operation.kind, warp, len(issued), self._time)
        issued.append(operation.agent_id)
        actor.instruction = operation.instruction
        self._actors[operation.agent_id] = actor
        details = operation.details
        before = details.get("ordered_after")
        for other in operation.after if before is None else before:
            actor.complete_after(self._actors[other.agent_id])
        for other in details.get("ordered_in_practice", ()):
            actor.complete_after_in_practice(self._actors[other.agent_id])
        for other in details.get("ordered_if_synced", ()):
            first = self._actors[other.agent_id]
            if isinstance(first, OperationActor) and actor.knows_issue(first):
                actor.complete_after(first)

    def async_completed(self, operation: Any) -> None:
        """Nobody asks any more what a completed operation knew."""
        actor = self._actors[operation.agent_id]
        assert isinstance(actor, OperationActor)
        actor.forget()

    def async_joined(self, agent: Agent, operation: Any, reads_only: bool) -> None:
        """A warp has waited for an operation."""
        actor = self._actors[agent.agent_id]
        joined = self._actors[operation.agent_id]
        assert isinstance(joined, OperationActor)
        part = actor.know.part(joined.home, self._widths[joined.home])
        if reads_only:
            joined.joined_reads = True
            part.reads |= 1 << joined.slot
        else:
            joined.joined = True
            part.done |= joined.take_past()

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


def _new_token(tokens: dict[Hashable, Knowledge], token: Hashable) -> Knowledge:
    """What a token starts with; forgets the use of the same barrier long before this one.

    Arrivals at an mbarrier are read-modify-writes of one object, so that whoever sees a phase
    complete also knows what was released in the phases before.
    """
    if not isinstance(token, tuple) or not isinstance(token[-1], int):
        return Knowledge()
    *family, use = token
    tokens.pop((*family, use - KEPT_GENERATIONS), None)
    before = tokens.get((*family, use - 1)) if token[0] == "mbarrier" else None
    return Knowledge() if before is None else before.copy()
