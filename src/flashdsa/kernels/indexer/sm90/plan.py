"""Tiles, budgets and barriers of the Hopper indexer, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashdsa.hw import SM90
from flashdsa.plan import (
    Arrives,
    Barrier,
    Role,
    SmemPlan,
    SmemRegion,
    plan_smem,
    registers_each,
)
from flashdsa.problem import INDEX_HEAD_DIM, PAGE_BYTES, PAGE_SIZE

NUM_HEADS = (16, 32, 64)
TOPK = (512, 1024, 2048)
"""What kernels are compiled for."""
WARP_SIZE = 32
WARPGROUP_SIZE = 128
CACHE_ROW_BYTES = 128
"""The cache seen by TMA: rows of 128 bytes, a page is 64 rows of keys and 2 rows of scales."""
PAGE_ROWS = PAGE_BYTES // CACHE_ROW_BYTES
NUM_BINS = 2048
"""Bins of the histogram over sortable keys (see select.py)."""
BITMAP_WORDS = 4096
"""Of the winners' bitmap: 131,072 positions at a time."""
SEGMENT_WORDS = 12
"""32-bit words of a segment's description (see schedule.py)."""
NO_POSITION = 0x80000000
"""Marks unused entries of a published front; above all positions."""
MAX_PARTS = 512
"""CTAs that may share a row: no more than a CTA has consumers."""
HEADER_WORDS = 4
"""Of a published list: entries of its back, their largest key, its part's first position."""
SLOTS_PER_CTA = 2
"""A CTA publishes at most the tail of one row and the head of another."""


