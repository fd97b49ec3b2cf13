"""The result file of a benchmark on a GPU: its rows, its schema, writing and reading it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashdsa.bench.document import (
    parse_fields,
    read_json,
    require_schema,
    to_json,
    write_text,
)

SCHEMA = "flashdsa-gpu-bench/2"
FIRST_SCHEMA = "flashdsa-gpu-bench/1"
"""Without `host_floor_us`; read as if nothing had been measured."""


@dataclass(frozen=True)
class PeerTime:
    """One contender on one case; without times where `missing` says why."""

    us_median: float | None = None
    us_p10: float | None = None
    us_p90: float | None = None
    late_samples: int = 0
    missing: str | None = None
    findings: list[str] = field(default_factory=list)
    """What is wrong with its selection; empty for scores, which are not judged."""


@dataclass(frozen=True)
class GpuRow:
    """One case: ours, the peers, the floor."""

    name: str
    kind: str
    data: str
    batch: int
    tokens: int
    longest: int
    repeats: int
    us_median: float
    us_p10: float
    us_p90: float
    late_samples: int
    floor_us: float
    """All keys and scales once at the read bandwidth of this run."""
    over_floor: float
    achieved_gbps: float
    peers: dict[str, PeerTime]
    best_pair: str | None
    ratio: float | None
    """Time of the best pair, both kernels in one sample, over ours."""
    apart_us: float | None
    """The logits' time and the faster top-k's, each timed alone and so with an L2 of its own."""
    apart_ratio: float | None
    over_random: float | None
    """An adversarial case's time over that of the same shape's random data."""
    findings: list[str]
    """What is wrong with our ids; empty: they are right."""


@dataclass(frozen=True)
class Threshold:
    """A line to hold; `met` is None where the run did not measure it."""

    name: str
    wanted: str
    found: float | None
    met: bool | None


@dataclass(frozen=True)
class GpuBenchResult:
    """Everything that one run found, and where it was found."""

    date: str
    git: dict[str, str | bool | None] | None
    gpu: dict[str, Any]
    """Name, capability, SMs, L2, memory, and nvidia-smi's clocks before and after."""
    versions: dict[str, str | None]
    protocol: str
    read_gbps: dict[str, float]
    """GB/s of each way to read a buffer; the fastest makes the floors."""
    smallest_call_us: float
    """An addition to one element: what a launch and the events measure by themselves."""
    host_us: dict[str, float] = field(default_factory=dict)
    """Of a call, by how it is made: microseconds until the host goes on."""
    host_floor_us: dict[str, float] = field(default_factory=dict)
    """The same of calls that do next to nothing: how slow this host is."""
    rows: list[GpuRow] = field(default_factory=list)
    geometric_mean: float | None = None
    """Of `ratio` over the nine shapes."""
    apart_geometric_mean: float | None = None
    thresholds: list[Threshold] = field(default_factory=list)
    stopped: str | None = None
    """Where and why the run ended early; None: every case was run."""
    schema: str = SCHEMA

    def to_json(self) -> str:
        """The document as indented JSON text."""
        return to_json(self)


def write_gpu_result(result: GpuBenchResult, path: Path) -> None:
    """Write the document, creating its folder."""
    write_text(result.to_json(), path)


def read_gpu_result(path: Path) -> GpuBenchResult:
    """The document in a file.

    Raises:
        ArgumentValueError: the file is no result file of this schema.
    """
    return parse_gpu_result(read_json(path), str(path))


def parse_gpu_result(document: Any, where: str = "result") -> GpuBenchResult:
    """The document as dataclasses.

    Raises:
        ArgumentValueError: another schema, or a missing or unknown field.
    """
    if isinstance(document, dict) and document.get("schema") == FIRST_SCHEMA:
        document = {**document, "schema": SCHEMA, "host_floor_us": {}}
    require_schema(document, SCHEMA, where)
    rows = []
    for i, row in enumerate(document["rows"]):
        at = f"{where}: rows[{i}]"
        peers = {
            n: parse_fields(p, PeerTime, f"{at}: {n}") for n, p in row.get("peers", {}).items()
        }
        rows.append(parse_fields({**row, "peers": peers}, GpuRow, at))
    lines = [
        parse_fields(line, Threshold, f"{where}: thresholds[{i}]")
        for i, line in enumerate(document["thresholds"])
    ]
    values = {**document, "rows": rows, "thresholds": lines}
    parsed: GpuBenchResult = parse_fields(values, GpuBenchResult, where)
    return parsed
