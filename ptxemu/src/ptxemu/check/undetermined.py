"""Values that the order of relaxed accesses decides, though the accesses themselves are no race.

Relaxed atomics may come in any order: integers add up to the same, floating-point numbers do not.
And a relaxed load may read an old value, unless the write happened before it: what is harmless for
a flag, at which the kernel looks again, decides the result where the value is data. Volatile
accesses are relaxed ones to PTX; to CUDA C++ they are plain ones, and a race where nothing orders
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ptxemu.check.findings import Findings
from ptxemu.check.state import Event
from ptxemu.events import Access, AccessKind
from ptxemu.machine.blocks import Block
from ptxemu.machine.program import BranchNode, ExitNode, Program, StepNode, SwitchNode
from ptxemu.syntax.ast import Guard, Instruction, Operand, register_slots

# Reads that look at flags: their values may be old, as the kernel looks again or only asks.
#
# A load or an atomic looks at a flag if its value only decides which way the code goes, or if it
# lies in a loop that does nothing but wait for another value. The value of any other is data, and
# it matters which value it is; so it is of an atomic whose value nobody looks at.

_PASSED_ON = ("shfl", "vote", "redux", "match", "barrier", "bar")
"""Instructions between lanes, whose result is a value and no access."""
_ONLY_WAITS = frozenset(
    ("ld", "nanosleep", "fence", "membar", "prefetch", *_PASSED_ON, "activemask", "griddepcontrol")
)
"""Instructions of a loop that waits; one with others does something in every round."""
_ORDERED = frozenset(("relaxed", "acquire", "volatile"))


def data_reads(program: Any) -> frozenset[int]:
    """The pcs of the strong loads and the atomics of a kernel that do not look at a flag.

    None of what is no Program.
    """
    if not isinstance(program, Program):
        return frozenset()
    reads = [i for i in program.function.instructions if _is_strong_load(i) or _is_atomic(i)]
    if not reads:
        return frozenset()
    uses = _Uses(program)
    return frozenset(read.pc for read in reads if not uses.is_flag(read))


def wait_reads(program: Any) -> frozenset[int]:
    """The pcs of the strong loads of a kernel in loops that do nothing but wait for a value."""
    if not isinstance(program, Program):
        return frozenset()
    loads = [i for i in program.function.instructions if _is_strong_load(i)]
    if not loads:
        return frozenset()
    uses = _Uses(program)
    return frozenset(load.pc for load in loads if uses.is_awaited(load))


def _is_strong_load(instruction: Instruction) -> bool:
    return instruction.modifiers[0] == "ld" and not _ORDERED.isdisjoint(instruction.modifiers)


def _is_atomic(instruction: Instruction) -> bool:
    return instruction.modifiers[0] in ("atom", "red")


class _Uses:
    """Flow of values between a kernel's registers, whatever the order of its instructions."""

    def __init__(self, program: Program) -> None:
        self._flows: dict[int, set[int]] = {}
        """Registers that are computed with a register, by that register."""
        self._used: set[int] = set()
        """Registers that memory, or something else outside, gets to see."""
        self._acts: list[int] = []
        """pcs of instructions that a loop does not have if it only waits."""
        self._branches: list[tuple[int, int, int | None]] = []
        """pc, target and the guard's register."""
        self._predicates = {r.slot for r in program.function.registers if r.type == "pred"}
        for node in program.nodes:
            if isinstance(node, Block):
                for instruction, op in node.code:
                    self._passes(op.sources, op.destinations, instruction.guard)
            elif isinstance(node, StepNode):
                self._step(node)
            elif isinstance(node, BranchNode):
                guard = None if node.guard is None else node.guard.register.slot
                self._branches.append((node.instruction.pc, node.target, guard))
            elif isinstance(node, SwitchNode):
                self._used.update(register_slots(node.instruction.operands))
            elif isinstance(node, ExitNode) and node.guard is not None:
                self._branches.append((node.instruction.pc, -1, node.guard.register.slot))
        self._loops = [(target, pc) for pc, target, _ in self._branches if 0 <= target <= pc]

    def _passes(
        self, sources: Iterable[Operand], destinations: Iterable[Operand], guard: Guard | None
    ) -> None:
        made = set(register_slots(destinations))
        read = set(register_slots(sources)) | (
            {guard.register.slot} if guard is not None else set()
        )
        for slot in read:
            self._flows.setdefault(slot, set()).update(made)

    def _step(self, node: StepNode) -> None:
        instruction = node.instruction
        if instruction.modifiers[0] not in _ONLY_WAITS:
            self._acts.append(instruction.pc)
        if instruction.modifiers[0] in _PASSED_ON:
            self._passes(instruction.operands[1:], instruction.operands[:1], node.guard)
            return
        is_load = instruction.modifiers[0] in ("ld", "atom")
        self._used.update(
            register_slots(instruction.operands[1:] if is_load else instruction.operands)
        )

    def _reached(self, slots: Iterable[int]) -> set[int]:
        """These registers, and all that is computed with them."""
        found: set[int] = set()
        left = list(slots)
        while left:
            slot = left.pop()
            if slot in found:
                continue
            found.add(slot)
            left += self._flows.get(slot, ())
        return found

    def _is_only_branched_on(self, reached: set[int]) -> bool:
        """Whether values in these registers decide which way the code goes, and nothing else."""
        chosen = (self._flows.get(slot, set()) for slot in reached & self._predicates)
        selects = any(made - self._predicates for made in chosen)
        return not selects and self._used.isdisjoint(reached - self._predicates)

    def is_flag(self, read: Instruction) -> bool:
        """Whether a load or an atomic looks at a flag."""
        reached = self._reached_by(read)
        if _is_atomic(read) and reached.isdisjoint(self._predicates):
            return False
        return self._is_only_branched_on(reached) or self.is_awaited(read)

    def _reached_by(self, load: Instruction) -> set[int]:
        return self._reached(register_slots(load.operands[:1]))

    def is_awaited(self, load: Instruction) -> bool:
        """Whether a loop around a load does nothing but wait for another value."""
        reached = self._reached_by(load)
        around = [loop for loop in self._loops if loop[0] <= load.pc <= loop[1]]
        if not around:
            return False
        first, last = min(around, key=lambda loop: loop[1] - loop[0])
        if any(first <= pc <= last for pc in self._acts):
            return False
        return any(
            guard in reached and (target == first or not first <= target <= last)
            for pc, target, guard in self._branches
            if first <= pc <= last
        )


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
        message = lambda site, _: (
            f"{site}: several lanes add to one number, in an order that is not fixed, and with "
            "it the last bits of the sum"
        )
        place = event.actor, event.instruction, event.action
        self._findings.add(self.UNORDERED_ADDITIONS, place, None, message)


def _is_volatile(event: Event) -> bool:
    return "volatile" in event.instruction.modifiers
