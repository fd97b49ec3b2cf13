"""Values that the order of relaxed accesses decides, though the accesses themselves are no race.

Relaxed atomics may come in any order: integers add up to the same, floating-point numbers do not.
And a relaxed load may read an old value, unless the write happened before it: what is harmless for
a flag, at which the kernel looks again, decides the result where the value is data. Volatile
accesses are relaxed ones to PTX; to CUDA C++ they are plain ones, and a race where nothing orders
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ptxemu.check.flag_reads import data_reads
from ptxemu.events import Access, AccessKind

if TYPE_CHECKING:
    from ptxemu.check.findings import Findings, Site
    from ptxemu.check.state import Event
    from ptxemu.syntax.ast import Instruction


class Undetermined:
    """Judges strong accesses that nothing orders."""

    UNORDERED_ADDITIONS = "unordered-float-additions"
    VOLATILE_RACE = "volatile-race"
    MISSING_ACQUIRE = "missing-acquire"

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._data_reads: frozenset[int] = frozenset()

    def started(self, program: Any) -> None:
        """The kernel's program is known."""
        self._data_reads = data_reads(program)

    def reads_data(self, instruction: Instruction) -> bool:
        """Whether a strong load, or an atomic, looks at no flag."""
        return instruction.pc in self._data_reads

    def judge(self, first: Event, second: Event) -> tuple[str, str] | None:
        """The code and the missing edge of two strong accesses in each other's scope.

        Args:
            first, second: of different agents, or of two proxies; one writes.
        """
        if first.adds_floats and second.adds_floats:
            if second.actor.knows(first):
                return None
            return self.UNORDERED_ADDITIONS, (
                "the order of these additions is not fixed, and with it the last bits of the sum: "
                "for the same bits every time it needs a release and an acquire"
            )
        if second.actor.knows(first):
            return None
        if self._is_race_in_cuda(first, second):
            is_write = second.kind is AccessKind.WRITE
            if not is_write and second.actor.has_seen(first.actor, first.clock):
                return self.MISSING_ACQUIRE, (
                    "an atomic in between has seen what a fence behind the first released, as in "
                    "CUDA's example of __threadfence(); by PTX's letter it needs a fence behind "
                    "the atomic, too"
                )
            return self.VOLATILE_RACE, (
                "volatile accesses are relaxed ones, which order nothing: needs a barrier, or a "
                "fence and a flag on both sides"
            )
        for read in (first, second):
            if read.kind is AccessKind.READ and self._may_be_old(read):
                return "stale-read", (
                    "the value that is read may be old, though the kernel does not look again: "
                    "needs a release and an acquire"
                )
        return None

    def _is_race_in_cuda(self, first: Event, second: Event) -> bool:
        """Whether a volatile write and a volatile access or an atomic, in no order, are a race in
        CUDA C++, and no flag."""
        write, other = (second, first) if second.kind is AccessKind.WRITE else (first, second)
        if write.kind is not AccessKind.WRITE or not _is_volatile(write):
            return False
        if not (other.kind is AccessKind.ATOMIC or _is_volatile(other)):
            return False
        if other.kind is not AccessKind.READ and second.is_silent:
            return False
        return other.kind is AccessKind.WRITE or other.instruction.pc in self._data_reads

    def _may_be_old(self, read: Event) -> bool:
        return read.instruction.pc in self._data_reads and not read.is_behind_sc

    def lanes(self, event: Event, access: Access) -> None:
        """Several lanes of one instruction that add to one number do so in any order."""
        starts = access.starts.tolist()
        if len(starts) == len(set(starts)):
            return

        def message(site: Site | None, _: Site | None) -> str:
            return (
                f"{site}: several lanes add to one number, in an order that is not fixed, and with "
                "it the last bits of the sum"
            )

        place = event.actor, event.instruction, event.action
        self._findings.add(self.UNORDERED_ADDITIONS, place, None, message)


def _is_volatile(event: Event) -> bool:
    return "volatile" in event.instruction.modifiers
