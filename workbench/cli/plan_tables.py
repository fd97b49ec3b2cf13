"""A kernel's plan as tables and as plain data: the forms of `python -m workbench plan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from flashdsa.cli.console import (
    LEFT,
    RIGHT,
    WRAP,
    Rows,
    TextTable,
    new_console,
    print_json,
    print_tables,
    table_as_markdown,
)
from flashdsa.hw import ARCHITECTURES, TMEM_LANES
from flashdsa.plan import Barrier, LiveRange, Role, SmemPlan, TmemPlan
from flashdsa.plan.kernel_spec import Variant

Regions = Sequence[dict[str, Any]]


def tables(document: dict[str, Any]) -> list[TextTable]:
    """Every table of a plan, in order."""
    found = [_smem_table(document["smem"])]
    if "tmem" in document:
        found.append(_tmem_table(document["tmem"]))
    memories: dict[str, Regions] = {
        name: document[name]["regions"] for name in ("smem", "tmem") if name in document
    }
    if any(region["live"] for regions in memories.values() for region in regions):
        found.append(_live_table(memories))
    found += [_barrier_table(document["barriers"]), _role_table(document)]
    if "timeline" in document:
        found.append(_timeline_table(document["timeline"]))
    return found


def _smem_table(smem: dict[str, Any]) -> TextTable:
    total, capacity = smem["total"], smem["capacity"]
    free = capacity - total
    rows: Rows = [
        (r["name"], f"{r['offset']:,}", f"{r['bytes']:,}", f"{r['share']:.1%}", r["holds"])
        for r in smem["regions"]
    ]
    table = TextTable(
        f"Shared memory: {total:,} of {capacity:,} bytes ({total / capacity:.1%})",
        [("region", LEFT), ("offset", RIGHT), ("bytes", RIGHT), ("share", RIGHT), ("holds", WRAP)],
        [*rows, ("(free)", f"{total:,}", f"{free:,}", f"{free / capacity:.1%}", "")],
    )
    return _with_sharing(table, smem["regions"], "shares bytes with")


def _tmem_table(tmem: dict[str, Any]) -> TextTable:
    allocated, capacity = tmem["allocated"], tmem["capacity"]
    rows: Rows = [
        (r["name"], f"{r['column']}-{r['column'] + r['columns']}", str(r["columns"]),
         f"{r['bytes'] // 1024}", f"{r['share']:.1%}", r["holds"])
        for r in tmem["regions"]
    ]  # fmt: skip
    table = TextTable(
        f"Tensor memory: {allocated} of {capacity} columns ({allocated / capacity:.1%})",
        [("region", LEFT), ("columns", RIGHT), ("count", RIGHT), ("KiB", RIGHT),
         ("share", RIGHT), ("holds", WRAP)],
        rows,
    )  # fmt: skip
    return _with_sharing(table, tmem["regions"], "shares columns with")


def _with_sharing(table: TextTable, regions: Regions, title: str) -> TextTable:
    """Add a column before the last one, if there are regions that share memory."""
    if not any(region["shares_with"] for region in regions):
        return table
    cells = [", ".join(region["shares_with"]) for region in regions]
    cells += [""] * (len(table.rows) - len(cells))
    return table._replace(
        columns=[*table.columns[:-1], (title, WRAP), table.columns[-1]],
        rows=[(*row[:-1], cell, row[-1]) for row, cell in zip(table.rows, cells, strict=True)],
    )


def _live_table(memories: dict[str, Regions]) -> TextTable:
    rows: Rows = []
    for memory, regions in memories.items():
        for region in regions:
            for live in region["live"]:
                stage = "" if live["stage"] is None else f"[{live['stage']}]"
                rows.append(
                    (memory, region["name"] + stage, live["holds"], live["from"], live["to"])
                )
    return TextTable(
        "What lives where when; a range that ends before it begins runs on into the next block",
        [("memory", LEFT), ("region", LEFT), ("holds", LEFT), ("from step", LEFT),
         ("to step", LEFT)],
        rows,
        "Regions that are not listed are always in use.",
    )  # fmt: skip


def _barrier_table(barriers: Sequence[dict[str, Any]]) -> TextTable:
    return TextTable(
        "Barriers: arrivals and bytes of one phase",
        [
            ("mbarriers", LEFT),
            ("stages", RIGHT),
            ("arrives", WRAP),
            ("arrivals", WRAP),
            ("copied bytes", RIGHT),
            ("waits", WRAP),
            ("completed when", WRAP),
        ],
        [
            (
                b["name"],
                str(b["stages"]),
                b["producer"],
                f"{b['arrivals']}: {b['arrives'].removeprefix('tcgen05.')}",
                f"{b['transaction_bytes']:,}",
                b["consumer"],
                b["completed"],
            )
            for b in barriers
        ],
    )


def _role_table(document: dict[str, Any]) -> TextTable:
    registers = document["registers"]
    return TextTable(
        f"Roles: {document['threads']} threads",
        [
            ("role", LEFT),
            ("warps", RIGHT),
            ("threads", RIGHT),
            ("registers at most", RIGHT),
            ("does", WRAP),
        ],
        [
            (r["name"], str(r["warps"]), str(r["threads"]), str(r["registers"]), r["does"])
            for r in document["roles"]
        ],
        f"Registers: {registers['total']:,} of {registers['capacity']:,}.",
    )


def _timeline_table(timeline: Regions) -> TextTable:
    names = [name for name in timeline[0] if name != "step"]
    return TextTable(
        "Timeline: what each role does, step by step",
        [("step" if name == "name" else name, WRAP) for name in names],
        [tuple(row[name] for name in names) for row in timeline],
    )


def heading(document: dict[str, Any]) -> str:
    """Kernel, architecture and choices in one line."""
    choices = ", ".join(f"{name} {value}" for name, value in document["choices"].items())
    return f"{document['kernel']} on {document['arch']}: {choices}"


def show(document: dict[str, Any], as_json: bool, markdown: bool) -> None:
    """The plan on stdout, in the form asked for."""
    if as_json:
        print_json(document)
    elif markdown:
        click.echo(as_markdown(document))
    else:
        console = new_console()
        console.print(heading(document) + "\n", markup=False)
        print_tables(console, tables(document))


def as_markdown(document: dict[str, Any]) -> str:
    """The tables for a document."""
    return "\n\n".join([heading(document), *map(table_as_markdown, tables(document))])


COLUMN_BYTES = TMEM_LANES * 4
"""A word of every lane."""
StepName = Callable[[int], str]


def describe(variant: Variant) -> dict[str, Any]:
    """Choices, memories, barriers, roles; with a timeline where the kernel has one."""
    spec, plan = variant
    timeline = spec.load_timeline()
    names = {row.step: row.name for row in timeline}
    document: dict[str, Any] = {
        "kernel": spec.name,
        "arch": spec.arch,
        "choices": variant.choices,
        "threads": plan.threads,
        "registers": {
            "total": sum(role.threads * role.registers for role in plan.roles),
            "capacity": ARCHITECTURES[spec.arch].registers,
        },
        "smem": _describe_smem(plan.smem, names.__getitem__),
    }
    tmem = getattr(plan, "tmem", None)
    if tmem is not None:
        document["tmem"] = _describe_tmem(tmem, names.__getitem__)
    document["barriers"] = [_describe_barrier(barrier) for barrier in plan.barriers]
    document["roles"] = [_describe_role(role) for role in plan.roles]
    if timeline:
        document["timeline"] = [{**row._asdict(), "step": row.step.name} for row in timeline]
    return document


def _describe_smem(smem: SmemPlan, step_name: StepName) -> dict[str, Any]:
    places = list(zip(smem.regions, smem.offsets, strict=True))
    spans = [(region.name, at, at + region.bytes) for region, at in places]
    return {
        "total": smem.total,
        "capacity": smem.capacity,
        "regions": [
            {
                "name": region.name,
                "offset": offset,
                "bytes": region.bytes,
                "share": region.bytes / smem.capacity,
                "align": region.align,
                "holds": region.holds,
                "stages": region.stages,
                "shares_with": _sharing(region.name, spans),
                "live": _live_ranges(region.live, step_name),
            }
            for region, offset in places
        ],
    }


def _describe_tmem(tmem: TmemPlan, step_name: StepName) -> dict[str, Any]:
    spans = [(r.name, r.column, r.column + r.columns) for r in tmem.regions]
    return {
        "allocated": tmem.allocated,
        "capacity": tmem.capacity,
        "regions": [
            {
                "name": region.name,
                "column": region.column,
                "columns": region.columns,
                "bytes": region.columns * COLUMN_BYTES,
                "share": region.columns / tmem.capacity,
                "holds": region.holds,
                "shares_with": _sharing(region.name, spans),
                "live": _live_ranges(region.live, step_name),
            }
            for region in tmem.regions
        ],
    }


def _sharing(name: str, spans: list[tuple[str, int, int]]) -> list[str]:
    start, stop = next((a, b) for other, a, b in spans if other == name)
    return [other for other, a, b in spans if other != name and a < stop and start < b]


def _live_ranges(live_ranges: Sequence[LiveRange], step_name: StepName) -> list[dict[str, Any]]:
    return [
        {
            "holds": live.holds,
            "stage": live.stage,
            "from": step_name(live.first),
            "to": step_name(live.last),
        }
        for live in live_ranges
    ]


def _describe_barrier(barrier: Barrier) -> dict[str, Any]:
    producer = ", ".join(role.name for role, _ in barrier.arriving)
    if barrier.from_peer:
        producer = f"peer's {producer}"
    if barrier.ctas > 1:
        producer = f"{producer} of {barrier.ctas} CTAs"
    return {
        "name": barrier.name,
        "stages": barrier.stages,
        "producer": producer,
        "arrives": "; ".join(dict.fromkeys(arrives.value for _, arrives in barrier.arriving)),
        "arrivals": barrier.arrivals,
        "transaction_bytes": barrier.transaction_bytes,
        "consumer": ", ".join(r.name for r in (barrier.consumer, *barrier.also_awaited_by)),
        "completed": barrier.completed,
    }


def _describe_role(role: Role) -> dict[str, Any]:
    return {
        "name": role.name,
        "warps": role.warps,
        "threads": role.threads,
        "registers": role.registers,
        "does": role.does,
    }
