"""Tables for people: counts by role, bank conflicts, where the time of waits went."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from ptxemu.trace.classes import CLASSES, Roles, role_of
from ptxemu.trace.counters import Counts
from ptxemu.trace.recorder import Recorder

_SHOWN = 12
_SHOWN_TEXT = 64


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be; the first to the left, the others to the right."""
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if k == 0 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def warp_ranges(warps: Sequence[int]) -> str:
    """ "0-3,12" """
    parts: list[list[int]] = []
    for warp in sorted(warps):
        if parts and warp == parts[-1][-1] + 1:
            parts[-1].append(warp)
        else:
            parts.append([warp])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def counters_text(counts: Sequence[Counts]) -> str:
    """Instructions by class, bytes by path and operations of each role, and bank conflicts."""
    head = ["", *(_heading(c) for c in counts)]
    classes = [c for c in CLASSES if any(one.instructions[c] for one in counts)]
    instructions = [[c, *(_number(one.instructions[c]) for one in counts)] for c in classes]
    totals = ["all", *(_number(one.instructions.total()) for one in counts)]
    parts = ["warp instructions by class", table(head, [*instructions, totals])]
    for title, name in (("bytes by path", "bytes"), ("asynchronous operations", "operations")):
        keys = sorted({key for one in counts for key in getattr(one, name)})
        if keys:
            rows = [[key, *(_number(getattr(one, name)[key]) for one in counts)] for key in keys]
            parts += ["", title, table(head, rows)]
    return "\n".join([*parts, "", conflicts_text(counts)])


def _heading(counts: Counts) -> str:
    if counts.name == f"warp {warp_ranges(counts.warps)}":
        return counts.name
    return f"{counts.name} ({warp_ranges(counts.warps)})"


def _number(value: int) -> str:
    return f"{value:,}" if value else "."


def conflicts_text(counts: Sequence[Counts]) -> str:
    """The instructions with the most bank conflicts."""
    found = [
        (count.conflicts, one.name, count)
        for one in counts
        for count in one.banks.values()
        if count.conflicts
    ]
    accesses = sum(count.executions for one in counts for count in one.banks.values())
    if not found:
        return f"bank conflicts: none in {accesses:,} shared accesses"
    found.sort(key=lambda entry: (-entry[0], entry[2].instruction.pc))
    total = sum(entry[0] for entry in found)
    rows = [
        [
            name,
            str(count.instruction.span.ptx_line),
            f"{count.executions:,}",
            f"{count.taken / count.executions:.1f}",
            f"{count.needed / count.executions:.1f}",
            f"{conflicts:,}",
            count.instruction.text[:_SHOWN_TEXT],
        ]
        for conflicts, name, count in found[:_SHOWN]
    ]
    head = ["role", "PTX line", "executed", "wavefronts", "needed", "conflicts", "instruction"]
    title = f"bank conflicts: {total:,} extra wavefronts in {accesses:,} shared accesses"
    return f"{title}\n{table(head, rows)}"


def waits_text(recorder: Recorder, roles: Roles) -> str:
    """The ticks that each role waited, by what for."""
    ticks: Counter[tuple[str, str]] = Counter()
    times: Counter[tuple[str, str]] = Counter()
    for one in recorder.slices:
        if one.kind == "wait":
            name = one.row[2]
            what = re.sub(r", (phase|use) \d+$| of cta \d+", "", one.name)
            key = name if isinstance(name, str) else role_of(roles, name), what
            ticks[key] += round(one.end - one.start)
            times[key] += 1
    if not ticks:
        return "waits: none"
    rows = [
        [role, f"{times[role, what]:,}", f"{spent:,}", what.removeprefix("wait: ")]
        for (role, what), spent in ticks.most_common(_SHOWN)
    ]
    return "longest waits\n" + table(["role", "times", "ticks", "for"], rows)
