"""`flashdsa demo`: train a small model with sparse attention on real text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashdsa.cli.console import json_option, print_json, progress_bar
from flashdsa.cli.processes import mesh_of_processes
from flashdsa.settings import BACKENDS

if TYPE_CHECKING:
    from flashdsa.demo import DemoOptions, DemoResult

_COUNT = click.IntRange(min=1)


@click.command()
@click.option("--steps", type=_COUNT, default=200, show_default=True, help="Training steps.")
@click.option("--window", type=_COUNT, default=1280, show_default=True, help="Bytes of a context.")
@click.option(
    "--queries",
    "num_queries",
    type=_COUNT,
    default=256,
    show_default=True,
    help="Last positions of a window that attend; fewer is faster.",
)
@click.option("--topk", type=_COUNT, default=256, show_default=True, help="Keys a query selects.")
@click.option(
    "--heads", "num_heads", type=_COUNT, default=4, show_default=True, help="Attention heads."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights and batches.")
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="auto",
    show_default=True,
    help="Which implementation to use.",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("out/demo.png"),
    show_default=True,
    help="Where the picture goes: .png, .svg or .pdf.",
)
@click.option(
    "--indices",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Save what the trained indexer chose, for `flashdsa overlap`.",
)
@click.option(
    "--context-parallel",
    is_flag=True,
    help="Spread each window's tokens over the processes that torchrun started.",
)
@json_option
def demo(as_json: bool, context_parallel: bool, **choices: Any) -> None:
    """Train a small model with DeepSeek Sparse Attention on real text, in about a minute.

    The text ships with Python (its licence, its modules' documentation). One attention layer of
    DeepSeek's sizes (576/512 columns, an indexer of 64 heads x 128) reads it byte by byte: the fp8
    indexer picks each query's keys from packed pages, sparse_mla attends to those alone, gradients
    flow back through mla_bwd. Exit code 1 if an error against float64 is over its limit.

    \b
    What it prints
      loss             nats per byte on held-out text, before and after; with sparse attention,
                       and with dense attention over all keys on the same weights
      captured mass    share of dense attention's weight that lies on the selected keys: chosen by
                       the indexer, the newest ones, random ones, the best possible choice
      errors           the trained layer's own tensors: each operation against float64
      picture          loss over steps, and which positions the queries chose

    \b
    Examples
      flashdsa demo
      flashdsa demo --steps 20 --picture out/short.png
      flashdsa demo --json > out/demo.json
      torchrun --nproc-per-node 2 -m flashdsa.demo --context-parallel
    """
    from flashdsa.demo import DemoOptions, run_demo

    options = DemoOptions(**choices)
    if context_parallel:
        result = _on_all_processes(options)
        if result is None:
            return
    else:
        with progress_bar() as on_progress:
            result = run_demo(options, on_progress)
    if as_json:
        print_json(result.to_json_dict())
    else:
        from flashdsa.cli.demo_report import print_report

        print_report(result)
    if not result.passed:
        raise SystemExit(1)


def _on_all_processes(options: DemoOptions) -> DemoResult | None:
    """The result on process 0, None on the others, which only train."""
    from flashdsa.demo import run_demo
    from flashdsa.demo.context_parallel import train_along

    with mesh_of_processes() as mesh:
        if mesh.get_local_rank() > 0:
            train_along(options, mesh)
            return None
        with progress_bar() as on_progress:
            return run_demo(options, on_progress, mesh)
