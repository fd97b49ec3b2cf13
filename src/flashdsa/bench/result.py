"""The result file: its rows, its schema, writing and reading it."""

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

SCHEMA = "flashdsa-bench/1"


@dataclass(frozen=True)
class TimingRow:
    """One operation on one problem: seconds a call, the rate at the median, its ceiling."""

    op: str
    backend: str
    problem: dict[str, int | str]
    repeats: int
    seconds_median: float
    seconds_p10: float
    seconds_p90: float
    unit: str
    """Of both rates: "GFLOPS" or "GB/s"."""
    rate: float
    ceiling: str
    ceiling_rate: float
    ratio: float
    """rate / ceiling_rate."""


@dataclass(frozen=True)
class MemoryRow:
    """One call in a fresh process: the peak of resident memory beyond its inputs and outputs."""

    op: str
    backend: str
    problem: dict[str, int | str]
    input_bytes: int
    output_bytes: int
    extra_peak_bytes: int
    method: str


@dataclass(frozen=True)
class BenchResult:
    """Everything that one `flashdsa bench` run found, and where it was found."""

    date: str
    git: dict[str, str | bool | None] | None
    """Commit and dirty flag; None where the code is not in a checkout."""
    machine: dict[str, Any]
    versions: dict[str, str | None]
    threads: int
    protocol: str
    rows: list[TimingRow] = field(default_factory=list)
    memory: list[MemoryRow] = field(default_factory=list)
    schema: str = SCHEMA

    def to_json(self) -> str:
        """The document as indented JSON text."""
        return to_json(self)


def write_result(result: BenchResult, path: Path) -> None:
    """Write the document, creating its folder."""
    write_text(result.to_json(), path)


def read_result(path: Path) -> BenchResult:
    """The document in a file.

    Raises:
        ArgumentValueError: the file is no result file of this schema.
    """
    return parse_result(read_json(path), str(path))


def parse_result(document: Any, where: str = "result") -> BenchResult:
    """The document as dataclasses.

    Raises:
        ArgumentValueError: another schema, or a missing or unknown field.
    """
    require_schema(document, SCHEMA, where)
    values = dict(document)
    for name, kind in (("rows", TimingRow), ("memory", MemoryRow)):
        rows = [
            parse_fields(row, kind, f"{where}: {name}[{i}]") for i, row in enumerate(values[name])
        ]
        values[name] = rows
    parsed: BenchResult = parse_fields(values, BenchResult, where)
    return parsed
