"""Records a run's timeline: what warps and asynchronous units did when, and who waited for whom."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ptxemu.events import Access, Agent, Observer, Space
from ptxemu.syntax.ast import Instruction
from ptxemu.trace.classes import Roles, class_of, unit_of
from ptxemu.trace.clock import Clock, clock

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


# A recording as Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing show.
#
# A process is a CTA; its threads are warps and asynchronous units. Slices of a row that overlap
# without nesting go to further rows of the same name. One tick of the logical clock is shown as one
# microsecond.

_COLOURS = {"wait": "grey", "run": "rail_response", "operation": "thread_state_iowait"}
"""Names of the trace viewer's palette: grey, blue and orange, which colour-blind readers tell
apart."""
_INSIDE = 0.25
"""Arrows leave this long before the end of what they signal, so that they start inside a slice."""


def to_chrome(recorder: Recorder, roles: Roles | None = None) -> dict[str, Any]:
    """The JSON document; `roles` names warps."""
    rows = _rows(recorder.slices)
    threads: dict[tuple[Row, int], int] = {}
    events: list[dict[str, Any]] = []
    for cta, label in sorted(recorder.ctas.items()):
        events.append(_metadata("process_name", cta, 0, label))
        events.append({**_metadata("process_sort_index", cta, 0), "args": {"sort_index": cta}})
    for number, (row, depth) in enumerate(sorted(rows, key=_order), start=1):
        threads[row, depth] = number
        name = _row_name(row, roles or {}) + (f" [{depth + 1}]" if depth else "")
        events.append(_metadata("thread_name", row[0], number, name))
        index = {**_metadata("thread_sort_index", row[0], number), "args": {"sort_index": number}}
        events.append(index)
    places: dict[int, tuple[int, int]] = {}
    for key, slices in rows.items():
        for one in slices:
            places[id(one)] = key[0][0], threads[key]
            events.append(_slice_event(one, *places[id(one)]))
    events += _flow_events(recorder, places)
    for complaint in recorder.complaints:
        thread = threads.get((complaint.row, 0), 0)
        events.append(_complaint_event(complaint, complaint.row[0], thread))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "made by": "ptxemu trace",
            "time": "logical: one instruction a tick; not a performance model",
            "truncated": recorder.truncated,
        },
    }


def _rows(slices: Iterable[Slice]) -> dict[tuple[Row, int], list[Slice]]:
    """Slices by row and sub-row, such that those of a sub-row nest; operations do not even that."""
    open_: dict[Row, list[list[Slice]]] = {}
    rows: dict[tuple[Row, int], list[Slice]] = {}
    for one in sorted(slices, key=lambda s: (s.start, -s.end)):
        stacks = open_.setdefault(one.row, [])
        for depth in range(len(stacks) + 1):
            if depth == len(stacks):
                stacks.append([])
            stack = stacks[depth]
            while stack and stack[-1].end <= one.start:
                stack.pop()
            if not stack or (one.kind != "operation" and one.end <= stack[-1].end):
                stack.append(one)
                rows.setdefault((one.row, depth), []).append(one)
                break
    return rows


def _order(key: tuple[Row, int]) -> tuple[int, int, int, str, int]:
    (cta, kind, name), depth = key
    number = name if isinstance(name, int) else 0
    return cta, 0 if kind == "warp" else 1, number, str(name), depth


def _row_name(row: Row, roles: Roles) -> str:
    name = row[2]
    if isinstance(name, str):
        return name
    return f"warp {name} ({roles[name]})" if name in roles else f"warp {name}"


def _metadata(kind: str, process: int, thread: int, name: str = "") -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _slice_event(one: Slice, process: int, thread: int) -> dict[str, Any]:
    args = {key: value for key, value in one.details.items() if key != "instruction"}
    instruction = one.details.get("instruction")
    if instruction is not None:
        args["ptx"] = instruction.text
        args["at"] = str(instruction.span)
    event = {
        "ph": "X",
        "name": one.name,
        "cat": one.kind,
        "pid": process,
        "tid": thread,
        "ts": one.start,
        "dur": one.end - one.start,
        "args": args,
    }
    if one.kind in _COLOURS:
        event["cname"] = _COLOURS[one.kind]
    return event


def _flow_events(recorder: Recorder, places: dict[int, tuple[int, int]]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for number, flow in enumerate(recorder.flows):
        source, target = places.get(id(flow.source)), places.get(id(flow.target))
        if source is None or target is None:
            continue
        common = {"name": "signal", "cat": "signal", "id": number}
        leaves = max(flow.source.start, min(flow.source_time, flow.source.end) - _INSIDE)
        arrives = max(leaves, flow.target.end - _INSIDE / 2)
        events.append({**common, "ph": "s", "pid": source[0], "tid": source[1], "ts": leaves})
        events.append(
            {**common, "ph": "f", "bp": "e", "pid": target[0], "tid": target[1], "ts": arrives}
        )
    return events


def _complaint_event(one: Slice, process: int, thread: int) -> dict[str, Any]:
    return {
        "ph": "i",
        "s": "t",
        "name": one.name,
        "cat": "complaint",
        "pid": process,
        "tid": thread,
        "ts": one.start,
        "args": dict(one.details),
    }
