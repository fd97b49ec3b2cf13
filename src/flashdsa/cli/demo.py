"""`flashdsa demo`: train a small model with sparse attention on real text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flashdsa.cli.console import json_option, print_json, progress_bar
from flashdsa.cli.output_options import PICTURES, OutputFile
from flashdsa.cli.processes import mesh_of_processes
from flashdsa.errors import ArgumentValueError
from flashdsa.settings import BACKENDS

if TYPE_CHECKING:
    from flashdsa.demo import DemoOptions, DemoResult

_COUNT = click.IntRange(min=1)
_Command = TypeVar("_Command", bound=Callable[..., Any])


def _size_option(
    flag: str, name: str, defaults: tuple[int, int], says: str
) -> Callable[[_Command], _Command]:
    """Of a size; its defaults on the CPU and on a GPU are those of `flashdsa.demo`."""
    on_cpu, on_gpu = defaults
    return click.option(
        flag, name, type=_COUNT, show_default=f"{on_cpu}, on a GPU {on_gpu}", help=says
    )


@click.command()
@click.option("--steps", type=_COUNT, default=200, show_default=True, help="Training steps.")
@_size_option("--window", "window", (1280, 4096), "Bytes of a context.")
@_size_option("--queries", "num_queries", (256, 2048), "Last positions of a window that attend.")
@_size_option("--topk", "topk", (256, 512), "Keys a query selects.")
@_size_option("--heads", "num_heads", (4, 16), "Attention heads.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights and batches.")
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="auto",
    show_default=True,
    help="Which implementation to use.",
)
@click.option(
    "--device",
    type=click.Choice(("auto", "cpu", "cuda")),
    default="auto",
    show_default=True,
    help="auto: the GPU, if there are kernels for it.",
)
@click.option(
    "--picture",
    type=OutputFile(*PICTURES),
    default=Path("out/demo.png"),
    show_default=True,
    help="Where the picture goes: .png, .svg or .pdf.",
)
@click.option(
    "--indices",
    type=OutputFile(),
    help="Save what the trained indexer chose, for `python -m workbench overlap`.",
)
@click.option(
    "--context-parallel",
    is_flag=True,
    help="Spread each window's tokens over the processes that torchrun started.",
)
@json_option
def demo(as_json: bool, context_parallel: bool, device: str, backend: str, **choices: Any) -> None:
    """Train a small model with DeepSeek Sparse Attention on real text, in about two minutes.

    The text ships with Python (its licence, its modules' documentation). One attention layer of
    DeepSeek's sizes (576/512 columns, an indexer of 64 heads x 128) reads it byte by byte: the fp8
    indexer picks each query's keys, sparse_mla attends to those alone, gradients flow back through
    mla_bwd. The indexer learns from dense attention for half of the steps (indexer_kl_loss_dense),
    then from the attention over the selected keys (attention_target, indexer_kl_loss). Held-out
    text is read as a server does, from packed pages. Exit code 1 if an error against float64 is
    over its limit.

    \b
    What it prints
      served by      the backend of each operation, and on a GPU its kernels;
                     the warm-up's loss is products of torch
      loss           nats per byte on held-out text, before and after; with
                     sparse attention, and with dense attention over all keys
                     on the same weights
      captured mass  share of dense attention's weight that lies on the keys
                     chosen by the indexer, the newest keys, random ones, and
                     the best possible choice: before training, behind the
                     indexer's warm-up and at the end
      errors         the trained layer's own tensors: each operation against
                     float64
      picture        loss over steps, and which positions the queries chose

    \b
    Examples
      flashdsa demo
      flashdsa demo --steps 20 --picture out/short.png
      flashdsa demo --device cuda --queries 1024
      flashdsa demo --json > out/demo.json
      torchrun --nproc-per-node 2 -m flashdsa.demo --context-parallel
    """
    from flashdsa.demo import DemoOptions, run_demo
    from flashdsa.demo.device import choose_device

    if context_parallel:
        if device == "cuda":
            raise ArgumentValueError("--context-parallel: runs on the CPU; got --device cuda")
        device = "cpu"
    device = choose_device(device, backend)
    options = DemoOptions.on(device, backend=backend, **choices)
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
