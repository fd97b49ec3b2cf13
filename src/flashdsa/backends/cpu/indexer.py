"""The fp8 indexer by torch: rows are scored as wide as their table, then ranked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.cpu.index_k_cache import page_views
from flashdsa.backends.cpu.tiling import CPU, Mode, spans
from flashdsa.backends.cpu.topk import choose, rows_at_once
from flashdsa.backends.indexer.tensors import values_are_checked
from flashdsa.backends.mxfp4 import as_e4m3, has_mxfp4, parts_of_cache
from flashdsa.errors import ArgumentValueError
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
    mode: Mode = CPU,
) -> None:
    """Write each row's best token ids (page * 64 + offset) into `topk_indices` (B, topk) int32.

    Default order: ascending token position; `sorted`: descending score, ties by position.

    Args:
        positions: a token's id is its position in the row instead.
        table_page_size: tokens that an entry of `block_table` names.
        block: if not 1, ids are those of blocks of `block` positions; with candidates, these are
            blocks to choose tokens from.
        check: bad lengths and page ids are errors, raised before anything is written, where values
            are read; otherwise lengths are clamped and tokens of bad pages are never emitted.
    """
    x, topk = operands, operands.topk_indices.shape[1]
    if check and (mode.reads or values_are_checked()):
        check_values(x.seq_lens, x.block_table, len(x.k_index_cache_fp8), table_page_size)
    of_blocks = block > 1 and x.candidates is None
    everything = 0 if sorted or of_blocks else topk
    for rows in _scored(x.inputs, table_page_size, mode, everything):
        chosen = choose(
            rows.scores,
            rows.selectable,
            x.seq_lens[rows.numbers, None],
            topk,
            block=block,
            candidates=None if x.candidates is None else x.candidates[rows.numbers],
            sorted=sorted,
        )
        if not positions and not of_blocks and rows.scores.shape[1]:
            token = chosen.clamp(min=0).long()
            page = rows.entries.gather(1, token // table_page_size)
            ids = page * table_page_size + token % table_page_size
            chosen = torch.where(chosen < 0, -1, ids).to(torch.int32)
        x.topk_indices[rows.numbers] = chosen


def logits(
    operands: IndexerOperands, *, max_len: int, table_page_size: int, mode: Mode = CPU
) -> Tensor:
    """Scores (B, max_len) fp32 of the tokens before `seq_lens`, -inf beyond; those of a bad page
    are -inf, too.

    Raises:
        ArgumentValueError: a bad length or page id, or a length beyond `max_len`, where values are
            read.
    """
    lengths = operands.seq_lens
    if mode.reads or values_are_checked():
        check_logits(operands, max_len, table_page_size)
    out = operands.weights.new_full((len(lengths), max_len), -math.inf)
    for rows in _scored(operands, table_page_size, mode, 0):
        width = min(max_len, rows.scores.shape[1])
        scores = rows.scores.masked_fill(~rows.selectable, -math.inf)
        out[rows.numbers, :width] = scores[:, :width]
    return out


def check_values(seq_lens: Tensor, block_table: Tensor, num_pages: int, of_entry: int) -> None:
    """Raise ArgumentValueError for the first bad length or page id.

    Args:
        block_table: a row for each of `seq_lens`, or for as many neighbouring ones as it lacks.
        of_entry: tokens that one of its entries names.
    """
    next_n = len(seq_lens) // max(len(block_table), 1)
    num_entries = num_pages * (PAGE_SIZE // of_entry)
    for b, length in enumerate(seq_lens.tolist()):
        used = -(-length // of_entry)
        if length < 0:
            raise ArgumentValueError(
                f"seq_lens: expected values >= 0; got seq_lens[{b}] = {length}"
            )
        if used > block_table.shape[1]:
            raise ArgumentValueError(
                f"block_table: expected at least {used} pages for "
                f"seq_lens[{b}] = {length}; got a table of {block_table.shape[1]} pages"
            )
        request = b // next_n
        entries = block_table[request, :used]
        bad = (entries < 0) | (entries >= num_entries)
        if bad.any():
            slot = int(bad.nonzero()[0])
            raise ArgumentValueError(
                f"block_table: expected page ids in [0, {num_entries}); "
                f"got block_table[{request}, {slot}] = {int(entries[slot])}"
            )


def check_logits(operands: IndexerOperands, max_len: int, of_entry: int) -> None:
    """Raise ArgumentValueError for a bad length or page id, or a length beyond `max_len`."""
    lengths, table = operands.seq_lens.cpu(), operands.block_table.cpu()
    check_values(lengths, table, len(operands.k_index_cache_fp8), of_entry)
    longest = max(lengths.tolist(), default=0)
    if longest > max_len:
        raise ArgumentValueError(
            f"max_len: expected at least the longest of seq_lens, {longest}; got {max_len}"
        )


def _scored(x: IndexerOperands, of_entry: int, mode: Mode, everything: int) -> Iterator[Rows]:
    """All rows, some at a time. The table has a row for each, or for some neighbouring ones.

    A mode that reads values looks at tokens up to the longest of these rows, and leaves scores 0
    if that has no more than `everything`, which are all chosen.
    """
    count, num_heads, _ = x.q_index_fp8.shape
    next_n = count // max(len(x.block_table), 1)
    width = x.block_table.shape[1] * of_entry
    num_entries = len(x.k_index_cache_fp8) * (PAGE_SIZE // of_entry)
    # Keys are gathered for each row: INDEX_HEAD_DIM and num_heads numbers of a token.
    of_token = mode.index_dtype.itemsize * (2 * INDEX_HEAD_DIM + 2 * num_heads)
    of_tokens = of_token * min(TOKEN_BLOCK, width) // max(width, 1)
    for first, last in spans(count, rows_at_once(width, mode, of_tokens)):
        numbers = slice(first, last)
        lengths = x.seq_lens[numbers, None]
        table, scored = x.block_table, num_entries > 0
        if mode.reads:
            longest = int(lengths.max())
            table = table[:, : -(-max(longest, 0) // of_entry)]
            scored = scored and longest > everything
        requests = torch.arange(first, last, device=lengths.device) // next_n
        entries = table[requests].long()
        good = (entries >= 0) & (entries < num_entries)
        entries = entries.masked_fill(~good, 0)
        position = torch.arange(entries.shape[1] * of_entry, device=lengths.device)
        selectable = (position < lengths) & good.repeat_interleave(of_entry, dim=1)
        scores = x.weights.new_zeros(last - first, len(position))
        q, weights = x.q_index_fp8[numbers].to(mode.index_dtype), x.weights[numbers]
        for begin, end in spans(entries.shape[1] if scored else 0, TOKEN_BLOCK // of_entry):
            keys, scales = _gather(x.k_index_cache_fp8, entries[:, begin:end], of_entry)
            tokens = slice(begin * of_entry, end * of_entry)
            scores[:, tokens] = score(q, weights, keys.mT, mode) * scales
        yield Rows(numbers, scores, entries, selectable)


def _gather(cache: Tensor, entries: Tensor, of_entry: int) -> tuple[Tensor, Tensor]:
    """Keys (n, tokens, 128) e4m3 and scales (n, tokens) fp32 of the rows' entries (n, some)."""
    in_page = PAGE_SIZE // of_entry
    at = entries // in_page, entries % in_page
    parts = parts_of_cache(cache) if has_mxfp4(cache) else page_views(cache)
    first, second = (x.unflatten(1, (in_page, of_entry))[at].flatten(1, 2) for x in parts)
    if not has_mxfp4(cache):
        return first.view(torch.float8_e4m3fn), second
    rows, scales = as_e4m3(torch.cat((first, second), dim=2).flatten(0, 1))
    return rows.view(*first.shape[:2], -1), scales.view(first.shape[:2])


def score(q: Tensor, weights: Tensor, keys: Tensor, mode: Mode) -> Tensor:
    """Scores (n, tokens) fp32 = sum_h weights relu(q . k) of q (n, H, 128) and keys (n, 128,
    tokens), or (128, tokens) of all.

    INVARIANT: a token's score on the CPU depends on its bytes alone, not on where it lies: products
    of e4m3 numbers are exact, and heads are added in their order, which a BLAS product would not
    promise.
    """
    dots = torch.matmul(q, keys.to(mode.index_dtype)).clamp_min_(0)
    if not mode.reads:
        return (dots * weights[..., None]).sum(1)
    total = torch.zeros(len(q), dots.shape[2], dtype=torch.float32)
    for head, weight in enumerate(weights.unbind(1)):
        total += dots[:, head].float().mul_(weight[:, None])
    return total
