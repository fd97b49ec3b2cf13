"""Writes tables of results into pages: README's draws, the dense-to-sparse guide's run.

    python tools/result_tables.py [--check]

The lines between `<!-- draws -->` and `<!-- /draws -->` are the figures of the draws in
`workbench/results/draws`, of each operation of the newest date that has it, and those of
`<!-- means -->` their means in words; those of `<!-- run -->` are the tables of the newest folder
of `workbench/results/dense_to_sparse`. With --check nothing is written; exit code 1 if a table is
old.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashdsa.bench.result import Row
    from workbench.draws.report import Report

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the workbench is beside this folder
PAGES = (ROOT / "README.md", ROOT / "docs" / "guides" / "dense-to-sparse.md")
RESULTS = Path("workbench/results")
MARKED = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)


def newest_draws() -> dict[Path, list[Row]]:
    """Rows of draws by document: of each operation those of the newest date that has any."""
    from workbench.draws.run import read_draws

    paths = sorted((ROOT / RESULTS / "draws").glob("*.json*"))
    documents = {path: list(read_draws(path)) for path in paths}
    newest: dict[str, str] = {}
    for path, rows in documents.items():
        newest.update((row.operation, path.name[:10]) for row in rows)
    taken = {
        path: [row for row in rows if newest[row.operation] == path.name[:10]]
        for path, rows in documents.items()
    }
    return {path: rows for path, rows in taken.items() if rows}


def newest_reports() -> list[Report]:
    """Reports of the newest draws, in the order of their names."""
    from workbench.draws.report import reports

    found = reports(row for rows in newest_draws().values() for row in rows)
    return sorted(found, key=lambda report: report.operation)


def draws_table() -> str:
    """Figures of the newest draws in Markdown, hot / cold, and where they were drawn; "" without
    any."""
    newest_ones = newest_draws()
    if not newest_ones:
        return ""
    from workbench.draws.report import markdown
    from workbench.draws.run import machine_of, read_document

    runs: dict[str, list[Path]] = {}
    for path in newest_ones:
        runs.setdefault(machine_of(read_document(path)), []).append(path)
    lines = []
    for machine, paths in runs.items():
        folder = paths[0].parent.relative_to(ROOT).as_posix()
        dates = ", ".join(sorted({path.name[:10] for path in paths}))
        lines.append(f"One {machine}, {dates}: [{len(paths)} documents]({folder}).")
    return "\n".join([markdown(newest_reports()), "", *lines, ""])


def means() -> str:
    """Lowest and highest geometric mean of their operations, hot; those of 512 columns apart."""
    spans, newest = [], newest_reports()
    for wide in (False, True):
        some = [one for one in newest if ("-512" in one.operation) == wide]
        figures = [one.figures["hot"].geometric_mean for one in some if "hot" in one.figures]
        spans.append(f"{min(figures):.2f} to {max(figures):.2f}" if figures else "-")
    return f"  {spans[0]} times as fast in the mean of drawn shapes, {spans[1]} with 512 columns"


def run_tables() -> str:
    """Tables of the newest run of `examples/dense_to_sparse` in Markdown."""
    from workbench.dense_to_sparse import read_run, tables

    return f"{tables(read_run(max((ROOT / RESULTS / 'dense_to_sparse').iterdir())))}\n"


TABLES = {"draws": draws_table, "means": means, "run": run_tables}


def updated(text: str) -> str:
    """A page with its tables as the results have them now."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", text)


def main() -> int:
    """Update the pages, or say which is old."""
    old = [page for page in PAGES if updated(page.read_text()) != page.read_text()]
    if "--check" not in sys.argv[1:]:
        for page in old:
            page.write_text(updated(page.read_text()))
        return 0
    for page in old:
        print(f"{page}: not what the results say; run tools/result_tables.py")
    return int(bool(old))


if __name__ == "__main__":
    sys.exit(main())
