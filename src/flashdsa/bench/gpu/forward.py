"""One run of `bench sparse_mla_fwd` on a GPU: every case judged, timed, and beside FlashMLA."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from flashdsa.bench.document import parse_fields
from flashdsa.bench.gpu.beside_flash_mla import (
    FLASH_MLA_HEADS,
    JUDGED_QUERIES,
    NORM_LIMIT,
    compare,
)
from flashdsa.bench.gpu.bursts import (
    BURSTS,
    HOT_ROUNDS,
    HOT_SECONDS,
    PAUSE_SECONDS,
    BurstTimes,
)
from flashdsa.bench.gpu.forward_cases import ForwardCase, ForwardInputs, make_forward_inputs
from flashdsa.bench.gpu.peers import in_a_line
from flashdsa.bench.gpu.run import GpuRun, OnProgress, read_run, run_cases
from flashdsa.bench.gpu.turns import Call, TurnsTimer
from flashdsa.problem import D_QK

FORWARD_SCHEMA = "flashdsa-forward-bench/1"
FORWARD_PROTOCOL = (
    f"contenders in random order; burst: median of {BURSTS} calls, each behind "
    f"{PAUSE_SECONDS * 1000:.0f} ms of idling and a spinning kernel, so that it does not wait for "
    f"the host; hot: median of {HOT_ROUNDS} rounds, each the mean of {HOT_SECONDS:g} s back to "
    "back behind half as much warm-up; CUDA events; whole calls, the unions of groups included; "
    f"O of {JUDGED_QUERIES} queries within {NORM_LIMIT:g} of float64; FlashMLA: "
    "flash_mla_sparse_fwd(use_legacy=True) of the package sgl-flash-mla, q padded with zeros to 64 "
    "heads where there are fewer"
)


@dataclass(frozen=True)
class ForwardRow:
    """One case: ours and FlashMLA's times, and what the results are worth."""

    name: str
    heads: int
    queries: int
    topk: int
    num_keys: int
    burst_ms: float
    hot_ms: float
    burst_tflops: float
    """Of the products that valid slots ask for."""
    hot_tflops: float
    norm_error: float
    """Of O against float64, the largest of the judged queries."""
    peer: BurstTimes | None
    peer_missing: str | None
    burst_ratio: float | None
    """FlashMLA's time over ours."""
    hot_ratio: float | None
    findings: list[str]
    """What is wrong with our results; empty: nothing."""


ForwardBenchResult = GpuRun[ForwardRow]


def flash_mla_call() -> Callable[..., Any] | str:
    """FlashMLA's sparse prefill, or why it is not there."""
    try:
        found: Callable[..., Any] = import_module("flash_mla").flash_mla_sparse_fwd
    except Exception as error:  # an extension of another torch fails in any way
        return in_a_line(error)
    return found


def run_forward_bench(
    cases: Iterable[ForwardCase],
    timer: TurnsTimer[BurstTimes],
    peer: Callable[..., Any] | str,
    on_progress: OnProgress = lambda *_: None,
    *,
    device: str = "cuda",
    backend: str = "sm90",
) -> ForwardBenchResult:
    """Judge and time every case.

    Args:
        peer: FlashMLA's function, or why there is none.
        device, backend: of our calls.
    """
    return run_cases(
        cases,
        lambda case: _row(make_forward_inputs(case, device), timer, peer, backend),
        on_progress,
        protocol=FORWARD_PROTOCOL,
        schema=FORWARD_SCHEMA,
        device=device,
    )


def _row(
    inputs: ForwardInputs,
    timer: TurnsTimer[BurstTimes],
    peer: Callable[..., Any] | str,
    backend: str,
) -> ForwardRow:
    case = inputs.case
    prepare = peer if isinstance(peer, str) else partial(_peer_call, peer, inputs)
    x = compare(inputs.operands, timer, prepare, return_max_logits=case.max_logits, backend=backend)
    ours, theirs = x.ours, x.peer
    return ForwardRow(
        name=case.name,
        heads=case.heads,
        queries=case.queries,
        topk=case.topk,
        num_keys=case.num_keys,
        burst_ms=ours.burst_ms,
        hot_ms=ours.hot_ms,
        burst_tflops=inputs.flop / ours.burst_ms / 1e9,
        hot_tflops=inputs.flop / ours.hot_ms / 1e9,
        norm_error=x.norm_error,
        peer=theirs,
        peer_missing=x.peer_missing,
        burst_ratio=theirs.burst_ms / ours.burst_ms if theirs else None,
        hot_ratio=theirs.hot_ms / ours.hot_ms if theirs else None,
        findings=x.findings,
    )


def _peer_call(peer: Callable[..., Any], inputs: ForwardInputs) -> Call:
    case = inputs.case
    padding = -case.heads % FLASH_MLA_HEADS
    q = torch.nn.functional.pad(inputs.q, (0, 0, 0, padding))
    sink = inputs.attn_sink
    if sink is not None and padding:
        sink = torch.nn.functional.pad(sink, (0, padding))
    kv, indices = inputs.kv[:, None], inputs.indices[:, None]
    return lambda: peer(
        q,
        kv,
        indices,
        D_QK**-0.5,
        attn_sink=sink,
        topk_length=inputs.topk_length,
        use_legacy=True,
    )


def read_forward_result(path: Path) -> ForwardBenchResult:
    """The document in a file.

    Raises:
        ArgumentValueError: the file is no result file of this schema.
    """

    def parse_row(row: Any, at: str) -> ForwardRow:
        peer = row["peer"] and parse_fields(row["peer"], BurstTimes, at)
        parsed: ForwardRow = parse_fields({**row, "peer": peer}, ForwardRow, at)
        return parsed

    return read_run(path, FORWARD_SCHEMA, parse_row)
