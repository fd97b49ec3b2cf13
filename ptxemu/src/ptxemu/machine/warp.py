"""Runs a warp: its instructions, and its control flow with divergence and reconvergence.

Of the groups of lanes that can run the one with the smallest pc goes first, and groups that meet at
a pc merge (reconvergence at the latest where code is common). A group that goes round without
anything changing, as one that spins on a lock which other lanes hold, lets the others go first.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from ptxemu.errors import ExecutionError
from ptxemu.machine.blocks import Block
from ptxemu.machine.in_flight import touch_block, touch_predicate, touch_step
from ptxemu.machine.lane_group import Group, LanesApart
from ptxemu.machine.lanes import FULL, NOBODY, Mask, bits_of, count_lanes, lane_names
from ptxemu.machine.program import BranchNode, ExitNode, Node, StepNode, SwitchNode
from ptxemu.machine.state import LOOP_ROUNDS, Warp

LEAST_PATIENCE = 4
"""Least value of `Warp.patience`, for lanes that have often gone round with nothing changing."""


class Status(Enum):
    """Result of a call of `advance`."""

    MOVED = "moved"
    BLOCKED = "blocked"
    EXITED = "exited"


# NOTE: an Enum's member through its class takes 0.2 us on Python 3.11.
_MOVED, BLOCKED, EXITED = Status.MOVED, Status.BLOCKED, Status.EXITED


def advance(warp: Warp) -> Status:
    """Execute up to and including the next visible instruction of one group that can run.

    The group may go on after instructions that concern no other warp (`Machine.step_share`).
    """
    group = _runnable(warp)
    if group is None:
        return EXITED if not warp.groups else BLOCKED
    warp.group = group
    program, machine, left = warp.program, warp.cta.machine, LOOP_ROUNDS
    nodes, observer = program.nodes, machine.observer
    is_heard = observer is not None
    # A turn that is heard does not depend on who listens, nor on machine code.
    goes_on = is_heard and group.mask is FULL and machine.lanes_apart is None
    has_code = machine.lanes_apart is None and (
        observer is None or (goes_on and observer.takes_loads)
    )
    while True:
        pc = group.pc
        if has_code and pc not in program.plain[is_heard] and not warp.in_flight:
            is_over = run_code(warp, group, is_heard=is_heard)
            if is_over is not None:
                left -= 1
                if is_over or left <= 0:
                    return _MOVED
                continue
        node = nodes[pc]
        if type(node) is StepNode:
            status = _run_step(warp, node, group)
            if node.is_quiet and goes_on and group.pc not in machine.stops:
                continue
            left -= machine.step_share
            if left <= 0 or not (node.goes_on and status is _MOVED and len(warp.groups) < 2):
                return status
        elif type(node) is Block:
            _run_block(warp, node, group)
            goes_first = len(warp.groups) < 2 or not _other_goes_first(warp, group)
            is_start = is_heard and not node.first  # after which warps part
            if not goes_first or is_start or group.pc in machine.stops:
                return _MOVED
        elif type(node) is BranchNode:
            backward = _run_branch(warp, node, group)
            if len(warp.groups) > 1:
                return _MOVED
            if backward:
                left -= 1
                if left <= 0 or not _is_loop(warp, group, node):
                    return _MOVED
        else:
            return _part(warp, node, group)


def _part(warp: Warp, node: Node | None, group: Group) -> Status:
    """Send lanes to several targets, or end them; `node` is None after the last instruction."""
    if type(node) is SwitchNode:
        _run_switch(warp, node, group)
        return _MOVED
    if type(node) is ExitNode:
        _run_exit(warp, node, group)
    else:
        _remove_lanes(warp, group, group.mask)
    return _MOVED if warp.groups else EXITED


def sleep(warp: Warp) -> bool:
    """Nothing of this warp can go on: let it be woken; False if it must be asked again."""
    waits = [group.blocked for group in warp.groups if group.blocked is not None]
    if not all(blocked.until for blocked in waits):
        return False
    for blocked in waits:
        for sleepers in blocked.until:
            sleepers.add(warp)
    return True


def fingerprint(warp: Warp) -> int:
    """Equal for equal registers at equal places (and, very rarely, for others)."""
    places = tuple((g.pc, g.mask.tobytes()) for g in warp.groups)
    return hash((warp.agent_id, places, warp.registers.tobytes()))


def expire_waits(warp: Warp) -> bool:
    """End the waits that have a time limit; whether there was one."""
    expired = False
    for group in warp.groups:
        blocked = group.blocked
        if blocked is not None and blocked.expire is not None:
            warp.group = group
            group.blocked = None
            blocked.expire()
            _tell_unblocked(warp, group)
            expired = True
    if expired:
        warp.wake()
    return expired


def _runnable(warp: Warp) -> Group | None:
    """Choose the group that goes on, if one can."""
    if warp.cta.machine.lanes_apart is not None:
        return _runnable_apart(warp, warp.cta.machine.lanes_apart)
    if len(warp.groups) == 1:
        only = warp.groups[0]
        if only.blocked is None and only.awaited is None:
            return only
    able = [group for group in warp.groups if _can_run(warp, group)]
    best = min(able, key=lambda group: (group.is_tired, group.pc), default=None)
    if best is None or best.is_tired:
        best = _met_elsewhere(warp) or best
    if best is None and warp.groups and all(g.blocked is None for g in warp.groups):
        best = _diverged(warp)
    if best is not None:
        if best.is_tired:  # all are: they take turns again
            for group in warp.groups:
                group.is_tired, group.loops = False, 0
        best.awaited = None
        if len(warp.groups) > 1:
            _merge(warp, best)
    return best


def _runnable_apart(warp: Warp, apart: LanesApart) -> Group | None:
    """Choose as `apart` says; groups meet only where one awaits the others."""
    able = [group for group in warp.groups if _can_run(warp, group)]
    group = next((group for group in able if group.awaited is not None), None)
    if group is not None:
        _merge(warp, group)
    elif (group := _met_elsewhere(warp)) is not None:
        pass
    elif able:
        return apart.choose(able, warp.group, warp.groups)
    elif warp.groups and all(group.blocked is None for group in warp.groups):
        group = _diverged(warp)
    if group is not None:
        group.awaited = None
    return group


def _can_run(warp: Warp, group: Group) -> bool:
    """Return whether a group can run; end its wait if it is over."""
    if (blocked := group.blocked) is not None:
        if not blocked.ready():
            return False
        warp.group = group
        group.blocked = None
        if blocked.resume is not None:
            blocked.resume()
        _tell_unblocked(warp, group)
    return group.awaited is None or _gathered(warp, group)


def _tell_unblocked(warp: Warp, group: Group) -> None:
    observer = warp.cta.machine.observer
    if observer is not None:
        observer.unblocked(warp, warp.program.function.instructions[group.pc - 1])


def _merge(warp: Warp, group: Group) -> None:
    """Reconverge: groups that can run at the same pc become one."""
    for other in [g for g in warp.groups if g is not group]:
        if other.pc == group.pc and other.blocked is None:
            mask = group.mask | other.mask
            group.mask = FULL if mask.all() else mask
            warp.groups.remove(other)


def _gathered(warp: Warp, group: Group) -> bool:
    """Whether the lanes that `group` awaits are all at its pc."""
    assert group.awaited is not None
    missing = group.awaited & warp.alive
    for other in warp.groups:
        if other.pc == group.pc and other.blocked is None:
            missing = missing & ~other.mask
    return not missing.any()


def _met_elsewhere(warp: Warp) -> Group | None:
    """The first group that awaits lanes which wait for it at other instructions of the same
    qualifiers and mask: there they meet, too, and exchange values (PTX ISA, "shfl.sync")."""
    for group in sorted(warp.groups, key=lambda g: g.pc):
        joined = _joined(warp, group)
        if group.awaited is not None and joined:
            group.joined = bits_of(group.awaited)
            _meet(warp, group.awaited & warp.alive, joined)
            return group
    return None


def _diverged(warp: Warp) -> Group:
    """All groups await lanes that wait elsewhere: the first one goes on without.

    By the ISA those that wait at another instruction never come.
    """
    comes = [g for g in warp.groups if not _never_comes(warp, g)]
    first = min(comes or warp.groups, key=lambda g: g.pc)
    if not comes:
        instructions = warp.program.function.instructions
        there = instructions[_never_comes(warp, first)[0].pc]
        warp.cta.machine.complain(
            "error",
            "divergent-members",
            f"lanes {lane_names(first.mask)} wait for lanes that wait for them at {there.span} "
            f"({there.opcode}): on hardware none goes on",
            warp,
            instructions[first.pc],
        )
    first.awaited, first.may_diverge = None, True
    return first


def _never_comes(warp: Warp, group: Group) -> list[Group]:
    """The groups that `group` awaits and that wait at an instruction which it does not meet."""
    assert group.awaited is not None
    instructions = warp.program.function.instructions
    opcode = instructions[group.pc].opcode
    others = [g for g in warp.groups if g is not group and (g.mask & group.awaited).any()]
    return [g for g in others if instructions[g.pc].opcode != opcode]


def _joined(warp: Warp, group: Group) -> list[tuple[Group, Mask]]:
    """The groups that await the lanes that `group` does, at instructions of the same qualifiers,
    and their lanes that execute them; none if some lane is elsewhere."""
    if group.awaited is None:
        return []
    opcode = warp.program.function.instructions[group.pc].opcode
    awaited = missing = group.awaited & warp.alive
    joined = []
    for one in warp.groups:
        if one.awaited is None:
            continue
        node = warp.program.nodes[one.pc]
        assert isinstance(node, StepNode) and node.together is not None
        is_same = node.instruction.opcode == opcode and not node.together.is_aligned
        if is_same and np.array_equal(one.awaited & warp.alive, awaited):
            mask = warp.guarded(node.guard, one.mask)
            joined.append((one, mask))
            missing = missing & ~mask
    return [] if missing.any() else joined


def _meet(warp: Warp, lanes: Mask, joined: list[tuple[Group, Mask]]) -> None:
    """The lanes that groups awaited are there; each goes on with what all of them give."""
    given = None
    for one, mask in joined:
        node = warp.program.nodes[one.pc]
        assert isinstance(node, StepNode) and node.together is not None
        if node.together.given is not None:
            values = node.together.given(warp)
            given = values if given is None else np.where(mask, values, given)
    for one, _ in joined:
        one.awaited, one.may_diverge, one.met = None, True, (given, lanes)


def _together(warp: Warp, node: StepNode, group: Group, mask: Mask) -> bool:
    """Whether the lanes that `node` wants are here; else `group` awaits them."""
    assert node.together is not None
    missing = node.together.lanes(warp, mask) & warp.alive & ~mask
    may_diverge, group.may_diverge = group.may_diverge, False
    if not missing.any():
        if group.passed is not None:
            _complain_of_passed(warp, node, group)
        return True
    if len(warp.groups) > 1 and not may_diverge and (missing & ~group.mask).any():
        group.awaited = missing | mask
        return False
    if group.met is None:
        warp.cta.machine.complain(
            "error" if node.together.is_aligned else "warning",
            "divergent-aligned" if node.together.is_aligned else "divergent-members",
            f"lanes {lane_names(mask)} execute {node.instruction.opcode} without lanes "
            f"{lane_names(missing)}",
            warp,
            node.instruction,
        )
    return True


def _complain_of_passed(warp: Warp, node: StepNode, group: Group) -> None:
    """Lanes that an `.aligned` instruction wants have gone past it, and exited."""
    assert group.passed is not None and node.together is not None
    passed = group.passed & ~warp.alive
    if passed.any() and node.together.is_aligned:
        warp.cta.machine.complain(
            "error",
            "skipped-aligned",
            f"lanes {lane_names(passed)} went past {node.instruction.opcode}, which all lanes of "
            "the warp execute or none",
            warp,
            node.instruction,
        )


def _note_passed(warp: Warp, group: Group, mask: Mask) -> None:
    """Lanes execute something while other groups may await them at instructions before."""
    for other in warp.groups:
        if other.awaited is not None and other.pc < group.pc:
            passed = other.awaited & mask
            other.passed = passed if other.passed is None else other.passed | passed


def _other_goes_first(warp: Warp, group: Group) -> bool:
    return any(g is not group and g.blocked is None and g.pc <= group.pc for g in warp.groups)


def _run_block(warp: Warp, block: Block, group: Group) -> None:
    if warp.in_flight:
        touch_block(warp, block)
    block.run(warp, group.mask)
    warp.instruction_count += block.count
    observer = warp.cta.machine.observer
    if observer is not None:
        observer.block_executed(warp, block.first, block.count, count_lanes(group.mask))
    group.pc = block.end


def _is_loop(warp: Warp, group: Group, branch: BranchNode) -> bool:
    """Whether the branch just taken closes a loop of one block."""
    block = warp.program.nodes[group.pc]
    return isinstance(block, Block) and warp.program.nodes[block.end] is branch


def _run_step(warp: Warp, node: StepNode, group: Group) -> Status:
    mask = group.mask if node.guard is None else warp.guarded(node.guard, group.mask)
    if (
        node.together is not None
        and mask is not FULL
        and mask is not NOBODY
        and not _together(warp, node, group, mask)
    ):
        return _MOVED
    if len(warp.groups) > 1:
        _note_passed(warp, group, mask)
    group.passed = None
    group.pc += 1
    warp.instruction_count += 1
    if mask is NOBODY:
        return _MOVED
    observer = warp.cta.machine.observer
    if observer is not None:
        observer.instruction_executed(warp, node.instruction, count_lanes(mask))
    group.joined = 0
    if warp.in_flight:
        touch_step(warp, node.instruction)
    blocked = node.step(warp, mask)
    group.met = None
    if blocked is not None and not blocked.ready():
        group.blocked = blocked
        if observer is not None:
            observer.blocked(warp, node.instruction, blocked.reason)
        return BLOCKED if len(warp.groups) == 1 else _MOVED
    if blocked is not None and blocked.resume is not None:
        blocked.resume()
    return _MOVED


def _run_branch(warp: Warp, node: BranchNode, group: Group) -> bool:
    warp.instruction_count += 1
    if warp.in_flight and node.guard is not None:
        touch_predicate(warp, warp.program.function.instructions[group.pc])
    taken = warp.guarded(node.guard, group.mask)
    here = group.pc
    if taken is group.mask:
        group.pc = node.target
        if node.target <= here and len(warp.groups) > 1:
            group.goes_back(warp.cta.machine.progress, warp.patience)
            if group.is_tired:
                warp.patience = max(warp.patience // 2, LEAST_PATIENCE)
        return node.target <= here
    if taken is NOBODY:
        group.pc = here + 1
        return False
    stay = group.mask & ~taken
    group.pc, group.mask = here + 1, stay
    warp.groups.append(Group(node.target, taken))
    return True


def _run_switch(warp: Warp, node: SwitchNode, group: Group) -> None:
    warp.instruction_count += 1
    taken = warp.guarded(node.guard, group.mask)
    group.pc += 1
    if taken is NOBODY:
        return
    indices = node.index(warp)
    stay = group.mask & ~taken
    for index in np.unique(indices[taken]).tolist():
        if index >= len(node.targets):
            raise ExecutionError(
                f"{node.instruction.span}: brx.idx: {warp.label}: index {index} of a list of "
                f"{len(node.targets)} targets"
            )
        warp.groups.append(Group(node.targets[index], taken & (indices == index)))
    if stay.any():
        group.mask = stay
    else:
        warp.groups.remove(group)


def _run_exit(warp: Warp, node: ExitNode, group: Group) -> None:
    warp.instruction_count += 1
    leaving = warp.guarded(node.guard, group.mask)
    group.pc += 1
    _remove_lanes(warp, group, leaving)


def _remove_lanes(warp: Warp, group: Group, leaving: Mask) -> None:
    warp.cta.cluster.lanes_exited.wake()
    if leaving is warp.alive:
        warp.alive = group.mask = NOBODY
        warp.groups.clear()
        return
    warp.alive = warp.alive & ~leaving
    group.mask = group.mask & ~leaving
    if not group.mask.any():
        warp.groups.remove(group)


# A warp goes on by machine code: chains of blocks and weak accesses.


def run_code(warp: Warp, group: Group, *, is_heard: bool) -> bool | None:
    """Let the lanes go on by machine code: whether the warp's turn is over then.

    No register belongs to an operation.

    Args:
        is_heard: the observer is told of loads in a row (`Observer.loaded`); else there is none.

    Returns:
        None where there is none for what is next; nothing was done then.
    """
    program = warp.program
    chain = program.chain(group.pc, is_heard=is_heard)
    if (
        chain is None
        or group.pc == warp.access_alone
        or warp.cta.machine.memory.allow_unregistered
        or (len(warp.groups) > 1 and _meets_others(warp, group, chain.end))
    ):
        return None
    if not chain.run(warp, group):
        warp.access_alone = group.pc
        return False
    return len(warp.groups) > 1


def _meets_others(warp: Warp, group: Group, end: int) -> bool:
    """Whether other lanes of the warp are before `end`."""
    return any(other is not group and other.pc < end for other in warp.groups)
