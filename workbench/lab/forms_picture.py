"""The picture of an operand form: what lies where in TMEM, and how A and B lie in shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from flashdsa.dsl.umma import SharedOperand, TmemOperand, UmmaProduct
from flashdsa.hw import TMEM_LANES
from workbench.lab.forms_catalog import OperandForm
from workbench.lab.forms_inputs import cell_index, operand_addresses
from workbench.lab.kernels.operand_forms.sm100.plan import FormPlan

INK, MUTED, NOTHING = "#1f2933", "#7b8794", "#e4e7eb"
LINE_BYTES, CHUNK_BYTES, ELEMENTS = 128, 16, 8
SHOWN_LINES = 16
"""Of an operand's image: two swizzle atoms of 128-byte rows."""

Map = NDArray[np.float64]


def draw_form(form: OperandForm, path: Path) -> None:
    """Write the picture of a form, making its folder."""
    plan = form.plan
    figure = Figure(figsize=(14, 9.6), dpi=100, facecolor="white", layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=(1, 1.02))
    upper, lower = halves
    rows, columns = upper.subplots(1, 2)
    both = plan.product.a_in_tmem
    _tmem(rows, plan, f"row m of {'A and ' if both else ''}D", of_rows=True)
    _tmem(columns, plan, f"column n of D{', k of A' if both else ''}", of_rows=False)
    operands = [("B", plan.product.b)]
    if isinstance(plan.product.a, SharedOperand):
        operands.insert(0, ("A", plan.product.a))
    panels = lower.subplots(1, 2)
    for axes, (name, operand) in zip(panels, operands, strict=False):
        _shared(axes, name, operand)
    if len(operands) == 1:
        _story(panels[1], plan)
    figure.suptitle(
        f"{form.title}   ({form.name}; {form.users}; layout {plan.product.data_path})",
        fontsize=13,
        color=INK,
        x=0.01,
        ha="left",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _tmem(axes: Axes, plan: FormPlan, what: str, *, of_rows: bool) -> None:
    """128 lanes and the used columns, coloured by row or by column of the matrices."""
    shown = np.full((TMEM_LANES, plan.used_columns), np.nan)
    for product in plan.products:
        row, column = cell_index(product)
        values = (row if of_rows else column).astype(np.float64)
        values[row < 0] = np.nan
        shown[:, product.column : product.column + product.columns] = values
        name = "D" if product is plan.product else "source"
        _bracket(axes, product.column, product.columns, name)
    product = plan.product
    if isinstance(product.a, TmemOperand):
        columns = product.a_columns
        part = _a_map(product, of_rows=of_rows)
        shown[:, columns.start : columns.stop] = part
        _bracket(axes, columns.start, len(columns), "A")
    image = axes.imshow(
        shown,
        aspect="auto",
        interpolation="nearest",
        cmap=_map("turbo" if of_rows else "viridis"),
        extent=(0, plan.used_columns, TMEM_LANES, 0),
    )
    axes.set_yticks(range(0, TMEM_LANES + 1, 16))
    axes.set_xlabel("TMEM column", fontsize=9)
    axes.set_ylabel("TMEM lane", fontsize=9)
    of_pair = " (even CTA of the pair)" if plan.cta_group == 2 else ""
    axes.set_title(f"TMEM, coloured by {what}{of_pair}", fontsize=10, loc="left", pad=18)
    axes.tick_params(labelsize=8)
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02)
    bar.ax.tick_params(labelsize=8)


