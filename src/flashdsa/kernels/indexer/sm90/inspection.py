"""What `flashdsa inspect` knows of the indexer: its roles' files and variables."""

from __future__ import annotations

from flashdsa.kernels.indexer.sm90.logits_plan import LogitsPlan
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.kernels.indexer.sm90.quantize_plan import QuantizePlan
from flashdsa.kernels.indexer.sm90.topk_plan import TopkPlan
from flashdsa.plan.inspected import InspectedKernel, InspectedRole
from flashdsa.plan.variables import RoleEstimate, RoleVariable
from flashdsa.problem import INDEX_HEAD_DIM, PAGE_SIZE

LOAD_FILES = ("load.py", "line.py", "deal.py")
"""What only the producer warps run."""
RANK_FILES = (
    "rank.py",
    "score.py",
    "read_scores.py",
    "listing.py",
    "exchange.py",
    "threshold.py",
    "candidates.py",
    "ranges.py",
    "teams.py",
    "emit.py",
    "emit_bitmap.py",
    "emit_sorted.py",
    "order.py",
)
SCORE_FILES = ("score.py", "write_scores.py")
LOAD_TEMPORARIES = 6
"""Of the producers, who compute addresses only."""


def load_estimate() -> RoleEstimate:
    """The producer warps (load.py, deal.py). What all lanes share is in uniform registers."""
    v = RoleVariable
    return RoleEstimate(
        "load",
        ("deal", "load pages"),
        (
            v("lane, turn, pages_done, segment", 4),
            v("seq_lens: address", 2, first="deal", last="deal"),
            v("row, first, count, length", 4),
            v("block table: address", 2, first="load pages"),
            v("ids, ids ahead, number in the block", 3, first="load pages"),
            v("stage, turn in the ring, page", 3, first="load pages"),
        ),
        LOAD_TEMPORARIES,
    )


def rank_estimate(plan: IndexerPlan) -> RoleEstimate:
    """The consumers (rank.py and what it calls)."""
    v = RoleVariable
    heads, keys = PAGE_SIZE * plan.num_heads, PAGE_SIZE * INDEX_HEAD_DIM
    return RoleEstimate(
        "rank",
        ("score", "search", "compare", "emit"),
        (
            v("weights, halved", plan.num_heads // 4),
            v("thread, lane, part, parts", 4),
            v("segment: row, first_page, num_pages, length, teams, first_number; parities", 7),
            v("entries, done, floor", 3),
            v("phases of the mailboxes", 4),
            v("accumulator: 64 x heads, of 128 threads", heads // 128, last="score"),
            v("keys of a page, of 128 threads", keys // 128, 8, last="score"),
            v("sums of two rows, even and odd heads", 4, last="score"),
            v("first page of a pair: two sums, scale, valid", 4, last="score"),
            v("stage, parity, pages left, position, token", 5, last="score"),
            v("stretch: first, end, ids", 3, first="search"),
            v("range: two keys, two places", 4, first="search", last="compare"),
            v("rank left, place of the first, total, held", 4, first="search"),
            v("held entry: key, position", 2, first="search", last="compare"),
            v("counts of a lane, and of the CTAs before", 4, first="search", last="search"),
            v("what a round found", 7, first="search", last="search"),
            v("entries listed together: keys", 4, first="search", last="search"),
            v("entry, those better, those before", 4, first="compare", last="compare"),
            v("threshold: key, position", 2, first="compare"),
            v("votes, place, entry, id", 5, first="emit"),
        ),
    )


def _inspected(
    name: str, plan: IndexerPlan, entry: str, files: tuple[str, ...], estimate: RoleEstimate | None
) -> InspectedKernel:
    load, rank = plan.roles

    def compile_plan() -> object:
        from flashdsa.kernels.indexer.sm90 import build

        if isinstance(plan, LogitsPlan | TopkPlan):
            return build.compile_part(plan)
        return build.compile_indexer(plan)

    return InspectedKernel(
        name=name,
        arch="sm_90a",
        compile=compile_plan,
        entry=entry,
        roles=(
            InspectedRole(load, LOAD_FILES, load_estimate() if estimate else None),
            InspectedRole(rank, files, estimate),
        ),
        smem_bytes=plan.smem.total,
    )


def indexer() -> InspectedKernel:
    """The fused indexer."""
    plan = IndexerPlan()
    return _inspected("indexer", plan, "indexer_kernel", RANK_FILES, rank_estimate(plan))


def indexer_logits() -> InspectedKernel:
    """Scores alone."""
    return _inspected("indexer_logits", LogitsPlan(), "logits_kernel", SCORE_FILES, None)


def topk_indices() -> InspectedKernel:
    """The best of given scores."""
    return _inspected("topk_indices", TopkPlan(), "topk_kernel", RANK_FILES, None)


def _quantization(name: str, plan: QuantizePlan) -> InspectedKernel:
    def compile_plan() -> object:
        from flashdsa.kernels.indexer.sm90 import build

        return build.compile_quantize(plan)

    return InspectedKernel(name, "sm_90a", compile_plan, "quantize_kernel", (), 0)


def quantize_index() -> InspectedKernel:
    """Keys or queries to e4m3 and scales, side by side."""
    return _quantization("quantize_index", QuantizePlan(slot_bits=0))


def write_index_k_cache() -> InspectedKernel:
    """Keys to e4m3 and scales, into the slots of the cache."""
    return _quantization("write_index_k_cache", QuantizePlan())
