"""A kernel's shared memory and TMEM over the steps of its timeline, as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from flashdsa.output_paths import written
from flashdsa.plan import LiveRange, SmemPlan, TmemPlan
from flashdsa.plan.kernel_spec import Variant

COLOURS = {
    "q": "#7fa8d1", "q_rope": "#a9c6e3", "do": "#e3a06f", "kv": "#8dbb8a",
    "s": "#d98c8c", "ds": "#c76d7e", "partial": "#b39bcb", "p": "#c4b0da", "dp": "#a386bf",
    "ring": "#c2a878", "dkv": "#c2a878", "dq": "#6fb3b0", "dq_rope": "#9bcfcb",
}  # fmt: skip
GREY = "#666666"
PALE = "#c9c9c9"
LEAST_SHARE = 0.022
"""Share of a memory that a line of text needs."""
CELL_CHARACTERS = 19


class Band(NamedTuple):
    """A region, or one of its stages if they have live ranges of their own.

    Attributes:
        start, size: in bytes or columns. lines: equal parts to mark in it.
        holds: what lies there without live ranges.
    """

    name: str
    start: float
    size: float
    lines: int
    holds: str
    live: Sequence[LiveRange]
    is_shared: bool


def draw_plan(variant: Variant, path: Path) -> None:
    """Write the picture of a kernel with tensor memory and a timeline: PNG or SVG, by the file's
    suffix. The timeline's first step comes before the period, its last behind it."""
    timeline = variant.spec.load_timeline()
    steps = len(timeline)
    figure = Figure(figsize=(12.5, 11.5), dpi=130, layout="constrained")
    smem, tmem, roles = figure.subplots(3, 1, sharex=True, height_ratios=(5.2, 3.6, 2.0))
    shared, tensor = variant.plan.smem, variant.plan.tmem
    _draw_memory(smem, _smem_bands(shared), shared.total, steps)
    smem.set_title(
        f"Shared memory of a CTA, bytes: {shared.total:,} of {shared.capacity:,}",
        fontsize=10, loc="left",
    )  # fmt: skip
    _draw_memory(tmem, _tmem_bands(tensor), tensor.allocated, steps)
    tmem.set_title(
        f"Tensor memory, columns of 128 lanes: {tensor.allocated} of {tensor.capacity}",
        fontsize=10, loc="left",
    )  # fmt: skip
    _draw_roles(roles, timeline)
    figure.suptitle(
        f"{variant.spec.name} on {variant.spec.arch}: what lives where while block b goes through. "
        "Hatched: memory that several regions share in turns.",
        fontsize=9, color=GREY, x=0.01, ha="left",
    )  # fmt: skip
    with written(path) as draft:
        figure.savefig(draft, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _smem_bands(plan: SmemPlan) -> list[Band]:
    places = list(zip(plan.regions, plan.offsets, strict=True))
    spans = [(at, at + region.bytes) for region, at in places]
    bands = []
    for region, at in places:
        shared = _is_shared((at, at + region.bytes), spans)
        if all(live.stage is None for live in region.live):
            size = float(region.bytes)
            lines = region.stages
            bands.append(Band(region.name, at, size, lines, region.holds, region.live, shared))
            continue
        size = region.bytes / region.stages
        for stage in range(region.stages):
            live = [one for one in region.live if one.stage in (None, stage)]
            name, start = f"{region.name}[{stage}]", at + stage * size
            bands.append(Band(name, start, size, 1, region.holds, live, shared))
    return bands


def _tmem_bands(plan: TmemPlan) -> list[Band]:
    regions = plan.regions
    spans = [(region.column, region.column + region.columns) for region in regions]
    return [
        Band(r.name, r.column, r.columns, 1, r.holds, r.live, _is_shared(span, spans))
        for r, span in zip(regions, spans, strict=True)
    ]


def _is_shared(span: tuple[int, int], spans: Sequence[tuple[int, int]]) -> bool:
    return sum(start < span[1] and span[0] < stop for start, stop in spans) > 1


def _runs(live: LiveRange, steps: int) -> Iterator[tuple[int, int, str]]:
    """(first step, steps, label) of each run of neighbouring steps that the range covers.

    A run that began in the previous block counts as this block's.
    """
    wraps = live.first > live.last
    inside = range(1, steps - 1) if wraps else range(steps)
    covered = [step for step in inside if live.covers(step)]
    for _, run in groupby(enumerate(covered), lambda pair: pair[1] - pair[0]):
        found = [step for _, step in run]
        began_before = wraps and found[0] <= live.last
        label = live.holds.replace("(b+1)", "(b)") if began_before else live.holds
        yield found[0], len(found), label


def _draw_memory(axes: Axes, bands: Sequence[Band], total: int, steps: int) -> None:
    small = [band for band in bands if band.size < LEAST_SHARE * total]
    for band in bands:
        colour = COLOURS.get(band.name.split("[")[0], PALE)
        for live in band.live or (LiveRange(0, steps - 1, band.holds),):
            for first, count, label in _runs(live, steps):
                shown = label if band not in small else ""
                _draw_run(axes, band, colour, (first, count), shown)
        for line in range(1, band.lines):
            at = band.start + line * band.size / band.lines
            axes.hlines(at, 0, steps, color="white", linewidth=0.5, linestyle=":")
    # A band's name stands beside it; one that overlays others is named with the first of them.
    starts: dict[float, list[Band]] = {}
    for band in bands:
        if band not in small:
            starts.setdefault(band.start, []).append(band)
    for start, together in starts.items():
        text = "\n".join(f"{band.name}  {band.size:,.0f}" for band in together)
        middle = start + together[0].size / 2
        axes.text(steps + 0.06, middle, text, fontsize=8, va="center")
    if small:
        text = "\n".join(f"{band.name}  {band.size:,.0f}" for band in small)
        axes.text(steps + 0.06, total, text, fontsize=6.5, va="top", color=GREY)
    axes.set_ylim(total, 0)
    axes.set_yticks(list(starts), [f"{start:,.0f}" for start in starts])
    _frame(axes, steps)


def _draw_run(axes: Axes, band: Band, colour: str, steps: tuple[int, int], label: str) -> None:
    first, count = steps
    axes.add_patch(
        Rectangle(
            (first, band.start), count, band.size, facecolor=colour, edgecolor="white",
            linewidth=1.0, hatch="/" if band.is_shared else None,
        )
    )  # fmt: skip
    if label:
        axes.text(
            first + count / 2, band.start + band.size / 2, textwrap.fill(label, 16 * count),
            fontsize=8, ha="center", va="center",
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.6},
        )  # fmt: skip


