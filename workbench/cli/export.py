"""`python -m workbench export`: flashdsa's operations in the form that other tools read."""

from __future__ import annotations

import json
from pathlib import Path

import click

from flashdsa.cli.console import json_option, print_json
from flashdsa.cli.output_options import OutputFolder
from flashdsa.output_paths import written


@click.group()
def export() -> None:
    """Write flashdsa's operations in the form that other tools read."""


@export.command("flashinfer-bench")
@click.option(
    "--output",
    type=OutputFolder(),
    default=Path("solutions"),
    show_default=True,
    help="Folder for the solutions.",
)
@click.option("--author", default="flashdsa", show_default=True, help="Named in the solutions.")
@json_option
def flashinfer_bench(output: Path, author: str, as_json: bool) -> None:
    """Write solutions of FlashInfer-Bench's DSA definitions, one JSON file each.

    The definitions are the fp8 top-k indexer and sparse attention with pages of 64 and of one
    token. A solution carries the sources of flashdsa: it needs torch and, on a GPU, CuTe DSL.

    \b
    Examples
      python -m workbench export flashinfer-bench
      python -m workbench export flashinfer-bench --author me --json
    """
    from workbench.flashinfer_bench import SOURCES, solution

    paths = []
    for definition in SOURCES:
        content = solution(definition, author)
        path = output / f"{content['name']}.json"
        with written(path) as draft:
            draft.write_text(json.dumps(content, indent=2) + "\n")
        paths.append(str(path))
    if as_json:
        print_json({"solutions": paths})
    else:
        click.echo("\n".join(paths))
