"""A run of a launch in which `Orders` says who makes each step of synchronisation."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from ptxemu.events import Access, AccessKind, Agent, FanOut, Observer, OnProgress
from ptxemu.machine.blocks import Block
from ptxemu.machine.grid import skip_time
from ptxemu.machine.lane_group import Group
from ptxemu.machine.program import BranchNode, ExitNode, Program, StepNode, SwitchNode
from ptxemu.machine.state import Machine, Warp
from ptxemu.machine.warp import BLOCKED, EXITED, advance
from ptxemu.sched.orders import READ, WRITE, Orders
from ptxemu.sched.policy import Guided
from ptxemu.sched.scheduler import LIVELOCK_ROUNDS, Scheduler
from ptxemu.syntax.ast import Instruction, Sink, register_slots

_STRONG = {"relaxed", "acquire", "release", "acq_rel", "volatile", "mmio"}
_COMMUTING = {"add", "min", "max", "and", "or", "xor", "inc", "dec"}
_FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f64"}
_ROUNDS_WITHOUT_A_STEP = 4096
"""Instructions of a warp between two steps after which the others go on."""
_MBARRIERS: Hashable = "mbarriers"


def is_step(instruction: Instruction, *, with_mbarriers: bool) -> bool:
    """Whether an instruction synchronises in a way that depends on who comes first.

    Args:
        with_mbarriers: the kernel looks at mbarriers without waiting (mbarrier.test_wait), so
            that arrivals are steps too.
    """
    first, *more = instruction.modifiers
    if first in ("atom", "red"):
        return "async" not in more
    if first in ("ld", "st", "multimem"):
        return not _STRONG.isdisjoint(more)
    return first == "mbarrier" and with_mbarriers


def not_explored(program: Program) -> list[str]:
    """Parts of a kernel's behaviour that could be otherwise in no order that is tried, in words."""
    instructions = program.function.instructions
    found = []
    if any("%clock" in one.text or "%globaltimer" in one.text for one in instructions):
        found.append("other times (%clock, %globaltimer)")
    if any(one.modifiers[0] == "clusterlaunchcontrol" for one in instructions):
        found.append("other clusters that are cancelled (clusterlaunchcontrol)")
    looks = any(_looks_once(one) for one in instructions)
    if looks and any("async" in one.modifiers for one in instructions):
        found.append("other moments at which asynchronous work completes (mbarrier.test_wait)")
    return found


def _looks_once(instruction: Instruction) -> bool:
    return instruction.modifiers[:2] == ("mbarrier", "test_wait")


