"""Break a kernel's synchronisation, one instruction at a time, over its saved small calls.

A mutant that is done is written down at once, to ROWS/NAME.jsonl, whose first line says what it is
of. One line with the number of mutants follows at the end, once all are done:
a row of a JSON file, of which the table in README.md is made.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from flashdsa.errors import ArgumentValueError
from ptxemu.mutate import (
    Equivalents,
    Mutation,
    Replay,
    Report,
    Result,
    fingerprint,
    mutate,
    mutations_of,
    runner,
)
from ptxemu.mutate.report import facts_of
from ptxemu.mutate.runner import CAUGHT, EQUIVALENT, NOT_REACHED, NOTED, REDUNDANT, SURVIVED
from ptxemu.saved_launch import load_launch
from ptxemu.sched.policy import Policy
from workbench.small_calls.call import IGNORED, Row, path_of_launch, record
from workbench.small_calls.table import TABLE, rows_of

RESULTS = Path(__file__).parents[1] / "results/mutation"
SCHEMA = "flashdsa-mutation/1"
VERDICTS = (NOT_REACHED, CAUGHT, REDUNDANT, EQUIVALENT, SURVIVED)
BLOCK = re.compile(r"(?<=<!-- counts -->\n).*?(?=<!-- end -->)", re.DOTALL)


def counts_of(verdicts: Mapping[str, int]) -> dict[str, int]:
    """Mutants by verdict; one that only a note tells of has survived."""
    counts = {verdict: verdicts.get(verdict, 0) for verdict in VERDICTS}
    counts[SURVIVED] += verdicts.get(NOTED, 0)
    return {"mutants": sum(counts.values()), **counts}


def read_rows() -> list[dict[str, Any]]:
    """The rows, in the table's order."""
    path = RESULTS / "kernels.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["kernels"] if path.exists() else []
    return rows


def write_row(row: Mapping[str, Any]) -> None:
    """Put the row in the place of the kernel's, or at the end; write the table anew."""
    rows = {one["name"]: one for one in read_rows()} | {row["name"]: dict(row)}
    lines = ",\n".join(f" {json.dumps(one)}" for one in rows.values())
    head = f'{{"schema": "{SCHEMA}", "kernels": ['
    (RESULTS / "kernels.json").write_text(f"{head}\n{lines}\n]}}\n")
    page = RESULTS / "README.md"
    if page.exists():
        page.write_text(BLOCK.sub(lambda _: markdown(list(rows.values())), page.read_text()))


