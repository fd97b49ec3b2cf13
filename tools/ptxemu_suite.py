"""`make test-ptxemu`: ptxemu's own tests; tests/ptxemu_passed.txt says of which files they passed.

    python tools/ptxemu_suite.py                 # runs them; records the files if all pass
    python tools/ptxemu_suite.py --if-changed    # the same, if the record is of other files

CI takes the second. Whoever changes a file of ptxemu/ runs the first and commits the record; if
not, CI runs the tests every time. The tests import nothing outside of ptxemu/ but installed
packages, whose versions constraints.txt has.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "ptxemu_passed.txt"
PINS = Path("constraints.txt")
CACHES = {".hypothesis", ".pytest_cache", ".mypy_cache", ".ruff_cache"}
MADE = {"__pycache__", "build", "site"} | CACHES
"""Folders that a run or a build makes."""


def judged_files(root: Path) -> Iterator[Path]:
    """Every file whose change runs the tests again, relative to the root, in order."""
    for path in sorted([root / PINS, *(root / "ptxemu").rglob("*")]):
        below = path.relative_to(root)
        made = any(part in MADE or part.endswith(".egg-info") for part in below.parts)
        if path.is_file() and not made:
            yield below


def digest(root: Path) -> str:
    """The hash of their names and contents, and of Python's version."""
    found = hashlib.sha256(repr(sys.version_info[:2]).encode())
    for path in judged_files(root):
        content = hashlib.sha256((root / path).read_bytes()).hexdigest()
        found.update(f"{path.as_posix()} {content}\n".encode())
    return found.hexdigest()


def passed(record: Path, root: Path) -> bool:
    """Is the record of the files that are there?"""
    return record.is_file() and record.read_text().strip() == digest(root)


class _Outcomes:
    """Counts outcomes of a run; a plugin of pytest."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.count[report.outcome] += 1


def run_all() -> bool:
    """Run the tests that are not slow; did all pass, none skipped?"""
    outcomes = _Outcomes()
    options = ["-n", "logical", "--dist", "loadfile"]
    code = pytest.main([*options, str(ROOT / "ptxemu" / "tests")], plugins=[outcomes])
    return code == 0 and set(outcomes.count) == {"passed"}


def main() -> int:
    """Run the tests if asked to or if files changed; record what passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--if-changed", action="store_true", help="not if the record is current")
    if parser.parse_args().if_changed and passed(RECORD, ROOT):
        print(f"ptxemu's tests passed with these files: {RECORD.relative_to(ROOT)}")
        return 0
    before = digest(ROOT)
    if not run_all():
        print("not recorded: a test failed or was skipped")
        return 1
    if digest(ROOT) != before:
        print("not recorded: files changed during the run")
        return 1
    RECORD.write_text(f"{before}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
