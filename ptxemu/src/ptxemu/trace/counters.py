"""Counts of a run: instructions by class, bytes by path and bank conflicts, for each warp role."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.events import Access, AccessKind, Agent, Observer, Space
from ptxemu.machine.lanes import WARP_SIZE
from ptxemu.machine.state import Warp
from ptxemu.syntax.ast import Instruction, Vector
from ptxemu.trace.classes import Roles, class_of, guessed_roles, is_store_unit, role_of, unit_of

# Bank conflicts of a warp's access to shared memory.
#
# 32 banks of 4 bytes. Lanes that want different words of one bank are served one after another;
# lanes that want the same word share it. Accesses of 8 bytes go in two half-warps, of 16 bytes in
# four quarter-warps; ldmatrix and stmatrix in matrices of eight 16-byte rows.

NUM_BANKS = 32
BANK_BYTES = 4


@dataclass(frozen=True, slots=True)
class Wavefronts:
    """Wavefronts of shared memory for one instruction."""

    needed: int
    """Phases that have active lanes: what it takes with no conflict."""
    taken: int

    @property
    def conflicts(self) -> int:
        """Wavefronts beyond what was needed."""
        return self.taken - self.needed


def wavefronts(starts: NDArray[np.int64], size: int, lanes: NDArray[np.intp]) -> Wavefronts:
    """Return the wavefronts of one access.

    Args:
        starts: first byte of each active lane's piece; of each row for a matrix access.
        size: bytes of each piece.
        lanes: lane of each piece; number of the row for a matrix access.
    """
    per_phase = min(WARP_SIZE, NUM_BANKS * BANK_BYTES // max(size, BANK_BYTES))
    phases = lanes // per_phase
    needed = taken = 0
    words_per_piece = max(1, size // BANK_BYTES)
    for phase in np.unique(phases):
        first = starts[phases == phase] // BANK_BYTES
        words = np.unique(first[:, None] + np.arange(words_per_piece))
        needed += 1
        taken += int(np.bincount(words % NUM_BANKS).max())
    return Wavefronts(needed, taken)


_MATRIX_INSTRUCTIONS = ("ldmatrix", "stmatrix")
_ACTIONS = {AccessKind.READ: "ld", AccessKind.WRITE: "st", AccessKind.ATOMIC: "atomic"}


@dataclass(slots=True)
class BankCount:
    """Shared accesses of one instruction of a role."""

    instruction: Instruction
    executions: int = 0
    needed: int = 0
    taken: int = 0

    @property
    def conflicts(self) -> int:
        """Wavefronts beyond what was needed."""
        return self.taken - self.needed

    def add(self, other: BankCount) -> None:
        """Count another one's accesses too."""
        self.executions += other.executions
        self.needed += other.needed
        self.taken += other.taken


@dataclass(slots=True)
class Counts:
    """Work of one warp of every CTA, or of all warps of one role."""

    name: str
    warps: list[int] = field(default_factory=list)
    """Warp numbers in the CTA."""
    instructions: Counter[str] = field(default_factory=Counter)
    """Instructions by class (`classes.CLASSES`)."""
    bytes: Counter[str] = field(default_factory=Counter)
    """Bytes by path; bytes of an asynchronous operation count for the warp that issued it."""
    operations: Counter[str] = field(default_factory=Counter)
    """Asynchronous operations by unit."""
    banks: dict[int, BankCount] = field(default_factory=dict)
    """Shared accesses by pc."""

    @property
    def conflicts(self) -> int:
        """Bank conflicts of all its instructions."""
        return sum(count.conflicts for count in self.banks.values())

    def add(self, other: Counts) -> None:
        """Count another one's work as this one's."""
        self.warps += other.warps
        self.instructions.update(other.instructions)
        self.bytes.update(other.bytes)
        self.operations.update(other.operations)
        for pc, theirs in other.banks.items():
            self.banks.setdefault(pc, BankCount(theirs.instruction)).add(theirs)

    def to_json_dict(self) -> dict[str, Any]:
        """Return the counts for `--json`."""
        return {
            "role": self.name,
            "warps": self.warps,
            "instructions": dict(self.instructions),
            "bytes": dict(self.bytes),
            "operations": dict(self.operations),
            "bank_conflicts": [
                {
                    "ptx_line": count.instruction.span.ptx_line,
                    "instruction": count.instruction.text,
                    "executions": count.executions,
                    "wavefronts": count.taken,
                    "conflicts": count.conflicts,
                }
                for count in self.banks.values()
            ],
        }


