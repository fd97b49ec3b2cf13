"""Where the time of a checked run goes: `python benchmarks/shares.py FILE.launch ...`

Each function's own time under cProfile, by the package that it is in; built-in and NumPy functions
count for their callers. cProfile costs calls, so that small functions weigh more than they do.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import re
from collections import Counter
from pathlib import Path
from typing import Any

from ptxemu.saved_launch import load_launch

PARTS = {
    "turn": ("machine", "isa", "sched", "compiled", "memory", "generated", "machine_code"),
    "check": ("check", "unwritten"),
    "engines": ("engines", "numerics", "descriptors"),
    "parsing": ("syntax",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("launch", nargs="+", type=Path, help="saved by workbench launch --save")
    for path in parser.parse_args().launch:
        seconds = by_package(path)
        total = sum(seconds.values())
        share = {
            part: sum(seconds[package] for package in packages) / total
            for part, packages in PARTS.items()
        }
        known = sum(share.values())
        turn, check = share["turn"] / known, share["check"] / known
        row = "  ".join(f"{part} {value:.0%}" for part, value in share.items())
        print(
            f"{path.name}  {row}  other {1 - known:.0%};  at most {1 / (1 - turn):.1f} times as "
            f"fast without the turn, {1 / (1 - turn - check):.0f} without the check, too"
        )


def by_package(path: Path) -> Counter[str]:
    """Seconds of own time by package of ptxemu, of a checked run."""
    launch = load_launch(path)
    profile = cProfile.Profile()
    profile.runcall(launch.launch, check=True)
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    seconds: Counter[str] = Counter()
    for (file, _, _), (_, _, own, _, callers) in stats.items():
        if file == "~" or "site-packages" in file:
            for (caller, _, _), (_, _, of_caller, _) in callers.items():
                seconds[_package(caller)] += of_caller
        else:
            seconds[_package(file)] += own
    return seconds


def _package(file: str) -> str:
    found = re.search(r"src/ptxemu/(\w+)", file)
    return found[1] if found else "generated" if file.startswith("<") else "other"


if __name__ == "__main__":
    main()
