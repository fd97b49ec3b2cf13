"""What `flashdsa inspect` knows of the indexer: its roles' files and variables."""

from __future__ import annotations

from flashdsa.kernels.indexer.sm90.logits_plan import LogitsPlan
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.kernels.indexer.sm90.topk_plan import TopkPlan
from flashdsa.plan.inspected import InspectedKernel, InspectedRole
from flashdsa.plan.variables import RoleEstimate, RoleVariable

LOAD_FILES = ("load.py",)
RANK_FILES = ("rank.py", "score.py", "read_scores.py", "select.py", "merge.py", "emit.py")
SCORE_FILES = ("score.py", "write_scores.py")


def load_estimate() -> RoleEstimate:
    """The producer warp (load.py, schedule.py)."""
    v = RoleVariable
    return RoleEstimate(
        "load",
        ("schedule", "find segment", "load pages"),
        (
            v("rows: seq_lens pointer, count, max_length", 4),
            v("lane, cta, num_ctas", 3),
            v("total, longest, padded", 3, first="schedule", last="schedule"),
            v("four lengths loaded together", 4, first="schedule", last="schedule"),
            v("schedule: chunk, inverse, aligned, total", 4, first="find segment"),
            v("cursor, end, pages_done, segment, block, block_start", 6, first="find segment"),
            v("pages, share, inclusive", 3, first="find segment", last="find segment"),
            v("row, start, stop", 3, first="load pages"),
            v("block table pointer, ahead, ids, i", 5, first="load pages"),
            v("stage, turn, page", 3, first="load pages"),
        ),
    )


def rank_estimate(plan: IndexerPlan) -> RoleEstimate:
    """The consumers (rank.py and what it calls)."""
    v = RoleVariable
    return RoleEstimate(
        "rank",
        ("score", "rank", "merge"),
        (
            v("weights", plan.num_heads // 4),
            v("thread, lane, token", 3),
            v("row, first, length, slot, pages_done, segment", 6),
            v("share of a row", 7),
            v("header of a part", 3),
            v("entries, used, done, todo, floor, step", 6),
            v("threshold: key, position", 2),
            v("accumulator 64 x heads of 128 threads", plan.num_heads // 2, last="score"),
            v("sums of two rows, even and odd heads", 4, last="score"),
            v("page, stop, stage, number, scale, valid", 6, last="score"),
            v("entries compared or moved together: key, position", 8, first="rank", last="rank"),
            v("bins of a thread, sums", 6, first="rank", last="rank"),
            v("pairs of a list loaded together", 16, first="merge"),
            v("list pointer, bounds", 6, first="merge"),
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
