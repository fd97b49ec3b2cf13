"""The one loop: every case made, judged and timed beside its ceiling and its peers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from flashdsa.bench import attention, entries, indexer, training
from flashdsa.bench.cases import Case, Operation, Task, Verdict, poison
from flashdsa.bench.checkout import RESULTS, find_checkout
from flashdsa.bench.machine import clocks, describe_machine, versions
from flashdsa.bench.memory import measure_memory
from flashdsa.bench.result import CEILING, OURS, BenchResult, Row
from flashdsa.bench.timer import Call, GpuHangError, Timer, Times
from flashdsa.errors import UnsupportedError
from flashdsa.verify.check import device_of

logger = logging.getLogger("flashdsa.bench")
_FAMILIES = attention, indexer, training, entries
OPERATIONS = {one.name: one for family in _FAMILIES for one in family.OPERATIONS}
REPEATS = {"cpu": 7, "cuda": 15}
OnProgress = Callable[[int, int, str], None]
"""Called with (cases done, cases in all, the case that runs now)."""
Peer = Callable[[Case, Task], tuple[Call, Callable[[object], Verdict]]]
"""(case, task) -> another library's call, and the judge of what it returns; raises where it cannot
serve the case."""


@dataclass(frozen=True)
class BenchOptions:
    """Options of a measurement.

    Attributes:
        plan: operations with their cases. peers: by name.
        memory: (operation, case) of which the peak is measured.
        conditions: of `Timer.in_turns`; by default the operation's.
        brief: no ceiling, no host times, one judgement; results are poisoned before that one.
    """

    plan: Iterable[tuple[Operation, Iterable[Case]]]
    backend: str = "cpu"
    repeats: int | None = None
    seed: int = 0
    peers: Mapping[str, Peer] = field(default_factory=dict)
    memory: Iterable[tuple[str, Case]] = ()
    conditions: tuple[str, ...] | None = None
    brief: bool = False

    @property
    def device(self) -> str:
        """Device of the backend's tensors."""
        return device_of(self.backend)


def run_bench(
    options: BenchOptions, timer: Timer, on_progress: OnProgress = lambda *_: None
) -> BenchResult:
    """Measure what `options` asks for. A hang of the GPU ends the run and keeps what it had."""
    cases = [(operation, case) for operation, cases in options.plan for case in cases]
    memory = list(options.memory)
    total = len(cases) + len(memory)
    before, result = clocks(), new_result(options, timer.protocol)
    floor = stopped = None
    what = "start"
    try:
        one = torch.zeros(1, device=options.device)
        floor = timer.host_us(lambda: one.add_(1))
        for done, (operation, case) in enumerate(cases):
            what = f"{operation.name}, {case.label}"
            on_progress(done, total, what)
            result.rows.append(measure_case(operation, case, options, timer))
    except GpuHangError as error:
        stopped = f"{what}: {error}"
    for done, (name, case) in enumerate(memory, len(cases)):
        on_progress(done, total, f"memory of {name}, S={case.s}")
        result.memory.append(measure_memory(name, case, options.backend))
    on_progress(total, total, "done")
    found = {"before": before, "after": clocks()} if before else {}
    return replace(result, clocks=found, host_floor_us=floor, stopped=stopped)


def new_result(options: BenchOptions, protocol: str) -> BenchResult:
    """A result without rows: where and when it is made, of what."""
    checkout = find_checkout()
    return BenchResult(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        git=checkout.as_dict() if checkout else None,
        machine=describe_machine().as_dict(),
        versions=versions("apache-tvm-ffi") | {"cuda": torch.version.cuda},
        threads=torch.get_num_threads(),
        protocol=protocol,
        seed=options.seed,
    )


