"""Number of registers that hold a value still needed, at each instruction.

The sources are nvdisasm's marks of reads and writes. Two passes go over the control flow:

- backwards, what is read later; a write kills, a guarded one (@P0) does not, since without the
  guard the old value remains;
- forwards, what may have been written; a register that nothing has written holds nothing, however
  the guards of its reads fall.

Both err to the safe side: the count is at least the truth. nvdisasm's own count knows neither the
second pass nor which return belongs to which call, and draws registers as live from the kernel's
first instruction on; it is reported beside ours.

A call counts as what its callee holds on top of what the caller keeps. Not seen: registers that an
asynchronous instruction still reads (the A operand of a wgmma until its wait).
"""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.analysis.flow import Edges, predecessors, reach
from flashdsa.analysis.sass import Code, Instruction


@dataclass(frozen=True)
class Liveness:
    """General registers of each instruction, as bits.

    Attributes:
        before, after: that hold a value needed at it, or after it. counts: the larger of the two
            numbers, a callee's included. writes: that it writes; at a call, that the callee writes.
    """

    before: list[int]
    after: list[int]
    writes: list[int]
    counts: list[int]


def live_registers(code: Code, edges: Edges) -> Liveness:
    """The registers that every instruction of a kernel needs."""
    instructions = code.instructions
    effects = [_effect(code, edges, instruction) for instruction in instructions]
    needed_in, needed_out = _backwards(instructions, edges, effects)
    written_in, written_out = _forwards(edges, effects)
    before = [n & w for n, w in zip(needed_in, written_in, strict=True)]
    after = [n & w for n, w in zip(needed_out, written_out, strict=True)]
    counts = [
        max(
            b.bit_count(),
            (a | effect.writes).bit_count(),
            (a & b & ~effect.kills).bit_count() + effect.inside,
        )
        for a, b, effect in zip(after, before, effects, strict=True)
    ]
    return Liveness(before, after, [effect.writes for effect in effects], counts)


@dataclass(frozen=True)
class _Effect:
    """Reads and writes of an instruction; of a call, the callee's, and the most it holds."""

    reads: int
    writes: int
    kills: int
    inside: int


def _effect(code: Code, edges: Edges, instruction: Instruction) -> _Effect:
    reads, writes = instruction.reads, instruction.writes
    kills = 0 if _is_conditional(instruction) else writes
    inside = 0
    callee = next((t for t in instruction.targets if t in code.labels), None)
    if instruction.base == "CALL" and callee is not None:
        body = reach(edges, [code.labels[callee]])
        callee_reads, callee_writes = _summary(code.instructions, edges, body, code.labels[callee])
        reads |= callee_reads
        writes |= callee_writes
        kills |= callee_writes
        inside = (callee_reads | callee_writes).bit_count()
    return _Effect(reads, writes, kills, inside)


def _is_conditional(instruction: Instruction) -> bool:
    return bool(instruction.guard) and instruction.guard not in ("@PT", "@UPT")


def _summary(
    instructions: tuple[Instruction, ...], edges: Edges, body: set[int], entry: int
) -> tuple[int, int]:
    """(read before written, written) of a callee."""
    writes = 0
    needed: dict[int, int] = dict.fromkeys(body, 0)
    for index in body:
        writes |= instructions[index].writes
    changed = True
    while changed:
        changed = False
        for index in sorted(body, reverse=True):
            out = 0
            for following in edges[index]:
                out |= needed.get(following, 0)
            one = instructions[index]
            kills = 0 if _is_conditional(one) else one.writes
            now = one.reads | (out & ~kills)
            if now != needed[index]:
                needed[index] = now
                changed = True
    return needed[entry], writes


def _backwards(
    instructions: tuple[Instruction, ...], edges: Edges, effects: list[_Effect]
) -> tuple[list[int], list[int]]:
    before, after = [0] * len(instructions), [0] * len(instructions)
    changed = True
    while changed:
        changed = False
        for index in range(len(instructions) - 1, -1, -1):
            out = 0
            for following in edges[index]:
                out |= before[following]
            effect = effects[index]
            now = effect.reads | (out & ~effect.kills)
            after[index] = out
            if now != before[index]:
                before[index] = now
                changed = True
    return before, after


def _forwards(edges: Edges, effects: list[_Effect]) -> tuple[list[int], list[int]]:
    """Return what may be written before and after each; a callee starts with everything."""
    back = predecessors(edges)
    before, after = [0] * len(edges), [0] * len(edges)
    changed = True
    while changed:
        changed = False
        for index, effect in enumerate(effects):
            into = 0
            for previous in back[index]:
                into |= after[previous]
            now = into | effect.writes
            before[index] = into
            if now != after[index]:
                after[index] = now
                changed = True
    return before, after


def nearest(
    code: Code, masks: list[int], edges: Edges, at: int, registers: int
) -> dict[int, Instruction]:
    """Return, for each register, the nearest instruction from `at` with its bit in the mask.

    The search follows `edges`. Writes and edges backwards give what made the value that the
    register holds at `at`. Reads and edges forwards give what needs the value first.
    """
    found: dict[int, Instruction] = {}
    wanted = registers
    seen: set[int] = set()
    front = [at]
    while front and wanted:
        further = []
        for index in front:
            for following in edges[index]:
                if following in seen:
                    continue
                seen.add(following)
                for register in bits(masks[following] & wanted):
                    found[register] = code.instructions[following]
                wanted &= ~masks[following]
                further.append(following)
        front = further
    return found


def bits(registers: int) -> list[int]:
    """The numbers of the bits that are set."""
    return [number for number in range(registers.bit_length()) if registers >> number & 1]