LISTED_BELOW = 0.965
"""Share from which on a kernel's row is in kernels.json alone."""


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The sums, the kernels of less than LISTED_BELOW, and kernels not counted. Share = caught /
    (reached - redundant - equivalent)."""
    sums = ", ".join(f"{sum(row[verdict] for row in rows)} {verdict}" for verdict in VERDICTS)
    lines = [f"{len(rows)} kernels, {sum(row['mutants'] for row in rows)} mutants: {sums}.", ""]
    lines += ["| kernel | mutants | survived | share |", "| --- | --: | --: | --: |"]
    for row in rows:
        caught, missed = row[CAUGHT], row[SURVIVED]
        if missed and caught < LISTED_BELOW * (caught + missed):
            share = f"{caught / (caught + missed):.0%}"
            lines.append(f"| `{row['name']}` | {row['mutants']} | {missed} | {share} |")
    counted = {row["name"] for row in rows}
    missing = [f"`{name}`" for name, row in TABLE.items() if row.repeated and name not in counted]
    if missing:
        lines += ["", f"Not counted yet: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


ROOT = Path(__file__).parents[2]
_CUTE = "$CUTLASS/examples/python/CuTeDSL/cute"
_OURS = "ptxemu/tests/peers/scripts"
_BLACKWELL_GEMM = f"{_CUTE}/blackwell/kernel/dense_gemm/dense_gemm_persistent.py"
_OF_GEMM = "--use_tma_store --ab_dtype Float16 --acc_dtype Float32 --skip_ref_check"


@dataclass(frozen=True)
class Peer:
    """A script that launches a kernel on what calls itself a GPU; otherwise as `Row`.

    Attributes:
        entry: a pattern of the saved files' names. path: the script's.
        calls: its arguments, of a launch each. sms: streaming multiprocessors.
    """

    arch: str
    entry: str
    path: str
    calls: tuple[str, ...]
    sms: int = 2
    scratch: tuple[str, ...] = ()
    lanes_apart: bool = False

    def record(self, number: int, path: Path) -> None:
        """Write the launch of a call to a file."""
        with tempfile.TemporaryDirectory() as folder:
            command = ["-m", "ptxemu", "exec", "--arch", self.arch, "--quiet", "--no-check"]
            command += ["--sms", str(self.sms), "--save", folder, os.path.expandvars(self.path)]
            run = [sys.executable, *command, *self.calls[number].split()]
            subprocess.run(run, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            first = min(Path(folder).glob(f"{self.entry}*.launch"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(first.read_bytes())


# fmt: off
PEERS = {
    "cutlass-gemm-sm_90a": Peer(
        "sm_90a", "Hopper", f"{_CUTE}/hopper/kernel/dense_gemm/dense_gemm_persistent.py",
        tuple(f"--mnkl 512,256,{k},1 --cluster_shape_mn 2,1 --tile_shape_mn 128,128"
              for k in (512, 448, 128))),
    "cutlass-fmha-sm_90a": Peer(
        "sm_90a", "Hopper", f"{_CUTE}/hopper/kernel/attention/fmha.py",
        ("--q_shape 1,256,1,128 --k_shape 1,768,1,128",)),
    "cutlass-gemm-1cta-sm_100a": Peer(
        "sm_100a", "Persistent", _BLACKWELL_GEMM,
        (f"--mnkl 512,256,704,1 --mma_tiler_mn 128,128 {_OF_GEMM}",)),
    "cutlass-gemm-2cta-sm_100a": Peer(
        "sm_100a", "Persistent", _BLACKWELL_GEMM,
        ("--mnkl 1024,512,704,1 --mma_tiler_mn 256,128 --cluster_shape_mn 2,1 "
         f"--use_2cta_instrs {_OF_GEMM}",), sms=4),
    "quack-gemm-sm_90a": Peer(
        "sm_90a", "quackgemm", f"{_OURS}/quack_kernel.py",
        # The last: fewer steps than stages, so that the loads of two tiles are in flight.
        ("gemm 256 512 512", "gemm 384 768 448", "gemm 256 512 128", "gemm 256 512 256")),
    "quack-gemm-sm_100a": Peer(
        "sm_100a", "quackgemm", f"{_OURS}/quack_kernel.py",
        ("gemm 512 1536 128", "gemm 512 512 704")),
    # Three blocks of keys; the kernel of another number has other PTX.
    "cudnn-dsa-backward-sm_90a": Peer(
        "sm_90a", "cudnn*.1", f"{_OURS}/dsa_backward.py", ("64 2 256 192",)),
    "cudnn-dsa-backward-h64-sm_100a": Peer(
        "sm_100a", "bwd_cudnn", f"{_OURS}/dsa_backward.py", ("64 3 384 320",)),
}
# fmt: on


SCHEDULES = (
    *runner.POLICIES,
    Policy(asynchronous="slow", warps="random", seed=0, timeouts=0.5),
    Policy(asynchronous="late", warps="random", seed=1, timeouts=1.0),
)
"""Policies of most kernels. Under the last two, warps have to wait and give up again and again, and
reach the code after that."""
APART = (*runner.POLICIES[:1], *(Policy(seed=seed, lanes_apart=0.05) for seed in range(6)))
"""Policies of a kernel whose order is that of a warp's lanes."""

Known = dict[tuple[str, str], Result]
"""Results by names of site and mutation."""


def chosen(names: tuple[str, ...]) -> dict[str, Row | Peer]:
    """The rows of these names whose kernels synchronise; none: all of this library.

    Raises:
        ArgumentValueError: there is none of a name.
    """
    peers: dict[str, Row | Peer] = {name: PEERS[name] for name in names if name in PEERS}
    ours = tuple(name for name in names if name not in peers)
    rows = rows_of(ours) if ours or not peers else {}
    return {**{name: row for name, row in rows.items() if row.repeated}, **peers}


def calls_of(row: Row | Peer) -> list[str]:
    """Names of the launches that are repeated."""
    return list(row.calls) if isinstance(row, Peer) else [call.name for call in row.repeated]


def save(name: str, row: Row | Peer, folder: Path, *, first: bool = False) -> None:
    """Write the launches that are repeated with each mutant, or the first."""
    for number in range(1 if first else len(calls_of(row))):
        path = path_of_launch(folder, name, number)
        if isinstance(row, Peer):
            row.record(number, path)
        else:
            record(row.repeated[number], row.entry, path)


def argued(name: str) -> Equivalents:
    """Mutants that are harmless, with the reason of each."""
    path = RESULTS / "equivalent" / f"{name}.txt"
    return Equivalents.parse(path.read_text() if path.exists() else "")


