"""mbarrier objects: every use is ordered after the initialisation, the next of these after it."""

from __future__ import annotations

from collections.abc import Callable

from ptxemu.check import proxies
from ptxemu.check.findings import Findings, Place
from ptxemu.check.races import place
from ptxemu.check.state import Actor, Event
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
            ordered, visible = proxies.knows_init(actor, init, cta)
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
