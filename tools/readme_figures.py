"""Writes the README's ratios to the fastest peer from the newest draws.

    python tools/readme_figures.py [--check]

The lines between `<!-- draws -->` and `<!-- /draws -->` are the figures of the draws in
`workbench/results/draws`: of all documents of the newest date. With --check nothing is written;
exit code 1 if the table is old.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the workbench is beside this folder
README = ROOT / "README.md"
RESULTS = Path("workbench/results")
DRAWS = re.compile(r"(<!-- draws -->\n).*?(<!-- /draws -->)", re.DOTALL)


def draws_table() -> str:
    """Figures of the newest draws in Markdown, hot / cold, and the documents; "" without any."""
    paths = sorted((ROOT / RESULTS / "draws").glob("*.json*"))
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
    """The page with its table as the results have it now."""
    return DRAWS.sub(lambda found: f"{found[1]}{draws_table()}{found[2]}", text)


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
