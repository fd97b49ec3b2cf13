"""The first hour on a B200: the correctness of our kernels, and the constants of their models.

    python -m workbench.probes.first_hour_b200 --out first_hour.json            on a B200
    python -m workbench.probes.first_hour_b200 --emulate --out first_hour.json  here: does it run?

Correctness first; nothing is timed if a case fails. Needs nvidia-cutlass-dsl. Exit code 1 if a case
fails. Copy its numbers into workbench/model/machine.py and backends/emulated/devices.py by hand.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch

import flashdsa
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm100.mla_bwd import run
from flashdsa.hw import SM100
from flashdsa.kernels.catalog import INDEXER_SM100
from flashdsa.ops.attention_backward import MlaBwdOperands
from flashdsa.problem import PAGE_BYTES
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import check_backward, check_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from tests.kernels.indexer.inputs import Inputs, assert_scores_are_right, make_inputs, normal_inputs
from workbench.lab.kernels.split_heads.plan import SPLIT_HEADS
from workbench.lab.split_heads import judge_on
from workbench.model.indexer_sm100 import predict_all
from workbench.model.machine import B200
from workbench.model.unknowns import PAIRS_AT_ONCE, attention_ranges
from workbench.probes.sm100_copy_rates import KINDS, clocks_an_operation

SCHEMA = "flashdsa-first-hour/1"
LENGTHS = ([0, 1, 64, 65, 2048, 2049], [5800], [9000, 600, 2500], [700] * 300)
VALUES = ("random", "equal", "two", "nan", "ascending")
REPEATS = 50
FLUSH_BYTES = 1 << 28


def indexer_is_right(device: str, backend: str, few: bool) -> dict[str, bool]:
    """Compare ids with the CPU's where scores are exact, and scores with the contract, by case."""
    found: dict[str, bool] = {}
    for num_heads, topk in [(16, 512)] if few else [(16, 512), (32, 1024), (64, 2048)]:
        for lengths, values in (
            product(LENGTHS[:1], VALUES[:1]) if few else product(LENGTHS, VALUES)
        ):
            inputs = make_inputs(lengths, num_heads=num_heads, values=values)
            there = inputs.to(device)
            for order in (False,) if few else (False, True):
                expected, got = inputs.output(topk), there.output(topk)
                flashdsa.dsa_topk_indexer(*inputs, expected, sorted=order, backend="cpu")
                flashdsa.dsa_topk_indexer(*there, got, sorted=order, backend=backend)
                name = f"ids H={num_heads} topk={topk} {lengths[:6]} {values} sorted={order}"
                found[name] = torch.equal(got.cpu(), expected)
        inputs = normal_inputs([300, 0, 65], num_heads)
        scores = flashdsa.indexer_logits(*inputs.to(device), 317, backend=backend)
        try:
            assert_scores_are_right(scores.cpu(), inputs)
            found[f"scores H={num_heads}"] = True
        except AssertionError:
            found[f"scores H={num_heads}"] = False
    return found


ATTENTION = (
    SparseMlaCase("one tile", 1, 90, 128, 64),
    SparseMlaCase("every feature", 9, 700, 128, 448, duplicates=True, invalid=True, poison=True,
                  empty_rows=True, topk_length=True, attn_sink="infinite"),
    SparseMlaCase("model's topk", 200, 9000, 128, 2048, invalid=True),
    SparseMlaCase("pairs of queries", 33, 900, 64, 200, invalid=True, duplicates=True),
    SparseMlaCase("eights of queries", 33, 900, 16, 200, invalid=True, duplicates=True),
)  # fmt: skip
"""The first one shows whether an implicit pair of products is what the forward takes it for."""


def split_heads_backward(runner: Runner) -> Callable[[MlaBwdOperands], Any]:
    """The backward of the reference design, which no call takes: operands to dQ, dKV, others."""
    function = runner.function(SPLIT_HEADS, SPLIT_HEADS.plans[0])
    options = {"sm_scale": 576**-0.5, "deterministic": False, "dkv_dtype": torch.float32}
    return runner.on_device(lambda operands: run(function, operands, **options, pairs=1))


def attention_is_right(device: str, backend: str, few: bool, runner: Runner) -> dict[str, bool]:
    """Check forward and backwards against the contract, by case."""
    found: dict[str, bool] = {}
    for case in ATTENTION[:1] if few else ATTENTION:
        inputs = make_sparse_mla_inputs(case, 0, device)
        found[f"forward, {case.name}"] = failures(check_forward(inputs, backend)) == []
        if case.num_heads == 128:
            found[f"backward, {case.name}"] = failures(check_backward(inputs, backend)) == []
        if case.num_heads == 128 and case.attn_sink is None:
            verdicts = judge_on(runner, inputs)
            found[f"backward, split heads, {case.name}"] = failures(verdicts) == []
    return found


