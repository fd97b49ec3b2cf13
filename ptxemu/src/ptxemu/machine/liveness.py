"""Registers that matter only inside one block; the block need not give them back to the warp."""

from __future__ import annotations

from collections.abc import Sequence

from ptxemu.machine.blocks import Block
from ptxemu.syntax.ast import Instruction, register_slots

_ELSEWHERE = -1


def mark_temporaries(instructions: Sequence[Instruction], blocks: Sequence[Block]) -> None:
    """Tell each block its temporaries: registers that no other instruction names and that the
    block reads, but never before it has written them in every lane.

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
