"""`flashdsa bench`: speed and memory of the operations, as JSON and a chart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from flashdsa.cli.bench_decode import bench_decode
from flashdsa.cli.bench_forward import bench_forward
from flashdsa.cli.bench_gpu import bench_gpu
from flashdsa.cli.bench_training import bench_training
from flashdsa.cli.console import json_option, new_console, new_table, print_table, progress_bar
from flashdsa.cli.output_options import JsonOrFolder
from flashdsa.settings import BACKENDS

if TYPE_CHECKING:
    from flashdsa.bench.result import BenchResult

TARGETS = (
    "sparse_mla_fwd", "sparse_mla_decode", "mla_bwd", "indexer", "indexer_training", "topk",
    "memory", "all",
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float64")
GPU_TARGETS = {
    "sm90": ("indexer", "sparse_mla_fwd", "sparse_mla_decode", "indexer_training"),
    "sm100": ("indexer",),
}
"""What is measured on a GPU, by backend."""
GPU_ONLY = ("sparse_mla_decode", "indexer_training")
_SIZES = ("s", "s_kv", "h", "topk", "dtype")
_SIZE = click.IntRange(min=1)
_MIB = 1 << 20


@click.command()
@click.argument("target", metavar="[TARGET]", type=click.Choice(TARGETS), default="all")
@click.option("--s", "s", type=_SIZE, default=16, show_default=True, help="Queries (batch rows).")
@click.option("--s-kv", "s_kv", type=_SIZE, default=8192, show_default=True, help="Keys.")
@click.option("--h", "h", type=_SIZE, default=128, show_default=True, help="Attention heads.")
@click.option("--topk", type=_SIZE, default=2048, show_default=True, help="Keys a query selects.")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Of q and kv.  [default: float32 for times, bfloat16 for memory]",
)
@click.option("--repeats", type=_SIZE, help="Samples of each time.  [default: 7; on a GPU 30]")
@click.option(
    "--backend",
    type=click.Choice(BACKENDS[1:]),
    default="cpu",
    show_default=True,
    help="Which implementation to time.",
)
@click.option("--quick", is_flag=True, help="Small sizes, 3 repeats: does it work at all?")
@click.option(
    "--out",
    type=JsonOrFolder(),
    help="A .json file or a folder.  [default: workbench/results/<machine>/ in a checkout, "
    "./out/ elsewhere]",
)
@json_option
@click.pass_context
def bench(
    context: click.Context,
    /,
    target: str,
    quick: bool,
    out: Path | None,
    backend: str,
    as_json: bool,
    **choices: Any,
) -> None:
    """Measure speed and memory; write JSON and a chart (PNG) beside it.

    TARGET is sparse_mla_fwd, sparse_mla_decode, mla_bwd, indexer, indexer_training, topk, memory or
    all (the default). A backend that lacks one says so.

    Each operation is timed in turns with a ceiling: what the same machine reaches in the same run
    on the plainest code of its kind. For attention and the indexer that is torch.matmul of
    128x576x2048 in fp32, for top-k one reading of the scores. workbench/README.md tells more.

    On a Hopper GPU `bench indexer --backend sm90` times fixed shapes, ragged batches and
    adversarial scores, checks every result, and compares with DeepGEMM + the top-k of cuDNN
    Frontend, FlashInfer or torch where they are installed. It prints which of the project's targets
    are met. `bench sparse_mla_fwd --backend sm90` times prefills of 4,096 queries, in bursts and
    back to back, `bench sparse_mla_decode` few queries and packed rows; both judge O, and compare
    with FlashMLA where sgl-flash-mla is installed.
    `bench indexer_training --backend sm90` times and judges what trains the indexer: the target,
    the scores, their divergence and the backward.

    \b
    Columns
      ms, p10, p90      milliseconds of one call: median, 10th and 90th percentile
      rate              useful work over the median, by the formulas of the README
      ceiling           the ceiling's rate in the same run
      of it             rate / ceiling
      extra             peak resident memory beyond inputs and outputs, each call
                        in a new process

    \b
    Examples
      flashdsa bench --quick
      flashdsa bench sparse_mla_fwd --s 16 --s-kv 8192 --h 128 --topk 2048
      flashdsa bench memory              does the peak stay flat when S grows?
      flashdsa bench all --out out/mine.json
      flashdsa bench indexer --backend sm90        on an H100 or H200, a minute
      flashdsa bench sparse_mla_fwd --backend sm90        likewise
      flashdsa bench sparse_mla_decode --backend sm90     likewise
      flashdsa bench indexer_training --backend sm90      likewise
    """
    from flashdsa.bench.chart import draw_chart
    from flashdsa.bench.result import write_result
    from flashdsa.bench.runner import default_folder, result_path, run_bench
    from flashdsa.cli.availability import require_runnable
    from flashdsa.output_paths import require_creatable_folder

    require_runnable(backend)
    if out is None:
        require_creatable_folder("--out", default_folder())
    if backend in GPU_TARGETS:
        _require_gpu_target(context, target, backend)
        if target == "sparse_mla_fwd":
            bench_forward(quick, out, as_json)
        elif target == "sparse_mla_decode":
            bench_decode(quick, out, as_json)
        elif target == "indexer_training":
            bench_training(quick, out, as_json)
        else:
            bench_gpu(quick, choices["repeats"], out, as_json)
        return
    if target in GPU_ONLY:
        raise click.UsageError(f"{target}: measured on a GPU only; add --backend sm90")
    options = _options(target, quick, backend=backend, **choices)
    with progress_bar() as on_progress:
        result = run_bench(options, on_progress)
    path = result_path(result, target, out)
    write_result(result, path)
    chart = path.with_suffix(".png")
    draw_chart(result, chart)
    if as_json:
        click.echo(result.to_json(), nl=False)
        return
    _print_result(result)
    click.echo(f"result: {path}\nchart:  {chart}")


def _require_gpu_target(context: click.Context, target: str, backend: str) -> None:
    targets = GPU_TARGETS[backend]
    if target not in targets:
        raise click.UsageError(
            f"--backend {backend} measures {', '.join(targets)} in this version; got {target}"
        )
    fixed = _SIZES if target == "indexer" else (*_SIZES, "repeats")
    for name in fixed:
        if context.get_parameter_source(name) != ParameterSource.DEFAULT:
            option = "--" + name.replace("_", "-")
            raise click.UsageError(f"{option}: the cases of --backend {backend} are fixed")


def _options(
    target: str, quick: bool, repeats: int | None, backend: str, dtype: str | None, **sizes: int
) -> Any:
    from flashdsa.bench.cases import Shape
    from flashdsa.bench.runner import BenchOptions

    shape = Shape(dtype=dtype or "float32", **sizes)
    options = BenchOptions(target, shape, repeats or 7, backend, memory_dtype=dtype or "bfloat16")
    return options.quick() if quick else options


def _print_result(result: BenchResult) -> None:
    console = new_console()
    if result.rows:
        table = new_table(
            [("operation and sizes", "wrap")]
            + [(h, "right") for h in ("ms", "p10", "p90", "rate", "ceiling", "of it")],
        )
        for row in result.rows:
            seconds = (row.seconds_median, row.seconds_p10, row.seconds_p90)
            times = [f"{1e3 * value:.3g}" for value in seconds]
            rates = [f"{_rate(row.rate)} {row.unit}", _rate(row.ceiling_rate), f"{row.ratio:.2g}"]
            table.add_row(f"{row.op}\n{_sizes(row.problem)}", *times, *rates)
        print_table(console, f"Speed, {result.threads} threads", table)
    if result.memory:
        headings = ("inputs", "outputs", "extra")
        table = new_table(
            [("operation", "left"), ("problem", "wrap")] + [(h, "right") for h in headings],
        )
        for used in result.memory:
            counts = (used.input_bytes, used.output_bytes, used.extra_peak_bytes)
            mib = [f"{count / _MIB:.1f}" for count in counts]
            table.add_row(used.op, _sizes(used.problem), *mib)
        print_table(console, "Peak memory in MiB", table)


def _rate(value: float) -> str:
    """One decimal, and two digits at least: a small rate is not 0."""
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _sizes(problem: dict[str, int | str]) -> str:
    return " ".join(str(v) if k == "dtype" else f"{k}={v}" for k, v in problem.items())
