"""NVIDIA's compute-sanitizer: which one is installed, a process under it, and what it said."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ("racecheck", "memcheck", "synccheck", "initcheck")
"""The slowest first, so that the last to end is a short one."""
PACKAGE = "nvidia-cuda-sanitizer-api"
TRUSTED_RACECHECK = (2026, 1)
OLD_RACECHECK = """\
WARNING: racecheck {version} reports hazards that are none in these kernels, and may miss some.
Its release notes: 2025.4 "Fixed multiple false-positives in racecheck involving mbarrier usage";
2026.1 "Fixed false positives and false negatives in racecheck involving indirect barrier
synchronization dependencies across clusters"; 2026.3 "Fixed potential false positives in racecheck
when using mbarrier complete-tx operations". A newer one: pip install --constraint constraints.txt
'.[sanitize]'"""
ENDED = re.compile(r"^(right|ended) ", re.MULTILINE)
"""A line of a process whose call ended with the right result, or whose mutant ended."""
QUOTED_LINES = 8
_ports = itertools.count(49152, 16)
"""Ports by which a sanitizer talks to its process; it tries up to ten."""


@dataclass(frozen=True, order=True)
class Sanitizer:
    """A compute-sanitizer and its version, as (2026, 4, 0, 0); newer ones are greater."""

    version: tuple[int, ...]
    path: str

    @property
    def name(self) -> str:
        return ".".join(map(str, self.version))


def version_in(text: str) -> tuple[int, ...]:
    """Return the version in the output of `compute-sanitizer --version`; () if it has none."""
    found = re.search(r"^Version (\d+(?:\.\d+)*)", text, re.MULTILINE)
    return tuple(map(int, found.group(1).split("."))) if found else ()


def installed_sanitizers() -> list[str]:
    """Paths of the pip package's program and of the one on PATH, of those that there are."""
    paths = [shutil.which("compute-sanitizer")]
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    paths += [str(file.locate()) for file in files if file.name == "compute-sanitizer"]
    return [path for path in paths if path]


def ask_version(path: str) -> tuple[int, ...]:
    """The version of the program at `path`; () if it does not run."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:  # not executable, for one
        print(f"{path}: {error}", file=sys.stderr)
        return ()
    return version_in(done.stdout)


def newest(
    paths: Iterable[str], ask: Callable[[str], tuple[int, ...]] = ask_version
) -> Sanitizer | None:
    """The newest of those that tell their version."""
    known = [Sanitizer(ask(path), path) for path in paths]
    return max((one for one in known if one.version), default=None)


@dataclass(frozen=True)
class Result:
    """Result of one case under one tool.

    Attributes:
        reports: errors, or hazards; None: it said nothing of them. warnings: lesser hazards.
        seconds: of the whole process, start-up and other processes on the GPU included.
        trouble: why the case counts as not run; "" if it ended, with the right result.
        quote: the first report's first lines.
    """

    case: str
    tool: str
    reports: int | None
    warnings: int
    seconds: float
    trouble: str
    quote: tuple[str, ...] = ()

    @property
    def cell(self) -> str:
        if self.trouble:
            return self.trouble.split(":")[0]
        found = f"{self.reports}" + (f" + {self.warnings} warnings" if self.warnings else "")
        return f"{found} ({self.seconds:.0f} s)"

    @property
    def clean(self) -> bool:
        """Nothing was reported of a case that ended well."""
        return not self.trouble and self.reports == 0 and self.warnings == 0


def run_case(
    sanitizer: Sanitizer, tool: str, case: str, command: Sequence[str], limit: float
) -> Result:
    """One Python process, stopped with all of its own after `limit` seconds."""
    own = [sanitizer.path, "--tool", tool, "--print-limit", "5", "--port", str(next(_ports))]
    start = time.perf_counter()
    process = subprocess.Popen(
        [*own, sys.executable, *command],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
        exit_code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, exit_code = what_is_left(process), None
    return judge(case, tool, output, exit_code, time.perf_counter() - start, limit)


def what_is_left(process: subprocess.Popen[str]) -> str:
    """Return what a stopped process had written; "" if its child lives on and keeps the pipe."""
    try:
        return process.communicate(timeout=5)[0]
    except subprocess.TimeoutExpired:
        return ""


def environment() -> dict[str, str]:
    """A child imports this checkout, and each of its tensors is an allocation of its own, so that
    an access behind one is not one to another."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }


def counts_in(output: str) -> tuple[int, int] | None:
    """(errors or hazards, warnings) by the summaries of a tool; None if there is none of them."""
    races = re.findall(r"RACECHECK SUMMARY: \d+ hazards? \w+ \((\d+) errors?, (\d+) warn", output)
    others = re.findall(r"ERROR SUMMARY: (\d+) errors?", output)
    if not races and not others:
        return None
    reports = sum(int(errors) for errors, _ in races) + sum(map(int, others))
    return reports, sum(int(warnings) for _, warnings in races)


def judge(
    case: str, tool: str, output: str, exit_code: int | None, seconds: float, limit: float
) -> Result:
    """A process by what it wrote.

    Args:
        exit_code: None if it was stopped after `limit` seconds.
    """
    counts, trouble = counts_in(output), ""
    if exit_code is None:
        trouble = f"did not end in {limit:.0f} s"
    elif counts is None or "before first instrumented API call" in output:
        trouble = f"did not start: {last_line(output)}"
    elif not ENDED.search(output):
        trouble = f"failed: {last_line(output)}"
    reports, warnings = counts or (None, 0)
    quote = quoted(output) if trouble or reports or warnings else ()
    return Result(case, tool, reports, warnings, round(seconds, 1), trouble, quote)


def last_line(output: str) -> str:
    """The last line that is not the sanitizer's own, else the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    own = [line for line in lines if not line.startswith("=========")]
    return (own or lines or [""])[-1]


def quoted(output: str) -> tuple[str, ...]:
    """The first lines of the sanitizer's first report."""
    lines = [line.removeprefix("=========").strip() for line in output.splitlines()]
    report = re.compile(r"(Error|Warning|Invalid|Uninit|Barrier)")
    begin = next((i for i, line in enumerate(lines) if report.match(line)), 0)
    return tuple(lines[begin : begin + QUOTED_LINES])
