"""Budget of the kernel that computes the sinks' gradient, as data."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.hw import WARP_SIZE
from flashdsa.plan import Role

THREADS = 1024
HEADS = 8
"""Heads of a CTA: a warp reads whole sectors of 32 bytes of four rows."""


@dataclass(frozen=True)
class SinkPlan:
    """The compiled kernel; it has nothing to choose, and takes any number of heads."""

    name: str = "mla_bwd_sink"
    roles: tuple[Role, ...] = ()
    smem_bytes: int = THREADS // WARP_SIZE * HEADS * 4
