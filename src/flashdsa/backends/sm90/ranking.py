"""Rankings of scores on Hopper GPUs: a launch, and a second one where the best come first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.cluster_limit import allowed_clusters
from flashdsa.backends.indexer.order import bind_order
from flashdsa.backends.runner import Runner
from flashdsa.heuristics.h200 import Indexer
from flashdsa.kernels.catalog import INDEXER_RANK, PREFILL_ORDER
from flashdsa.kernels.indexer.sm90.rank.plan import LARGEST_CLUSTER, MANY, Of, RankPlan


def bind_ranking(
    runner: Runner, of: Of, rows: int, topk: int, *, sorted: bool = False
) -> Callable[..., Tensor]:
    """Bind the launches for so many rows, at least one.

    The result is a function of `launch_rank`'s scores, lengths, table, number of pages, `slots`,
    what the kind of entries takes besides, and ids, which it returns. It is called inside
    `runner.launching()`.

    Args:
        sorted: the best come first; otherwise ids are in ascending order.
    """
    many = rows > runner.num_sms
    plan = RankPlan(of, **(MANY if many else {}))
    function = runner.function(INDEXER_RANK, plan)
    capacity = runner.cluster_capacity(plan.threads, plan.smem_bytes)
    cluster = cluster_of(rows, runner.num_sms, allowed_clusters(capacity, LARGEST_CLUSTER))
    unscored = 0 if sorted or plan.in_levels else topk
    no_words = runner.empty(0, 0, dtype=torch.int32)

    def rank(*given: Any, words: Tensor = no_words) -> Tensor:
        scores, lengths, table, num_pages, slots, *kind, ids = given
        function(scores, lengths, table, num_pages, slots, unscored, *kind, ids, words, *cluster)
        return ids  # type: ignore[no-any-return]

    if not sorted:
        return rank
    empty_words = runner.allocator(rows, topk, dtype=torch.int32)
    order = bind_order(runner, PREFILL_ORDER, topk)

    def rank_and_order(*given: Any) -> Tensor:
        words = empty_words()
        ids = rank(*given, words=words)
        order(ids, words)
        return ids

    return rank_and_order


def cluster_of(rows: int, num_sms: int, clusters: Mapping[int, int]) -> tuple[int, int]:
    """(CTAs of a cluster, 1: it has one row; 0: each of its CTAs has one).

    Args:
        clusters: how many run at once, by their CTAs.
    """
    together = [size for most, size in Indexer.RANK_CLUSTERS if rows <= most * num_sms]
    wanted = together[0] if together else LARGEST_CLUSTER
    size = max(size for size, number in clusters.items() if number and size <= wanted)
    return size, int(bool(together) or size == 1)
