"""`flashdsa plan mla_bwd`: the Blackwell backward's plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashdsa.cli.console import json_option
from flashdsa.cli.plan_tables import (
    LEFT,
    RIGHT,
    WRAP,
    PlanTable,
    barrier_table,
    describe_barriers,
    describe_roles,
    describe_smem,
    free_row,
    role_table,
    show,
    smem_title,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashdsa.kernels.sparse_mla.sm100.bwd.plan import BwdPlan
    from flashdsa.plan import LiveRange

ARCHITECTURES = ("sm_100a",)
SUFFIXES = (".png", ".svg")
COLUMN_BYTES = 128 * 4
"""A word of every lane."""
Rows = list[tuple[str, ...]]


@click.command("mla_bwd")
@click.option(
    "--arch", type=click.Choice(ARCHITECTURES), default="sm_100a", show_default=True,
    help="Architecture of the kernel.",
)  # fmt: skip
@click.option("--markdown", is_flag=True, help="Markdown tables, for documents.")
@click.option(
    "--picture", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Draw both memories over the timeline of a block, PNG or SVG.",
)  # fmt: skip
@json_option
def mla_bwd(arch: str, markdown: bool, picture: Path | None, as_json: bool) -> None:
    """Show the sparse-MLA backward's plan.

    Its tables: shared memory, tensor memory, what lives where when, barriers, roles, the timeline.

    \b
    Examples
      flashdsa plan mla_bwd --arch sm_100a
      flashdsa plan mla_bwd --picture plan.svg
      flashdsa plan mla_bwd --json | jq '.tmem.regions[] | {name, column, columns}'

    Needs no GPU and no compiler.
    """
    from flashdsa.errors import ArgumentValueError
    from flashdsa.kernels.sparse_mla.sm100.bwd.plan import BwdPlan

    if as_json and markdown:
        raise ArgumentValueError("--markdown: not together with --json")
    plan = BwdPlan()
    document = describe(plan, arch)
    if picture is not None:
        if picture.suffix.lower() not in SUFFIXES:
            raise ArgumentValueError(f"--picture: expected a .png or .svg file; got {picture}")
        from flashdsa.cli.plan_picture import draw_plan

        draw_plan(plan, picture)
        click.echo(f"drew {picture}", err=True)
    show(document, tables(document), as_json, markdown)


def describe(plan: BwdPlan, arch: str) -> dict[str, Any]:
    """The plan as plain data, the document of --json."""
    from dataclasses import fields

    from flashdsa.kernels.sparse_mla.sm100.bwd.timeline import TIMELINE

    smem, tmem = plan.smem, plan.tmem
    regions = describe_smem(smem)
    places = [(r.name, at, at + r.bytes) for r, at in zip(smem.regions, smem.offsets, strict=True)]
    for entry, region in zip(regions["regions"], smem.regions, strict=True):
        entry["stages"] = region.stages
        entry["shares_with"] = _sharing(region.name, places)
        entry["live"] = _live_ranges(region.live)
    columns = [(r.name, r.column, r.column + r.columns) for r in tmem.regions]
    barriers = describe_barriers(plan.barriers)
    for entry, barrier in zip(barriers, plan.barriers, strict=True):
        if barrier.also_produced_by is not None:
            entry["producer"] += f", {barrier.also_produced_by.name}"
        if barrier.from_peer:
            entry["producer"] = f"peer's {entry['producer']}"
        entry["consumer"] = ", ".join(
            [entry["consumer"], *(role.name for role in barrier.also_awaited_by)]
        )
    return {
        "kernel": "mla_bwd",
        "arch": arch,
        "choices": {field.name: getattr(plan, field.name) for field in fields(plan)},
        "threads": plan.threads,
        "smem": regions,
        "tmem": {
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
                    "shares_with": _sharing(region.name, columns),
                    "live": _live_ranges(region.live),
                }
                for region in tmem.regions
            ],
        },
        "barriers": barriers,
        "roles": describe_roles(plan.roles),
        "timeline": [{**row._asdict(), "step": row.step.name} for row in TIMELINE],
    }


def _sharing(name: str, places: list[tuple[str, int, int]]) -> list[str]:
    start, stop = next((a, b) for other, a, b in places if other == name)
    return [other for other, a, b in places if other != name and a < stop and start < b]


def _live_ranges(live_ranges: Sequence[LiveRange]) -> list[dict[str, Any]]:
    from flashdsa.kernels.sparse_mla.sm100.bwd.timeline import step_name

    return [
        {
            "holds": live.holds,
            "stage": live.stage,
            "from": step_name(live.first),
            "to": step_name(live.last),
        }
        for live in live_ranges
    ]


def tables(document: dict[str, Any]) -> list[PlanTable]:
    """Every table of the plan, in order."""
    return [
        *_memory_tables(document),
        _live_table(document),
        barrier_table(document["barriers"]),
        _registers_noted(role_table(document["roles"]), document["roles"]),
        _timeline_table(document["timeline"]),
    ]


def _memory_tables(document: dict[str, Any]) -> list[PlanTable]:
    smem, tmem = document["smem"], document["tmem"]
    smem_rows: Rows = [
        (r["name"], f"{r['offset']:,}", f"{r['bytes']:,}", f"{r['share']:.1%}",
         ", ".join(r["shares_with"]), r["holds"])
        for r in smem["regions"]
    ]  # fmt: skip
    tmem_rows: Rows = [
        (r["name"], f"{r['column']}-{r['column'] + r['columns']}", str(r["columns"]),
         f"{r['bytes'] // 1024}", f"{r['share']:.1%}", ", ".join(r["shares_with"]), r["holds"])
        for r in tmem["regions"]
    ]  # fmt: skip
    return [
        PlanTable(
            smem_title(smem),
            [("region", LEFT), ("offset", RIGHT), ("bytes", RIGHT), ("share", RIGHT),
             ("shares bytes with", WRAP), ("holds", WRAP)],
            [*smem_rows, (*free_row(smem), "", "")],
        ),
        PlanTable(
            f"Tensor memory: {tmem['allocated']} of {tmem['capacity']} columns "
            f"({tmem['allocated'] / tmem['capacity']:.1%})",
            [("region", LEFT), ("columns", RIGHT), ("count", RIGHT), ("KiB", RIGHT),
             ("share", RIGHT),
             ("shares columns with", WRAP), ("holds", WRAP)],
            tmem_rows,
        ),
    ]  # fmt: skip


def _live_table(document: dict[str, Any]) -> PlanTable:
    rows: Rows = []
    for memory in ("smem", "tmem"):
        for region in document[memory]["regions"]:
            for live in region["live"]:
                stage = "" if live["stage"] is None else f"[{live['stage']}]"
                rows.append(
                    (memory, region["name"] + stage, live["holds"], live["from"], live["to"])
                )
    return PlanTable(
        "What lives where when; a range that ends before it begins runs on into the next block",
        [("memory", LEFT), ("region", LEFT), ("holds", LEFT), ("from step", LEFT),
         ("to step", LEFT)],
        rows,
        "Regions that are not listed are always in use.",
    )  # fmt: skip


def _registers_noted(table: PlanTable, roles: Sequence[dict[str, Any]]) -> PlanTable:
    from flashdsa.hw import SM100

    total = sum(role["threads"] * role["registers"] for role in roles)
    return table._replace(note=f"Registers: {total:,} of {SM100.registers:,}, by setmaxnreg.")


def _timeline_table(timeline: Sequence[dict[str, Any]]) -> PlanTable:
    names = ("name", "load", "mma", "softmax", "reduce")
    return PlanTable(
        "Timeline: block b, in the order in which the MMAs are issued",
        [("step" if name == "name" else name, WRAP) for name in names],
        [tuple(row[name] for name in names) for row in timeline],
    )
