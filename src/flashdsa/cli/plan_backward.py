"""`flashdsa plan mla_bwd`: the Blackwell backward's plan, beside 64 keys and the first design."""

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

    from flashdsa.kernels.sparse_mla.sm100.bwd.first_design import Row
    from flashdsa.kernels.sparse_mla.sm100.bwd.plan import BwdPlan
    from flashdsa.plan import Turn

ARCHITECTURES = ("sm_100a",)
SUFFIXES = (".png", ".svg")
OTHER_KEYS = 64
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

    Its tables: shared memory, tensor memory, what lives where when, barriers, roles, the timeline;
    then the same plan for blocks of 64 keys, which does not fit, and the first design's figures
    with the reason of each difference.

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

    from flashdsa.kernels.sparse_mla.sm100.bwd import first_design
    from flashdsa.kernels.sparse_mla.sm100.bwd.timeline import TIMELINE

    smem, tmem = plan.smem, plan.tmem
    regions = describe_smem(smem)
    places = [(r.name, at, at + r.bytes) for r, at in zip(smem.regions, smem.offsets, strict=True)]
    for entry, region in zip(regions["regions"], smem.regions, strict=True):
        entry["pieces"] = region.pieces
        entry["shares_with"] = _sharing(region.name, places)
        entry["turns"] = _turns(region.turns)
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
                    "turns": _turns(region.turns),
                }
                for region in tmem.regions
            ],
        },
        "barriers": barriers,
        "roles": describe_roles(plan.roles),
        "timeline": [{**row._asdict(), "step": row.step.name} for row in TIMELINE],
        "with_64_keys": _with_other_keys(plan),
        "first_design": {
            "smem_bytes": first_design.SMEM_TOTAL,
            "smem_kib_with_64_keys": first_design.SMEM_KIB_64,
            "tmem_columns": first_design.TMEM_COLUMNS,
            "smem": _beside(plan, first_design.SMEM),
            "tmem": _beside(plan, first_design.TMEM),
        },
    }


def _sharing(name: str, places: list[tuple[str, int, int]]) -> list[str]:
    start, stop = next((a, b) for other, a, b in places if other == name)
    return [other for other, a, b in places if other != name and a < stop and start < b]


