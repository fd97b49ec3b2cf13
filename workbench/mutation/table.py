"""Counts of mutants: a JSON file with a row a kernel, and the table in README.md made of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ptxemu.mutate.runner import CAUGHT, EQUIVALENT, NOT_REACHED, NOTED, REDUNDANT, SURVIVED
from workbench.small_calls.table import TABLE

RESULTS = Path(__file__).parents[1] / "results/mutation"
SCHEMA = "flashdsa-mutation/1"
VERDICTS = (NOT_REACHED, CAUGHT, REDUNDANT, EQUIVALENT, SURVIVED)
BLOCK = re.compile(r"(?<=<!-- counts -->\n).*?(?=<!-- end -->)", re.DOTALL)


def counts_of(verdicts: Mapping[str, int]) -> dict[str, int]:
    """Mutants by verdict; one that only a note tells of has survived."""
    counts = {verdict: verdicts.get(verdict, 0) for verdict in VERDICTS}
    counts[SURVIVED] += verdicts.get(NOTED, 0)
    return {"mutants": sum(counts.values()), **counts}


def read_rows(folder: Path | None = None) -> list[dict[str, Any]]:
    """The rows, in the table's order."""
    path = (folder or RESULTS) / "kernels.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["kernels"] if path.exists() else []
    return rows


def write_row(row: Mapping[str, Any], folder: Path | None = None) -> None:
    """Put the row in the place of the kernel's, or at the end; write the table anew."""
    folder = folder or RESULTS
    rows = {one["name"]: one for one in read_rows(folder)} | {row["name"]: dict(row)}
    lines = ",\n".join(f" {json.dumps(one)}" for one in rows.values())
    head = f'{{"schema": "{SCHEMA}", "kernels": ['
    (folder / "kernels.json").write_text(f"{head}\n{lines}\n]}}\n")
    page = folder / "README.md"
    if page.exists():
        page.write_text(BLOCK.sub(lambda _: markdown(list(rows.values())), page.read_text()))


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The sums, the kernels with survivors, and kernels not counted. Share = caught / (reached -
    redundant - equivalent)."""
    sums = ", ".join(f"{sum(row[verdict] for row in rows)} {verdict}" for verdict in VERDICTS)
    lines = [f"{len(rows)} kernels, {sum(row['mutants'] for row in rows)} mutants: {sums}.", ""]
    lines += ["| kernel | mutants | survived | share |", "| --- | --: | --: | --: |"]
    for row in rows:
        caught, missed = row[CAUGHT], row[SURVIVED]
        if missed:
            share = f"{caught / (caught + missed):.0%}"
            lines.append(f"| `{row['name']}` | {row['mutants']} | {missed} | {share} |")
    counted = {row["name"] for row in rows}
    missing = [f"`{name}`" for name, row in TABLE.items() if row.repeated and name not in counted]
    if missing:
        lines += ["", f"Not counted yet: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"
