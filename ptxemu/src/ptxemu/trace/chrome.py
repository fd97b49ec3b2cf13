"""A recording as Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

A process is a CTA; its threads are warps and asynchronous units. Slices of a row that overlap
without nesting go to further rows of the same name. One tick of the logical clock is shown as one
microsecond.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ptxemu.trace.recorder import Recorder, Row, Slice
from ptxemu.trace.roles import Roles

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
