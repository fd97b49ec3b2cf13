"""`flashdsa model`: predicted times of kernels, and the errors of the same predictions."""

from __future__ import annotations

import click

from flashdsa.cli.console import json_option, new_console, new_table, print_json, print_table

SUBJECTS = ("mla_bwd", "indexer", "errors", "machines")


@click.command()
@click.argument(
    "what", type=click.Choice(["mla_bwd", "indexer", "errors", "machines"]), default="mla_bwd"
)
@click.option("--queries", type=click.IntRange(1), default=4096, show_default=True, help="S.")
@click.option(
    "--topk", type=click.IntRange(1), default=2048, show_default=True, help="Keys a query."
)
@click.option("--s-kv", type=click.IntRange(1), default=8192, show_default=True, help="Rows of kv.")
@click.option(
    "--arch",
    type=click.Choice(["sm_100a"]),
    default="sm_100a",
    show_default=True,
    help="Architecture of the kernel.",
)
@click.option("--markdown", is_flag=True, help="Markdown tables, for documents.")
@json_option
def model(
    what: str, queries: int, topk: int, s_kv: int, arch: str, markdown: bool, as_json: bool
) -> None:
    """Predict what a kernel takes on a GPU that is not here, and show how far to trust it.

    \b
    WHAT
      mla_bwd     the Blackwell backward on B200: what a block moves, the bounds, TFLOPS by the way
                  that dKV takes                                                        [default]
      indexer     the Blackwell indexer on B200: nine shapes, 1, 2 and 4 pages a stage, as ranges
      errors      the same model against what was measured: the Hopper indexer, and Blackwell
                  kernels that others published
      machines    the constants of H200 and B200, each with its source

    The sizes are those of mla_bwd; H is 128. No constant belongs to a kernel but one: the time that
    the indexer's CTAs wait for the slowest of their cluster, as measured.

    \b
    Examples
      flashdsa model
      flashdsa model mla_bwd --s-kv 131072 --topk 512
      flashdsa model indexer --arch sm_100a
      flashdsa model errors --markdown > errors.md
      flashdsa model --json | jq '.backward.predictions[0].tflops'

    --json gives one document with all four. Needs no GPU. Exit code 2 for wrong sizes.
    """
    from flashdsa.analysis.model import indexer_sm100, report
    from flashdsa.analysis.model.comparisons import all_comparisons
    from flashdsa.errors import ArgumentValueError

    if as_json and markdown:
        raise ArgumentValueError("--markdown: not together with --json")
    backward = report.backward(queries, topk, s_kv)
    if as_json:
        print_json(report.document() | {"backward": backward.to_json_dict()})
        return
    notes: list[str] = []
    if what == "mla_bwd":
        tables = report.backward_tables(backward)
    elif what == "indexer":
        tables, notes = report.indexer_tables(), [f"* {one}" for one in indexer_sm100.CARRIED]
    elif what == "errors":
        comparisons = all_comparisons()
        tables, notes = report.comparison_tables(comparisons), report.missed(comparisons)
    else:
        tables = report.machine_tables()
    if markdown:
        click.echo("\n\n".join([*map(_as_markdown, tables), *notes]))
        return
    console = new_console()
    for title, columns, rows in tables:
        table = new_table(columns)
        for row in rows:
            table.add_row(*row)
        print_table(console, title, table)
    for note in notes:
        console.print(note, markup=False)


def _as_markdown(table: tuple[str, list[tuple[str, str]], list[tuple[str, ...]]]) -> str:
    title, columns, rows = table
    lines = [" | ".join(name for name, _ in columns)]
    lines.append(" | ".join("--:" if kind == "right" else "---" for _, kind in columns))
    lines += [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return f"**{title}**\n\n" + "\n".join(f"| {line} |" for line in lines)
