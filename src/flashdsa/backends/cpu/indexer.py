"""The fp8 indexer on the CPU: scores from packed pages, then the exact top-k as token ids."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashdsa.backends.cpu.index_k_cache import page_views
from flashdsa.backends.cpu.tiling import spans
from flashdsa.backends.cpu.topk import select
from flashdsa.backends.mxfp4 import as_e4m3, has_mxfp4, parts_of_cache
from flashdsa.errors import ArgumentValueError
from flashdsa.problem import PAGE_SIZE

if TYPE_CHECKING:
    from flashdsa.ops.indexer import IndexerOperands, TopkIndexerOperands

TOKEN_BLOCK = 4096
"""Tokens scored at once."""
ROW_BLOCK_ELEMENTS = 2**22
"""Aim for heads x tokens of dot products held at once over a block of rows (32 MiB of float64)."""


class Row(NamedTuple):
    """One query row's tokens after the rules for lengths, tables and page ids."""

    length: int
    entries: Tensor
    """(ceil(length / of_entry),) int64 of the table, in the cache everywhere; 0 in place of bad
    ones."""
    selectable: Tensor | None
    """(length,) bool, False for tokens of a bad entry; None when all entries are good."""
    of_entry: int
    """Tokens that an entry of the table names."""


def topk_indexer(
    operands: TopkIndexerOperands,
    *,
    sorted: bool,
    positions: bool,
    table_page_size: int,
    block: int,
    check: bool,
) -> None:
    """Write each row's best token ids (page * 64 + offset) into `topk_indices` (B, topk) int32.

    Default order: ascending token position; `sorted`: descending score, ties by position.

    Args:
        positions: a token's id is its position in the row instead.
        table_page_size: tokens that an entry of `block_table` names.
        block: if not 1, ids are those of blocks of so many positions; with candidates, these are
            blocks to choose tokens from.
        check: bad lengths and page ids are errors, raised before anything is written; otherwise
            lengths are clamped and tokens of bad pages are never emitted.
    """
    q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices, candidates = (
        operands
    )
    topk = topk_indices.shape[1]
    num_pages = k_index_cache_fp8.shape[0]
    rows = _rows(seq_lens, block_table, num_pages, table_page_size, check)
    if candidates is not None:
        listed = zip(rows, candidates, strict=True)
        rows = [row._replace(selectable=_among(row, ids, block)) for row, ids in listed]
    of_blocks = block if candidates is None else 1
    topk_indices.fill_(-1)
    unscored = [not sorted and of_blocks == 1 and row.length <= topk for row in rows]
    for index, row in enumerate(rows):
        if unscored[index]:
            everything = torch.arange(row.length)
            chosen = everything if row.selectable is None else everything[row.selectable]
            _emit(topk_indices[index], row, chosen, positions)
    scored = [index for index, skip in enumerate(unscored) if not skip]
    for index, scores in _scores(q_index_fp8, k_index_cache_fp8, weights, rows, scored):
        row = rows[index]
        chosen = select_blocks(scores, row.selectable, topk, of_blocks, sorted=sorted)
        _emit(topk_indices[index], row, chosen, positions or of_blocks > 1)


def select_blocks(
    scores: Tensor, selectable: Tensor | None, topk: int, block: int, *, sorted: bool
) -> Tensor:
    """The best `topk` blocks of so many of `scores` (n,), as `select` gives positions."""
    if block > 1:
        scores, selectable = block_scores(scores, selectable, block)
    return select(scores, selectable, topk, sorted=sorted)


