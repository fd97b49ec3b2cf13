"""`flashdsa plan`: what a kernel takes of a streaming multiprocessor, without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from flashdsa.cli.console import json_option, new_console, new_table, print_json, print_table

if TYPE_CHECKING:
    from flashdsa.kernels.indexer.sm90.plan import IndexerPlan

ARCHITECTURES = ("sm_90a",)


@click.group()
def plan() -> None:
    """Show a kernel's resource plan: shared memory, barriers, roles.

    The kernel allocates from the same object, so that what is shown is what runs.

    \b
      flashdsa plan indexer    the fused fp8 indexer
    """


@plan.command()
@click.option(
    "--arch", type=click.Choice(ARCHITECTURES), default="sm_90a", show_default=True,
    help="Architecture of the kernel.",
)  # fmt: skip
@click.option("--num-heads", type=int, default=64, show_default=True, help="16, 32 or 64.")
@click.option("--topk", type=int, default=2048, show_default=True, help="512, 1024 or 2048.")
@click.option("--sorted", "by_score", is_flag=True, help="The variant that sorts by score.")
@click.option("--markdown", is_flag=True, help="Markdown tables, for documents.")
@json_option
def indexer(
    arch: str, num_heads: int, topk: int, by_score: bool, markdown: bool, as_json: bool
) -> None:
    """Show the fused indexer's plan.

    \b
    Examples
      flashdsa plan indexer --arch sm_90a
      flashdsa plan indexer --topk 512 --num-heads 16 --json | jq '.smem.total'
      flashdsa plan indexer --markdown > plan.md

    Needs no GPU and no compiler. Exit code 2 for sizes that no kernel is compiled for.
    """
    from flashdsa.errors import ArgumentValueError
    from flashdsa.kernels.indexer.sm90.plan import IndexerPlan

    if as_json and markdown:
        raise ArgumentValueError("--markdown: not together with --json")
    document = describe(IndexerPlan(num_heads=num_heads, topk=topk, sorted=by_score), arch)
    if as_json:
        print_json(document)
    elif markdown:
        click.echo(as_markdown(document))
    else:
        _print(document)


def describe(plan: IndexerPlan, arch: str) -> dict[str, Any]:
    """The plan as plain data, the document of --json."""
    from dataclasses import fields

    smem = plan.smem
    return {
        "kernel": "indexer",
        "arch": arch,
        "choices": {field.name: getattr(plan, field.name) for field in fields(plan)},
        "threads": plan.threads,
        "smem": {
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
        },
        "barriers": [
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
            for barrier in plan.barriers
        ],
        "roles": [
            {
                "name": role.name,
                "warps": role.warps,
                "threads": role.threads,
                "registers": role.registers,
                "does": role.does,
            }
            for role in plan.roles
        ],
    }


Rows = list[tuple[str, ...]]


def _tables(document: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]], Rows]]:
    """(title, columns as `new_table` takes them, rows) of every table."""
    smem = document["smem"]
    free = smem["capacity"] - smem["total"]
    regions: Rows = [
        (r["name"], f"{r['offset']:,}", f"{r['bytes']:,}", f"{r['share']:.1%}", r["holds"])
        for r in smem["regions"]
    ]
    regions.append(
        ("(free)", f"{smem['total']:,}", f"{free:,}", f"{free / smem['capacity']:.1%}", "")
    )
    barriers: Rows = [
        (
            b["name"], str(b["stages"]), b["producer"], f"{b['arrivals']}: {b['arrives']}",
            f"{b['transaction_bytes']:,}", b["consumer"], b["completed"],
        )
        for b in document["barriers"]
    ]  # fmt: skip
    roles: Rows = [
        (r["name"], str(r["warps"]), str(r["threads"]), str(r["registers"]), r["does"])
        for r in document["roles"]
    ]
    right, left, wrap = "right", "left", "wrap"
    return [
        (
            f"Shared memory: {smem['total']:,} of {smem['capacity']:,} bytes",
            [("region", left), ("offset", right), ("bytes", right), ("share", right),
             ("holds", wrap)],
            regions,
        ),
        (
            "Barriers: arrivals and bytes of one phase",
            [("mbarriers", left), ("stages", right), ("arrives", left), ("arrivals", wrap),
             ("copied bytes", right), ("waits", left), ("completed when", wrap)],
            barriers,
        ),
        (
            f"Roles: {document['threads']} threads",
            [("role", left), ("warps", right), ("threads", right), ("registers at most", right),
             ("does", wrap)],
            roles,
        ),
    ]  # fmt: skip


def _heading(document: dict[str, Any]) -> str:
    choices = ", ".join(f"{name} {value}" for name, value in document["choices"].items())
    return f"{document['kernel']} on {document['arch']}: {choices}"


def _print(document: dict[str, Any]) -> None:
    console = new_console()
    console.print(_heading(document) + "\n", markup=False)
    for title, columns, rows in _tables(document):
        table = new_table(columns)
        for row in rows:
            table.add_row(*row)
        print_table(console, title, table)


def as_markdown(document: dict[str, Any]) -> str:
    """The tables for a document."""
    parts = [_heading(document)]
    for title, columns, rows in _tables(document):
        parts.append(f"**{title}**")
        lines = [" | ".join(name for name, _ in columns)]
        lines.append(" | ".join("--:" if kind == "right" else "---" for _, kind in columns))
        lines += [" | ".join(row) for row in rows]
        parts.append("\n".join(f"| {line} |" for line in lines))
    return "\n\n".join(parts)
