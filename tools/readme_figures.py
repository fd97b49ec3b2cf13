"""Writes the README's ratios to the fastest peer from the newest results.

    python tools/readme_figures.py [--check]

The lines between `<!-- figures -->` and `<!-- /figures -->` are one table: a row an operation.
Those between `<!-- draws -->` and `<!-- /draws -->`, where the page has them, are the figures of
the draws in `workbench/results/draws`: of all documents of the newest date. With --check nothing
is written; exit code 1 if a table is old.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = Path("workbench/results")
BLOCK = re.compile(r"(<!-- figures -->\n).*?(<!-- /figures -->)", re.DOTALL)
DRAWS = re.compile(r"(<!-- draws -->\n).*?(<!-- /draws -->)", re.DOTALL)
HEAD = "| operation | GPU | cases | geometric mean | lowest | numbers |\n|---|---|---|---|---|---|"


class Figure(NamedTuple):
    """An operation's ratios: the time of the fastest peer over ours, a case each."""

    operation: str
    gpu: str
    ratios: list[float]
    result: Path

    def row(self) -> str:
        """A row of the table."""
        cells = (
            self.operation,
            self.gpu.removeprefix("NVIDIA ").partition(" ")[0],
            f"{len(self.ratios)}",
            f"{geometric_mean(self.ratios):.2f}",
            f"{min(self.ratios):.2f}",
            f"[{self.result.name}]({self.result.as_posix()})",
        )
        return f"| {' | '.join(cells)} |"


def newest(pattern: str) -> tuple[Path, dict[str, Any]]:
    """The last result by its name, which begins with the date."""
    path = max(ROOT.glob(f"{RESULTS}/{pattern}"))
    return path.relative_to(ROOT), json.loads(path.read_text())


def figures() -> Iterator[Figure]:
    """One an operation; the indexer's file of all batches stands for its rows among the peers'."""
    path, document = newest("peers/*.json")
    by_operation: dict[str, list[float]] = {}
    for row in document["rows"]:
        operation = row["group"].partition(",")[0]
        by_operation.setdefault(operation, []).append(row["peer_us"] / row["ours_us"])
    for operation, ratios in by_operation.items():
        if operation != "indexer":
            yield Figure(operation, document["gpu"], ratios, path)
    path, document = newest("indexer/*all*.json")
    ratios = [row["pair_us"] / row["ours_us"] for row in document["rows"]]
    yield Figure("indexer", document["gpu"], ratios, path)


def table() -> str:
    """The table in Markdown."""
    return "\n".join([HEAD, *(figure.row() for figure in figures())])


def draws_table() -> str:
    """Figures of the newest draws in Markdown, hot / cold, and the documents; "" without any."""
    paths = sorted((ROOT / RESULTS / "draws").glob("*.json"))
    newest_ones = [path for path in paths if path.name[:10] == paths[-1].name[:10]]
    if not newest_ones:
        return ""
    from workbench.draws.report import markdown, reports
    from workbench.draws.run import read_draws

    found = reports(row for path in newest_ones for row in read_draws(path))
    places = [path.relative_to(ROOT) for path in newest_ones]
    links = ", ".join(f"[{place.name}]({place.as_posix()})" for place in places)
    return f"{markdown(found)}\n\nNumbers: {links}\n"


def updated(text: str) -> str:
    """The page with its tables as the results have them now."""
    text = DRAWS.sub(lambda found: f"{found[1]}{draws_table()}{found[2]}", text)
    return BLOCK.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", text)


def main() -> int:
    """Update the README, or say that it is old."""
    text = README.read_text()
    if "--check" not in sys.argv[1:]:
        README.write_text(updated(text))
    elif updated(text) != text:
        print(f"{README}: not what the results say; run tools/readme_figures.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
