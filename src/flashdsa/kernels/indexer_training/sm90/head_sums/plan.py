"""Tiles, budgets, barriers and roles of the kernels that sum over heads, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.plan import Arrives, Barrier, Role, Sm90Plan, SmemRegion, row_tiles

STEP_TILES = 4
"""Tiles whose row numbers the gather reads together, a step before their copies."""
STEP_SLOTS = STEP_TILES * row_tiles.TILE_ROWS
FP32 = 4
ITEM_WORDS = 4
"""Words that tell an item."""
TARGET_HEADS = (8, 16, 32, 64, 128)
"""Columns of a product. Fewer heads are padded with columns of zeros."""
LONGEST = 9
"""Chunks of 64 columns of the longer rows, which have RoPE columns beside those of V."""
TARGET_WIDTHS = (576, 512)
"""Elements of a row."""


@dataclass(frozen=True)
class TargetPlan(Sm90Plan):
    """One compiled kernel: choices, then derived values.

    A query is a work item. Its rows of keys come in tiles of 64, through a ring of pieces; its
    heads stay in shared memory. The consumers, a warpgroup each, take the tiles in turn.

    Attributes:
        num_heads: columns of a product. chunks: of 64 columns in a row of Q and of the keys.
        key_piece, query_piece: chunks that a barrier tells of, of the keys and of Q.
        key_slots, query_slots: such pieces in shared memory.
        consumers: warpgroups. gather_registers, consumer_registers: of a thread.
    """

    num_heads: int = 128
    chunks: int = LONGEST
    key_piece: int = 1
    query_piece: int = 3
    key_slots: int = 10
    query_slots: int = 3
    consumers: int = 2
    gather_registers: int = 72
    consumer_registers: int = 216

    def __post_init__(self) -> None:
        if self.chunks % self.query_piece or self.query_piece % self.key_piece:
            raise ValueError(
                f"pieces: {self.chunks} chunks, {self.query_piece} of Q and {self.key_piece} of "
                "the keys at a time: expected each to divide the one before"
            )
        if self.query_slots % self.query_pieces:
            raise ValueError(f"query_slots: {self.query_slots} hold no whole number of queries")
        ahead = (self.consumers - 1) * self.key_pieces
        if self.key_slots <= ahead:
            # It waits by the phase's parity: what the slot held before must have come.
            raise ValueError(
                f"key_slots: {self.key_slots}, but a consumer waits for a piece {ahead} behind the "
                "first that may still be missing: expected more"
            )
        super().__post_init__()

    @property
    def name(self) -> str:
        columns = "" if self.chunks == LONGEST else f"_d{self.width}"
        return f"attention_target_h{self.num_heads}{columns}"

    @property
    def width(self) -> int:
        """Elements of a row of Q and of the keys."""
        return self.chunks * row_tiles.CHUNK_COLUMNS

    @property
    def key_pieces(self) -> int:
        return self.chunks // self.key_piece

    @property
    def query_pieces(self) -> int:
        return self.chunks // self.query_piece

    @property
    def key_piece_bytes(self) -> int:
        """A slot of the ring of keys."""
        return self.key_piece * row_tiles.CHUNK_BYTES

    @property
    def query_chunk_bytes(self) -> int:
        """64 columns of every head."""
        return self.num_heads * row_tiles.ROW_BYTES

    @property
    def query_piece_bytes(self) -> int:
        """A slot of the ring of Q."""
        return self.query_piece * self.query_chunk_bytes

    @property
    def queries(self) -> int:
        return self.query_slots // self.query_pieces

    @property
    def buffers(self) -> list[SmemRegion]:
        q, k = self.query_slots * self.query_piece_bytes, self.key_slots * self.key_piece_bytes
        heads = self.queries * self.num_heads * FP32
        ends = 2 * self.role("gather").warps * FP32
        return [
            SmemRegion("q", q, 1024, "Q: a ring of [heads, 64] SW128"),
            SmemRegion("k", k, 1024, "keys: a ring of [64, 64] SW128"),
            SmemRegion("heads", heads, 16, "of each head its lse, in log2"),
            SmemRegion("items", self.queries * ITEM_WORDS * FP32, 16, "which slots a query has"),
            SmemRegion("ends", ends, 16, "warps' ends of two lists"),
        ]

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        return (
            Role("gather", WARPGROUP_SIZE, self.gather_registers, "Q and rows of the keys"),
            Role("add", self.consumers * WARPGROUP_SIZE, self.consumer_registers,
                 "products of a tile each, their sums over heads"),
        )  # fmt: skip

    @cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        gather, add = self.roles
        every, warps, group = (
            Arrives.EVERY_THREAD, Arrives.EVERY_WARP, Arrives.WARPS_OF_ONE_GROUP
        )  # fmt: skip
        return (
            Barrier("q_full", self.query_slots, gather, every, add, self.query_piece_bytes,
                    "a piece of Q is there, and with the first one the item and heads"),
            Barrier("q_free", self.query_slots, add, warps, gather, 0,
                    "the piece's products with every tile are computed"),
            Barrier("k_full", self.key_slots, gather, every, add, 0, "a piece is there"),
            Barrier("k_free", self.key_slots, add, group, gather, 0, "it has been read"),
        )  # fmt: skip


_PIECES = {
    (9, True): (1, 3, 10, 3),
    (9, False): (3, 3, 6, 3),
    (8, True): (1, 4, 10, 2),
    (8, False): (2, 2, 9, 4),
}
"""Pieces and slots of `TargetPlan`, by chunks and whether a product has all 128 columns: fewer
leave room for longer pieces of the keys."""


def target_plan(num_heads: int, width: int = LONGEST * row_tiles.CHUNK_COLUMNS) -> TargetPlan:
    """The target's plan for `num_heads` columns of a product and rows of `width` elements."""
    chunks = width // row_tiles.CHUNK_COLUMNS
    return TargetPlan(num_heads, chunks, *_PIECES[chunks, num_heads == max(TARGET_HEADS)])