class Counters(Observer):
    """Counts what warps and the operations that they issue do."""

    def __init__(self) -> None:
        self._warps: list[Warp] = []
        self._blocks: Counter[tuple[int, int]] = Counter()
        self._steps: Counter[tuple[int, int]] = Counter()
        self._counts: dict[int, Counts] = {}
        self._by_agent: dict[int, Counts] = {}
        self._known_wavefronts: dict[tuple[int, bytes, bytes], Wavefronts] = {}

    def cta_started(self, cta: Any) -> None:
        """Warps of the same number in all CTAs count as one."""
        for warp in cta.warps:
            counts = self._counts.setdefault(warp.index, Counts(f"warp {warp.index}", [warp.index]))
            self._by_agent[warp.agent_id] = counts
            self._warps.append(warp)

    def instruction_executed(self, agent: Agent, instruction: Instruction, lanes: int) -> None:
        """One visible instruction."""
        self._steps[agent.agent_id, instruction.pc] += 1

    def block_executed(self, agent: Agent, first_pc: int, count: int, lanes: int) -> None:
        """A run of pure ones."""
        self._blocks[agent.agent_id, first_pc] += 1

    def async_issued(self, operation: Any, issuer: Agent) -> None:
        """An operation counts for its issuer."""
        counts = self._by_agent[operation.agent_id] = self._by_agent[issuer.agent_id]
        counts.operations[unit_of(operation)] += 1
        if operation.instruction.modifiers[0] == "wgmma":
            counts.bytes["MMA shared read"] += _wgmma_bytes(operation.instruction)

    def accessed(self, access: Access) -> None:
        """Bytes by path, and the banks of shared accesses."""
        counts = self._by_agent[access.agent.agent_id]
        path = path_of(access)
        if path is None:
            return
        counts.bytes[path] += len(access.starts) * access.size
        if access.space is Space.SHARED and not hasattr(access.agent, "issuer"):
            self._count_banks(counts, access)

    def _count_banks(self, counts: Counts, access: Access) -> None:
        instruction = access.instruction
        if instruction.modifiers[0] in _MATRIX_INSTRUCTIONS:
            lanes = np.arange(len(access.starts))
        else:
            lanes = _lanes(access)
        origin = access.starts - (int(access.starts.min()) & ~127)
        key = access.size, origin.tobytes(), lanes.tobytes()
        found = self._known_wavefronts.get(key)
        if found is None:
            found = wavefronts(access.starts, access.size, lanes)
            self._known_wavefronts[key] = found
        count = counts.banks.get(instruction.pc)
        if count is None:
            count = counts.banks[instruction.pc] = BankCount(instruction)
        count.executions += 1
        count.needed += found.needed
        count.taken += found.taken

    def guessed_roles(self) -> dict[int, str]:
        """Return the role that each warp seems to have, by warp number."""
        return guessed_roles({index: counts.operations for index, counts in self._counts.items()})

    def by_role(self, roles: Roles) -> list[Counts]:
        """The counts so far, in order of warp number; warps of one role together."""
        self._expand()
        found: dict[str, Counts] = {}
        for index, counts in sorted(self._counts.items()):
            name = role_of(roles, index)
            found.setdefault(name, Counts(name)).add(counts)
        return list(found.values())

    def _expand(self) -> None:
        """Sum the instructions; what a warp executed beyond what was told is control flow."""
        for counts in self._counts.values():
            counts.instructions.clear()
        warps = {warp.agent_id: warp for warp in self._warps}
        told: Counter[int] = Counter()
        classes: dict[int, Counter[str]] = {}
        for (agent_id, pc), times in self._steps.items():
            instruction = warps[agent_id].program.function.instructions[pc]
            self._by_agent[agent_id].instructions[class_of(instruction)] += times
            told[agent_id] += times
        for (agent_id, first), times in self._blocks.items():
            node: Any = warps[agent_id].program.nodes[first]
            if first not in classes:
                classes[first] = Counter(class_of(instruction) for instruction, _ in node.code)
            total = self._by_agent[agent_id].instructions
            for name, count in classes[first].items():
                total[name] += count * times
            told[agent_id] += node.count * times
        for agent_id, warp in warps.items():
            left = warp.instruction_count - told[agent_id]
            self._by_agent[agent_id].instructions["control"] += left


def path_of(access: Access) -> str | None:
    """The path whose bytes an access counts for; None for mbarrier objects, for what moves no
    bytes, and for the side of a copy that the other side already counts."""
    agent: Any = access.agent
    modifiers = access.instruction.modifiers
    if modifiers[0] == "mbarrier" or modifiers[:2] == ("tcgen05", "dealloc"):
        return None
    if hasattr(agent, "issuer"):
        return _operation_path(access, unit_of(agent))
    action = _ACTIONS[access.kind]
    if access.space is Space.SHARED and access.owner != agent.cta.index:
        return f"DSMEM {action}"
    return f"{access.space.value} {action}"


def _operation_path(access: Access, unit: str) -> str | None:
    is_read = access.kind is AccessKind.READ
    if unit == "tensor core":
        if access.instruction.modifiers[0] == "wgmma":
            return None  # each of the four warps reports all of B: `_wgmma_bytes` counts instead
        return f"MMA {access.space.value} {'read' if is_read else 'write'}"
    if unit in ("TMEM load", "TMEM store"):
        return f"tmem {'ld' if is_read else 'st'}"
    if unit == "TMEM copy":
        return None if is_read else "shared -> tmem"
    if unit == "TMEM shift":
        return None if is_read else "tmem -> tmem"
    if unit.endswith("prefetch"):
        return None
    if is_store_unit(unit):
        to_global = access.space is Space.GLOBAL and not is_read
        return f"shared -> global ({unit})" if to_global else None
    if is_read:
        return None
    if unit in ("DSMEM copy", "remote store"):
        return f"shared -> DSMEM ({unit})"
    return f"global -> {access.space.value} ({unit})"


def _wgmma_bytes(instruction: Instruction) -> int:
    """A warp's share of what a warpgroup reads of shared memory: 32 bytes of K of each row of A,
    unless A is in registers, and of each column of B."""
    shape = next(m for m in instruction.modifiers if m.startswith("m64n"))
    columns = int(shape.removeprefix("m64n").split("k")[0])
    rows = 0 if isinstance(instruction.operands[1], Vector) else 64
    return (rows + columns) * 32 // 4


def _lanes(access: Access) -> NDArray[np.intp]:
    """The lane of each piece of a warp's access, from the warp's state as it executes."""
    warp: Any = access.agent
    mask = warp.group.mask
    guard = access.instruction.guard
    if guard is not None:
        held = warp.registers[guard.register.slot]
        mask = mask & (~held if guard.negated else held)
    lanes: NDArray[np.intp] = np.flatnonzero(mask)
    if len(lanes) == len(access.starts):
        return lanes
    return np.arange(len(access.starts)) % WARP_SIZE
