"""Tiles, budgets, barriers and roles of the Hopper decode, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flashdsa.hw import SM90, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import (
    BF16,
    D_V,
    FP32,
    MASK_WORDS,
    PIECES,
    ROWS,
    TILE_BYTES,
    TILE_KEYS,
    TILES,
)
from flashdsa.plan import Arrives, Barrier, Role, Sm90Plan, SmemRegion, registers_each

F16 = 2
GROUP_DIMS = 8
"""Dims of O that a lane sends at once."""
DIM_GROUPS = D_V // GROUP_DIMS
CLUSTER_SIZES = (16, 8, 7, 6, 5, 4, 3, 2, 1)
"""CTAs that may share an item; the key tiles then have room for all dims of O."""
MOST_CTAS = max(CLUSTER_SIZES)
GROUP_BYTES = GROUP_DIMS * F16
STATISTICS = 4
"""fp32 of a row that CTAs tell each other: maximum, sum, and the scale of each half of O."""
STAGED_AT = TILE_BYTES
"""Offset in region k of this CTA's O, after what other CTAs send."""


@dataclass(frozen=True)
class DecodePlan(Sm90Plan):
    """One compiled decode: choices, then derived values.

    Attributes:
        packed: kv has packed rows of 656 bytes, which are expanded to f16 in shared memory.
        gather_registers, left_registers, right_registers: of a thread.
        lazy_log2: a row's maximum is updated only if it has grown by this factor, in log2.
    """

    packed: bool = False
    gather_registers: int = 104
    left_registers: int = 208
    right_registers: int = 192
    lazy_log2: float = 8.0

    def __post_init__(self) -> None:
        """Check the choices against the architecture.

        Raises:
            BudgetError: names the region or role that does not fit.
        """
        # setmaxnreg hands out only the registers that the CTA has at its launch.
        self.check(self.threads * registers_each(self.threads, SM90.registers))

    group = 1
    """Queries of an item, as in the forward's plan."""
    group_heads = ROWS

    def items(self, num_heads: int) -> int:
        """Work items of a query."""
        return -(-num_heads // self.group_heads)

    @property
    def name(self) -> str:
        """Exported name of its function."""
        return "mla_decode" + ("_packed" if self.packed else "")

    @property
    def buffers(self) -> list[SmemRegion]:
        """Shared memory regions before the mbarriers, in order."""
        return [
            SmemRegion(
                "q",
                TILE_BYTES,
                1024,
                "Q of the item, 9 x [64, 64] SW128; then all CTAs' statistics and weights",
            ),
            SmemRegion(
                "k",
                TILES * TILE_BYTES,
                1024,
                "keys of a step likewise, P of tile 0 besides; then all CTAs' O of this one's dims",
            ),
            SmemRegion("p", ROWS * TILE_KEYS * BF16, 1024, "P of tile 1, [64, 64] SW128"),
            SmemRegion("masks", TILES * MASK_WORDS * 4, 16, "valid keys: a bit each, a tile"),
            SmemRegion("row_max", TILES * ROWS * FP32, 16, "maximum that each tile's P is against"),
            SmemRegion("row_sum", 2 * 2 * ROWS * FP32, 16, "each consumer's sums and maxima"),
            SmemRegion("row_unit", ROWS * FP32, 16, "what a row of Q is a multiple of, if packed"),
            SmemRegion("tokens", 2 * MOST_CTAS * 4, 16, "words from each CTA that mean no more"),
            SmemRegion("extent", 4, 4, "steps of the CTA"),
        ]

    @property
    @cache  # noqa: B019 - plans are few
    def gather(self) -> Role:
        """Warpgroup 0."""
        does = "row numbers and masks, the rows, Q"
        return Role("gather", WARPGROUP_SIZE, self.gather_registers, does)

    @property
    @cache  # noqa: B019 - plans are few
    def left(self) -> Role:
        """Warpgroup 1."""
        does = "S and P of tile 0, O's dims 0-255; then a share of O, lse"
        return Role("left", WARPGROUP_SIZE, self.left_registers, does)

    @property
    @cache  # noqa: B019 - plans are few
    def right(self) -> Role:
        """Warpgroup 2."""
        does = "S and P of tile 1, O's dims 256-511; then a share of O"
        return Role("right", WARPGROUP_SIZE, self.right_registers, does)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The warpgroups, in thread order."""
        return self.gather, self.left, self.right

    @property
    @cache  # noqa: B019 - plans are few
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers, in order.

        Barriers of tiles complete a phase for each step, those of Q and O one in all.
        """
        gather, left, right = self.roles
        one, every, warps = Arrives.ONE_THREAD, Arrives.EVERY_THREAD, Arrives.EVERY_WARP
        return (
            Barrier("extent_full", 1, gather, one, left, 0, "the number of steps is there",
                    also_awaited_by=(right,)),
            Barrier("k0_full", PIECES, gather, every, left, 0, "a piece of tile 0 is there"),
            Barrier("k1_full", PIECES, gather, every, right, 0, "a piece of tile 1 is there"),
            Barrier("notes", TILES, gather, one, left, 0, "a tile's masks are there",
                    also_awaited_by=(right,)),
            Barrier("left_free", TILES, left, warps, gather, 0, "a tile's left half has been read"),
            Barrier("right_free", TILES, right, warps, gather, 0,
                    "a tile's right half has been read"),
            Barrier("q_full", 1, gather, one, left, TILE_BYTES, "Q is there",
                    also_awaited_by=(right,)),
            Barrier("p0_full", 1, left, every, right, 0, "P of tile 0 and its maxima are there"),
            Barrier("p1_full", 1, right, every, left, 0, "P of tile 1 and its maxima are there"),
            Barrier("left_sums", 1, left, every, right, 0, "left's sums of the item are there",
                    also_awaited_by=(left,)),
            Barrier("right_sums", 1, right, every, left, 0, "right's sums of the item are there"),
            Barrier("q_converted", 1, left, every, right, 0, "packed: Q is as the products take it",
                    also_produced_by=right, also_awaited_by=(left,)),
            Barrier("staged", 1, left, every, right, 0, "this CTA's O and statistics are there",
                    also_produced_by=right, also_awaited_by=(left,)),
            Barrier("o_full", 1, left, one, left, 0, "all CTAs' O and statistics are there",
                    also_awaited_by=(right,), bytes_from_peer=True),
            Barrier("ready", 1, left, one, left, 0, "no CTA reads keys any more",
                    bytes_from_peer=True),
            Barrier("done", 1, left, one, left, 0, "all CTAs have what this one sent",
                    bytes_from_peer=True),
        )  # fmt: skip
