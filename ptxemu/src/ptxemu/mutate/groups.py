"""Groups of asynchronous operations: which commits and waits could change without any effect.

Each change of one commit_group or wait_group is followed through the original's run beside it: what
would still be pending after each wait? A change has an effect if something more would be pending
when its warp next does what depends on that: hands on what it knows, uses registers of a pending
product, or accesses memory that a pending operation may use too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ptxemu.events import Space
from ptxemu.syntax.ast import Function, Instruction, IntImmediate

COMMIT_REMOVED = "removed"
ONE_MORE = "one group more"
_ORIGINAL = (-1, "")


@dataclass(slots=True)
class _Queue:
    """The groups of one warp and family, under one change of the kernel."""

    uncommitted: list[int] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)

    def commit(self) -> None:
        self.groups.append(self.uncommitted)
        self.uncommitted = []

    def wait(self, keep: int) -> None:
        del self.groups[: max(len(self.groups) - keep, 0)]

    def pending(self) -> set[int]:
        return {*self.uncommitted, *(one for group in self.groups for one in group)}


class Groups:
    """Follows all warps of a kernel; `effective` names the changes that matter: (pc, mutation)."""

    def __init__(self, function: Function) -> None:
        self.effective: set[tuple[int, str]] = set()
        self._changes: dict[str, list[tuple[int, str]]] = defaultdict(lambda: [_ORIGINAL])
        for instruction in function.instructions:
            family = family_of(instruction)
            if family is None:
                continue
            changes = self._changes[family]
            changes.append((instruction.pc, COMMIT_REMOVED))
            if "commit_group" not in instruction.modifiers:
                changes.append((instruction.pc, ONE_MORE))
        self._queues: dict[tuple[int, str, tuple[int, str]], _Queue] = defaultdict(_Queue)
        self._registers: dict[int, frozenset[int]] = {}
        self._more: dict[int, dict[tuple[int, str], set[int]]] = defaultdict(dict)
        """Operations that a change leaves pending and the original does not, by warp and change."""

    def issued(self, warp: int, operation: Any) -> None:
        """A warp has started an operation that joins a group."""
        family = "wgmma" if operation.kind == "wgmma" else _copy_family(operation.instruction)
        if family is None or family not in self._changes:
            return
        self._registers[operation.agent_id] = frozenset(operation.registers)
        for change in self._open_changes(family):
            self._queues[warp, family, change].uncommitted.append(operation.agent_id)

    def executed(self, warp: int, instruction: Instruction) -> None:
        """A warp has committed a group, or waited for groups."""
        family = family_of(instruction)
        if family is None:
            return
        is_commit = "commit_group" in instruction.modifiers
        keep = _kept(instruction)
        original: set[int] = set()
        for change in self._open_changes(family):
            queue = self._queues[warp, family, change]
            is_here = change[0] == instruction.pc
            if is_commit:
                if not is_here:
                    queue.commit()
                continue
            if "wait_all" in instruction.modifiers and not is_here:
                queue.commit()
            if not is_here:
                queue.wait(keep)
            elif change[1] == ONE_MORE:
                queue.wait(keep + 1)
            if change is _ORIGINAL:
                original = queue.pending()
            elif more := queue.pending() - original:
                self._more[warp][change] = more
            else:
                self._more[warp].pop(change, None)

    def handed_on(self, warp: int) -> None:
        """A warp lets others know what it knows, or exits."""
        self.effective.update(self._missing(warp))

    def accessed(self, warp: int, space: Space) -> None:
        """A warp accesses memory; products use shared memory only."""
        for change, more in self._missing(warp).items():
            if space is Space.SHARED or not all(self._registers[one] for one in more):
                self.effective.add(change)

    def touched(self, warp: int, slots: Iterable[int]) -> None:
        """A warp uses registers of products."""
        used = set(slots)
        for change, more in self._missing(warp).items():
            if any(used & self._registers[one] for one in more):
                self.effective.add(change)

    def is_pending(self, warp: int) -> bool:
        """Whether anything would be pending that is not, for `touched`."""
        return bool(self._missing(warp))

    def _open_changes(self, family: str) -> list[tuple[int, str]]:
        """Those that have had no effect yet: what they leave pending grows from loop to loop."""
        return [change for change in self._changes[family] if change not in self.effective]

    def _missing(self, warp: int) -> dict[tuple[int, str], set[int]]:
        """Return the warp's part of `_more`, for changes that have had no effect yet."""
        more = self._more.get(warp, {})
        if not self.effective.isdisjoint(more):
            for change in self.effective & more.keys():
                del more[change]
        return more


def family_of(instruction: Instruction) -> str | None:
    """wgmma, bulk or cp.async where the instruction commits or waits for groups."""
    modifiers = instruction.modifiers
    if not {"commit_group", "wait_group", "wait_all"} & set(modifiers):
        return None
    if modifiers[0] == "wgmma":
        return "wgmma"
    return _copy_family(instruction)


def _copy_family(instruction: Instruction) -> str | None:
    modifiers = instruction.modifiers
    if modifiers[0] != "cp" or "mbarrier" in modifiers:
        return None
    if "bulk" not in modifiers:
        return "cp.async"
    is_grouped = {"bulk_group", "commit_group", "wait_group"} & set(modifiers)
    return "bulk" if is_grouped else None


def _kept(instruction: Instruction) -> int:
    counts: Iterator[int] = (
        operand.value for operand in instruction.operands if isinstance(operand, IntImmediate)
    )
    return next(counts, 0)
