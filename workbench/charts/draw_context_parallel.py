"""The chart of context parallelism: measured efficiency of a step over ranks.

    python -m workbench.charts.draw_context_parallel RESULT.json ... --out CHART.png

A step is indexer, forward and backward; its efficiency is one GPU's time over the ranks times
theirs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

FORWARD, BACKWARD = "forward, correlated", "backward, correlated, grad_wire fp32"


def measured_step(found: dict[str, Any]) -> tuple[float, float]:
    """Add up milliseconds of a step on the ranks of a result, and of one GPU with all the work."""
    forward, backward = found["attention"][FORWARD], found["attention"][BACKWARD]
    indexer = found["indexer"]
    spread = max(indexer["zigzag"]["ms of each rank"]) + forward["ms"] + backward["ms"]
    alone = indexer["one GPU, all queries, ms"] + forward["one GPU, ms"]
    return spread, alone + sum(backward["kernel alone, ms"])


def main() -> None:
    """Read, compare, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    measured = {1: 100.0}
    for found in (json.loads(path.read_text()) for path in chosen.results):
        spread, alone = measured_step(found)
        ranks = int(found["ranks"])
        measured[ranks] = 100 * alone / ranks / spread
        print(f"{ranks} ranks: {spread:.1f} ms, efficiency {measured[ranks]:.1f} %")
    figure = Figure(figsize=(5, 3.8), dpi=120, layout="constrained")
    axes = figure.subplots()
    ranks_shown = sorted(measured)
    axes.plot(ranks_shown, [measured[one] for one in ranks_shown], "o-", color="#c8612c")
    axes.set_ylim(0, 105)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks_shown, [str(one) for one in ranks_shown])
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.set_title("Efficiency of a step, percent, measured", fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(chosen.out)


if __name__ == "__main__":
    main()
