"""`python -m workbench lab split-heads`: the Blackwell backward of the reference design."""

from __future__ import annotations

from dataclasses import asdict

import click

from flashdsa.cli.console import json_option, new_console, new_table, print_json, print_table


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
    from flashdsa.cli.plan_tables import describe, show
    from flashdsa.verify.sparse_mla_cases import SparseMlaCase
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
