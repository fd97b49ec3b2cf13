"""The indexer and its scores on Hopper GPUs, and its two launches: all scores, then all rankings.

In two launches scores are shared out evenly among all SMs, those of two rows of a request together
where rows come in twos, and the second launch begins early. Scores pass through the second-level
cache, or, of many long rows, through device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from flashdsa.backends.cpu.tiling import spans
from flashdsa.backends.indexer import logits, topk_indexer
from flashdsa.backends.indexer.launch import Others
from flashdsa.backends.indexer.tensors import require_dense_ids
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.ranking import bind_ranking, rows_at_once
from flashdsa.kernels.catalog import INDEXER, INDEXER_LOGITS, INDEXER_ORDER, INDEXER_UNSCORED
from flashdsa.kernels.indexer.plan import By
from flashdsa.kernels.indexer.sizes import RANK_BINS
from flashdsa.kernels.indexer.sm90.plan import LogitsPlan
from flashdsa.kernels.indexer.sm90.rank.plan import Of
from flashdsa.problem import PAGE_SIZE

COUNTED_ROWS = 128
"""Rows up to which counts are kept at 0 between calls: 512 KB a stream, and for each of 64 graphs.
Those of more are cleared first."""


def bind_scored_and_ranked(
    runner: Runner, num_heads: int, topk: int, positions: bool, sorted: bool, rows: int, next_n: int
) -> Callable[..., None]:
    """Bind the two launches; the result is a `Launch`, see indexer/launch.py.

    Args:
        topk: any up to 2,048. next_n: neighbouring rows that share a row of the table.
    """
    scored = By.PAIRS if next_n % 2 == 0 else By.CLUSTER
    score = runner.function(INDEXER_LOGITS, LogitsPlan(num_heads, rows=scored, ranked=True))
    ranking = cache(lambda rows: bind_ranking(runner, Of.CACHE, rows, topk, sorted=sorted))
    slots, unscored = int(not positions), 0 if sorted else topk
    from_0 = runner.empty(0, dtype=torch.int32)

    def launch_rows(
        q_index_fp8: Tensor,
        pages: Tensor,
        weights: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        topk_indices: Tensor,
    ) -> None:
        count, width = len(seq_lens), block_table.shape[1] * PAGE_SIZE
        # The second launch must not be refused: it sets the counts to 0.
        require_dense_ids(topk_indices, count, topk)
        scores = runner.empty(count, width, dtype=torch.float32)
        counts = counts_of(runner, count)
        score(q_index_fp8, pages, weights, seq_lens, block_table, scores, counts, unscored,
              runner.num_sms)  # fmt: skip
        ranking(count)(scores, from_0, seq_lens, block_table, pages.shape[0], slots, counts,
                       topk_indices)  # fmt: skip

    def launch(*operands: Tensor) -> None:
        q_index_fp8, pages, weights, seq_lens, block_table, topk_indices = operands
        width = max(block_table.shape[1] * PAGE_SIZE, 1)
        together = max(rows_at_once(width) // next_n, 1) * next_n
        if rows <= together:
            launch_rows(*operands)
            return
        for first, end in spans(rows, together):
            own, requests = slice(first, end), slice(first // next_n, end // next_n)
            of_rows = weights[own], seq_lens[own], block_table[requests], topk_indices[own]
            launch_rows(q_index_fp8[own], pages, *of_rows)

    return launch


def counts_of(runner: Runner, rows: int) -> Tensor:
    """Counts of `rows` rows, all 0, to which the ranking resets them."""
    if rows <= COUNTED_ROWS:
        (counts,) = runner.workspace(RANK_BINS, lambda _: (), COUNTED_ROWS * RANK_BINS)
        return counts  # type: ignore[no-any-return]
    return runner.empty(rows * RANK_BINS, dtype=torch.int32).zero_()


def bind_unscored(runner: Runner, positions: bool) -> Callable[..., None]:
    """Bind the launch for a table in which no row has more than `topk` tokens: nothing is scored.
    The result is a `Launch`, see indexer/launch.py."""
    unscored, slots = runner.function(INDEXER_UNSCORED, INDEXER_UNSCORED.plan), int(not positions)

    def launch(*operands: Tensor) -> None:
        _, pages, _, seq_lens, block_table, topk_indices = operands
        unscored(seq_lens, block_table, topk_indices, pages.shape[0], slots)

    return launch


_OTHERS = Others(bind_scored_and_ranked, bind_unscored)
bind = partial(topk_indexer.bind, INDEXER, INDEXER_ORDER, _OTHERS)
bind_logits = partial(logits.bind, INDEXER_LOGITS)
