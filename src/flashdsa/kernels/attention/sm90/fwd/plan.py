"""Tiles, budgets, barriers and roles of the Hopper forward, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import FLAG_BITS, FP32, ROWS, TILES, Tile
from flashdsa.plan import Arrives, Barrier, Role, Sm90Plan, SmemRegion

GROUPS = (1, 2, 4, 8)
ITEM_US, STEP_US = 3.05, 3.6
"""Measured times of an item, and of each of its steps, on an H200."""
UNION_BIT_US = 2.8e-5
"""Time of a group's union for each bit, a row and query: 13 to 50 ps were measured."""
DRAWN_WORDS = 3
"""Words of an item that was drawn: its number, its slots, and those of its main list."""
THREAD_LISTS = 3
"""Lists of a thread of the role gather, of those that are put in order."""
MOST_SORTED = THREAD_LISTS * WARPGROUP_SIZE
"""Most lists at the end that are drawn longest first."""


@dataclass(frozen=True)
class FwdPlan(Sm90Plan):
    """One compiled forward: choices, then derived values.

    Attributes:
        group: neighbouring queries whose 64 / group heads share the rows of a work item, over the
            union of their keys; 1: an item is 64 heads of one query.
        drawn: a CTA draws its next item from a counter when it needs one, in the order of
            `draws.py`; else CTA c takes items c, c + CTAs, ...
        joined: rows of two sources, ranges and blocks of rows, see `core/sources.py`; an item's
            last step may have one tile.
        gather_registers, consumer_registers: of a thread.
        lazy_log2: a row's maximum is updated only if it has grown by this factor, in log2.
        tile: of keys.
    """

    group: int = 1
    drawn: bool = False
    joined: bool = False
    gather_registers: int = 72
    consumer_registers: int = 216
    lazy_log2: float = 8.0
    tile: Tile = Tile()

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise ValueError(f"group: expected one of {GROUPS}; got {self.group}")
        super().__post_init__()

    @property
    def name(self) -> str:
        group = f"_group{self.group}" if self.group > 1 else ""
        flags = "_drawn" * self.drawn + "_joined" * self.joined
        return "mla_fwd" + self.tile.suffix + group + flags

    @property
    def packs(self) -> bool:
        """Whether a list of which many slots name no row is packed; unions name rows only."""
        return self.group == 1 and not self.joined

    @property
    def samples(self) -> bool:
        """Whether a sample may choose between its groups and queries one by one."""
        return self.group > 1 and self.drawn

    @property
    def flag_bits(self) -> int:
        """Bits of a step's flags, below the number of an item that was drawn."""
        return FLAG_BITS + self.joined

    @property
    def group_heads(self) -> int:
        return ROWS // self.group

    @property
    def buffers(self) -> list[SmemRegion]:
        tile = self.tile
        masks = TILES * self.group * tile.mask_words * 4
        chunks = f"{tile.chunks} x [64, 64] SW128"
        drawn = [
            SmemRegion("drawn", 2 * DRAWN_WORDS * 4, 16, "two items by turns, and their slots"),
            SmemRegion("order", 2 * MOST_SORTED, 16, "the last lists, longest first"),
        ]
        packed = [SmemRegion("packed", 2 * 4 * 4, 16, "ids that each warp packs; the last's end")]
        return [
            SmemRegion("q", tile.q_bytes, 1024, f"Q of an item, {chunks}"),
            SmemRegion("k", TILES * tile.bytes, 1024, f"keys of a step likewise{tile.with_p0}"),
            tile.p_region,
            SmemRegion("masks", masks, 16, "valid keys: a bit each, a tile and query"),
            SmemRegion("flags", TILES * 4, 8, "what follows the step, a tile"),
            SmemRegion("row_max", TILES * ROWS * FP32, 16, "maximum that each tile's P is against"),
            SmemRegion("row_sum", 2 * 2 * ROWS * FP32, 16, "each consumer's sums and maxima"),
            SmemRegion("largest", ROWS * FP32, 16, "the largest scores of tile 1's keys"),
            *(drawn if self.drawn else []),
            *(packed if self.packs else []),
        ]

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        return (
            Role("gather", WARPGROUP_SIZE, self.gather_registers,
                 "row numbers and masks, the rows, Q"),
            Role("consumer0", WARPGROUP_SIZE, self.consumer_registers,
                 "S and P of tile 0, O's low dims, lse"),
            Role("consumer1", WARPGROUP_SIZE, self.consumer_registers,
                 "S and P of tile 1, O's high dims"),
        )  # fmt: skip

    @cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        """Those of Q and of the sums complete a phase an item, all others a phase a step. Every
        thread arrives at those of P and of the sums for what it has read and written itself:
        compute-sanitizer's racecheck does not see what a warp's lanes did before one of them
        arrives for all. That costs no time."""
        gather, zero, one = self.roles
        thread, every, warps = Arrives.ONE_THREAD, Arrives.EVERY_THREAD, Arrives.EVERY_WARP
        slices, q_bytes = self.tile.slices, self.tile.q_bytes
        return (
            Barrier("k0_full", slices, gather, every, zero, 0, "a slice of tile 0 has come"),
            Barrier("k1_full", slices, gather, every, one, 0, "a slice of tile 1 has come"),
            Barrier("masks_full", TILES, gather, thread, zero, 0,
                    "a tile's masks and flags are stored", also_awaited_by=(one,)),
            Barrier("low_free", TILES, zero, warps, gather, 0, "a tile's low half has been read"),
            Barrier("high_free", TILES, one, warps, gather, 0, "a tile's high half has been read"),
            Barrier("q_full", 1, gather, thread, zero, q_bytes, "Q has come",
                    also_awaited_by=(one,)),
            Barrier("q_free", 1, zero, warps, gather, 0, "the item's scores are computed",
                    also_produced_by=one),
            Barrier("p0_full", 1, zero, every, one, 0, "P of tile 0 and its maxima are stored"),
            Barrier("p1_full", 1, one, every, zero, 0, "P of tile 1 and its maxima are stored"),
            Barrier("sums0_full", 1, zero, every, one, 0, "consumer0's sums are stored"),
            Barrier("sums1_full", 1, one, every, zero, 0, "consumer1's sums are stored"),
        )  # fmt: skip
