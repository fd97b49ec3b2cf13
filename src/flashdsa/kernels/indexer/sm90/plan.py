"""Tiles, budgets and barriers of the Hopper indexer, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashdsa.hw import REGISTER_STEP, SM90, WARP_SIZE, WARPGROUP_SIZE
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
NUM_BINS = 4096
"""Bins of the histogram over sortable keys (see bins.py)."""
BITMAP_WORDS = NUM_BINS
"""Of the winners' bitmap, which takes the histogram's place: 131,072 positions at a time."""
SEGMENT_WORDS = 6
"""32-bit words of a segment's description (see segments.py)."""
BIN_GROUP = 32
"""Bins that are summed up for the first of a round's two messages (see exchange.py)."""
BIN_GROUPS = NUM_BINS // BIN_GROUP
MAX_CLUSTER = 16
"""CTAs that may share a row; more than 8 is what CUDA calls a non-portable size."""
LOAD_REGISTERS = 32
"""Of a producer thread; with 24, the least there is, the consumers would get no more."""
SLOT_HEADER_WORDS = 4
"""Of what a CTA publishes: entries, first and last position of its part, and one unused."""
ENTRY_WORDS = 2
"""Of a candidate on its way between CTAs: key and position."""
ORDERED_ROWS = 512
"""Of batches of up to so many rows the lengths decide who gets which (see order.py)."""
FILLS = 8
"""Different numbers of pages that CTAs take before they first compact their lists."""
MAX_DEALS = 64
"""Rows that a cluster gets of such a batch, at most."""
MAX_HALVINGS = 2
"""Of a cluster into groups of CTAs that share rows."""
DEPTH_STEPS = 8
"""Steps of a page in which the pages that a producer warp keeps in flight are measured."""


