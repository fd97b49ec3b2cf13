"""Draws docs/assets/first-page.png: speed in four bars, transformers with and without flashdsa.

`python -m workbench.first_page` draws results/draws and the newest of results/integrations.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from workbench.draws.chart import save
from workbench.draws.report import by_operation
from workbench.draws.run import machine_of, read_document, rows_of

PICTURE = Path(__file__).parents[1] / "docs" / "assets" / "first-page.png"
RESULTS = Path(__file__).parent / "results"
INK, MUTED, LINE = "#1f2933", "#7b8794", "#cbd2d9"
OURS, PALE, THEIRS = "#1d5fa8", "#9fc3e8", "#d55e00"
OPERATIONS = {
    "forward": "FlashMLA",
    "backward": "cuDNN Frontend",
    "decode packed": "FlashMLA",
    "indexer": "DeepGEMM + top-k",
}
"""Operation of the draws -> the fastest other library."""
MOST_SHOWN = 3.7
WITHOUT, WITH = "sdpa", "flashdsa, indexer=exact"  # exact: the scores of transformers' indexer


def newest(pattern: str) -> dict[str, Any]:
    """The last result by its name, which begins with the date."""
    document: dict[str, Any] = json.loads(max(RESULTS.glob(pattern)).read_text())
    return document


def draw_speed(axes: Axes, ratios_of: dict[str, list[float]]) -> None:
    """One bar an operation: the geometric mean; a line from the lowest to the highest draw."""
    for place, (operation, peer) in enumerate(OPERATIONS.items()):
        ratios = ratios_of[operation]
        mean, low, high = geometric_mean(ratios), min(ratios), max(ratios)
        axes.barh(place, mean, height=0.52, color=OURS, zorder=2)
        axes.plot([low, high], [place] * 2, color=PALE, lw=2, marker="|", ms=11, mew=2, zorder=3)
        if high > MOST_SHOWN:  # the line goes on
            axes.plot(MOST_SHOWN, place, color=PALE, marker=">", ms=9, clip_on=False, zorder=3)
        for x, down, words, size, colour in (
            (-0.03, -0.13, operation, 15, INK),
            (-0.03, 0.22, peer, 10.5, MUTED),
            (1.03, 0, f"{mean:.2f}x", 20, OURS),
            (1.35, 0, f"{low:.2f}", 12, THEIRS if low < 1 else MUTED),
            (1.495, 0, f"to {high:.1f}", 12, MUTED),
            (1.72, 0, f"{len(ratios)} shapes", 12, MUTED),
        ):
            axes.text(
                x, place + down, words, transform=axes.get_yaxis_transform(), fontsize=size,
                color=colour, fontweight="bold" if colour in (OURS, THEIRS) else "normal",
                ha="right" if x < 0 else "left", va="center",
            )  # fmt: skip
    axes.axvline(1, color=INK, lw=1.2, zorder=4)
    axes.set(xlim=(0, MOST_SHOWN), ylim=(len(OPERATIONS) - 0.5, -0.5), xticks=range(4), yticks=[])
    axes.set_xticklabels(["0", "equal", "2x", "3x"], fontsize=11, color=MUTED)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.grid(axis="x", color="#e4e7eb", zorder=0)


def draw_with_and_without(
    axes: Axes, rows: list[dict[str, Any]], key: str, factor: float, words: str
) -> None:
    """Two bars a length; one that ran out of memory is said in words."""
    lengths = sorted({row["length"] for row in rows})
    for row in rows:
        if row["implementation"] not in (WITHOUT, WITH):
            continue
        ours = row["implementation"] == WITH
        place = lengths.index(row["length"]) + (0.2 if ours else -0.2)
        value, fits = row.get(key, 0.0) * factor, key in row
        axes.bar(place, value, 0.37, color=OURS if ours else THEIRS)
        axes.annotate(
            words.format(value) if fits else "out of memory", (place, value), (0, 4),
            textcoords="offset points", ha="center", va="bottom", rotation=0 if fits else 90,
            fontsize=13 if fits else 11, color=OURS if ours else THEIRS, fontweight="bold",
        )  # fmt: skip
    axes.set_xticks(range(len(lengths)), [f"{length // 1024}K" for length in lengths], fontsize=13)
    axes.set_xlabel("tokens", fontsize=11, color=MUTED)
    axes.set_yticks([])
    axes.tick_params(length=0, labelcolor=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(LINE)


def draw() -> None:
    """Speed on the left, transformers on the right."""
    model = newest("integrations/*.json")
    documents = [read_document(path) for path in sorted(RESULTS.glob("draws/*.json*"))]
    (gpu,) = {machine_of(document) for document in documents}
    rows = by_operation(row for document in documents for row in rows_of(document))
    ratios_of = {
        name: [ratio for row in rows[name] if (ratio := row.ratio("hot")) is not None]
        for name in OPERATIONS
    }
    figure = Figure(figsize=(16, 6), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    draw_speed(figure.add_axes((0.125, 0.12, 0.21, 0.67)), ratios_of)
    speed, memory = (figure.add_axes((left, 0.17, 0.18, 0.48)) for left in (0.572, 0.793))
    draw_with_and_without(speed, model["rows"], "prefill_tokens_per_s", 1e-3, "{:.0f}")
    draw_with_and_without(memory, model["rows"], "peak_GiB_above_weights", 1.0, "{:.1f}")
    bars = f"bar: geometric mean; line: lowest to highest shape; warm L2; {gpu}"
    about = f'indexer="exact", 2 layers, bf16, {model["device"].removeprefix("NVIDIA ")}'
    for x, y, words, size, colour in (
        (0.02, 0.91, "Speed beside the fastest other library", 18, INK),
        (0.02, 0.85, bars, 12, MUTED),
        (0.57, 0.91, "DeepSeek-V3.2 in transformers", 18, INK),
        (0.57, 0.85, "alone (sdpa)", 13, THEIRS),
        (0.66, 0.85, "with flashdsa", 13, OURS),
        (0.757, 0.85, about, 12, MUTED),
        (0.57, 0.755, "prefill, thousand tokens/s", 12.9, INK),
        (0.791, 0.755, "memory beyond the weights, GiB", 12.9, INK),
    ):
        weight = "bold" if size >= 13 else "normal"
        figure.text(x, y, words, fontsize=size, color=colour, fontweight=weight)
    save(figure, PICTURE, 64)


if __name__ == "__main__":
    draw()
