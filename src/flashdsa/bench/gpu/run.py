"""One run of a benchmark on a GPU: what such documents have in common, and the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from flashdsa.bench.checkout import find_checkout
from flashdsa.bench.document import parse_fields, read_json, require_schema, to_json
from flashdsa.bench.gpu.device import clocks, describe_gpu, gpu_versions


class Named(Protocol):
    """A case: all that the loop asks of it."""

    @property
    def name(self) -> str:
        """What the progress bar and the row call it."""


Case = TypeVar("Case", bound=Named)
Row = TypeVar("Row")
OnProgress = Callable[[int, int, str], None]
"""Called with (cases done, cases in all, the case that runs now)."""


@dataclass(frozen=True)
class GpuRun(Generic[Row]):
    """Everything that one run found, and where it was found."""

    date: str
    git: dict[str, str | bool | None] | None
    gpu: dict[str, Any]
    """Name, capability, SMs, L2, memory, and nvidia-smi's clocks before and after."""
    versions: dict[str, str | None]
    protocol: str
    schema: str
    rows: list[Row] = field(default_factory=list)

    def to_json(self) -> str:
        """The document as indented JSON text."""
        return to_json(self)


def run_cases(
    cases: Iterable[Case],
    measure: Callable[[Case], Row],
    on_progress: OnProgress,
    *,
    protocol: str,
    schema: str,
    device: str,
) -> GpuRun[Row]:
    """Measure every case.

    Args:
        measure: gives a case's row.
        device: of our calls; "cuda" is described in the document.
    """
    chosen = list(cases)
    checkout = find_checkout()
    before = clocks()
    result: GpuRun[Row] = GpuRun(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        git=checkout.as_dict() if checkout else None,
        gpu=describe_gpu() if device == "cuda" else {"name": "none"},
        versions=gpu_versions(),
        protocol=protocol,
        schema=schema,
    )
    for done, case in enumerate(chosen):
        on_progress(done, len(chosen), case.name)
        result.rows.append(measure(case))
    on_progress(len(chosen), len(chosen), "done")
    result.gpu.update(clocks_before=before, clocks_after=clocks())
    return result


def read_run(path: Path, schema: str, parse_row: Callable[[Any, str], Row]) -> GpuRun[Row]:
    """The document in a file.

    Args:
        parse_row: gives a row of its fields and of the place that an error names.

    Raises:
        ArgumentValueError: the file is no result file of this schema.
    """
    document, where = read_json(path), str(path)
    require_schema(document, schema, where)
    rows = [parse_row(row, f"{where}: rows[{i}]") for i, row in enumerate(document["rows"])]
    parsed: GpuRun[Row] = parse_fields({**document, "rows": rows}, GpuRun, where)
    return parsed
