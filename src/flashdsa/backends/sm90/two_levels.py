"""Blocks, and tokens of listed blocks, on Hopper GPUs: all positions are scored, then ranked.

A chunk of rows is scored into memory by the kernel of the scores alone, and ranked by a second
launch, which of listed blocks reads their scores only. Over shared keys the kernel that scores
ranks, too: blocks of 8 that begin at row 0, and listed keys, for which a launch before it writes a
bit a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.indexer import check_values
from flashdsa.backends.cpu.tiling import spans
from flashdsa.backends.indexer.logits import plan_of
from flashdsa.backends.indexer.tensors import as_read, values_are_checked
from flashdsa.backends.memory import written_apart
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90 import prefill
from flashdsa.backends.sm90.ranking import bind_ranking
from flashdsa.errors import UnsupportedError
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.catalog import INDEXER_LOGITS, PREFILL_LISTED, PREFILL_LOGITS
from flashdsa.kernels.indexer.sm90.listed.plan import ListedPlan
from flashdsa.kernels.indexer.sm90.plan import BLOCK
from flashdsa.kernels.indexer.sm90.rank.plan import Of, RankPlan
from flashdsa.problem import PAGE_SIZE

if TYPE_CHECKING:
    from flashdsa.ops.indexer import TopkIndexerOperands
    from flashdsa.ops.prefill import TopkPrefillOperands

SCORES_AT_ONCE = 2**27
"""Scores of a chunk of rows: 512 MB. Fewer queries at a time would leave SMs of prefill idle."""
BITS_AT_ONCE = 2**30
"""Bits of a chunk of queries: 128 MB."""


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
    kind = type(operands)
    of_blocks = block > 1 and operands.candidates is None
    each = BLOCK if of_blocks and block == BLOCK else 1  # tokens of a written score
    plan = plan_of(INDEXER_LOGITS, operands, PAGE_SIZE)
    score = runner.function(INDEXER_LOGITS, replace(plan, of_blocks=each > 1))
    positions = positions or of_blocks
    rank = bind_level(runner, operands, block, each, sorted=sorted, positions=positions)
    from_0 = runner.empty(0, dtype=torch.int32)

    def serve(given: Sequence[Any]) -> None:
        x = kind(*as_read(False, *given))
        table, num_pages = x.block_table, len(x.k_index_cache_fp8)
        width = table.shape[1] * PAGE_SIZE
        if check and values_are_checked():
            check_values(x.seq_lens.cpu(), table.cpu(), num_pages, PAGE_SIZE)
        rows = len(x.seq_lens)
        if not num_pages or not width or is_empty(x.candidates):
            x.topk_indices.fill_(-1)
            return
        if rows > len(table):
            table = table.repeat_interleave(rows // len(table), dim=0)
        pages = x.k_index_cache_fp8.view(torch.uint8)
        for first, end in spans(rows, rows_at_once(width)):
            own, lengths = slice(first, end), x.seq_lens[first:end]
            scores = runner.empty(end - first, width // each, dtype=torch.float32)
            score(x.q_index_fp8[own], pages, x.weights[own], lengths, table[own], scores,
                  runner.num_sms)  # fmt: skip
            rank(scores, lengths, from_0, table[own], num_pages, own, x)

    return runner.on_device(written_apart(serve, operands, "topk_indices"))


def bind_prefill(
    runner: Runner, operands: TopkPrefillOperands, *, sorted: bool, block: int
) -> Callable[[Sequence[Any]], None]:
    """Write the ids of blocks, or the rows of candidates, into `topk_indices`, in the CPU's order.

    Ranges are clamped to the keys; with FLASHDSA_CHECK=1 others are errors, as in `prefill.bind`.
    """
    kind = type(operands)
    serve: Callable[..., object]
    if not len(operands.q_index) or not len(operands.k_index) or is_empty(operands.candidates):
        serve = prefill.bind_none(operands)
    elif operands.candidates is not None:
        serve = bind_listed(runner, operands, block, sorted=sorted)
    elif block == BLOCK and operands.starts is None:
        plan = prefill.plan_of(operands.inputs, of_blocks=True, with_scores=sorted)
        serve = prefill.bind_best(runner, plan, operands)
    else:
        serve = bind_blocks(runner, operands, block, sorted=sorted)
    serve = runner.on_device(written_apart(serve, operands, "topk_indices"))
    return prefill.with_ranges_checked(serve, lambda given: kind(*given).inputs)


def bind_listed(
    runner: Runner, operands: TopkPrefillOperands, block: int, *, sorted: bool
) -> Callable[[Sequence[Any]], None]:
    """Bind the choice among candidates, for some queries at a time: their keys as bits, then
    scores and ranking."""
    kind, (keys, _) = type(operands), operands.k_index.shape
    plan = prefill.plan_of(operands.inputs, among=True, with_scores=sorted)
    words = keys // WARP_SIZE + 3  # a warp reads up to 64 bits past the last key
    rows = queries_at_once(words, runner.num_sms * plan.tile_queries)
    chunks = [slice(*ends) for ends in spans(len(operands.q_index), rows)]
    ranks = {
        size: prefill.bind_best(runner, plan, _queries(operands, slice(0, size)))
        for size in {own.stop - own.start for own in chunks}
    }
    write_bits = runner.function(PREFILL_LISTED, ListedPlan())
    from_row_0 = runner.empty(0, dtype=torch.int32)
    bits = block.bit_length() - 1

    def serve(given: Sequence[Any]) -> None:
        for own in chunks:
            x = _queries(kind(*given), own)
            size = own.stop - own.start
            starts = from_row_0 if x.starts is None else x.starts.contiguous()
            listed = runner.empty(size, words, dtype=torch.int32)
            counts = runner.empty(size, dtype=torch.int32)
            candidates, ends = x.candidates.contiguous(), x.ends.contiguous()
            write_bits(candidates, starts, ends, keys, bits, listed, counts)
            ranks[size](x, listed, counts)

    return serve


def _queries(operands: TopkPrefillOperands, own: slice) -> Any:
    """The operands of some queries."""
    q, k, weights, ends, ids, starts, k_scale, candidates = operands
    begins = None if starts is None else starts[own]
    listed = None if candidates is None else candidates[own]
    kind = type(operands)
    return kind(q[own], k, weights[own], ends[own], ids[own], begins, k_scale, listed)


def queries_at_once(words: int, wave: int) -> int:
    """Queries of a chunk with `words` words of bits each: whole waves of `wave`, if one fits."""
    most = max(BITS_AT_ONCE // (words * WARP_SIZE), 1)
    return most // wave * wave or most


def bind_blocks(
    runner: Runner, operands: TopkPrefillOperands, block: int, *, sorted: bool
) -> Callable[[Sequence[Any]], None]:
    """Bind the choice of blocks of any size, of ranges that begin anywhere."""
    kind = type(operands)
    queries, keys = operands.q_index.shape[0], operands.k_index.shape[0]
    plan = prefill.plan_of(operands.inputs, scores_only=True)
    score = runner.function(PREFILL_LOGITS, plan)
    arguments = prefill.bind_arguments(runner, operands.inputs)
    rank = bind_level(runner, operands, block, 1, sorted=sorted, positions=True)
    no_pages = runner.empty(0, 0, dtype=torch.int32)

    def serve(given: Sequence[Any]) -> None:
        x = kind(*given)
        q, k, k_scale, weights, starts, ends = arguments(*x.inputs)
        for first, end in spans(queries, rows_at_once(keys)):
            own = slice(first, end)
            scores = runner.empty(end - first, keys, dtype=torch.float32)
            begins = starts[own] if len(starts) else starts
            score(q[own], k, k_scale, weights[own], begins, ends[own], scores, runner.num_sms)
            lengths = ends[own].clamp(0, keys)
            if len(starts):
                lengths = (lengths - begins.clamp(0, keys)).clamp_min(0)
            rank(scores, lengths, begins, no_pages, 0, own, x)

    return serve


def is_empty(candidates: Tensor | None) -> bool:
    """Whether there are candidates, but no column of them."""
    return candidates is not None and not candidates.shape[1]


def rows_at_once(width: int) -> int:
    """Rows of a chunk with `width` positions each."""
    return max(SCORES_AT_ONCE // width, 1)


def bind_level(
    runner: Runner,
    operands: TopkIndexerOperands | TopkPrefillOperands,
    block: int,
    each: int,
    *,
    sorted: bool,
    positions: bool,
) -> Callable[..., None]:
    """Bind the ranking of a chunk's scores: a function (scores, lengths, starts, table, num_pages,
    own rows, operands) that writes these rows of `topk_indices`.

    `lengths` is in tokens; the others are as in `launch_level`.

    Args:
        each: tokens of a score. positions: ids of tokens are positions, not slots.

    Raises:
        UnsupportedError: by the function; a row may have more blocks than a CTA can mark.
    """
    topk, among = operands.topk_indices.shape[1], operands.candidates is not None
    of = Of.LISTED if among else Of.BLOCKS
    plan = RankPlan(of)
    bits, score_bits = block.bit_length() - 1, (block // each).bit_length() - 1
    ranking = cache(lambda rows: bind_ranking(runner, of, rows, topk, sorted=sorted))

    def rank(
        scores: Tensor,
        lengths: Tensor,
        starts: Tensor,
        table: Tensor,
        num_pages: int,
        own: slice,
        operands: TopkIndexerOperands | TopkPrefillOperands,
    ) -> None:
        candidates = lengths.new_empty(len(scores), 0)
        if operands.candidates is not None:
            require_markable(plan, scores.shape[1], block)
            candidates = operands.candidates[own].contiguous()
        elif bits:
            lengths = lengths + (block - 1) >> bits
        kind, slots = (starts, candidates, bits, score_bits), int(not positions)
        # `written_apart` sees to it that ids have no gaps.
        ids = operands.topk_indices[own]
        ranking(len(scores))(scores, lengths, table, num_pages, slots, *kind, ids)

    return rank


def require_markable(plan: RankPlan, width: int, block: int) -> None:
    """Require that a CTA can mark all blocks of a row.

    Raises:
        UnsupportedError: it has no room for as many.
    """
    if width > plan.most_blocks * block:
        raise UnsupportedError(
            f"candidates: expected rows of at most {plan.most_blocks} blocks on Hopper; got "
            f"{width} positions in blocks of {block}"
        )