def _a_map(product: UmmaProduct, *, of_rows: bool) -> Map:
    """Row or first k of A's cells; the A of group g counts its rows from g * rows on."""
    a = product.a
    assert isinstance(a, TmemOperand)
    words = len(product.a_columns)
    lanes = np.arange(TMEM_LANES)
    row = lanes if a.distinct else lanes % product.rows
    if product.data_path == "F":
        row = 16 * (lanes // 32) + lanes % 16
    found = np.tile(row[:, None].astype(np.float64), (1, words))
    if not of_rows:
        found[:] = 2.0 * np.arange(words)
    if product.data_path == "F":
        found[lanes % 32 >= 16] = np.nan
    return found


def _bracket(axes: Axes, first: int, count: int, name: str) -> None:
    axes.annotate(
        name,
        (first + count / 2, 0),
        (0, 4),
        textcoords="offset points",
        ha="center",
        fontsize=9,
        color=INK,
    )
    for edge in (first, first + count):
        axes.axvline(edge, color="white", linewidth=1)


def _shared(axes: Axes, name: str, operand: SharedOperand) -> None:
    """The first lines of an operand: every 16 bytes with what they hold, coloured by mn."""
    chunk_mn, chunk_k, first = _chunks(operand, SHOWN_LINES)
    axes.set_facecolor(NOTHING)
    axes.imshow(
        chunk_mn,
        aspect="auto",
        interpolation="nearest",
        cmap=_map("turbo"),
        vmin=0,
        vmax=max(1.0, float(np.nanmax(chunk_mn))),
        alpha=0.55,
        extent=(0, LINE_BYTES // CHUNK_BYTES, len(chunk_mn), 0),
    )
    letter = "m" if name == "A" else "n"
    for line in range(len(chunk_mn)):
        for chunk in range(LINE_BYTES // CHUNK_BYTES):
            mn, k = chunk_mn[line, chunk], chunk_k[line, chunk]
            if np.isnan(mn):
                continue
            text = f"{letter}{mn:.0f} k{k:.0f}-{k + 7:.0f}"
            if operand.major == "MN":
                text = f"{letter}{mn:.0f}-{mn + 7:.0f} k{k:.0f}"
            axes.text(
                chunk + 0.5, line + 0.5, text, ha="center", va="center", fontsize=6.5, color=INK
            )
    axes.set_xticks(np.arange(8) + 0.5, [str(16 * chunk) for chunk in range(8)], fontsize=8)
    axes.set_yticks(
        np.arange(0, len(chunk_mn), 2) + 0.5,
        [f"{first + LINE_BYTES * line}" for line in range(0, len(chunk_mn), 2)],
        fontsize=8,
    )
    axes.set_xlabel("byte in a line of 128", fontsize=9)
    axes.set_ylabel("shared memory offset", fontsize=9)
    swizzles = sorted({piece.tile.swizzle for piece in operand.pieces}, reverse=True)
    names = " and ".join(f"SW{swizzle}" for swizzle in swizzles)
    axes.set_title(
        f"{name} {operand.major}-major, {names}: the first {len(chunk_mn)} lines"
        f"{' of its last tile' if _last_tile(operand) else ''}, coloured by {letter}",
        fontsize=10,
        loc="left",
    )


def _chunks(operand: SharedOperand, limit: int | None) -> tuple[Map, Map, int]:
    """First mn and k of every 16 bytes (lines, 8), and where they begin.

    With a `limit` only of so many lines, the first ones, or those of a last tile of its own.
    """
    addresses = operand_addresses(operand)
    begin = 0 if limit is None else _last_tile(operand)
    first = int(addresses[:, begin:].min()) // LINE_BYTES * LINE_BYTES
    last = int(addresses.max()) // LINE_BYTES * LINE_BYTES + LINE_BYTES
    lines = (last - first) // LINE_BYTES
    lines = lines if limit is None else min(limit, lines)
    shape = (lines * LINE_BYTES // CHUNK_BYTES,)
    mn_of, k_of = np.full(shape, np.nan), np.full(shape, np.nan)
    step_mn, step_k = (1, ELEMENTS) if operand.major == "K" else (ELEMENTS, 1)
    mn, k = np.ix_(range(0, operand.extent, step_mn), range(0, operand.k, step_k))
    chunks = (addresses[mn, k] - first) // CHUNK_BYTES
    is_shown = (chunks >= 0) & (chunks < len(mn_of))
    mn_of[chunks[is_shown]] = np.broadcast_to(mn, chunks.shape)[is_shown]
    k_of[chunks[is_shown]] = np.broadcast_to(k, chunks.shape)[is_shown]
    return mn_of.reshape(lines, -1), k_of.reshape(lines, -1), first


def _last_tile(operand: SharedOperand) -> int:
    """The k from which on the operand lies in its last tile; 0 if that is the only one."""
    last = operand.pieces[-1]
    return 0 if operand.pieces[0].tile == last.tile else operand.k - last.k


def _story(axes: Axes, plan: FormPlan) -> None:
    """In words: how A came into TMEM, and the instructions."""
    product = plan.product
    routes = {
        "rows": "each thread stores with tcgen05.st the row of A that its lane needs",
        "exchange": "D of the source -> registers, bf16 -> halves of a row exchanged by lanes l\n"
        "and l + 64 through shared memory -> tcgen05.st: the whole row in both",
        "transpose": "D of the source -> registers, bf16 -> transposed through shared memory ->\n"
        "tcgen05.st of a row into every group of lanes",
        "copy": "D of the source -> registers, bf16 -> transposed into shared memory, K-major\n"
        "without swizzle -> tcgen05.cp.32x128b.warpx4 into all four groups of lanes",
    }
    text = [f"A: {routes[plan.route]}."]
    if isinstance(product.a, TmemOperand) and product.a.distinct:
        text.append(f"Rows from {product.rows} on are those of the second A.")
    text.append("")
    name = "tcgen05.mma.ws" if product.ws else "tcgen05.mma"
    text += [
        f"{name}.cta_group::{product.cta_group}.kind::f16, M={product.m} N={product.n}",
        f"instruction descriptor {product.instruction:#010x}",
        "",
    ]
    for step, (left, right) in enumerate(product.steps()):
        text.append(f"K step {step}: A at column {left:3d}, B {right:#018x}")
    axes.axis("off")
    axes.text(
        0.02,
        0.98,
        "\n".join(text),
        va="top",
        fontsize=9.5,
        color=INK,
        family="DejaVu Sans Mono",
        transform=axes.transAxes,
    )
    _whole(axes.inset_axes((0.06, 0.1, 0.92, 0.4)), product.b)


def _whole(axes: Axes, operand: SharedOperand) -> None:
    """All lines of B from left to right, coloured by k."""
    _, chunk_k, first = _chunks(operand, None)
    axes.imshow(
        chunk_k.T,
        aspect="auto",
        interpolation="nearest",
        cmap=_map("viridis"),
        extent=(first, first + LINE_BYTES * len(chunk_k), LINE_BYTES, 0),
    )
    axes.set_title("all of B, one line a column, coloured by k", fontsize=10, loc="left")
    axes.set_xlabel("shared memory offset of the line", fontsize=9)
    axes.set_ylabel("byte in the line", fontsize=9)
    axes.tick_params(labelsize=8)


def _map(name: str) -> Colormap:
    return colormaps[name].with_extremes(bad=NOTHING)
