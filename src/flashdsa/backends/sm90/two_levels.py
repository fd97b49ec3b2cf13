"""Blocks, and tokens of listed blocks, on Hopper GPUs: all positions are scored, then ranked.

A chunk of rows is scored into memory by the kernel of the scores alone, brought to what is ranked
by torch, and ranked by the kernel of given scores: three steps on the device, none waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.indexer import check_values
from flashdsa.backends.cpu.tiling import spans
from flashdsa.backends.indexer.logits import plan_of
from flashdsa.backends.indexer.tensors import require_layout, values_are_checked
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90 import prefill
from flashdsa.backends.sm90.topk import bind_ranking
from flashdsa.backends.two_levels import block_scores, candidate_positions
from flashdsa.kernels.catalog import INDEXER_LOGITS, PREFILL_LOGITS
from flashdsa.problem import PAGE_SIZE

if TYPE_CHECKING:
    from flashdsa.ops.indexer import TopkIndexerOperands
    from flashdsa.ops.prefill import TopkPrefillOperands

SCORES_AT_ONCE = 2**24
"""Scores of a chunk of rows: 64 MB, and as much a few times over for what torch makes of them."""
Ranking = Callable[[Tensor, Tensor], Tensor]
"""Function of scores (rows, n) and lengths (rows,) int32: the best positions (rows, topk)."""


def bind(
    runner: Runner,
    operands: TopkIndexerOperands,
    *,
    sorted: bool,
    positions: bool,
    block: int,
    check: bool,
) -> Callable[[Sequence[Any]], None]:
    """Write the ids of blocks, or of tokens of candidates, into `topk_indices`, in the CPU's order.

    Args: as for `topk_indexer.bind`; `block` is at most 64.
    """
    kind, topk = type(operands), operands.topk_indices.shape[1]
    of_blocks = block > 1 and operands.candidates is None
    score = runner.function(INDEXER_LOGITS, plan_of(INDEXER_LOGITS, operands, PAGE_SIZE))
    ranking = cache(partial(bind_ranking, runner, topk=topk, sorted=sorted))

    def serve(given: Sequence[Any]) -> None:
        x = kind(*given)
        cache_, table, num_pages = x.k_index_cache_fp8, x.block_table, len(x.k_index_cache_fp8)
        require_layout(*given[:6])
        if check and values_are_checked():
            check_values(x.seq_lens.cpu(), table.cpu(), num_pages, PAGE_SIZE)
        rows, width = len(x.seq_lens), table.shape[1] * PAGE_SIZE
        if not num_pages or not width or is_empty(x.candidates):
            x.topk_indices.fill_(-1)
            return
        table = table.repeat_interleave(rows // max(len(table), 1), dim=0)
        lengths = x.seq_lens.clamp(0, width)
        for first, end in spans(rows, rows_at_once(width, x.candidates, block)):
            own = slice(first, end)
            scores = runner.empty(end - first, width, dtype=torch.float32)
            pages = cache_.view(torch.uint8)
            score(x.q_index_fp8[own], pages, x.weights[own], x.seq_lens[own], table[own], scores,
                  runner.num_sms)  # fmt: skip
            good = (table[own] >= 0) & (table[own] < num_pages)
            candidates = None if x.candidates is None else x.candidates[own]
            ids = choose(scores, lengths[own], good, candidates, block, ranking(end - first))
            if not (positions or of_blocks):
                at = ids.clamp(0, width - 1).long()
                slots = table[own].gather(1, at // PAGE_SIZE) * PAGE_SIZE + at % PAGE_SIZE
                ids = torch.where(ids < 0, -1, slots)
            x.topk_indices[own] = ids

    return runner.on_device(serve)


def bind_prefill(
    runner: Runner, operands: TopkPrefillOperands, *, sorted: bool, block: int
) -> Callable[[Sequence[Any]], None]:
    """Write the ids of blocks, or the rows of candidates, into `topk_indices`, in the CPU's order.

    Ranges are clamped to the keys; with FLASHDSA_CHECK=1 others are errors, as in `prefill.bind`.
    """
    kind, topk = type(operands), operands.topk_indices.shape[1]
    queries, keys = operands.q_index.shape[0], operands.k_index.shape[0]
    if not queries or not keys or is_empty(operands.candidates):
        serve = prefill.bind_none(operands)
        return prefill.with_ranges_checked(serve, lambda given: kind(*given).inputs)
    score = runner.function(PREFILL_LOGITS, prefill.plan_of(operands.inputs, scores_only=True))
    arguments = prefill.bind_arguments(runner, operands.inputs)
    ranking = cache(partial(bind_ranking, runner, topk=topk, sorted=sorted))

    def serve_rows(given: Sequence[Any]) -> None:
        x = kind(*given)
        q, k, k_scale, weights, starts, ends = arguments(*x.inputs)
        for first, end in spans(queries, rows_at_once(keys, x.candidates, block)):
            own = slice(first, end)
            scores = runner.empty(end - first, keys, dtype=torch.float32)
            starts_here = starts[own] if len(starts) else starts
            score(q[own], k, k_scale, weights[own], starts_here, ends[own], scores, runner.num_sms)
            lengths, begins = ends[own].clamp(0, keys), None
            if len(starts):
                begins = starts_here.clamp(0, keys)
                lengths = (lengths - begins).clamp_min(0)
                scores = shifted(scores, begins)
            candidates = None if x.candidates is None else x.candidates[own]
            ids = choose(scores, lengths, None, candidates, block, ranking(end - first))
            if begins is not None and candidates is not None:
                ids = torch.where(ids < 0, -1, ids + begins[:, None])
            x.topk_indices[own] = ids

    serve = runner.on_device(serve_rows)
    return prefill.with_ranges_checked(serve, lambda given: kind(*given).inputs)


def is_empty(candidates: Tensor | None) -> bool:
    """Whether there are candidates, but no column of them."""
    return candidates is not None and not candidates.shape[1]


def rows_at_once(width: int, candidates: Tensor | None, block: int) -> int:
    """Rows of a chunk with `width` positions each."""
    listed = 0 if candidates is None else candidates.shape[1] * block
    return max(SCORES_AT_ONCE // max(width, listed), 1)


def shifted(scores: Tensor, starts: Tensor) -> Tensor:
    """Scores (rows, keys) from each row's start (rows,) on; the last ones are repeated."""
    columns = torch.arange(scores.shape[1], device=scores.device) + starts[:, None]
    return scores.gather(1, columns.clamp_max(scores.shape[1] - 1))


