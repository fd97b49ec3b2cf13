"""The first hour on a B200: are the indexer's kernels right, and the constants of its model?

    python benchmarks/first_hour_b200.py --out first_hour.json            on a B200
    python benchmarks/first_hour_b200.py --emulate --out first_hour.json  here: that the script runs

Correctness first; nothing is timed if a case fails. Needs nvidia-cutlass-dsl. Exit code 1 if a case
fails. What it writes goes into analysis/model/machine.py and backends/emulated/devices.py by hand.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import flashdsa
from benchmarks.sm100_rates import PROBES, run_probe
from flashdsa.analysis.model.indexer_sm100 import b200_shapes, predict_all
from flashdsa.analysis.model.machine import B200
from flashdsa.kernels.catalog import INDEXER_SM100
from flashdsa.kernels.indexer.sm100.plan import PAGES_PER_STAGE, IndexerPlan
from flashdsa.problem import PAGE_BYTES
from tests.kernels.indexer.exact_inputs import Inputs, make_inputs
from tests.kernels.indexer.normal_inputs import assert_scores_are_right, normal_inputs

SCHEMA = "flashdsa-first-hour/1"
LENGTHS = ([0, 1, 64, 65, 2048, 2049], [5800], [9000, 600, 2500], [700] * 300)
VALUES = ("random", "equal", "two", "nan", "ascending")
REPEATS = 50
FLUSH_BYTES = 1 << 28


def correctness(device: str, backend: str, few: bool) -> dict[str, bool]:
    """Ids equal the CPU's where scores are exact; scores within the contract; a name a case."""
    found: dict[str, bool] = {}
    sizes = [(16, 512)] if few else [(16, 512), (32, 1024), (64, 2048)]
    for num_heads, topk in sizes:
        for lengths in LENGTHS[:1] if few else LENGTHS:
            for values in VALUES[:1] if few else VALUES:
                inputs = make_inputs(lengths, num_heads=num_heads, values=values)
                for order in (False,) if few else (False, True):
                    expected, got = inputs.output(topk), inputs.to(device).output(topk)
                    flashdsa.dsa_topk_indexer(*inputs, expected, sorted=order, backend="cpu")
                    flashdsa.dsa_topk_indexer(
                        *inputs.to(device), got, sorted=order, backend=backend
                    )
                    name = f"ids H={num_heads} topk={topk} {lengths[:6]} {values} sorted={order}"
                    found[name] = torch.equal(got.cpu(), expected)
        found[f"scores H={num_heads}"] = _scores_are_right(device, backend, num_heads)
    return found


def _scores_are_right(device: str, backend: str, num_heads: int) -> bool:
    inputs = normal_inputs([300, 0, 65], num_heads)
    scores = flashdsa.indexer_logits(*inputs.to(device), 317, backend=backend)
    try:
        assert_scores_are_right(scores.cpu(), inputs)
    except AssertionError:
        return False
    return True


def microseconds(launch: Callable[[], Any]) -> float:
    """The median between two events around a launch, the second-level cache flushed."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(REPEATS):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def random_inputs(rows: int, tokens: int) -> Inputs:
    """Random bytes as keys, H = 64, on the GPU; only their times are of interest."""
    pages = rows * tokens // 64
    cache = torch.randint(0, 100, (pages, PAGE_BYTES), dtype=torch.uint8, device="cuda")
    cache[:, 8192:] = torch.rand(pages, 64, device="cuda").view(torch.uint8)
    table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(rows, -1)
    return Inputs(
        torch.randn(rows, 64, 128, device="cuda").to(torch.float8_e4m3fn),
        cache.view(pages, 64, 1, 132),
        torch.randn(rows, 64, device="cuda"),
        torch.full((rows,), tokens, dtype=torch.int32, device="cuda"),
        table,
    )


def shapes() -> dict[str, Any]:
    """The nine shapes beside what the model says; the first one by pages per stage besides."""
    from flashdsa.jit.loader import compile_plan

    predicted = predict_all(B200)
    found: dict[str, Any] = {}
    for shape in b200_shapes():
        inputs = random_inputs(shape.rows, shape.tokens)
        ids = inputs.to("cuda").output(2048)
        ours = next(one for one in predicted[shape.name] if one.pages_per_stage == 2)
        measured = {
            "us": microseconds(
                lambda x=inputs, y=ids: flashdsa.dsa_topk_indexer(*x, y, backend="sm100")
            )
        }
        for pages in PAGES_PER_STAGE:
            function = compile_plan(INDEXER_SM100, IndexerPlan(pages_per_stage=pages))
            # One cluster of the portable size a row: the same for every number of pages.
            measured[f"us, {pages} a stage, clusters of 8"] = microseconds(
                lambda f=function, x=inputs, y=ids, n=shape.rows: f(*x, y, n, 8)
            )
        found[shape.name] = measured | {"predicted_us": [ours.low * 1e6, ours.high * 1e6]}
    return found


def constants() -> dict[str, Any]:
    """Cluster capacities as the driver says, and the empty launch."""
    from flashdsa.backends.gpu.runner import gpu

    plan = INDEXER_SM100.plans[0]
    short = random_inputs(1, 64)
    ids = short.output(2048)
    return {
        "num_sms": gpu(torch.device("cuda", 0)).num_sms,
        "clusters": dict(
            gpu(torch.device("cuda", 0)).cluster_capacity(plan.threads, plan.smem_bytes)
        ),
        "launch_without_pages_us": microseconds(
            lambda: flashdsa.dsa_topk_indexer(*short, ids, backend="sm100")
        ),
    }


def main() -> int:
    """Cases, then constants, then shapes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--emulate", action="store_true", help="a few cases and probes on ptxemu")
    options = parser.parse_args()
    device, backend, around = "cuda", "sm100", nullcontext()
    if options.emulate:
        from flashdsa.backends.emulated.devices import SMALL
        from flashdsa.backends.emulated.runner import emulation

        device, backend, around = "cpu", "emulate-sm100", emulation(SMALL)
    elif torch.cuda.get_device_capability() != (10, 0):
        raise SystemExit("needs a GPU of compute capability 10.0, or --emulate")
    with around:
        cases = correctness(device, backend, options.emulate)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": "ptxemu" if options.emulate else torch.cuda.get_device_name(),
        "cases": cases,
    }
    if all(cases.values()):
        document["rates"] = {name: run_probe(name, options.emulate) for name in PROBES}
        if not options.emulate:
            document |= {"constants": constants(), "shapes": shapes()}
    options.out.write_text(json.dumps(document, indent=2) + "\n")
    failed = [name for name, right in cases.items() if not right]
    print(f"{len(cases) - len(failed)} of {len(cases)} cases are right; wrote {options.out}")
    for name in failed:
        print(f"wrong: {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
