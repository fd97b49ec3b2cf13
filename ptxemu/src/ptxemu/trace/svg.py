"""The few SVG elements that the pictures need."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr


class Svg:
    """Collects elements; `str` gives the document."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *, title: str = ""
    ) -> None:
        """A filled rectangle; `title` is shown when the mouse is over it."""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill={quoteattr(fill)}'
        inner = f"><title>{escape(title)}</title></rect>" if title else "/>"
        self._parts.append(f"<rect {place}{inner}")

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
