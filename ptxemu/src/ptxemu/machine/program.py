"""A kernel decoded once: blocks, steps, branches and exits by pc; gaps reported before a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from ptxemu.errors import UnsupportedInstructionError
from ptxemu.machine.blocks import Block
from ptxemu.machine.codegen import BlockFunction
from ptxemu.machine.decoded import AccessStep, Decoded, PlainAccess, PureOp, Step, identity
from ptxemu.machine.independence import concerns_nobody_else
from ptxemu.machine.lane_group import Group
from ptxemu.machine.lanes import ALL_BITS, Mask, mask_of
from ptxemu.machine.operands import LaneReader, reader
from ptxemu.machine.register_file import RegisterLayout
from ptxemu.machine.special_registers import parameter_word
from ptxemu.machine.state import Warp
from ptxemu.syntax.ast import Function, Guard, Instruction, IntImmediate, Symbol, register_slots

_ELSEWHERE = -1


def mark_temporaries(instructions: Sequence[Instruction], blocks: Sequence[Block]) -> None:
    """Tell each block its temporaries, which it need not give back to the warp: registers that no
    other instruction names and that it reads, but never before it has written them in every lane.

    What is written and never read stays in the warp, for whoever looks at it from outside.
    """
    home = _homes(instructions, blocks)
    for number, block in enumerate(blocks):
        read, read_first = _reads(block)
        block.temporaries = frozenset(slot for slot in read - read_first if home[slot] == number)


def _homes(instructions: Sequence[Instruction], blocks: Sequence[Block]) -> dict[int, int]:
    """Return, by register, the number of the only block that names it, or `_ELSEWHERE`."""
    place = [_ELSEWHERE] * len(instructions)
    for number, block in enumerate(blocks):
        place[block.first : block.end] = [number] * block.count
    home: dict[int, int] = {}
    for instruction in instructions:
        here = place[instruction.pc]
        guard = () if instruction.guard is None else (instruction.guard.register,)
        for slot in register_slots((*guard, *instruction.operands)):
            if home.setdefault(slot, here) != here:
                home[slot] = _ELSEWHERE
    return home


def _reads(block: Block) -> tuple[set[int], set[int]]:
    """Registers that the block reads, and those whose value from before it can matter."""
    read: set[int] = set()
    exposed: set[int] = set()
    written: set[int] = set()
    for instruction, reads, writes in block.slots:
        if instruction.guard is not None:  # the other lanes keep what was there
            reads, writes = reads | writes, frozenset()
        read |= reads
        exposed |= reads - written
        written |= writes
    return read, exposed


# Lanes that execute an instruction together: all live ones (`.aligned`) or a member mask's.

RequiredLanes: TypeAlias = Callable[["Warp", Mask], Mask]

_WITH_MEMBERS = ("shfl", "vote", "match", "redux", "elect")
_CTA_BARRIERS = ("sync", "arrive", "red", "cta")


@dataclass(frozen=True, slots=True)
class Together:
    """The lanes that an instruction wants at its pc before it executes.

    A warp's lanes that are still on their way there (blocked in a branch that only they took, say)
    are waited for, as compiled code does at the point where control flow joins.
    """

    lanes: RequiredLanes
    is_aligned: bool
    """`.aligned`: every live lane of the warp; otherwise the lanes of the member mask, which may
    stand at different instructions of the same qualifiers and mask."""
    given: LaneReader | None = None
    """The value that each lane gives the others."""


def together(instruction: Instruction) -> Together | None:
    """Return the lanes that must be together at an instruction; None if every lane may go alone."""
    base, *rest = instruction.modifiers
    if "aligned" in rest or (base == "bar" and rest[0] in _CTA_BARRIERS):
        return Together(lambda warp, mask: warp.alive, is_aligned=True)
    if base == "bar" and rest[0] == "warp":
        return Together(_members(instruction), is_aligned=False)
    if base in _WITH_MEMBERS and "sync" in rest:
        given = None
        if base != "elect":
            type_ = "pred" if base == "vote" else instruction.modifiers[-1]
            given = reader(instruction.operands[1], type_)
        return Together(_members(instruction), is_aligned=False, given=given)
    return None


def _members(instruction: Instruction) -> RequiredLanes:
    """The lanes of the member mask, which is the last operand."""
    operand = instruction.operands[-1]
    if isinstance(operand, IntImmediate) and operand.value & ALL_BITS == ALL_BITS:
        return lambda warp, mask: warp.alive
    read = reader(operand, "u32")

    def lanes(warp: Warp, mask: Mask) -> Mask:
        bits = int(np.bitwise_or.reduce(read(warp)[mask]))
        return mask_of(bits) & warp.alive

    return lanes


@dataclass(frozen=True, slots=True)
class StepNode:
    """One visible instruction."""

    instruction: Instruction
    step: Step
    guard: Guard | None
    together: Together | None = None
    access: PlainAccess | None = None
    goes_on: bool = False
    """No other warp can wait for it: a warp's turn may go on after it."""
    is_quiet: bool = False
    """A weak load: where somebody listens, the turn of a whole warp goes on after it."""