def _draw_roles(axes: Axes, timeline: Sequence[Any]) -> None:
    names = [name for name in timeline[0]._fields if name not in ("step", "name")]
    for row, name in enumerate(names):
        for line in timeline:
            text = textwrap.fill(getattr(line, name), CELL_CHARACTERS)
            axes.text(line.step + 0.04, row + 0.5, text, fontsize=7, va="center")
    axes.set_ylim(len(names), 0)
    axes.set_yticks([row + 0.5 for row in range(len(names))], names, fontsize=8)
    axes.hlines(range(1, len(names)), 0, len(timeline), color=PALE, linewidth=0.6)
    axes.set_title("Who does what", fontsize=10, loc="left")
    axes.set_xticks([line.step + 0.5 for line in timeline], [line.name for line in timeline])
    axes.set_xlabel("steps: the MMAs in the order of their issue (not to scale)", fontsize=8)
    _frame(axes, len(timeline))


def _frame(axes: Axes, steps: int) -> None:
    axes.set_xlim(0, steps)
    axes.tick_params(length=0, labelbottom=True, labelsize=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.spines[:].set_visible(False)
    for step in range(steps + 1):
        edge = step in (1, steps - 1)
        axes.axvline(step, color=GREY if edge else PALE, linewidth=1.2 if edge else 0.4, zorder=3)