@dataclass(frozen=True)
class IndexerPlan:
    """One compiled indexer: choices first, then what follows from them.

    Attributes:
        num_heads: H, 16, 32 or 64. topk: ids of a row. sorted: descending score order.
        stages: pages in flight. A multiple of `consumer_warpgroups`: page i belongs to warpgroup
            i % consumer_warpgroups, so a stage is always read by the same one, and a fast
            warpgroup cannot take the phase of a slow one's page for its own.
        list_capacity: scored tokens that the ranking keeps in shared memory.
        max_candidates: entries that are taken out of the list to find the threshold among them; at
            most one a consumer.
        max_compared: entries of which each is compared with each.
        segment_stages: row segments (query, weights, description) in flight.
        refill_pages: with less room in the list than this, it is compacted first.
    """

    num_heads: int = 64
    topk: int = 2048
    sorted: bool = False
    stages: int = 12
    consumer_warpgroups: int = 4
    list_capacity: int = 8192
    max_candidates: int = 512
    max_compared: int = 64
    segment_stages: int = 2
    refill_pages: int = 24

    def __post_init__(self) -> None:
        """Hold the choices against the instructions and the architecture."""
        if self.num_heads not in NUM_HEADS:
            raise ValueError(f"num_heads: expected 16, 32 or 64; got {self.num_heads}")
        if self.topk not in TOPK:
            raise ValueError(f"topk: expected 512, 1024 or 2048; got {self.topk}")
        if self.stages % self.consumer_warpgroups:
            raise ValueError("stages: expected a multiple of consumer_warpgroups")
        if self.list_capacity < self.topk + PAGE_SIZE * self.refill_pages:
            raise ValueError("list_capacity: no room for a batch of pages beside the best tokens")
        assert self.smem.total <= SM90.smem_bytes

    @property
    def unscored_length(self) -> int:
        """Rows of up to so many tokens need no scores: all of them are among the best."""
        return 0 if self.sorted else self.topk

    @property
    def least_pages(self) -> int:
        """Of a CTA that shares a row, at least; the schedule asks for more where rows are long."""
        return 1

    @property
    def consumer_threads(self) -> int:
        """Threads that score and rank."""
        return self.consumer_warpgroups * WARPGROUP_SIZE

    @property
    def consumer_warps(self) -> int:
        """Warps that score and rank; the producer is the one behind them."""
        return self.consumer_threads // WARP_SIZE

    @property
    def threads(self) -> int:
        """Consumers and one producer warp."""
        return self.consumer_threads + WARP_SIZE

    @property
    def refill_entries(self) -> int:
        """With less room than this the list is compacted before more is added."""
        return self.refill_pages * PAGE_SIZE

    @property
    def stage_bytes(self) -> int:
        """A page, padded to the period of the 128-byte swizzle."""
        return -(-PAGE_BYTES // 1024) * 1024

    @property
    def query_bytes(self) -> int:
        """e4m3 queries of one row."""
        return self.num_heads * INDEX_HEAD_DIM

    @property
    def weight_bytes(self) -> int:
        """fp32 weights of one row."""
        return self.num_heads * 4

    @property
    def _bitmap_rest(self) -> int:
        """Bytes of the bitmap beyond the regions that it overlays."""
        overlaid = 4 * (NUM_BINS + 2 * self.max_candidates + MAX_PARTS)
        return max(4 * BITMAP_WORDS - overlaid, 16)

    @property
    def regions(self) -> list[SmemRegion]:
        """What shared memory holds, in its order."""
        return [
            SmemRegion("pages", self.stages * self.stage_bytes, 1024, "keys and scales, SW128"),
            SmemRegion("queries", self.segment_stages * self.query_bytes, 1024, "e4m3, SW128"),
            SmemRegion("weights", self.segment_stages * self.weight_bytes, 128, "fp32"),
            SmemRegion("keys", self.list_capacity * 4, 16, "list: sortable scores"),
            SmemRegion("positions", self.list_capacity * 4, 16, "list: token positions"),
            SmemRegion("histogram", NUM_BINS * 4, 16, "bins; the winners' bitmap starts here"),
            SmemRegion("candidate_keys", self.max_candidates * 4, 16, "of the cut-off bin"),
            SmemRegion("candidate_positions", self.max_candidates * 4, 16, "likewise"),
            SmemRegion("part_entries", MAX_PARTS * 4, 16, "of parts' backs to read"),
            SmemRegion("bitmap_rest", self._bitmap_rest, 16, "of the winners' bitmap"),
            SmemRegion("segments", self.segment_stages * SEGMENT_WORDS * 4, 16, "descriptions"),
            SmemRegion("page_valid", self.stages * 4, 16, "1 where the page id is in the cache"),
            SmemRegion("ordered", self.topk * 4, 16, "winners' ids, ordered"),
            SmemRegion("scratch", 64 * 4, 16, "scans and broadcasts of the consumers"),
            SmemRegion("page_full", self.stages * 8, 8, "mbarriers: TMA -> a warpgroup"),
            SmemRegion("page_empty", self.stages * 8, 8, "mbarriers: 4 warps -> producer"),
            SmemRegion("segment_full", self.segment_stages * 8, 8, "mbarriers: -> consumers"),
            SmemRegion("segment_empty", self.segment_stages * 8, 8, "mbarriers: -> producer"),
        ]

    @property
    def roles(self) -> tuple[Role, Role]:
        """The producer warp, and the consumers before it."""
        registers = registers_each(self.threads, SM90.registers)
        return (
            Role("load", WARP_SIZE, registers, "schedules and keeps pages in flight"),
            Role("rank", self.consumer_threads, registers, "score, rank, merge and write ids"),
        )

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers that the plan has regions for."""
        load, rank = self.roles
        head = self.query_bytes + self.weight_bytes
        one, group, warps = Arrives.ONE_THREAD, Arrives.WARPS_OF_ONE_GROUP, Arrives.EVERY_WARP
        pages, segments = self.stages, self.segment_stages
        every = (
            Barrier("page_full", pages, load, one, rank, PAGE_BYTES, "the page is there"),
            Barrier("page_empty", pages, rank, group, load, 0, "the page has been read"),
            Barrier("segment_full", segments, load, one, rank, head, "the row's head is there"),
            Barrier("segment_empty", segments, rank, warps, load, 0, "its pages are scored"),
        )
        present = {region.name for region in self.regions}
        return tuple(barrier for barrier in every if barrier.name in present)

    @cached_property
    def smem(self) -> SmemPlan:
        """Shared memory, the only truth about it."""
        return plan_smem(self.regions, SM90.smem_bytes)

    @property
    def first_list_word(self) -> int:
        """Where a slot's list begins, behind the header and room for the fronts of a row."""
        return HEADER_WORDS + 2 * self.list_capacity

    @property
    def slot_words(self) -> int:
        """32-bit words of a slot: header, fronts and list, entries are (key, position)."""
        return self.first_list_word + 2 * (self.list_capacity - self.topk)

    def slots(self, num_ctas: int) -> int:
        """Published lists of a launch."""
        return SLOTS_PER_CTA * num_ctas
