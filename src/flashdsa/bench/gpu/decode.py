"""One run of `bench sparse_mla_decode` on a GPU: every case judged, timed, and beside FlashMLA."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flashdsa.bench.document import parse_fields
from flashdsa.bench.gpu.beside_flash_mla import (
    FLASH_MLA_HEADS,
    JUDGED_QUERIES,
    NORM_LIMIT,
    compare,
)
from flashdsa.bench.gpu.decode_cases import (
    BF16_ROWS,
    ROWS,
    TOPK,
    DecodeCase,
    DecodeInputs,
    make_cache,
    make_decode_inputs,
)
from flashdsa.bench.gpu.peers import in_a_line
from flashdsa.bench.gpu.protocol import FLUSH_BYTES
from flashdsa.bench.gpu.run import GpuRun, OnProgress, read_run, run_cases
from flashdsa.bench.gpu.turns import Call, TurnsTimer
from flashdsa.problem import D_QK, D_V, PAGE_SIZE

DECODE_SCHEMA = "flashdsa-decode-bench/1"
CALLS, REPLAYS = 20, 9
SPIN_CYCLES = 100_000
DECODE_PROTOCOL = (
    f"contenders in random order; hot: a CUDA graph of {CALLS} calls, median of {REPLAYS} replays, "
    "each behind another one of the same graph; cold: a graph of one call behind a read of "
    f"{FLUSH_BYTES >> 20} MiB and a spinning kernel, median of {REPLAYS}; CUDA events; "
    f"ids random over {ROWS} packed or {BF16_ROWS} bf16 rows; ragged: every other query has 256 of "
    f"{TOPK} slots in use; O of {JUDGED_QUERIES} queries within {NORM_LIMIT:g} of float64 of the "
    "rows' values; FlashMLA: flash_mla_with_kvcache(use_legacy=True) of the package sgl-flash-mla, "
    "packed rows, q padded with zeros to 64 heads where there are fewer, no lengths (it ignores "
    "them), its metadata made outside the clock"
)


@dataclass(frozen=True)
class DecodeTimes:
    """Microseconds of a call."""

    hot_us: float
    cold_us: float


@dataclass(frozen=True)
class DecodeRow:
    """One case: ours and FlashMLA's times, and what the results are worth."""

    name: str
    heads: int
    queries: int
    packed: bool
    ragged: bool
    hot_us: float
    cold_us: float
    hot_tflops: float
    """Of the products that valid slots ask for."""
    hot_gbps: float
    """Of the valid slots' rows."""
    norm_error: float
    """Of O against float64, the largest of the judged queries."""
    peer: DecodeTimes | None
    peer_missing: str | None
    hot_ratio: float | None
    """FlashMLA's time over ours."""
    cold_ratio: float | None
    findings: list[str]
    """What is wrong with our results; empty: nothing."""


DecodeBenchResult = GpuRun[DecodeRow]


class CudaDecodeTimer:
    """The protocol on the current CUDA device."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")

    def in_turns(self, calls: Mapping[str, Call]) -> dict[str, DecodeTimes]:
        """Times of every call, by DECODE_PROTOCOL."""
        many = {name: _graph(call, CALLS) for name, call in calls.items()}
        one = {name: _graph(call, 1) for name, call in calls.items()}
        hot: dict[str, list[float]] = {name: [] for name in calls}
        cold: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(REPLAYS):
            for name in self._draw.sample(list(calls), len(calls)):
                many[name].replay()
                hot[name].append(_microseconds(many[name]) / CALLS)
        for _ in range(REPLAYS):
            for name in self._draw.sample(list(calls), len(calls)):
                self._flush.sum()
                torch.cuda._sleep(SPIN_CYCLES)  # the host has queued the replay before it begins
                cold[name].append(_microseconds(one[name]))
        return {name: DecodeTimes(median(hot[name]), median(cold[name])) for name in calls}


def _graph(call: Call, count: int) -> Any:
    """A CUDA graph of `count` calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph


