"""DeepGEMM's fp8 index scores: `from flashdsa.adapters import deep_gemm`.

Names, order and defaults are those of DeepGEMM; the ranges of `fp8_mqa_logits` may be called `ks`
and `ke` too, as in SGLang's build of it. `fp8_paged_mqa_topk` stands beside them: the scores' best,
without the matrix of scores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from flashdsa.adapters.arguments import require_default
from flashdsa.api import dsa_topk_indexer, indexer_logits
from flashdsa.errors import ArgumentValueError, UnsupportedError
from flashdsa.problem import INDEX_HEAD_DIM, INDEX_TOKEN_BYTES, PAGE_SIZE, SCALE_BYTES

ROW_ELEMENTS = 256
"""Rows of scores lie a multiple of so many elements apart."""
MOVED_ELEMENTS = 2**25
"""Scores that are moved at once to where a ragged range begins."""

_num_sms: int | None = None


def set_num_sms(new_num_sms: int) -> None:
    """Remembered for `get_num_sms`, and not used."""
    global _num_sms
    _num_sms = int(new_num_sms)


def get_num_sms() -> int:
    """What `set_num_sms` was told, else the current GPU's number; 1 without a GPU."""
    if _num_sms is not None:
        return _num_sms
    if not torch.cuda.is_available():
        return 1
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """Zeros (num_sms + 1, 2) int32: flashdsa needs no schedule from its callers."""
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)


