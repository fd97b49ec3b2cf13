"""Budget of the kernel that pads the backward's heads, as data."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.plan import Role

WARPS = 8
"""Warps of a CTA, each with the rows of a head."""


@dataclass(frozen=True)
class PaddedHeadsPlan:
    """The kernel takes any number of heads, and rows of either length; nothing to choose."""

    name: str = "mla_bwd_padded_heads"
    roles: tuple[Role, ...] = ()
    smem_bytes: int = 0
