"""The chart of draws: a strip of dots an operation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from flashdsa.output_paths import written
from workbench.draws.report import CONDITIONS, Figures, by_operation
from workbench.draws.run import Document, machine_of, rows_of

INK, MUTED, FASTER, SLOWER, LOSS = "#1f2933", "#7b8794", "#1d5fa8", "#d55e00", "#fbe9e7"


def _spans(seeds: Sequence[int]) -> str:
    """Numbers in words: "1, 3 to 5"."""
    spans: list[list[int]] = []
    for seed in sorted(set(seeds)):
        if spans and seed == spans[-1][-1] + 1:
            spans[-1].append(seed)
        else:
            spans.append([seed])
    ends = (dict.fromkeys([span[0], span[-1]]) for span in spans)
    return ", ".join(" to ".join(map(str, of_span)) for of_span in ends)


def draw_draws(documents: list[Document], target: Path) -> None:
    """Schema flashdsa-draws/1: a strip of dots an operation and condition, a dot a draw."""
    rows = [row for document in documents for row in rows_of(document)]
    strips = [
        (f"{operation}, {condition}", sorted(ratios))
        for operation, of_it in by_operation(rows).items()
        for condition in CONDITIONS
        if (ratios := [ratio for row in of_it if (ratio := row.ratio(condition)) is not None])
    ]
    height = 0.42 * len(strips)
    figure = Figure(figsize=(9, height + 1.3), dpi=100, layout="constrained", facecolor="white")
    axes = figure.subplots()
    jitter = random.Random(0)
    for place, (_, ratios) in enumerate(strips):
        figures = Figures.of(ratios)
        assert figures is not None
        places = [place + jitter.uniform(-0.28, 0.28) for _ in ratios]
        colours = [FASTER if ratio >= 1 else SLOWER for ratio in ratios]
        axes.scatter(ratios, places, s=7, c=colours, alpha=0.55, linewidths=0)
        axes.plot([figures.geometric_mean] * 2, [place - 0.36, place + 0.36], color=INK, lw=2)
        axes.plot([figures.p5] * 2, [place - 0.25, place + 0.25], color=MUTED, lw=1.5)
        words = f"{figures.lowest:.2f}  {figures.p5:.2f}  {figures.geometric_mean:.2f}"
        axes.text(
            1.01, place, words, transform=axes.get_yaxis_transform(), va="center", fontsize=9,
            color=INK,
        )  # fmt: skip
    lowest, highest = (f(ratio for _, ratios in strips for ratio in ratios) for f in (min, max))
    ticks = [
        tick for tick in (0.5, 0.7, 1, 1.5, 2, 3, 5, 10) if 0.8 * lowest < tick < 1.2 * highest
    ]
    axes.set(xscale="log", ylim=(len(strips) - 0.4, -0.6))
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(strips)), [name for name, _ in strips], fontsize=9)
    axes.axvline(1, color=INK, linewidth=1)
    axes.grid(axis="x", color=LOSS, zorder=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time of the fastest peer / ours, a dot a draw; right: lowest, 5 %, mean")
    seeds: dict[str, list[int]] = {}
    for document in documents:
        seeds.setdefault(machine_of(document), []).append(document["seed"])
    where = "; ".join(f"{machine}, seeds {_spans(some)}" for machine, some in seeds.items())
    axes.set_title(where, fontsize=10, loc="left", color=INK)
    save(figure, target, 128)


def save(figure: Figure, target: Path, colours: int) -> None:
    """Write it with few colours: a third of the bytes, and no difference to be seen."""
    with written(target) as draft:
        figure.savefig(draft)
        Image.open(draft).convert("RGB").quantize(colours).save(draft, optimize=True)
