"""Memory maps drawn as SVG: time to the right, addresses downwards, colours for who wrote."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

import numpy as np
from numpy.typing import NDArray

from ptxemu.events import Space
from ptxemu.trace.classes import Roles
from ptxemu.trace.memory_map import Memory, MemoryMap, Raster, writer_name

# The few SVG elements that the pictures need.


class Svg:
    """Collects elements; `str` gives the document."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A filled rectangle."""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill={quoteattr(fill)}'
        self._parts.append(f"<rect {place}/>")

    def path(self, data: str, fill: str) -> None:
        """A filled path."""
        self._parts.append(f'<path d="{data}" fill={quoteattr(fill)}/>')

    def line(self, start: tuple[float, float], end: tuple[float, float], stroke: str) -> None:
        """A line one unit wide."""
        (x1, y1), (x2, y2) = start, end
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke={quoteattr(stroke)}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 12,
        anchor: str = "start",
        turn: int = 0,
    ) -> None:
        """Text whose baseline is at y; turned by `turn` degrees."""
        turned = f' transform="rotate({turn} {x:g} {y:g})"' if turn else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{turned}>'
            f"{escape(words)}</text>"
        )

    def __str__(self) -> str:
        head = (
            '<svg xmlns="http://www.w3.org/2000/svg" '
            f'width="{self.width:g}" height="{self.height:g}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" '
            'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" shape-rendering="crispEdges">'
        )
        ground = f'<rect width="{self.width:g}" height="{self.height:g}" fill="#ffffff"/>'
        return "\n".join([head, ground, *self._parts, "</svg>", ""])


_LEFT, _RIGHT, _TOP = 96, 24, 64
_CELL_WIDTH = 1
_PANEL_GAP = 76
_LEGEND_WIDTH = 190
_LEGEND_LINE = 20
_UNWRITTEN = "#eeeeee"
_READ = "#00000059"
_MIN_PANEL_HEIGHT = 120
_MAX_CTAS = 2


def draw(
    memory_map: MemoryMap,
    *,
    roles: Roles | None = None,
    memories: Sequence[Memory] | None = None,
    title: str = "",
) -> str:
    """The SVG of some memories, one panel each; by default of the CTAs of the lowest number."""
    if memories is None:
        memories = first_memories(memory_map)
    rasters = [memory_map.raster(memory) for memory in memories]
    names = sorted({name for r in rasters for name in _legend_names(r, roles or {})}, key=_natural)
    colours = dict(zip(names, _palette(len(names)), strict=True))
    width = _LEFT + _RIGHT + max([600, *(r.writers.shape[1] * _CELL_WIDTH for r in rasters)])
    per_line = max(1, (width - _LEFT) // _LEGEND_WIDTH)
    legend_lines = -(-(len(names) + 3) // per_line)
    heights = [_cell_height(r) * r.writers.shape[0] for r in rasters]
    panels = sum(height + _PANEL_GAP for height in heights)
    svg = Svg(width, _TOP + legend_lines * _LEGEND_LINE + panels + 10)
    svg.text(_LEFT, 28, title or "Memory over logical time", size=17)
    svg.text(_LEFT, 48, _explanation(memory_map), size=12)
    _legend(svg, colours, per_line)
    top = float(_TOP + legend_lines * _LEGEND_LINE + 26)
    for raster, height in zip(rasters, heights, strict=True):
        _panel(svg, raster, top, colours, roles or {}, memory_map.ctas)
        top += height + _PANEL_GAP
    return str(svg)


def first_memories(memory_map: MemoryMap) -> list[Memory]:
    """Shared memory and TMEM of the first CTAs, two at most."""
    found = sorted(memory_map.touches, key=lambda m: (m[1], m[0].value))
    ctas = sorted({owner for _, owner in found})[:_MAX_CTAS]
    return [memory for memory in found if memory[1] in ctas]


def _explanation(memory_map: MemoryMap) -> str:
    text = "strong colour: somebody still reads it; pale: free to be overwritten; dark: read now"
    return text + (" (truncated: the run has more accesses)" if memory_map.truncated else "")


def _legend_names(raster: Raster, roles: Roles) -> list[str]:
    return [writer_name(writer, roles) for writer in raster.names]


def _natural(name: str) -> tuple[str, int]:
    head, _, tail = name.rpartition(" ")
    return (head, int(tail)) if tail.isdigit() else (name, -1)


_DISTINCT = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
"""Told apart by colour-blind readers too (Okabe and Ito, "Color Universal Design", 2008)."""


def _palette(count: int) -> list[str]:
    """Colours that differ; the same for the same number of writers."""
    colours = list(_DISTINCT[:count])
    for number in range(len(colours), count):
        hue = (0.58 + number * 0.381966) % 1
        red, green, blue = colorsys.hls_to_rgb(hue, 0.35 if number % 2 else 0.65, 0.72)
        colours.append(f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}")
    return colours


def _pale(colour: str) -> str:
    parts = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - (255 - part) * 0.32):02x}" for part in parts)


