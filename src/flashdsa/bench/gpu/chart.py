"""The chart of a GPU result: how much faster than the peers, how far from the floor, plateaus."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashdsa.bench.gpu.result import GpuBenchResult, GpuRow
from flashdsa.bench.gpu.thresholds import GEOMETRIC_MEAN, LEAST_RATIO, PLATEAU_OVER_RANDOM

_OURS, _PEER, _DATA = "#2f6fab", "#b9c4cf", "#c8612c"
_GREY = "#666666"
_LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}


def draw_gpu_chart(result: GpuBenchResult, path: Path) -> None:
    """Write the PNG of a result that has at least one row."""
    batches = [row for row in result.rows if row.kind != "distribution"]
    data = [row for row in result.rows if row.kind == "distribution"]
    panels = [(_times, batches), (_ratios, batches), (_over_floor, batches), (_data, data)]
    shown = [(draw, rows) for draw, rows in panels if rows]
    height = 1.6 + 0.36 * max(len(rows) for _, rows in shown)
    figure = Figure(figsize=(3.9 * len(shown) + 1, height), dpi=120, layout="constrained")
    all_axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for (draw, rows), axes in zip(shown, all_axes, strict=True):
        draw(axes, rows[::-1])
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    commit = str((result.git or {}).get("commit") or "no commit")[:9]
    changed = " + changes" if (result.git or {}).get("dirty") else ""
    best = max(result.read_gbps, key=lambda name: result.read_gbps[name])
    stopped = f"\nstopped at {result.stopped}" if result.stopped else ""
    figure.suptitle(
        f"dsa_topk_indexer, {result.gpu['name']}, {commit}{changed}, {result.date[:10]}; "
        f"reads at {result.read_gbps[best]:.0f} GB/s ({best}){stopped}",
        fontsize=9,
        color=_GREY,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _times(axes: Axes, rows: list[GpuRow]) -> None:
    for place, row in enumerate(rows):
        pair = row.peers[row.best_pair].us_median if row.best_pair else None
        if pair:
            axes.barh(place + 0.2, pair, color=_PEER, height=0.36)
            _write(axes, pair, place + 0.2, f"{pair:.1f}")
        axes.barh(place - 0.2, row.us_median, color=_OURS, height=0.36)
        _write(axes, row.us_median, place - 0.2, f"{row.us_median:.1f}")
    _names(axes, rows)
    _log_scale(axes, (5, 10, 20, 50, 100, 200, 500, 1000))
    times = [row.us_median for row in rows]
    axes.set_xlim(min(times) / 2, 3 * max(times))
    axes.set_title("Microseconds: ours (blue), best pair (grey)", fontsize=9, loc="left")


def _ratios(axes: Axes, rows: list[GpuRow]) -> None:
    for place, row in enumerate(rows):
        axes.barh(place, row.ratio or 0, color=_OURS, height=0.6)
        text = "not measured" if row.ratio is None else f"{row.ratio:.2f}x"
        _write(axes, row.ratio or 0, place, text)
    for mark, style in ((LEAST_RATIO, ":"), (GEOMETRIC_MEAN, "-")):
        axes.axvline(mark, color=_GREY, linewidth=1, linestyle=style, zorder=0)
    _names(axes, rows, shown=False)
    axes.set_xlim(0, 1.25 * max([2.0, *(row.ratio or 0 for row in rows)]))
    axes.set_xlabel(f"lines: {LEAST_RATIO} each, {GEOMETRIC_MEAN} on average", fontsize=8)
    axes.set_title("Time of the best pair / ours", fontsize=9, loc="left")


def _over_floor(axes: Axes, rows: list[GpuRow]) -> None:
    for place, row in enumerate(rows):
        axes.barh(place, row.over_floor - 1, left=1, color=_OURS, height=0.6)
        _write(axes, row.over_floor, place, f"{row.over_floor:.2f}x of {row.floor_us:.1f} us")
    _names(axes, rows, shown=False)
    _log_scale(axes, (1, 2, 5, 10, 20, 50, 100))
    axes.set_xlim(1, 12 * max(row.over_floor for row in rows))
    axes.set_title("Ours / bytes floor", fontsize=9, loc="left")


def _data(axes: Axes, rows: list[GpuRow]) -> None:
    for place, row in enumerate(rows):
        value = row.over_random or 0
        axes.barh(place, value, color=_DATA, height=0.6)
        text = f"{row.over_random:.2f}x" if row.over_random else "no random row"
        _write(axes, value, place, f"{text}, {row.us_median:.1f} us")
    axes.axvline(PLATEAU_OVER_RANDOM, color=_GREY, linewidth=1, linestyle=":", zorder=0)
    axes.axvline(1, color=_GREY, linewidth=1, zorder=0)
    _names(axes, rows)
    axes.set_xlim(0, 1.6 * max([2.0, *(row.over_random or 0 for row in rows)]))
    axes.set_xlabel(f"dotted: {PLATEAU_OVER_RANDOM}, the limit of equal and two", fontsize=8)
    axes.set_title("Adversarial scores / random", fontsize=9, loc="left")


def _log_scale(axes: Axes, ticks: tuple[int, ...]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()


def _names(axes: Axes, rows: list[GpuRow], shown: bool = True) -> None:
    names = [row.name.replace("ragged, ", "").replace(" rows, ", " rows,\n") for row in rows]
    axes.set_yticks(range(len(rows)), names if shown else [""] * len(rows))


def _write(axes: Axes, x: float, y: float, text: str) -> None:
    place = {"textcoords": "offset points", "va": "center", "fontsize": 7.5, "bbox": _LABEL}
    axes.annotate(text, (x, y), (3, 0), **place)  # type: ignore[arg-type]
