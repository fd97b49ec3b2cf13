"""The indexer over shared keys on a Hopper GPU, beside other libraries: one run, one JSON document.

    python -m workbench.bench.prefill_gpu results.json

Peers: logits of all queries at once, DeepGEMM's of fp8 and cuDNN Frontend's of bf16; then the
fastest top-k of cuDNN Frontend, FlashInfer (workbench/peers/build_flashinfer_topk.py) and torch.
What is not installed is named. cuDNN Frontend compiles its kernels with CuTe DSL: --cudnn-object
takes those of workbench/peers/build_cudnn_prefill.py.

Times are taken as `flashdsa bench indexer` takes them (`flashdsa.bench.gpu.protocol`), in two ways.
`ms`, `ratio`: plain calls, in turns; L2 is flushed and a kernel spins before each, so that the host
has queued the call before the GPU begins it, and samples where it had not are thrown away (`late`).
`captured_ms`, `captured_ratio`: the replays of CUDA graphs of the same calls, in turns. So neither
has anything of the host in it; a plain call that is slower than its replay is a finding. What the
host takes stands beside them: `host_us`, of a call whose process waited for the GPU before.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flashdsa
from flashdsa.bench.gpu.peers import in_a_line, load_peers
from flashdsa.bench.gpu.protocol import FLUSH_BYTES, Call, CudaTimer

TOPK = 2048
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
TORCH_LIMIT = 2**27
"""Scores up to which torch's top-k, far behind the others, is timed."""


@dataclass(frozen=True)
class Shape:
    """Causal: the last S of T tokens see all tokens up to themselves."""

    queries: int
    keys: int
    heads: int = 64
    dtype: torch.dtype = E4M3
    scores: str = "random"
    """`equal`, `two values`, `ascending` and `descending`: of every query along the keys."""
    sequences: int = 1
    """Packed: so many of equal length, each with its own keys."""
    by_score: bool = False
    """Ours with `sorted=True`, which no peer's exact top-k offers."""

    @property
    def name(self) -> str:
        """What a row of the document is called."""
        kind = "fp8" if self.dtype is E4M3 else "bf16"
        rest = "" if self.scores == "random" else f", {self.scores}"
        packed = "" if self.sequences == 1 else f", {self.sequences} sequences"
        order = ", by score" if self.by_score else ""
        return f"{self.queries} x {self.keys}, {self.heads} heads, {kind}{rest}{packed}{order}"


SIZES = ((4096, 4096), (8192, 8192), (32768, 32768), (4096, 131072))
SHAPES = (
    *(Shape(s, t, h) for s, t in SIZES for h in (64, 32)),
    *(Shape(s, t, 16) for s, t in SIZES[1:]),
    *(Shape(8192, 8192, h, BF16) for h in (64, 32, 16)),
    Shape(4096, 131072, 64, BF16),
    *(
        Shape(8192, 8192, scores=kind)
        for kind in ("equal", "two values", "ascending", "descending")
    ),
    Shape(8192, 8192, sequences=8),
    *(Shape(8192, 8192, h, by_score=True) for h in (64, 32)),
)


