"""The launch before, which may still write while this one runs (programmatic dependent launch)."""

from __future__ import annotations

from ptxemu.check import races
from ptxemu.check.findings import Findings
from ptxemu.check.state import Actor, Event
from ptxemu.events import Access, Space
from ptxemu.global_writes import Earlier
from ptxemu.syntax.ast import Instruction

HOME = -1
"""Home of the launch before, among clusters, in an agent's knowledge."""
_WAIT = ("griddepcontrol", "wait")


class EarlierGrid:
    """Reports accesses to what the launch before writes, of agents that know of no wait for it."""

    def __init__(self, findings: Findings, earlier: Earlier) -> None:
        self._findings = findings
        self._earlier = earlier

    def executed(self, actor: Actor, instruction: Instruction) -> None:
        """An agent executes an instruction: a wait?"""
        if instruction.modifiers == _WAIT:
            actor.know.part(HOME, 1).done = 1

    def accessed(self, access: Access, event: Event) -> None:
        """May the launch before still write there?"""
        known = event.actor.know.parts.get(HOME)
        if access.space is not Space.GLOBAL or (known is not None and known.done):
            return
        at = self._earlier.writes.touched(access)
        if at is not None:
            message = lambda first, _: (
                f"{first} of global memory 0x{at:x}, which kernel {self._earlier.kernel}, "
                "launched before, may still write: needs griddepcontrol.wait "
                "(cudaGridDependencySynchronize) before it"
            )
            self._findings.add("missing-grid-wait", races.place(event), None, message)
