"""Draws tokens a second and memory of transformers_generate.py's result, length by length.

python -m workbench.charts.draw_transformers result.json --out docs/assets/transformers.png
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

INK, MUTED = "#1f2933", "#7b8794"
COLOURS = {
    "flashdsa, indexer=fp8": "#1d5fa8",
    "flashdsa, indexer=exact": "#5b9bd5",
    "flashdsa, indexer=model": "#bcd4ee",
    "sdpa": "#d55e00",
    "eager": "#f2a65e",
}
PANELS = (
    ("prefill_tokens_per_s", "prefill, thousand tokens/s", 1e-3, "{:.0f}"),
    ("decode_ms_a_token", "a decoded token, ms", 1.0, "{:.1f}"),
    ("peak_GiB_above_weights", "memory beyond the weights, GiB", 1.0, "{:.1f}"),
)
"""Key of a row, title, factor, label of a bar."""


def draw_panel(axes: Axes, rows: list[dict[str, Any]], panel: tuple[str, str, float, str]) -> None:
    """A group of bars a length; what ran out of memory is said in words."""
    key, title, factor, words = panel
    lengths = sorted({row["length"] for row in rows})
    width = 0.86 / len(COLOURS)
    for row in rows:
        place = (
            lengths.index(row["length"])
            - 0.43
            + width * (list(COLOURS).index(row["implementation"]) + 0.5)
        )
        if key in row:
            value = row[key] * factor
            axes.bar(place, value, width * 0.92, color=COLOURS[row["implementation"]])
            label, colour = words.format(value), INK
        else:
            value, label, colour = 0.0, " out of memory", MUTED
        axes.annotate(
            label, (place, value), (0, 2), textcoords="offset points", ha="center", va="bottom",
            fontsize=8, color=colour, rotation=0 if key in row else 90,
        )  # fmt: skip
    axes.set_xticks(range(len(lengths)), [f"{length:,} tokens" for length in lengths])
    axes.set_xlim(-0.5, len(lengths) - 0.5)
    axes.set_title(title, loc="left", fontweight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)


def draw(document: dict[str, Any], target: Path) -> None:
    """Three panels side by side and one legend."""
    figure = Figure(figsize=(15, 4.8), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        draw_panel(axes, document["rows"], panel)
    marks = [figure.axes[0].bar(0, 0, color=colour) for colour in COLOURS.values()]
    figure.legend(marks, list(COLOURS), loc="lower center", ncols=len(COLOURS), frameon=False)
    figure.suptitle(
        "transformers' DeepSeek-V3.2, two layers with its head sizes, batch 1, bf16, on one "
        f"{document['device']} ({document['date'][:10]})",
        x=0.01, ha="left", color=INK,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(target)
    Image.open(target).convert("RGB").quantize(64).save(target, optimize=True)


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    draw(json.loads(chosen.result.read_text()), chosen.out)


if __name__ == "__main__":
    main()
