"""Draws the README's chart: time of the best peer over ours, case by case, losses included.

    python benchmarks/draw_peers.py            # the newest of benchmarks/results/peers

Reads one document of schema flashdsa-peers/1: `gpu`, `date`, `commit`, `peer`, and `rows` with
`group`, `case`, `ours_us`, `peer_us`. Writes docs/assets/peers.png.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "peers"
CHART = ROOT / "docs" / "assets" / "peers.png"
INK, MUTED, FASTER, SLOWER = "#1f2933", "#7b8794", "#1d5fa8", "#d55e00"


def newest() -> Path:
    """The last result by date."""
    return max(RESULTS.glob("*.json"))


def ratio(row: dict[str, Any]) -> float:
    """Time of the best peer over ours: above 1 we are faster."""
    return float(row["peer_us"] / row["ours_us"])


def draw(document: dict[str, Any], target: Path) -> None:
    """One bar a case, in the document's order."""
    rows = document["rows"]
    figure = Figure(figsize=(11, 0.29 * len(rows) + 1.9), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes(
        (0.27, 1.0 / figure.get_figheight(), 0.70, 1 - 1.8 / figure.get_figheight())
    )
    groups = list(dict.fromkeys(row["group"] for row in rows))
    places, place = [], 0.0
    for group in groups:
        axes.text(0, place, f" {group}", fontweight="bold", color=INK, va="center")
        place += 1
        for _ in (row for row in rows if row["group"] == group):
            places.append(place)
            place += 1
        place += 0.5
    ratios = [ratio(row) for row in rows]
    colours = [FASTER if value >= 1 else SLOWER for value in ratios]
    axes.barh(places, ratios, color=colours, height=0.72)
    for at, value, row in zip(places, ratios, rows, strict=True):
        axes.text(
            value + 0.01, at, f"{value:.2f}x  ({row['ours_us']:g} us, peer {row['peer_us']:g})",
            va="center", color=INK, fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_yticks(places, [row["case"] for row in rows])
    axes.set_ylim(place, -0.7)
    axes.set_xlim(0, max(2.0, 1.3 * max(ratios)))
    axes.set_xlabel(
        "time of the fastest peer / ours: blue, we are faster; orange, we are slower", color=INK
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.text(
        0.02, 1 - 0.35 / figure.get_figheight(),
        f"Measured on one {document['gpu']}, {document['date']}, commit {document['commit']}",
        fontsize=12, fontweight="bold", color=INK,
    )  # fmt: skip
    figure.text(
        0.02,
        1 - 0.62 / figure.get_figheight(),
        f"peer: {document['peer']}",
        fontsize=8.5,
        color=MUTED,
    )
    figure.savefig(target)


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
