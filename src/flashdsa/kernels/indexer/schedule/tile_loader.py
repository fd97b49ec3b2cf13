"""Functions that a schedule needs from an architecture's load warps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TileLoader:
    """Functions of a load warp, all of whose lanes call; the first argument is its context.

    Attributes:
        announce: (context, number, tile, lane, plan) describes the CTA's tile `number` to the
            consumers; returns this lane's page id of the tile's first pages, if it has pages.
        load_pages: (context, tile, page ids, depth, lane, plan) loads them; None: no pages.
        finish: (context, number, lane, plan) says that no tile comes any more.
    """

    announce: Callable[..., Any]
    load_pages: Callable[..., None] | None
    finish: Callable[..., None]
