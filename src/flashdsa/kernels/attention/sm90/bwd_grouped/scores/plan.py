"""Tiles, budgets, barriers and roles of the kernel that computes P and dS, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import ROWS, Tile
from flashdsa.plan import Arrives, Barrier, Role, Sm90Plan, SmemRegion, row_tiles

ITEM_BLOCKS = 2
"""Row blocks of a work item, one for each consumer warpgroup."""
QUERIES = 8
"""Most queries of a group: a byte says which of them name a key."""
WARP_ROWS = 16
"""Rows of a warp in a wgmma."""


@dataclass(frozen=True)
class ScoresPlan(Sm90Plan):
    """One compiled kernel: choices, then derived values. `tile`: of keys. `gather_registers`,
    `consumer_registers`: of a thread."""

    tile: Tile = Tile()
    gather_registers: int = 56
    consumer_registers: int = 224

    @property
    def name(self) -> str:
        return f"mla_bwd_scores{self.tile.suffix}"

    @property
    def batch_chunks(self) -> int:
        """Chunks whose products are one group, and which are freed together."""
        return next(count for count in (3, 2, 1) if self.tile.chunks % count == 0)

    @property
    def q_bytes(self) -> int:
        return self.tile.chunks * ROWS * row_tiles.ROW_BYTES

    @property
    def slots(self) -> int:
        """Chunks that the ring of keys holds: as many as there is room for."""
        room = self.arch.smem_bytes - ITEM_BLOCKS * self.q_bytes
        return room // self.tile.chunk_bytes

    @property
    def buffers(self) -> list[SmemRegion]:
        holds = f"Q of an item, {ITEM_BLOCKS} x {self.tile.chunks} x [64, 64] SW128"
        ring = self.slots * self.tile.chunk_bytes
        return [
            SmemRegion("q", ITEM_BLOCKS * self.q_bytes, 1024, holds),
            SmemRegion("k", ring, 1024, "keys: a ring of [64, 64] SW128"),
        ]

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        return (
            Role("gather", WARPGROUP_SIZE, self.gather_registers, "rows of kv into the ring"),
            # Warpgroups 1 and 2, a row block each.
            Role("score", ITEM_BLOCKS * WARPGROUP_SIZE, self.consumer_registers,
                 f"S, dP, P and dS of {ROWS} rows each"),
        )  # fmt: skip

    @cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        gather, score = self.roles
        return (
            Barrier("k_full", self.slots, gather, Arrives.EVERY_THREAD, score, 0,
                    "a chunk is there"),
            Barrier("k_free", self.slots, score, Arrives.EVERY_WARP, gather, 0,
                    "both row blocks have read the chunk"),
        )  # fmt: skip
