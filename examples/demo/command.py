"""`python -m examples.demo`: train a small model with sparse attention on real text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from flashdsa.cli.console import (
    json_option,
    new_console,
    new_table,
    print_json,
    print_table,
    progress_bar,
)
from flashdsa.cli.main import FlashDsaCommand
from flashdsa.cli.output_options import PICTURES, OutputFile, backend_option
from flashdsa.settings import BACKENDS


def _size(flag: str, name: str, sizes: str, says: str) -> Callable[[Any], Any]:
    """An option; its defaults on the CPU and on a GPU are those of `examples.demo.run.SIZES`."""
    return click.option(flag, name, type=click.IntRange(min=1), show_default=sizes, help=says)


def _choice(flag: str, values: tuple[str, ...], says: str) -> Callable[[Any], Any]:
    return click.option(flag, type=click.Choice(values), default="auto", help=says)


@click.command(
    cls=FlashDsaCommand,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.option(
    "--form",
    type=click.Choice(("v32", "v4")),
    default="v32",
    help="The layer: DeepSeek-V3.2's, or V4's with a window and compressed entries.",
)
@click.option("--steps", type=click.IntRange(min=1), default=200, help="Training steps.")
@_size("--window", "window", "1280, on a GPU 4096; v4: 12288", "Bytes of a context.")
@_size("--queries", "num_queries", "256, on a GPU 2048", "Last positions of a window that attend.")
@_size("--topk", "topk", "256, on a GPU 512; v4: 64, 512", "Keys or entries a query selects.")
@_size("--heads", "num_heads", "4, on a GPU 16", "Attention heads.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of all random numbers.")
@backend_option("auto", "Which implementation to use.", BACKENDS)
@_choice("--device", ("auto", "cpu", "cuda"), "auto: the GPU, if there are kernels for it.")
@click.option(
    "--picture",
    type=OutputFile(*PICTURES),
    default=Path("out/demo.png"),
    help="Where the picture goes: .png, .svg or .pdf.",
)
@click.option("--indices", type=OutputFile(), help="Save the keys that the trained indexer chose.")
@json_option
def demo(as_json: bool, device: str, backend: str, form: str, **choices: Any) -> None:
    """Train a small model with DeepSeek Sparse Attention on real text, in about two minutes.

    The text ships with Python. One attention layer of DeepSeek's sizes (576/512 columns, an indexer
    of 64 heads x 128) reads it byte by byte: the fp8 indexer selects each query's keys, sparse_mla
    attends to those alone. The indexer learns from dense attention for half of the steps
    (indexer_kl_loss_dense), then from the selected keys (indexer_kl_loss).

    It prints the loss on held-out text with sparse and with dense attention, of the same weights,
    and the share of dense attention's weight on the keys that the indexer selects, beside the
    newest keys, random ones and the best ones.

    With --form v4 the layer is DeepSeek-V4's: compress_kv pools the keys of eight bytes into an
    entry, one every four bytes, and the indexer's keys alike. A query attends to the last 128 bytes
    and to the entries that the indexer selects, in one softmax with a sink (extra_kv,
    extra_indices, attn_sink of sparse_mla). rotate_tail takes the keys' rotation off the output
    again, since keys are values. Shares are those of dense attention to entries.

    \b
    Examples
      python -m examples.demo
      python -m examples.demo --form v4 --picture out/v4.png
      python -m examples.demo --steps 20 --picture out/short.png
      python -m examples.demo --device cuda --queries 1024
      python -m examples.demo --json > out/demo.json
    """
    from examples.demo.run import SIZES, V4_SIZES, choose_device, run_demo
    from examples.demo.train import DemoOptions

    device = choose_device(device, backend)
    given = {name: value for name, value in choices.items() if value is not None}
    sizes = (V4_SIZES if form == "v4" else SIZES)[device] | given
    options = DemoOptions(form=form, **sizes, device=device, backend=backend)
    with progress_bar() as on_progress:
        result = run_demo(options, on_progress)
    if as_json:
        print_json(result)
    else:
        _print_report(result)


def _print_report(result: dict[str, Any]) -> None:
    """Print what was done, and losses and captured mass on held-out text."""
    from examples.demo.v4 import RATIO

    console, options = new_console(), result["options"]
    train, held_out = result["train_bytes"] / 1e3, result["held_out_bytes"] / 1e3
    console.print(
        f"{options['steps']} steps on {result['device']} took {result['seconds']:.0f} s; "
        f"{train:.0f} kB to train on, {held_out:.0f} kB held out"
    )
    for name in dict.fromkeys(result["served"].values()):
        served = ", ".join(one for one, backend in result["served"].items() if backend == name)
        console.print(f"served by {name}: {served}\n")
    headings = ("sparse", "dense", "indexer's", "newest", "random", "best")
    table = new_table([("after step", "right"), *((heading, "right") for heading in headings)])
    for look in result["held_out"]:
        step, sparse, dense, *shares = look.values()
        losses = f"{sparse:.3f}", f"{dense:.3f}"
        table.add_row(str(step), *losses, *(f"{share:.1%}" for share in shares))
    ratio, keys = (RATIO, "entries") if options["form"] == "v4" else (1, "keys")
    of = f"{options['topk']} of at most {options['window'] // ratio} {keys}"
    print_table(console, f"Held-out text: loss, and dense attention's share on {of}", table)
    console.print(f"picture: {options['picture']}", soft_wrap=True)
