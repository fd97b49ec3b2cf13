"""The chart of what trains the indexer on Hopper beside cuDNN Frontend's kernels.

    python -m workbench.charts.draw_training RESULT.json --out CHART.png

A result has `rows`, each of a step: its name, H, S_kv and ids, and of `ours` and `cudnn` `burst`
and `hot`, milliseconds of a call behind a pause and back to back.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

COLOURS = {"hot": "#1d5fa8", "burst": "#e8890c"}
MEANING = {"hot": "back to back", "burst": "one call behind a pause, host included"}
INK, MUTED = "#1f2933", "#7b8794"
COLOURS_OF_FILE = 12
HEIGHT = 0.38
"""Of a bar, where steps are 1 apart."""


def name_of(row: dict[str, Any]) -> str:
    """The step and its sizes."""
    return f"{row['step']}, H = {row['H']}, {row['S_kv']:,} {row['ids']}"


def draw_bars(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """cuDNN's time over ours, and both in milliseconds beside it."""
    for when, shift in (("hot", -0.5), ("burst", 0.5)):
        for place, row in enumerate(rows):
            ours, theirs = row["ours"][when], row["cudnn"][when]
            at = place + shift * HEIGHT
            label = MEANING[when] if place == 0 else None
            axes.barh(at, theirs / ours, HEIGHT, color=COLOURS[when], label=label)
            text = f"{theirs / ours:.2f}x   {theirs:.2f} / {ours:.2f} ms"
            axes.text(theirs / ours + 0.02, at, text, fontsize=7.5, va="center", color=INK)
    axes.set_yticks(range(len(rows)), [name_of(row) for row in rows], fontsize=9)
    axes.invert_yaxis()
    axes.axvline(1, color=MUTED, linewidth=1)
    axes.set_xlim(0, 1.35 * max(r["cudnn"][w] / r["ours"][w] for r in rows for w in COLOURS))
    axes.set_xlabel("cuDNN Frontend's time over ours", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper center", ncols=2, bbox_to_anchor=(0.4, 1.07))


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the chart, dark on white."""
    rows = result["rows"]
    size = 9, 1.2 + 0.4 * len(rows)
    figure = Figure(figsize=size, dpi=72, layout="constrained", facecolor="white")
    draw_bars(figure.subplots(), rows)
    title = f"One {result['gpu']}, S = {result['S']:,}, topk = {result['topk']:,}"
    figure.suptitle(title, fontsize=10, x=0.01, ha="left", color=INK)
    figure.savefig(path)
    Image.open(path).convert("RGB").quantize(COLOURS_OF_FILE).save(path, optimize=True)


def main() -> None:
    """Read and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    draw(json.loads(chosen.result.read_text()), chosen.out)


if __name__ == "__main__":
    main()