def _cell_height(raster: Raster) -> int:
    rows = len(raster.writers)
    return max(2, -(-_MIN_PANEL_HEIGHT // rows))


def _legend(svg: Svg, colours: dict[str, str], per_line: int) -> None:
    entries = [("not written yet", _UNWRITTEN), *colours.items(), ("read", "#8a8a8a")]
    for number, (name, colour) in enumerate(entries):
        x = _LEFT + number % per_line * _LEGEND_WIDTH
        y = _TOP + number // per_line * _LEGEND_LINE
        svg.rect(x, y, 13, 13, colour)
        svg.text(x + 19, y + 11, name)


def _panel(
    svg: Svg,
    raster: Raster,
    top: float,
    colours: dict[str, str],
    roles: Roles,
    ctas: dict[int, str],
) -> None:
    space, owner = raster.memory
    rows, columns = raster.writers.shape
    height, width = rows * _cell_height(raster), columns * _CELL_WIDTH
    is_shared = space is Space.SHARED
    what = "Shared memory" if is_shared else "TMEM"
    svg.text(_LEFT, top - 8, f"{what} of {ctas.get(owner, owner)}", size=14)
    svg.rect(_LEFT, top, width, height, _UNWRITTEN)
    for number, writer in enumerate(raster.names, start=1):
        colour = colours[writer_name(writer, roles)]
        mine = raster.writers == number
        _cells(svg, mine & raster.is_live, top, _cell_height(raster), colour)
        _cells(svg, mine & ~raster.is_live, top, _cell_height(raster), _pale(colour))
    _cells(svg, raster.is_read, top, _cell_height(raster), _READ)
    _axes(svg, raster, top, height, width)
    middle = top + height / 2
    label = "CTA-relative shared address" if is_shared else "TMEM column"
    svg.text(20, middle, label, anchor="middle", turn=-90)
    svg.text(_LEFT + width / 2, top + height + 36, "logical time (ticks)", anchor="middle")


def _axes(svg: Svg, raster: Raster, top: float, height: float, width: float) -> None:
    is_shared = raster.memory[0] is Space.SHARED
    for time in _round_steps(0, raster.end_time, 10):
        x = _LEFT + width * time / raster.end_time
        svg.line((x, top + height), (x, top + height + 5), "#333333")
        svg.text(x, top + height + 19, f"{time:g}", anchor="middle")
    rows = raster.writers.shape[0]
    last = raster.first + rows * raster.per_row
    for address in _round_steps(raster.first, last, 16 if is_shared else 8):
        y = top + (address - raster.first) / raster.per_row * _cell_height(raster)
        svg.line((_LEFT - 5, y), (_LEFT, y), "#333333")
        text = f"0x{address:x}" if is_shared else str(address)
        svg.text(_LEFT - 9, y + 4, text, anchor="end", size=11)


def _round_steps(first: float, last: float, base: int) -> list[int]:
    """Return at most ten round numbers.

    They are multiples of a power of `base` or of half of one, or less.
    """
    step = base ** max(0, math.floor(math.log(max(last - first, 1), base)))
    while (last - first) / step < 5 and step % 2 == 0:
        step //= 2
    while (last - first) / step > 10:
        step *= 2
    return list(range(math.ceil(first / step) * step, int(last) + 1, step))


def _cells(svg: Svg, chosen: NDArray[np.bool_], top: float, cell: int, fill: str) -> None:
    """Fill cells; equal neighbours along time, and then equal rows, become one rectangle."""
    pieces: list[str] = []
    row = 0
    while row < len(chosen):
        same = row + 1
        while same < len(chosen) and np.array_equal(chosen[same], chosen[row]):
            same += 1
        edges = np.flatnonzero(np.diff(np.concatenate(([0], chosen[row].view(np.int8), [0]))))
        y, height = top + row * cell, (same - row) * cell
        for start, end in edges.reshape(-1, 2).tolist():
            x, width = _LEFT + start * _CELL_WIDTH, (end - start) * _CELL_WIDTH
            pieces.append(f"M{x} {y:g}h{width}v{height}h-{width}z")
        row = same
    if pieces:
        svg.path("".join(pieces), fill)
