"""Measures ptxemu: warp instructions a second with and without the check, and parsing.

    python benchmarks/run.py             # all, about a minute on 2 cores
    python benchmarks/run.py --quick     # small sizes: does it work at all?

Each kernel runs once to compile its blocks (reported as `seconds_first`) and then `--repeats` times
without and with the check, in turns, so that both see the same machine; medians of the process's
CPU seconds are reported, and the memory that a launch needs at most. Every kernel's results are
verified against NumPy. `--launch FILE` measures a saved launch besides. One JSON document goes to
benchmarks/results/<date>-<commit>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kernels
import numpy as np
import small_kernels as small

from ptxemu import api
from ptxemu.launch_setup import LaunchSetup
from ptxemu.saved_launch import load_launch
from ptxemu.syntax.parser import parse_module

SCHEMA = "ptxemu-bench/2"
ROOT = Path(__file__).resolve().parent
PARSED_LINES = 20_000


def main() -> int:
    """Measure, print a table, write the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement (default 3)")
    parser.add_argument("--only", action="append", help="a case by name, or parse")
    parser.add_argument(
        "--launch", type=Path, action="append", help="a file that `ptxemu exec --save` wrote"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder")
    options = parser.parse_args()
    scale = 1 if options.quick else 16
    cases: dict[str, Callable[[], kernels.Case]] = {
        "alu": lambda: kernels.alu(100 * scale),
        "shared_barrier": lambda: kernels.shared_barrier(50 * scale),
        "attention": lambda: kernels.attention(4 * scale),
        "fma": lambda: small.arithmetic("fma", 500 * scale),
        "add": lambda: small.arithmetic("add", 500 * scale),
        "shared_gemm": lambda: small.shared_gemm(32 if options.quick else 128),
        "state_waits": lambda: small.state_waits(50 * scale),
        "many_ctas": lambda: small.many_ctas(100 * scale),
    }
    chosen = options.only or [*cases, "parse"]
    rows = []
    for name in chosen:
        if name in cases:
            rows += measure(cases[name](), options.repeats)
    for path in options.launch or ():
        rows += measure(saved(path), options.repeats)
    document = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": {"commit": _git("rev-parse", "HEAD"), "dirty": bool(_git("status", "--porcelain"))},
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2),
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "repeats": options.repeats,
        "rows": rows,
        "parse": parse(options.repeats) if "parse" in chosen else None,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    commit = (document["git"]["commit"] or "unknown")[:9]
    path = options.out / f"{document['date'][:10]}-{commit}{'-quick' if options.quick else ''}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    print_table(document)
    print(f"wrote {path}")
    return 0


def measure(case: kernels.Case, repeats: int) -> list[dict[str, Any]]:
    """The rows of one kernel: without and with the check."""
    _progress(f"{case.name}: {case.about}")
    started = time.process_time()
    setup = getattr(case, "setup", None)
    module = api.load(case.text) if setup is None else setup.module
    first = case.launch(module, check=False)
    seconds_first = time.process_time() - started
    case.verify()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeats):
        for check in (False, True):
            started = time.process_time()
            result = case.launch(module, check=check)
            seconds[check].append(time.process_time() - started)
            faults = [f.message for f in result.findings if f.level != "note"]
            if faults and setup is None:
                sys.exit(f"{case.name}: the check found {faults[0]}")
            case.verify()
    return [
        {
            "case": case.name,
            "about": case.about,
            "check": check,
            "warp_instructions": first.warp_instructions,
            "async_operations": first.async_operations,
            "seconds_first": round(seconds_first, 4),
            "seconds_median": round(statistics.median(seconds[check]), 4),
            "seconds_min": round(min(seconds[check]), 4),
            "peak_mib": round(_peak_mib(case, module, check=check), 1),
            "warp_instructions_per_second": round(
                first.warp_instructions / statistics.median(seconds[check])
            ),
        }
        for check in (False, True)
    ]


def _peak_mib(case: kernels.Case, module: api.Module, *, check: bool) -> float:
    """The most memory that Python and NumPy hold for one more launch, MiB."""
    tracemalloc.start()
    case.launch(module, check=check)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def saved(path: Path) -> kernels.Case:
    """A saved launch as a case; nothing is verified."""
    setup = load_launch(path)
    return SavedCase(path.stem, str(path), "", 1, 1, 1, [], lambda: None, setup=setup)


@dataclass(frozen=True)
class SavedCase(kernels.Case):
    """A launch from a file."""

    setup: LaunchSetup | None = None

    def launch(self, module: api.Module, *, check: bool) -> api.LaunchResult:
        """Run it on the memory that the last run left."""
        assert self.setup is not None
        return self.setup.launch(module=module, check=check)


def parse(repeats: int) -> dict[str, Any]:
    """Seconds to parse a module of at least PARSED_LINES lines."""
    text = large_module(PARSED_LINES)
    _progress("parse: a module of kernels with line information")
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        module = parse_module(text)
        seconds.append(time.process_time() - started)
    lines = text.count("\n")
    median = statistics.median(seconds)
    return {
        "lines": lines,
        "instructions": sum(len(f.instructions) for f in module.functions.values()),
        "seconds_median": round(median, 4),
        "lines_per_second": round(lines / median),
    }


def large_module(lines: int) -> str:
    """The attention kernel many times under different names, a .loc before every third line."""
    head, _, body = kernels.attention(2).text.partition(".visible")
    code = []
    for number, line in enumerate(body.splitlines()):
        if number > 30 and number % 3 == 0 and line.rstrip().endswith(";"):
            code.append(f"\t.loc 1 {number} 9")
        code.append(line)
    copies = -(-lines // len(code))
    names = [f".visible .entry k{copy}(" for copy in range(copies)]
    text = "\n".join(code)
    entry = re.compile(r"^ \.entry k\(", re.M)
    return (
        head
        + '.file 1 "attention.py"\n'
        + "\n".join(entry.sub(name, text, count=1) for name in names)
    )


def print_table(document: dict[str, Any]) -> None:
    """For people."""
    print(f"{'case':16} {'check':5} {'warp instr.':>12} {'seconds':>9} {'warp instr./s':>14}")
    for row in document["rows"]:
        check = "on" if row["check"] else "off"
        print(
            f"{row['case']:16} {check:5} {row['warp_instructions']:12,} "
            f"{row['seconds_median']:9.3f} {row['warp_instructions_per_second']:14,}"
        )
    if document["parse"]:
        found = document["parse"]
        print(
            f"parse: {found['lines']:,} lines in {found['seconds_median']:.2f} s "
            f"({found['lines_per_second']:,} lines/s)"
        )


def _progress(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _git(*arguments: str) -> str | None:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    match = re.search(r"model name\s*: (.*)", text)
    return match[1] if match else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
