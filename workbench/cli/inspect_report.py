"""Register reports on the screen, as Markdown and as plain data."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashdsa.cli.console import (
    LEFT,
    RIGHT,
    WRAP,
    Rows,
    TextTable,
    new_console,
    print_tables,
    table_as_markdown,
)
from workbench.analysis.cubin import CTA_REGISTERS
from workbench.analysis.report import KernelReport, Peak, RoleReport
from workbench.analysis.sass import PTX_TEXT

_NAME_CHARACTERS = 60
_HOW = {"made": "makes them", "needed": "needs them"}
_COLOURS = {"ok": "green", "tight": "yellow", "spills": "bold red"}


def as_document(target: str, reports: list[KernelReport]) -> dict[str, Any]:
    """The document of --json."""
    return {"target": target, "kernels": [asdict(report) for report in reports]}


def print_report(report: KernelReport) -> None:
    """Tables on the screen, then a sentence for each role."""
    console = new_console()
    console.print(_heading(report) + "\n", markup=False, style="bold")
    print_tables(console, _tables(report), _COLOURS)
    for line in [*_advice(report), *report.notes]:
        console.print(f"- {line}", markup=False)
    console.print()


def as_markdown(report: KernelReport) -> str:
    """The same for a document."""
    rest = "\n".join(f"- {line}" for line in [*_advice(report), *report.notes])
    tables = map(table_as_markdown, _tables(report))
    return "\n\n".join([f"### {_heading(report)}", *tables, rest])


def _heading(report: KernelReport) -> str:
    # CuTe DSL appends the arguments' types to a function's name.
    own = re.match(r"kernel_cutlass_([a-z0-9_]+)_(?:[A-Z]|tensorptr|_)", report.name)
    name = own.group(1) if own else report.name
    short = name if len(name) <= _NAME_CHARACTERS else name[:_NAME_CHARACTERS] + "..."
    return f"{short} for {report.arch}"


def _tables(report: KernelReport) -> list[TextTable]:
    peaks = [_peak(role) for role in report.roles if role.peak.holders]
    return [_facts(report), _mix(report), _roles(report), *peaks]


def _facts(report: KernelReport) -> TextTable:
    threads = "" if report.threads is None else f" with {report.threads} threads a CTA"
    rows: Rows = [
        ("registers at launch", str(report.registers), f"of {report.register_limit}{threads}")
    ]
    if report.pool_used is not None:
        share = f"of {CTA_REGISTERS:,}, roles at their budgets"
        rows.append(("registers of the CTA", f"{report.pool_used:,}", share))
    spilled = ""
    if report.spill_stores is not None:
        spilled = f"ptxas: {report.spill_stores} bytes spill stores, {report.spill_loads} loads"
    shared = "static"
    if report.dynamic_shared_bytes is not None:
        shared += f", and {report.dynamic_shared_bytes:,} dynamic by the plan"
    rows += [
        ("stack", str(report.stack_bytes), "bytes of a thread"),
        ("local stores, loads", f"{report.local_stores}, {report.local_loads}", spilled),
        ("shared memory", f"{report.static_shared_bytes:,}", f"bytes {shared}"),
        ("named barriers", str(report.barriers), ""),
        ("code", f"{report.code_bytes:,}", f"bytes, {report.instructions:,} instructions"),
    ]
    columns = [("resource", LEFT), ("amount", RIGHT), ("of what", WRAP)]
    return TextTable("Resources", columns, rows)


def _mix(report: KernelReport) -> TextTable:
    columns = [("class", LEFT), ("instructions", RIGHT), ("share", RIGHT)]
    rows: Rows = [
        (kind, f"{count:,}", f"{count / report.instructions:.1%}")
        for kind, count in report.mix.items()
    ]
    return TextTable("Instruction mix, as written (loops count once)", columns, rows)


def _roles(report: KernelReport) -> TextTable:
    columns = [
        ("role", LEFT), ("threads", RIGHT), ("budget", RIGHT), ("live", RIGHT),
        ("named", RIGHT), ("STL", RIGHT), ("LDL", RIGHT), ("instr.", RIGHT), ("grade", LEFT),
    ]  # fmt: skip
    rows: Rows = [
        (
            role.name,
            "?" if role.threads is None else str(role.threads),
            str(role.budget),
            str(role.live),
            str(role.named),
            str(role.local_stores),
            str(role.local_loads),
            f"{role.instructions:,}",
            role.grade.value,
        )
        for role in report.roles
    ]
    return TextTable("Roles: registers of a thread", columns, rows)


def _peak(role: RoleReport) -> TextTable:
    columns = [("registers", RIGHT), ("line", WRAP), ("that", LEFT), ("made by", WRAP)]
    rows: Rows = [
        (
            str(holder.registers),
            _line(holder.file, holder.line),
            _HOW[holder.how] if holder.file else "",
            " ".join(holder.opcodes),
        )
        for holder in role.peak.holders
    ]
    rest = role.live - sum(holder.registers for holder in role.peak.holders)
    if rest > 0:
        rows.append((str(rest), "other lines", "", ""))
    what = role.peak.sass.partition(" ")[0]
    title = f"{role.name}: what holds {role.live} registers at {_place(role.peak)}, {what}"
    return TextTable(title, columns, rows)


def _place(peak: Peak) -> str:
    if not peak.file:
        return f"{peak.address:#x}"
    return f"{_line(peak.file, peak.line)} ({peak.address:#x})"


def _line(file: str, number: int) -> str:
    if not file:
        return "(no line)"
    if file.startswith(PTX_TEXT):
        return f"PTX:{number}"
    path = Path(file)
    parts = path.parts
    for marker in ("kernels", "flashdsa", "site-packages"):
        if marker in parts:
            return "/".join(parts[parts.index(marker) + 1 :]) + f":{number}"
    relative = os.path.relpath(file)
    return f"{relative if not relative.startswith('..') else path.name}:{number}"


def _advice(report: KernelReport) -> list[str]:
    return [f"{role.name}: {role.grade.value}, {role.advice}." for role in report.roles]
