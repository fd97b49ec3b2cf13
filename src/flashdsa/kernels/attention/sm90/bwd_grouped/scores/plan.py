"""Tiles, budgets, barriers and roles of the kernel that computes P and dS, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import ROWS, TILE_KEYS
from flashdsa.plan import Arrives, Barrier, Role, Sm90Plan, SmemRegion

ITEM_BLOCKS = 2
"""Row blocks of a work item, one for each consumer warpgroup."""
D_QK = 576
D_V = 512
BF16 = 2
CHUNK = 64
"""bf16 in a span of the 128-byte swizzle: columns of a chunk."""
CHUNK_BYTES = TILE_KEYS * CHUNK * BF16
CHUNKS = D_QK // CHUNK
V_CHUNKS = D_V // CHUNK
BLOCK_BYTES = CHUNKS * CHUNK_BYTES
"""Q of a row block."""
BATCH_CHUNKS = 3
"""Chunks whose products are one group, and which are freed together."""
QUERIES = (1, 2, 4, 8, 16)
WARP_ROWS = 16
"""Rows of a warp in a wgmma."""


@dataclass(frozen=True)
class ScoresPlan(Sm90Plan):
    """One compiled kernel: choices, then derived values.

    Attributes:
        queries: of a group. split_warps: a warp's 16 rows are of two queries, of 8 heads each.
        optional: delta and lists exist already; the kernel has work if a choice takes it.
        slots: chunks that the ring of keys holds.
        gather_registers, consumer_registers: of a thread.
    """

    queries: int = 1
    split_warps: bool = False
    optional: bool = False
    slots: int = 10
    gather_registers: int = 56
    consumer_registers: int = 224

    def __post_init__(self) -> None:
        """Check the choices against the architecture.

        Raises:
            BudgetError: names the region or role that does not fit.
        """
        if self.queries not in QUERIES:
            raise ValueError(f"queries: expected one of {QUERIES}; got {self.queries}")
        if self.slots < CHUNKS:
            raise ValueError(f"slots: a tile has {CHUNKS} chunks; got {self.slots}")
        self.check()

    @property
    def name(self) -> str:
        """Exported name of its function."""
        kind = "_split" * self.split_warps + "_optional" * self.optional
        return f"mla_bwd_scores_group{self.queries}{kind}"

    @property
    def buffers(self) -> list[SmemRegion]:
        """Shared memory regions before the mbarriers, in order."""
        return [
            SmemRegion(
                "q", ITEM_BLOCKS * BLOCK_BYTES, 1024, "Q of an item, 2 x 9 x [64, 64] SW128"
            ),
            SmemRegion("k", self.slots * CHUNK_BYTES, 1024, "keys: a ring of [64, 64] SW128"),
        ]

    @property
    @cache  # noqa: B019 - plans are few
    def gather(self) -> Role:
        """Warpgroup 0."""
        return Role("gather", WARPGROUP_SIZE, self.gather_registers, "rows of kv into the ring")

    @property
    @cache  # noqa: B019 - plans are few
    def score(self) -> Role:
        """Warpgroups 1 and 2, a row block each."""
        does = f"S, dP, P and dS of {ROWS} rows each"
        return Role("score", ITEM_BLOCKS * WARPGROUP_SIZE, self.consumer_registers, does)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles, in thread order."""
        return self.gather, self.score

    @property
    @cache  # noqa: B019 - plans are few
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers, in order."""
        gather, score = self.roles
        return (
            Barrier(
                "k_full", self.slots, gather, Arrives.EVERY_THREAD, score, 0, "a chunk is there"
            ),
            Barrier(
                "k_free", self.slots, score, Arrives.EVERY_WARP, gather, 0,
                "both row blocks have read the chunk",
            ),
        )  # fmt: skip
