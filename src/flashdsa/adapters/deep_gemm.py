"""DeepGEMM's index scores: `from flashdsa.adapters import deep_gemm`.

Calls of DeepGEMM at 54e2261 and 2.8 and of sgl-deep-gemm 0.2.3 and 0.2.5 mean what they mean there.
The ranges of `fp8_mqa_logits` may be called `ks` and `ke`, as in SGLang's build.
`fp8_paged_mqa_topk` stands beside them: the scores' best, without the matrix of scores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.mxfp4 import as_e4m3
from flashdsa.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from flashdsa.ops.indexer import dsa_topk_indexer, indexer_logits
from flashdsa.ops.prefill import prefill_logits
from flashdsa.problem import INDEX_HEAD_DIM

ROW_BYTES = 1024
"""Rows of scores lie a multiple of so many bytes apart."""

Queries = Tensor | tuple[Tensor, Tensor | None] | list[Tensor | None]
"""Queries without scales, or a pair with them (FP4) or None."""

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
    clean_logits: bool | None = None,
    max_seqlen_k: int = 0,
) -> Tensor:
    """Compute `fp8_fp4_mqa_logits` of a q without scales, with fp32 scores."""
    return fp8_fp4_mqa_logits(
        q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k
    )


def fp8_fp4_mqa_logits(
    q: Queries,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool | int | None = None,
    max_seqlen_k: int | Tensor | None = 0,
    logits_dtype: torch.dtype = torch.float32,
    schedule_meta: Tensor | None = None,
) -> Tensor:
    """Compute scores of contiguous keys, each query's of its own range, by `prefill_logits`.

    Args:
        q: (S, H, D) float8_e4m3fn, D up to 128, alone or in a pair with None; or FP4: a pair of
            (S, H, 64) bytes and (S, H) int32, four power-of-two scales per query and head.
        kv: keys (S_kv, D) float8_e4m3fn and their scales (S_kv,) fp32; or FP4: (S_kv, 64) bytes and
            (S_kv,) int32.
        weights: (S, H) fp32 or bf16.
        cu_seq_len_k_start, cu_seq_len_k_end: (S,) int32, the first key of each query and the one
            behind its last.
        clean_logits: not used: scores outside the range are -inf in any case. An int in its place
            is max_seqlen_k, which DeepGEMM 2.8 and sgl-deep-gemm 0.2.5 have there.
        max_seqlen_k: 0, or the width of a compressed result, whose column 0 is each query's first
            key; it excludes ``clean_logits=True``, as in DeepGEMM.
        logits_dtype: torch.float32, or torch.bfloat16, to which the fp32 scores are rounded.
        schedule_meta: not used, here or in the place of max_seqlen_k.

    Returns:
        (S, S_kv) or (S, max_seqlen_k), rows a multiple of 1,024 bytes apart, -inf outside.
    """
    width = _width(clean_logits, max_seqlen_k)
    queries, weights = _e4m3_queries(q, weights)
    keys, scales = kv
    if keys.element_size() == 1 and keys.dtype != torch.float8_e4m3fn:
        keys, scales = _from_fp4("kv", keys, scales)
    num_keys = keys.shape[0]
    begin = cu_seq_len_k_start.clamp(0, num_keys)
    stop = torch.maximum(cu_seq_len_k_end.clamp(max=num_keys), begin)
    scores = prefill_logits(
        _to_index_dims(queries), _to_index_dims(keys), weights, begin, stop, k_scale=scales
    )
    if width:
        scores = _from_each_begin(scores, begin, stop, width)
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
    """Compute `fp8_fp4_paged_mqa_logits` of a q without scales, with fp32 scores."""
    rest = context_lens, block_table, schedule_meta, max_context_len, clean_logits
    return fp8_fp4_paged_mqa_logits(q, kv_cache, weights, *rest, indices=indices)


def fp8_fp4_paged_mqa_logits(
    q: Queries,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool | Tensor | None = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """Compute scores of paged keys, by `flashdsa.indexer_logits`.

    Args:
        q: (B, next_n, H, 128) float8_e4m3fn, alone or in a pair with None; or FP4, a pair of
            (B, next_n, H, 64) bytes and (B, next_n, H) int32.
        kv_cache: (pages, 64, 1, 132) bytes, keys first, then scales, or (pages, 64, 1, 68) of FP4
            keys, as in flashdsa.
        weights: (B * next_n, H) fp32 or bf16.
        context_lens: (B, next_n) int32; or (B,), of each sequence's last query: the one before it
            sees a key less.
        block_table: (B, max_pages) int32, the pages of each row of q.
        schedule_meta, clean_logits: not used: scores from the length on are -inf in any case.
        max_context_len: width of the result.
        logits_dtype: torch.float32, or torch.bfloat16, to which the fp32 scores are rounded.
        indices: (B,), which neighbouring rows are of one request: DeepGEMM then reads their keys
            once. Not used, here or in the place of clean_logits, which it has in sgl-deep-gemm
            0.2.5: each row has its own pages in `block_table`.

    Returns:
        (B * next_n, max_context_len), rows a multiple of 1,024 bytes apart.
    """
    queries, weights, lengths, table = _rows_of_queries(q, weights, context_lens, block_table)
    scores = indexer_logits(queries, kv_cache, weights, lengths, table, max_context_len)
    return _in_padded_rows(scores, logits_dtype)


def fp8_paged_mqa_topk(
    q: Queries,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    topk: int,
    *,
    ids: str = "slot",
    indices: Tensor | None = None,
) -> Tensor:
    """Choose the best of `fp8_paged_mqa_logits`' scores, without the matrix of scores.

    Not a function of DeepGEMM.

    Args: of `fp8_fp4_paged_mqa_logits`, and
        topk: how many.
        ids: "slot" (``page * 64 + offset``) or "position".

    Returns:
        (B * next_n, topk) int32, -1 behind the ids of a short row; see `flashdsa.dsa_topk_indexer`.
    """
    queries, weights, lengths, table = _rows_of_queries(q, weights, context_lens, block_table)
    out = torch.empty(len(queries), topk, dtype=torch.int32, device=queries.device)
    dsa_topk_indexer(queries, kv_cache, weights, lengths, table, out, ids=ids)
    return out


def _width(sixth: bool | int | None, seventh: int | Tensor | None) -> int:
    """Return the width of a compressed result, 0 for a full one, from the sixth and seventh
    argument: clean_logits and max_seqlen_k, or max_seqlen_k and schedule_meta since 2.8."""
    if isinstance(sixth, int) and not isinstance(sixth, bool):
        return sixth
    width = seventh if isinstance(seventh, int) else 0
    if width and sixth:
        raise ArgumentValueError("max_seqlen_k: a compressed result wants clean_logits=False")
    return width


def _e4m3_queries(q: Queries, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 queries (..., H, D) and fp32 weights (rows, H), into which scales are folded."""
    data, scales = q if isinstance(q, tuple | list) and len(q) == 2 else (q, None)
    if not isinstance(data, Tensor):
        raise ArgumentTypeError(
            f"q: expected a tensor, or a pair of a tensor and scales or None; got {_kind(q)}"
        )
    weights = weights.float() if weights.dtype == torch.bfloat16 else weights
    if scales is not None and data.dtype in (torch.uint8, torch.int8):
        data, scale = _from_fp4("q", data, scales)
        return data, weights * scale.view(weights.shape)
    if scales is not None:
        raise UnsupportedError(
            f"q: scales beside {data.dtype} are not served here; fold them into weights"
        )
    if data.dtype != torch.float8_e4m3fn:
        raise UnsupportedError(
            "q: flashdsa's index scores are of float8_e4m3fn queries without scales (fold them "
            f"into weights), or of FP4 with them; got {data.dtype}"
        )
    return data, weights


