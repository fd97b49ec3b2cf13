"""Order of tcgen05 instructions in TMEM (PTX ISA, "TensorCore 5th Generation Memory Consistency
Model Operations").

Pairs that the ISA executes in order know each other (`machine.operation.Ordering`); what is left
unordered here lacks a commit, a wait or one and the same issuing thread.
"""

from __future__ import annotations

from typing import Any

from ptxemu.check.actors import OperationActor
from ptxemu.check.findings import Findings, Site
from ptxemu.check.state import Actor, Event

DEALLOC = ("tcgen05", "dealloc")


def kind_of(actor: Actor) -> str:
    """ "tcgen05.mma", "tcgen05.ld"...; "" for a warp."""
    return actor.kind if isinstance(actor, OperationActor) else ""


def is_collective_dealloc(first: Event, second: Event) -> bool:
    """Whether the two are the deallocations by which a pair of CTAs frees its columns together."""
    both = first.instruction.modifiers[:2] == second.instruction.modifiers[:2] == DEALLOC
    return both and first.actor.cta != second.actor.cta


def is_too_early(load: Event, product: Event) -> bool:
    """Whether a tcgen05.ld was issued before an MMA by a thread that the MMA's does not know of.

    Then it is not tcgen05.wait::ld that is missing: the load should have waited for the MMA.
    """
    first, second = load.actor, product.actor
    return (
        isinstance(first, OperationActor)
        and first.kind == "tcgen05.ld"
        and kind_of(second).startswith("tcgen05.mma")
        and not second.knows_issue(first)
    )


def unordered(first: Event, second: Event) -> tuple[str, str]:
    """The code and the missing edge for two accesses to TMEM that nothing orders."""
    before, after = kind_of(first.actor), kind_of(second.actor)
    if before == "tcgen05.ld":
        known = second.actor.know.parts.get(first.actor.home)
        if known is not None and known.used >> first.actor.slot & 1:
            return "tmem-read-by-register", (
                "only what needed the loaded registers orders the two, on hardware but not in the "
                "ISA: needs tcgen05.wait::ld"
            )
        if known is not None and known.touched >> first.actor.slot & 1:
            return "late-tmem-read", (
                "what was computed with the loaded registers in between may be computed later: "
                "needs tcgen05.wait::ld"
            )
    if DEALLOC in (first.instruction.modifiers[:2], second.instruction.modifiers[:2]):
        return "tmem-dealloc-race", "needs a barrier behind the last use of the columns"
    if before.startswith("tcgen05.mma") and after.startswith("tcgen05.mma"):
        return "unordered-mma", (
            "the ISA executes MMAs on one accumulator in order only from one thread with the same "
            "shape and cta_group: needs tcgen05.commit and a wait on its mbarrier"
        )
    if before in ("tcgen05.ld", "tcgen05.st"):
        wait = before.replace(".", ".wait::")
        assert isinstance(first.actor, OperationActor)
        if first.actor.is_awaited(first) or not second.actor.knows_issue(first.actor):
            return "race", f"needs a barrier or an mbarrier behind {wait}"
        return "missing-tcgen05-wait", f"needs {wait}"
    if before:
        return "missing-wait", "needs tcgen05.commit and a wait on its mbarrier"
    return "race", "needs a barrier or an mbarrier"


def note(first: Event, second: Event) -> tuple[str, str] | None:
    """The code and the missing edge of an ordered pair that is sound, if only on hardware."""
    one, other = first.actor, second.actor
    if isinstance(other, OperationActor) and other.in_practice >> one.slot & 1:
        return "mma-order-in-practice", (
            "hardware executes the two in order, but the ISA names no such pair: needs "
            "tcgen05.commit and a wait on its mbarrier"
        )
    if (one.cta, one.warp) == (other.cta, other.warp):
        return None
    if other.unfenced_tcgen05:
        return "missing-tcgen05-fence", "needs tcgen05.fence::after_thread_sync"
    if kind_of(one) in ("tcgen05.ld", "tcgen05.st") and not _is_handed_on(one, other):
        return "missing-tcgen05-fence", "needs tcgen05.fence::before_thread_sync"
    return None


def _is_handed_on(one: Actor, other: Actor) -> bool:
    """Whether a tcgen05.fence::before_thread_sync came before the arrivals by which `other` knows
    of `one`; for MMAs tcgen05.commit implies it."""
    known = other.know.parts.get(one.home)
    return known is not None and bool(known.handed_on >> one.slot & 1)


# tcgen05.ld whose registers are needed before tcgen05.wait::ld.
#
# The ISA keeps a true dependency on the registers without a wait, but orders no access to memory
# by it (PTX ISA, "Register dependencies, same thread"): before the warp tells others anything, the
# load must have been waited for.


class TmemLoads:
    """Loads that a warp has used and not waited for."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._used: dict[Actor, dict[int, Any]] = {}

    def used(self, warp: Actor, operation: Any) -> None:
        """Something needed the registers of a load."""
        self._used.setdefault(warp, {})[operation.agent_id] = operation

    def joined(self, warp: Actor, operation: Any) -> None:
        """The warp has waited for the load."""
        used = self._used.get(warp)
        if used is not None:
            used.pop(operation.agent_id, None)

    def handed_on(self, warp: Actor, how: str) -> None:
        """The warp arrives somewhere, or exits: others may take it that it has loaded."""
        for operation in self._used.pop(warp, {}).values():

            def message(a: Site | None, b: Site | None) -> str:
                then = (
                    f"before {b}" if b is not None and b.ptx_line is not None else f"before {how}"
                )
                return f"{a}: its registers were used, but it was never waited for {then}: " + (
                    "needs tcgen05.wait::ld"
                )

            at = None if how == "the exit" else (warp, warp.instruction, how)
            load = (warp, operation.instruction, "load")
            self._findings.add("tmem-load-not-waited", load, at, message)
