"""One run of `bench sparse_mla_fwd` on a GPU: every case judged, timed, and beside FlashMLA."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.bench.checkout import find_checkout
from flashdsa.bench.document import parse_fields, read_json, require_schema, to_json
from flashdsa.bench.gpu.device import clocks, describe_gpu, gpu_versions
from flashdsa.bench.gpu.forward_cases import ForwardCase, ForwardInputs, make_forward_inputs
from flashdsa.bench.gpu.peers import in_a_line
from flashdsa.problem import D_QK

FORWARD_SCHEMA = "flashdsa-forward-bench/1"
OURS, FLASH_MLA = "flashdsa", "FlashMLA"
PAUSE_SECONDS, BURSTS = 0.06, 5
SPIN_CYCLES = 4_000_000
HOT_SECONDS, HOT_ROUNDS = 0.16, 3
JUDGED_QUERIES = 3
NORM_LIMIT = 2.5e-3
FLASH_MLA_HEADS = 64
"""Its kernel takes multiples of these."""
FORWARD_PROTOCOL = (
    f"contenders in random order; burst: median of {BURSTS} calls, each behind "
    f"{PAUSE_SECONDS * 1000:.0f} ms of idling and a spinning kernel, so that it does not wait for "
    f"the host; hot: median of {HOT_ROUNDS} rounds, each the mean of {HOT_SECONDS:g} s back to "
    "back behind half as much warm-up; CUDA events; whole calls, the unions of groups included; "
    f"O of {JUDGED_QUERIES} queries within {NORM_LIMIT:g} of float64; FlashMLA: "
    "flash_mla_sparse_fwd(use_legacy=True) of the package sgl-flash-mla, q padded with zeros to 64 "
    "heads where there are fewer"
)

Call = Callable[[], object]


@dataclass(frozen=True)
class ForwardTimes:
    """Milliseconds of a call."""

    burst_ms: float
    hot_ms: float


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
    peer: ForwardTimes | None
    peer_missing: str | None
    burst_ratio: float | None
    """FlashMLA's time over ours."""
    hot_ratio: float | None
    findings: list[str]
    """What is wrong with our results; empty: nothing."""


@dataclass(frozen=True)
class ForwardBenchResult:
    """Everything that one run found, and where it was found."""

    date: str
    git: dict[str, str | bool | None] | None
    gpu: dict[str, Any]
    versions: dict[str, str | None]
    protocol: str
    rows: list[ForwardRow] = field(default_factory=list)
    schema: str = FORWARD_SCHEMA

    def to_json(self) -> str:
        """The document as indented JSON text."""
        return to_json(self)


class ForwardTimer(Protocol):
    """Takes times on a device."""

    def in_turns(self, calls: Mapping[str, Call]) -> dict[str, ForwardTimes]:
        """Times of every call, by FORWARD_PROTOCOL."""


