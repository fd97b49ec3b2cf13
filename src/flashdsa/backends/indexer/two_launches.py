"""The indexer of some pairs of rows in two launches: scores, then ranking.

One launch gives each row a cluster, and the lengths of few rows do not fit the clusters that a GPU
runs at once: it leaves up to half of the SMs idle. Scores of pairs are shared out evenly among all
SMs, and a second launch, which begins early, ranks them. They pass through the second-level cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashdsa.backends.runner import Runner
from flashdsa.kernels.catalog import INDEXER_LOGITS, INDEXER_RANKING
from flashdsa.kernels.indexer.plan import By
from flashdsa.kernels.indexer.sm90.plan import LogitsPlan
from flashdsa.kernels.indexer.sm90.topk_plan import TopkPlan
from flashdsa.problem import PAGE_SIZE


def bind_two_launches(
    runner: Runner, num_heads: int, topk: int, positions: bool, rows: int, clusters: tuple[int, int]
) -> Callable[..., None]:
    """Bind the two launches; the result is a `Launch`, see launch.py.

    Args:
        clusters: their number and the CTAs of each, of the second launch.
    """
    score = runner.function(INDEXER_LOGITS, LogitsPlan(num_heads, rows=By.PAIRS))
    plan = TopkPlan(topk=topk, of_cache=True, positions=positions)
    rank = runner.function(INDEXER_RANKING, plan)

    def launch(
        q_index_fp8: Tensor,
        pages: Tensor,
        weights: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        topk_indices: Tensor,
    ) -> None:
        width = block_table.shape[1] * PAGE_SIZE
        scores = runner.empty(rows, width, dtype=torch.float32)
        score(q_index_fp8, pages, weights, seq_lens, block_table, scores, runner.num_sms)
        rank(scores, seq_lens, block_table, pages.shape[0], topk_indices, *clusters)

    return launch
