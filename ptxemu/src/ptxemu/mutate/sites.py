"""Synchronisation sites of a kernel: instructions that can be removed or weakened, by category.

Left alone: griddepcontrol (it orders grids, and one grid runs here), barrier.red (its result would
have to be invented), and bar.warp.sync unless it is asked for (without `Policy.lanes_apart` the
lanes of a warp run in step here).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ptxemu.syntax.ast import Function, Instruction

CATEGORIES = {
    "proxy-fence": "fence.proxy.*",
    "init-fence": "fence.mbarrier_init",
    "memory-fence": "fence and membar at a scope",
    "tcgen05-fence": "tcgen05.fence::before_thread_sync and ::after_thread_sync",
    "wgmma-fence": "wgmma.fence",
    "mbarrier-wait": "mbarrier.try_wait and test_wait",
    "group-wait": "wait_group and wait_all of cp.async, bulk copies and wgmma",
    "tcgen05-wait": "tcgen05.wait::ld and ::st",
    "commit": "commit_group and tcgen05.commit",
    "barrier": "bar and barrier of a CTA",
    "cluster-barrier": "barrier.cluster.arrive and wait",
    "arrive": "arrivals on mbarriers",
    "expect-tx": "byte counts of expect_tx",
    "order": ".acquire, .release and .acq_rel of accesses, arrivals and waits",
}
"""The categories of mutants, with what each is about."""
WARP_SYNC = "warp-sync"
"""bar.warp.sync; a category of its own, for kernels whose warps' lanes are run apart."""
ORDERS = ("acquire", "release", "acq_rel")


@dataclass(frozen=True, slots=True)
class Site:
    """One synchronisation instruction of a kernel."""

    category: str
    instruction: Instruction
    number: int
    """Number among those of its category, from 1: unlike lines it stays when other code changes."""

    @property
    def name(self) -> str:
        """Name for lists of equivalent mutants: "barrier#3"."""
        return f"{self.category}#{self.number}"

    @property
    def line(self) -> int:
        """Its PTX line."""
        return self.instruction.span.ptx_line


def find_sites(function: Function, *, warp_syncs: bool = False) -> list[Site]:
    """The sites of a kernel in program order; an arrive.expect_tx is a site of two categories.

    `warp_syncs`: WARP_SYNC, too.
    """
    sites: list[Site] = []
    counts: Counter[str] = Counter()
    for instruction in function.instructions:
        categories = categories_of(instruction)
        if warp_syncs and instruction.modifiers[:2] in (("bar", "warp"), ("barrier", "warp")):
            categories = [WARP_SYNC]
        for category in categories:
            counts[category] += 1
            sites.append(Site(category, instruction, counts[category]))
    return sites


def categories_of(instruction: Instruction) -> list[str]:
    """The categories that an instruction belongs to."""
    name, *modifiers = instruction.modifiers
    found = [_category(name, modifiers)]
    if name == "mbarrier" and "expect_tx" in modifiers:
        found.append("expect-tx")
    if name not in ("fence", "membar") and any(order in modifiers for order in ORDERS):
        found.append("order")
    return [category for category in found if category is not None]


def _category(name: str, modifiers: list[str]) -> str | None:
    first = modifiers[0] if modifiers else ""
    if name in ("fence", "membar"):
        named = {"proxy": "proxy-fence", "mbarrier_init": "init-fence"}
        return named.get(first, "memory-fence")
    if name == "tcgen05":
        kind = first.split("::")[0]
        return {"fence": "tcgen05-fence", "wait": "tcgen05-wait", "commit": "commit"}.get(kind)
    if name == "wgmma":
        named = {"fence": "wgmma-fence", "commit_group": "commit", "wait_group": "group-wait"}
        return named.get(first)
    if name == "cp":
        if "commit_group" in modifiers:
            return "commit"
        if "wait_group" in modifiers or "wait_all" in modifiers:
            return "group-wait"
        return "arrive" if "mbarrier" in modifiers else None
    if name == "mbarrier":
        named = {"try_wait": "mbarrier-wait", "test_wait": "mbarrier-wait"}
        named |= {"arrive": "arrive", "arrive_drop": "arrive"}
        return named.get(first)
    return _barrier_category(name, modifiers)


def _barrier_category(name: str, modifiers: list[str]) -> str | None:
    if name not in ("bar", "barrier") or "warp" in modifiers or "red" in modifiers:
        return None
    return "cluster-barrier" if "cluster" in modifiers else "barrier"