def _microseconds(graph: Any) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * float(start.elapsed_time(end))


def flash_mla_decode() -> Callable[..., Any] | str:
    """A function of a case's inputs that gives FlashMLA's call, or why it is not there."""
    try:
        module = import_module("flash_mla")
        decode, metadata = module.flash_mla_with_kvcache, module.get_mla_metadata
    except Exception as error:  # an extension of another torch fails in any way
        return in_a_line(error)

    def prepare(inputs: DecodeInputs) -> Call:
        case = inputs.case
        q = torch.nn.functional.pad(inputs.q, (0, 0, 0, -case.heads % FLASH_MLA_HEADS))
        q = q.view(case.requests, case.next_n, -1, D_QK)
        cache = inputs.kv.view(-1, PAGE_SIZE, 1, inputs.kv.shape[1])
        ids = inputs.indices.view(case.requests, case.next_n, -1)
        plan, _ = metadata()
        return lambda: decode(
            q, cache, None, None, D_V, plan, None, D_QK**-0.5, False, True, ids, use_legacy=True
        )

    return prepare


def run_decode_bench(
    cases: Iterable[DecodeCase],
    timer: TurnsTimer[DecodeTimes],
    peer: Callable[..., Any] | str,
    on_progress: OnProgress = lambda *_: None,
    *,
    device: str = "cuda",
    backend: str = "sm90",
    num_rows: Mapping[bool, int] | None = None,
    topk: int = TOPK,
) -> DecodeBenchResult:
    """Judge and time every case.

    Args:
        peer: `flash_mla_decode`'s, or why there is none.
        device, backend: of our calls. num_rows: of the cache, by whether they are packed.
        topk: slots of a query.
    """
    rows = num_rows or {True: ROWS, False: BF16_ROWS}
    cache_of = lru_cache(maxsize=1)(lambda packed: make_cache(packed, rows[packed], device))
    return run_cases(
        sorted(cases, key=lambda case: not case.packed),  # two caches, each made once
        lambda case: _row(
            make_decode_inputs(case, cache_of(case.packed), topk), timer, peer, backend
        ),
        on_progress,
        protocol=DECODE_PROTOCOL,
        schema=DECODE_SCHEMA,
        device=device,
    )


def _row(
    inputs: DecodeInputs,
    timer: TurnsTimer[DecodeTimes],
    peer: Callable[..., Any] | str,
    backend: str,
) -> DecodeRow:
    case = inputs.case
    prepare = peer if isinstance(peer, str) else partial(peer, inputs)
    if not case.packed:
        prepare = "takes packed rows only"
    x = compare(inputs.operands, timer, prepare, backend=backend)
    ours, theirs = x.ours, x.peer
    return DecodeRow(
        name=case.name,
        heads=case.heads,
        queries=case.queries,
        packed=case.packed,
        ragged=case.ragged,
        hot_us=ours.hot_us,
        cold_us=ours.cold_us,
        hot_tflops=inputs.flop / ours.hot_us / 1e6,
        hot_gbps=inputs.valid * inputs.row_bytes / ours.hot_us / 1e3,
        norm_error=x.norm_error,
        peer=theirs,
        peer_missing=x.peer_missing,
        hot_ratio=theirs.hot_us / ours.hot_us if theirs else None,
        cold_ratio=theirs.cold_us / ours.cold_us if theirs else None,
        findings=x.findings,
    )


def read_decode_result(path: Path) -> DecodeBenchResult:
    """The document in a file.

    Raises:
        ArgumentValueError: the file is no result file of this schema.
    """

    def parse_row(row: Any, at: str) -> DecodeRow:
        peer = row["peer"] and parse_fields(row["peer"], DecodeTimes, at)
        parsed: DecodeRow = parse_fields({**row, "peer": peer}, DecodeRow, at)
        return parsed

    return read_run(path, DECODE_SCHEMA, parse_row)
