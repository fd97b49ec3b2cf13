"""Control flow from each instruction of a kernel, and the part that a role's warps reach."""

from __future__ import annotations

import re
from collections.abc import Iterable

from flashdsa.analysis.sass import Code, Instruction

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
