"""The picture of an overlap measurement: ratios by size of the groups, and along the sequence."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.overlap.measure import Overlap

_INK, _MUTED = "#1f2933", "#7b8794"
_COLOURS = ("#7b8794", "#1d5fa8", "#e8890c", "#4f8f5b", "#7a5ea8", "#c8302c")


def draw_overlap(found: Overlap, title: str, path: Path) -> None:
    """Write the picture; its suffix says the format."""
    figure = Figure(figsize=(11, 4.6), dpi=110, layout="constrained", facecolor="white")
    sizes, sequence = figure.subplots(1, 2, width_ratios=(1, 1.5))
    _by_size(sizes, found)
    _along(sequence, found)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", color=_INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _by_size(axes: Axes, found: Overlap) -> None:
    sizes = [group.queries for group in found.groups]
    axes.plot(sizes, sizes, "--", color=_MUTED, linewidth=1, label="nothing in common")
    axes.axhline(1, linestyle=":", color=_MUTED, linewidth=1, label="all the same")
    spread = [
        [group.ratio - min(group.smallest, group.ratio) for group in found.groups],
        [max(group.largest, group.ratio) - group.ratio for group in found.groups],
    ]
    ratios = [group.ratio for group in found.groups]
    axes.errorbar(
        sizes, ratios, yerr=spread, marker="o", capsize=3, color=_COLOURS[1], label="measured"
    )
    for size, ratio in zip(sizes, ratios, strict=True):
        axes.annotate(
            f"{ratio:.2f}", (size, ratio), (6, -12), textcoords="offset points", fontsize=9
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    ticks = [tick for tick in (1, 2, 4, 8, 16) if tick <= 2 * max(sizes)]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("queries of a group")
    axes.set_ylabel("union of a group over a query's rows")
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)


def _along(axes: Axes, found: Overlap) -> None:
    for number, group in enumerate(found.groups):
        places = [(part + 0.5) / len(group.along) for part in range(len(group.along))]
        colour = _COLOURS[number % len(_COLOURS)]
        axes.plot(places, group.along, color=colour, label=f"groups of {group.queries}")
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("place in the sequence: 0 its first query, 1 its last")
    axes.set_ylabel("union of a group over a query's rows")
    axes.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
