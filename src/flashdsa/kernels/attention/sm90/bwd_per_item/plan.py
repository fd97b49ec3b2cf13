"""Tiles, budgets, barriers and roles of the backward of 64 rows at a time, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import ROWS, Tile
from flashdsa.plan import Arrives, Barrier, Role, Sm90Plan, SmemRegion, row_tiles

FAR_US = 1.25e-3
"""Microseconds of a row that comes from memory to be added to."""
SLOT_US = 0.3e-3
"""The same of a row of the slots, written and read, beyond an addition to a row in the cache."""
SUM_US = 0.85e-3
"""The same of a row of dKV that slots are summed to."""
LAUNCHES_US = 100.0
"""The slots' launches, and the least that is worth them."""


def saved_us(additions: Any, rows: Any, sums: Any) -> Any:
    """Microseconds that slots save; less than 0 where they take longer.

    The constants are rounded from a fit to 119 drawn calls over 28,685 to 1,018,067 rows, each
    timed by both ways on an H100, less 8 % of the time by additions. Of these it takes 21, and none
    that takes longer: 0.64 to 0.99 of the time by additions, 0.81 in the mean. `additions`: rows
    that are added. `rows`: that come from memory to be added to, each once for items that run at
    the same time. `sums`: rows of dKV that are named, at most.
    """
    return FAR_US * rows - SLOT_US * additions - SUM_US * sums - LAUNCHES_US


def most_rows(groups: int, wave: int, keys: float, num_keys: int) -> float:
    """Rows that come from memory if lists share no more than they must on average. `groups`: of the
    launch; `wave`: of them that run at the same time. `keys`: of a list."""
    of_wave = num_keys * -math.expm1(-min(wave, groups) * keys / num_keys)
    return groups / min(wave, groups) * of_wave


WORD_BYTES = 4
CHUNK_WORDS = 4
"""Words of a chunk's description: key, rows, FIRST and LAST, and one that is not used."""
FIRST, LAST, FROM_ZERO = 1, 2, 4
"""The chunk has the key's first rows; its last ones; no dKV before the first rows, as it is 0."""


