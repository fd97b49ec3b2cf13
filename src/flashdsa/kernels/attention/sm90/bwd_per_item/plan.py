"""Tiles, budgets, barriers and roles of the fused backward, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import (
    BF16,
    CHUNK,
    CHUNK_BYTES,
    CHUNKS,
    D_V,
    ROWS,
    TILE_KEYS,
)
from flashdsa.plan import Arrives, Barrier, Role, Sm90Plan, SmemRegion

HEADS = (8, 16, 32, 64, 128)
QUERIES = (1, 2, 4, 8)
MORE = (0, 2, 4)
IMAGE_BYTES = TILE_KEYS * ROWS * BF16
HALF_ROWS = ROWS // 2
"""Rows of which S and dP are one wgmma: N is HALF_ROWS rows of Q and of dO each."""
HALF_BYTES = HALF_ROWS * CHUNK * BF16
"""Bytes of half a chunk of Q, or of dO: 64 columns of 32 rows."""
V_CHUNKS = D_V // CHUNK
ROWS_CHUNK_BYTES = 4 * HALF_BYTES
"""Bytes of 64 columns: Q and dO of the first 32 rows, then of the others."""
ROPE_PLACE = V_CHUNKS * ROWS_CHUNK_BYTES
"""Bytes from the rows' first to the columns that only Q has: of the first 32 rows, then of the
others."""
ROWS_BYTES = ROPE_PLACE + 2 * HALF_BYTES
LEFT_CHUNKS = 4
"""Chunks of 64 dims of dQ that role score multiplies; role right has the others."""
ORDER = (0, 1, 4, 5, 2, 3, 6, 7, 8)
"""Order in which a tile's chunks become free, and so come and are multiplied."""
STATISTICS = 2
"""fp32 a row: lse and delta, both scaled."""


@dataclass(frozen=True)
class FusedPlan(Sm90Plan):
    """One compiled kernel: choices, then derived values.

    Attributes:
        queries: of a group: 64 / H, at least 1.
        more: 0, or of a group of the kernels with a spool, which are taken instead where queries
            have much in common.
        slots: dKV goes to rows of its own for each key of each list, which are summed in order:
            see `slots/places.py`.
        gather_registers, consumer_registers, dkv_registers: of a thread.
    """

    queries: int = 1
    more: int = 0
    slots: bool = False
    gather_registers: int = 32
    consumer_registers: int = 192
    dkv_registers: int = 96

    def __post_init__(self) -> None:
        """Check the choices against the architecture.

        Raises:
            BudgetError: names the region or role that does not fit.
        """
        if self.queries not in QUERIES:
            raise ValueError(f"queries: expected one of {QUERIES}; got {self.queries}")
        if self.more not in MORE:
            raise ValueError(f"more: expected one of {MORE}; got {self.more}")
        self.check()

    @property
    def name(self) -> str:
        """Exported name of its function."""
        kind = f"_or_{self.more}" * (self.more > 0) + "_slots" * self.slots
        return f"mla_bwd_fused_group{self.queries}{kind}"

    @property
    def buffers(self) -> list[SmemRegion]:
        """Shared memory regions before the mbarriers, in order."""
        return [
            SmemRegion("rows", ROWS_BYTES, 1024, "Q and dO of 64 rows, by chunks and halves"),
            SmemRegion("k", CHUNKS * CHUNK_BYTES, 1024, "keys of a tile, 9 x [64, 64] SW128"),
            SmemRegion("p", IMAGE_BYTES, 1024, "P, [key][row] SW128"),
            SmemRegion("ds", IMAGE_BYTES, 1024, "dS, [key][row] SW128"),
            SmemRegion("statistics", ROWS * STATISTICS * 4, 16, "lse and delta of the rows"),
        ]

    @property
    @cache  # noqa: B019 - plans are few
    def gather(self) -> Role:
        """Warpgroup 0."""
        return Role("gather", WARPGROUP_SIZE, self.gather_registers, "the keys of each tile")

    @property
    @cache  # noqa: B019 - plans are few
    def score(self) -> Role:
        """Warpgroup 1."""
        does = "S, dP, P, dS, and dims 0-255 of dQ"
        return Role("score", WARPGROUP_SIZE, self.consumer_registers, does)

    @property
    @cache  # noqa: B019 - plans are few
    def right(self) -> Role:
        """Warpgroup 2."""
        does = "Q and dO of each item, dims 256-575 of dQ"
        return Role("right", WARPGROUP_SIZE, self.consumer_registers, does)

    @property
    @cache  # noqa: B019 - plans are few
    def dkv(self) -> Role:
        """Warpgroup 3."""
        return Role("dkv", WARPGROUP_SIZE, self.dkv_registers, "dKV of a tile, and its addition")

    @property
    def roles(self) -> tuple[Role, ...]:
        """The warpgroups, in thread order."""
        return self.gather, self.score, self.right, self.dkv

    @property
    @cache  # noqa: B019 - plans are few
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers, in order.

        Barriers of rows complete a phase for each item that has keys, the others one for each tile.
        """
        gather, score, right, dkv = self.roles
        return (
            Barrier(
                "k_full", CHUNKS, gather, Arrives.EVERY_THREAD, score, 0, "a chunk is there"
            ),
            Barrier(
                "k_free_left", LEFT_CHUNKS, score, Arrives.EVERY_WARP, gather, 0,
                "a chunk of dims 0-255 has been read",
            ),
            Barrier(
                "k_free_right", CHUNKS - LEFT_CHUNKS, right, Arrives.EVERY_WARP, gather, 0,
                "a chunk of dims 256-575 has been read",
            ),
            Barrier(
                "scores_full", 1, score, Arrives.EVERY_WARP, right, 0, "P and dS are there",
                also_awaited_by=(score, dkv),
            ),
            Barrier(
                "scores_free", 1, right, Arrives.EVERY_WARP, score, 0, "P and dS have been read",
                also_produced_by=dkv,
            ),
            Barrier(
                "rows_full", 1, right, Arrives.EVERY_THREAD, score, 0, "Q and dO are there",
                also_awaited_by=(dkv,),
            ),
            Barrier(
                "rows_free", 1, score, Arrives.EVERY_WARP, right, 0, "Q and dO have been read",
                also_produced_by=dkv,
            ),
        )  # fmt: skip
