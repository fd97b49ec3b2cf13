"""`flashdsa plan`: what a kernel takes of a streaming multiprocessor, without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from flashdsa.cli.console import json_option
from flashdsa.cli.plan_backward import mla_bwd
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
    from flashdsa.kernels.indexer.sm90.plan import IndexerPlan

ARCHITECTURES = ("sm_90a",)


@click.group()
def plan() -> None:
    """Show a kernel's resource plan: shared memory, tensor memory, barriers, roles.

    The kernel allocates from the same object, so that what is shown is what runs.

    \b
      flashdsa plan indexer    the fused fp8 indexer, Hopper
      flashdsa plan mla_bwd    the backward of sparse MLA, Blackwell
    """


plan.add_command(mla_bwd)


@plan.command()
@click.option(
    "--arch", type=click.Choice(ARCHITECTURES), default="sm_90a", show_default=True,
    help="Architecture of the kernel.",
)  # fmt: skip
@click.option("--num-heads", type=int, default=64, show_default=True, help="16, 32 or 64.")
@click.option("--topk", type=int, default=2048, show_default=True, help="512, 1024 or 2048.")
@click.option("--sorted", "by_score", is_flag=True, help="The variant that sorts by score.")
@click.option("--teams", is_flag=True, help="The variant whose clusters share long rows.")
@click.option("--dealt", is_flag=True, help="The variant for more rows than clusters.")
@click.option("--markdown", is_flag=True, help="Markdown tables, for documents.")
@json_option
def indexer(
    arch: str,
    num_heads: int,
    topk: int,
    by_score: bool,
    teams: bool,
    dealt: bool,
    markdown: bool,
    as_json: bool,
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
    document = describe(IndexerPlan(num_heads, topk, by_score, teams, dealt or by_score), arch)
    show(document, tables(document), as_json, markdown)


def describe(plan: IndexerPlan, arch: str) -> dict[str, Any]:
    """The plan as plain data, the document of --json."""
    from dataclasses import fields

    return {
        "kernel": "indexer",
        "arch": arch,
        "choices": {field.name: getattr(plan, field.name) for field in fields(plan)},
        "threads": plan.threads,
        "smem": describe_smem(plan.smem),
        "barriers": describe_barriers(plan.barriers),
        "roles": describe_roles(plan.roles),
    }


def tables(document: dict[str, Any]) -> list[PlanTable]:
    """Every table of the plan, in order."""
    smem = document["smem"]
    regions: list[tuple[str, ...]] = [
        (r["name"], f"{r['offset']:,}", f"{r['bytes']:,}", f"{r['share']:.1%}", r["holds"])
        for r in smem["regions"]
    ]
    return [
        PlanTable(
            smem_title(smem),
            [("region", LEFT), ("offset", RIGHT), ("bytes", RIGHT), ("share", RIGHT),
             ("holds", WRAP)],
            [*regions, (*free_row(smem), "")],
        ),
        barrier_table(document["barriers"]),
        role_table(document["roles"]),
    ]  # fmt: skip
