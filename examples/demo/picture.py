"""The picture: what was learned, and which keys the queries chose before and after."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from examples.demo.model import NEAR
from examples.demo.train import DemoOptions, Evaluation
from examples.demo.v4 import RATIO
from flashdsa.output_paths import written

INK, MUTED, FUTURE = "#1f2933", "#7b8794", "#e4e7eb"
SPARSE, DENSE, CHOSEN = "#1d5fa8", "#e8890c", "#bcd6f2"
CAUGHT, MISSED = "#0b3d73", "#d55e00"  # told apart by readers who do not see red and green
FONT: Any = {"font.family": "DejaVu Sans", "font.size": 11, "axes.titleweight": "bold"}
MAP_QUERIES = 112  # rows of the maps: the last queries, so that single choices stay visible
IMPORTANT = 0.02  # share of a query's attention from which on a key is a dot
SMOOTHED_STEPS = 15


def draw_picture(options: DemoOptions, losses: list[float], looks: list[Evaluation]) -> None:
    """Write `options.picture`; losses are the steps', the first and last look give the maps."""
    before, after, topk = looks[0], looks[-1], options.topk
    with style.context(["default", FONT]):
        figure = Figure(figsize=(16, 8.4), dpi=100)
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(2, 2, width_ratios=(1, 1.75), hspace=0.42, wspace=0.16)
        grid.update(left=0.105, right=0.985, top=0.83, bottom=0.14)
        entries, keys = options.form == "v4", options.keys
        of = f"{topk} of {options.window // options.bytes_of_a_key:,} {keys}"
        learned = after.indexer > max(before.indexer, after.newest) + 0.1
        says = f"learns which {of} matter" if learned else f"lets each query see {of}"
        title = f"{'DeepSeek-V4' if entries else 'DeepSeek Sparse Attention'} {says}"
        figure.text(0.02, 0.945, title, fontsize=20, fontweight="bold", color=INK)
        result = (
            "Byte-level language model on Python's own documentation. Held-out loss "
            f"{after.sparse_loss:.3f} with {topk} chosen {keys}, {after.dense_loss:.3f} with all "
            f"of them{f', {NEAR} bytes beside them' if entries else ''} (nats per byte)."
        )
        figure.text(0.02, 0.902, result, fontsize=12.5, color=MUTED)
        _loss_curve(figure.add_subplot(grid[0, 0]), np.array(losses), looks)
        _mass_bars(figure.add_subplot(grid[1, 0]), options, before, after)
        _choice_map(figure.add_subplot(grid[0, 1]), before, "Before training", options)
        lower = figure.add_subplot(grid[1, 1])
        _choice_map(lower, after, f"After {after.step} steps", options)
        lower.set_xlabel(
            f"entry, pooled from {2 * RATIO} bytes, one every {RATIO}"
            if entries
            else "key position in the window (bytes)"
        )
        lower.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4, frameon=False)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        with written(options.picture) as draft:
            figure.savefig(draft)


def _loss_curve(axes: Axes, loss: np.ndarray[Any, Any], looks: list[Evaluation]) -> None:
    step = np.arange(1, len(loss) + 1)
    smooth = [loss[max(0, end - SMOOTHED_STEPS) : end].mean() for end in step]
    axes.plot(step, loss, color=SPARSE, alpha=0.25, lw=1)
    axes.plot(step, smooth, color=SPARSE, lw=2, label=f"training (mean of {SMOOTHED_STEPS} steps)")
    at, sparse, dense = zip(*(look[:3] for look in looks), strict=True)
    axes.plot(at, dense, "s", color=DENSE, ms=9, mfc="none", mew=1.8, label="held-out, dense")
    axes.plot(at, sparse, "o", color=SPARSE, ms=5, label="held-out, sparse")
    axes.set_title("Loss on training and held-out text", loc="left")
    axes.set(xlabel="training step", ylabel="loss (nats per byte)")
    axes.set_ylim(0, 1.08 * max(*loss, *dense))
    axes.legend(frameon=False)


def _mass_bars(axes: Axes, options: DemoOptions, before: Evaluation, after: Evaluation) -> None:
    topk, keys = options.topk, options.keys
    bars = {
        f"{topk} random {keys}": (after.random, MUTED),
        f"{topk} newest {keys}": (after.newest, MUTED),
        "indexer, untrained": (before.indexer, CHOSEN),
        "indexer, trained": (after.indexer, SPARSE),
        f"best {topk} {keys}": (after.best, DENSE),
    }
    shares, colours = zip(*bars.values(), strict=True)
    drawn = axes.barh(list(bars), [100 * share for share in shares], color=colours, height=0.66)
    axes.bar_label(drawn, [f"{share:.1%}" for share in shares], padding=4, color=INK)
    axes.invert_yaxis()
    axes.set(xlim=(0, 118), xticks=range(0, 101, 25))
    axes.set_xlabel("share of attention probability (%), held-out text")
    axes.set_title(f"What {topk} {keys} hold of {options.dense_attention}", loc="left")
    axes.tick_params(axis="y", length=0)


def map_title(when: str, share: float, options: DemoOptions) -> str:
    """Say what the chosen keys hold here; the bars have the mean over the held-out text."""
    held = f"the chosen {options.keys} hold {share:.1%} of {options.dense_attention}"
    return f"{when}: {held} in this window"


def _choice_map(axes: Axes, look: Evaluation, when: str, options: DemoOptions) -> None:
    """Light: chosen; a dot: a key that dense attention looks at, larger with its share."""
    shown = (one[-MAP_QUERIES:].numpy() for one in (look.chosen, look.probability, look.ends))
    chosen, attention, ends = shown
    (num_rows, num_keys), topk = chosen.shape, options.topk
    query = np.arange(options.window - num_rows, options.window)
    image = np.ones((num_rows, num_keys, 3))
    image[chosen] = to_rgb(CHOSEN)
    image[np.arange(num_keys) >= ends[:, None]] = to_rgb(FUTURE)
    edges = (-0.5, num_keys - 0.5, query[-1] + 0.5, query[0] - 0.5)
    axes.imshow(image, aspect="auto", extent=edges, interpolation="nearest")
    axes.fill([], [], color=CHOSEN, label=f"chosen ({topk} per query)")
    dots = {"attended, chosen": (CAUGHT, chosen), "attended, missed": (MISSED, ~chosen)}
    for label, (colour, kind) in dots.items():
        row, key = np.nonzero((attention >= IMPORTANT) & kind)
        axes.scatter(key, query[row], s=60 * attention[row, key], color=colour, alpha=0.85, lw=0)
        axes.plot([], [], "o", ms=7, color=colour, label=label)
    label = f"{topk} {options.keys} back"
    axes.plot(ends - topk - 0.5, query, "--", color=INK, lw=1, label=label)
    axes.set(xlim=edges[:2], ylim=edges[2:], ylabel="query position (byte)")
    share = float(look.probability[look.chosen].sum() / look.probability.sum())
    axes.set_title(map_title(when, share, options), loc="left")
    axes.text(0.995, 0.97, "future", transform=axes.transAxes, ha="right", va="top", color=MUTED)
