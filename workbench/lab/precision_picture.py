"""The plot of the precision measurements: error over K, one panel a type of operands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.lab.precision import ROWS, PrecisionRow

_GREY = "#666666"
_COLOURS = ("#4f8f5b", "#2f6fab", "#7a5ea8", "#c8302c", "#e8890c", "#8a6d3b")


def draw_precision(rows: Sequence[PrecisionRow], path: Path) -> None:
    """Write the picture of measurements."""
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    figure = Figure(figsize=(4.3 * len(dtypes) + 0.6, 5.0), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(dtypes), sharey=True, squeeze=False)[0]
    for axes, dtype in zip(panels, dtypes, strict=True):
        _panel(axes, [row for row in rows if row.dtype == dtype])
    panels[0].set_ylabel("relative error (Frobenius norm)", fontsize=9)
    handles: dict[str, Artist] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=4,
        fontsize=8,
        frameon=False,
    )
    figure.suptitle(
        f"A ({ROWS}, K) times B (K, {ROWS}), standard normal numbers, against float64: rounding "
        "the operands, and adding up in different orders",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _panel(axes: Axes, rows: list[PrecisionRow]) -> None:
    lengths = [row.k for row in rows]
    axes.plot(
        lengths,
        [row.rounding for row in rows],
        color="black",
        linewidth=2,
        label="rounding of the operands",
    )
    for order, colour in zip(rows[0].sums, _COLOURS, strict=True):
        points = [(row.k, row.sums[order]) for row in rows if row.sums[order] > 0]
        style = "-" if order.startswith("wgmma") else "--"
        label = order.partition(" (K=")[0]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(k) for k in lengths], rotation=45, fontsize=8)
    axes.minorticks_off()
    axes.set_ylim(3e-9, 0.2)
    axes.set_title(rows[0].dtype, fontsize=10, loc="left")
    axes.set_xlabel("K", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color="#dddddd", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
