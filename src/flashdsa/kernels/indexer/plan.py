"""Choices of every indexer, and what follows from them on any architecture, as data."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer import sizes
from flashdsa.plan import Arrives, Barrier, CtaPlan, SmemRegion, registers_each
from flashdsa.problem import INDEX_HEAD_DIM, INDEX_TOKEN_BYTES, PAGE_SIZE

NUM_HEADS = (16, 32, 64)
TOPK = (512, 1024, 2048)
"""Widths of lists that kernels sort; no list has more entries."""
MOST_PAGES = WARP_SIZE
"""Widest table whose rows may go unscored: each lane of a warp has one page of a row."""
WORD = 4
CONSUMER_BARRIER = 1
"""Named barrier of a CTA's consumers."""


class By(StrEnum):
    """Modes in which CTAs share rows; the first two are those of the selection."""

    CLUSTER = "cluster"  # the CTAs of a cluster, or of an equal part of one, together
    CLUSTERS = "clusters"  # several clusters, if the row is long; the lengths decide
    PAIRS = "pairs"  # two rows of a request are scored together, and ranked by another launch


FUSED_ROWS = (By.CLUSTER, By.CLUSTERS)
"""The fused kernels of each size."""


class SplitWorkspace(NamedTuple):
    """Device memory in which the CTAs of split rows meet, in 32-bit words: see `launch_indexer`."""

    counters: int  # 0 before a launch and after it
    slots: tuple[int, int]  # how many, words of each


@dataclass(frozen=True)
class Lists:
    """Sizes of the lists of scored tokens, and when they are compacted.

    Attributes:
        capacity: scored tokens that the selection keeps in shared memory.
        refill_pages: with less room in the list than this, it is compacted first.
        first_fill_pages: pages after which every FILLS-th CTA first compacts a part that does not
            fit the list.
        fill_step_pages: the increase from each such CTA to the next: CTAs that compact leave their
            share of the memory's bandwidth to the others.
        max_compared: candidates that are compared with each other, at most.
        most_topk: ids of a row, at most.
        tile_stages: work tiles (query, weights, description) in flight.
    """

    capacity: int = 8192
    refill_pages: int = 16
    first_fill_pages: int = 76
    fill_step_pages: int = 7
    max_compared: int = 128
    most_topk: int = max(TOPK)
    tile_stages: int = 2


@dataclass(frozen=True)
class Sharing:
    """When clusters share a row.

    Attributes:
        select_pages: pages that a CTA could score in the time in which it selects in a row.
        merge_pages: selection time of a split row, until the last CTA has merged, in pages scored.
    """

    select_pages: int = 20
    merge_pages: int = 50


