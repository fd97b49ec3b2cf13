"""Records a run's timeline: what warps and asynchronous units did when, and who waited for whom."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ptxemu.events import Access, Agent, Observer, Space
from ptxemu.trace.classes import class_of, unit_of
from ptxemu.trace.clock import Clock, clock

if TYPE_CHECKING:
    from ptxemu.syntax.ast import Instruction

MAX_SLICES = 400_000
"""Recording stops there, with `Recorder.truncated` set."""
MARKED_CLASSES = ("sync", "copy", "tensor", "tmem")
"""Visible instructions of these classes get slices of their own inside the warp's."""

Row: TypeAlias = tuple[int, str, int | str]
"""CTA number in the grid; "warp" and its number there, or "unit" and its name."""


@dataclass(slots=True)
class Slice:
    """Something that took a while on a row."""

    row: Row
    name: str
    kind: str
    """run, wait, instruction or operation."""
    start: float
    end: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Flow:
    """An arrow from a signal to the wait that it ended."""

    source: Slice
    source_time: float
    target: Slice


@dataclass(slots=True)
class _Wait:
    slice: Slice
    reason: Callable[[], str] | None
    tokens: list[Hashable] = field(default_factory=list)
    cause: tuple[float, Slice] | None = None
    """The latest signal that it waited for: its time, and the slice that sent it."""


