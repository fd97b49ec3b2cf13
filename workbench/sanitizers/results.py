"""What a sanitizer's process said of a case, for workbench/sanitizers/run.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.sanitizers.cases import DONE

QUOTED_LINES = 8
"""Of a report, in the JSON."""


@dataclass(frozen=True)
class Result:
    """What became of one case under one tool.

    Attributes:
        reports: errors, or hazards; None: it said nothing of them. warnings: hazards that are less.
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
        """Of the table."""
        if self.trouble:
            return self.trouble.split(":")[0]
        found = f"{self.reports}" + (f" + {self.warnings} warnings" if self.warnings else "")
        return f"{found} ({self.seconds:.0f} s)"

    @property
    def clean(self) -> bool:
        """Nothing was reported of a case that ended well."""
        return not self.trouble and self.reports == 0 and self.warnings == 0


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
    """From what a process wrote.

    Args:
        exit_code: None if it was stopped after `limit` seconds.
    """
    counts, trouble = counts_in(output), ""
    if exit_code is None:
        trouble = f"did not end in {limit:.0f} s"
    elif counts is None or "before first instrumented API call" in output:
        trouble = f"did not start: {last_line(output)}"
    elif DONE not in output:
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
    begin = next(
        (
            i
            for i, line in enumerate(lines)
            if re.match(r"(Error|Warning|Invalid|Uninit|Barrier)", line)
        ),
        0,
    )
    return tuple(lines[begin : begin + QUOTED_LINES])


def table(results: Sequence[Result], tools: Sequence[str]) -> str:
    """A row a case, a column a tool: what was reported, and the seconds."""
    cells = {(result.case, result.tool): result.cell for result in results}
    cases = list(dict.fromkeys(result.case for result in results))
    rows = [["", *tools], *([case, *(cells[case, tool] for tool in tools)] for case in cases)]
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns under each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