@dataclass(frozen=True)
class SumPlan(Sm90Plan):
    """The kernel that sums. A key's rows come in chunks, each into a stage. `d_qk`: columns of dKV.
    `packs`: of a row, a thread of role add each. `slot_words`: of a row. `stages`: chunks in
    flight. `chunk_rows`: most rows of a chunk. `sm_ctas`: CTAs on each streaming multiprocessor,
    for which shared memory has just room."""

    d_qk: int
    packs: int
    slot_words: int
    stages: int = 3
    chunk_rows: int = 16
    sm_ctas: int = 4

    @property
    def slot_bytes(self) -> int:
        return self.slot_words * WORD_BYTES

    @property
    def dkv_bytes(self) -> int:
        """Bytes of a row of dKV, with which a stage begins."""
        return self.d_qk * WORD_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.dkv_bytes + self.chunk_rows * self.slot_bytes

    @property
    def buffers(self) -> list[SmemRegion]:
        rows, chunks = self.stages * self.stage_bytes, self.stages * CHUNK_WORDS * WORD_BYTES
        return [
            SmemRegion("rows", rows, 128, "dKV and rows of a chunk", stages=self.stages),
            SmemRegion("chunks", chunks, 16, "their descriptions", stages=self.stages),
        ]

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        return (
            Role("load", WARP_SIZE, 64, "keys, their dKV and their rows"),
            # The warps behind it.
            Role("add", -(-self.packs // WARP_SIZE) * WARP_SIZE, 64,
                 "dKV += one row after another"),
        )  # fmt: skip

    @cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers, in order; each completes a phase for each chunk. A chunk's bytes vary."""
        load, add = self.roles
        return (
            Barrier("rows_full", self.stages, load, Arrives.ONE_THREAD, add, 0,
                    "a chunk has come"),
            Barrier("rows_free", self.stages, add, Arrives.EVERY_THREAD, load, 0,
                    "a chunk has been read"),
        )  # fmt: skip


HEADS = (8, 16, 32, 64, 128)
QUERIES = (1, 2, 4, 8)
MORE = (2, 4)
"""Queries of a group of the grouped backward, which a query of 64 or 128 heads may be in."""
HALF_ROWS = ROWS // 2
"""Rows of which S and dP are one wgmma: N is HALF_ROWS rows of Q and of dO each."""
HALF_BYTES = HALF_ROWS * row_tiles.ROW_BYTES
"""Bytes of half a chunk of Q, or of dO: 64 columns of 32 rows."""
ROWS_CHUNK_BYTES = 4 * HALF_BYTES
"""Bytes of 64 columns: Q and dO of the first 32 rows, then of the others."""
ITEM_STAGES = 2
"""Items that may be drawn and not yet taken by all roles."""
STATISTICS = 2
"""fp32 a row: lse and delta, both scaled."""

MOST_PART_GROUPS = 4096
"""Most groups of a part of the slots: each group counts for enough keys that no part has more."""
PAIR = 2
"""Words of a pair: see `Offsets`."""
LINE_DIMS = 32
"""Dims that are multiplied, and added or packed, at a time."""
LINE_PACKS = 4
"""Packs of a line: pack j has dims 4 j to 4 j + 3 of the first and of the second half of a line."""
PACK_WORDS = 3
"""See `slot_sums.py`."""
CARVEOUT = 100
"""Percent of the first-level cache that may be shared memory, where several CTAs share an SM."""
CURSORS = 5
"""Counters of a part, see `slot_offsets.py`."""
KEY_WORDS = 4
"""Words of a key that has rows."""


SAMPLED, DRAWN, MET, WAY, ORDER = 0, 2, 3, 4, 5
"""Words of a launch's tickets: two of counts of samples; positions that were drawn; how far its
CTAs have come together; which way its dKV takes: FIRST, additions, or SECOND, slots; and the first
of the groups in their order."""


NEAR, FAR, SLOTS_MAY_PAY = range(3)
"""dKV has not many more rows than the second-level cache; has more, so that CTAs keep pace; and may
take less time by slots, which the device chooses."""


def num_tickets(groups: int) -> int:
    """Words of a launch's tickets."""
    return ORDER + groups


@dataclass(frozen=True)
class PerItemPlan(Sm90Plan):
    """One compiled kernel: choices, then derived values.

    Attributes:
        queries: of a group: 64 / H, at least 1. tile: of keys, with at most one chunk after its
            value.
        slots: dKV goes to rows of its own for each key of each list, which are summed in order:
            see `slot_offsets.py`.
        tickets: items are put in order and drawn, see `tickets.py`; else CTAs take turns.
        gather_registers, consumer_registers, dkv_registers: of a thread; those of consumers are of
            score and high, on average.
    """

    queries: int = 1
    slots: bool = False
    tickets: bool = False
    tile: Tile = Tile()
    gather_registers: int = 32
    consumer_registers: int = 192
    dkv_registers: int = 96

    def __post_init__(self) -> None:
        if self.queries not in QUERIES:
            raise ValueError(f"queries: expected one of {QUERIES}; got {self.queries}")
        if self.slots and self.tickets:
            raise ValueError("slots: leave no registers for tickets")
        if self.tile.chunks > self.tile.value_chunks + 1:
            raise ValueError(f"tile: at most one chunk has no value; got {self.tile}")
        super().__post_init__()

    @property
    def name(self) -> str:
        kind = "_slots" * self.slots + "_tickets" * self.tickets
        return f"mla_bwd_fused{self.tile.suffix}_group{self.queries}{kind}"

    @property
    def may_leave(self) -> bool:
        """Whether a launch may leave its work to the grouped backward, where queries have much in
        common."""
        return self.queries == 1 and not self.slots

    @property
    def score_more(self) -> int:
        """Registers that role score has more than high: without a chunk of RoPE columns high has as
        many accumulators of dQ, and score those of S and dP besides."""
        return 0 if self.tile.has_rope else 16

    @property
    def rope_at(self) -> int:
        """Bytes from the rows' first to Q's RoPE columns, if any: rows 0 to 31, then the others."""
        return self.tile.value_chunks * ROWS_CHUNK_BYTES

    @property
    def low_chunks(self) -> tuple[range, ...]:
        """Chunks of dims of dQ that role score multiplies, those of a group of wgmmas together."""
        return tuple(map(self.tile.chunks_of, self.tile.low_slices))

    @property
    def high_chunks(self) -> tuple[range, ...]:
        """The same of role high, which has the other dims."""
        return tuple(map(self.tile.chunks_of, self.tile.high_slices))

    @property
    def order(self) -> tuple[int, ...]:
        """Order in which a tile's chunks become free, and so come and are multiplied."""
        groups = zip_longest(self.low_chunks, self.high_chunks, fillvalue=())
        return tuple(chunk for both in groups for chunks in both for chunk in chunks)

    @property
    def lines(self) -> int:
        return self.tile.d_qk // LINE_DIMS

    @property
    def packs(self) -> int:
        return self.lines * LINE_PACKS

    @property
    def slot_words(self) -> int:
        """Words of a row of dKV in the slots. A line and the next one are a pair. Words 0 and 1 of
        every pack come first: of each pair pack j of the one and of the other line, j = 0, 1, ...;
        words 2 of all packs follow, in the same order. So a lane stores 16 and 8 bytes of a pair,
        and four lanes whole sectors."""
        return self.packs * PACK_WORDS

    @property
    def slot_lasts(self) -> int:
        """Offset of words 2 in a row of the slots."""
        return self.packs * (PACK_WORDS - 1)

    @cached_property
    def sums(self) -> SumPlan:
        return SumPlan(self.tile.d_qk, self.packs, self.slot_words)

    @property
    def buffers(self) -> list[SmemRegion]:
        tile, rows = self.tile, self.rope_at + 2 * HALF_BYTES * self.tile.has_rope
        keys = f"keys of a tile, {tile.chunks} x [64, 64] SW128"
        items = SmemRegion("items", ITEM_STAGES * 4, 16, "drawn items", stages=ITEM_STAGES)
        return [
            SmemRegion("rows", rows, 1024, "Q and dO of 64 rows, by chunks and halves"),
            SmemRegion("k", tile.bytes, 1024, keys),
            SmemRegion("p", tile.p_bytes, 1024, "P, [key][row] SW128"),
            SmemRegion("ds", tile.p_bytes, 1024, "dS, [key][row] SW128"),
            SmemRegion("statistics", ROWS * STATISTICS * 4, 16, "lse and delta of the rows"),
            *([items] if self.tickets else []),
        ]

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        return (
            Role("gather", WARPGROUP_SIZE, self.gather_registers, "the keys of each tile"),
            Role("score", WARPGROUP_SIZE, self.consumer_registers + self.score_more // 2,
                 f"S, dP, P, dS, and dims 0-{self.tile.half_dims - 1} of dQ"),
            Role("high", WARPGROUP_SIZE, self.consumer_registers - self.score_more // 2,
                 f"Q, dO, delta of an item, dims {self.tile.half_dims}-{self.tile.d_qk - 1} of dQ"),
            Role("dkv", WARPGROUP_SIZE, self.dkv_registers, "dKV of a tile, and its addition"),
        )  # fmt: skip

    @cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        """Barriers of rows complete a phase for each item that has keys, those of items one for
        each that is drawn, the others one for each tile."""
        gather, score, high, dkv = self.roles
        chunks, low_chunks = self.tile.chunks, self.tile.half_chunks
        drawn = (
            Barrier("item_full", ITEM_STAGES, gather, Arrives.ONE_THREAD, gather, 0,
                    "an item is drawn", also_awaited_by=(score, high, dkv)),
            Barrier("item_free", ITEM_STAGES, high, Arrives.EVERY_WARP, gather, 0,
                    "all roles have read an item", others=(gather, score, dkv)),
        )  # fmt: skip
        return (
            Barrier("k_full", chunks, gather, Arrives.EVERY_THREAD, score, 0, "a chunk is there"),
            Barrier("k_free_low", low_chunks, score, Arrives.EVERY_WARP, gather, 0,
                    "a chunk of the low dims has been read"),
            Barrier("k_free_high", chunks - low_chunks, high, Arrives.EVERY_WARP, gather, 0,
                    "a chunk of the high dims has been read"),
            Barrier("scores_full", 1, score, Arrives.EVERY_THREAD, high, 0, "P and dS are there",
                    also_awaited_by=(score, dkv)),
            Barrier("scores_free", 1, high, Arrives.EVERY_WARP, score, 0,
                    "P and dS have been read", also_produced_by=dkv),
            Barrier("rows_full", chunks, high, Arrives.EVERY_THREAD, score, 0,
                    "a chunk of Q and dO is there"),
            Barrier("statistics_full", 1, high, Arrives.EVERY_THREAD, score, 0,
                    "lse and delta are there"),
            Barrier("rows_free", chunks, dkv, Arrives.EVERY_WARP, high, 0,
                    "a chunk of Q and dO has been read"),
            *(drawn if self.tickets else ()),
        )  # fmt: skip
