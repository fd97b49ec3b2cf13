"""Counts what the Hopper indexer's slowest warp executes, for the table of the performance model.

    python tools/count_indexer_paths.py

Prints the lines of `_COUNTED` in src/flashdsa/analysis/model/indexer_sm90.py, with the way to the
first page behind each; emulated runs of every shape; ten minutes, most of them for 112 CTAs.
"""

from __future__ import annotations

import sys

from flashdsa.analysis.model.indexer_sm90 import shapes
from flashdsa.verify.indexer_paths import count_row


def main() -> int:
    """One line a shape."""
    for shape in shapes():
        found = count_row(shape.tokens, shape.ctas, shape.teams)
        scoring, ranking, first = (
            (p.instructions, p.global_trips, p.shared_trips, p.shuffles, p.barriers) for p in found
        )
        row = f"({shape.ctas}, {shape.teams}, {scoring}, {ranking})"
        print(f'"{shape.name}": {row},  # {first}', flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
