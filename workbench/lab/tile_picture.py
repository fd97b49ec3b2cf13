"""A picture of B's tile in shared memory: 128-byte rows of 16-byte chunks, by logical row."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from flashdsa.output_paths import written
from ptxemu.descriptors import operand_addresses
from workbench.lab.kernels.majorness.plan import CUTS
from workbench.lab.operand_view import decode_matrix

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from workbench.lab.majorness import Study
    from workbench.lab.operand_view import Recording

CHUNK = 16
ROW = 128
SHOWN_ROWS = 32
"""128-byte rows of shared memory in the picture, from the start of B."""


def draw_tiles(study: Study, recordings: dict[str, Recording], path: Path) -> None:
    """Draw a panel for each major; the first MMA reads the frames through its descriptor."""
    figure = Figure(figsize=(5.2 * len(recordings) + 0.6, 8.6), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(recordings), squeeze=False)[0]
    for axes, (major, recording) in zip(panels, recordings.items(), strict=True):
        _draw(axes, study, major, recording)
    plan = study.plan
    figure.suptitle(
        f"B = dO$^T$ ({plan.n} dims x {plan.k} heads, {plan.dtype}) in shared memory, "
        f"swizzle {plan.swizzle}, {study.arch}",
        fontsize=11,
    )
    with written(path) as draft:
        figure.savefig(draft)


def _offsets(
    study: Study, major: str, recording: Recording, part: int, step: int
) -> NDArray[np.int64]:
    """Find each element (n, k) of an MMA's B, in bytes from the start of B."""
    plan = study.plan
    bits = int(recording.descriptors[CUTS.index(plan.cut), part, step, 1])
    found = operand_addresses(
        decode_matrix(study.arch, bits),
        major=major.upper(),
        shape=(plan.n, plan.step_k),
        element_bytes=plan.element_bytes,
    )
    return found - recording.image_address - plan.b_offset


def _draw(axes: Axes, study: Study, major: str, recording: Recording) -> None:
    plan, per_row = study.plan, ROW // CHUNK
    name, other = ("n", "k") if major == "k" else ("k", "n")
    rows = min(SHOWN_ROWS, plan.b_bytes // ROW)
    first_read = set((_offsets(study, major, recording, 0, 0) // CHUNK).ravel().tolist())
    for part, step in np.ndindex(2, plan.steps):
        found = _offsets(study, major, recording, part, step)
        first = part * plan.part_k + step * plan.step_k
        for mn, k in np.argwhere(found % CHUNK == 0):
            number = int(found[mn, k]) // CHUNK
            row, column = divmod(number, per_row)
            if row >= rows:
                continue
            line, along = (mn, k + first) if major == "k" else (k + first, mn)
            red, green, blue, _ = colormaps["tab20"](int(line) % 16 / 20 + 0.01)
            colour = (0.5 + red / 2, 0.5 + green / 2, 0.5 + blue / 2)  # light: text stands out
            box = Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="white", lw=0.6)
            axes.add_patch(box)
            for text, y, size in ((f"{name}{line}", 0.36, 5.6), (f"{other}{along}+", 0.74, 4.4)):
                axes.text(column + 0.5, row + y, text, ha="center", va="center", fontsize=size)
            if number in first_read:
                corner = column + 0.05, row + 0.07
                frame = Rectangle(corner, 0.9, 0.86, fill=False, edgecolor="#222222", lw=1.4)
                axes.add_patch(frame)
    axes.set_xlim(0, per_row)
    axes.set_ylim(rows, 0)
    axes.set_xticks([c + 0.5 for c in range(per_row)], [str(CHUNK * c) for c in range(per_row)])
    axes.set_yticks(
        [r + 0.5 for r in range(0, rows, 4)], [f"+{ROW * r}" for r in range(0, rows, 4)]
    )
    axes.tick_params(labelsize=7, length=0)
    axes.set_xlabel("byte in a row of 128", fontsize=8, color="#666666")
    axes.set_ylabel("bytes from the start of B", fontsize=8, color="#666666")
    axes.set_title(
        f"{major.upper()}-major: a logical row {name} is 16-byte pieces along {other}\n"
        f"colour: logical row {name}; framed: read by part 0, step 0",
        fontsize=8.5,
        loc="left",
    )
    axes.spines[:].set_visible(False)
