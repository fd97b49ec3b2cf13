"""The chart of a result: each case as a share of its ceiling."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from flashdsa.bench.result import OURS, BenchResult
from flashdsa.output_paths import written

_OURS, _GREY = "#1d5fa8", "#666666"


def draw_chart(result: BenchResult, path: Path) -> None:
    """Write the PNG of a result that has at least one timed row."""
    bars = []
    for row in result.rows:
        for condition, times in row.times.items():
            if OURS not in times:
                continue
            share = row.rate(condition) / row.ceiling_rate(condition)
            name = f"{row.operation}, {row.case}, {condition}"
            bars.append((name, share, f"{times[OURS].median:.4g} us"))
    figure = Figure(figsize=(10, 1 + 0.24 * len(bars)), dpi=100, layout="constrained")
    axes = figure.subplots()
    for place, (_, value, rest) in enumerate(bars):
        axes.barh(place, value, color=_OURS)
        axes.annotate(
            f"{value:.2f}, {rest}", (value, place), (3, 0),
            textcoords="offset points", va="center", fontsize=7.5,
        )  # fmt: skip
    axes.axvline(1, color=_GREY, linewidth=1)
    axes.set_yticks(range(len(bars)), [bar[0] for bar in bars], fontsize=7.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max([1.0, *(bar[1] for bar in bars)]))
    axes.set_xlabel("our share of the ceiling")
    axes.spines[["top", "right"]].set_visible(False)
    gpus = result.machine["gpus"]
    where = gpus[0]["name"] if gpus else f"{result.machine['cpu']}, {result.threads} threads"
    commit = str((result.git or {}).get("commit") or "no commit")[:9]
    figure.suptitle(f"{where}, {commit}, {result.date[:10]}", fontsize=9, color=_GREY)
    with written(path) as draft:
        figure.savefig(draft)
