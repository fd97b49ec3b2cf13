"""`python -m workbench ways`: what each way of an operation earns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from flashdsa.cli.console import json_option, new_console, new_table, print_json, print_table
from flashdsa.cli.output_options import OutputFile
from flashdsa.errors import ArgumentValueError
from flashdsa.output_paths import written

OPERATIONS = ("forward", "prompts", "decode", "chats", "forward-512", "decode-512", "indexer")


@click.command()
@click.argument("operation", metavar="OPERATION", type=click.Choice(OPERATIONS), required=False)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of draws.")
@click.option("--count", type=click.IntRange(min=1), default=100, show_default=True, help="Draws.")
@click.option("--budget", type=click.FloatRange(min=0), metavar="SECONDS", help="Of the timing.")
@click.option(
    "--read", "documents", multiple=True, type=click.Path(path_type=Path, dir_okay=False),
    help="Judge this document again, without a GPU; repeatable.",
)  # fmt: skip
@click.option("--fit", is_flag=True, help="Fit the constants of attention to the documents.")
@click.option("--out", type=OutputFile(".json"), help="The document.")
@json_option
def ways(
    operation: str | None,
    seed: int,
    count: int,
    budget: float | None,
    documents: tuple[Path, ...],
    fit: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Judge the ways of an operation: time all of them, replay the choice without each.

    OPERATION is forward, prompts, decode, chats, forward-512, decode-512 or
    indexer. Every way that can serve a draw is judged against float64 and timed
    by turns in one process. A way stays if it earns 0.5 % of the mean at fewer than 500 lines a
    %, or if 3 % of the draws fall below 0.9 of their speed without it.

    --fit prints constants that choose better in these draws, for a file of
    flashdsa/heuristics, and what they are worth in draws that they are not fitted to.

    \b
    Examples
      python -m workbench ways decode --seed 7 --budget 200 --out decode.json
      python -m workbench ways --read decode.json
      python -m workbench ways --read decode.json --read forward.json --fit
    """
    rows, heading = _rows(operation, seed, count, budget, documents, out)
    if fit:
        _fit(rows, heading, as_json)
    elif as_json:
        from dataclasses import asdict

        from workbench.ways.judge import judge, regret

        print_json({"kinds": [asdict(one) for one in judge(rows)], "regret": regret(rows)})
    else:
        _show(rows, heading)
    if any(row["wrong"] for row in rows):
        raise click.exceptions.Exit(1)


def _rows(
    operation: str | None,
    seed: int,
    count: int,
    budget: float | None,
    documents: tuple[Path, ...],
    out: Path | None,
) -> tuple[list[dict[str, Any]], str]:
    """Rows of documents, or measured ones, and what they are of."""
    from workbench.ways.measure import SCHEMA, measure

    if documents:
        read = [json.loads(path.read_text(encoding="utf-8")) for path in documents]
        for path, document in zip(documents, read, strict=True):
            if document.get("schema") != SCHEMA:
                raise ArgumentValueError(
                    f"{path}: expected schema {SCHEMA!r}; got {document.get('schema')!r}"
                )
        rows = [row for document in read for row in document["draws"]]
        return rows, ", ".join(sorted({one["operation"] for one in read}))
    if operation is None:
        raise click.UsageError("name an OPERATION, or --read a document")
    from flashdsa.cli.availability import require_runnable
    from flashdsa.cli.console import progress_bar
    from workbench.draws.distribution import draw

    require_runnable("sm90")

    def keep(document: dict[str, Any]) -> None:
        if out is not None:
            with written(out) as draft:
                draft.write_text(json.dumps(document) + "\n", encoding="utf-8")

    wanted = [draw(operation, seed, number) for number in range(count)]
    with progress_bar() as on_progress:
        document = measure(wanted, budget, on_progress, keep)
    return document["draws"], operation


def _fit(rows: list[dict[str, Any]], heading: str, as_json: bool) -> None:
    """Fitted constants, and the time of their choices."""
    from flashdsa.cli.console import progress_bar
    from workbench.ways.fit import OPERATIONS, fit

    others = sorted({*heading.split(", ")} - {*OPERATIONS})
    if others:
        raise ArgumentValueError(
            f"--fit: expected documents of {', '.join(OPERATIONS)}; got {', '.join(others)}"
        )
    with progress_bar() as on_progress:
        found = fit(rows, on_progress)
    if as_json:
        print_json({**found._asdict(), "constants": str(found.constants)})
        return
    console = new_console()
    for what, (today, new) in (("these draws", found.loss), ("others", found.other_half)):
        console.print(f"time over the fastest ways', {what}: {today:.4f} today, {new:.4f} fitted")
    console.print(f"SPARSE_MLA = {found.constants}", markup=False, soft_wrap=True)


def _show(rows: list[dict[str, Any]], heading: str) -> None:
    """The table of kinds, the choice's own loss, what was wrong."""
    from workbench.ways.judge import judge, lines_of, regret

    console = new_console()
    names = ("serves", "lost hot", "cold", "worst", "below 0.9", "better", "lines", "stays")
    table = new_table([("way", "left"), *((name, "right") for name in names)])
    for one in judge(rows):
        lines = lines_of(one.kind)
        table.add_row(
            one.kind, f"{one.taken:.0f} %", *(f"{each:.1f} %" for each in one.lost),
            f"{one.worst:.2f}", str(one.below), str(one.better), str(lines),
            "yes" if one.stays(lines) else "NO",
        )  # fmt: skip
    print_table(console, f"{heading}: {len(rows)} draws, time without each way over today's", table)
    hot, cold = regret(rows)
    console.print(f"the choice beside the fastest way of each draw: {hot:.3f} hot, {cold:.3f} cold")
    for row in rows:
        for fault in row["wrong"]:
            console.print(f"WRONG {row['line']}: {fault}", style="bold red", markup=False)
