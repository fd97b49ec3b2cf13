"""`python -m workbench bench`: an operation beside other libraries."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashdsa.cli.bench import report
from flashdsa.cli.console import json_option, progress_bar
from flashdsa.cli.output_options import JsonOrFolder, backend_option

if TYPE_CHECKING:
    from flashdsa.bench.result import BenchResult

OPERATIONS = (
    "sparse_mla_fwd", "sparse_mla_decode", "mla_bwd", "indexer", "prefill", "v41_decode",
    "indexer_training",
)  # fmt: skip
_COUNT = click.IntRange(min=1)


@click.command()
@click.argument("operation", metavar="OPERATION", type=click.Choice(OPERATIONS))
@click.option(
    "--peers", help="Names or parts of them, by commas; none: ours alone.  [default: all]"
)
@click.option("--only", default="", help="Cases whose name contains this.")
@click.option(
    "--condition",
    "conditions",
    multiple=True,
    metavar="NAME",
    type=click.Choice(("hot", "cold", "captured")),
    help="hot, cold or captured; may be repeated.  [default: by operation]",
)
@click.option("--repeats", type=_COUNT, help="Samples of each cold time.  [default: 15]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of inputs.")
@backend_option("sm90", "Of ours.")
@click.option("--quick", is_flag=True, help="Two small cases, 3 repeats: does it work?")
@click.option(
    "--out", type=JsonOrFolder(), help="A .json file or a folder, as of `flashdsa bench`."
)
@json_option
def bench(
    operation: str,
    peers: str | None,
    only: str,
    conditions: tuple[str, ...],
    repeats: int | None,
    seed: int,
    backend: str,
    quick: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Time an operation by turns with other libraries; write JSON and a chart beside it.

    The loop, the document and the judge are those of `flashdsa bench`; workbench/README.md has the
    protocol. Results of peers are judged, too; a wrong one takes no part in a ratio. Missing peers
    are named. Exit code 1 if a result of ours is wrong.

    \b
    Peers
      sparse_mla_fwd, sparse_mla_decode   FlashMLA (sgl-flash-mla)
      mla_bwd                             cuDNN Frontend
      indexer, prefill                    DeepGEMM (bf16: cuDNN Frontend) and a
                                          top-k: cuDNN, FlashInfer, torch
      v41_decode, indexer_training        none

    \b
    Examples
      python -m workbench bench indexer --only ragged
      python -m workbench bench sparse_mla_fwd --peers none --seed 7
      python -m workbench bench prefill --condition captured --out x.json
    """
    from flashdsa.bench.runner import BenchOptions, run_bench
    from flashdsa.bench.timer import new_timer
    from flashdsa.cli.availability import require_runnable
    from workbench.bench.registry import BENCHES

    require_runnable(backend)
    chosen = BENCHES[operation]
    cases = [case for case in chosen.cases if only in case.label]
    if not cases:
        names = ", ".join(case.label for case in chosen.cases)
        raise click.UsageError(f"--only: no case contains {only!r}; cases: {names}")
    parts = None if peers is None else [part.strip() for part in peers.split(",")]
    options = BenchOptions(
        plan=[(chosen.operation, [case.quick() for case in cases[:2]] if quick else cases)],
        backend=backend,
        repeats=repeats or (3 if quick else None),
        seed=seed,
        peers={
            name: peer
            for name, peer in chosen.peers.items()
            if parts is None or any(part.lower() in name.lower() for part in parts)
        },
        conditions=conditions or None,
        packages=("apache-tvm-ffi", *chosen.packages),
    )
    with progress_bar() as on_progress:
        result = run_bench(options, new_timer(options.device, seed), on_progress)
    if not as_json:
        for line in summary(result):
            click.echo(line)
    report(result, operation, out, as_json)


def summary(result: BenchResult) -> list[str]:
    """A line for each condition: geometric mean and lowest of the peers' times over ours."""
    lines = []
    for condition in dict.fromkeys(name for row in result.rows for name in row.times):
        ratios = {
            row.case: ratio for row in result.rows if (ratio := row.ratio(condition)) is not None
        }
        if ratios:
            mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
            lowest = min(ratios, key=lambda name: ratios[name])
            lines.append(
                f"{condition}: fastest peer over ours {mean:.2f} in the geometric mean of "
                f"{len(ratios)} cases, lowest {ratios[lowest]:.2f} ({lowest})"
            )
    return lines