@dataclass(frozen=True)
class IndexerPlan:
    """One compiled indexer: choices first, then what follows from them.

    Attributes:
        num_heads: H, 16, 32 or 64. topk: ids of a row. sorted: descending score order.
        teams: several clusters may share a long row (see teams.py); not with `sorted`.
        dealt: for more rows than clusters: longest first, to whole clusters or parts of them (see
            order.py). Without, such a batch is dealt in its own order.
        stages: pages in flight. A multiple of `consumer_warpgroups`: page i belongs to warpgroup
            i % consumer_warpgroups, so a stage is always read by the same one, and a fast
            warpgroup cannot take the phase of a slow one's page for its own.
        list_capacity: scored tokens that the ranking keeps in shared memory.
        max_compared: entries of which each is compared with each.
        segment_stages: row segments (query, weights, description) in flight.
        first_fill_pages: a part that does not fit the list is compacted for the first time after
            so many pages in every FILLS-th CTA,
        fill_step_pages: and so many more in each behind it: those that compact at a time leave
            their share of the memory's bandwidth to the others.
        refill_pages: with less room in the list than this, it is compacted first.
        team_pages: rows of fewer pages are ranked by one cluster, even if more could share them.
        ranking_pages: pages that a CTA could score in the time in which it ranks a row.
    """

    num_heads: int = 64
    topk: int = 2048
    sorted: bool = False
    teams: bool = False
    dealt: bool = False
    stages: int = 12
    consumer_warpgroups: int = 4
    list_capacity: int = 8192
    max_compared: int = 128
    segment_stages: int = 2
    first_fill_pages: int = 76
    fill_step_pages: int = 7
    refill_pages: int = 16
    team_pages: int = 1024
    ranking_pages: int = 20

    def __post_init__(self) -> None:
        """Hold the choices against the instructions and the architecture."""
        if self.num_heads not in NUM_HEADS:
            raise ValueError(f"num_heads: expected 16, 32 or 64; got {self.num_heads}")
        if self.topk not in TOPK:
            raise ValueError(f"topk: expected 512, 1024 or 2048; got {self.topk}")
        if self.teams and self.sorted:
            raise ValueError("teams: a kernel that sorts has none")
        if self.teams and self.dealt:
            raise ValueError("teams: of clusters that get one row; dealt: of those with several")
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
        kinds = [kind for kind in ("sorted", "teams", "dealt") if getattr(self, kind)]
        return "_".join((f"indexer_h{self.num_heads}_k{self.topk}", *kinds))

    @property
    def ring_stages(self) -> int:
        """Pages in flight: fewer where all winners need room too, to be sorted."""
        return self.stages - self.consumer_warpgroups if self.sorted else self.stages

    @property
    def warp_stages(self) -> int:
        """Of them, those that a producer warp fills."""
        return self.ring_stages // self.consumer_warpgroups

    @property
    def max_candidates(self) -> int:
        """Entries that are taken out of the lists to find the threshold among them; at most one a
        consumer."""
        return self.consumer_threads

    @property
    def unscored_length(self) -> int:
        """Rows of up to so many tokens need no scores: all of them are among the best."""
        return 0 if self.sorted else self.topk

    @property
    def consumer_threads(self) -> int:
        """Threads that score and rank."""
        return self.consumer_warpgroups * WARPGROUP_SIZE

    @property
    def consumer_warps(self) -> int:
        """Warps that score and rank; the producer is the one behind them."""
        return self.consumer_threads // WARP_SIZE

    @property
    def producer_warps(self) -> int:
        """One for each consumer warpgroup: a warp starts a page in some 300 clocks, too slow for
        all. They take no registers from the others: 17 warps are given as many each as 20."""
        return self.consumer_warpgroups

    @property
    def threads(self) -> int:
        """Consumers and producers."""
        return self.consumer_threads + self.producer_warps * WARP_SIZE

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
        return [
            SmemRegion(
                "pages", self.ring_stages * self.stage_bytes, 1024, "keys and scales, SW128"
            ),
            SmemRegion("queries", self.segment_stages * self.query_bytes, 1024, "e4m3, SW128"),
            SmemRegion("weights", self.segment_stages * self.weight_bytes, 128, "fp32"),
            SmemRegion("keys", self.list_capacity * 4, 16, "list: sortable scores"),
            SmemRegion("positions", self.list_capacity * 4, 16, "list: token positions"),
            SmemRegion("histogram", NUM_BINS * 4, 16, "bins, or the winners' bitmap"),
            SmemRegion("candidates", self.received_bytes, 16, "own entries of the cut-off bin"),
            SmemRegion("fine", MAX_CLUSTER * BIN_GROUP * 4, 16, "mailbox: bins of a group"),
            SmemRegion("received", self.received_bytes, 16, "mailbox: candidates"),
            SmemRegion("coarse", MAX_CLUSTER * BIN_GROUPS * 4, 16, "mailbox: groups of bins"),
            SmemRegion("above", MAX_CLUSTER * 4, 16, "mailbox: entries above the last bin"),
            SmemRegion("own_coarse", BIN_GROUPS * 4, 16, "what is sent there"),
            *self._dealing_regions,
            *self._sorting_regions,
            *self._team_regions,
            SmemRegion("segments", self.segment_stages * SEGMENT_WORDS * 4, 16, "descriptions"),
            SmemRegion(
                "page_valid", self.ring_stages * 4, 16, "1 where the page id is in the cache"
            ),
            SmemRegion("scratch", 64 * 4, 16, "scans and broadcasts of the consumers"),
            SmemRegion("page_full", self.ring_stages * 8, 8, "mbarriers: TMA -> a warpgroup"),
            SmemRegion("page_empty", self.ring_stages * 8, 8, "mbarriers: 4 warps -> producer"),
            SmemRegion("segment_full", self.segment_stages * 8, 8, "mbarriers: -> consumers"),
            SmemRegion("segment_empty", self.segment_stages * 8, 8, "mbarriers: -> producer"),
            SmemRegion("coarse_full", 8, 8, "mbarrier: counts of groups are there"),
            SmemRegion("fine_full", 8, 8, "mbarrier: counts of bins are there"),
            SmemRegion("received_full", 8, 8, "mbarrier: candidates are there"),
        ]

    @property
    def _dealing_regions(self) -> list[SmemRegion]:
        """What a CTA keeps of the order of rows."""
        if not self.dealt:
            return []
        return [
            SmemRegion("lengths", ORDERED_ROWS * 4, 16, "tokens of all rows"),
            SmemRegion("own_rows", MAX_DEALS * 4, 16, "rows dealt to the group"),
        ]

    @property
    def _sorting_regions(self) -> list[SmemRegion]:
        """Where the cluster's first CTA gets all winners, to sort them."""
        if not self.sorted:
            return []
        return [
            SmemRegion("winners", self.topk * ENTRY_WORDS * 4, 16, "mailbox: to be sorted"),
            SmemRegion("winners_full", 8, 8, "mbarrier: winners are there"),
        ]

    @property
    def _team_regions(self) -> list[SmemRegion]:
        """Where a team's CTAs show each other when they published."""
        if not self.teams:
            return []
        return [
            SmemRegion("tickets", MAX_CLUSTER * 4, 16, "mailbox: order of publishing"),
            SmemRegion("tickets_full", 8, 8, "mbarrier: tickets are there"),
        ]

    @property
    def roles(self) -> tuple[Role, Role]:
        """The producer warps, and the consumers before them."""
        loading, ranking = self.launch_registers, self.launch_registers
        producer_threads = self.producer_warps * WARP_SIZE
        if producer_threads == WARPGROUP_SIZE:  # what setmaxnreg takes
            loading = LOAD_REGISTERS
            freed = producer_threads * (self.launch_registers - loading)
            ranking += freed // self.consumer_threads // REGISTER_STEP * REGISTER_STEP
        return (
            Role("load", producer_threads, loading, "keeps pages in flight"),
            Role("rank", self.consumer_threads, ranking, "score, rank with the cluster, write ids"),
        )

    @property
    def launch_registers(self) -> int:
        """Of every thread, until the roles exchange some."""
        return registers_each(self.threads, SM90.registers)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers that the plan has regions for."""
        load, rank = self.roles
        head = self.query_bytes + self.weight_bytes
        one, group, warps = Arrives.ONE_THREAD, Arrives.WARPS_OF_ONE_GROUP, Arrives.EVERY_WARP
        pages, segments = self.ring_stages, self.segment_stages
        every = (
            Barrier("page_full", pages, load, one, rank, PAGE_BYTES, "the page is there"),
            Barrier("page_empty", pages, rank, group, load, 0, "the page has been read"),
            Barrier("segment_full", segments, load, one, rank, head, "the row's head is there"),
            Barrier("segment_empty", segments, rank, warps, load, 0, "its pages are scored"),
            Barrier(
                "coarse_full", 1, rank, one, rank, MAX_CLUSTER * BIN_GROUPS * 4, "groups' counts"
            ),
            Barrier("fine_full", 1, rank, one, rank, MAX_CLUSTER * BIN_GROUP * 4, "bins' counts"),
            Barrier(
                "received_full",
                1,
                rank,
                one,
                rank,
                self.received_bytes + MAX_CLUSTER * 4,
                "candidates, and counts above them",
            ),
            Barrier(
                "tickets_full",
                1,
                rank,
                Arrives.EVERY_CTA,
                rank,
                MAX_CLUSTER * 4,
                "who published last",
            ),
            Barrier(
                "winners_full", 1, rank, one, rank, self.topk * ENTRY_WORDS * 4, "winners to sort"
            ),
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
        """32-bit words of what a CTA publishes at most: see teams.py."""
        return SLOT_HEADER_WORDS + ENTRY_WORDS * (self.topk + self.max_candidates)
