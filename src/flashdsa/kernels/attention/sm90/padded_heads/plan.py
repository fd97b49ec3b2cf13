"""Budget of the kernel that pads the backward's heads, as data."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.kernels.attention.sm90.core.tile import Tile
from flashdsa.plan import Role

WARPS = 8
"""Warps of a CTA, each with the rows of a head."""


@dataclass(frozen=True)
class PaddedHeadsPlan:
    """The compiled kernel, which takes any number of heads; tile: its columns."""

    tile: Tile = Tile()
    roles: tuple[Role, ...] = ()
    smem_bytes: int = 0

    @property
    def name(self) -> str:
        return f"mla_bwd_padded_heads{self.tile.suffix}"
