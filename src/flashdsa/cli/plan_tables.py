"""Tables of `flashdsa plan`: what plans have in common as plain data, and its three forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from flashdsa.cli.console import new_console, new_table, print_json, print_table

if TYPE_CHECKING:
    from flashdsa.plan import Barrier, Role, SmemPlan

RIGHT, LEFT, WRAP = "right", "left", "wrap"


class PlanTable(NamedTuple):
    """A table: its columns as `new_table` takes them, its rows, and a line under it."""

    title: str
    columns: list[tuple[str, str]]
    rows: list[tuple[str, ...]]
    note: str = ""


def describe_smem(smem: SmemPlan) -> dict[str, Any]:
    """Shared memory as plain data."""
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
            }
            for region, offset in zip(smem.regions, smem.offsets, strict=True)
        ],
    }


def describe_barriers(barriers: Sequence[Barrier]) -> list[dict[str, Any]]:
    """Barriers as plain data."""
    return [
        {
            "name": barrier.name,
            "stages": barrier.stages,
            "producer": barrier.producer.name,
            "arrives": barrier.arrives.value,
            "arrivals": barrier.arrivals,
            "transaction_bytes": barrier.transaction_bytes,
            "consumer": barrier.consumer.name,
            "completed": barrier.completed,
        }
        for barrier in barriers
    ]


def describe_roles(roles: Sequence[Role]) -> list[dict[str, Any]]:
    """Roles as plain data."""
    return [
        {
            "name": role.name,
            "warps": role.warps,
            "threads": role.threads,
            "registers": role.registers,
            "does": role.does,
        }
        for role in roles
    ]


def smem_title(smem: dict[str, Any]) -> str:
    """The heading of shared memory's table."""
    share = smem["total"] / smem["capacity"]
    return f"Shared memory: {smem['total']:,} of {smem['capacity']:,} bytes ({share:.1%})"


def free_row(smem: dict[str, Any]) -> tuple[str, ...]:
    """What is left behind the last region: name, offset, bytes, share."""
    free = smem["capacity"] - smem["total"]
    return "(free)", f"{smem['total']:,}", f"{free:,}", f"{free / smem['capacity']:.1%}"


def barrier_table(barriers: Sequence[dict[str, Any]]) -> PlanTable:
    """Who arrives how often, and who waits."""
    return PlanTable(
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


def role_table(roles: Sequence[dict[str, Any]]) -> PlanTable:
    """Warps, threads and registers."""
    threads = sum(role["threads"] for role in roles)
    return PlanTable(
        f"Roles: {threads} threads",
        [
            ("role", LEFT),
            ("warps", RIGHT),
            ("threads", RIGHT),
            ("registers at most", RIGHT),
            ("does", WRAP),
        ],
        [
            (r["name"], str(r["warps"]), str(r["threads"]), str(r["registers"]), r["does"])
            for r in roles
        ],
    )


def heading(document: dict[str, Any]) -> str:
    """Kernel, architecture and choices in one line."""
    choices = ", ".join(f"{name} {value}" for name, value in document["choices"].items())
    return f"{document['kernel']} on {document['arch']}: {choices}"


def show(
    document: dict[str, Any], tables: Sequence[PlanTable], as_json: bool, markdown: bool
) -> None:
    """The plan on stdout, in the form asked for."""
    if as_json:
        print_json(document)
    elif markdown:
        click.echo(as_markdown(document, tables))
    else:
        console = new_console()
        console.print(heading(document) + "\n", markup=False)
        for title, columns, rows, note in tables:
            table = new_table(columns)
            for row in rows:
                table.add_row(*row)
            print_table(console, title, table)
            if note:
                console.print(note + "\n", markup=False)


def as_markdown(document: dict[str, Any], tables: Sequence[PlanTable]) -> str:
    """The tables for a document."""
    return "\n\n".join([heading(document), *map(table_as_markdown, tables)])


def table_as_markdown(table: PlanTable) -> str:
    """A bold title, the table under it, its note."""
    lines = [" | ".join(name for name, _ in table.columns)]
    lines.append(" | ".join("--:" if kind == RIGHT else "---" for _, kind in table.columns))
    lines += [" | ".join(row) for row in table.rows]
    parts = [f"**{table.title}**", "\n".join(f"| {line} |" for line in lines), table.note]
    return "\n\n".join(part for part in parts if part)
