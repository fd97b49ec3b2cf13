"""Makes, judges and times draws by turns with the peers, within a budget of seconds."""

from __future__ import annotations

import gzip
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from flashdsa.backends.gpu import workspaces
from flashdsa.bench.cases import Operation
from flashdsa.bench.machine import clocks
from flashdsa.bench.result import CEILING, OURS, SCHEMA, Row, parse_result
from flashdsa.bench.runner import BenchOptions, OnProgress, in_a_line, measure_case, new_result
from flashdsa.bench.timer import GpuHangError, Timer, WallTimer
from flashdsa.errors import ArgumentValueError
from workbench.draws.distribution import Draw
from workbench.draws.inputs import PARTS, case_of, make_task
from workbench.draws.peers import peers_of
from workbench.draws.timing import FULL, SHORT, SHORT_SECONDS, DrawTimer, Protocol, time_ceilings

DRAWS_SCHEMA = "flashdsa-draws/1"
Document = dict[str, Any]
KEEP_SECONDS = 20.0
RESTING = ("forward", "prompts", "forward-512", "backward", "backward-512", "training")
MANY_GRAPHS = 8192
"""A process that serves captures few graphs; this one captures some for every draw, and none may
clear its counters in each call because of that."""


@dataclass(frozen=True)
class DrawOptions:
    """Options of a run.

    Attributes:
        draws: in the order in which they are timed.
        budget: seconds after which no further draw begins; None: all are timed.
        wanted: whether a peer of this name takes part.
    """

    draws: Sequence[Draw]
    backend: str = "sm90"
    budget: float | None = None
    wanted: Callable[[str], bool] = field(default=lambda name: True)

    @property
    def protocol(self) -> Protocol:
        """The short one where the budget asks for it."""
        if self.budget is None or self.budget >= SHORT_SECONDS * len(self.draws):
            return FULL
        return SHORT


def label(draw: Draw, part: str = "") -> str:
    """The name under which ratios are reported."""
    word = draw.values.get("rows", part)
    return f"{draw.operation} {word}".strip()


def run_draws(
    options: DrawOptions,
    on_progress: OnProgress = lambda *_: None,
    keep: Callable[[Document], None] = lambda _: None,
) -> Document:
    """The document of a run. A hang or an error of CUDA ends it and keeps what it had.

    Args:
        keep: gets the document as it is, now and then: a machine may be taken away.
    """
    workspaces.GRAPHS = MANY_GRAPHS
    seeds = {draw.seed for draw in options.draws}
    bench = BenchOptions([], backend=options.backend, seed=min(seeds), brief=True)
    protocol, before, begin = options.protocol, clocks(), time.monotonic()
    ceilings = time_ceilings() if bench.device == "cuda" else {}
    result = new_result(bench, str(protocol) if bench.device == "cuda" else WallTimer.protocol)
    done, longest, kept, stopped = 0, 0.0, begin, None

    def document() -> Document:
        seen = {"before": before, "after": clocks()} if before else {}
        return asdict(replace(result, clocks=seen, stopped=stopped)) | {
            "schema": DRAWS_SCHEMA,
            "asked": len(options.draws),
            "done": done,
            "budget_s": options.budget,
            "wall_s": round(time.monotonic() - begin, 1),
        }

    for draw in options.draws:
        start = time.monotonic()
        if options.budget is not None and start - begin + longest > options.budget:
            break
        if start - kept > KEEP_SECONDS:
            keep(document())
            kept = start
        on_progress(done, len(options.draws), draw.line)
        try:
            for row in measure_draw(draw, options, bench, protocol):
                result.rows.append(row)
                if row.times and row.ceiling in ceilings:
                    row.times["hot"][CEILING] = ceilings[row.ceiling]
        except GpuHangError as error:
            stopped = f"{draw.line}: {error}"
            break
        last = result.rows[-1]
        found = [*last.missing.values(), *chain.from_iterable(last.findings.values())]
        if fatal := [line for line in found if "CUDA error" in line]:
            stopped = f"{draw.line}: {fatal[0]}"
            break
        done += 1
        # The first draws load libraries: the longest of the last few says what the next may take.
        longest = max(0.7 * longest, time.monotonic() - start)
    on_progress(len(options.draws), len(options.draws), "done")
    keep(document())
    return document()


def measure_draw(
    draw: Draw, options: DrawOptions, bench: BenchOptions, protocol: Protocol
) -> Iterator[Row]:
    """Rows of a draw, one a part, with nothing left on the device."""
    charges: dict[str, float] = {}
    peers = peers_of(draw, charges)
    peers = {name: peer for name, peer in peers.items() if options.wanted(name)}
    parts = PARTS.get(draw.operation, ("",))
    conditions = ("hot", "cold") if parts == ("",) or protocol.parts_cold else ("hot",)
    chosen = replace(bench, peers=peers, conditions=conditions, repeats=protocol.cold)
    for part in parts:
        row = _measure_part(draw, part, chosen, protocol)
        for times in row.times.values():
            for peer in times.keys() & charges.keys():
                times[peer] = replace(times[peer], median=times[peer].median + charges[peer])
        yield row
    if "flashinfer_topk" in sys.modules:
        sys.modules["flashinfer_topk"].forget()
    if bench.device == "cuda":
        torch.cuda.empty_cache()


def _measure_part(draw: Draw, part: str, bench: BenchOptions, protocol: Protocol) -> Row:
    """A row. An error is a finding: a draw that fails is a wrong one."""
    case, name = case_of(draw, part), label(draw, part)
    timer: Timer = WallTimer(draw.values["tensors"])
    if bench.device == "cuda":
        timer = DrawTimer(protocol, draw.values["tensors"], draw.operation in RESTING)
    try:
        return measure_case(Operation(name, partial(_make, draw, part), {}), case, bench, timer)
    except GpuHangError:
        raise
    except Exception as error:
        row = Row(name, case.label, bench.backend, case.problem, 0.0, "", "", 0.0, {})
        row.findings[OURS] = [in_a_line(error)]
        return row


def _make(draw: Draw, part: str, case: Any, device: str, seed: int, backend: str) -> Any:
    return make_task(draw, part, device, backend)


def rows_of(document: Mapping[str, Any], where: str = "result") -> list[Row]:
    """The rows of a document of draws.

    Raises:
        ArgumentValueError: another schema.
    """
    found = document.get("schema")
    if found != DRAWS_SCHEMA:
        raise ArgumentValueError(f"{where}: expected schema {DRAWS_SCHEMA!r}; got {found!r}")
    own = ("asked", "done", "budget_s", "wall_s")
    rest = {name: value for name, value in document.items() if name not in own}
    return parse_result(rest | {"schema": SCHEMA}, where).rows


def read_document(path: Path) -> Document:
    """The document of a file; `.gz` is compressed.

    Raises:
        ArgumentValueError: the file is damaged, or no document.
    """
    data = path.read_bytes()
    try:
        document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (ValueError, RecursionError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ArgumentValueError(f"{path}: expected JSON; got {error}") from None
    if not isinstance(document, dict):
        raise ArgumentValueError(f"{path}: expected fields; got {type(document).__name__}")
    return document


def machine_of(document: Mapping[str, Any]) -> str:
    """Name of the GPU that a document's draws were timed on, or of the CPU."""
    machine = document["machine"]
    return str(machine["gpus"][0]["name"] if machine["gpus"] else machine["cpu"])


def read_draws(path: Path) -> list[Row]:
    """The rows of a file."""
    return rows_of(read_document(path), str(path))
