"""Checks programs of public repositories before and after a fix of their synchronisation.

    python benchmarks/real_bugs.py --hecbench CLONE --scor CLONE --out results.json

A clone is a folder of git (`git clone`, with its history); sources are read out of it, compiled
with nvcc and never kept here. Sizes are cut down, as `cuts` says, and nothing else. Each side
runs under `--seeds` schedules until it ends or its time is over. The two halves were made by a coin
before any was run: the first byte of the SHA-1 of the name, even for A.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CUTS = dict[str, list[tuple[str, str]]]
"""By file, what is replaced by what: sizes alone."""


@dataclass(frozen=True)
class Bug:
    """A fix of HeCBench."""

    name: str
    commit: str
    source: str = "main.cu"
    more: str = ""
    """Other sources, and options of nvcc."""
    arguments: str = ""
    cuts: CUTS = field(default_factory=dict)

    @property
    def half(self) -> str:
        """The half that the coin has put it into."""
        return "AB"[hashlib.sha1(self.name.encode()).digest()[0] % 2]


BUGS = [
    Bug("scatter", "b7fbb0109", more="--expt-relaxed-constexpr", arguments="512 1"),
    Bug("michalewicz", "6ff5df9bc", arguments="512 1"),
    Bug("lebesgue", "74b4a2c83", "kernels.cu", "main.cpp utils.cpp", "21 1"),
    Bug("hausdorff", "cb4f542f2", more="--expt-relaxed-constexpr", arguments="256 256 1"),
    Bug(
        "fsm",
        "3b04c0ec0",
        arguments="64",
        cuts={
            "parameters.h": [
                ("REPEAT  10", "REPEAT  1"),
                ("TABSIZE 32768", "TABSIZE 64"),
                ("POPCNT  1024", "POPCNT  2"),
                ("POPSIZE 256", "POPSIZE 64"),
            ]
        },
    ),
    Bug("atomicCAS", "a3c11f79d", arguments="1"),
    Bug("merge", "c9378baa3", arguments="4000 1"),
    Bug(
        "linearprobing",
        "87816885f",
        more="linearprobing.cu test.cu",
        arguments="2 1",
        cuts={"linearprobing.h": [("64*1024*1024", "512")]},
    ),
    Bug("asta", "a57980e7b", arguments="-w 0 -r 1 -m 8 -n 64 -g 2"),
    Bug("bh", "40e3c96b4", arguments="64 1"),
    Bug("aop", "53a5a4393", arguments="-runs 1 -timesteps 2 -paths 1"),
    Bug(
        "tqs",
        "c8c72ad64",
        more="kernel.cu host_task.cpp",
        arguments="-w 0 -r 1 -g 2 -s 64 -q 32 -n 1",
    ),
    Bug("p4", "69787e266", arguments="1"),
    Bug("expdist", "3583b2c4d", arguments="512 1"),
    Bug("adv", "e183435b0", more="-Ddfloat=double -Ddlong=int", arguments="7 15 1 1"),
    Bug(
        "aidw", "072420d21", arguments="1 0 1", cuts={"main.cu": [(r"numk \* 1024", "numk * 768")]}
    ),
]


def extracted(clone: Path, commit: str, folder: str, target: Path) -> Path:
    """A folder of a commit, written to `target`."""
    command = ["git", "-C", str(clone), "archive", commit, folder]
    data = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(target, filter="data")
    return target / folder


def checked(folder: Path, words: list[str], arguments: str, options: argparse.Namespace) -> Any:
    """Check a source; its report, or what could not be done."""
    command = [sys.executable, "-m", "ptxemu", "check", *words, "--json", "--quiet"]
    command += [f"--seeds={options.seeds}", f"--time-limit={options.time_limit}", "--arch=sm_90a"]
    done = subprocess.run(
        [*command, "--", *arguments.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    at = done.stdout.find("{\n")
    if at < 0:
        return {"findings": [], "failures": [done.stderr.strip()[-400:]], "stopped": "not run"}
    return json.loads(done.stdout[at:])


def facts(report: Any) -> dict[str, Any]:
    """The levels and codes of a report, and whether the program came to its end."""
    levels = Counter((one["level"], one["code"]) for one in report["findings"])
    return {
        "errors": {code: n for (level, code), n in sorted(levels.items()) if level == "error"},
        "others": {code: n for (level, code), n in sorted(levels.items()) if level != "error"},
        "lines": sorted({_line(one) for one in report["findings"] if one["level"] == "error"}),
        "failures": [failure[:200] for failure in report["failures"]],
        "stopped": report.get("stopped"),
        "seconds": report.get("seconds"),
    }


def _line(finding: Any) -> str:
    sites = [site for site in (finding["first"], finding["second"]) if site]
    return " and ".join(f"{Path(s['source_file'] or '?').name}:{s['source_line']}" for s in sites)


def run_bug(bug: Bug, clone: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Both sides of a fix."""
    row: dict[str, Any] = {"name": bug.name, "commit": bug.commit, "half": bug.half}
    for side, commit in (("before", f"{bug.commit}^"), ("after", bug.commit)):
        with tempfile.TemporaryDirectory() as name:
            folder = extracted(clone, commit, f"src/{bug.name}-cuda", Path(name))
            for file, changes in bug.cuts.items():
                text = (folder / file).read_text()
                for old, new in changes:
                    text = re.sub(old, new, text) if "\\" in old else text.replace(old, new)
                (folder / file).write_text(text)
            words = [bug.source, f"--nvcc=-std=c++17 {bug.more}"]
            row[side] = facts(checked(folder, words, bug.arguments, options))
    return row


def run_scor(clone: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """ScoR's microbenchmarks as published, and with `volatile` removed from the data."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = extracted(clone, "HEAD", "microbenchmarks/src", Path(name))
        for path in sorted(folder.glob("*.cu")):
            if options.only and not re.search(options.only, path.stem):
                continue
            row: dict[str, Any] = {"name": path.stem}
            row["published"] = facts(checked(folder, [path.name], "", options))
            text = path.read_text()
            path.write_text(re.sub(r"\bvolatile\s+(?=unsigned|int)", "", text))
            row["plain"] = facts(checked(folder, [path.name], "", options))
            rows.append(row)
            print(path.stem, *(list(row[side]["errors"]) for side in ("published", "plain")))
    return rows


def main() -> None:
    """Run what the options name, and write one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hecbench", type=Path, metavar="CLONE")
    parser.add_argument("--scor", type=Path, metavar="CLONE")
    parser.add_argument("--only", metavar="REGEX", help="names")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--time-limit", type=float, default=60, help="seconds of each side")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    document: dict[str, Any] = {}
    if options.scor:
        document["scor"] = run_scor(options.scor, options)
    if options.hecbench:
        document["hecbench"] = rows = []
        for bug in BUGS:
            if not options.only or re.search(options.only, bug.name):
                row = run_bug(bug, options.hecbench, options)
                rows.append(row)
                print(json.dumps(row), flush=True)
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
