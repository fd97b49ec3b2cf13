"""Writes `python -m workbench plan`'s tables, and its picture, into the kernels' pages.

    python tools/plan_tables.py [--check]

A page says where: the lines between `<!-- plan KERNEL ARCH: TITLE -->` and `<!-- end -->` are the
table whose title begins so. With --check nothing is written; exit code 1 if a page is old.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from PIL import Image

from flashdsa.cli.console import TextTable, table_as_markdown
from flashdsa.kernels.catalog import KERNELS, MLA_BWD
from flashdsa.plan.kernel_spec import find_kernel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the workbench is beside this folder

from workbench.cli.plan_picture import draw_plan  # noqa: E402
from workbench.cli.plan_tables import describe, tables  # noqa: E402

DOCS = ROOT / "docs"
PICTURE = DOCS / "assets" / "mla-bwd-sm100.png"
BLOCK = re.compile(r"(<!-- plan (\w+) (\w+): (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def tables_of(kernel: str, arch: str) -> list[TextTable]:
    """The plan's tables, as the command shows them without other options."""
    return tables(describe(find_kernel(KERNELS, kernel, arch)))


def updated(text: str) -> str:
    """A page with its tables as they are now."""

    def table(found: re.Match[str]) -> str:
        start, kernel, arch, title, _, end = found.groups()
        one = next(t for t in tables_of(kernel, arch) if t.title.startswith(title))
        return f"{start}\n{table_as_markdown(one)}\n\n{end}"

    return BLOCK.sub(table, text)


def main() -> int:
    """Update the pages, or say which are old."""
    pages = sorted((DOCS / "kernels").glob("*.md"))
    old = [page for page in pages if updated(page.read_text()) != page.read_text()]
    if "--check" in sys.argv[1:]:
        for page in old:
            print(f"{page}: not what `python -m workbench plan` says; run tools/plan_tables.py")
        return 1 if old else 0
    for page in old:
        page.write_text(updated(page.read_text()))
    draw_plan(MLA_BWD.variants[0], PICTURE)
    Image.open(PICTURE).convert("RGB").quantize(256).save(PICTURE, optimize=True)  # a third
    return 0


if __name__ == "__main__":
    sys.exit(main())
