"""The indexer of some pairs of rows in two launches: scores, then ranking.

One launch gives each row a cluster, and the lengths of few rows do not fit the clusters that a GPU
runs at once: it leaves up to half of the SMs idle. Scores of pairs are shared out evenly among all
SMs, and a second launch, which begins early, ranks them. They pass through the second-level cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.indexer.clusters import clusters_for, clusters_of
from flashdsa.backends.runner import Runner
from flashdsa.kernels.catalog import INDEXER, INDEXER_LOGITS, INDEXER_RANKING
from flashdsa.kernels.indexer.plan import By
from flashdsa.kernels.indexer.sm90.plan import LogitsPlan
from flashdsa.kernels.indexer.sm90.topk_plan import TopkPlan
from flashdsa.problem import PAGE_SIZE

Serve = Callable[..., None]
"""A function of the fused kernel's tensors, and of the numbers of its launch."""
FEW_ROWS, LEAST_PAGES_OF_FEW = 15, 550
"""Rows up to which two launches pay in tables of at least so many pages."""
SOME_ROWS, LEAST_PAGES = 0.25, 280
"""The same up to so many rows for each SM."""
NARROW_PAGES, NARROW_ROWS = 480, (0.48, 1.4)
"""The same in tables of at most so many pages, between so many rows for each SM. Fewer rows are
shared by large clusters, more take as long in pairs by one launch, and in a wider table a single
row may be long, and a small cluster's to rank."""
RANKING_CLUSTER = 8
"""CTAs of a cluster that ranks, at least, in tables of more than NARROW_PAGES."""


def pages_for(rows: int, num_sms: int) -> range:
    """Pages of a table's row with which so many rows, in pairs, take less time by two launches."""
    if rows <= FEW_ROWS:
        return range(LEAST_PAGES_OF_FEW, 1 << 31)
    if rows <= SOME_ROWS * num_sms:
        return range(LEAST_PAGES, 1 << 31)
    least, most = NARROW_ROWS
    pays = least * num_sms <= rows <= most * num_sms
    return range(LEAST_PAGES, NARROW_PAGES + 1 if pays else 0)


def with_scores_apart(
    runner: Runner, fused: Serve, num_heads: int, topk: int, positions: bool, rows: int
) -> Serve:
    """`fused`, but tables of some widths are served by two launches.

    Args:
        fused: serves rows of which two neighbours share a row of the table.
    """
    apart = pages_for(rows, runner.num_sms)
    if not apart:
        return fused
    # The calls' tables may have any width, so the kernels are loaded where one needs them.
    bind = cache(lambda: bind_apart(runner, num_heads, topk, positions, rows))

    def serve(*given: Any) -> None:
        block_table = given[4]
        launches = bind() if block_table.shape[1] in apart else fused
        launches(*given)

    return serve


def bind_apart(runner: Runner, num_heads: int, topk: int, positions: bool, rows: int) -> Serve:
    """Bind the two launches, called inside `runner.launching()`; the numbers are not used."""
    score = runner.function(INDEXER_LOGITS, LogitsPlan(num_heads, rows=By.PAIRS))
    plan = TopkPlan(topk=topk, of_cache=True, positions=positions)
    rank = runner.function(INDEXER_RANKING, plan)
    clusters = clusters_for(runner, INDEXER.plans[0], rows).without_splits()[:2]
    sharing = clusters
    if clusters[1] < RANKING_CLUSTER:
        sharing = clusters_of(runner, INDEXER.plans[0], RANKING_CLUSTER) or clusters

    def serve(
        q_index_fp8: Tensor,
        pages: Tensor,
        weights: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        topk_indices: Tensor,
        *_: int,
    ) -> None:
        width = block_table.shape[1]
        scores = runner.empty(rows, width * PAGE_SIZE, dtype=torch.float32)
        score(q_index_fp8, pages, weights, seq_lens, block_table, scores, runner.num_sms)
        how = sharing if width > NARROW_PAGES else clusters
        rank(scores, seq_lens, block_table, pages.shape[0], topk_indices, *how)

    return serve
