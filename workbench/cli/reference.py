"""`python -m workbench reference`: the reference design's budget beside the plan that ships."""

from __future__ import annotations

import click

from flashdsa.cli.console import json_option


@click.command()
@click.option(
    "--keys", type=click.Choice(["32", "64"]), default="32", show_default=True,
    help="Keys of a block whose regions are listed: the design's B_TOPK.",
)  # fmt: skip
@json_option
def reference(keys: str, as_json: bool) -> None:
    """Show the reference design's shared and tensor memory, and what ships beside it.

    The regions are checked as every plan is: a region that does not fit is named.

    \b
    Examples
      python -m workbench reference
      python -m workbench reference --keys 64 --json

    Needs no GPU and no compiler.
    """
    from dataclasses import asdict

    from flashdsa.cli.console import new_console, new_table, print_json, print_table
    from workbench.reference_plan import REASONS, ReferencePlan, budgets

    plan, lines = ReferencePlan(int(keys)), list(budgets())
    smem = plan.smem
    if as_json:
        print_json({
            "smem": [
                {"name": r.name, "offset": at, "bytes": r.bytes, "holds": r.holds}
                for r, at in zip(smem.regions, smem.offsets, strict=True)
            ],
            "tmem": [asdict(region) | {"live": len(region.live)} for region in plan.columns],
            "budgets": [line._asdict() | {"share": round(line.share, 1)} for line in lines],
            "reasons": REASONS,
        })  # fmt: skip
        return
    console = new_console()
    table = new_table(
        [("region", "left"), ("offset", "right"), ("bytes", "right"), ("in place of", "left"),
         ("holds", "wrap")]
    )  # fmt: skip
    for region, at in zip(smem.regions, smem.offsets, strict=True):
        table.add_row(region.name, f"{at:,}", f"{region.bytes:,}", region.overlays, region.holds)
    title = f"Shared memory, B_TOPK {keys}: {smem.total:,} of {smem.capacity:,} bytes"
    print_table(console, title, table)
    table = new_table(
        [("region", "left"), ("columns", "right"), ("KB", "right"), ("holds", "wrap")]
    )
    for columns in plan.columns:
        end = columns.column + columns.columns
        table.add_row(
            columns.name, f"{columns.column}-{end}", f"{columns.columns // 2}", columns.holds
        )
    print_table(console, f"Tensor memory, B_TOPK {keys}", table)
    table = new_table(
        [("plan", "left"), ("keys", "right"), ("bytes", "right"), ("KB", "right"),
         ("share", "right"), ("TMEM columns", "right")]
    )  # fmt: skip
    for line in lines:
        table.add_row(
            line.name, f"{line.keys}", f"{line.smem_bytes:,}", f"{line.kilobytes}",
            f"{line.share:.1f}%", f"{line.tmem_columns or 'do not fit'}",
        )  # fmt: skip
    print_table(console, "Before, after, and what ships", table)
    before, after = lines[:2]
    saved, points = before.kilobytes - after.kilobytes, before.share - after.share
    console.print(f"From 64 to 32 keys: {-saved:.1f} KB, {-points:.1f} points")
    for line in lines:
        if line.refusal:
            console.print(f"{line.name}: {line.refusal}", markup=False)
    console.print("\nWhy what ships differs:")
    for reason in REASONS:
        console.print(f"- {reason}", markup=False)
