"""`python -m workbench ranking`: the indexer ranked by fp16 scores, beside fp32."""

from __future__ import annotations

import click

from flashdsa.cli.console import json_option


@click.command()
@click.option("--rows", type=click.IntRange(1), default=4, show_default=True, help="Queries.")
@click.option(
    "--tokens", type=click.IntRange(64), multiple=True, default=(4096, 16384), show_default=True,
    help="Cached tokens of each; may be repeated.",
)  # fmt: skip
@click.option("--topk", type=click.IntRange(1), default=2048, show_default=True, help="Ids a row.")
@json_option
def ranking(rows: int, tokens: tuple[int, ...], topk: int, as_json: bool) -> None:
    """Rank the indexer's scores as fp16, and show which sets change and what it could save.

    \b
    Columns
      sets    share of rows whose set of ids differs
      ids     mean ids of a row that are lost, and the most of a row
      tied    mean tokens that share the cut-off's fp16 score
      loss    largest share of a set's sum of scores that is lost
    and of the time of the Blackwell kernel, as the model predicts it
      ranking time after the last score
      saved   share of all time if half of that took none

    \b
    Examples
      python -m workbench ranking
      python -m workbench ranking --rows 16 --tokens 131072

    Needs no GPU.
    """
    from flashdsa.cli.console import new_console, new_table, print_json, print_table
    from workbench.fp16_ranking import KINDS, compare, savings, scores_of

    changes = [
        (kind, count, compare(scores_of(kind, rows, count), topk))
        for kind in KINDS for count in tokens
    ]  # fmt: skip
    saved = savings()
    if as_json:
        print_json({
            "changes": [{"kind": k, "tokens": n, **c._asdict()} for k, n, c in changes],
            "savings": [one._asdict() for one in saved],
        })  # fmt: skip
        return
    console = new_console()
    table = new_table([("scores", "left"), *((name, "right") for name in
                       ("tokens", "sets", "ids", "most", "tied", "loss"))])  # fmt: skip
    for kind, count, c in changes:
        table.add_row(kind, f"{count:,}", f"{c.sets:.0%}", f"{c.ids:.1f}", f"{c.most}",
                      f"{c.tied:.0f}", f"{c.loss:.1e}")  # fmt: skip
    print_table(console, f"Top {topk:,} by fp16 scores, {rows} rows", table)
    table = new_table([("rows/tokens", "left"), *((name, "right") for name in
                       ("us", "ranking us", "saved"))])  # fmt: skip
    for one in saved:
        table.add_row(one.shape, f"{one.time * 1e6:.1f}", f"{one.ranking * 1e6:.1f}",
                      f"{one.saved:.0%}")  # fmt: skip
    print_table(console, "Predicted on a B200", table)
