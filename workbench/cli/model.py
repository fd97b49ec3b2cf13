"""`python -m workbench model`: predicted times of kernels, and the errors of the same predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashdsa.cli.console import json_option, new_console, new_table, print_json, print_table
from flashdsa.cli.output_options import PICTURES, OutputFile

if TYPE_CHECKING:
    from workbench.model.report import Table

SUBJECTS = (
    "mla_bwd",
    "attention",
    "sparse_mla_fwd",
    "sparse_mla_decode",
    "indexer",
    "indexer_training",
    "errors",
    "machines",
    "context-parallel",
)


@click.command()
@click.argument("what", metavar="[WHAT]", type=click.Choice(SUBJECTS), default="mla_bwd")
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
@click.option(
    "--seq-len",
    type=click.IntRange(64),
    default=131072,
    show_default=True,
    help="Tokens on all ranks.",
)
@click.option("--heads", type=click.IntRange(1), default=128, show_default=True, help="H.")
@click.option(
    "--layout",
    type=click.Choice(["zigzag", "contiguous"]),
    default="zigzag",
    show_default=True,
    help="Of tokens on ranks.",
)
@click.option(
    "--grad-wire",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="How dKV travels.",
)
@click.option(
    "--overlap/--no-overlap",
    default=True,
    show_default=True,
    help="The latents' gather beside the indexer.",
)
@click.option(
    "--rates",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="JSON with rates of kernels and links, in place of those of H200s.",
)
@click.option("--chart", type=OutputFile(*PICTURES), help="Where the picture goes.")
@click.option("--markdown", is_flag=True, help="Markdown tables, for documents.")
@json_option
def model(
    what: str,
    queries: int,
    topk: int,
    s_kv: int,
    arch: str,
    markdown: bool,
    as_json: bool,
    **spread: Any,
) -> None:
    """Predict what a kernel takes on a GPU that is not here, and show how far to trust it.

    \b
    WHAT
      mla_bwd     the Blackwell backward on B200: what a block moves, the bounds,
                  the budget old against new, times by the way that dKV takes
                                                                       [default]
      attention   the Blackwell forward and backward on B200: ranges, and the
                  constants nobody here has measured, by what each is worth
      sparse_mla_fwd
                  the Hopper forward on H200: what a step of 128 keys moves, the
                  bounds, and the time of a call with H = 64 or a multiple of it
      sparse_mla_decode
                  the Hopper decode on H200: times for 1 to 256 queries, packed
                  and bf16 rows
      indexer     the Blackwell indexer on B200: nine shapes, 1, 2 and 4 pages a
                  stage, as ranges
      indexer_training
                  what trains the indexer on H200: target, scores and backward
                  at best, without waiting between roles
      errors      the same model against what was measured: the Hopper indexer,
                  and Blackwell kernels that others published
      machines    the constants of H200 and B200, each with its source
      context-parallel
                  one layer's training step on 1 to 8,192 GPUs: kernels,
                  collectives, memory of a GPU, efficiency against one GPU, what
                  takes most, and where it falls below 80 %

    --queries and --s-kv are of mla_bwd and attention, whose H is 128, and of sparse_mla_fwd; --arch
    of the first two; --seq-len to --chart of context-parallel; --heads of that and of
    sparse_mla_fwd; --topk of all four and of sparse_mla_decode; --queries and --topk of
    indexer_training. Constants that belong to a kernel:
    the time that the indexer's CTAs wait for the slowest of their cluster and what an empty launch
    of the decode takes, as measured, and what its gather waits for bytes in shared memory, assumed.

    \b
    Examples
      python -m workbench model
      python -m workbench model mla_bwd --s-kv 131072
      python -m workbench model attention --topk 512
      python -m workbench model sparse_mla_fwd --heads 64
      python -m workbench model sparse_mla_decode
      python -m workbench model indexer --arch sm_100a
      python -m workbench model errors --markdown > errors.md
      python -m workbench model context-parallel --chart out/ranks.png
      python -m workbench model --json | jq '.backward.predictions[0].tflops'

    --json gives one document with the first six, or with context-parallel's. Needs no GPU. Exit
    code 2 for wrong sizes.
    """
    from flashdsa.errors import ArgumentValueError
    from workbench.model import indexer_sm100, report, training_sm90
    from workbench.model.comparisons import all_comparisons
    from workbench.model.forward_sm90 import Prefill
    from workbench.model.unknowns import attention_ranges

    if as_json and markdown:
        raise ArgumentValueError("--markdown: not together with --json")
    if what == "context-parallel":
        _context_parallel(topk, markdown, as_json, **spread)
        return
    backward = report.backward(queries, topk, s_kv)
    case = Prefill(spread["heads"], queries, topk, s_kv)
    if as_json:
        found = {
            "backward": backward.to_json_dict(),
            "forward": report.forward(case).to_json_dict(),
            "decode": report.decode_documents(topk),
            "training": [one.to_json_dict() for one in training_sm90.predictions(queries, topk)],
            "attention": [one.to_json_dict() for one in attention_ranges(queries, topk, s_kv)],
        }
        print_json(report.document() | found)
        return
    notes: list[str] = []
    if what == "mla_bwd":
        ranges = attention_ranges(queries, topk, s_kv)[1:]
        tables = report.backward_tables(backward) + report.range_tables(ranges)[:1]
        notes = report.published(ranges)
    elif what == "attention":
        ranges = attention_ranges(queries, topk, s_kv)
        tables, notes = report.range_tables(ranges), report.published(ranges)
    elif what == "sparse_mla_fwd":
        tables = report.forward_tables(case)
    elif what == "sparse_mla_decode":
        tables = report.decode_tables(topk)
    elif what == "indexer_training":
        tables = list(training_sm90.tables(queries, topk))
    elif what == "indexer":
        tables, notes = report.indexer_tables(), [f"* {one}" for one in indexer_sm100.CARRIED]
    elif what == "errors":
        comparisons = all_comparisons()
        tables, notes = report.comparison_tables(comparisons), report.missed(comparisons)
    else:
        tables = report.machine_tables()
    _show(tables, notes, markdown)


def _context_parallel(
    topk: int,
    markdown: bool,
    as_json: bool,
    rates: Path | None,
    chart: Path | None,
    **layer_options: Any,
) -> None:
    from workbench.model import context_parallel

    layer = context_parallel.Layer(topk=topk, **layer_options)
    known = context_parallel.Rates.from_json(rates) if rates else context_parallel.Rates()
    steps = context_parallel.sweep(layer, known)
    if chart is not None:
        from workbench.model.context_parallel_chart import draw

        draw(layer, steps, chart)
    if as_json:
        print_json(context_parallel.document(layer, known, steps))
        return
    notes = [context_parallel.sentence(steps)] + ([f"chart: {chart}"] if chart else [])
    _show([context_parallel.table(layer, steps)], notes, markdown)


def _show(tables: list[Table], notes: list[str], markdown: bool) -> None:
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


def _as_markdown(table: Table) -> str:
    title, columns, rows = table
    lines = [" | ".join(name for name, _ in columns)]
    lines.append(" | ".join("--:" if kind == "right" else "---" for _, kind in columns))
    lines += [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return f"**{title}**\n\n" + "\n".join(f"| {line} |" for line in lines)
