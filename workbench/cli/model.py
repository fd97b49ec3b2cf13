"""`python -m workbench model`: predicted times of kernels, with their ranges and constants."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flashdsa.cli.console import json_option, new_console, new_table, print_json, print_table

if TYPE_CHECKING:
    from workbench.model.report import Table

SUBJECTS = ("summary", "attention", "indexer", "machines")


@click.command()
@click.argument("what", metavar="[WHAT]", type=click.Choice(SUBJECTS), default="summary")
@click.option("--queries", type=click.IntRange(1), default=4096, show_default=True, help="S.")
@click.option(
    "--topk",
    type=click.IntRange(1),
    multiple=True,
    default=(512, 2048),
    show_default=True,
    help="Keys a query; may be repeated.",
)
@click.option("--s-kv", type=click.IntRange(1), default=8192, show_default=True, help="Rows of kv.")
@click.option("--markdown", is_flag=True, help="Markdown tables, for documents.")
@json_option
def model(
    what: str, queries: int, topk: tuple[int, ...], s_kv: int, markdown: bool, as_json: bool
) -> None:
    """Predict the time of a kernel on a GPU that is not here, and show how far to trust it.

    \b
    WHAT
      summary     every kernel in one table: ranges on B200, rooflines on H200
                  beside measured times                              [default]
      attention   the Blackwell forward and backward: ranges, bounds, and the
                  constants nobody here has measured, by what each is worth
      indexer     the Blackwell indexer: nine shapes
      machines    the constants of H200 and B200, each with its source

    --queries, --topk and --s-kv are of the Blackwell attention kernels, with 128 heads.

    \b
    Examples
      python -m workbench model
      python -m workbench model attention --topk 512
      python -m workbench model indexer
      python -m workbench model --markdown > table.md
      python -m workbench model --json | jq '.attention[0].middle.tflops'

    --json gives one document with everything. Needs no GPU. Exit code 2 for wrong sizes.
    """
    from flashdsa.errors import ArgumentValueError
    from workbench.model import report
    from workbench.model.unknowns import attention_ranges

    if as_json and markdown:
        raise ArgumentValueError("--markdown: not together with --json")
    ranges = tuple(one for keys in topk for one in attention_ranges(queries, keys, s_kv))
    if as_json:
        print_json(report.document(ranges))
        return
    tables = report.TABLES[what](ranges)
    if markdown:
        click.echo("\n\n".join(map(_as_markdown, tables)))
        return
    console = new_console()
    for title, columns, rows in tables:
        table = new_table(columns)
        for row in rows:
            table.add_row(*row)
        print_table(console, title, table)


def _as_markdown(table: Table) -> str:
    title, columns, rows = table
    lines = [" | ".join(name for name, _ in columns)]
    lines.append(" | ".join("--:" if kind == "right" else "---" for _, kind in columns))
    lines += [" | ".join(row) for row in rows]
    return f"**{title}**\n\n" + "\n".join(f"| {line} |" for line in lines)
