"""Tiles, budgets, products and barriers of the Blackwell indexer, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flashdsa.dsl.umma import E4M3, SharedOperand, SharedTile, TilePart, UmmaProduct
from flashdsa.hw import REGISTER_STEP, SM100, WARP_SIZE, WARPGROUP_SIZE, ArchSpec
from flashdsa.kernels.indexer.order.plan import OrderPlan
from flashdsa.kernels.indexer.plan import SelectPlan
from flashdsa.plan import Arrives, Barrier, Role, Sm100Plan, SmemRegion, TmemRegion
from flashdsa.problem import INDEX_HEAD_DIM, PAGE_KEY_BYTES, PAGE_SIZE

MOST_LOAD_WARPS = 3
"""Load warps, at most: the issuing warp is in their warpgroup."""
PAGE_SCALE_BYTES = PAGE_SIZE * 4
"""fp32 scales of a page."""
GATHERED = 4
"""Rows of one gather4."""


@dataclass(frozen=True)
class IndexerPlan(SelectPlan, Sm100Plan):
    """One compiled indexer: choices, then derived values.

    Use n of the ring of pages belongs to warpgroup n % consumer_warpgroups, which has one
    accumulator in tensor memory.

    Attributes:
        gathers: the block table has a slot for each token, in any order; no other kernel does.
            Other choices are in `SelectPlan`.
    """

    gathers: bool = False

    pages_per_stage = 2  # a stage is a product: as many tokens as tensor memory has lanes

    def __post_init__(self) -> None:
        if self.stages % self.pages_per_stage:
            raise ValueError("stages: expected a multiple of pages_per_stage")
        super().__post_init__()

    @property
    def name(self) -> str:
        return f"sm100_indexer_{self.sizes_and_kinds}" + "_gather" * self.gathers

    @property
    def valid_words(self) -> int:
        """Words of a stage that say which of its tokens are in the cache: one a page, or of four
        gathered tokens."""
        return self.stage_tokens // GATHERED if self.gathers else self.pages_per_stage

    @property
    def ring_stages(self) -> int:
        return self.stages // self.pages_per_stage

    @property
    def load_warps(self) -> int:
        """Load warps: the most among which the stages can be divided. A warp starts a page in some
        300 clocks, about the time in which memory brings one. A stage is always filled by the same
        warp, so that none takes the phase of another one's page for its own."""
        return next(n for n in range(MOST_LOAD_WARPS, 0, -1) if self.ring_stages % n == 0)

    @property
    def load_registers(self) -> int:
        """Registers of a thread of the warpgroup that loads and issues."""
        return 32

    @property
    def mma_warp(self) -> int:
        """Number of the issuing warp: the last one, in the load warps' warpgroup."""
        return self.threads // WARP_SIZE - 1

    def cache_operand(self, cache: Any) -> Any:
        """The cache: scales are copied by their addresses."""
        return cache

    @property
    def page_box_rows(self) -> int:
        """Neighbouring rows of the cache that one copy brings: keys, so that those of a stage are
        neighbours, too."""
        return 1 if self.gathers else PAGE_SIZE

    @property
    def stage_key_bytes(self) -> int:
        return self.pages_per_stage * PAGE_KEY_BYTES

    @property
    def stage_tokens(self) -> int:
        return self.pages_per_stage * PAGE_SIZE

    @property
    def inputs(self) -> list[SmemRegion]:
        stages, tiles = self.ring_stages, self.lists.tile_stages
        return [
            SmemRegion("pages", stages * self.stage_key_bytes, 1024, "keys, e4m3, SW128"),
            SmemRegion("queries", tiles * self.query_bytes, 1024, "e4m3, SW128"),
            SmemRegion("scales", self.stages * PAGE_SCALE_BYTES, 128, "of keys, fp32"),
            SmemRegion("weights", tiles * self.weight_bytes, 128, "fp32"),
        ]

    @property
    def columns(self) -> list[TmemRegion]:
        """An accumulator for each warpgroup."""
        columns = self.num_heads
        return [
            TmemRegion(f"scores{group}", group * columns, columns, "a stage's products, fp32")
            for group in range(self.consumer_warpgroups)
        ]

    @property
    def product(self) -> UmmaProduct:
        """A stage's tokens times all heads: of stage 0, tile stage 0 and warpgroup 0."""
        keys, queries = (
            SharedTile(name, self.smem.offset(region), rows, INDEX_HEAD_DIM, INDEX_HEAD_DIM, E4M3)
            for name, region, rows in (
                ("keys", "pages", self.stage_tokens),
                ("queries", "queries", self.num_heads),
            )
        )
        return UmmaProduct(
            self.stage_tokens,
            self.num_heads,
            SharedOperand("K", self.stage_tokens, (TilePart(keys, INDEX_HEAD_DIM),)),
            SharedOperand("K", self.num_heads, (TilePart(queries, INDEX_HEAD_DIM),)),
        )

    @property
    def roles(self) -> tuple[Role, Role, Role]:
        """The consumers, then the load warps and the issuing warp."""
        loading = self.load_registers
        freed = WARPGROUP_SIZE * (self.launch_registers - loading)
        more = freed // self.consumer_threads // REGISTER_STEP * REGISTER_STEP
        select = self.launch_registers + more
        return (
            Role("load", self.load_warps * WARP_SIZE, loading, "keeps pages in flight"),
            Role("mma", WARP_SIZE, loading, "issues all products, owns tensor memory"),
            Role("select", self.consumer_threads, select, "sum over heads, select, write ids"),
        )

    @property
    def input_barriers(self) -> tuple[Barrier, ...]:
        load, mma, select = self.roles
        head = self.query_bytes + self.weight_bytes
        one, group, warps = Arrives.ONE_THREAD, Arrives.WARPS_OF_ONE_GROUP, Arrives.EVERY_WARP
        stages, tiles, groups = self.ring_stages, self.lists.tile_stages, self.consumer_warpgroups
        return (
            self._page_full(load, mma, select),
            Barrier("page_empty", stages, select, group, load, 0, "the pages have been read"),
            Barrier("score_full", groups, mma, Arrives.COMMIT, select, 0, "products are there"),
            Barrier("score_empty", groups, select, group, mma, 0, "products have been read"),
            Barrier(
                "tile_full", tiles, load, one, mma, head, "the row's head is there",
                also_awaited_by=(select,),
            ),
            Barrier(
                "tile_empty", tiles, select, warps, load, 0, "its pages are scored",
                also_produced_by=mma, also_arrives=one,
            ),
        )  # fmt: skip

    def _page_full(self, load: Role, mma: Role, select: Role) -> Barrier:
        """The barrier of loaded stages. Bulk copies bring scales of pages; those of gathered tokens
        come by copies of each lane, for which it arrives."""
        scales = 0 if self.gathers else self.pages_per_stage * PAGE_SCALE_BYTES
        return Barrier(
            "page_full",
            self.ring_stages,
            load,
            Arrives.ONE_THREAD,
            mma,
            self.stage_key_bytes + scales,
            "the pages are there",
            also_awaited_by=(select,),
            also_produced_by=load if self.gathers else None,
            also_arrives=Arrives.EVERY_LANE_OF_ONE_WARP,
        )


@dataclass(frozen=True)
class BlackwellOrderPlan(OrderPlan):
    """The kernel that sorts lists, which no architecture changes. CuTe DSL names compiled code by
    the plan's class and fields: with Hopper's class either would be taken for the other."""

    arch: ClassVar[ArchSpec] = SM100

    @property
    def name(self) -> str:
        return f"sm100_{super().name}"


@dataclass(frozen=True)
class LogitsPlan(IndexerPlan):
    """The plan of scores alone: the fused indexer's stream of pages."""

    stages: int = 24
    selects = False

    @property
    def name(self) -> str:
        return f"sm100_indexer_logits_h{self.num_heads}" + "_gather" * self.gathers

    @property
    def load_registers(self) -> int:
        """Registers of a load thread, which also cuts the line of pages (see
        write_scores.py)."""
        return 40