class Campaign:
    """The mutants of one kernel, and what is known of them already.

    Attributes:
        name: of the row. mutations: all, in program order. ptx: the kernel's fingerprint.
        rows: the file of the mutants.
    """

    def __init__(self, name: str, row: Row | Peer, launches: Path, rows: Path) -> None:
        self.name, self.rows = name, rows / f"{name}.jsonl"
        self._calls = calls_of(row)
        paths = [path_of_launch(launches, name, number) for number in range(len(self._calls))]
        replays = [Replay(load_launch(path), row.scratch, IGNORED) for path in paths]
        self._first, *self._others = replays
        function = self._first.module.syntax.functions[self._first.kernel]
        self._lanes_apart = row.lanes_apart
        self.mutations = mutations_of(function, warp_syncs=row.lanes_apart)
        self.ptx = fingerprint(function)
        self._equivalents = argued(name)

    def try_all(self, jobs: int, again: bool, limit: int | None = None) -> tuple[Report, list[str]]:
        """Every mutant; the report, and arguments that are about none.

        Args:
            again: of those that a whole run has tried only what was not caught is tried.
            limit: at most so many mutants, spread over the kernel; they are not written down.
        """
        strangers = self._equivalents.strangers(self.mutations)
        for stranger in strangers:
            click.echo(f"equivalent/{self.name}.txt: there is no mutant {stranger!r}", err=True)
        known = {} if limit else self._tried(again)
        self.rows.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with (Path("/dev/null") if limit else self.rows).open("w") as tried:

            def write(document: Mapping[str, Any]) -> None:
                tried.write(json.dumps(document) + "\n")
                tried.flush()

            def on_result(done: int, total: int, result: Result) -> None:
                what = f"{result.mutation.site.name} {result.mutation.name}: {result.verdict}"
                click.echo(f"{self.name} {done}/{total} {what}, {result.seconds:.0f} s", err=True)
                write(facts_of(result))

            write({"ptx": self.ptx, "calls": self._calls})
            for result in known.values():
                write(facts_of(result))
            baseline, results = mutate(
                self._first,
                also=self._others,
                limit=limit,
                jobs=jobs,
                policies=APART if self._lanes_apart else SCHEDULES,
                notes=True,
                equivalents=self._equivalents,
                known=known,
                on_result=on_result,
            )
            write({"mutants": len(results)})
        click.echo(f"{self.name}: {time.monotonic() - started:.0f} s", err=True)
        return Report(self._first.kernel, baseline, results), strangers

    def counted(self, report: Report) -> dict[str, Any]:
        return {
            "name": self.name,
            "arch": self.name.rpartition("-")[2],
            "ptx": self.ptx,
            **counts_of(Counter(result.verdict for result in report.results)),
        }

    def _tried(self, again: bool) -> Known:
        """Return what a stopped run has tried, or what stands of a whole one.

        Raises:
            ArgumentValueError: it is of another kernel.
        """
        if not self.rows.exists():
            return {}
        head, *facts = map(json.loads, self.rows.read_text().splitlines())
        whole = bool(facts) and "mutants" in facts[-1]
        if head["ptx"] != self.ptx:
            if again:
                raise ArgumentValueError(f"{self.rows}: of another kernel; run without --again")
            return {}
        if whole and not again:
            return {}
        same_calls = head["calls"] == self._calls
        stands = (
            {runner.CAUGHT, runner.REDUNDANT, runner.EQUIVALENT} if same_calls else {runner.CAUGHT}
        )
        by_names = {(m.site.name, m.name): m for m in self.mutations}
        known = {
            names: self._argued_anew(result_of(by_names[names], fact))
            for fact in facts[: -1 if whole else None]
            for names in [(f"{fact['category']}#{fact['number']}", fact["mutation"])]
        }
        stopped = not whole and same_calls
        return {n: r for n, r in known.items() if stopped or r.verdict in stands}

    def _argued_anew(self, result: Result) -> Result:
        """Return the result with the argument that the file has now."""
        if result.verdict in (runner.CAUGHT, runner.REDUNDANT, runner.NOT_REACHED):
            return result
        reason = self._equivalents.reason(result.mutation)
        if reason is None and result.verdict != runner.EQUIVALENT:
            return result
        verdict = runner.SURVIVED if reason is None else runner.EQUIVALENT
        return replace(result, verdict=verdict, how=reason or "")


def staleness(name: str, launches: Path) -> tuple[str | None, str]:
    """The fingerprint that a kernel's counts are of, and that of its first launch in a folder."""
    setup = load_launch(path_of_launch(launches, name, 0))
    now = fingerprint(setup.module.syntax.functions[setup.kernel])
    return next((row["ptx"] for row in read_rows() if row["name"] == name), None), now


def survivors_of(report: Report) -> Iterator[str]:
    """Yield the name of each mutant that is neither caught nor explained."""
    for result in report.results:
        if result.verdict in (runner.SURVIVED, runner.NOTED, runner.NOT_REACHED):
            site, name = result.mutation.site, result.mutation.name
            yield f"{site.name} {name}: {result.verdict}"


def result_of(mutation: Mutation, fact: Mapping[str, Any]) -> Result:
    """A result as it was written down."""
    policy = None
    if fact.get("policy") is not None:
        asynchronous, warps, seed = fact["policy"].split("/")
        policy = Policy(asynchronous=asynchronous, warps=warps, seed=int(seed))
    said = fact["verdict"], fact["how"], fact["message"]
    return Result(mutation, *said, policy, fact["seconds"], fact["launch"])