class GuidedScheduler(Scheduler):
    """One run of a machine in the order that `Orders` asks for.

    Between steps every warp goes on until it stands before its next step, waits or has exited;
    what the warps do there commutes, or the check reports a race. Asynchronous operations complete
    as soon as they may. A step that leaves its warp where it was, and memory too, is a look at a
    value that has not come yet: the warp waits until memory changes.
    """

    def __init__(
        self, machine: Machine, policy: Guided, *, on_progress: OnProgress | None = None
    ) -> None:
        super().__init__(machine, policy, on_progress=on_progress)
        self._orders = policy.orders
        assert isinstance(machine.program, Program)
        instructions = machine.program.function.instructions
        looks = any(map(_looks_once, instructions))
        self._steps = frozenset(
            one.pc for one in instructions if is_step(one, with_mbarriers=looks)
        )
        machine.stops = self._steps
        self._live = LiveRegisters(machine.program)
        self._heard = _Heard(policy.orders, looks=looks)
        before = machine.observer
        machine.observer = self._heard if before is None else FanOut(before, self._heard)
        self._idle_rounds = 0
        """Times that nobody could go on since the last step."""
        self._away: dict[Warp, int] = {}
        """Warps that spin between two steps, and the machine's progress when they were left."""

    def _run(self) -> None:
        self._begin()
        while True:
            self._settle()
            if not self._warps and not self._machine.pending:
                return
            enabled = [warp.agent_id for warp in self._warps if self._stands_before_a_step(warp)]
            if not enabled:
                if self._let_time_pass():
                    continue
                self._deadlock(spins=bool(self._away))
            if not self._make_step(enabled):
                return

    def _make_step(self, enabled: list[int]) -> bool:
        """Let one agent make a step; False if the run need not go on."""
        orders = self._orders
        while (agent := orders.choose(enabled)) is not None:
            warp = next(warp for warp in self._warps if warp.agent_id == agent)
            touches = self._step_of(warp)
            if touches is None:
                orders.idle()
                continue
            orders.step(touches)
            self._idle_rounds = 0
            self._check_limit()
            return True
        if orders.all_wait:
            self._deadlock(spins=True)
        orders.repeats += 1
        self._give_up()
        return False

    def _step_of(self, warp: Warp) -> dict[Hashable, str] | None:
        """Let a warp make its step; None if it only waits.

        Lanes that only wait let others of their warp go first.
        """
        while True:
            before, progress = self._live.fingerprint(warp), self._machine.progress
            group = _first(warp)
            was_tired = group is None or group.is_tired
            self._heard.begin(warp.agent_id)
            self._advance(warp)
            touches = self._heard.end()
            self._go_on(warp)
            if (
                self._machine.progress != progress
                or warp not in self._warps
                or self._live.fingerprint(warp) != before
            ):
                return touches
            if group is None or was_tired:
                return None
            group.is_tired = True
            self._go_on(warp)
            if _first(warp) is None or not self._stands_before_a_step(warp):
                return None

    def _give_up(self) -> None:
        """Another run has shown, or will show, what this one would."""
        self._machine.pending.keep(lambda operation: False)
        self._warps.keep(lambda warp: False)

    def _settle(self) -> None:
        """Let everything happen that is no step."""
        moved = True
        while moved:
            moved = bool(self._machine.pending.ready)
            self._drain()
            for warp in list(self._warps):
                moved = self._go_on(warp) or moved

    def _go_on(self, warp: Warp) -> bool:
        """Advance a warp up to its next step; whether it moved."""
        if self._away.get(warp) == self._machine.progress:
            return False
        self._away.pop(warp, None)
        moved = False
        for _ in range(_ROUNDS_WITHOUT_A_STEP):
            if warp not in self._warps or self._stands_before_a_step(warp):
                return moved
            if not self._advance(warp):
                return moved
            moved = True
        self._away[warp] = self._machine.progress
        self._check_limit()
        return moved

    def _advance(self, warp: Warp) -> bool:
        status = advance(warp)
        if status is BLOCKED:
            return False
        self.steps += 1
        if status is EXITED:
            index = next(i for i, one in enumerate(self._warps) if one is warp)
            self._remove(index, warp)
        return True

    def _stands_before_a_step(self, warp: Warp) -> bool:
        """Whether the lanes of a warp that go next stand before a step."""
        waiting = [group.blocked for group in warp.groups if group.blocked is not None]
        if any(blocked.ready() for blocked in waiting):
            return False  # these go on first, so that it is known where they stand
        group = _first(warp)
        if group is None:
            return False
        node = warp.program.nodes[group.pc] if group.pc < len(warp.program.nodes) else None
        return type(node) is StepNode and node.instruction.pc in self._steps

    def _let_time_pass(self) -> bool:
        """Nobody can go on: let clocks run, or end waits that have a limit."""
        self._idle_rounds += 1
        self._away.clear()
        return skip_time(self._machine) or (
            self._idle_rounds <= LIVELOCK_ROUNDS and self._expire_waits()
        )


def _first(warp: Warp) -> Group | None:
    """The lanes of a warp that go next."""
    able = [group for group in warp.groups if group.blocked is None and group.awaited is None]
    return min(able, key=lambda one: (one.is_tired, one.pc), default=None)


