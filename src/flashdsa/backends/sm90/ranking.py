"""Rankings of scores on Hopper GPUs: a launch, and a second one where the best come first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.indexer.launch import bind_order
from flashdsa.backends.runner import Runner, allowed_clusters
from flashdsa.errors import UnsupportedError
from flashdsa.heuristics.h200 import Indexer
from flashdsa.kernels.catalog import INDEXER_ORDER, INDEXER_RANK
from flashdsa.kernels.indexer.sm90.rank.plan import LARGEST_CLUSTER, Of, RankPlan, plan_of_many

if TYPE_CHECKING:
    from flashdsa.ops.indexer import TopkIndexerOperands
    from flashdsa.ops.prefill import TopkPrefillOperands

SCORES_AT_ONCE = 2**27
"""Scores of a chunk of rows: 512 MB. Fewer queries at a time would leave SMs of prefill idle."""


def rows_at_once(width: int) -> int:
    """Rows of a chunk with `width` scores each."""
    return max(SCORES_AT_ONCE // width, 1)


def bind_ranking(
    runner: Runner,
    of: Of,
    rows: int,
    topk: int,
    *,
    sorted: bool = False,
    score_all: bool = False,
    most_blocks: int = 0,
) -> Callable[..., Tensor]:
    """Bind the launches for `rows` rows, at least one.

    The result is a function of `launch_rank`'s scores, starts, ends, table, number of pages,
    `slots`, what the kind of entries takes besides, and ids, which it returns. It is called inside
    `runner.launching()`.

    Args:
        sorted: the best come first; otherwise ids are in ascending order.
        score_all: rows of at most `topk` entries have scores that count, too.
        most_blocks: of a row, some of which are listed.

    Raises:
        UnsupportedError: a CTA has no room for as many blocks.
    """
    plan = plan_of_many(of)
    if rows <= runner.num_sms or most_blocks > plan.most_blocks:
        plan = RankPlan(of)
    require_markable(plan, most_blocks)
    function = runner.function(INDEXER_RANK, plan)
    capacity = runner.cluster_capacity(plan.threads, plan.smem_bytes)
    clusters = allowed_clusters(capacity, LARGEST_CLUSTER)
    shared = [cluster_of(rows, runner.num_sms, clusters, n + 1) for n in range(LARGEST_CLUSTER)]
    unscored = 0 if sorted or score_all else topk
    no_words = runner.empty(0, 0, dtype=torch.int32)

    def rank(*given: Any, words: Tensor = no_words) -> Tensor:
        *rows, ids = given
        parts = min(rows[0].shape[1] // plan.part_entries, LARGEST_CLUSTER - 1)
        function(*rows[:6], unscored, *rows[6:], ids, words, *shared[parts])
        return ids  # type: ignore[no-any-return]

    if not sorted:
        return rank
    empty_words = runner.allocator(rows, topk, dtype=torch.int32)
    order = bind_order(runner, INDEXER_ORDER, topk)

    def rank_and_order(*given: Any) -> Tensor:
        words = empty_words()
        ids = rank(*given, words=words)
        order(ids, words)
        return ids

    return rank_and_order


def cluster_of(
    rows: int, num_sms: int, clusters: Mapping[int, int], parts: int = LARGEST_CLUSTER
) -> tuple[int, int]:
    """(CTAs of a cluster, 1: it has one row; 0: each of its CTAs has one).

    Args:
        clusters: how many run at once, by their CTAs. parts: CTAs among which a row may be divided;
            all of the largest cluster's share a row that they do not have together.
    """
    together = [size for most, size in Indexer.RANK_CLUSTERS if rows <= most * num_sms]
    wanted = together[0] if together else LARGEST_CLUSTER
    wanted = min(wanted, parts) if together or parts == LARGEST_CLUSTER else 1
    size = max(size for size, number in clusters.items() if number and size <= wanted)
    return size, int(bool(together) or size == 1)


def bind_choice(
    runner: Runner,
    operands: TopkIndexerOperands | TopkPrefillOperands,
    block: int,
    each: int,
    *,
    sorted: bool,
    positions: bool,
    paged: bool,
) -> Callable[..., None]:
    """Bind the ranking of a chunk's scores: a function (scores, starts, ends, table, num_pages, own
    rows, operands) that writes these rows of `topk_indices`, whose ids have no gaps.

    Args:
        block: tokens of a block; entries are tokens of candidates if there are any, else blocks.
        each: tokens of a score. positions: ids of tokens are positions, not slots. paged: some
            tokens may have no page, and are not chosen.

    Raises:
        UnsupportedError: by the function; a row may have more blocks than a CTA can mark.
    """
    topk, of = operands.topk_indices.shape[1], Of.SCORES if block == 1 else Of.BLOCKS
    if operands.candidates is not None:
        of = Of.LISTED
    slots, score_all = int(not positions), paged or of is Of.LISTED
    bits, score_bits = block.bit_length() - 1, (block // each).bit_length() - 1

    @cache
    def ranking(rows: int, most_blocks: int) -> Callable[..., Tensor]:
        how = {"sorted": sorted, "score_all": score_all}
        return bind_ranking(runner, of, rows, topk, most_blocks=most_blocks, **how)

    def rank(
        scores: Tensor,
        starts: Tensor,
        ends: Tensor,
        table: Tensor,
        num_pages: int,
        own: slice,
        operands: TopkIndexerOperands | TopkPrefillOperands,
    ) -> None:
        kind: tuple[Any, ...] = ()
        most_blocks = 0
        if operands.candidates is not None:
            most_blocks = -(-scores.shape[1] // block)
            kind = operands.candidates[own].contiguous(), bits, score_bits
        elif bits:
            kind = ends.new_empty(len(scores), 0), bits, score_bits
        ids = operands.topk_indices[own]
        ranking(len(scores), most_blocks)(scores, starts, ends, table, num_pages, slots, *kind, ids)

    return rank


def require_markable(plan: RankPlan, blocks: int) -> None:
    """Require that a CTA can mark all blocks of a row.

    Raises:
        UnsupportedError: it has no room for as many.
    """
    if blocks > plan.most_blocks:
        raise UnsupportedError(
            f"candidates: on Hopper rows have at most {plan.most_blocks} blocks; got {blocks}"
        )
