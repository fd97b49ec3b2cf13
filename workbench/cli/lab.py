"""`python -m workbench lab`: experiments with tensor-core instructions."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from flashdsa.cli.console import json_option, new_console, new_table, print_json, print_table
from workbench.cli.lab_hazards import hazards
from workbench.cli.lab_majorness import majorness


@click.command("split-heads")
@click.option("--queries", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--slots", type=click.IntRange(min=32), default=96, show_default=True, help="Of a query."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@json_option
def split_heads(queries: int, slots: int, seed: int, as_json: bool) -> None:
    """Run the backward with heads split over two CTAs on ptxemu, and judge its gradients.

    No call takes this kernel. Its page is docs/kernels/mla-bwd-sm100-heads.md. First its plan:
    shared and tensor memory, barriers, roles. Then errors of dQ and dKV against float64.

    \b
    Examples
      python -m workbench lab split-heads
      python -m workbench lab split-heads --slots 2048 --queries 1
      python -m workbench lab split-heads --json
    """
    from flashdsa.verify.sparse_mla_cases import SparseMlaCase
    from workbench.cli.plan_tables import describe, show
    from workbench.lab.kernels.split_heads.plan import SPLIT_HEADS
    from workbench.lab.split_heads import judge

    case = SparseMlaCase("", queries, max(90, slots * 3 // 4), 128, slots, duplicates=True)
    judged = judge(case, seed=seed)
    plan = describe(SPLIT_HEADS.variants[0])
    passed = not judged.findings and all(verdict.passed for verdict in judged.verdicts)
    if as_json:
        verdicts = [asdict(verdict) for verdict in judged.verdicts]
        document = {"plan": plan, "verdicts": verdicts, "findings": judged.findings}
        print_json(document | {"grid": judged.setup.grid, "passed": passed})
    else:
        show(plan, False, False)
        headings = [("gradient", "left"), ("error", "right"), ("limit", "right"), ("", "right")]
        table = new_table(headings)
        for verdict in judged.verdicts:
            error, limit = verdict.headline
            said = "[green]ok[/]" if verdict.passed else "[bold red]FAILED[/]"
            table.add_row(verdict.output, f"{error:.2e}", f"{limit:.2e}", said)
        print_table(new_console(), "Against float64, on ptxemu", table)
        for finding in judged.findings:
            click.echo(finding)
    if not passed:
        raise SystemExit(1)


if TYPE_CHECKING:
    from workbench.lab.precision import PrecisionRow

DTYPES = ("bf16", "fp16", "e4m3")
"""Those of workbench.lab.precision, kept here so that --help needs no NumPy."""


@click.group()
def lab() -> None:
    """Find out why an MMA's result is wrong, and what a kernel that nobody calls would do.

    \b
      python -m workbench lab majorness   dV = S^T dO with B K-major and MN-major, by steps
      python -m workbench lab hazards     missing waits, and a schedule that shows each
      python -m workbench lab precision   errors of bf16, fp16 and e4m3 products, by order
      python -m workbench lab split-heads the Blackwell backward in its reference design

    Kernels run on ptxemu, or on a GPU of the architecture. Exit code 1 if something is not as it
    must be. The guide "My MMA result is wrong" walks through them.
    """


@click.command("precision")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(DTYPES),
    help="Only this type of operands; may be repeated.  [default: all]",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@json_option
def precision(dtypes: tuple[str, ...], seed: int, as_json: bool) -> None:
    """Errors of bf16, fp16 and e4m3 products against float64 for K from 16 to 8192.

    Standard normal numbers, (32, K) by (K, 32). Errors are relative: Frobenius norm of the
    difference over that of the float64 product.

    \b
    Columns
      rounding         error of rounding the operands, summed exactly
      and of the sum alone, on the rounded operands:
      pairwise         products and a binary tree of sums in fp32
      sequential       one fp32 accumulator, one fused multiply-add an element
      per MMA          exact inside an instruction, then rounded to nearest fp32
      wgmma            Hopper's tensor core, one chain of instructions
      wgmma/8          the same in 8 chunks of K (split-K), added in fp32
      wgmma+fp32       the same, moved to fp32 registers every 128 elements of K

    \b
    Measured and assumed
      wgmma is a rule that gives all 9,538 finite fp32 sums of the H200 recordings
      in ptxemu/tests/silicon bit for bit: products and accumulator are aligned to
      the largest exponent and cut off 25 bits below it (e4m3: 13), the sum is cut
      to fp32 (e4m3: to a mantissa of 13 bits). Cutting off pulls every step the
      same way, so the error grows with K; rounding to nearest lets it grow with
      its square root.
      For Blackwell nothing was measured here; ptxemu assumes "per MMA" for it
      (and, as its documented simplification, for wgmma).

    \b
    Examples
      python -m workbench lab precision
      python -m workbench lab precision --dtype e4m3
      python -m workbench lab precision --json
    """
    from workbench.lab.precision import measure

    rows = measure(dtypes or DTYPES, seed=seed)
    if as_json:
        print_json({"seed": seed, "rows": [asdict(row) for row in rows]})
    else:
        print_rows(rows)


def print_rows(rows: tuple[PrecisionRow, ...]) -> None:
    """Print a table for each type."""
    console = new_console()
    names = ("pairwise", "sequential", "per MMA", "wgmma", "wgmma/8", "wgmma\n+fp32")
    for dtype in dict.fromkeys(row.dtype for row in rows):
        table = new_table([(name, "right") for name in ("K", "rounding", *names)])
        for row in rows:
            if row.dtype == dtype:
                errors = (row.rounding, *row.sums.values())
                table.add_row(str(row.k), *map(_short, errors))
        print_table(console, dtype, table)


def _short(error: float) -> str:
    """Write two digits: eight columns of them fit a terminal of 80."""
    return f"{error:.1e}".replace("e-0", "e-") if error else "0"


for command in (majorness, hazards, precision, split_heads):
    lab.add_command(command)