class Recorder(Observer):
    """Listens to a run and keeps its slices and arrows.

    Attributes:
        slices: in order of their ends.
        flows: one for each wait whose end is known.
        ctas: the label of each CTA that ran, by number.
        truncated: the run was longer than MAX_SLICES.
    """

    def __init__(self, *, time: str = "parallel", max_slices: int = MAX_SLICES) -> None:
        self.clock: Clock = clock(time)
        self.slices: list[Slice] = []
        self.flows: list[Flow] = []
        self.ctas: dict[int, str] = {}
        self.complaints: list[Slice] = []
        self.truncated = False
        self._max_slices = max_slices
        self._rows: dict[int, Row] = {}
        self._runs: dict[int, Slice] = {}
        self._operations: dict[int, Slice] = {}
        self._waits: dict[int, list[_Wait]] = {}
        self._signals: dict[Hashable, tuple[float, Slice]] = {}

    def cta_started(self, cta: Any) -> None:
        """A process with a row for each of its warps."""
        self.ctas[cta.index] = f"cta ({','.join(map(str, cta.ctaid))})"
        for warp in cta.warps:
            self._rows[warp.agent_id] = (cta.index, "warp", warp.index)

    def cta_exited(self, cta: Any) -> None:
        """Its warps run no longer."""
        for warp in cta.warps:
            self._close_run(warp)

    def instruction_executed(self, agent: Agent, instruction: Instruction, lanes: int) -> None:
        """A visible instruction, with a slice of its own if it synchronises or starts something."""
        run = self._run(agent)
        start = self.clock.now(agent)
        self._executed(agent, run, 1)
        if class_of(instruction) in MARKED_CLASSES:
            mark = Slice(
                run.row,
                ".".join(instruction.modifiers[:3]),
                "instruction",
                start,
                self.clock.now(agent),
                {"instruction": instruction, "lanes": lanes},
            )
            self._keep(mark)

    def block_executed(self, agent: Agent, first_pc: int, count: int, lanes: int) -> None:
        """Pure instructions."""
        self._executed(agent, self._run(agent), count)

    def _run(self, agent: Agent) -> Slice:
        run = self._runs.get(agent.agent_id)
        if run is None:
            now = self.clock.now(agent)
            run = Slice(self._rows[agent.agent_id], "run", "run", now, now, {"instructions": 0})
            self._runs[agent.agent_id] = run
        return run

    def _executed(self, agent: Agent, run: Slice, count: int) -> None:
        self.clock.executed(agent, count)
        run.details["instructions"] += count
        run.end = self.clock.now(agent)

    def _close_run(self, agent: Agent) -> None:
        run = self._runs.pop(agent.agent_id, None)
        if run is not None and run.end > run.start:
            self._keep(run)

    def _keep(self, one: Slice) -> None:
        if len(self.slices) < self._max_slices:
            self.slices.append(one)
        else:
            self.truncated = True

    def blocked(self, agent: Agent, instruction: Instruction, reason: Callable[[], str]) -> None:
        """A wait begins; whether the warp's run ends is known when the wait does."""
        wait = self._new_wait(agent, instruction)
        wait.reason = reason
        self._waits.setdefault(agent.agent_id, []).append(wait)

    def unblocked(self, agent: Agent, instruction: Instruction) -> None:
        """The wait is over."""
        waits = self._waits.get(agent.agent_id, [])
        wait = next((w for w in waits if w.slice.details["instruction"] is instruction), None)
        if wait is not None:
            waits.remove(wait)
            self._finish_wait(agent, wait)

    def _new_wait(self, agent: Agent, instruction: Instruction) -> _Wait:
        now = self.clock.now(agent)
        details = {"instruction": instruction}
        return _Wait(Slice(self._rows[agent.agent_id], "", "wait", now, now, details), None)

    def _finish_wait(self, agent: Agent, wait: _Wait) -> None:
        one = wait.slice
        one.end = self.clock.now(agent)
        if one.end <= one.start:
            return
        run = self._runs.get(agent.agent_id)
        if run is not None and run.end <= one.start:  # nothing ran meanwhile: a wait of all lanes
            self._close_run(agent)
        elif run is not None:
            run.end = max(run.end, one.end)
        names = [token_name(token) for token in wait.tokens]
        opcode = ".".join(one.details["instruction"].modifiers[:2])
        one.name = f"wait: {names[-1]}" if names else f"wait: {opcode}"
        self._keep(one)
        if wait.cause is not None:
            time, source = wait.cause
            self.flows.append(Flow(source, time, one))

    def released(self, agent: Agent, token: Hashable, scope: str) -> None:
        """Remember who signalled last."""
        operation = self._operation(agent)
        self.clock.released(agent, token)
        now = self.clock.now(agent)
        source = operation if operation is not None else self._run(agent)
        known = self._signals.get(token)
        if known is None or now >= known[0]:
            self._signals[token] = (now, source)

    def acquired(self, agent: Agent, token: Hashable, scope: str) -> None:
        """Part of a wait, or a wait in the clock's time only."""
        self._learn(
            agent, self._signals.get(token), token, lambda: self.clock.acquired(agent, token)
        )

    def async_joined(self, agent: Agent, operation: Any, reads_only: bool) -> None:
        """Part of a wait for a group."""
        done = self._operations.get(operation.agent_id)
        cause = None if done is None else (done.end, done)
        self._learn(agent, cause, None, lambda: self.clock.joined(agent, operation))

    def _learn(
        self,
        agent: Agent,
        cause: tuple[float, Slice] | None,
        token: Hashable,
        advance: Callable[[], None],
    ) -> None:
        warp: Any = agent
        instruction = warp.program.function.instructions[warp.group.pc - 1]
        open_waits = self._waits.get(agent.agent_id, ())
        wait = next((w for w in open_waits if w.slice.details["instruction"] is instruction), None)
        is_part = wait is not None
        wait = wait or self._new_wait(agent, instruction)
        advance()
        if token is not None:
            wait.tokens.append(token)
        if cause is not None and (wait.cause is None or cause[0] >= wait.cause[0]):
            wait.cause = cause
        if not is_part:
            self._finish_wait(agent, wait)

    def async_issued(self, operation: Any, issuer: Agent) -> None:
        """A slice begins on its unit's row."""
        self.clock.issued(operation, issuer)
        now = self.clock.now(operation)
        unit = unit_of(operation)
        row = (operation.cta.index, "unit", unit)
        details = {"instruction": operation.instruction, "issuer": issuer.label, "bytes": 0}
        if operation.shape is not None:
            details["shape"] = operation.shape
        one = Slice(row, operation.kind, "operation", now, now, details)
        self._operations[operation.agent_id] = one

    def _operation(self, agent: Agent) -> Slice | None:
        """The slice of an operation that does a step; None for a warp."""
        one = self._operations.get(agent.agent_id)
        if one is not None and "issued" not in one.details:
            one.details["issued"] = one.start
            begun = self.clock.begun(agent)
            one.start = one.start if begun is None else begun
        return one

    def accessed(self, access: Access) -> None:
        """Bytes that an operation moves take its time."""
        one = self._operation(access.agent)
        if one is not None:
            size = len(access.starts) * access.size
            one.details["bytes"] += size
            self.clock.moved(access.agent, size if access.space is Space.SHARED else 0)

    def async_completed(self, operation: Any) -> None:
        """The slice ends."""
        one = self._operation(operation)
        assert one is not None
        self.clock.completed(operation)
        one.end = max(self.clock.now(operation), one.start + 1)
        self._keep(one)

    def complained(
        self,
        level: str,
        code: str,
        message: str,
        agent: Agent | None,
        instruction: Instruction | None,
    ) -> None:
        """A mark on the row of whoever did it."""
        if agent is None:
            return
        operation = self._operations.get(agent.agent_id)
        row = operation.row if operation is not None else self._rows[agent.agent_id]
        now = self.clock.now(agent)
        self.complaints.append(
            Slice(row, f"{level}: {code}", "complaint", now, now, {"message": message})
        )

    def finish(self) -> None:
        """The run is over, perhaps by a deadlock: close what is open."""
        for run in self._runs.values():
            if run.end > run.start:
                self._keep(run)
        self._runs.clear()
        for waits in self._waits.values():
            for wait in waits:
                one = wait.slice
                one.end = max([one.start + 1, *(s.end for s in self.slices[-1:])])
                reason = wait.reason() if wait.reason is not None else "?"
                one.name = f"never ends: {reason}"
                self._keep(one)
        self._waits.clear()


def token_name(token: Hashable) -> str:
    """A barrier and its phase, for people."""
    if not isinstance(token, tuple) or len(token) < 3:
        return str(token)
    kind, owner, *rest = token
    if kind == "mbarrier":
        return f"mbarrier 0x{rest[0]:x} of cta {owner}, phase {rest[1]}"
    if kind == "barrier":
        return f"barrier {rest[0]}, use {rest[1]}"
    if kind == "cluster_barrier":
        return f"cluster barrier, phase {rest[0]}"
    return " ".join(map(str, token))
