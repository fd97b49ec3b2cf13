"""Tiles, budgets, barriers and roles of the Hopper forward, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import (
    BF16,
    FP32,
    MASK_WORDS,
    PIECES,
    ROWS,
    TILE_BYTES,
    TILE_KEYS,
    TILES,
)
from flashdsa.plan import Arrives, Barrier, Role, Sm90Plan, SmemRegion

GROUPS = (1, 2, 4, 8)


@dataclass(frozen=True)
class FwdPlan(Sm90Plan):
    """One compiled forward: choices, then derived values.

    Attributes:
        group: neighbouring queries whose 64 / group heads share the rows of a work item, over the
            union of their keys; 1: an item is 64 heads of one query.
        max_logits: the largest logits are written, which takes 0.8% more time.
        gather_registers, consumer_registers: of a thread.
        lazy_log2: a row's maximum is updated only if it has grown by this factor, in log2.
    """

    group: int = 1
    max_logits: bool = False
    gather_registers: int = 72
    consumer_registers: int = 216
    lazy_log2: float = 8.0

    def __post_init__(self) -> None:
        """Check the choices against the architecture.

        Raises:
            BudgetError: names the region or role that does not fit.
        """
        if self.group not in GROUPS:
            raise ValueError(f"group: expected one of {GROUPS}; got {self.group}")
        self.check()

    @property
    def name(self) -> str:
        """Exported name of its function."""
        group = f"_group{self.group}" if self.group > 1 else ""
        return "mla_fwd" + group + "_max_logits" * self.max_logits

    @property
    def group_heads(self) -> int:
        """Heads of each query of a group."""
        return ROWS // self.group

    @property
    def buffers(self) -> list[SmemRegion]:
        """Shared memory regions before the mbarriers, in order."""
        masks = TILES * self.group * MASK_WORDS * 4
        largest = [SmemRegion("largest", ROWS * FP32, 16, "the largest scores of tile 1's keys")]
        return [
            SmemRegion("q", TILE_BYTES, 1024, "Q of an item, 9 x [64, 64] SW128"),
            SmemRegion(
                "k", TILES * TILE_BYTES, 1024, "keys of a step likewise; P of tile 0 besides"
            ),
            SmemRegion("p", ROWS * TILE_KEYS * BF16, 1024, "P of tile 1, bf16, [64, 64] SW128"),
            SmemRegion("masks", masks, 16, "valid keys: a bit each, a tile and query"),
            SmemRegion("flags", TILES * 4, 8, "what follows the step, a tile"),
            SmemRegion("row_max", TILES * ROWS * FP32, 16, "maximum that each tile's P is against"),
            SmemRegion("row_sum", 2 * 2 * ROWS * FP32, 16, "each consumer's sums and maxima"),
            *(largest if self.max_logits else []),
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
        does = "S and P of tile 0, O's dims 0-255, lse"
        return Role("left", WARPGROUP_SIZE, self.consumer_registers, does)

    @property
    @cache  # noqa: B019 - plans are few
    def right(self) -> Role:
        """Warpgroup 2."""
        does = "S and P of tile 1, O's dims 256-511"
        return Role("right", WARPGROUP_SIZE, self.consumer_registers, does)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The warpgroups, in thread order."""
        return self.gather, self.left, self.right

    @property
    @cache  # noqa: B019 - plans are few
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers, in order.

        Those of Q and of the sums complete a phase an item, all others a phase a step. Every thread
        arrives at those of P and of the sums for what it has read and written itself:
        compute-sanitizer's racecheck does not see what a warp's lanes did before one of them
        arrives for all. That costs no time.
        """
        gather, left, right = self.roles
        one, every, warps = Arrives.ONE_THREAD, Arrives.EVERY_THREAD, Arrives.EVERY_WARP
        return (
            Barrier("k0_full", PIECES, gather, every, left, 0, "a piece of tile 0 is there"),
            Barrier("k1_full", PIECES, gather, every, right, 0, "a piece of tile 1 is there"),
            Barrier(
                "notes", TILES, gather, one, left, 0, "a tile's masks and flags are there",
                also_awaited_by=(right,),
            ),
            Barrier("left_free", TILES, left, warps, gather, 0, "a tile's left half has been read"),
            Barrier(
                "right_free", TILES, right, warps, gather, 0, "a tile's right half has been read"
            ),
            Barrier(
                "q_full", 1, gather, one, left, TILE_BYTES, "Q is there", also_awaited_by=(right,)
            ),
            Barrier(
                "q_free", 1, left, warps, gather, 0, "the item's scores are computed",
                also_produced_by=right,
            ),
            Barrier("p0_full", 1, left, every, right, 0, "P of tile 0 and its maxima are there"),
            Barrier("p1_full", 1, right, every, left, 0, "P of tile 1 and its maxima are there"),
            Barrier("left_sums", 1, left, every, right, 0, "left's sums of the item are there"),
            Barrier("right_sums", 1, right, every, left, 0, "right's sums of the item are there"),
        )  # fmt: skip
