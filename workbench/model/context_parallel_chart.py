"""The chart of `python -m workbench model context-parallel`: times of a step and efficiency over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.model.context_parallel import ENOUGH, Layer, Step

_COLOURS = {
    "indexer": "#2f6fab",
    "forward": "#4f8f5b",
    "backward": "#c8612c",
    "communication": "#666666",
}


def draw(
    layer: Layer, steps: Sequence[Step], path: Path, measured: Mapping[int, float] | None = None
) -> None:
    """Write the picture.

    Args:
        path: where to; its ending says in which format.
        measured: efficiency by ranks, drawn as points.
    """
    figure = Figure(figsize=(10, 3.8), dpi=120, layout="constrained")
    times, efficiency = figure.subplots(1, 2)
    ranks = [one.ranks for one in steps]
    for name, colour in _COLOURS.items():
        values = [one.exposed if name == "communication" else getattr(one, name) for one in steps]
        shown = [(at, 1e3 * value) for at, value in zip(ranks, values, strict=True) if value > 0]
        times.plot(*zip(*shown, strict=True), color=colour, marker=".", label=name)
    times.set_yscale("log")
    times.set_title("Milliseconds of one layer's step", fontsize=9, loc="left")
    times.legend(fontsize=8, frameon=False)
    efficiency.plot(ranks, [100 * one.efficiency for one in steps], color="#2f6fab", marker=".")
    efficiency.axhline(100 * ENOUGH, color="#666666", linewidth=1, linestyle=":")
    if measured:
        efficiency.plot(
            list(measured), [100 * one for one in measured.values()], "o", color="#c8612c"
        )
    efficiency.set_ylim(0, 105)
    against = "model (blue), measured (red)" if measured else "model"
    efficiency.set_title(f"Efficiency, percent: {against}", fontsize=9, loc="left")
    for axes in (times, efficiency):
        _over_ranks(axes, ranks)
    figure.suptitle(
        f"Context parallelism: {layer.seq_len} tokens, H={layer.heads}, topk={layer.topk}, "
        f"{layer.layout}, {layer.grad_wire} wire",
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _over_ranks(axes: Axes, ranks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks[::2], [str(one) for one in ranks[::2]], fontsize=8)
    axes.set_xlabel("ranks", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