class CudaForwardTimer:
    """The protocol on the current CUDA device."""

    def __init__(self, seed: int = 0, *, with_host: bool = False) -> None:
        """With `with_host` a burst has what the host takes in it: no kernel spins before it."""
        self._draw = random.Random(seed)
        self._with_host = with_host

    def in_turns(self, calls: Mapping[str, Call]) -> dict[str, ForwardTimes]:
        """Times of every call, by FORWARD_PROTOCOL."""
        burst: dict[str, list[float]] = {name: [] for name in calls}
        hot: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            _milliseconds(call, 2)
        for _ in range(BURSTS):
            for name in self._draw.sample(list(calls), len(calls)):
                time.sleep(PAUSE_SECONDS)
                if not self._with_host:
                    torch.cuda._sleep(SPIN_CYCLES)  # the host has queued the call before it begins
                burst[name].append(_milliseconds(calls[name], 1))
        for _ in range(HOT_ROUNDS):
            for name in self._draw.sample(list(calls), len(calls)):
                count = max(2, round(1e3 * HOT_SECONDS / median(burst[name])))
                _milliseconds(calls[name], count // 2)
                hot[name].append(_milliseconds(calls[name], count))
        return {name: ForwardTimes(median(burst[name]), median(hot[name])) for name in calls}


def _milliseconds(call: Call, count: int) -> float:
    """Of one of `count` calls back to back."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / count


def flash_mla_call() -> Callable[..., Any] | str:
    """FlashMLA's sparse prefill, or why it is not there."""
    try:
        found: Callable[..., Any] = import_module("flash_mla").flash_mla_sparse_fwd
    except Exception as error:  # an extension of another torch fails in any way
        return in_a_line(error)
    return found


def run_forward_bench(
    cases: Iterable[ForwardCase],
    timer: ForwardTimer,
    peer: Callable[..., Any] | str,
    on_progress: Callable[[int, int, str], None] = lambda *_: None,
    *,
    device: str = "cuda",
    backend: str = "sm90",
) -> ForwardBenchResult:
    """Judge and time every case.

    Args:
        peer: FlashMLA's function, or why there is none.
        device, backend: of our calls.
    """
    chosen = list(cases)
    checkout = find_checkout()
    before = clocks()
    result = ForwardBenchResult(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        git=checkout.as_dict() if checkout else None,
        gpu=describe_gpu() if device == "cuda" else {"name": "none"},
        versions=gpu_versions(),
        protocol=FORWARD_PROTOCOL,
    )
    for done, case in enumerate(chosen):
        on_progress(done, len(chosen), case.name)
        result.rows.append(_row(make_forward_inputs(case, device), timer, peer, backend))
    on_progress(len(chosen), len(chosen), "done")
    result.gpu.update(clocks_before=before, clocks_after=clocks())
    return result


def _row(
    inputs: ForwardInputs, timer: ForwardTimer, peer: Callable[..., Any] | str, backend: str
) -> ForwardRow:
    case = inputs.case
    results: list[tuple[Tensor, ...]] = []

    def ours() -> None:
        results[:] = [
            flashdsa.sparse_mla_fwd(
                inputs.q,
                inputs.kv,
                inputs.indices,
                topk_length=inputs.topk_length,
                attn_sink=inputs.attn_sink,
                return_max_logits=case.max_logits,
                backend=backend,
            )
        ]

    calls: dict[str, Call] = {OURS: ours}
    missing = peer if isinstance(peer, str) else None
    if not isinstance(peer, str):
        calls[FLASH_MLA] = _peer_call(peer, inputs)
        try:
            calls[FLASH_MLA]()
        except Exception as error:  # a peer's refusal must not cost the rest of the run
            missing = in_a_line(error)
            del calls[FLASH_MLA]
    times = timer.in_turns(calls)
    taken, theirs = times[OURS], times.get(FLASH_MLA)
    ours()
    off = norm_error(inputs, results[0][0])
    return ForwardRow(
        name=case.name,
        heads=case.heads,
        queries=case.queries,
        topk=case.topk,
        num_keys=case.num_keys,
        burst_ms=taken.burst_ms,
        hot_ms=taken.hot_ms,
        burst_tflops=inputs.flop / taken.burst_ms / 1e9,
        hot_tflops=inputs.flop / taken.hot_ms / 1e9,
        norm_error=off,
        peer=theirs,
        peer_missing=missing,
        burst_ratio=theirs.burst_ms / taken.burst_ms if theirs else None,
        hot_ratio=theirs.hot_ms / taken.hot_ms if theirs else None,
        findings=[] if off <= NORM_LIMIT else [f"O is off by {off:.2e} of its norm"],
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


def norm_error(inputs: ForwardInputs, out: Tensor) -> float:
    """The largest relative error of O over the first, a middle and the last query."""
    last = inputs.case.queries - 1
    worst = 0.0
    for query in sorted({0, last // 2, last})[:JUDGED_QUERIES]:
        one = slice(query, query + 1)
        length = None if inputs.topk_length is None else inputs.topk_length[one]
        expected, _ = reference.sparse_mla_fwd(
            inputs.q[one],
            inputs.kv,
            inputs.indices[one],
            topk_length=length,
            attn_sink=None if inputs.attn_sink is None else inputs.attn_sink.cpu(),
        )
        off = (out[one].cpu().double() - expected).norm() / expected.norm()
        worst = max(worst, float(off))
    return worst


def read_forward_result(path: Path) -> ForwardBenchResult:
    """The document in a file.

    Raises:
        ArgumentValueError: the file is no result file of this schema.
    """
    document, where = read_json(path), str(path)
    require_schema(document, FORWARD_SCHEMA, where)
    rows = []
    for number, row in enumerate(document["rows"]):
        at = f"{where}: rows[{number}]"
        peer = row["peer"] and parse_fields(row["peer"], ForwardTimes, at)
        rows.append(parse_fields({**row, "peer": peer}, ForwardRow, at))
    parsed: ForwardBenchResult = parse_fields({**document, "rows": rows}, ForwardBenchResult, where)
    return parsed
