"""The demo's picture: what was learned, and which keys the queries chose before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from flashdsa.demo.evaluate import ChoiceMap, Evaluation
from flashdsa.demo.options import DemoOptions
from flashdsa.demo.result import Example, StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (16, 10)
DPI = 100
INK = "#1f2933"
MUTED = "#7b8794"
CHOSEN = "#bcd6f2"
FUTURE = "#e4e7eb"
# Dark blue and vermilion: told apart by readers who do not see red and green.
CAUGHT = "#0b3d73"
MISSED = "#d55e00"
SPARSE = "#1d5fa8"
DENSE = "#e8890c"
# A key counts as important to a query from this share of its attention on.
IMPORTANT = 0.02
DOT_AREA = 60.0  # of a key with all of a query's attention, in points squared
MAP_QUERIES = 112  # rows of the maps: the last queries, so that single choices stay visible
SMOOTHED_STEPS = 15
# The title says "learns" if the trained indexer's keys hold this much more of dense attention than
# the untrained indexer's keys and than the newest ones.
LEARNED = 0.1
EXAMPLE_COLUMNS = (0.02, 0.255, 0.395, 0.625, 0.8)  # of the figure's width
EXAMPLE_TOP, EXAMPLE_PITCH = 0.1, 0.029  # of the figure's height
FONT: dict[str, Any] = {"font.family": "DejaVu Sans", "font.size": 11}
MONOSPACE = "DejaVu Sans Mono"


def draw_picture(
    options: DemoOptions, steps: Sequence[StepRecord], evaluations: Sequence[Evaluation]
) -> None:
    """Write `options.picture`; the first and last evaluation give the maps."""
    with style.context(["default", FONT]):
        figure = Figure(figsize=SIZE_INCHES, dpi=DPI, facecolor="white")
        FigureCanvasAgg(figure)
        _draw(figure, options, steps, evaluations)
        figure.savefig(options.picture)


def _draw(
    figure: Figure,
    options: DemoOptions,
    steps: Sequence[StepRecord],
    evaluations: Sequence[Evaluation],
) -> None:
    grid = figure.add_gridspec(
        2,
        2,
        width_ratios=(1, 1.75),
        left=0.105,
        right=0.985,
        top=0.855,
        bottom=0.275,
        hspace=0.42,
        wspace=0.16,
    )
    before, after = evaluations[0], evaluations[-1]
    _title(figure, options, before, after)
    _loss_curve(figure.add_subplot(grid[0, 0]), steps, evaluations)
    _mass_bars(figure.add_subplot(grid[1, 0]), options, before, after)
    _choice_map(
        figure.add_subplot(grid[0, 1]),
        before.choice_map,
        "Before training",
        options.topk,
    )
    lower = figure.add_subplot(grid[1, 1])
    _choice_map(
        lower,
        after.choice_map,
        f"After {after.record.step} steps",
        options.topk,
    )
    lower.set_xlabel("key position in the window (bytes)")
    _map_legend(lower, options)
    _example_lines(figure, after.examples)


def _title(figure: Figure, options: DemoOptions, before: Evaluation, after: Evaluation) -> None:
    of = f"{options.topk} of {options.window:,} bytes"
    mass = after.record.captured
    learned = mass.indexer - max(before.record.captured.indexer, mass.recent) >= LEARNED
    says = f"learns which {of} matter" if learned else f"lets each query see {of}"
    figure.text(
        0.02,
        0.955,
        f"DeepSeek Sparse Attention {says}",
        fontsize=20,
        fontweight="bold",
        color=INK,
    )
    record = after.record
    figure.text(
        0.02,
        0.918,
        f"Byte-level language model on Python's own documentation. Held-out loss "
        f"{record.sparse_loss:.3f} with {options.topk} chosen keys, {record.dense_loss:.3f} with "
        f"all of them (nats per byte, same weights).",
        fontsize=12.5,
        color=MUTED,
    )


def _loss_curve(axes: Axes, steps: Sequence[StepRecord], evaluations: Sequence[Evaluation]) -> None:
    train = np.array([record.train_loss for record in steps])
    number = np.array([record.step for record in steps])
    axes.plot(number, train, color=SPARSE, alpha=0.25, linewidth=1)
    smooth = [train[max(0, end - SMOOTHED_STEPS) : end].mean() for end in number]
    label = f"training, sparse attention (mean of {SMOOTHED_STEPS})"
    axes.plot(number, smooth, color=SPARSE, linewidth=2, label=label)
    records = [evaluation.record for evaluation in evaluations]
    at = [record.step for record in records]
    axes.plot(
        at,
        [record.dense_loss for record in records],
        "s",
        color=DENSE,
        markersize=9,
        markerfacecolor="none",
        markeredgewidth=1.8,
        label="held-out, dense attention",
    )
    axes.plot(
        at,
        [record.sparse_loss for record in records],
        "o",
        color=SPARSE,
        markersize=5,
        label="held-out, sparse attention",
    )
    axes.set_title("Loss on training and held-out text", loc="left", fontweight="bold")
    axes.set_xlabel("training step")
    axes.set_ylabel("loss (nats per byte)")
    highest = max(train.max(), *(record.dense_loss for record in records))
    axes.set_ylim(0, 1.08 * highest)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, loc="best")
    _plain(axes)


def _mass_bars(axes: Axes, options: DemoOptions, before: Evaluation, after: Evaluation) -> None:
    mass = after.record.captured
    bars = [
        (f"{options.topk} random keys", mass.random, MUTED),
        (f"{options.topk} newest keys", mass.recent, MUTED),
        ("indexer, untrained", before.record.captured.indexer, CHOSEN),
        ("indexer, trained", mass.indexer, SPARSE),
        (f"best {options.topk} keys", mass.best, DENSE),
    ]
    labels = [label for label, _, _ in bars]
    shares = [100 * share for _, share, _ in bars]
    drawn = axes.barh(labels, shares, color=[colour for _, _, colour in bars], height=0.66)
    axes.bar_label(drawn, [f"{share:.1f} %" for share in shares], padding=4, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 118)
    axes.set_xticks(range(0, 101, 25))
    axes.set_title(
        f"What {options.topk} keys hold of dense attention", loc="left", fontweight="bold"
    )
    axes.set_xlabel("share of attention probability (%), held-out text")
    _plain(axes)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _choice_map(axes: Axes, choice: ChoiceMap, when: str, topk: int) -> None:
    chosen = choice.chosen[-MAP_QUERIES:].cpu().numpy()  # [rows, T] bool
    attention = choice.attention[-MAP_QUERIES:].cpu().numpy()  # [rows, T]
    num_rows, window = chosen.shape
    query = np.arange(window - num_rows, window)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    image = np.ones((num_rows, window, 3))
    image[chosen] = to_rgb(CHOSEN)
    image[np.arange(window) > query[:, None]] = to_rgb(FUTURE)
    edges = (-0.5, window - 0.5, query[-1] + 0.5, query[0] - 0.5)
    axes.imshow(image, aspect="auto", extent=edges, interpolation="antialiased")
    for caught, colour in ((True, CAUGHT), (False, MISSED)):
        row, key = np.nonzero((attention >= IMPORTANT) & (chosen == caught))
        area = DOT_AREA * attention[row, key]
        axes.scatter(key, query[row], s=area, color=colour, alpha=0.85, linewidths=0)
    axes.plot(query - topk + 0.5, query, color=INK, linestyle=(0, (4, 3)), linewidth=1)
    axes.set_xlim(edges[0], edges[1])
    axes.set_ylim(edges[2], edges[3])
    share = choice.captured
    axes.set_title(
        f"{when}: the chosen keys hold {100 * share:.1f} % of dense attention",
        loc="left",
        fontweight="bold",
    )
    axes.set_ylabel("query position (byte)")
    corner: dict[str, Any] = {
        "transform": axes.transAxes,
        "ha": "right",
        "va": "top",
        "color": MUTED,
    }
    axes.text(0.995, 0.97, "future", **corner)
    _plain(axes)


def _map_legend(axes: Axes, options: DemoOptions) -> None:
    dot: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 7}
    handles = [
        Patch(color=CHOSEN, label=f"chosen ({options.topk} per query)"),
        Line2D([], [], color=CAUGHT, label="attended, chosen", **dot),
        Line2D([], [], color=MISSED, label="attended, missed", **dot),
        Line2D([], [], color=INK, linestyle=(0, (4, 3)), label=f"{options.topk} bytes back"),
    ]
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        ncols=len(handles),
        frameon=False,
        handletextpad=0.5,
    )


def _example_lines(figure: Figure, examples: Sequence[Example]) -> None:
    """One line per example: what was read, how far back it looked, what it found there."""
    if not examples:
        return
    heading = EXAMPLE_TOP + 1.2 * EXAMPLE_PITCH
    titles = (
        "Held-out text: after",
        "a query looks back",
        "to where it read",
        "what followed was",
        "attention on that byte",
    )
    for x, title in zip(EXAMPLE_COLUMNS, titles, strict=True):
        figure.text(x, heading, title, fontweight="bold", color=INK)
    for line, example in enumerate(examples):
        cells = (
            f"…{example.query_text}",
            f"{example.distance:,} bytes",
            f"…{example.key_text}",
            f"{example.followed_by}…",
            f"{100 * example.attention:.1f} %",
        )
        colours = (INK, INK, INK, CAUGHT, INK)
        for x, cell, colour in zip(EXAMPLE_COLUMNS, cells, colours, strict=True):
            height = EXAMPLE_TOP - line * EXAMPLE_PITCH
            figure.text(x, height, cell, family=MONOSPACE, color=colour)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
