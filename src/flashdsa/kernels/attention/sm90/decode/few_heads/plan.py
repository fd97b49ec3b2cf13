"""Pieces, budgets, barriers and roles of the Hopper decode of few heads, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import FP32, ROWS
from flashdsa.kernels.attention.sm90.decode.key_rows.plan import CONSUMERS, WARPS, KeyRowsPlan
from flashdsa.kernels.attention.sm90.decode.shared.plan import (
    CLUSTER_SIZES,
    F16,
    GROUP_BYTES,
    MOST_CTAS,
    STATISTICS,
)
from flashdsa.plan import Arrives, Barrier, SmemRegion
from flashdsa.row_formats import ROW_FORMATS, V32

HEADS = 16
"""Heads of an item: the columns of its products. With 32 it took longer than two of 16, or than the
kernel of 64, for each of 135 calls."""


@dataclass(frozen=True)
class FewHeadsPlan(KeyRowsPlan):
    """One compiled kernel; its formats have few scales, as P of a key is stored times each."""

    formats = (V32, ROW_FORMATS["v32_no_rope"], ROW_FORMATS["v4"])
    joined_formats = formats[1:]
    math_does = "Q; S, P and O of every other tile; then a share of O, lse"
    group_heads = HEADS
    stages = 8
    """Pieces in shared memory, half of them for each consumer."""

    @property
    def gather_registers(self) -> int:
        """Registers of a thread that gathers."""
        return 56 if self.joined or self.form.split else 24

    @property
    def math_registers(self) -> int:
        """Registers of a thread that multiplies."""
        return 224 if self.joined or self.form.split else 240

    @property
    def has_value_rope(self) -> bool:
        """Whether a row's bf16 columns are of its value, too."""
        return bool(self.form.rope) and not self.tile.has_rope

    @property
    def parts(self) -> int:
        """P's of a key in shared memory: times each scale, and of the value's bf16 columns."""
        return self.form.num_scales + self.has_value_rope

    @property
    def halves(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Regions, and offsets in them, where each consumer gets the other one's part of its dims:
        apart from all CTAs' O, which may come meanwhile, and this one's, in the region k."""
        return ("k", self.received_bytes), ("p", 0)

    @property
    def staged_at(self) -> int:
        """Offset in region k of this CTA's O, after what other CTAs send and the halves."""
        halves = WARPGROUP_SIZE * self.blocks * HEADS // 2 * FP32
        return max(super().staged_at, self.received_bytes + halves)

    @property
    def received_bytes(self) -> int:
        """Bytes of all CTAs' O of one CTA's dims: more than O if dims are not shared out evenly."""
        groups = max(size * -(-self.dim_groups // size) for size in CLUSTER_SIZES)
        return groups * GROUP_BYTES * HEADS

    @property
    def buffers(self) -> list[SmemRegion]:
        """Shared memory regions before the mbarriers, in order."""
        statistics = MOST_CTAS * ROWS * STATISTICS * FP32
        of_warps = CONSUMERS * WARPS * (HEADS + 4) * FP32
        return [
            SmemRegion(
                "q",
                max(self.tile.chunks * self.operand_bytes, statistics),
                1024,
                f"Q of the item, {self.tile.chunks} x [heads, 64] SW128; then all CTAs' statistics",
            ),
            SmemRegion(
                "p",
                CONSUMERS * self.parts * self.operand_bytes,
                1024,
                "each consumer's P, [heads, 64 keys] SW128, times each scale of a key",
            ),
            SmemRegion(
                "k",
                max(
                    self.stages * self.piece_bytes,
                    self.staged_at + HEADS * self.tile.d_v * F16,
                ),
                128,
                "rows of 32 keys a stage; then halves of O, and all CTAs' O of this one's dims",
            ),
            SmemRegion("masks", self.stages * 4, 16, "valid keys: a bit each"),
            SmemRegion("tops", of_warps, 16, "each warp's maxima of a tile, and largest scale"),
            SmemRegion("sums", of_warps, 16, "each warp's sums"),
            SmemRegion(
                "maxima",
                CONSUMERS * WARPS * HEADS * FP32,
                16,
                "that sums and O are against, a copy for each warp",
            ),
            SmemRegion("row_unit", HEADS * FP32, 16, "what a head of Q is a multiple of"),
            *self.cluster_buffers,
        ]

    @property
    @cache  # noqa: B019 - plans are few
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers, in order.

        Barriers of pieces are a ring, each other one completes a phase in all.
        """
        gather, math = self.roles
        one, every = Arrives.ONE_THREAD, Arrives.EVERY_THREAD
        return (
            Barrier("extent_full", 1, gather, one, math, 0, "the number of steps is stored"),
            Barrier("full", self.stages, gather, Arrives.EVERY_LANE_OF_ONE_WARP, math,
                    self.piece_bytes, "a piece's rows and mask have come"),
            Barrier("free", self.stages, math, Arrives.WARPS_OF_ONE_GROUP, gather, 0,
                    "a piece has been read"),
            Barrier("q_full", 1, math, every, math, 0, "Q is as the products take it"),
            Barrier("all_read", 1, math, every, math, 0,
                    "both consumers' sums are stored, and nobody reads keys or Q any more"),
            Barrier("halves", 1, math, every, math, 0,
                    "each consumer's part of the other one's dims is stored"),
            Barrier("staged", 1, math, every, math, 0, "this CTA's O and statistics are staged"),
            Barrier("o_full", 1, math, one, math, 0, "all CTAs' O and statistics have come",
                    bytes_from_peer=True),
            Barrier("ready", 1, math, one, math, 0, "no CTA reads keys any more",
                    bytes_from_peer=True),
            Barrier("done", 1, math, one, math, 0, "all CTAs have what this one sent",
                    bytes_from_peer=True),
        )  # fmt: skip
