"""tcgen05.ld whose registers are needed before tcgen05.wait::ld.

The ISA keeps a true dependency on the registers without a wait, but orders no access to memory by
it (PTX ISA, "Register dependencies, same thread"): before the warp tells others anything, the load
must have been waited for.
"""

from __future__ import annotations

from typing import Any

from ptxemu.check.findings import Findings, Site
from ptxemu.check.state import Actor


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