class _Heard(Observer):
    """Records what a step touches, and which agents know of each other by barriers."""

    def __init__(self, orders: Orders, *, looks: bool) -> None:
        self._orders = orders
        self._looks = looks
        self._agent = -1
        self._touches: dict[Hashable, str] = {}

    def begin(self, agent: int) -> None:
        """A step of an agent begins."""
        self._agent, self._touches = agent, {}

    def end(self) -> dict[Hashable, str]:
        """Return what the step has touched."""
        self._agent = -1
        return self._touches

    def accessed(self, access: Access) -> None:
        """Memory was read or written."""
        kind = access.kind
        if access.agent.agent_id != self._agent:
            return
        is_strong = access.order != "weak" or kind is AccessKind.ATOMIC
        if not is_strong:
            return
        how = READ if kind is AccessKind.READ else _how(access.instruction)
        for start in access.starts.tolist():
            for word in range(start >> 2, (start + access.size - 1 >> 2) + 1):
                place = access.space, access.owner, word
                before = self._touches.get(place, how)
                self._touches[place] = how if before == how else WRITE

    def instruction_executed(self, agent: Agent, instruction: Instruction, lanes: int) -> None:
        """A step at an mbarrier, of which it is not asked which."""
        if self._looks and agent.agent_id == self._agent and instruction.modifiers[0] == "mbarrier":
            is_look = "test_wait" in instruction.modifiers or "try_wait" in instruction.modifiers
            self._touches[_MBARRIERS] = READ if is_look else "arrival"

    def released(self, agent: Agent, token: Hashable, scope: str) -> None:
        """A barrier holds what the agent has done."""
        self._orders.released(agent.agent_id, token)

    def acquired(self, agent: Agent, token: Hashable, scope: str) -> None:
        """The agent knows what a barrier holds."""
        self._orders.acquired(agent.agent_id, token)

    def async_issued(self, operation: Any, issuer: Agent) -> None:
        """An operation starts with its issuer's knowledge."""
        self._orders.issued(operation.agent_id, issuer.agent_id)


def _how(instruction: Instruction) -> str:
    """Name what an atomic access, or a strong store, does to a word."""
    first, *more = instruction.modifiers
    operands = instruction.operands
    is_unseen = first == "red" or (first == "atom" and operands and isinstance(operands[0], Sink))
    operation = next((one for one in more if one in _COMMUTING), None)
    if is_unseen and operation is not None and _FLOATS.isdisjoint(more):
        return operation
    return WRITE


# Registers whose values matter at a place: some path reads them before it writes them.

_WITH_RESULT = frozenset(("ld", "atom"))
"""Opcodes of visible instructions whose first operand is written in all lanes that execute them."""


class LiveRegisters:
    """The registers of a kernel that matter, by pc; of visible instructions most count as read."""

    def __init__(self, program: Program) -> None:
        instructions = program.function.instructions
        count = len(instructions)
        reads: list[set[int]] = [set() for _ in instructions]
        writes: list[set[int]] = [set() for _ in instructions]
        for pc, instruction in enumerate(instructions):
            reads[pc], writes[pc] = _of_visible(instruction)
        for node in program.nodes:
            for instruction, op in node.code if isinstance(node, Block) else ():
                written = set(register_slots(op.destinations))
                read = set(register_slots(op.sources))
                reads[instruction.pc], writes[instruction.pc] = _guarded(instruction, read, written)
        self._live: list[set[int]] = [set() for _ in range(count + 1)]
        following = [list(_following(program, pc)) for pc in range(count)]
        changed = True
        while changed:
            changed = False
            for pc in reversed(range(count)):
                behind = set[int]().union(*(self._live[after] for after in following[pc]))
                now = reads[pc] | (behind - writes[pc])
                if now != self._live[pc]:
                    self._live[pc], changed = now, True
        self._sorted = [sorted(live) for live in self._live]

    def fingerprint(self, warp: Warp) -> tuple[object, ...]:
        """Equal where the warp's lanes stand at the same places and go on alike."""
        registers = warp.registers
        places = tuple((group.pc, group.mask.tobytes()) for group in warp.groups)
        live = {slot for group in warp.groups for slot in self._sorted[group.pc]}
        return places, tuple(registers[slot].tobytes() for slot in sorted(live))


def _of_visible(instruction: Instruction) -> tuple[set[int], set[int]]:
    first, rest = instruction.operands[:1], instruction.operands[1:]
    if instruction.modifiers[0] not in _WITH_RESULT:
        return _guarded(instruction, {*register_slots(first), *register_slots(rest)}, set())
    return _guarded(instruction, set(register_slots(rest)), set(register_slots(first)))


def _guarded(
    instruction: Instruction, read: set[int], written: set[int]
) -> tuple[set[int], set[int]]:
    """Lanes whose guard does not hold keep what was there."""
    if instruction.guard is None:
        return read, written
    return read | written | {instruction.guard.register.slot}, set()


def _following(program: Program, pc: int) -> Iterator[int]:
    node = program.nodes[pc]
    if isinstance(node, BranchNode):
        yield node.target
        if node.guard is not None:
            yield pc + 1
    elif isinstance(node, SwitchNode):
        yield from node.targets
        yield pc + 1
    elif not isinstance(node, ExitNode) or node.guard is not None:
        yield pc + 1
