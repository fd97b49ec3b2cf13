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
from flashdsa.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from flashdsa.ops.indexer import dsa_topk_indexer, indexer_logits
from flashdsa.ops.prefill import prefill_logits
from flashdsa.problem import INDEX_HEAD_DIM

ROW_BYTES = 1024
"""Rows of scores lie a multiple of so many bytes apart."""

_num_sms: int | None = None


def set_num_sms(new_num_sms: int) -> None:
    """Remembered for `get_num_sms`, and not used."""
    global _num_sms
    _num_sms = int(new_num_sms)


def get_num_sms() -> int:
    """Return the number of `set_num_sms`, else the current GPU's; 1 without a GPU."""
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
    """`fp8_fp4_mqa_logits` of a q without scales, with fp32 scores."""
    _require_e4m3(q)
    return fp8_fp4_mqa_logits(
        (q, None), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k
    )


def fp8_fp4_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Scores of contiguous keys, each query's of its own range, by `flashdsa.prefill_logits`.

    Args:
        q: (S, H, D) float8_e4m3fn, D up to 128, and None: scales, which FP4 has, are not served.
        kv: keys (S_kv, D) float8_e4m3fn and their scales (S_kv,) fp32.
        weights: (S, H) fp32.
        cu_seq_len_k_start, cu_seq_len_k_end: (S,) int32, the first key of each query and the one
            behind its last.
        clean_logits: not used: scores outside the range are -inf in any case.
        max_seqlen_k: 0, or the width of a compressed result, whose column 0 is each query's first
            key; it then wants ``clean_logits=False``, as in DeepGEMM.
        logits_dtype: torch.float32, or torch.bfloat16, to which the fp32 scores are rounded.

    Returns:
        (S, S_kv) or (S, max_seqlen_k), rows a multiple of 1,024 bytes apart, -inf outside.
    """
    queries = _without_scales(q)
    if max_seqlen_k and clean_logits:
        raise ArgumentValueError("max_seqlen_k: a compressed result wants clean_logits=False")
    keys, scales = kv
    num_keys = keys.shape[0]
    begin = cu_seq_len_k_start.clamp(0, num_keys)
    stop = torch.maximum(cu_seq_len_k_end.clamp(max=num_keys), begin)
    scores = prefill_logits(
        _to_index_dims(queries), _to_index_dims(keys), weights, begin, stop, k_scale=scales
    )
    if max_seqlen_k:
        scores = _from_each_begin(scores, begin, stop, max_seqlen_k)
    return _in_padded_rows(scores, logits_dtype)


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
    """`fp8_fp4_paged_mqa_logits` of a q without scales, with fp32 scores."""
    _require_e4m3(q)
    rest = context_lens, block_table, schedule_meta, max_context_len, clean_logits
    return fp8_fp4_paged_mqa_logits((q, None), kv_cache, weights, *rest, indices=indices)


def fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """Scores of paged keys, by `flashdsa.indexer_logits`.

    Args:
        q: (B, next_n, H, 128) float8_e4m3fn, and None: scales, which FP4 has, are not served.
        kv_cache: (pages, 64, 1, 132) uint8, keys first, then scales, as in flashdsa.
        weights: (B * next_n, H) fp32.
        context_lens: (B, next_n) int32; or (B,), of each sequence's last query: the one before it
            sees a key less.
        block_table: (B, max_pages) int32.
        schedule_meta, clean_logits: not used: scores from the length on are -inf in any case.
        max_context_len: width of the result.
        logits_dtype: torch.float32, or torch.bfloat16, to which the fp32 scores are rounded.
        indices: (B,) int32, the row of `block_table` of each row; by default its own.

    Returns:
        (B * next_n, max_context_len), rows a multiple of 1,024 bytes apart.
    """
    queries, lengths, table = _rows_of_queries(
        _without_scales(q), context_lens, block_table, indices
    )
    scores = indexer_logits(queries, kv_cache, weights, lengths, table, max_context_len)
    return _in_padded_rows(scores, logits_dtype)


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


def _without_scales(q: tuple[Tensor, Tensor | None]) -> Tensor:
    """The e4m3 queries of a pair whose scales are None."""
    if not isinstance(q, tuple) or len(q) != 2:
        raise ArgumentTypeError(f"q: expected a pair of a tensor and None; got {type(q).__name__}")
    if q[1] is not None:
        raise UnsupportedError("q: FP4, a pair with scales, is not served here; pass e4m3 and None")
    _require_e4m3(q[0])
    return q[0]


def _from_each_begin(scores: Tensor, begin: Tensor, stop: Tensor, width: int) -> Tensor:
    """(S, width) of scores (S, S_kv): each row's from its range's begin on, -inf behind its end."""
    if not scores.shape[1]:
        return scores.new_full((len(scores), width), -torch.inf)
    columns = torch.arange(width, device=scores.device) + begin[:, None]
    moved = scores.gather(1, columns.clamp(max=scores.shape[1] - 1))
    return moved.masked_fill_(columns >= stop[:, None], -torch.inf)


def _to_index_dims(rows: Tensor) -> Tensor:
    """E4m3 rows (..., D) with zeros up to 128 dims, which add nothing to a product."""
    missing = INDEX_HEAD_DIM - rows.shape[-1]
    if missing <= 0:
        return rows
    return torch.nn.functional.pad(rows.view(torch.uint8), (0, missing)).view(rows.dtype)


def _in_padded_rows(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """The scores in `dtype`, copied where their rows are not a multiple of ROW_BYTES apart."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedError(
            f"logits_dtype: expected torch.float32 or torch.bfloat16; got {dtype}"
        )
    if scores.dtype == dtype and scores.stride(0) * dtype.itemsize % ROW_BYTES == 0:
        return scores
    apart = ROW_BYTES // dtype.itemsize
    rows, width = scores.shape
    room = scores.new_empty(rows, -(-max(width, 1) // apart) * apart, dtype=dtype)
    return room[:, :width].copy_(scores)
