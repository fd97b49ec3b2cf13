"""Pieces, budgets, barriers and roles of the Hopper decode of many heads, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flashdsa.kernels.attention.sm90.core.tile import FP32, ROWS, TILES
from flashdsa.kernels.attention.sm90.decode.key_rows.plan import (
    CONSUMERS,
    PIECE_KEYS,
    WARPS,
    KeyRowsPlan,
)
from flashdsa.kernels.attention.sm90.decode.shared.plan import F16
from flashdsa.plan import Arrives, Barrier, SmemRegion
from flashdsa.row_formats import ROW_FORMATS, V32

TOPS_PITCH = ROWS + 4
"""fp32 of a warp's maxima of a tile, and its least power of two behind them."""
STATE = ROWS + 4
"""fp32 of the maxima, and of whether there are any."""
MOVES = ROWS + 4
"""fp32 of a tile's moves: factors of O, whether there are any, and the power of two's exponent."""


@dataclass(frozen=True)
class ManyHeadsPlan(KeyRowsPlan):
    """One compiled kernel; its formats have fp32 scales. A tile of `v4`, whose bf16 columns are of
    the value, takes 4 % longer than by the kernel that expands tiles, though nothing spills.
    """

    formats = (V32, ROW_FORMATS["v32_no_rope"])
    joined_formats = formats[1:]
    math_does = "Q; S and P of every other tile, half of O's dims; then the rows of O, lse"
    alone = True
    group_heads = ROWS
    gather_registers = 24
    math_registers = 240

    @property
    def stages(self) -> int:
        """Pieces in shared memory: as many as there is room for."""
        return 6 if self.form.rope else 8

    @property
    def releases_early(self) -> bool:
        """Whether a consumer releases a tile's pieces before it multiplies their values: there are
        fewer than two steps of them. The fence before takes 3 % of the time, which is lost where
        pieces are enough."""
        return self.stages * PIECE_KEYS < 2 * self.tile.step_keys

    @property
    def table_bytes(self) -> int:
        """Bytes of the scales of a tile, in f16."""
        return self.form.num_scales * self.tile.keys * F16

    @property
    def buffers(self) -> list[SmemRegion]:
        """Shared memory regions before the mbarriers, in order."""
        chunks = self.tile.chunks
        of_warps = CONSUMERS * WARPS * TOPS_PITCH * FP32
        return [
            SmemRegion("q", chunks * self.operand_bytes, 1024,
                       f"Q of the item, {chunks} x [heads, 64] SW128"),
            SmemRegion("p", TILES * self.operand_bytes, 1024,
                       "P of each tile of a step, [heads, 64 keys] SW128"),
            SmemRegion("k", self.stages * self.piece_bytes, 128, "rows of 32 keys a stage"),
            SmemRegion("masks", self.stages * 4, 16, "valid keys: a bit each"),
            SmemRegion("tops", of_warps, 16, "each warp's maxima of a tile; then its sums"),
            SmemRegion("votes", CONSUMERS * TILES * WARPS * 4, 16,
                       "each warp's vote that maxima move, of two steps"),
            SmemRegion("table", TILES * self.table_bytes, 16, "scales of a step's keys, in f16"),
            SmemRegion("moves", TILES * MOVES * FP32, 16, "factors of O before a tile"),
            SmemRegion("maxima", STATE * FP32, 16, "logits that sums and O are against"),
            SmemRegion("row_unit", ROWS * FP32, 16,
                       "what a head of Q is a multiple of; then the factor of its O"),
            *self.cluster_buffers,
        ]  # fmt: skip

    @property
    @cache  # noqa: B019 - plans are few
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers, in order.

        Barriers of pieces are a ring, those of P complete a phase for each step, each other one a
        phase in all. Every thread arrives for itself: racecheck does not see that a lane arrives
        for those that it has met.
        """
        gather, math = self.roles
        q_bytes = self.tile.chunks * self.operand_bytes
        one, every, group = Arrives.ONE_THREAD, Arrives.EVERY_THREAD, Arrives.THREADS_OF_ONE_GROUP
        return (
            Barrier("extent_full", 1, gather, one, math, 0, "the number of steps is stored"),
            Barrier("full", self.stages, gather, Arrives.EVERY_LANE_OF_ONE_WARP, math,
                    self.piece_bytes, "a piece's rows and mask have come"),
            Barrier("free", self.stages, math, every, gather, 0, "a piece has been read"),
            Barrier("p_full", TILES, math, group, math, 0,
                    "P of a tile, its keys' scales and its moves are stored"),
            Barrier("p_free", TILES, math, group, math, 0,
                    "the other consumer has read P of a tile"),
            Barrier("q_full", 1, math, one, math, q_bytes, "Q has come"),
            Barrier("q_converted", 1, math, every, math, 0, "Q is as the products take it"),
            Barrier("all_read", 1, math, every, math, 0,
                    "both consumers' sums are stored, and nobody reads keys any more"),
            Barrier("factors_full", 1, math, every, math, 0, "factors of the rows are stored"),
        )  # fmt: skip