def _kind(q: object) -> str:
    if isinstance(q, tuple | list):
        return f"{type(q).__name__} of {', '.join(type(one).__name__ for one in q)}"
    return type(q).__name__


def _from_fp4(name: str, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP4 vectors as e4m3 with one power of two each, see `mxfp4.as_e4m3`.

    Args:
        codes: (..., 64) bytes, two e2m1 codes each, the first in the low bits.
        scales: (...) int32, four ue8m0 exponents, of 32 codes each, the first in the low bits.

    Returns:
        (..., 128) float8_e4m3fn and (...) fp32.
    """
    if codes.shape[-1] * 2 != INDEX_HEAD_DIM or scales.shape != codes.shape[:-1]:
        raise UnsupportedError(
            f"{name}: FP4 is served of 128 dims, {INDEX_HEAD_DIM // 2} bytes and an int32 of "
            f"scales each; got {list(codes.shape)} and {list(scales.shape)}"
        )
    exponents = scales.to(torch.int32).contiguous().flatten()[:, None].view(torch.uint8)
    rows = torch.cat([codes.view(torch.uint8).flatten(0, -2), exponents], dim=1)
    fp8, scale = as_e4m3(rows)
    return fp8.view(*codes.shape[:-1], INDEX_HEAD_DIM), scale.view(scales.shape)


def _rows_of_queries(
    q: Queries, weights: Tensor, context_lens: Tensor, block_table: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return one query per row: (R, H, 128), weights (R, H), lengths (R,), table (R, max_pages)."""
    queries, weights = _e4m3_queries(q, weights)
    if queries.dim() != 4:
        raise ArgumentValueError(f"q: expected [B, next_n, H, 128]; got {list(queries.shape)}")
    batch, next_n = queries.shape[:2]
    if context_lens.dim() == 1:
        back = torch.arange(1 - next_n, 1, dtype=torch.int32, device=queries.device)
        context_lens = (context_lens[:, None] + back).clamp_(min=0)
    if context_lens.shape != (batch, next_n):
        raise ArgumentValueError(
            f"context_lens: expected shape [B, next_n] = {[batch, next_n]} or [B]; "
            f"got {list(context_lens.shape)}"
        )
    table = block_table if next_n == 1 else block_table.repeat_interleave(next_n, dim=0)
    return queries.flatten(0, 1), weights, context_lens.flatten(), table


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
