"""The indexer of many queries over shared keys by torch on any device: all keys for each query."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashdsa.backends.cpu.prefill import ranges_of
from flashdsa.backends.cpu.tiling import spans
from flashdsa.backends.indexer.tensors import values_are_checked
from flashdsa.backends.torch.indexer import TOKEN_BLOCK, score
from flashdsa.backends.torch.topk import among, block_scores, rows_at_once, select

if TYPE_CHECKING:
    from flashdsa.ops.prefill import PrefillOperands, TopkPrefillOperands


def topk_prefill(operands: TopkPrefillOperands, *, sorted: bool, block: int) -> None:
    """Write each query's best key rows into `topk_indices`, as `cpu.prefill.topk_prefill` does;
    ranges are clamped to the keys."""
    _check(operands.inputs)
    x, topk = operands, operands.topk_indices.shape[1]
    of_blocks = block if x.candidates is None else 1
    for queries, scores, start, end in _scored(x.inputs):
        # Blocks are counted from a query's first key on.
        width = scores.shape[1]
        offset = torch.arange(width, device=scores.device)
        selectable = (offset >= start) & (offset < end)
        moves = block > 1 or x.candidates is not None
        if moves:
            moved = (offset + start).clamp(max=width - 1)
            scores, selectable = scores.gather(1, moved), offset < end - start
        if x.candidates is not None:
            selectable = selectable & among(x.candidates[queries], width, block)
        if of_blocks > 1:
            scores, selectable = block_scores(scores, selectable, of_blocks)
            newest = (end - start - 1) // of_blocks
            scores = scores.masked_fill(
                (offset[: scores.shape[1]] == newest) & selectable, math.inf
            )
        chosen = select(scores, selectable, topk, sorted=sorted)
        if moves and of_blocks == 1:
            chosen = torch.where(chosen < 0, -1, chosen + start).to(torch.int32)
        x.topk_indices[queries] = chosen


def logits(operands: PrefillOperands) -> Tensor:
    """Scores (S, S_kv) fp32, -inf outside each query's range."""
    _check(operands)
    out = operands.weights.new_empty(len(operands.ends), len(operands.k_index))
    key = torch.arange(out.shape[1], device=out.device)
    for queries, scores, start, end in _scored(operands):
        out[queries] = scores.masked_fill((key < start) | (key >= end), -math.inf)
    return out


def _check(operands: PrefillOperands) -> None:
    """ArgumentValueError for a range that is none of the keys, where FLASHDSA_CHECK is set."""
    if values_are_checked():
        ranges_of(operands)


def _scored(x: PrefillOperands) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Some queries at a time: which, their scores (n, S_kv) fp32, and starts and ends (n, 1)."""
    (count, num_heads, _), num_keys = x.q_index.shape, len(x.k_index)
    ends = x.ends.clamp(0, num_keys)
    starts = torch.zeros_like(ends) if x.starts is None else x.starts.clamp(0, num_keys)
    of_tokens = 8 * num_heads * min(TOKEN_BLOCK, num_keys) // max(num_keys, 1)
    for first, last in spans(count if num_keys else 0, rows_at_once(num_keys, of_tokens)):
        queries = slice(first, last)
        q, weights = x.q_index[queries].float(), x.weights[queries]
        scores = x.weights.new_empty(last - first, num_keys)
        for begin, end in spans(num_keys, TOKEN_BLOCK):
            keys = x.k_index[begin:end].float().t()
            scores[:, begin:end] = score(q, weights, keys)
        if x.k_scale is not None:
            scores *= x.k_scale
        yield queries, scores, starts[queries, None], ends[queries, None]
