"""The chart of a result file: each operation against its ceiling, and peak memory over S."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashdsa.bench.memory import LIMIT_BYTES
from flashdsa.bench.result import BenchResult, MemoryRow, TimingRow

_MIB = 1 << 20
_COLOURS = {"sparse_mla_fwd": "#2f6fab", "mla_bwd": "#c8612c"}
_OTHER = "#4f8f5b"
_GREY = "#666666"


def draw_chart(result: BenchResult, path: Path) -> None:
    """Write the PNG of a result that has at least one row."""
    panels = [draw for draw, rows in ((_rates, result.rows), (_memory, result.memory)) if rows]
    figure = Figure(figsize=(4.8 * len(panels) + 2.2, 3.6), dpi=120, layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for draw, axes in zip(panels, all_axes, strict=True):
        draw(axes, result)
        axes.spines[["top", "right"]].set_visible(False)
    machine = result.machine
    commit = str((result.git or {}).get("commit") or "no commit")[:9]
    where = f"{machine['cpu']}, {result.threads} threads, torch {result.versions['torch']}"
    figure.suptitle(f"{where}, {commit}, {result.date[:10]}", fontsize=9, color=_GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _rates(axes: Axes, result: BenchResult) -> None:
    rows = result.rows[::-1]
    labels = [f"{row.op}\n{_sizes(row)}" for row in rows]
    percent = [100 * row.ratio for row in rows]
    for mark, style, text in ((100, "-", "ceiling"), (50, ":", "half")):
        axes.axvline(mark, color=_GREY, linewidth=1, linestyle=style, zorder=0)
        axes.text(mark, len(rows) - 0.52, f" {text}", fontsize=8, color=_GREY, va="top")
    axes.barh(labels, percent, color=[_COLOURS.get(row.op, _OTHER) for row in rows], height=0.55)
    for place, row in enumerate(rows):
        text = f"{row.rate:.3g} {row.unit}, {_duration(row.seconds_median)}"
        axes.annotate(
            text,
            (100 * row.ratio, place),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_xlim(0, max(145, 1.4 * max(percent)))
    axes.set_xlabel("% of the ceiling measured in the same run", fontsize=8)
    axes.set_title("Rate, median of repeats", fontsize=10, loc="left")
    axes.tick_params(labelsize=8)


def _sizes(row: TimingRow) -> str:
    sizes = " ".join(f"{name}={value}" for name, value in row.problem.items() if name != "dtype")
    return f"{sizes}\n{row.problem['dtype']}"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _memory(axes: Axes, result: BenchResult) -> None:
    by_op: dict[str, list[MemoryRow]] = {}
    for row in result.memory:
        by_op.setdefault(row.op, []).append(row)
    from_lowest = sorted(by_op, key=lambda op: by_op[op][-1].extra_peak_bytes)
    for op, rows in by_op.items():
        queries = [int(row.problem["S"]) for row in rows]
        mib = [row.extra_peak_bytes / _MIB for row in rows]
        colour = _COLOURS.get(op, _OTHER)
        axes.plot(queries, mib, marker="o", color=colour)
        axes.annotate(
            f"{op}: {mib[-1]:.0f} MiB",
            (queries[-1], mib[-1]),
            (0, 8 + 12 * from_lowest.index(op)),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=colour,
        )
    axes.axhline(LIMIT_BYTES / _MIB, color=_GREY, linewidth=1, linestyle=":")
    axes.annotate(
        "limit 1 GiB",
        (queries[0], LIMIT_BYTES / _MIB),
        (0, -11),
        textcoords="offset points",
        fontsize=8,
        color=_GREY,
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(queries, [str(s) for s in queries])
    axes.minorticks_off()
    axes.set_ylim(0, 1.1 * LIMIT_BYTES / _MIB)
    problem = result.memory[0].problem
    sizes = f"H={problem['H']} topk={problem['topk']} S_kv={problem['S_kv']} {problem['dtype']}"
    axes.set_xlabel(f"queries S ({sizes})", fontsize=8)
    axes.set_ylabel("MiB beyond inputs and outputs", fontsize=8)
    axes.set_title("Peak memory", fontsize=10, loc="left")
    axes.tick_params(labelsize=8)
