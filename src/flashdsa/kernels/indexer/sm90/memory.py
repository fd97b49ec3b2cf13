"""The kernel's shared memory as typed views, made from the plan."""

from typing import Any, NamedTuple

from cutlass import Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from flashdsa.kernels.indexer.sm90.plan import (
    BITMAP_WORDS,
    MAX_PARTS,
    NUM_BINS,
    SEGMENT_WORDS,
    IndexerPlan,
)


class Ranking(NamedTuple):
    """What the consumers rank in. All of it is theirs alone."""

    keys: cute.Tensor  # (list_capacity,) Int32, bits of Uint32
    positions: cute.Tensor  # (list_capacity,) Int32, bits of Uint32
    histogram: cute.Tensor  # (NUM_BINS,) Int32
    candidate_keys: cute.Tensor  # (max_candidates,) Int32, bits of Uint32
    candidate_positions: cute.Tensor  # (max_candidates,) Int32, bits of Uint32
    part_entries: cute.Tensor  # (MAX_PARTS,) Int32: entries to read of a part's back
    bitmap: cute.Tensor  # (BITMAP_WORDS,) Int32 over histogram, candidates and part_entries
    ordered: cute.Tensor  # (topk,) Int32: winners' ids in the order of the output
    scratch: cute.Tensor  # (64,) Int32; places: see the constants below


SCRATCH_WARP_SUMS = 0  # one word a consumer warp
SCRATCH_BIN = 32  # the chosen bin, entries above it, entries in it
SCRATCH_COUNT = 36  # entries in the list
SCRATCH_CANDIDATES = 37  # entries among the candidates
SCRATCH_THRESHOLD = 38  # key and position of the last winner
SCRATCH_LAST = 40  # 1 in the CTA that arrives last at a row
SCRATCH_FRONT = 49  # front entries, largest key behind them, list entries published
SCRATCH_PARTS = 43  # the part before which the choice of backs ended
SCRATCH_EXTREMES = 44  # least and greatest key, least and greatest place


class Pipeline(NamedTuple):
    """Shared memory and barriers between the producer and the consumers."""

    pages: Any  # pointer, stage s at + s * stage_bytes
    queries: Any
    weights: cute.Tensor  # (segment_stages * num_heads,) Float32
    segments: cute.Tensor  # (segment_stages * SEGMENT_WORDS,) Int32
    page_valid: cute.Tensor  # (stages,) Int32
    page_full: Any  # pointers to mbarriers
    page_empty: Any
    segment_full: Any
    segment_empty: Any


class Arena:
    """One block of dynamic shared memory, its regions by the plan's names."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan.smem
        self._base = SmemAllocator().allocate(plan.smem.total, 1024)

    def bytes(self, name: str) -> Any:
        """Pointer to a region."""
        return self._base + self._plan.offset(name)

    def pointer(self, name: str, dtype: Any) -> Any:
        """Pointer to a region's elements."""
        return cute.recast_ptr(self.bytes(name), dtype=dtype)

    def array(self, name: str, dtype: Any, count: int) -> Any:
        """A region as a vector."""
        return cute.make_tensor(self.pointer(name, dtype), cute.make_layout(count))


def ranking_in(arena: Arena, plan: Any) -> Ranking:
    """Views of the regions to rank in."""
    return Ranking(
        keys=arena.array("keys", Int32, plan.list_capacity),
        positions=arena.array("positions", Int32, plan.list_capacity),
        histogram=arena.array("histogram", Int32, NUM_BINS),
        candidate_keys=arena.array("candidate_keys", Int32, plan.max_candidates),
        candidate_positions=arena.array("candidate_positions", Int32, plan.max_candidates),
        part_entries=arena.array("part_entries", Int32, MAX_PARTS),
        bitmap=arena.array("histogram", Int32, BITMAP_WORDS),
        ordered=arena.array("ordered", Int32, plan.topk),
        scratch=arena.array("scratch", Int32, 64),
    )


def pipeline_in(arena: Arena, plan: Any) -> Pipeline:
    """Views of the regions that the producer fills."""
    return Pipeline(
        pages=arena.bytes("pages"),
        queries=arena.bytes("queries"),
        weights=arena.array("weights", Float32, plan.segment_stages * plan.num_heads),
        segments=arena.array("segments", Int32, plan.segment_stages * SEGMENT_WORDS),
        page_valid=arena.array("page_valid", Int32, plan.stages),
        page_full=arena.pointer("page_full", Int64),
        page_empty=arena.pointer("page_empty", Int64),
        segment_full=arena.pointer("segment_full", Int64),
        segment_empty=arena.pointer("segment_empty", Int64),
    )


def allocate(plan: IndexerPlan) -> tuple[Ranking, Pipeline]:
    """All of the fused kernel's shared memory."""
    arena = Arena(plan)
    return ranking_in(arena, plan), pipeline_in(arena, plan)
