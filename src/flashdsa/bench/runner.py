"""One benchmark run: the chosen targets measured, the result filled in, its file placed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashdsa.bench.cases import OPERATIONS, Case, Shape, build_case
from flashdsa.bench.checkout import RESULTS, Checkout, find_checkout
from flashdsa.bench.gpu.result import GpuBenchResult
from flashdsa.bench.gpu.run import GpuRun
from flashdsa.bench.machine import HostMachine, describe_machine
from flashdsa.bench.memory import OPERATIONS as MEMORY_OPERATIONS
from flashdsa.bench.memory import QUERIES, measure_memory
from flashdsa.bench.protocol import PROTOCOL, time_in_turns
from flashdsa.bench.result import BenchResult, TimingRow
from flashdsa.bench.versions import versions

OnProgress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what runs now)."""


@dataclass(frozen=True)
class BenchOptions:
    """What to measure. `target` is one of OPERATIONS, "memory" or "all"."""

    target: str = "all"
    shape: Shape = field(default_factory=Shape)
    repeats: int = 7
    backend: str = "cpu"
    memory_dtype: str = "bfloat16"
    memory_queries: tuple[int, ...] = QUERIES

    def operations(self) -> tuple[str, ...]:
        """The operations to time."""
        if self.target == "all":
            return OPERATIONS
        return () if self.target == "memory" else (self.target,)

    def quick(self) -> BenchOptions:
        """The same on small sizes with few repeats."""
        return replace(
            self, shape=self.shape.quick(), repeats=min(self.repeats, 3), memory_queries=(1, 4)
        )


def run_bench(options: BenchOptions, on_progress: OnProgress = lambda *_: None) -> BenchResult:
    """Measure what `options` asks for."""
    memory_cases = [
        (op, replace(options.shape, s=s, dtype=options.memory_dtype))
        for op in MEMORY_OPERATIONS
        for s in options.memory_queries
        if options.target in ("all", "memory")
    ]
    total = len(options.operations()) * options.repeats + len(memory_cases)
    checkout = find_checkout()
    result = BenchResult(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        git=checkout.as_dict() if checkout else None,
        machine=describe_machine().as_dict(),
        versions=versions(),
        threads=torch.get_num_threads(),
        protocol=PROTOCOL,
    )
    done = 0

    def step(what: str, by: int = 1) -> None:
        nonlocal done
        done += by
        on_progress(done, total, what)

    for op in options.operations():
        step(f"{op}: warming up", by=0)
        case = build_case(op, options.shape, options.backend)
        result.rows.append(_time(case, options, partial(step, case.op)))
    for op, shape in memory_cases:
        step(f"memory of {op} at S={shape.s}", by=0)
        result.memory.append(measure_memory(op, shape, options.backend))
        step(f"memory of {op}")
    return result


def _time(case: Case, options: BenchOptions, after_sample: Callable[[], None]) -> TimingRow:
    times, ceiling_times = time_in_turns(case.run, case.ceiling.run, options.repeats, after_sample)
    rate = case.work / times.median / 1e9
    ceiling_rate = case.ceiling.work / ceiling_times.median / 1e9
    return TimingRow(
        op=case.op,
        backend=options.backend,
        problem=case.problem,
        repeats=options.repeats,
        seconds_median=times.median,
        seconds_p10=times.p10,
        seconds_p90=times.p90,
        unit=case.unit,
        rate=rate,
        ceiling=case.ceiling.name,
        ceiling_rate=ceiling_rate,
        ratio=rate / ceiling_rate,
    )


def result_path(
    result: BenchResult | GpuBenchResult | GpuRun[Any],
    target: str,
    out: Path | None = None,
) -> Path:
    """Where the result file goes.

    Args:
        result: names the date and the commit.
        target: what was measured; it is part of the file's name unless it is "all".
        out: a .json file, or a folder; by default workbench/results/<machine> in a checkout
            and ./out elsewhere.
    """
    if out is not None and out.suffix == ".json":
        return out
    commit = (result.git or {}).get("commit")
    short = str(commit)[:9] if commit else "nocommit"
    part = "" if target == "all" else f"-{target}"
    name = f"{result.date[:10]}-{short}{part}.json"
    return (out or default_folder()) / name


def default_folder() -> Path:
    """Where results go that nobody gave a place: workbench/results/<machine>, or ./out."""
    return _default_folder(find_checkout(), describe_machine())


def _default_folder(checkout: Checkout | None, machine: HostMachine) -> Path:
    return checkout.root / RESULTS / machine.slug() if checkout else Path("out")