def make_inputs(shape: Shape) -> dict[str, Any]:
    """Operands of `dsa_topk_prefill`, by name, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)
    normal = partial(torch.randn, generator=generator, device="cuda")
    q, k = normal(shape.queries, shape.heads, 128), normal(shape.keys, 128)
    weights = normal(shape.queries, shape.heads)
    if shape.scores in ("equal", "two values"):
        which = torch.arange(shape.keys, device="cuda") * 7919 % (1 + (shape.scores != "equal"))
        k = k[which]
    k_scale = k.abs().amax(-1).clamp_min(1e-4) / 448
    if shape.scores in ("ascending", "descending"):
        k, weights = k[:1].expand_as(k), weights.abs()
        k_scale = torch.arange(1, shape.keys + 1, device="cuda") / shape.keys
        k_scale = k_scale if shape.scores == "ascending" else k_scale.flip(0)
        k = k / k.abs().amax() * 448 * k_scale[:, None]
    ends = torch.arange(shape.keys - shape.queries, shape.keys, device="cuda") + 1
    length = shape.keys // shape.sequences
    starts = (ends - 1) // length * length if shape.sequences > 1 else None
    fp8 = shape.dtype is E4M3
    return {
        "q_index": q.to(shape.dtype),
        "k_index": ((k / k_scale[:, None]) if fp8 else k).to(shape.dtype),
        "weights": weights,
        "starts": None if starts is None else starts.int(),
        "ends": ends.int(),
        "k_scale": k_scale if fp8 else None,
    }


def cudnn_call(load: Callable[[str], Any], scores: Tensor, ends: Tensor) -> Call:
    """cuDNN Frontend's top-k of `scores` (S, T), whose rows lie `scores.stride(0)` apart."""
    queries, width = scores.shape[0], scores.stride(0)
    rows = scores if width == scores.shape[1] else scores.contiguous()
    width = rows.stride(0)
    function = load(f"topk_{next(n for n in (4096, 8192, 32768, 131072) if n >= scores.shape[1])}")
    step = min(queries, (2**31 - 1) // (2 * width) // 8 * 8)
    buffer = torch.empty(step, 2, width, dtype=torch.int32, device="cuda")
    ids = torch.empty(queries, TOPK, dtype=torch.int32, device="cuda")

    def call() -> Tensor:
        for begin in range(0, queries, step):
            part = slice(begin, min(queries, begin + step))
            of_part = part.stop - part.start
            function(rows[part], None, buffer[:of_part], None, ends[part], ids[part], None)
        return ids

    return call


def deep_gemm_logits(deep_gemm: Any, x: dict[str, Any]) -> Call:
    """DeepGEMM's logits of fp8 queries and keys; what no query sees is not cleared."""
    starts = torch.zeros_like(x["ends"]) if x["starts"] is None else x["starts"]
    keys = x["k_index"], x["k_scale"]
    return partial(
        deep_gemm.fp8_mqa_logits,
        x["q_index"],
        keys,
        x["weights"],
        starts,
        x["ends"],
        clean_logits=False,
    )


def cudnn_logits(load: Callable[[str], Any], x: dict[str, Any]) -> Call:
    """cuDNN Frontend's logits of bf16 queries and keys, causal. Its wrapper fills the scores with
    -inf first, which is not counted: top-k kernels take lengths."""
    q, k, weights = (x[name][None] for name in ("q_index", "k_index", "weights"))
    queries, keys = q.shape[1], k.shape[1]
    function = load(f"logits_h{q.shape[2]}_bf16")
    offsets = torch.full((1,), keys - queries, dtype=torch.int32, device="cuda")

    def call() -> Tensor:
        scores = torch.empty(1, queries, keys, device="cuda")
        shape = 1, queries, keys, 1.0
        function(q, k[:, :, None], weights, None, None, scores, None, *shape, None, None, offsets)
        return scores[0]

    return call


def peer_calls(
    x: dict[str, Any], cudnn: Callable[[str], Any] | None
) -> tuple[dict[str, Call], dict[str, str]]:
    """(calls by name: `logits`, then top-k kernels of these logits; what is missing, and why)."""
    peers = load_peers()
    calls: dict[str, Call] = {}
    missing = {name: why for name, why in peers.missing.items() if "+" not in name}
    ends = x["ends"]
    if x["k_scale"] is not None:
        if peers.deep_gemm is None:
            return calls, missing
        logits = deep_gemm_logits(peers.deep_gemm, x)
    elif cudnn is not None:
        logits = cudnn_logits(cudnn, x)
    else:
        return calls, missing | {"cuDNN Frontend logits": "no --cudnn-object"}
    calls["logits"] = logits
    if x["starts"] is not None:
        return calls, missing  # their top-k kernels take lengths from row 0 on
    scores = logits()
    assert isinstance(scores, Tensor)
    for kind, top_k in peers.flashinfer_top_ks.items():
        calls[f"FlashInfer {kind}"] = partial(top_k, scores, ends, TOPK)
    if peers.cudnn_top_k is not None:
        calls["cuDNN Frontend"] = partial(peers.cudnn_top_k, scores, ends, TOPK, return_val=False)
    elif cudnn is not None:
        calls["cuDNN Frontend"] = cudnn_call(cudnn, scores, ends)
        missing.pop("cuDNN Frontend top-k", None)
    if scores.numel() <= TORCH_LIMIT:
        beyond = torch.arange(scores.shape[1], device="cuda") >= ends[:, None]
        masked = scores.masked_fill(beyond, -torch.inf)
        calls["torch"] = partial(torch.topk, masked, TOPK)
    return calls, missing


def captured_calls(
    calls: dict[str, Call], timer: CudaTimer
) -> tuple[dict[str, Call], dict[str, str]]:
    """(replays by name, why the others cannot be captured); all have been called before."""
    replays: dict[str, Call] = {}
    refused: dict[str, str] = {}
    for name, call in calls.items():
        try:
            replays[name] = timer.captured(call)
        except Exception as error:  # a peer may wait for the device, or load code
            refused[name] = in_a_line(error)
    return replays, refused


def medians(calls: dict[str, Call], timer: CudaTimer, repeats: int) -> tuple[dict[str, float], int]:
    """(milliseconds of each, samples thrown away because the host was late)."""
    times = timer.in_turns(calls, repeats)
    ms = {name: round(taken.us.median / 1e3, 4) for name, taken in times.items()}
    return ms, sum(taken.late for taken in times.values())


def beside_peers(ms: dict[str, float]) -> tuple[str, float] | None:
    """(the fastest top-k, its time and that of the logits over ours); None without peers."""
    top_ks = {name: one for name, one in ms.items() if name not in ("ours", "logits")}
    if not top_ks or not {"ours", "logits"} <= ms.keys():
        return None
    best = min(top_ks, key=lambda name: top_ks[name])
    return best, round((ms["logits"] + top_ks[best]) / ms["ours"], 3)


def wrong_rows(x: dict[str, Any], ids: Tensor, logits: Call | None) -> int:
    """Of 16 queries, those whose rows are not the best of the peer's scores: compared as scores,
    so that ties do not matter."""
    if logits is None or x["starts"] is not None:
        return 0
    scores, wrong = logits(), 0
    assert isinstance(scores, Tensor)
    for query in range(0, len(ids), len(ids) // 16):
        end = int(x["ends"][query])
        chosen = ids[query][ids[query] >= 0].long()
        best = scores[query, :end].topk(min(TOPK, end)).values.sort().values
        close = torch.allclose(scores[query, chosen].sort().values, best, rtol=0, atol=1e-3)
        wrong += not (len(chosen.unique()) == len(best) and close)
    return wrong


def measure(
    shape: Shape, repeats: int, cudnn: Callable[[str], Any] | None, timer: CudaTimer
) -> dict[str, Any]:
    """One row of the document."""
    x = make_inputs(shape)
    ids = torch.empty(shape.queries, TOPK, dtype=torch.int32, device="cuda")
    calls, missing = ({}, {}) if shape.by_score else peer_calls(x, cudnn)
    calls["ours"] = partial(flashdsa.dsa_topk_prefill, **x, topk_indices=ids, sorted=shape.by_score)
    ms, late = medians(calls, timer, repeats)
    row: dict[str, Any] = {"name": shape.name, "heads": shape.heads, "queries": shape.queries}
    row |= {"keys": shape.keys, "ms": ms, "late": late, "missing": missing}
    if (found := beside_peers(ms)) is not None:
        row["best_top_k"], row["ratio"] = found
    replays, row["not_captured"] = captured_calls(calls, timer)
    row["captured_ms"], _ = medians(replays, timer, repeats)
    if (found := beside_peers(row["captured_ms"])) is not None:
        row["captured_best_top_k"], row["captured_ratio"] = found
    row["host_us"] = {name: round(timer.waited_host_us(call), 1) for name, call in calls.items()}
    row["wrong_rows"] = wrong_rows(x, ids, calls.get("logits"))
    return row


def main() -> None:
    """Measure, print a line a shape, write the document after each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("document", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--cudnn-object", type=Path, help="cuDNN Frontend's top-k, compiled")
    options = parser.parse_args()
    cudnn = None
    if options.cudnn_object:
        from flashdsa.jit.shared_object import load_shared_object

        cudnn = load_shared_object(options.cudnn_object)
    result: dict[str, Any] = {
        "schema": "flashdsa-prefill/3",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(0),
        "protocol": (
            "median of CUDA events, calls in turns in random order, L2 flushed by reading "
            f"{FLUSH_BYTES >> 20} MiB and a spinning kernel before each, samples that the GPU "
            "reached before the host had queued them thrown away; captured: replays of CUDA graphs "
            "likewise; ratio: (logits of DeepGEMM, for bf16 of cuDNN Frontend, + the fastest "
            "top-k) / ours; host: a call behind a wait for the GPU"
        ),
        "rows": [],
    }
    timer = CudaTimer()
    for shape in SHAPES:
        if options.only in shape.name:
            result["rows"].append(measure(shape, options.repeats, cudnn, timer))
            sys.stdout.write(json.dumps(result["rows"][-1]) + "\n")
            sys.stdout.flush()
            options.document.write_text(json.dumps(result, indent=1) + "\n")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
