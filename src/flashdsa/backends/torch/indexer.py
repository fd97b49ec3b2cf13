"""The fp8 indexer by torch on any device: rows are scored as wide as their table, then ranked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.cpu.index_k_cache import page_views
from flashdsa.backends.cpu.indexer import check_values
from flashdsa.backends.cpu.tiling import spans
from flashdsa.backends.indexer.tensors import values_are_checked
from flashdsa.backends.mxfp4 import as_e4m3, has_mxfp4, parts_of_cache
from flashdsa.backends.torch.topk import among, block_scores, rows_at_once, select
from flashdsa.problem import INDEX_HEAD_DIM, PAGE_SIZE

if TYPE_CHECKING:
    from flashdsa.ops.indexer import IndexerOperands, TopkIndexerOperands

TOKEN_BLOCK = 1024
"""Tokens of a row that are scored at once."""


class Rows(NamedTuple):
    """Some rows: their numbers, scores (n, width) fp32, entries (n, max_pages) of their tables, 0
    in place of bad ones, and which tokens are before the row's length and in a good entry."""

    numbers: slice
    scores: Tensor
    entries: Tensor
    selectable: Tensor


def topk_indexer(
    operands: TopkIndexerOperands,
    *,
    sorted: bool,
    positions: bool,
    table_page_size: int,
    block: int,
    check: bool,
) -> None:
    """Write each row's best token ids into `topk_indices`, as `cpu.indexer.topk_indexer` does;
    `check` reads values where FLASHDSA_CHECK is set."""
    x = operands
    if check and values_are_checked():
        check_values(x.seq_lens, x.block_table, len(x.k_index_cache_fp8), table_page_size)
    topk = x.topk_indices.shape[1]
    of_blocks = block if x.candidates is None else 1
    for rows in _scored(x.inputs, table_page_size):
        scores, selectable = rows.scores, rows.selectable
        if x.candidates is not None:
            listed = x.candidates[rows.numbers]
            selectable = selectable & among(listed, scores.shape[1], block)
        if of_blocks > 1:
            newest = (x.seq_lens[rows.numbers, None].clamp(max=scores.shape[1]) - 1) // of_blocks
            scores, selectable = block_scores(scores, selectable, of_blocks)
            number = torch.arange(scores.shape[1], device=scores.device)
            scores = scores.masked_fill((number == newest) & selectable, math.inf)
        chosen = select(scores, selectable, topk, sorted=sorted)
        if not positions and of_blocks == 1:
            token = chosen.clamp(min=0).long()
            page = rows.entries.gather(1, token // table_page_size)
            ids = page * table_page_size + token % table_page_size
            chosen = torch.where(chosen < 0, -1, ids).to(torch.int32)
        x.topk_indices[rows.numbers] = chosen


def logits(operands: IndexerOperands, *, max_len: int, table_page_size: int) -> Tensor:
    """Scores (B, max_len) fp32 of the tokens before `seq_lens`, -inf beyond; those of a bad page
    are -inf, too."""
    if values_are_checked():
        num_pages = len(operands.k_index_cache_fp8)
        check_values(operands.seq_lens, operands.block_table, num_pages, table_page_size)
    out = operands.weights.new_full((len(operands.seq_lens), max_len), -math.inf)
    for rows in _scored(operands, table_page_size):
        width = min(max_len, rows.scores.shape[1])
        scores = rows.scores.masked_fill(~rows.selectable, -math.inf)
        out[rows.numbers, :width] = scores[:, :width]
    return out


def _scored(x: IndexerOperands, of_entry: int) -> Iterator[Rows]:
    """All rows, some at a time. The table has a row for each, or for some neighbouring ones."""
    count, num_heads, _ = x.q_index_fp8.shape
    next_n = count // max(len(x.block_table), 1)
    width = x.block_table.shape[1] * of_entry
    num_entries = len(x.k_index_cache_fp8) * (PAGE_SIZE // of_entry)
    position = torch.arange(width, device=x.seq_lens.device)
    # Keys are gathered for each row: INDEX_HEAD_DIM and num_heads fp32 numbers of a token.
    of_tokens = 4 * (2 * INDEX_HEAD_DIM + 2 * num_heads) * min(TOKEN_BLOCK, width) // max(width, 1)
    for first, last in spans(count, rows_at_once(width, of_tokens)):
        numbers = slice(first, last)
        requests = torch.arange(first, last, device=position.device) // next_n
        entries = x.block_table[requests].long()
        good = (entries >= 0) & (entries < num_entries)
        entries = entries.masked_fill(~good, 0)
        selectable = (position < x.seq_lens[numbers, None]) & good.repeat_interleave(
            of_entry, dim=1
        )
        scores = x.weights.new_zeros(last - first, width)
        q, weights = x.q_index_fp8[numbers].float(), x.weights[numbers]
        for begin, end in spans(entries.shape[1] if num_entries else 0, TOKEN_BLOCK // of_entry):
            keys, scales = _gather(x.k_index_cache_fp8, entries[:, begin:end], of_entry)
            tokens = slice(begin * of_entry, end * of_entry)
            scores[:, tokens] = score(q, weights, keys.mT) * scales
        yield Rows(numbers, scores, entries, selectable)


def _gather(cache: Tensor, entries: Tensor, of_entry: int) -> tuple[Tensor, Tensor]:
    """Keys (n, tokens, 128) and scales (n, tokens) fp32 of the rows' entries (n, some)."""
    in_page = PAGE_SIZE // of_entry
    at = entries // in_page, entries % in_page
    parts = parts_of_cache(cache) if has_mxfp4(cache) else page_views(cache)
    first, second = (x.unflatten(1, (in_page, of_entry))[at].flatten(1, 2) for x in parts)
    if not has_mxfp4(cache):
        return first.view(torch.float8_e4m3fn).float(), second
    rows, scales = as_e4m3(torch.cat((first, second), dim=2).flatten(0, 1))
    return rows.float().view(*first.shape[:2], -1), scales.view(first.shape[:2])


def score(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Scores (n, tokens) = sum_h weights relu(q . k) of q (n, H, 128) and keys (n, 128, tokens), or
    (128, tokens) of all."""
    return (torch.matmul(q, keys).relu_() * weights[..., None]).sum(1)