@dataclass(frozen=True, slots=True)
class BranchNode:
    """bra: lanes whose guard holds go to `target`."""

    instruction: Instruction
    target: int
    guard: Guard | None


@dataclass(frozen=True, slots=True)
class SwitchNode:
    """brx.idx: lanes whose guard holds go to the target that their index names."""

    instruction: Instruction
    index: LaneReader
    targets: tuple[int, ...]
    guard: Guard | None


@dataclass(frozen=True, slots=True)
class ExitNode:
    """ret or exit: lanes whose guard holds are done."""

    instruction: Instruction
    guard: Guard | None


QUIET_SPACES = ("shared::cta", "global")
"""Spaces of loads after which a turn goes on."""


class Chain(Protocol):
    """Blocks and weak accesses in a row, for lanes that are all together."""

    @property
    def end(self) -> int:
        """The pc after it."""
        ...

    def run(self, warp: Warp, group: Group) -> bool:
        """Execute it and move the lanes; False where the instruction at their pc is to be executed
        by itself."""
        ...


class ThreadedBlocks(Protocol):
    """Makes threaded code of a kernel's blocks, which finds registers by `Program.layout`."""

    def block(self, block: Block) -> BlockFunction | None:
        """A block, or None where that does not serve."""
        ...

    def chain(self, first: int, *, is_heard: bool) -> Chain | None:
        """Return the chain that begins at `first`; None if it would be no more than a block.

        Args:
            is_heard: an observer is told of its accesses, which are quiet loads.
        """
        ...


ThreadedMaker: TypeAlias = "Callable[[Program, int], ThreadedBlocks | None]"
"""Told how many instructions NumPy is about to do, gives it from when it pays on."""
Node: TypeAlias = Block | StepNode | BranchNode | SwitchNode | ExitNode


