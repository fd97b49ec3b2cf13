"""One run of `bench sparse_mla_decode` on a GPU: every case judged, timed, and beside FlashMLA."""

from __future__ import annotations

import random
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
from flashdsa.bench.gpu.decode_cases import (
    BF16_ROWS,
    ROWS,
    TOPK,
    DecodeCase,
    DecodeInputs,
    make_cache,
    make_decode_inputs,
)
from flashdsa.bench.gpu.device import clocks, describe_gpu, gpu_versions
from flashdsa.bench.gpu.peers import in_a_line
from flashdsa.bench.gpu.protocol import FLUSH_BYTES
from flashdsa.problem import D_QK, D_V, PAGE_SIZE

DECODE_SCHEMA = "flashdsa-decode-bench/1"
OURS, FLASH_MLA = "flashdsa", "FlashMLA"
CALLS, REPLAYS = 20, 9
SPIN_CYCLES = 100_000
JUDGED_QUERIES = 3
NORM_LIMIT = 2.5e-3
FLASH_MLA_HEADS = 64
"""Its kernel takes multiples of these."""
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

Call = Callable[[], object]


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


@dataclass(frozen=True)
class DecodeBenchResult:
    """Everything that one run found, and where it was found."""

    date: str
    git: dict[str, str | bool | None] | None
    gpu: dict[str, Any]
    versions: dict[str, str | None]
    protocol: str
    rows: list[DecodeRow] = field(default_factory=list)
    schema: str = DECODE_SCHEMA

    def to_json(self) -> str:
        """The document as indented JSON text."""
        return to_json(self)


class DecodeTimer(Protocol):
    """Takes times on a device."""

    def in_turns(self, calls: Mapping[str, Call]) -> dict[str, DecodeTimes]:
        """Times of every call, by DECODE_PROTOCOL."""


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
    timer: DecodeTimer,
    peer: Callable[..., Any] | str,
    on_progress: Callable[[int, int, str], None] = lambda *_: None,
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
    chosen = sorted(cases, key=lambda case: not case.packed)
    checkout = find_checkout()
    before = clocks()
    result = DecodeBenchResult(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        git=checkout.as_dict() if checkout else None,
        gpu=describe_gpu() if device == "cuda" else {"name": "none"},
        versions=gpu_versions(),
        protocol=DECODE_PROTOCOL,
    )
    rows = num_rows or {True: ROWS, False: BF16_ROWS}
    for done, case in enumerate(chosen):
        if not done or case.packed != chosen[done - 1].packed:
            cache = make_cache(case.packed, rows[case.packed], device)
        on_progress(done, len(chosen), case.name)
        inputs = make_decode_inputs(case, cache, topk)
        result.rows.append(_row(inputs, timer, peer, backend))
    on_progress(len(chosen), len(chosen), "done")
    result.gpu.update(clocks_before=before, clocks_after=clocks())
    return result


def _row(
    inputs: DecodeInputs, timer: DecodeTimer, peer: Callable[..., Any] | str, backend: str
) -> DecodeRow:
    case = inputs.case
    results: list[tuple[Tensor, ...]] = []

    def ours() -> None:
        results[:] = [
            flashdsa.sparse_mla_fwd(
                inputs.q,
                inputs.kv,
                inputs.indices,
                topk_length=inputs.topk_length,
                backend=backend,
            )
        ]

    calls: dict[str, Call] = {OURS: ours}
    missing = "takes packed rows only" if not case.packed else peer if type(peer) is str else None
    if missing is None and not isinstance(peer, str):
        try:
            calls[FLASH_MLA] = peer(inputs)
            calls[FLASH_MLA]()
        except Exception as error:  # a peer's refusal must not cost the rest of the run
            missing = in_a_line(error)
            calls.pop(FLASH_MLA, None)
    times = timer.in_turns(calls)
    taken, theirs = times[OURS], times.get(FLASH_MLA)
    ours()
    off = norm_error(inputs, results[0][0])
    return DecodeRow(
        name=case.name,
        heads=case.heads,
        queries=case.queries,
        packed=case.packed,
        ragged=case.ragged,
        hot_us=taken.hot_us,
        cold_us=taken.cold_us,
        hot_tflops=inputs.flop / taken.hot_us / 1e6,
        hot_gbps=inputs.valid * inputs.row_bytes / taken.hot_us / 1e3,
        norm_error=off,
        peer=theirs,
        peer_missing=missing,
        hot_ratio=theirs.hot_us / taken.hot_us if theirs else None,
        cold_ratio=theirs.cold_us / taken.cold_us if theirs else None,
        findings=[] if off <= NORM_LIMIT else [f"O is off by {off:.2e} of its norm"],
    )


def norm_error(inputs: DecodeInputs, out: Tensor) -> float:
    """The largest relative error of O over the first, a middle and the last query."""
    last = inputs.case.queries - 1
    worst = 0.0
    for query in sorted({0, last // 2, last})[:JUDGED_QUERIES]:
        one = slice(query, query + 1)
        length = None if inputs.topk_length is None else inputs.topk_length[one].cpu()
        rows = inputs.kv[inputs.indices[query].long()].cpu()
        slots = torch.arange(len(rows), dtype=torch.int32)[None]
        expected, _ = reference.sparse_mla_fwd(inputs.q[one].cpu(), rows, slots, topk_length=length)
        off = (out[one].cpu().double() - expected).norm() / expected.norm()
        worst = max(worst, float(off))
    return worst


def read_decode_result(path: Path) -> DecodeBenchResult:
    """The document in a file.

    Raises:
        ArgumentValueError: the file is no result file of this schema.
    """
    document, where = read_json(path), str(path)
    require_schema(document, DECODE_SCHEMA, where)
    rows = []
    for number, row in enumerate(document["rows"]):
        at = f"{where}: rows[{number}]"
        peer = row["peer"] and parse_fields(row["peer"], DecodeTimes, at)
        rows.append(parse_fields({**row, "peer": peer}, DecodeRow, at))
    parsed: DecodeBenchResult = parse_fields({**document, "rows": rows}, DecodeBenchResult, where)
    return parsed
