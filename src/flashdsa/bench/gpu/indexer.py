"""One run of `bench indexer` on a GPU: every case checked and timed against the peers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

import torch

import flashdsa
from flashdsa.bench.checkout import find_checkout
from flashdsa.bench.gpu.cases import BenchCase
from flashdsa.bench.gpu.device import clocks, describe_gpu, gpu_versions
from flashdsa.bench.gpu.host import host_floor_us, host_us
from flashdsa.bench.gpu.inputs import BenchInputs, make_inputs
from flashdsa.bench.gpu.judge import judge_ids, judge_peer
from flashdsa.bench.gpu.peers import CONTENDERS, LOGITS, PAIRS, TOP_KS, Peers, in_a_line
from flashdsa.bench.gpu.protocol import (
    PROTOCOL,
    GpuHangError,
    GpuTimes,
    Timer,
    read_bandwidths,
)
from flashdsa.bench.gpu.result import GpuBenchResult, GpuRow, PeerTime
from flashdsa.bench.gpu.thresholds import geometric_mean, judge_thresholds
from flashdsa.bench.gpu.turns import Call
from flashdsa.problem import INDEX_TOKEN_BYTES

logger = logging.getLogger("flashdsa.bench")
OURS = "flashdsa"
OnProgress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what runs now)."""


@dataclass(frozen=True)
class GpuBenchOptions:
    """What to time, and by whom."""

    cases: list[BenchCase]
    repeats: int = 30
    device: str = "cuda"
    buffer_mebibytes: int = 4096
    """Of the buffer that is read to find the bandwidth."""


def run_indexer_bench(
    options: GpuBenchOptions,
    timer: Timer,
    peers: Peers,
    on_progress: OnProgress = lambda *_: None,
) -> GpuBenchResult:
    """Measure every case."""
    total = len(options.cases) + 2
    on_progress(0, total, "read bandwidth")
    checkout = find_checkout()
    on_gpu = options.device == "cuda"
    before = clocks()
    one = torch.zeros(1, device=options.device)
    smallest = timer.in_turns({"add": lambda: one.add_(1)}, options.repeats)["add"]
    read = read_bandwidths(timer, options.device, options.buffer_mebibytes)
    result = GpuBenchResult(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        git=checkout.as_dict() if checkout else None,
        gpu=describe_gpu() if on_gpu else {"name": "none"},
        versions=gpu_versions(),
        protocol=PROTOCOL,
        read_gbps=read,
        smallest_call_us=smallest.us.median,
    )
    stopped = None
    try:
        on_progress(1, total, "host cost")
        result.host_us.update(host_us(options.device, timer))
        result.host_floor_us.update(host_floor_us(options.device, timer))
        for done, case in enumerate(options.cases, 2):
            on_progress(done, total, case.name)
            result.rows.append(_row(case, options, timer, peers, max(read.values())))
            _compare_with_random(result.rows)
            logger.info("%s: %.1f us", case.name, result.rows[-1].us_median)
    except GpuHangError as error:
        stopped = f"{case.name}: {error}" if result.host_us else str(error)
    result.gpu.update(clocks_before=before, clocks_after=clocks())
    on_progress(total, total, "done")
    return replace(
        result,
        geometric_mean=geometric_mean(result.rows),
        apart_geometric_mean=geometric_mean(result.rows, apart=True),
        thresholds=judge_thresholds(result.rows, result.host_us),
        stopped=stopped,
    )


def _row(
    case: BenchCase, options: GpuBenchOptions, timer: Timer, peers: Peers, gbps: float
) -> GpuRow:
    inputs = make_inputs(case, options.device)
    launch: Call = partial(flashdsa.dsa_topk_indexer_launch, *inputs.operands)
    if case.next_n > 1:
        launch = partial(flashdsa.dsa_topk_indexer, *inputs.of_requests)
    launch()
    timer.synchronize(OURS)
    first = inputs.ids.clone()
    findings = judge_ids(inputs, first)
    if case.kind == "captured":
        launch = timer.captured(launch)
    ready, found = _ready_peers(inputs, peers, timer)
    times = timer.in_turns({OURS: launch, **ready}, options.repeats)
    if not torch.equal(inputs.ids, first):
        findings.append("other ids in a later run")
    for name in ready:
        found[name] = _with_times(found[name], times[name])
    best, pair_us = _fastest(found, PAIRS)
    _, top_k_us = _fastest(found, TOP_KS)
    _, logits_us = _fastest(found, (LOGITS,))
    apart_us = logits_us + top_k_us if logits_us and top_k_us else None
    ours = times[OURS]
    size = case.tokens * INDEX_TOKEN_BYTES
    floor = size / gbps / 1e3
    return GpuRow(
        name=case.name,
        kind=case.kind,
        data=case.data,
        batch=len(case.lengths),
        tokens=case.tokens,
        longest=max(case.lengths),
        repeats=options.repeats,
        us_median=ours.us.median,
        us_p10=ours.us.p10,
        us_p90=ours.us.p90,
        late_samples=ours.late,
        floor_us=floor,
        over_floor=ours.us.median / floor,
        achieved_gbps=size / ours.us.median / 1e3,
        peers=found,
        best_pair=best,
        ratio=pair_us / ours.us.median if pair_us else None,
        apart_us=apart_us,
        apart_ratio=apart_us / ours.us.median if apart_us else None,
        over_random=None,
        findings=findings,
    )


def _fastest(peers: dict[str, PeerTime], names: tuple[str, ...]) -> tuple[str | None, float | None]:
    """The fastest of the named that was timed and selects rightly, and its microseconds."""
    us = {
        name: peers[name].us_median or 0.0
        for name in names
        if name in peers and peers[name].us_median and not peers[name].findings
    }
    best = min(us, key=lambda name: us[name], default=None)
    return best, us[best] if best else None


def _ready_peers(
    inputs: BenchInputs, peers: Peers, timer: Timer
) -> tuple[dict[str, Call], dict[str, PeerTime]]:
    """The peers that can be timed on these operands, and what is known of all of them."""
    ready: dict[str, Call] = {}
    found = {name: PeerTime(missing=reason) for name, reason in peers.missing.items()}
    try:
        calls = peers.calls(inputs)
    except Exception as error:  # a peer's refusal must not cost the rest of the run
        return {}, found | {n: _refused(error) for n in CONTENDERS if n not in found}
    for name, call in calls.items():
        try:
            picked = call()
            timer.synchronize(name)
            wrong = judge_peer(inputs, picked) if name != LOGITS else []
            timed = timer.captured(call) if inputs.case.kind == "captured" else call
        except GpuHangError:
            raise
        except Exception as error:
            found[name] = _refused(error)
            continue
        ready[name] = timed
        found[name] = PeerTime(findings=wrong)
    return ready, found


def _refused(error: Exception) -> PeerTime:
    return PeerTime(missing=in_a_line(error))


def _with_times(known: PeerTime, times: GpuTimes) -> PeerTime:
    us = times.us
    return replace(
        known, us_median=us.median, us_p10=us.p10, us_p90=us.p90, late_samples=times.late
    )


def _compare_with_random(rows: list[GpuRow]) -> None:
    """Fill the last row's `over_random` if its shape was timed on random data."""
    last = rows[-1]
    if last.kind != "distribution":
        return
    for row in rows:
        if row.kind == "shape" and (row.batch, row.longest) == (last.batch, last.longest):
            rows[-1] = replace(last, over_random=last.us_median / row.us_median)
