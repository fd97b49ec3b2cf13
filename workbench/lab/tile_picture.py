"""A picture of B's tile in shared memory: 128-byte rows of 16-byte chunks, by logical row."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from ptxemu.descriptors import Tcgen05Descriptor, WgmmaDescriptor, decode, operand_addresses
from workbench.lab.kernels.majorness.plan import CUTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from workbench.lab.majorness import Study
    from workbench.lab.operand_view import Recording

CHUNK = 16
ROW = 128
SHOWN_ROWS = 32
"""128-byte rows of shared memory in the picture, from the start of B."""
_GREY = "#666666"
_MARK = "#222222"
_FAMILY = {"sm_90a": "wgmma", "sm_100a": "tcgen05"}


def draw_tiles(study: Study, recordings: dict[str, Recording], path: Path) -> None:
    """One panel for each major; the frames are what the first MMA reads through its
    descriptor."""
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _chunk_owners(study: Study, major: str, recording: Recording) -> NDArray[np.int64]:
    """For each 16-byte chunk of B: the logical row n (K-major) or k (MN-major) it belongs to, and
    the first element along the other dimension; (chunks, 2), -1 where none."""
    plan = study.plan
    size = plan.b_bytes // CHUNK
    owners = np.full((size, 2), -1, dtype=np.int64)
    base = recording.image_address + plan.b_offset
    for part in range(2):
        for step in range(plan.steps):
            found = _addresses(study, major, recording, part, step) - base
            first = part * plan.part_k + step * plan.step_k
            for mn, k in np.ndindex(*found.shape):
                if found[mn, k] % CHUNK == 0:
                    line, along = (mn, k + first) if major == "k" else (k + first, mn)
                    owners[found[mn, k] // CHUNK] = line, along
    return owners


def _addresses(
    study: Study, major: str, recording: Recording, part: int, step: int
) -> NDArray[np.int64]:
    plan = study.plan
    bits = int(recording.descriptors[CUTS.index(plan.cut), part, step, 1])
    descriptor = decode(bits, _FAMILY[study.arch])
    assert isinstance(descriptor, WgmmaDescriptor | Tcgen05Descriptor)
    return operand_addresses(
        descriptor,
        major=major.upper(),
        shape=(plan.n, plan.step_k),
        element_bytes=plan.element_bytes,
    )


def _draw(axes: Axes, study: Study, major: str, recording: Recording) -> None:
    from matplotlib import colormaps

    plan = study.plan
    owners = _chunk_owners(study, major, recording)
    per_row = ROW // CHUNK
    rows = min(SHOWN_ROWS, plan.b_bytes // ROW)
    read = _addresses(study, major, recording, 0, 0) - recording.image_address - plan.b_offset
    first_chunks = set((read // CHUNK).ravel().tolist())
    palette = colormaps["tab20"]
    name = "n" if major == "k" else "k"
    for number in range(rows * per_row):
        line, along = (int(x) for x in owners[number])
        row, column = divmod(number, per_row)
        colour = (1.0, 1.0, 1.0)
        if line >= 0:  # light, so that text and frames stand out
            red, green, blue, _ = palette(line % 16 / 20 + 0.01)
            colour = (0.5 + red / 2, 0.5 + green / 2, 0.5 + blue / 2)
        axes.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="white", lw=0.6))
        if line >= 0:
            text = f"{name}{line}"
            axes.text(column + 0.5, row + 0.36, text, ha="center", va="center", fontsize=5.6)
            other = "k" if major == "k" else "n"
            text = f"{other}{along}+"
            axes.text(column + 0.5, row + 0.74, text, ha="center", va="center", fontsize=4.4)
        if number in first_chunks:
            corner = column + 0.05, row + 0.07
            axes.add_patch(Rectangle(corner, 0.9, 0.86, fill=False, edgecolor=_MARK, lw=1.4))
    axes.set_xlim(0, per_row)
    axes.set_ylim(rows, 0)
    axes.set_xticks([c + 0.5 for c in range(per_row)], [str(CHUNK * c) for c in range(per_row)])
    axes.set_yticks(
        [r + 0.5 for r in range(0, rows, 4)], [f"+{ROW * r}" for r in range(0, rows, 4)]
    )
    axes.tick_params(labelsize=7, length=0)
    axes.set_xlabel("byte in a row of 128", fontsize=8, color=_GREY)
    axes.set_ylabel("bytes from the start of B", fontsize=8, color=_GREY)
    meaning = {
        "k": "K-major: a logical row n is 16-byte pieces along k",
        "mn": "MN-major: a logical row k is 16-byte pieces along n",
    }
    axes.set_title(
        f"{meaning[major]}\ncolour: logical row {name}; framed: read by part 0, step 0",
        fontsize=8.5,
        loc="left",
    )
    axes.spines[:].set_visible(False)
