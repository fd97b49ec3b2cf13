"""A warp: 32 lanes, their registers, and their control flow with divergence and reconvergence."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxemu.errors import ExecutionError
from ptxemu.machine.blocks import Block
from ptxemu.machine.code_runner import run_code
from ptxemu.machine.convergence import bits_of, lane_names
from ptxemu.machine.in_flight import Claim, touch_block, touch_predicate, touch_step
from ptxemu.machine.lane_group import Group
from ptxemu.machine.lanes import (
    FULL,
    LANE_IDS,
    NOBODY,
    WARP_SIZE,
    Lanes,
    Mask,
    count_lanes,
    held_lanes,
)
from ptxemu.machine.program import BranchNode, ExitNode, Node, Program, StepNode, SwitchNode
from ptxemu.machine.register_file import Registers, all_bits
from ptxemu.machine.special_registers import constant_special

if TYPE_CHECKING:
    from ptxemu.machine.cta import Cta
    from ptxemu.machine.engine_state import EngineState
    from ptxemu.machine.regions import Region
    from ptxemu.syntax.ast import Guard


LOOP_ROUNDS = 64
"""Rounds of a loop of pure instructions after which other warps have their turn."""
PATIENCE, LEAST_PATIENCE = 256, 4
"""Times that lanes go round a loop, nothing changing, before the other lanes of the warp run: at
first, and when that has happened often."""


class Status(Enum):
    """What a call of `Warp.advance` came to."""

    MOVED = "moved"
    BLOCKED = "blocked"
    EXITED = "exited"


# NOTE: an Enum's member through its class takes 0.2 us on Python 3.11.
_MOVED, BLOCKED, EXITED = Status.MOVED, Status.BLOCKED, Status.EXITED


class Warp:
    """One warp of a CTA.

    Lanes that diverge form groups; of the groups that can run the one with the smallest pc goes
    first, and groups that meet at a pc merge (reconvergence at the latest where code is common). A
    group that goes round without anything changing, as one that spins on a lock which other lanes
    hold, lets the others go first.
    """

    def __init__(self, agent_id: int, cta: Cta, index: int, num_lanes: int) -> None:
        self.agent_id = agent_id
        self.cta = cta
        self.index = index
        """Warp number in the CTA, threadIdx / 32."""
        self.program: Program = cta.machine.program
        self.registers: Registers = self.program.new_registers()
        alive = FULL if num_lanes == WARP_SIZE else np.less(LANE_IDS, num_lanes)
        self.alive: Mask = alive
        """Lanes that have not exited."""
        self.groups: list[Group] = [Group(0, alive)]
        self.group = self.groups[0]
        """The group that executes now, or executed last."""
        self.instruction_count = 0
        self.engines: dict[EngineState[Warp, Any], Any] = {}
        """The engines' state of this warp: groups of cp.async, bulk copies, wgmma."""
        self.last_regions: dict[int, Region] = {}
        """Where each instruction's last access to global memory went, by pc."""
        self.in_flight: dict[int, Claim] = {}
        """Registers of wgmma and tcgen05.ld operations under way, by slot."""
        self._special: dict[str, Lanes] = {}
        self._patience = PATIENCE
        self.access_alone = -1  # pc of an access that machine code could not do

    @property
    def label(self) -> str:
        """For people: "cta (0,0,0) warp 3"."""
        x, y, z = self.cta.ctaid
        return f"cta ({x},{y},{z}) warp {self.index}"

    def special(self, name: str) -> Lanes:
        """The value of a special register in every lane."""
        if (value := self._special.get(name)) is not None:
            return value
        value = constant_special(self.cta, self.index, name)
        if value is None:
            return self.cta.machine.dynamic_special(self, name)
        self._special[name] = value
        return value

    def symbol_address(self, name: str) -> int:
        """The address of a variable or a parameter, in its own state space's form."""
        return self.cta.symbol_address(name)

    def lanes_now(self) -> tuple[int, int]:
        """Lanes that execute the visible instruction now, and that have not exited, as bits."""
        guard = self.program.function.instructions[self.group.pc - 1].guard
        alive = bits_of(self.alive)
        if guard is None and len(self.groups) == 1:
            return alive, alive
        return bits_of(self._guarded(guard, self.group.mask)), alive

    def advance(self) -> Status:
        """Execute up to and including the next visible instruction of one group that can run.

        Behind those that concern no other warp it may go on, for `Machine.step_share`.
        """
        group = self._runnable()
        if group is None:
            return EXITED if not self.groups else BLOCKED
        self.group = group
        program, machine, left = self.program, self.cta.machine, LOOP_ROUNDS
        nodes, is_heard = program.nodes, machine.observer is not None
        while True:
            pc = group.pc
            if not is_heard and pc not in program.plain and not self.in_flight:
                is_over = run_code(self, group)
                if is_over is not None:
                    left -= 1
                    if is_over or left <= 0:
                        return _MOVED
                    continue
            node = nodes[pc]
            if type(node) is StepNode:
                status = self._run_step(node, group)
                left -= machine.step_share
                if left <= 0 or not (node.goes_on and status is _MOVED and len(self.groups) < 2):
                    return status
            elif type(node) is Block:
                left -= self._run_block(node, group, left) - 1
                if len(self.groups) > 1 and self._other_goes_first(group):
                    return _MOVED
            elif type(node) is BranchNode:
                backward = self._run_branch(node, group)
                if len(self.groups) > 1:
                    return _MOVED
                if backward:
                    left -= 1
                    if left <= 0 or not self._is_loop(group, node):
                        return _MOVED
            else:
                return self._part(node, group)

    def _part(self, node: Node | None, group: Group) -> Status:
        """Lanes go to several places, or are done; None: behind the last instruction."""
        if type(node) is SwitchNode:
            self._run_switch(node, group)
            return _MOVED
        if type(node) is ExitNode:
            self._run_exit(node, group)
        else:
            self._remove_lanes(group, group.mask)
        return _MOVED if self.groups else EXITED

    def sleep(self) -> bool:
        """Nothing of this warp can go on: let it be woken; False if it must be asked again."""
        waits = [group.blocked for group in self.groups if group.blocked is not None]
        if not all(blocked.until for blocked in waits):
            return False
        for blocked in waits:
            for sleepers in blocked.until:
                sleepers.add(self)
        return True

    def wake(self) -> None:
        """Something that this warp waits for has changed."""
        self.cta.machine.woken.append(self)

    def fingerprint(self) -> int:
        """Equal for equal registers at equal places (and, very rarely, for others)."""
        places = tuple((g.pc, g.mask.tobytes()) for g in self.groups)
        return hash((self.agent_id, places, all_bits(self.registers)))

    def expire_waits(self) -> bool:
        """End the waits that have a time limit; whether there was one."""
        expired = False
        for group in self.groups:
            blocked = group.blocked
            if blocked is not None and blocked.expire is not None:
                self.group = group
                group.blocked = None
                blocked.expire()
                self._tell_unblocked(group)
                expired = True
        if expired:
            self.wake()
        return expired

    def _runnable(self) -> Group | None:
        if self.cta.machine.lanes_apart is not None:
            return self.cta.machine.lanes_apart.runnable(self)
        if len(self.groups) == 1:
            only = self.groups[0]
            if only.blocked is None and only.awaited is None:
                return only
        able = filter(self.can_run, self.groups)
        best = min(able, key=lambda group: (group.is_tired, group.pc), default=None)
        if best is None and self.groups and all(g.blocked is None for g in self.groups):
            best = self.diverged()
        if best is not None:
            if best.is_tired:  # all are: they take turns again
                for group in self.groups:
                    group.is_tired, group.loops = False, 0
            best.awaited = None
            if len(self.groups) > 1:
                self.merge(best)
        return best

    def can_run(self, group: Group) -> bool:
        """Whether what it waits for is there; it goes on behind that."""
        if (blocked := group.blocked) is not None:
            if not blocked.ready():
                return False
            self.group = group
            group.blocked = None
            if blocked.resume is not None:
                blocked.resume()
            self._tell_unblocked(group)
        return group.awaited is None or self._gathered(group)

    def _tell_unblocked(self, group: Group) -> None:
        observer = self.cta.machine.observer
        if observer is not None:
            observer.unblocked(self, self.program.function.instructions[group.pc - 1])

    def merge(self, group: Group) -> None:
        """Reconverge: groups that can run at the same pc become one."""
        for other in [g for g in self.groups if g is not group]:
            if other.pc == group.pc and other.blocked is None:
                mask = group.mask | other.mask
                group.mask = FULL if mask.all() else mask
                self.groups.remove(other)

    def _gathered(self, group: Group) -> bool:
        """Whether the lanes that `group` awaits are all at its pc."""
        assert group.awaited is not None
        missing = group.awaited & self.alive
        for other in self.groups:
            if other.pc == group.pc and other.blocked is None:
                missing = missing & ~other.mask
        return not missing.any()

    def diverged(self) -> Group:
        """All groups await lanes that wait elsewhere: the first one goes on without."""
        first = min(self.groups, key=lambda g: g.pc)
        joins = [g for g in self.groups if self._joins_elsewhere(g)]
        for group in joins if first in joins else [first]:
            group.awaited, group.may_diverge = None, True
        return first

    def _joins_elsewhere(self, group: Group) -> bool:
        node = self.program.nodes[group.pc]
        together = node.together if isinstance(node, StepNode) else None
        return together is not None and together.joins_elsewhere

    def _together(self, node: StepNode, group: Group, mask: Mask) -> bool:
        """Whether the lanes that `node` wants are here; else `group` awaits them."""
        assert node.together is not None
        missing = node.together.lanes(self, mask) & self.alive & ~mask
        may_diverge, group.may_diverge = group.may_diverge, False
        if not missing.any():
            return True
        if len(self.groups) > 1 and not may_diverge and (missing & ~group.mask).any():
            group.awaited = missing | mask
            return False
        if not node.together.joins_elsewhere:
            self.cta.machine.complain(
                "error" if node.together.is_aligned else "warning",
                "divergent-aligned" if node.together.is_aligned else "divergent-members",
                f"lanes {lane_names(mask)} execute {node.instruction.opcode} without lanes "
                f"{lane_names(missing)}",
                self,
                node.instruction,
            )
        return True

    def _other_goes_first(self, group: Group) -> bool:
        return any(g is not group and g.blocked is None and g.pc <= group.pc for g in self.groups)

    def _run_block(self, block: Block, group: Group, most: int) -> int:
        """Run a block, a loop on itself maybe up to `most` times; returns how often."""
        if self.in_flight:
            touch_block(self, block)
            most = 1
        rounds = block.run(self, group.mask, most if len(self.groups) == 1 else 1)
        self.instruction_count += rounds * (block.count + 1) - 1
        observer = self.cta.machine.observer
        if observer is not None:
            for _ in range(rounds):
                observer.block_executed(self, block.first, block.count, count_lanes(group.mask))
        group.pc = block.end
        return rounds

    def _is_loop(self, group: Group, branch: BranchNode) -> bool:
        """Whether the branch just taken closes a loop of one block."""
        block = self.program.nodes[group.pc]
        return isinstance(block, Block) and self.program.nodes[block.end] is branch

    def _guarded(self, guard: Guard | None, mask: Mask) -> Mask:
        if guard is None:
            return mask
        return held_lanes(mask, self.registers[guard.register.slot], negated=guard.negated)

    def _run_step(self, node: StepNode, group: Group) -> Status:
        mask = group.mask if node.guard is None else self._guarded(node.guard, group.mask)
        if (
            node.together is not None
            and mask is not FULL
            and mask is not NOBODY
            and not self._together(node, group, mask)
        ):
            return _MOVED
        group.pc += 1
        self.instruction_count += 1
        if mask is NOBODY:
            return _MOVED
        observer = self.cta.machine.observer
        if observer is not None:
            observer.instruction_executed(self, node.instruction, count_lanes(mask))
        if self.in_flight:
            touch_step(self, node.instruction)
        blocked = node.step(self, mask)
        if blocked is not None and not blocked.ready():
            group.blocked = blocked
            if observer is not None:
                observer.blocked(self, node.instruction, blocked.reason)
            return BLOCKED if len(self.groups) == 1 else _MOVED
        if blocked is not None and blocked.resume is not None:
            blocked.resume()
        return _MOVED

    def _run_branch(self, node: BranchNode, group: Group) -> bool:
        self.instruction_count += 1
        if self.in_flight and node.guard is not None:
            touch_predicate(self, self.program.function.instructions[group.pc])
        if node.target <= group.pc and self.cta.machine.observer is None:
            self.program.stretches.went_back(node.target, group.pc)
        taken = self._guarded(node.guard, group.mask)
        here = group.pc
        if taken is group.mask:
            group.pc = node.target
            if node.target <= here and len(self.groups) > 1:
                group.goes_back(self.cta.machine.progress, self._patience)
                if group.is_tired:
                    self._patience = max(self._patience // 2, LEAST_PATIENCE)
            return node.target <= here
        if taken is NOBODY:
            group.pc = here + 1
            return False
        stay = group.mask & ~taken
        group.pc, group.mask = here + 1, stay
        self.groups.append(Group(node.target, taken))
        return True

    def _run_switch(self, node: SwitchNode, group: Group) -> None:
        self.instruction_count += 1
        taken = self._guarded(node.guard, group.mask)
        group.pc += 1
        if taken is NOBODY:
            return
        indices = node.index(self)
        stay = group.mask & ~taken
        for index in np.unique(indices[taken]).tolist():
            if index >= len(node.targets):
                raise ExecutionError(
                    f"{node.instruction.span}: brx.idx: {self.label}: index {index} of a list of "
                    f"{len(node.targets)} targets"
                )
            self.groups.append(Group(node.targets[index], taken & (indices == index)))
        if stay.any():
            group.mask = stay
        else:
            self.groups.remove(group)

    def _run_exit(self, node: ExitNode, group: Group) -> None:
        self.instruction_count += 1
        leaving = self._guarded(node.guard, group.mask)
        group.pc += 1
        self._remove_lanes(group, leaving)

    def _remove_lanes(self, group: Group, leaving: Mask) -> None:
        self.alive = self.alive & ~leaving
        self.cta.cluster.lanes_exited.wake()
        group.mask = group.mask & ~leaving
        if not group.mask.any():
            self.groups.remove(group)