@dataclass(frozen=True)
class SelectPlan(CtaPlan):
    """One compiled indexer: choices, then derived values; an architecture's plan adds how pages are
    loaded and scored. The last role selects.

    Attributes:
        num_heads: H, 16, 32 or 64. rows: who selects in a row. stages: pages in flight.
    """

    num_heads: int = 64
    rows: By = By.CLUSTER
    stages: int = 12
    lists: Lists = Lists()
    sharing: Sharing = Sharing()

    consumer_warpgroups = 4
    selects = True  # it finds a row's best, and does not only score
    gathers = False  # the block table has a slot for each token, not a row's pages
    ranked = False  # scores are ranked by a launch that begins early

    def __post_init__(self) -> None:
        if self.num_heads not in NUM_HEADS:
            raise ValueError(f"num_heads: expected 16, 32 or 64; got {self.num_heads}")
        if self.in_pairs and not self.ranked:
            raise ValueError("rows: pairs are scored for a launch that ranks them")
        lists, capacity = self.lists, self.lists.capacity
        if capacity < self.most_kept + self.refill_entries:
            raise ValueError("lists.capacity: no room for a batch of pages beside the best tokens")
        if self.splits and min(self.most_at_bin) < self.most_kept:
            raise ValueError("lists.capacity: no room for what three clusters publish")
        first = lists.first_fill_pages * PAGE_SIZE
        most = first + (sizes.FILLS - 1) * lists.fill_step_pages * PAGE_SIZE
        if not lists.most_topk <= first <= most <= capacity:
            raise ValueError("lists: a first fill has most_topk tokens and fits the capacity")
        super().__post_init__()

    @property
    @abstractmethod
    def name(self) -> str:
        """The exported name of the compiled function."""

    @property
    def sizes_and_kinds(self) -> str:
        """Part of the exported name that tells the plans of one kernel apart."""
        return f"h{self.num_heads}" + f"_{self.rows.value}" * self.splits

    @property
    def splits(self) -> bool:
        """Clusters may share long rows, which takes a workspace."""
        return self.rows == By.CLUSTERS

    @property
    def token_bytes(self) -> int:
        """Bytes of a key in the cache, its scales among them."""
        return INDEX_TOKEN_BYTES

    @property
    def page_bytes(self) -> int:
        return PAGE_SIZE * self.token_bytes

    @property
    def page_rows(self) -> int:
        """Rows of the cache, as TMA sees it, that a page has."""
        return self.page_bytes // sizes.CACHE_ROW_BYTES

    @property
    def entry_tokens(self) -> int:
        """Tokens that an entry of the block table names."""
        return 1 if self.gathers else PAGE_SIZE

    @property
    def in_pairs(self) -> bool:
        """Two rows of a request are scored together."""
        return self.rows == By.PAIRS

    @property
    def teams(self) -> int:
        """Rows that are scored together."""
        return 2 if self.in_pairs else 1

    @property
    def max_candidates(self) -> int:
        """Entries that are taken out of the lists to find the threshold; at most one a consumer."""
        return self.consumer_threads

    @property
    def most_kept(self) -> int:
        """Entries that are left after a list is cut down at a bin: the best, and those in the bin
        of the last of them."""
        return self.lists.most_topk + self.max_candidates

    @property
    def most_at_bin(self) -> tuple[int, int]:
        """Entries that are left, at most, after a cluster cuts its part at a bin, if several share
        a row. A CTA of the last cluster lists what CTAs of two neighbouring ones published, or,
        where a row has more clusters than they have CTAs and one, of three."""
        return self.lists.capacity // 2, self.lists.capacity // 3

    @property
    def most_published(self) -> int:
        """Entries that a CTA publishes, at most."""
        return self.most_at_bin[0]

    @property
    def pages_in_order(self) -> int | None:
        """Pages of a part up to which they are scored in the order of positions; None: always."""
        return None

    @property
    def consumer_threads(self) -> int:
        """Threads that score and select."""
        return self.consumer_warpgroups * WARPGROUP_SIZE

    @property
    def consumer_warps(self) -> int:
        """Warps that score and select; the load warps follow them."""
        return self.consumer_threads // WARP_SIZE

    @property
    @abstractmethod
    def load_warps(self) -> int:
        """Warps that keep pages in flight."""

    @property
    @abstractmethod
    def ring_stages(self) -> int:
        """Stages of the ring of pages."""

    @property
    @abstractmethod
    def valid_words(self) -> int:
        """Words of a stage that say which of its tokens are in the cache."""

    @property
    def warp_stages(self) -> int:
        """Stages in flight that one load warp has."""
        return self.ring_stages // self.load_warps

    @property
    def full_depth(self) -> int:
        """Stages in flight of a load warp, in the steps in which a schedule measures them."""
        return self.warp_stages * sizes.DEPTH_STEPS

    @property
    def threads(self) -> int:
        """Consumers, and the warpgroup that loads."""
        return self.consumer_threads + WARPGROUP_SIZE

    @property
    def refill_entries(self) -> int:
        """Free entries below which the list is compacted before more is added."""
        return self.lists.refill_pages * PAGE_SIZE

    @property
    def tile_heads(self) -> int:
        return self.num_heads * self.teams

    @property
    def query_bytes(self) -> int:
        """e4m3 queries of the rows that are scored together."""
        return self.tile_heads * INDEX_HEAD_DIM

    @property
    def weight_bytes(self) -> int:
        """fp32 weights of the rows that are scored together."""
        return self.tile_heads * 4

    @property
    def received_bytes(self) -> int:
        """Candidates of all CTAs of a row; a CTA's own take as many."""
        return self.max_candidates * sizes.ENTRY_WORDS * 4

    @property
    def launch_registers(self) -> int:
        """Registers of every thread, until the roles exchange some."""
        return registers_each(self.threads, self.arch.registers)

    @property
    @abstractmethod
    def inputs(self) -> list[SmemRegion]:
        """Shared memory regions of keys, queries and weights."""

    @property
    @abstractmethod
    def input_barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers of pages, and of the tiles that they belong to."""

    @property
    def buffers(self) -> list[SmemRegion]:
        tiles, pages = self.lists.tile_stages * sizes.TILE_WORDS, self.ring_stages
        scratch = SmemRegion("scratch", sizes.SCRATCH_WORDS * WORD, 16, "scans of the consumers")
        return [
            *self.inputs,
            *(self.selection if self.selects else []),
            SmemRegion("work_tiles", tiles * WORD, 16, "descriptions"),
            SmemRegion("page_valid", pages * self.valid_words * WORD, 16, "1: it is in the cache"),
            *([scratch] if self.selects else []),
        ]

    @property
    def selection(self) -> list[SmemRegion]:
        """Regions of a row's list and of its histogram, of what the CTAs that share a row send each
        other, and of the order of rows in a CTA."""
        entries, ctas = self.lists.capacity * WORD, sizes.MAX_CLUSTER * WORD
        row = [
            SmemRegion("keys", entries, 16, "list: sortable scores"),
            SmemRegion("positions", entries, 16, "list: token positions"),
            SmemRegion("histogram", sizes.NUM_BINS * WORD, 16, "bins, or the winners' bitmap"),
            SmemRegion("candidates", self.received_bytes, 16, "own entries of the cut-off bin"),
            SmemRegion("fine", ctas * sizes.BIN_GROUP, 16, "received: bins of a group"),
            SmemRegion("received", self.received_bytes, 16, "received: candidates"),
            SmemRegion("coarse", ctas * sizes.BIN_GROUPS, 16, "received: groups of bins"),
            SmemRegion("above", ctas, 16, "received: entries above the last bin"),
            SmemRegion("own_coarse", sizes.BIN_GROUPS * WORD, 16, "what is sent there"),
        ]
        scheduled = [
            SmemRegion("lengths", sizes.ORDERED_ROWS * WORD, 16, "tokens of all rows"),
            SmemRegion("own_rows", sizes.MAX_OWN_ROWS * WORD, 16, "rows of the CTA's group"),
            SmemRegion("tickets", ctas, 16, "received: order of publishing"),
        ]
        return [*row, *(scheduled if self.splits else [])]

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        return (*self.input_barriers, *(self.messages if self.selects else ()))

    @property
    def messages(self) -> tuple[Barrier, ...]:
        """The mbarriers of the messages between the CTAs that share a row."""
        select, one, ctas = self.roles[-1], Arrives.ONE_THREAD, sizes.MAX_CLUSTER * WORD
        coarse, fine, most = ctas * sizes.BIN_GROUPS, ctas * sizes.BIN_GROUP, self.received_bytes
        tickets = Barrier(
            "tickets_full", 1, select, Arrives.EVERY_CTA, select, ctas, "who published last"
        )
        return (
            Barrier("coarse_full", 1, select, one, select, coarse, "groups' counts"),
            Barrier("fine_full", 1, select, one, select, fine, "bins' counts"),
            Barrier("received_full", 1, select, one, select, most + ctas, "candidates, and counts"),
            *((tickets,) if self.splits else ()),
        )

    @property
    def slot_words(self) -> int:
        """Most 32-bit words that a CTA publishes: see select/published.py."""
        return sizes.SLOT_HEADER_WORDS + sizes.ENTRY_WORDS * self.most_published

    def split_workspace(self, ctas: int) -> SplitWorkspace:
        """Workspace of a launch of at most `ctas` CTAs: a counter of each row of a batch whose rows
        may be split, and a slot of each CTA."""
        return SplitWorkspace(sizes.MOST_WEIGHED, (ctas, self.slot_words))


def most_pages(topk: int) -> int:
    """Pages a row of the widest table in which no row has more than `topk` tokens."""
    return min(topk // PAGE_SIZE, MOST_PAGES)
