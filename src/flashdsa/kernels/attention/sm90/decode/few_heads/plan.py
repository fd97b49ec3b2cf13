"""Pieces, budgets, barriers and roles of the Hopper decode of few heads, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import FP32, ROWS, Tile
from flashdsa.kernels.attention.sm90.decode.shared import plan
from flashdsa.plan import Arrives, Barrier, Role, SmemRegion, row_tiles
from flashdsa.row_formats import ROW_FORMATS, V32, RowFormat

CONSUMERS = 2
"""Warpgroups that multiply."""
PIECE_KEYS = WARP_SIZE
"""Keys that a warp asks for, a lane each."""
WARPS = WARPGROUP_SIZE // WARP_SIZE
BANK_UNIT = 16
"""Bytes of a row that a lane reads at once: eight rows are in all banks if they are an odd multiple
of it apart."""
HEADS = 16
"""Heads of an item: the columns of its products. With 32 it took longer than two of 16, or than the
kernel of 64, for each of 135 calls."""


@dataclass(frozen=True)
class FewHeadsPlan(plan.ClusterPlan):
    """One compiled kernel: choices, then derived values.

    Attributes:
        formats, joined_formats: of packed rows; those that two sources may have, both the same.
            They have few scales, as P of a key is stored times each.
        form: one of them.
        joined: rows of two sources, ranges and blocks of rows, see `core/sources.py`.
        lazy_log2: maxima are updated only if a logit is above one by this, in log2.
    """

    formats: ClassVar[tuple[RowFormat, ...]] = (V32, ROW_FORMATS["v32_no_rope"], ROW_FORMATS["v4"])
    joined_formats: ClassVar[tuple[RowFormat, ...]] = formats[1:]
    form: RowFormat = V32
    joined: bool = False
    lazy_log2: float = 8.0
    packed = True
    group_heads = HEADS
    stages = 8
    """Pieces in shared memory, half of them for each consumer."""

    @classmethod
    def every(cls) -> tuple[Self, ...]:
        """A plan for rows of each format, and for two sources of each."""
        joined = (cls(form, True) for form in cls.joined_formats)
        return (*(cls(form) for form in cls.formats), *joined)

    @classmethod
    def takes(cls, form: RowFormat, joined: bool) -> bool:
        return form in (cls.joined_formats if joined else cls.formats)

    @property
    def gather_registers(self) -> int:
        return 56 if self.joined or self.form.split else 24

    @property
    def math_registers(self) -> int:
        return 224 if self.joined or self.form.split else 240

    @property
    def tile(self) -> Tile:  # type: ignore[override]
        return Tile(self.form.d_qk)

    @property
    def row_pitch(self) -> int:
        """Bytes from a row to the next one in shared memory."""
        units = -(-self.form.row_bytes // BANK_UNIT)
        return (units + (units + 1) % 2) * BANK_UNIT

    @property
    def piece_bytes(self) -> int:
        return PIECE_KEYS * self.row_pitch

    @property
    def tile_pieces(self) -> int:
        return self.tile.keys // PIECE_KEYS

    @property
    def name(self) -> str:
        form = "" if self.form == V32 else f"_{self.form.name}"
        return f"mla_decode_heads{HEADS}{form}" + "_joined" * self.joined

    @property
    def operand_bytes(self) -> int:
        """Bytes of 64 values of each head: a chunk of Q, or P of a tile."""
        return HEADS * row_tiles.ROW_BYTES

    @property
    def blocks(self) -> int:
        """Blocks of 64 dims of a consumer's half of O."""
        return self.tile.d_v // ROWS // CONSUMERS

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        return (
            Role("gather", WARPGROUP_SIZE, self.gather_registers,
                 "row numbers and masks, the rows"),
            Role("math", CONSUMERS * WARPGROUP_SIZE, self.math_registers,
                 "Q; S, P and O of every other tile; then a share of O, lse"),
        )  # fmt: skip

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
        groups = max(size * -(-self.dim_groups // size) for size in plan.CLUSTER_SIZES)
        return groups * plan.GROUP_BYTES * HEADS

    @property
    def buffers(self) -> list[SmemRegion]:
        statistics = plan.MOST_CTAS * ROWS * plan.STATISTICS * FP32
        of_warps = CONSUMERS * WARPS * (HEADS + 4) * FP32
        q = max(self.tile.chunks * self.operand_bytes, statistics)
        k = max(self.stages * self.piece_bytes, self.staged_at + HEADS * self.tile.d_v * plan.F16)
        return [
            SmemRegion("q", q, 1024, f"Q of the item, {self.tile.chunks} x [heads, 64] SW128; then "
                                     "all CTAs' statistics"),
            SmemRegion("p", CONSUMERS * self.parts * self.operand_bytes, 1024,
                       "each consumer's P, [heads, 64 keys] SW128, times each scale of a key"),
            SmemRegion("k", k, 128, "rows of 32 keys a stage; then halves of O, and all CTAs' O of "
                                    "this one's dims"),
            SmemRegion("masks", self.stages * 4, 16, "valid keys: a bit each"),
            SmemRegion("tops", of_warps, 16, "each warp's maxima of a tile, and largest scale"),
            SmemRegion("sums", of_warps, 16, "each warp's sums"),
            SmemRegion("maxima", CONSUMERS * WARPS * HEADS * FP32, 16,
                       "that sums and O are against, a copy for each warp"),
            SmemRegion("row_unit", HEADS * FP32, 16, "what a head of Q is a multiple of"),
            *self.cluster_buffers,
        ]  # fmt: skip

    @cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        """Barriers of pieces are a ring, each other one completes a phase in all."""
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
