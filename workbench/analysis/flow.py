"""Control flow from each instruction of a kernel, and the number of registers live at each.

The sources of the latter are nvdisasm's marks of reads and writes. Two passes go over the flow:

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

import re
from collections.abc import Iterable
from dataclasses import dataclass

from workbench.analysis.sass import Code, Instruction

Edges = list[list[int]]
_ENDS = frozenset({"EXIT", "RET", "KILL"})
_BARRIER = re.compile(r"\bB(\d+)\b")


def successors(code: Code) -> Edges:
    """The instructions that may come next, of each; a call goes on behind itself.

    Called functions are reached by no edge: their code is in the same section, but what they hold
    is counted at the call (see `live_registers`).
    """
    joins = _joins(code)
    edges: Edges = []
    count = len(code.instructions)
    for index, instruction in enumerate(code.instructions):
        following: list[int] = []
        if instruction.base != "CALL":
            following += [code.labels[t] for t in instruction.targets if _jumps(instruction, t)]
        if instruction.base == "BSYNC":
            following += joins.get(_barrier(instruction), [])
        if _falls_through(instruction, following):
            following.append(index + 1)
        edges.append(sorted({f for f in following if f < count}))
    return edges


def _jumps(instruction: Instruction, target: str) -> bool:
    return target.startswith(".L_x_") and instruction.base not in ("BSSY", "RET")


def _falls_through(instruction: Instruction, following: list[int]) -> bool:
    if instruction.base in _ENDS:
        return bool(instruction.guard)
    if instruction.base == "BSYNC":
        return not following
    if instruction.base in ("BRX", "JMX"):
        return not following
    if instruction.base not in ("BRA", "JMP"):
        return True
    # A condition is a guard, an operand before the target, or a vote (.ANY, .DIV, .CONV).
    operands = instruction.text.partition(instruction.opcode)[2].split("`")[0].strip()
    return bool(instruction.guard or operands) or instruction.opcode not in ("BRA", "JMP")


def _barrier(instruction: Instruction) -> str:
    found = _BARRIER.search(instruction.text)
    return found.group(1) if found else ""


def _joins(code: Code) -> dict[str, list[int]]:
    """Convergence barrier -> where BSYNC goes on, for barriers that name another place.

    Nearly always the instruction behind a BSYNC is the one that its BSSY names; then no entry is
    needed. A BSYNC elsewhere may go on at any of its barrier's.
    """
    named: dict[str, set[int]] = {}
    behind: dict[str, set[int]] = {}
    for index, instruction in enumerate(code.instructions):
        if instruction.base == "BSSY":
            targets = {code.labels[t] for t in instruction.targets if t in code.labels}
            named.setdefault(_barrier(instruction), set()).update(targets)
        elif instruction.base == "BSYNC":
            behind.setdefault(_barrier(instruction), set()).add(index + 1)
    return {b: sorted(t) for b, t in named.items() if not behind.get(b, set()) <= t}


def reach(edges: Edges, starts: Iterable[int], stops: frozenset[int] = frozenset()) -> set[int]:
    """Return what is reached from `starts`, without entering `stops`."""
    seen: set[int] = set()
    waiting = [start for start in starts if start not in stops]
    while waiting:
        at = waiting.pop()
        if at not in seen:
            seen.add(at)
            waiting += [n for n in edges[at] if n not in seen and n not in stops]
    return seen


def predecessors(edges: Edges) -> Edges:
    """The same edges backwards."""
    back: Edges = [[] for _ in edges]
    for index, following in enumerate(edges):
        for target in following:
            back[target].append(index)
    return back


def dominators(edges: Edges) -> list[int]:
    """The immediate dominator of each instruction reached from the first one; -1 elsewhere.

    Source: Cooper, Harvey, Kennedy: A Simple, Fast Dominance Algorithm (2001).
    """
    order = _postorder(edges)
    rank = {node: place for place, node in enumerate(order)}
    back = predecessors(edges)
    above = [-1] * len(edges)
    above[0] = 0
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            found = -1
            for before in back[node]:
                if above[before] >= 0:
                    found = before if found < 0 else _common(found, before, above, rank)
            if found != above[node]:
                above[node] = found
                changed = True
    return above


def common_dominator(nodes: Iterable[int], above: list[int], share: float) -> int | None:
    """The last instruction that every path to most of the nodes has passed; None of no nodes.

    Args:
        share: of the nodes that it must dominate, above a half. Less than 1 forgives lines that
            the compiler gave to an instruction of another place.
    """
    reached = [node for node in nodes if above[node] >= 0]
    below: dict[int, int] = {}
    depth: dict[int, int] = {}
    for node in reached:
        path = [node]
        while path[-1] != 0:
            path.append(above[path[-1]])
        for distance, at in enumerate(reversed(path)):
            below[at] = below.get(at, 0) + 1
            depth[at] = distance
    enough = [node for node, count in below.items() if count >= share * len(reached)]
    return max(enough, key=lambda node: depth[node], default=None)


def dominated(root: int, above: list[int]) -> set[int]:
    """The instructions that are reached through `root` only, itself included."""
    inside: dict[int, bool] = {0: root == 0, root: True}
    for node, parent in enumerate(above):
        if parent < 0:
            continue
        path = []
        at = node
        while at not in inside:
            path.append(at)
            at = above[at]
        for below in path:
            inside[below] = inside[at]
    return {node for node, yes in inside.items() if yes}


def _postorder(edges: Edges) -> list[int]:
    order: list[int] = []
    seen = {0}
    stack = [(0, iter(edges[0]))]
    while stack:
        node, rest = stack[-1]
        for target in rest:
            if target not in seen:
                seen.add(target)
                stack.append((target, iter(edges[target])))
                break
        else:
            order.append(node)
            stack.pop()
    return order


def _common(a: int, b: int, above: list[int], rank: dict[int, int]) -> int:
    while a != b:
        while rank[a] < rank[b]:
            a = above[a]
        while rank[b] < rank[a]:
            b = above[b]
    return a


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
