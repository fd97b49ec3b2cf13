"""Barriers that only some warps of a CTA execute: what is unordered there has one all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptxemu.check.findings import Site
    from ptxemu.check.state import Actor
    from ptxemu.syntax.ast import Instruction

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
