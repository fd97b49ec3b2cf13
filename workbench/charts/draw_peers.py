"""Draws the README's chart: time of the best peer over ours, case by case, losses included.

    python -m workbench.charts.draw_peers            # the newest of workbench/results/peers

Reads one document of schema flashdsa-peers/1: `gpu`, `date`, `commit`, `peer`, and `rows` with
`group`, `case`, `ours_us`, `peer_us`. Writes docs/assets/peers.png.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "workbench" / "results" / "peers"
CHART = ROOT / "docs" / "assets" / "peers.png"
INK, MUTED, FASTER, SLOWER = "#1f2933", "#7b8794", "#1d5fa8", "#d55e00"


def newest() -> Path:
    """The last result by date."""
    return max(RESULTS.glob("*.json"))


def ratio(row: dict[str, Any]) -> float:
    """Time of the best peer over ours: above 1 we are faster."""
    return float(row["peer_us"] / row["ours_us"])


def columns(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The groups in two columns, about as long."""
    groups = list(dict.fromkeys(row["group"] for row in rows))
    lengths = [2 + sum(row["group"] == group for row in rows) for group in groups]
    cut = min(range(1, len(groups) + 1), key=lambda n: abs(sum(lengths[:n]) - sum(lengths[n:])))
    return [groups[:cut], groups[cut:]]


def draw_column(axes: Axes, rows: list[dict[str, Any]], groups: list[str], widest: float) -> None:
    """One bar a case, in the document's order."""
    place, cases = 0.0, []
    for group in groups:
        axes.text(
            0, place, f" {group}", fontweight="bold", color=INK, va="center", fontsize=9.8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1}, zorder=3,
        )  # fmt: skip
        place += 1
        for row in (row for row in rows if row["group"] == group):
            cases.append((place, row))
            place += 1
        place += 0.5
    for at, row in cases:
        value = ratio(row)
        axes.barh(at, value, color=FASTER if value >= 1 else SLOWER, height=0.72)
        axes.text(
            value + 0.02, at, f"{value:.2f}x  ({row['ours_us']:g} us, peer {row['peer_us']:g})",
            va="center", color=INK, fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_yticks([at for at, _ in cases], [row["case"] for _, row in cases], fontsize=9)
    axes.set_ylim(place, -0.7)
    axes.set_xlim(0, widest)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def draw(document: dict[str, Any], target: Path) -> None:
    """Two columns of groups of cases."""
    rows = document["rows"]
    sides = columns(rows)
    lengths = [sum(row["group"] in side for row in rows) + 1.5 * len(side) for side in sides]
    height = 0.235 * max(lengths)
    figure = Figure(figsize=(15, height + 1.5), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    for number, side in enumerate(sides):
        axes = figure.add_axes(
            (0.18 + 0.495 * number, 0.75 / (height + 1.5), 0.31, height / (height + 1.5))
        )
        of_side = [ratio(row) for row in rows if row["group"] in side]
        draw_column(axes, rows, side, max(2.0, 1.6 * max(of_side)))
    figure.text(
        0.5, 0.22 / (height + 1.5),
        "time of the fastest peer / ours: blue, we are faster; orange, we are slower",
        color=INK, ha="center",
    )  # fmt: skip
    for up, words, size, colour in (
        (0.32, f"Measured on H200s, {document['date']}: {document['commit']}", 12, INK),
        (0.58, f"peers: {document['peer']}", 9.5, MUTED),
    ):
        figure.text(0.02, 1 - up / (height + 1.5), words, fontsize=size, color=colour)
    figure.savefig(target)
    Image.open(target).convert("RGB").quantize(256).save(target, optimize=True)


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", nargs="?", type=Path, help="default: the newest")
    parser.add_argument("--out", type=Path, default=CHART)
    arguments = parser.parse_args()
    result = arguments.result or newest()
    draw(json.loads(result.read_text()), arguments.out)
    print(f"{arguments.out} from {result}")


if __name__ == "__main__":
    main()