def _ranges_by_either_name(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function`, which takes `ks` and `ke` for cu_seq_len_k_start and cu_seq_len_k_end too."""

    @wraps(function)
    def run(*arguments: Any, **named: Any) -> Tensor:
        for short, long in (("ks", "cu_seq_len_k_start"), ("ke", "cu_seq_len_k_end")):
            if short in named and long not in named:
                named[long] = named.pop(short)
        return function(*arguments, **named)

    return run


@_ranges_by_either_name
def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """Scores of contiguous keys, each query's of its own range, by `flashdsa.indexer_logits`.

    Args:
        q: (S, H, 128) float8_e4m3fn.
        kv: keys (S_kv, 128) float8_e4m3fn and their scales (S_kv,) fp32; copied into pages.
        weights: (S, H) fp32.
        cu_seq_len_k_start, cu_seq_len_k_end: (S,) int32, the first key of each query and the one
            behind its last.
        clean_logits: not used: scores outside the range are -inf in any case.
        max_seqlen_k: 0, or the width of a compressed result, whose column 0 is each query's first
            key; it then wants ``clean_logits=False``, as in DeepGEMM.

    Returns:
        (S, S_kv) or (S, max_seqlen_k) fp32, rows a multiple of 256 elements apart, -inf outside.
    """
    _require_e4m3(q)
    if max_seqlen_k and clean_logits:
        raise ArgumentValueError("max_seqlen_k: a compressed result wants clean_logits=False")
    keys, scales = kv
    num_queries, num_keys = q.shape[0], keys.shape[0]
    cache = _as_pages(keys, scales)
    num_pages = cache.shape[0]
    width = max_seqlen_k or num_keys
    out = _padded_rows(num_queries, width, q.device)
    pages = torch.arange(num_pages, dtype=torch.int32, device=q.device)
    columns = torch.arange(width, device=q.device)
    step = max(1, MOVED_ELEMENTS // max(width, num_pages * PAGE_SIZE, 1))
    for first in range(0, num_queries if num_pages else 0, step):
        rows = slice(first, first + step)
        begin = cu_seq_len_k_start[rows].clamp(0, num_keys)
        stop = cu_seq_len_k_end[rows].clamp(max=num_keys)
        first_page = begin // PAGE_SIZE
        # Where the range is empty the length is 0, whatever lies before it.
        length = torch.where(stop > begin, stop - first_page * PAGE_SIZE, 0).to(torch.int32)
        table = (first_page[:, None] + pages).clamp_(max=num_pages - 1).to(torch.int32)
        scores = indexer_logits(q[rows], cache, weights[rows], length, table, num_pages * PAGE_SIZE)
        # Column of a key in `scores`, and its column in the result.
        at = columns + (begin % PAGE_SIZE if max_seqlen_k else -first_page * PAGE_SIZE)[:, None]
        key = columns + (begin if max_seqlen_k else torch.zeros_like(begin))[:, None]
        inside = (key >= begin[:, None]) & (key < stop[:, None])
        moved = scores.gather(1, at.clamp(0, scores.shape[1] - 1))
        out[rows] = torch.where(inside, moved, -torch.inf)
    return out


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """Scores of paged keys, by `flashdsa.indexer_logits`.

    Args:
        q: (B, next_n, H, 128) float8_e4m3fn.
        kv_cache: (pages, 64, 1, 132) uint8, keys first, then scales, as in flashdsa.
        weights: (B * next_n, H) fp32.
        context_lens: (B, next_n) int32; or (B,), of each sequence's last query: the one before it
            sees a key less.
        block_table: (B, max_pages) int32.
        schedule_meta, clean_logits: not used: scores from the length on are -inf in any case.
        max_context_len: width of the result.
        indices: (B,) int32, the row of `block_table` of each row; by default its own.

    Returns:
        (B * next_n, max_context_len) fp32, rows a multiple of 256 elements apart.
    """
    queries, lengths, table = _rows_of_queries(q, context_lens, block_table, indices)
    scores = indexer_logits(queries, kv_cache, weights, lengths, table, max_context_len)
    out = _padded_rows(len(scores), max_context_len, scores.device)
    return out.copy_(scores)


def fp8_paged_mqa_topk(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    topk: int,
    *,
    ids: str = "slot",
    indices: Tensor | None = None,
) -> Tensor:
    """The ids of the best of `fp8_paged_mqa_logits`' scores, without the matrix of scores.

    Not a function of DeepGEMM. Arguments as above, and ids: "slot" (``page * 64 + offset``) or
    "position".

    Returns:
        (B * next_n, topk) int32, -1 behind the ids of a short row; see `flashdsa.dsa_topk_indexer`.
    """
    queries, lengths, table = _rows_of_queries(q, context_lens, block_table, indices)
    out = torch.empty(len(queries), topk, dtype=torch.int32, device=q.device)
    dsa_topk_indexer(queries, kv_cache, weights, lengths, table, out, ids=ids)
    return out


def _require_e4m3(q: object) -> None:
    if not isinstance(q, Tensor) or q.dtype != torch.float8_e4m3fn:
        raise UnsupportedError(
            "q: flashdsa's index scores are of float8_e4m3fn queries, a tensor without scales "
            "(fold them into weights); got "
            + (str(q.dtype) if isinstance(q, Tensor) else type(q).__name__)
        )


def _rows_of_queries(
    q: Tensor, context_lens: Tensor, block_table: Tensor, indices: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """One query a row: queries (R, H, 128), lengths (R,), table (R, max_pages)."""
    _require_e4m3(q)
    if q.dim() != 4:
        raise ArgumentValueError(f"q: expected [B, next_n, H, 128]; got {list(q.shape)}")
    batch, next_n = q.shape[:2]
    if indices is not None:
        require_default("fp8_paged_mqa_logits", "next_n", next_n, default=1, instead="with indices")
        block_table = block_table[indices.long()]
    if context_lens.dim() == 1:
        back = torch.arange(1 - next_n, 1, dtype=torch.int32, device=q.device)
        context_lens = (context_lens[:, None] + back).clamp_(min=0)
    if context_lens.shape != (batch, next_n):
        raise ArgumentValueError(
            f"context_lens: expected shape [B, next_n] = {[batch, next_n]} or [B]; "
            f"got {list(context_lens.shape)}"
        )
    table = block_table if next_n == 1 else block_table.repeat_interleave(next_n, dim=0)
    return q.flatten(0, 1), context_lens.flatten(), table


def _as_pages(keys: Tensor, scales: Tensor) -> Tensor:
    """Keys (n, 128) and scales (n,) as pages (ceil(n / 64), 64, 1, 132) of bytes."""
    count = keys.shape[0]
    pages = -(-count // PAGE_SIZE)
    cache = keys.new_zeros(pages, PAGE_SIZE * INDEX_TOKEN_BYTES, dtype=torch.uint8)
    split = PAGE_SIZE * INDEX_HEAD_DIM
    padded = torch.nn.functional.pad(keys.view(torch.uint8), (0, 0, 0, pages * PAGE_SIZE - count))
    cache[:, :split] = padded.view(pages, split)
    padded = torch.nn.functional.pad(scales.reshape(-1), (0, pages * PAGE_SIZE - count))
    of_pages = padded.contiguous().view(torch.uint8).view(pages, PAGE_SIZE * SCALE_BYTES)
    cache[:, split:] = of_pages
    return cache.view(pages, PAGE_SIZE, 1, INDEX_TOKEN_BYTES)


def _padded_rows(rows: int, width: int, device: torch.device) -> Tensor:
    """(rows, width) fp32 of -inf, rows a multiple of 256 elements apart."""
    apart = -(-max(width, 1) // ROW_ELEMENTS) * ROW_ELEMENTS
    return torch.full((rows, apart), -torch.inf, device=device)[:, :width]
