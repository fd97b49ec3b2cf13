"""`python -m workbench model`: predicted times of kernels, with their ranges and constants."""

from __future__ import annotations

import click

from flashdsa.cli.console import (
    json_option,
    new_console,
    print_json,
    print_tables,
    table_as_markdown,
)

SUBJECTS = click.Choice(("summary", "attention", "machines"))


@click.command()
@click.argument("what", metavar="[WHAT]", type=SUBJECTS, default="summary")
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
    """Predict the time of a Blackwell kernel on a B200, and show how far to trust it.

    \b
    WHAT
      summary     every kernel in one table: ranges of times          [default]
      attention   the forward and the backward: ranges, bounds, and the
                  constants nobody here has measured, by what each is worth
      machines    the constants of H200 and B200, each with its source

    --queries, --topk and --s-kv are of the attention kernels, with 128 heads.

    \b
    Examples
      python -m workbench model
      python -m workbench model attention --topk 512
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
        click.echo("\n\n".join(map(table_as_markdown, tables)))
    else:
        print_tables(new_console(), tables)
