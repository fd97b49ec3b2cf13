"""Tiles, budgets and barriers of the Hopper indexer, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashdsa.hw import REGISTER_STEP, SM90, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer.regions import select_barrier_regions, select_barriers, select_regions
from flashdsa.kernels.indexer.sizes import (
    ENTRY_WORDS,
    FILLS,
    SCRATCH_WORDS,
    SLOT_HEADER_WORDS,
    TILE_WORDS,
)
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
CACHE_ROW_BYTES = 128
"""The cache seen by TMA: rows of 128 bytes, a page is 64 rows of keys and 2 rows of scales."""
PAGE_ROWS = PAGE_BYTES // CACHE_ROW_BYTES
LOAD_REGISTERS = 32
"""Registers of a load thread; with 24, the least there is, the consumers would get no more."""


@dataclass(frozen=True)
class IndexerPlan:
    """One compiled indexer: choices first, then what follows from them.

    Attributes:
        num_heads: H, 16, 32 or 64. topk: ids of a row. sorted: descending score order.
        splits: several clusters may share a long row (see select/row_splits.py); not with `sorted`.
        scheduled: for more rows than clusters: longest first, to whole clusters or parts of them
            (see schedule/row_schedule.py). Without it, such a batch keeps its own order.
        stages: pages in flight. A multiple of `consumer_warpgroups`: page i belongs to warpgroup
            i % consumer_warpgroups, so a stage is always read by the same one, and a fast
            warpgroup cannot take the phase of a slow one's page for its own.
        list_capacity: scored tokens that the selection keeps in shared memory.
        max_compared: candidates that are compared with each other, at most.
        tile_stages: work tiles (query, weights, description) in flight.
        first_fill_pages: pages after which every FILLS-th CTA first compacts a part that does not
            fit the list.
        fill_step_pages: how many more that are in each CTA behind it: CTAs that compact leave their
            share of the memory's bandwidth to the others.
        refill_pages: with less room in the list than this, it is compacted first.
        split_pages: rows of fewer pages are one cluster's, even if more could share them.
        select_pages: pages that a CTA could score in the time in which it selects in a row.
    """

    num_heads: int = 64
    topk: int = 2048
    sorted: bool = False
    splits: bool = False
    scheduled: bool = False
    stages: int = 12
    consumer_warpgroups: int = 4
    list_capacity: int = 8192
    max_compared: int = 128
    tile_stages: int = 2
    first_fill_pages: int = 76
    fill_step_pages: int = 7
    refill_pages: int = 16
    split_pages: int = 1024
    select_pages: int = 20

    def __post_init__(self) -> None:
        """Hold the choices against the instructions and the architecture."""
        if self.num_heads not in NUM_HEADS:
            raise ValueError(f"num_heads: expected 16, 32 or 64; got {self.num_heads}")
        if self.topk not in TOPK:
            raise ValueError(f"topk: expected 512, 1024 or 2048; got {self.topk}")
        if self.splits and self.sorted:
            raise ValueError("splits: a kernel that sorts splits no rows")
        if self.splits and self.scheduled:
            raise ValueError("splits: for fewer rows than clusters; scheduled: for more")
        if self.stages % self.consumer_warpgroups:
            raise ValueError("stages: expected a multiple of consumer_warpgroups")
        if self.list_capacity < self.topk + PAGE_SIZE * self.refill_pages:
            raise ValueError("list_capacity: no room for a batch of pages beside the best tokens")
        first = self.first_fill_pages * PAGE_SIZE
        most = first + (FILLS - 1) * self.fill_step_pages * PAGE_SIZE
        if not self.topk <= first <= most <= self.list_capacity:
            raise ValueError("first_fill_pages: a first fill has topk tokens and fits the list")
        assert self.smem.total <= SM90.smem_bytes

    @property
    def name(self) -> str:
        """The exported name of its function."""
        kinds = [kind for kind in ("sorted", "splits", "scheduled") if getattr(self, kind)]
        return "_".join((f"indexer_h{self.num_heads}_k{self.topk}", *kinds))

    @property
    def ring_stages(self) -> int:
        """Pages in flight: fewer where all winners need room too, to be sorted."""
        return self.stages - self.consumer_warpgroups if self.sorted else self.stages

    @property
    def warp_stages(self) -> int:
        """Pages in flight that one load warp has."""
        return self.ring_stages // self.consumer_warpgroups

    @property
    def max_candidates(self) -> int:
        """Entries that are taken out of the lists to find the threshold among them; at most one a
        consumer."""
        return self.consumer_threads

    @property
    def unscored_length(self) -> int:
        """Tokens up to which a row needs no scores: all of them are among the best."""
        return 0 if self.sorted else self.topk

    @property
    def lists_in_order(self) -> bool:
        """Until it is compacted, the list has the order of positions, and so have the winners."""
        return not self.sorted

    @property
    def consumer_threads(self) -> int:
        """Threads that score and select."""
        return self.consumer_warpgroups * WARPGROUP_SIZE

    @property
    def consumer_warps(self) -> int:
        """Warps that score and select; the load warps come behind them."""
        return self.consumer_threads // WARP_SIZE

    @property
    def load_warps(self) -> int:
        """Load warps, one for each consumer warpgroup: one warp starts a page in some 300 clocks,
        too slow for all. They cost the others no registers: 17 warps get as many each as 20."""
        return self.consumer_warpgroups

    @property
    def threads(self) -> int:
        """Threads of the consumers and the load warps."""
        return self.consumer_threads + self.load_warps * WARP_SIZE

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
    def received_bytes(self) -> int:
        """Candidates of one CTA, or of all CTAs of a row."""
        return self.max_candidates * ENTRY_WORDS * 4

    @property
    def regions(self) -> list[SmemRegion]:
        """What shared memory holds, in its order."""
        pages, tiles = self.ring_stages, self.tile_stages
        return [
            SmemRegion("pages", pages * self.stage_bytes, 1024, "keys and scales, SW128"),
            SmemRegion("queries", tiles * self.query_bytes, 1024, "e4m3, SW128"),
            SmemRegion("weights", tiles * self.weight_bytes, 128, "fp32"),
            *select_regions(self),
            SmemRegion("work_tiles", tiles * TILE_WORDS * 4, 16, "descriptions"),
            SmemRegion("page_valid", pages * 4, 16, "1 where the page id is in the cache"),
            SmemRegion("scratch", SCRATCH_WORDS * 4, 16, "scans and broadcasts of the consumers"),
            SmemRegion("page_full", pages * 8, 8, "mbarriers: TMA -> a warpgroup"),
            SmemRegion("page_empty", pages * 8, 8, "mbarriers: 4 warps -> load"),
            SmemRegion("tile_full", tiles * 8, 8, "mbarriers: load -> consumers"),
            SmemRegion("tile_empty", tiles * 8, 8, "mbarriers: consumers -> load"),
            *select_barrier_regions(),
        ]

    @property
    def roles(self) -> tuple[Role, Role]:
        """The load warps, and the consumers before them."""
        loading, selecting = self.launch_registers, self.launch_registers
        load_threads = self.load_warps * WARP_SIZE
        if load_threads == WARPGROUP_SIZE:  # what setmaxnreg takes
            loading = LOAD_REGISTERS
            freed = load_threads * (self.launch_registers - loading)
            selecting += freed // self.consumer_threads // REGISTER_STEP * REGISTER_STEP
        return (
            Role("load", load_threads, loading, "keeps pages in flight"),
            Role(
                "select",
                self.consumer_threads,
                selecting,
                "score, find the best, write ids",
            ),
        )

    @property
    def launch_registers(self) -> int:
        """Registers of every thread, until the roles exchange some."""
        return registers_each(self.threads, SM90.registers)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers that the plan has regions for."""
        load, select = self.roles
        head = self.query_bytes + self.weight_bytes
        one, group, warps = Arrives.ONE_THREAD, Arrives.WARPS_OF_ONE_GROUP, Arrives.EVERY_WARP
        pages, tiles = self.ring_stages, self.tile_stages
        every = (
            Barrier("page_full", pages, load, one, select, PAGE_BYTES, "the page is there"),
            Barrier("page_empty", pages, select, group, load, 0, "the page has been read"),
            Barrier("tile_full", tiles, load, one, select, head, "the row's head is there"),
            Barrier("tile_empty", tiles, select, warps, load, 0, "its pages are scored"),
            *select_barriers(self, select),
        )
        present = {region.name for region in self.regions}
        return tuple(barrier for barrier in every if barrier.name in present)

    @cached_property
    def smem(self) -> SmemPlan:
        """Shared memory, the only truth about it."""
        return plan_smem(self.regions, SM90.smem_bytes)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.smem.total

    @property
    def slot_words(self) -> int:
        """32-bit words of what a CTA publishes at most: see select/row_splits.py."""
        return SLOT_HEADER_WORDS + ENTRY_WORDS * (self.topk + self.max_candidates)
