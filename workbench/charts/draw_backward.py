"""The chart of the Hopper backward beside cuDNN Frontend's: over overlap, and over rows of kv.

    python -m workbench.charts.draw_backward RESULT.json --out CHART.png

A result has `rows`, each of a case: H, S_kv, kind, `shared` (what a query shares with the one
before, 0 to 1), and `ours` and `cudnn` with `hot`, milliseconds back to back.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

COLOURS = {16: "#4f8f5b", 64: "#1d5fa8", 128: "#e8890c"}
SWEPT_ROWS = 32_768
INK, MUTED = "#1f2933", "#7b8794"
LOSS = "#fbe9e7"
"""Behind ratios below 1."""
COLOURS_OF_FILE = 48
"""A third of the bytes, and no difference to be seen."""
TICKS = (0.9, 1, 1.25, 1.5, 2, 3, 4)


def ratio(row: dict[str, Any]) -> float:
    """cuDNN's time over ours."""
    return float(row["cudnn"]["hot"] / row["ours"]["hot"])


def over_overlap(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Lines by heads, at one number of rows."""
    for heads, colour in COLOURS.items():
        points = sorted(
            (100 * row["shared"], ratio(row))
            for row in rows
            if row["H"] == heads and row["S_kv"] == SWEPT_ROWS
        )
        _line(axes, points, colour, f"H = {heads}")
    axes.set_xlabel("rows that a query shares with the query before, %")
    axes.set_title(f"{SWEPT_ROWS:,} rows of kv", fontsize=10, loc="left", color=INK)


def over_rows(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Lines by heads and kind."""
    for heads, colour in COLOURS.items():
        for kind, style in (("corr", "-"), ("random", "--")):
            points = sorted(
                (row["S_kv"], ratio(row))
                for row in rows
                if row["H"] == heads and row["kind"] == kind
            )
            name = "neighbours share 95 %" if kind == "corr" else "random"
            _line(axes, points, colour, f"H = {heads}, {name}", style)
    axes.set_xscale("log", base=2)
    sizes = sorted({row["S_kv"] for row in rows})
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("rows of kv")
    axes.set_title("by indices", fontsize=10, loc="left", color=INK)


def _line(
    axes: Axes, points: list[tuple[float, float]], colour: str, label: str, style: str = "-"
) -> None:
    if not points:
        return
    axes.plot(*zip(*points, strict=True), style, marker="o", ms=4, color=colour, label=label)
    for x, y in points:
        if y < 1:
            axes.annotate(f"{y:.2f}", (x, y), (0, -13), textcoords="offset points", fontsize=8)


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Write the chart, dark on white."""
    figure = Figure(figsize=(10, 4.6), dpi=90, layout="constrained", facecolor="white")
    panels = figure.subplots(1, 2, sharey=True)
    over_overlap(panels[0], rows)
    over_rows(panels[1], rows)
    for axes in panels:
        axes.set_yscale("log")
        axes.set_yticks(TICKS, [f"{tick:g}x" for tick in TICKS])
        axes.set_yticks([], minor=True)
        axes.set_ylim(0.82, 4.2)
        axes.axhspan(0.8, 1, color=LOSS, zorder=0)
        axes.axhline(1, color=MUTED, linewidth=1)
        axes.legend(fontsize=8, frameon=False, loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("cuDNN Frontend's time over ours")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", color=INK)
    figure.savefig(path)
    Image.open(path).convert("RGB").quantize(COLOURS_OF_FILE).save(path, optimize=True)


def main() -> None:
    """Read and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    found = json.loads(chosen.result.read_text())
    rows = [row for row in found["rows"] if row.get("what") == "time"]
    title = f"mla_bwd on one {found['gpu']}, back to back, S = 4,096, topk = 2,048"
    draw(rows, title, chosen.out)


if __name__ == "__main__":
    main()