def measure_case(operation: Operation, case: Case, options: BenchOptions, timer: Timer) -> Row:
    """A case's row. A backend that cannot serve it gives one without times."""
    try:
        task = operation.make(case, options.device, options.seed, options.backend)
        first = task.call()
        if options.brief:
            poison(first)
            first = None
            first = task.call()
        timer.synchronize(OURS)
        verdict = task.judge(first)
        kept = first.clone() if isinstance(first, torch.Tensor) else None
    except UnsupportedError as error:
        return Row(
            operation.name, case.label, options.backend, case.problem, 0.0, "", "", 0.0, {},
            missing={OURS: in_a_line(error)},
        )  # fmt: skip
    calls: dict[str, Call] = {OURS: task.call}
    findings = {OURS: verdict.findings} if verdict.findings else {}
    missing: dict[str, str] = {}
    for name, call, wrong in _ready_peers(case, task, options.peers, timer, missing):
        calls[name] = call
        if wrong:
            findings[name] = wrong
    conditions = [
        one for one in options.conditions or operation.conditions if one in timer.conditions
    ] or list(timer.conditions[:1])
    repeats = options.repeats or REPEATS[options.device]
    times: dict[str, dict[str, Times]] = {}
    for condition in conditions:
        beside = {} if options.brief else {CEILING: task.ceiling.call}
        times[condition] = timer.in_turns(calls | beside, condition, repeats)
    on_host = {} if options.brief else calls
    host = {name: timer.host_us(call) for name, call in on_host.items()}
    last = task.call()
    again = [] if options.brief else task.judge(last).findings
    same = not isinstance(last, torch.Tensor) or kept is None or torch.equal(kept, last)
    if task.exact and not same:
        again = [*again, "other results in a later call"]
    if again and not verdict.findings:
        findings[OURS] = [f"after timing: {finding}" for finding in again]
    row = Row(
        operation=operation.name,
        case=case.label,
        backend=options.backend,
        problem=case.problem,
        work=task.work,
        unit=task.ceiling.unit,
        ceiling=task.ceiling.name,
        ceiling_work=task.ceiling.work,
        times=times,
        host_us={name: us for name, us in host.items() if us is not None},
        errors=verdict.errors,
        findings=findings,
        missing=missing,
    )
    logger.info("%s, %s: %.1f us", row.operation, row.case, times[conditions[0]][OURS].median)
    return row


def _ready_peers(
    case: Case, task: Task, peers: Mapping[str, Peer], timer: Timer, missing: dict[str, str]
) -> Iterator[tuple[str, Call, list[str]]]:
    """The peers that can be timed and what is wrong with their results; reasons into `missing`.

    A peer's refusal must not cost the rest of the run.
    """
    for name, prepare in peers.items():
        try:
            call, judge = prepare(case, task)
            found = call()
            timer.synchronize(name)
            wrong = judge(found).findings
        except GpuHangError:
            raise
        except Exception as error:
            missing[name] = in_a_line(error)
            continue
        yield name, call, wrong


def in_a_line(error: Exception) -> str:
    """Type and message of an error, as a reason for a row."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def result_path(result: BenchResult, target: str, out: Path | None = None) -> Path:
    """Return the path of the result file.

    Args:
        target: what was measured; it is part of the file's name unless it is "all".
        out: a .json file, or a folder; by default `default_folder`.
    """
    if out is not None and out.suffix == ".json":
        return out
    commit = (result.git or {}).get("commit")
    short = str(commit)[:9] if commit else "nocommit"
    part = "" if target == "all" else f"-{target}"
    return (out or default_folder()) / f"{result.date[:10]}-{short}{part}.json"


def default_folder() -> Path:
    """Return the folder without --out: workbench/results/<machine> in a checkout, else ./out."""
    checkout = find_checkout()
    return checkout.root / RESULTS / describe_machine().slug() if checkout else Path("out")


def memory_plan(sizes: Case, queries: Iterable[int]) -> list[tuple[str, Case]]:
    """Forward and backward of these sizes with several numbers of queries."""
    return [(name, replace(sizes, s=s)) for name in ("sparse_mla_fwd", "mla_bwd") for s in queries]