def choose(
    scores: Tensor,
    lengths: Tensor,
    good: Tensor | None,
    candidates: Tensor | None,
    block: int,
    rank: Ranking,
) -> Tensor:
    """Ids of the best blocks, or with candidates positions (rows, topk) int32, -1 where there are
    no more.

    Args:
        scores: (rows, width). lengths: (rows,) int32, at most the width.
        good: (rows, pages) bool, pages whose tokens may be chosen; None: all.
    """
    if candidates is not None:
        if good is not None:
            page = (candidates.long() * block // PAGE_SIZE).clamp(0, good.shape[1] - 1)
            candidates = torch.where(good.gather(1, page), candidates, -1)
        listed, count = candidate_positions(candidates, lengths, block)
        among = scores.gather(1, listed.clamp_max(scores.shape[1] - 1))
        best = rank(among, count.to(torch.int32))
        chosen = listed.gather(1, best.clamp(0, listed.shape[1] - 1).long()).to(torch.int32)
        return torch.where(best < 0, -1, chosen)
    seen = torch.arange(scores.shape[1], device=scores.device) < lengths[:, None]
    if good is not None:
        seen &= good.repeat_interleave(PAGE_SIZE, dim=1)
    best, some = block_scores(scores, seen, lengths, block)
    ids = rank(best, (lengths + block - 1) // block)
    if good is None:
        return ids
    ids = torch.where(some.gather(1, ids.clamp(0, some.shape[1] - 1).long()), ids, -1)
    return ids.gather(1, (ids < 0).to(torch.uint8).sort(dim=1, stable=True).indices)
