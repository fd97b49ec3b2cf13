"""The result file: its rows, its schema, writing and reading it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from flashdsa.bench.timer import Times
from flashdsa.errors import ArgumentValueError
from flashdsa.output_paths import written

SCHEMA = "flashdsa-bench/3"
OURS, CEILING = "flashdsa", "ceiling"


@dataclass(frozen=True)
class Row:
    """One case: the times of ours, of the ceiling and of every peer, and what is wrong.

    Attributes:
        problem: the case's sizes and options.
        work: of a call, in `unit`: "FLOP" or "B". ceiling_work: of the ceiling's.
        times: by condition ("hot", "cold"), then by contender; `OURS` and `CEILING` are two of
            them, and other forms of ours begin like `OURS`.
        host_us: microseconds that a call keeps the host busy, by contender.
        errors: of our results' norms, against float64.
        findings: what is wrong with a contender's result.
        missing: why a contender was not timed.
    """

    operation: str
    case: str
    backend: str
    problem: dict[str, Any]
    work: float
    unit: str
    ceiling: str
    ceiling_work: float
    times: dict[str, dict[str, Times]]
    host_us: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    findings: dict[str, list[str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def rate(self, condition: str) -> float:
        """GFLOPS or GB/s at our median."""
        return self.work / self.times[condition][OURS].median / 1e3

    def ceiling_rate(self, condition: str) -> float:
        """Rate of the ceiling; nan where it has no time."""
        ceiling = self.times[condition].get(CEILING)
        return self.ceiling_work / ceiling.median / 1e3 if ceiling else float("nan")

    def fastest_peer(self, condition: str) -> str | None:
        """The fastest of the peers whose results are right."""
        us = {
            name: times.median
            for name, times in self.times.get(condition, {}).items()
            if name != CEILING and not name.startswith(OURS) and not self.findings.get(name)
        }
        return min(us, key=lambda name: us[name], default=None)

    def ratio(self, condition: str) -> float | None:
        """Time of the fastest peer over ours; None without a peer."""
        peer = self.fastest_peer(condition)
        times = self.times.get(condition, {})
        return times[peer].median / times[OURS].median if peer and OURS in times else None


@dataclass(frozen=True)
class MemoryRow:
    """One call in a fresh process: the peak of resident memory beyond its inputs and outputs."""

    operation: str
    backend: str
    problem: dict[str, Any]
    input_bytes: int
    output_bytes: int
    extra_peak_bytes: int
    method: str


@dataclass(frozen=True)
class BenchResult:
    """Everything that one run found, and where it was found.

    Attributes:
        git: commit and dirty flag; None where the code is not in a checkout.
        clocks: what nvidia-smi says "before" and "after"; empty without a GPU.
        host_floor_us: of `x.add_(1)`: hosts differ by more than versions do. None on a CPU.
        stopped: where and why the run ended early; None: every case was run.
    """

    date: str
    git: dict[str, Any] | None
    machine: dict[str, Any]
    versions: dict[str, str | None]
    threads: int
    protocol: str
    seed: int = 0
    clocks: dict[str, dict[str, str]] = field(default_factory=dict)
    host_floor_us: float | None = None
    rows: list[Row] = field(default_factory=list)
    memory: list[MemoryRow] = field(default_factory=list)
    stopped: str | None = None
    schema: str = SCHEMA

    @property
    def wrong(self) -> bool:
        """A result of ours is not right."""
        return any(name.startswith(OURS) for row in self.rows for name in row.findings)

    def to_json(self) -> str:
        """The document as indented JSON text."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def write(self, path: Path) -> None:
        """Write the document, creating its folder."""
        with written(path) as draft:
            draft.write_text(self.to_json(), encoding="utf-8")


def read_result(path: Path) -> BenchResult:
    """The document in a file.

    Raises:
        ArgumentValueError: the file is no result file of this schema.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArgumentValueError(f"{path}: expected JSON; got {error}") from None
    return parse_result(document, str(path))


def parse_result(document: Any, where: str = "result") -> BenchResult:
    """The document as dataclasses.

    Raises:
        ArgumentValueError: another schema, or a missing, unknown or wrong field.
    """
    found = document.get("schema") if isinstance(document, dict) else None
    if found != SCHEMA:
        raise ArgumentValueError(f"{where}: expected schema {SCHEMA!r}; got {found!r}")
    result: BenchResult = _parse(BenchResult, document, where)
    return result


def _parse(kind: Any, value: Any, where: str) -> Any:
    """Return a value of JSON as what an annotation says.

    Args:
        kind: a dataclass, of whose fields none may be missing; a type; a union with None; a list or
            dict of these, keys being text.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        kinds = get_type_hints(kind)
        if not isinstance(value, dict):
            raise ArgumentValueError(f"{where}: expected fields; got {type(value).__name__}")
        if wrong := set(kinds) ^ set(value):
            names = ", ".join(sorted(wrong))
            raise ArgumentValueError(f"{where}: missing or unknown fields: {names}")
        return kind(**{n: _parse(kinds[n], one, f"{where}: {n}") for n, one in value.items()})
    parts = get_args(kind)
    if type(None) in parts:
        return None if value is None else _parse(parts[0], value, where)
    origin: Any = get_origin(kind) or kind
    expected: Any = (int, float) if origin is float else object if origin is Any else origin
    if not isinstance(value, expected) or (isinstance(value, bool) and origin in (int, float)):
        raise ArgumentValueError(f"{where}: expected {origin.__name__}; got {type(value).__name__}")
    items: Any = value  # whose type isinstance has narrowed to object
    if origin is list and parts:
        return [_parse(parts[0], one, f"{where}[{i}]") for i, one in enumerate(items)]
    if origin is dict and parts:
        return {key: _parse(parts[1], one, f"{where}: {key}") for key, one in items.items()}
    return value