def _turns(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    from flashdsa.kernels.sparse_mla.sm100.bwd.timeline import step_name

    return [
        {
            "holds": turn.holds,
            "piece": turn.piece,
            "from": step_name(turn.first),
            "to": step_name(turn.last),
        }
        for turn in turns
    ]


def _with_other_keys(plan: BwdPlan) -> dict[str, Any]:
    """The same choices with blocks of 64 keys: sizes, and the errors of a plan that had them."""
    from dataclasses import asdict

    from flashdsa.kernels.sparse_mla.sm100.bwd.plan import Draft
    from flashdsa.plan import BudgetError, lay_out

    draft = Draft(**{**asdict(plan), "keys": OTHER_KEYS})
    errors = {}
    for memory in ("smem", "tmem"):
        try:
            getattr(draft, memory)
        except BudgetError as error:
            errors[memory] = str(error).split(". ")[0]
    return {
        "keys": OTHER_KEYS,
        "smem": {region.name: region.bytes for region in draft.regions},
        "smem_total": lay_out(draft.regions)[1],
        "tmem": {region.name: region.columns for region in draft.columns},
        "tmem_total": max(region.column + region.columns for region in draft.columns),
        "errors": errors,
    }


def _beside(plan: BwdPlan, rows: Sequence[Row]) -> list[dict[str, Any]]:
    from flashdsa.kernels.sparse_mla.sm100.bwd import first_design

    in_smem = rows is first_design.SMEM
    sizes = {
        r.name: (plan.smem.offset(r.name), r.bytes) for r in plan.smem.regions
    } if in_smem else {r.name: (r.column, r.columns) for r in plan.tmem.regions}  # fmt: skip
    return [
        {
            "name": row.name,
            "at": row.at,
            "size": row.size,
            "here": [{"name": name, "at": sizes[name][0], "size": sizes[name][1]}
                     for name in row.here],
            "why": row.why,
        }
        for row in rows
    ]  # fmt: skip


def tables(document: dict[str, Any]) -> list[PlanTable]:
    """Every table of the plan, in order."""
    return [
        *_memory_tables(document),
        _turn_table(document),
        barrier_table(document["barriers"]),
        _registers_noted(role_table(document["roles"]), document["roles"]),
        _timeline_table(document["timeline"]),
        _other_keys_table(document),
        *_first_design_tables(document),
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


def _turn_table(document: dict[str, Any]) -> PlanTable:
    rows: Rows = []
    for memory in ("smem", "tmem"):
        for region in document[memory]["regions"]:
            for turn in region["turns"]:
                piece = "" if turn["piece"] is None else f"[{turn['piece']}]"
                rows.append(
                    (memory, region["name"] + piece, turn["holds"], turn["from"], turn["to"])
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


def _other_keys_table(document: dict[str, Any]) -> PlanTable:
    other, here = document["with_64_keys"], document["choices"]["keys"]
    smem, tmem = document["smem"], document["tmem"]
    rows: Rows = []
    for region in smem["regions"]:
        there = other["smem"][region["name"]]
        if there != region["bytes"]:
            rows.append(_changed(f"{region['name']}, bytes", there, region["bytes"]))
    rows.append(_changed("shared memory, bytes", other["smem_total"], smem["total"]))
    for region in tmem["regions"]:
        there = other["tmem"][region["name"]]
        if there != region["columns"]:
            rows.append(_changed(f"{region['name']}, columns", there, region["columns"]))
    rows.append(_changed("tensor memory, columns", other["tmem_total"], tmem["allocated"]))
    first = document["first_design"]
    kib = first["smem_bytes"] / 1024
    rows.append(
        ("first design, KiB of shared memory", f"~{first['smem_kib_with_64_keys']}", f"{kib:.1f}",
         f"{kib - first['smem_kib_with_64_keys']:+.1f}")
    )  # fmt: skip
    return PlanTable(
        f"Blocks of {other['keys']} keys instead of {here}: what differs",
        [("", LEFT), (f"{other['keys']} keys", RIGHT), (f"{here} keys", RIGHT),
         ("difference", RIGHT)],
        rows,
        "A plan for 64 keys is refused. " + " ".join(f"{e}." for e in other["errors"].values()),
    )  # fmt: skip


def _changed(name: str, there: int, here: int) -> tuple[str, ...]:
    return name, f"{there:,}", f"{here:,}", f"{here - there:+,}"


def _first_design_tables(document: dict[str, Any]) -> list[PlanTable]:
    first, smem = document["first_design"], document["smem"]

    def sizes(row: dict[str, Any]) -> tuple[str, str]:
        theirs = f"{row['size']:,}" if row["name"] else ""
        return theirs, " + ".join(f"{region['size']:,}" for region in row["here"])

    def columns(at: int, size: int) -> str:
        return f"{at}-{at + size}"

    smem_rows: Rows = []
    for row in first["smem"]:
        theirs, ours = sizes(row)
        here = ", ".join(region["name"] for region in row["here"])
        smem_rows.append((row["name"], theirs, here, ours, row["why"]))
    smem_rows.append(("in all", f"{first['smem_bytes']:,}", "", f"{smem['total']:,}", ""))
    tmem_rows: Rows = [
        (row["name"], columns(row["at"], row["size"]),
         ", ".join(region["name"] for region in row["here"]),
         ", ".join(columns(region["at"], region["size"]) for region in row["here"]), row["why"])
        for row in first["tmem"]
    ]  # fmt: skip
    return [
        PlanTable(
            "Shared memory beside the first design's (seed 004)",
            [("first design", WRAP), ("bytes", RIGHT), ("here", WRAP), ("bytes", RIGHT),
             ("because", WRAP)],
            smem_rows,
        ),
        PlanTable(
            "Tensor memory beside the first design's (seed 004)",
            [("first design", LEFT), ("columns", RIGHT), ("here", LEFT), ("columns", RIGHT),
             ("because", WRAP)],
            tmem_rows,
        ),
    ]  # fmt: skip
