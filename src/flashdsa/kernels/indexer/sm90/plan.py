"""Tiles, budgets and barriers of the Hopper indexer, as data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from flashdsa.hw import REGISTER_STEP, WARPGROUP_SIZE
from flashdsa.kernels.indexer.plan import NUM_HEADS, By, SelectPlan
from flashdsa.kernels.indexer.sizes import RANK_BINS
from flashdsa.plan import Arrives, Barrier, Role, Sm90Plan, SmemRegion
from flashdsa.problem import INDEX_TOKEN_BYTES, MXFP4_TOKEN_BYTES, PAGE_SIZE, SCALE_BYTES

LOAD_REGISTERS = 32
"""Registers of a load thread; with 24, the least possible, the consumers would get no more."""


@dataclass(frozen=True)
class IndexerPlan(SelectPlan, Sm90Plan):
    """One compiled indexer: see `SelectPlan`. `stages` is a multiple of `consumer_warpgroups`: page
    i belongs to warpgroup i % consumer_warpgroups, so a stage is always read by the same one, and a
    fast warpgroup cannot take the phase of a slow one's page for its own."""

    mxfp4 = False  # keys are 64 bytes of e2m1 codes with four scales
    pages_per_stage = 1
    valid_words = 1  # of a stage: which of its tokens are in the cache

    def __post_init__(self) -> None:
        if self.stages % self.consumer_warpgroups:
            raise ValueError("stages: expected a multiple of consumer_warpgroups")
        super().__post_init__()

    @property
    def name(self) -> str:
        return f"indexer_{self.sizes_and_kinds}"

    @property
    def token_bytes(self) -> int:
        return MXFP4_TOKEN_BYTES if self.mxfp4 else INDEX_TOKEN_BYTES

    @property
    def page_key_bytes(self) -> int:
        """Bytes of a page's codes, which its scales follow."""
        return self.page_bytes - PAGE_SIZE * SCALE_BYTES

    @property
    def ring_stages(self) -> int:
        """Pages in flight."""
        return self.stages

    @property
    def pages_in_order(self) -> int | None:
        """Pages that the list has room for before it is cut."""
        return self.lists.capacity // PAGE_SIZE

    def cache_operand(self, cache: Any) -> Any:
        """Number of pages: TMA reads all of the cache."""
        return cache.shape[0]

    @property
    def page_box_rows(self) -> int:
        """Rows of the cache that one copy brings: a page's keys and scales."""
        return self.page_rows

    @property
    def load_warps(self) -> int:
        """Load warps, one for each consumer warpgroup: one warp starts a page in some 300 clocks,
        too slow for all. They cost the others no registers: each of 17 warps gets the same number
        as each of 20."""
        return self.consumer_warpgroups

    @property
    def stage_bytes(self) -> int:
        """A page, padded to the period of the 128-byte swizzle."""
        return -(-self.page_bytes // 1024) * 1024

    @property
    def inputs(self) -> list[SmemRegion]:
        tiles, weights = self.lists.tile_stages, self.weight_bytes
        # A pair of rows has more weights than the consumers have registers for.
        halves = SmemRegion("halves", weights, 128, "halved weights, in the order of lanes")
        return [
            SmemRegion("pages", self.stages * self.stage_bytes, 1024, "keys and scales, SW128"),
            SmemRegion("queries", tiles * self.query_bytes, 1024, "e4m3, SW128"),
            SmemRegion("weights", tiles * weights, 128, "fp32"),
            *([halves] if self.in_pairs else []),
        ]

    @property
    def roles(self) -> tuple[Role, Role]:
        """The load warps, and the consumers before them."""
        freed = WARPGROUP_SIZE * (self.launch_registers - LOAD_REGISTERS)
        more = freed // self.consumer_threads // REGISTER_STEP * REGISTER_STEP
        select = self.launch_registers + more
        return (
            Role("load", WARPGROUP_SIZE, LOAD_REGISTERS, "keeps pages in flight"),
            Role("select", self.consumer_threads, select, "score, find the best, write ids"),
        )

    @property
    def input_barriers(self) -> tuple[Barrier, ...]:
        load, select = self.roles
        head = self.query_bytes + self.weight_bytes
        one, group, warps = Arrives.ONE_THREAD, Arrives.WARPS_OF_ONE_GROUP, Arrives.EVERY_WARP
        pages, tiles = self.stages, self.lists.tile_stages
        return (
            Barrier("page_full", pages, load, one, select, self.page_bytes, "the page is there"),
            Barrier("page_empty", pages, select, group, load, 0, "the page has been read"),
            Barrier("tile_full", tiles, load, one, select, head, "the row's head is there"),
            Barrier("tile_empty", tiles, select, warps, load, 0, "its pages are scored"),
        )


BLOCK = 8
"""Tokens of a block whose best score is written in place of theirs: DeepSeek-V4.1's."""


@dataclass(frozen=True)
class LogitsPlan(IndexerPlan):
    """The plan of scores alone: the fused indexer's stream of pages.

    Attributes:
        mxfp4: keys are 64 bytes of codes. of_blocks: the best score of each BLOCK tokens is
            written, nothing beyond a row's length.
        ranked: a launch that begins early ranks the scores. Tokens of pages outside the cache get
            the word INVALID, and nothing is written beyond a row's length.
    """

    stages: int = 16
    mxfp4: bool = False
    of_blocks: bool = False
    ranked: bool = False
    selects = False
    pages_in_order = None  # no page waits for others

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.in_pairs and self.ring_stages & (self.ring_stages - 1):
            raise ValueError("stages: of rows in pairs, expected a power of two")

    @property
    def name(self) -> str:
        kinds = "_mxfp4" * self.mxfp4 + "_blocks" * self.of_blocks + "_pairs" * self.in_pairs
        kinds += "_ranked" * (self.ranked and not self.in_pairs)
        return f"indexer_logits_h{self.num_heads}{kinds}"

    @property
    def tokens_of_score(self) -> int:
        """Tokens that a written score stands for."""
        return BLOCK if self.of_blocks else 1

    @property
    def behind_barriers(self) -> list[SmemRegion]:
        counts = SmemRegion("counts", self.teams * RANK_BINS * 4, 16, "scores of a tile by bins")
        return [counts] if self.ranked else []


LOGITS_PLANS = (
    *(
        LogitsPlan(num_heads, mxfp4=mxfp4, of_blocks=of_blocks)
        for of_blocks, mxfp4 in product((False, True), repeat=2)
        for num_heads in reversed(NUM_HEADS)
    ),
    *(
        LogitsPlan(num_heads, rows=rows, ranked=True)
        for rows in (By.CLUSTER, By.PAIRS)
        for num_heads in reversed(NUM_HEADS)
    ),
)
"""The kernels that write scores."""