def attention_times(split_heads: Callable[[MlaBwdOperands], Any]) -> dict[str, Any]:
    """Time every kernel in whole waves, by topk: so blocks and ends of a query come apart.

    The clock is read while forwards follow each other.
    """
    queries, heads, keys = 8 * PAIRS_AT_ONCE, 128, 8192
    found: dict[str, Any] = {}
    for topk in (64, 512, 2048):
        q = torch.randn(queries, heads, 576, device="cuda").bfloat16()
        kv = torch.randn(keys, 576, device="cuda").bfloat16()
        indices = torch.rand(queries, keys, device="cuda").topk(topk).indices.int()
        out, lse = flashdsa.sparse_mla_fwd(q, kv, indices, backend="sm100")
        launches = {
            "forward": lambda q=q, kv=kv, i=indices: flashdsa.sparse_mla_fwd(
                q, kv, i, backend="sm100"
            ),
            "backward": lambda q=q, kv=kv, i=indices, o=out, s=lse: flashdsa.mla_bwd(
                q, kv, o, s, o, i, backend="sm100"
            ),
            "backward, split heads": lambda q=q, kv=kv, i=indices, o=out, s=lse: split_heads(
                MlaBwdOperands(q, kv, o, s, o, i)
            ),
        }
        for name, launch in launches.items():
            found[f"{name}, topk {topk}"] = {"us": microseconds(launch)}
        for one in attention_ranges(queries, topk, keys):
            predicted = [one.best.seconds * 1e6, one.worst.seconds * 1e6]
            found[f"{one.kernel}, topk {topk}"]["predicted_us"] = predicted
    for _ in range(2000):
        launches["forward"]()
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    found["clock under load, MHz"] = int(said[0]) if said else None
    return found


def microseconds(launch: Callable[[], Any]) -> float:
    """Take the median between two events around a launch, the second-level cache flushed."""
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
    """Draw random bytes as keys, H = 64, on the GPU; only their times are of interest."""
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
    """Time the nine shapes beside their predictions."""
    found: dict[str, Any] = {}
    for name, one in predict_all(B200).items():
        inputs = random_inputs(one.shape.rows, one.shape.tokens)
        ids = inputs.output(2048)
        measured = microseconds(
            lambda x=inputs, y=ids: flashdsa.dsa_topk_indexer(*x, y, backend="sm100")
        )
        found[name] = {"us": measured, "predicted_us": [one.low * 1e6, one.high * 1e6]}
    return found


def constants() -> dict[str, Any]:
    """Read cluster capacities as the driver says, and time the empty launch."""
    from flashdsa.backends.gpu.runner import gpu

    plan, one = INDEXER_SM100.plans[0], gpu(torch.device("cuda", 0))
    short = random_inputs(1, 64)
    ids = short.output(2048)
    return {
        "num_sms": one.num_sms,
        "clusters": dict(one.cluster_capacity(plan.threads, plan.smem_bytes)),
        "launch_without_pages_us": microseconds(
            lambda: flashdsa.dsa_topk_indexer(*short, ids, backend="sm100")
        ),
    }


def main() -> int:
    """Run cases, then constants, then shapes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--emulate", action="store_true", help="a few cases and probes on ptxemu")
    options = parser.parse_args()
    device, backend = "cuda", "sm100"
    if options.emulate:
        from flashdsa.backends.emulated.devices import SMALL
        from flashdsa.backends.emulated.runner import emulation

        device, backend, around = "cpu", "emulate-sm100", emulation(SMALL)
    elif torch.cuda.get_device_capability() not in SM100.capabilities:
        raise SystemExit("needs a GPU of compute capability 10.0 or 10.3, or --emulate")
    else:
        from flashdsa.backends.gpu.runner import gpu

        around = nullcontext(gpu(torch.device("cuda", 0)))
    with around as runner:
        cases = indexer_is_right(device, backend, options.emulate)
        cases |= attention_is_right(device, backend, options.emulate, runner)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": "ptxemu" if options.emulate else torch.cuda.get_device_name(),
        "cases": cases,
    }
    if all(cases.values()):
        clocks = {kind: clocks_an_operation(kind, options.emulate) for kind in KINDS}
        document["clocks_of_a_warp"] = clocks
        if not options.emulate:
            document |= {"constants": constants(), "shapes": shapes()}
            document["attention"] = attention_times(split_heads_backward(runner))
    options.out.write_text(json.dumps(document, indent=2) + "\n")
    failed = [name for name, right in cases.items() if not right]
    print(f"{len(cases) - len(failed)} of {len(cases)} cases are right; wrote {options.out}")
    for name in failed:
        print(f"wrong: {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