def block_scores(
    scores: Tensor, selectable: Tensor | None, block: int
) -> tuple[Tensor, Tensor | None]:
    """Scores (ceil(n / block),) of blocks, and which have a position to choose: the best score of
    each, NaN where none is a number, and infinity of the last block, which has the newest position.
    """
    padding = (0, -len(scores) % block)
    there = torch.ones_like(scores, dtype=torch.bool) if selectable is None else selectable
    some = pad(there, padding).unflatten(0, (-1, block)).any(1)
    scored = torch.where(there, scores, math.nan)
    scored = pad(scored, padding, value=math.nan).unflatten(0, (-1, block))
    missing = scored.isnan()
    best = scored.masked_fill(missing, -math.inf).amax(1)
    best = best.masked_fill(missing.all(1), math.nan)
    best[-1:].masked_fill_(some[-1:], math.inf)
    return best, some


def among(candidates: Tensor, length: int, block: int) -> Tensor:
    """Which of `length` positions are in one of the listed blocks (n,); bool. Ids of no visible
    block, and repeated ones, add nothing."""
    count, ids = -(-length // block), candidates.long()
    found = torch.zeros(count, block, dtype=torch.bool)
    found[ids[(ids >= 0) & (ids < count)]] = True
    return found.flatten()[:length]


def _among(row: Row, candidates: Tensor, block: int) -> Tensor:
    found = among(candidates, row.length, block)
    return found if row.selectable is None else found & row.selectable


def logits(operands: IndexerOperands, *, max_len: int, table_page_size: int) -> Tensor:
    """Scores (B, max_len) fp32 of the tokens before `seq_lens`, -inf beyond.

    Raises:
        ArgumentValueError: a bad length or page id, or a length beyond `max_len`.
    """
    q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table = operands
    num_pages = k_index_cache_fp8.shape[0]
    rows = _rows(seq_lens, block_table, num_pages, table_page_size, check=True)
    longest = max((row.length for row in rows), default=0)
    if longest > max_len:
        raise ArgumentValueError(
            f"max_len: expected at least the longest of seq_lens, {longest}; got {max_len}"
        )
    out = torch.full((len(rows), max_len), -math.inf, dtype=torch.float32)
    every_row = list(range(len(rows)))
    for index, scores in _scores(q_index_fp8, k_index_cache_fp8, weights, rows, every_row):
        out[index, : len(scores)] = scores
    return out


def check_values(
    seq_lens: Tensor, block_table: Tensor, num_pages: int, table_page_size: int
) -> None:
    """Raise ArgumentValueError for the first bad length or page id, as the CPU backend does."""
    _rows(seq_lens, block_table, num_pages, table_page_size, check=True)


def _emit(out: Tensor, row: Row, chosen: Tensor, positions: bool) -> None:
    ids = chosen
    if not positions:
        ids = row.entries[chosen // row.of_entry] * row.of_entry + chosen % row.of_entry
    out[: len(ids)] = ids.to(torch.int32)


def _rows(
    seq_lens: Tensor, block_table: Tensor, num_pages: int, of_entry: int, check: bool
) -> list[Row]:
    """The rows' tokens, or with `check` an error that names the first bad length or page id.

    Args:
        block_table: a row for each of `seq_lens`, or for as many neighbouring ones as it lacks.
        of_entry: tokens that one of its entries names.
    """
    next_n = len(seq_lens) // max(len(block_table), 1)
    capacity = block_table.shape[1] * of_entry
    num_entries = num_pages * (PAGE_SIZE // of_entry)
    rows = []
    for b, length in enumerate(seq_lens.tolist()):
        if check and length < 0:
            raise ArgumentValueError(
                f"seq_lens: expected values >= 0; got seq_lens[{b}] = {length}"
            )
        if check and length > capacity:
            raise ArgumentValueError(
                f"block_table: expected at least {-(-length // of_entry)} pages for "
                f"seq_lens[{b}] = {length}; got a table of {block_table.shape[1]} pages"
            )
        length = min(max(length, 0), capacity)
        request = b // next_n
        entries = block_table[request, : -(-length // of_entry)].long()
        bad = (entries < 0) | (entries >= num_entries)
        selectable = None
        if bad.any():
            slot = int(bad.nonzero()[0])
            if check:
                raise ArgumentValueError(
                    f"block_table: expected page ids in [0, {num_entries}); "
                    f"got block_table[{request}, {slot}] = {int(entries[slot])}"
                )
            selectable = (~bad).repeat_interleave(of_entry)[:length]
            entries = entries.masked_fill(bad, 0)
        rows.append(Row(length, entries, selectable, of_entry))
    return rows


def _scores(
    q_index_fp8: Tensor, cache: Tensor, weights: Tensor, rows: list[Row], wanted: list[int]
) -> Iterator[tuple[int, Tensor]]:
    """(row number, scores (length,) fp32) of the `wanted` rows.

    Neighbouring rows that walk the same pages (the queries of one sequence) share one gather.
    """
    num_heads = q_index_fp8.shape[1]
    for group in _groups_of_same_pages(rows, wanted, num_heads):
        longest = max((rows[index] for index in group), key=lambda row: row.length)
        scores = torch.empty(len(group), longest.length, dtype=torch.float32)
        if longest.length:
            q = q_index_fp8[group].double()  # (rows, H, 128), exact
            w = weights[group].float()
            of_entry = longest.of_entry
            for first, last in spans(len(longest.entries), TOKEN_BLOCK // of_entry):
                tokens = slice(first * of_entry, min(last * of_entry, longest.length))
                keys, scales = _gather_tokens(cache, longest.entries[first:last], of_entry)
                scores[:, tokens] = score(q, w, keys, scales)[:, : tokens.stop - tokens.start]
        for member, index in enumerate(group):
            yield index, scores[member, : rows[index].length]


def _groups_of_same_pages(
    rows: list[Row], wanted: list[int], num_heads: int
) -> Iterator[list[int]]:
    """Runs of wanted rows, each one's entries a prefix of the longest one's of its run."""
    group: list[int] = []
    longest = torch.empty(0, dtype=torch.int64)
    for index in wanted:
        entries = rows[index].entries
        common = min(len(entries), len(longest))
        tokens = min(max(len(entries), len(longest)) * rows[index].of_entry, TOKEN_BLOCK)
        full = (len(group) + 1) * num_heads * tokens > ROW_BLOCK_ELEMENTS
        if group and (full or not torch.equal(entries[:common], longest[:common])):
            yield group
            group, longest = [], entries
        group.append(index)
        longest = max(longest, entries, key=len)
    if group:
        yield group


def _gather_tokens(cache: Tensor, entries: Tensor, of_entry: int) -> tuple[Tensor, Tensor]:
    """Keys (128, tokens) float64 and scales (tokens,) fp32 of whole entries of `of_entry`."""
    in_page = PAGE_SIZE // of_entry
    at = entries // in_page, entries % in_page
    if has_mxfp4(cache):
        parts = [x.unflatten(1, (in_page, of_entry))[at] for x in parts_of_cache(cache)]
        rows, scale = as_e4m3(torch.cat(parts, dim=2).flatten(0, 1))
        return rows.double().t(), scale
    keys, scales = (x.unflatten(1, (in_page, of_entry))[at] for x in page_views(cache))
    fp8 = keys.flatten(0, 1).view(torch.float8_e4m3fn)
    return fp8.double().t(), scales.flatten()


def score(q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor) -> Tensor:
    """Scores (rows, tokens) fp32 = scale * sum_h weights * relu(q . k).

    INVARIANT: a token's score depends on its bytes alone, not on where it lies. The dot products
    of e4m3 numbers are exact in float64 in any order (multiples of 2^-18 below 2^25: 43 bits), and
    the head sum adds element-wise in head order; a BLAS product would not promise that order.
    """
    num_rows, num_heads, dim = q.shape
    dots = torch.matmul(q.reshape(-1, dim), keys)  # (rows * H, tokens)
    relu = dots.clamp_min_(0).float().view(num_rows, num_heads, -1)
    total = torch.zeros(num_rows, relu.shape[-1], dtype=torch.float32)
    for head in range(num_heads):
        total += relu[:, head].mul_(weights[:, head, None])
    return total.mul_(scales)
