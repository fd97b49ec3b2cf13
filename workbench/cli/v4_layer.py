"""`python -m workbench v4-layer`: an attention layer of DeepSeek-V4-Flash, timed by part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashdsa.cli.console import json_option, progress_bar
from flashdsa.cli.output_options import OutputFile
from flashdsa.errors import UnsupportedError
from flashdsa.output_paths import written

if TYPE_CHECKING:
    from rich.console import Console

    from workbench.v4_layer.run import Found

KINDS = ("window", "CSA", "HCA")


@click.command("v4-layer")
@click.option("--tokens", type=click.IntRange(1), default=4096, show_default=True)
@click.option(
    "--device", type=click.Choice(("cuda", "cpu")), default="cuda", show_default=True,
    help="cpu: a small layer, to try the command.",
)  # fmt: skip
@click.option(
    "--kind", "kinds", type=click.Choice(KINDS), multiple=True,
    help="window, CSA or HCA; may be repeated.  [default: all]",
)  # fmt: skip
@click.option("--compile", "compiled", is_flag=True, help="Both under torch.compile, too.")
@click.option("--repeats", type=click.IntRange(1), default=15, show_default=True, help="Samples.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--out", type=OutputFile(".json"), help="Write the document there, too.")
@json_option
def v4_layer(
    tokens: int,
    device: str,
    kinds: tuple[str, ...],
    compiled: bool,
    repeats: int,
    seed: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Time an attention layer of DeepSeek-V4-Flash, forward and backward, by part.

    Three kinds, hidden states in and out, bf16, one document: a window of 128
    tokens; CSA, the window and 512 chosen entries of 4 tokens; HCA, the window
    and all entries of 128. Ours is transformers' layer after
    flashdsa.integrations.transformers.enable, torch's the same with eager
    attention and equal weights. First both are judged against eager attention
    in fp32: the output and all gradients. Exit code 1 if one of ours is off.

    \b
    Whole layers
      forward, both   work of the GPU, with the host ahead of it
      called          both on an idle GPU, which waits for the host, too
      host            until the host has queued both
      ratio           both, over torch eager's
      error           the largest of output and gradients; compiled layers are
                      not judged, they may choose other entries

    \b
    Parts of ours, work of the GPU, each alone with what it gets in the layer
      projections, RMSNorm, rotation   the model's own, torch
      entries   their projections; compress_kv; tables, and who sees them
      index     projections; scores and top-k, the model's own; pooled keys
      lists and layout     ranges and lists of rows for sparse_mla
      attention            sparse_mla
      rest: small kernels  what the whole layer has beside all of these
      rest: waits for host what a GPU that was idle does besides

    A backward is both without forward. Parts and rests sum to the call. On a
    CPU a part's own call counts, too. Needs transformers 5.17 or newer.

    \b
    Examples
      python -m workbench v4-layer --out v4_layer.json
      python -m workbench v4-layer --kind CSA --compile
      python -m workbench v4-layer --device cpu --tokens 64 --repeats 3
    """
    import torch

    from flashdsa.cli.console import new_console, print_json

    try:
        from workbench.v4_layer.run import document, measure
    except ImportError as error:
        raise UnsupportedError(f"v4-layer needs transformers 5.17 or newer: {error}") from error
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("--device cuda: torch finds no GPU here; --device cpu needs none")
    with progress_bar() as on_progress:
        found, sizes = measure(kinds or KINDS, tokens, device, repeats, seed, compiled, on_progress)
    protocol = {"tokens": tokens, "repeats": repeats, "seed": seed}
    result = document(found, sizes, device, protocol)
    if out is not None:
        with written(out) as draft:
            draft.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json(result)
    else:
        console = new_console()
        _print_wholes(console, found, f"{tokens:,} tokens, {device}")
        _print_parts(console, found)
    wrong = [f"{kind}: {text}" for kind, one in found.items() for text in one.findings]
    for line in wrong:
        click.echo(line, err=True)
    if wrong:
        raise SystemExit(1)


def _print_wholes(console: Console, found: Found, where: str) -> None:
    from flashdsa.cli.console import new_table, print_table
    from workbench.v4_layer.layers import EAGER
    from workbench.v4_layer.run import BOTH, FORWARD

    names = ("forward", "both", "called", "host", "ratio", "error")
    table = new_table([("layer", "left"), ("by", "left"), *((name, "right") for name in names)])
    for kind, one in found.items():
        eager = one.wholes[EAGER][BOTH].device.median
        for name, times in one.wholes.items():
            both = times[BOTH]
            taken = times[FORWARD].device, both.device, both.elapsed, both.host
            table.add_row(
                kind, name, *(f"{x.median / 1e3:.2f}" if x else "" for x in taken),
                f"{both.device.median / eager:.2f}", one.worst(name),
            )  # fmt: skip
        table.add_section()
    print_table(console, f"Whole layers, ms, {where}", table)
    for kind, one in found.items():
        for name, reason in one.missing.items():
            console.print(f"{kind}, {name}: {reason}", markup=False)


def _print_parts(console: Console, found: Found) -> None:
    """A column a kind and direction."""
    from flashdsa.cli.console import new_table, print_table
    from workbench.v4_layer.parts import PARTS

    headings = [(f"{kind}\n{way}", "right") for kind in found for way in ("fwd", "bwd")]
    table = new_table([("", "left"), *headings])
    kinds = found.values()
    rows = {part: [one.parts.get(part) for one in kinds] for part in PARTS}
    rows["rest: small kernels"] = [one.remainder() for one in kinds]
    sums = {
        "the layer": [one.whole("device") for one in kinds],
        "rest: waits for host": [one.waiting() for one in kinds],
        "called on an idle GPU": [one.whole("elapsed") for one in kinds],
        "host, until queued": [one.whole("host") for one in kinds],
    }
    for section in (rows, sums):
        for name, pairs in section.items():
            if any(pairs):
                cells = [us for pair in pairs for us in pair or (0.0, 0.0)]
                table.add_row(name, *map(_milliseconds, cells))
        table.add_section()
    print_table(console, "Parts of flashdsa's layer, ms", table)


def _milliseconds(us: float) -> str:
    """At most six characters below 1,000 s, so that the table has room in 80 columns."""
    if not us:
        return ""
    return f"{us / 1e3:.3f}" if us < 1e5 else f"{us / 1e3:.0f}"