class Program:
    """The decoded instructions of one kernel.

    `nodes[pc]` is the node that starts at pc; None inside a block. Every label starts a node.
    """

    def __init__(
        self,
        function: Function,
        decode: Callable[[Instruction], Decoded],
        make_threaded: ThreadedMaker | None = None,
    ) -> None:
        """`make_threaded` makes machine code of blocks and of accesses between them."""
        self.function = function
        self._decode_instruction = decode
        by_slot = sorted(function.registers, key=lambda register: register.slot)
        self.layout = RegisterLayout([register.type for register in by_slot])
        """Locations of registers."""
        self._make_threaded = make_threaded
        self._threaded: ThreadedBlocks | None = None
        self._chains: tuple[dict[int, Chain | None], ...] = ({}, {})
        self.plain: tuple[set[int], set[int]] = (set(), set())
        """Pcs where no chain begins: of those that nobody hears, and of those that are heard."""
        self.executed = 0
        """Instructions of blocks executed until there is threaded code."""
        self.nodes: list[Node | None] = [None] * (len(function.instructions) + 1)
        self._decode()

    def chain(self, first: int, *, is_heard: bool) -> Chain | None:
        """Return the chain that begins at `first`; None if it would be no more than a node."""
        chains = self._chains[is_heard]
        if first in chains:
            return chains[first]
        if self._threaded is None:
            return None
        chain = chains[first] = self._threaded.chain(first, is_heard=is_heard)
        if chain is None:
            self.plain[is_heard].add(first)
        return chain

    def _as_threaded_code(self, block: Block) -> BlockFunction | None:
        """Threaded code of a block that is about to run, from when it pays on."""
        if self._threaded is None:
            assert self._make_threaded is not None
            self.executed += block.count
            self._threaded = self._make_threaded(self, block.count)
            if self._threaded is None:
                return None
        block.make_threaded = None
        return self._threaded.block(block)

    def _decode(self) -> None:
        gaps: list[str] = []
        leaders = set(self.function.labels.values())
        run: list[tuple[Instruction, PureOp]] = []

        def close() -> None:
            if run:
                self.nodes[run[0][0].pc] = Block(run)
                run.clear()

        for instruction in self.function.instructions:
            if instruction.pc in leaders:
                close()
            try:
                decoded = self._decode_one(instruction)
            except UnsupportedInstructionError as error:
                gaps.append(str(error))
                continue
            if isinstance(decoded, PureOp):
                run.append((instruction, decoded))
            else:
                close()
                self.nodes[instruction.pc] = decoded
        close()
        if gaps:
            more = f"\n  ... and {len(gaps) - 20} more" if len(gaps) > 20 else ""
            raise UnsupportedInstructionError(
                f"kernel {self.function.name} needs {len(gaps)} instructions that ptxemu does not "
                "have:\n  " + "\n  ".join(gaps[:20]) + more
            )
        blocks = [node for node in self.nodes if isinstance(node, Block)]
        mark_temporaries(self.function.instructions, blocks)
        if self._make_threaded is not None:
            for block in blocks:
                block.make_threaded = self._as_threaded_code

    def _of_parameters(self, access: PlainAccess) -> PureOp | None:
        """A load of the kernel's parameters as a move of constants; None of other accesses."""
        base = access.address.base
        if access.space != "param" or not isinstance(base, Symbol):
            return None
        known = [one for one in self.function.parameters if one.name == base.name]
        start, size = base.addend + access.address.offset, access.element
        count = len(access.registers)
        if not known or start < 0 or start + size * count > known[0].size:
            return None
        first = known[0].offset + start
        places = [parameter_word(first + size * number, size) for number in range(count)]
        types = (f"{'s' if access.is_signed else 'b'}{8 * size}",) * count
        return PureOp(identity, types, types, access.registers, tuple(places))

    def _decode_one(self, instruction: Instruction) -> PureOp | Node:
        name = instruction.modifiers[0]
        if name == "bra":
            (label,) = instruction.operands
            if not isinstance(label, Symbol):
                raise UnsupportedInstructionError(f"{instruction.span}: indirect branch")
            return BranchNode(instruction, self.function.labels[label.name], instruction.guard)
        if name == "brx":
            index, targets = instruction.operands
            assert isinstance(targets, Symbol)
            labels = self.function.branch_targets[targets.name]
            places = tuple(self.function.labels[label] for label in labels)
            return SwitchNode(instruction, reader(index, "u32"), places, instruction.guard)
        if name in ("ret", "exit"):
            return ExitNode(instruction, instruction.guard)
        decoded = self._decode_instruction(instruction)
        if isinstance(decoded, PureOp):
            return decoded
        guard, joined = instruction.guard, together(instruction)
        if isinstance(decoded, AccessStep):
            access = decoded.access
            if (moves := self._of_parameters(access)) is not None:
                return moves
            is_quiet = guard is None and not access.is_store and access.space in QUIET_SPACES
            return StepNode(instruction, decoded.step, guard, joined, access, True, is_quiet)
        on = concerns_nobody_else(instruction)
        return StepNode(instruction, decoded, guard, joined, goes_on=on)
