"""Turns the tensors of the indexer's operations into a Problem, or says what is wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.errors import ArgumentValueError
from flashdsa.ops.checks import (
    dtype_name,
    require_dense_rows,
    require_device,
    require_dtype,
    require_positive,
    require_rank,
    require_shape,
)
from flashdsa.problem import (
    INDEX_HEAD_DIM,
    INDEX_TOKEN_BYTES,
    PAGE_SIZE,
    Operation,
    Problem,
)

MAX_PAGES = 2**31 // PAGE_SIZE
"""Token ids are int32."""
_QUANTIZABLE = (torch.bfloat16, torch.float32)


def indexer_problem(
    operation: Operation,
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    topk: int | None = None,
    sorted: bool = False,
) -> Problem:
    """Check q (B, H, 128) e4m3, cache (num_pages, 64, 1, 132) bytes, weights (B, H) fp32,
    seq_lens (B,) int32, block_table (B, max_pages) int32."""
    require_dtype("q_index_fp8", q_index_fp8, torch.float8_e4m3fn)
    require_rank("q_index_fp8", q_index_fp8, (3,), "[B, H, 128]")
    batch, num_heads, _ = q_index_fp8.shape
    require_shape("q_index_fp8", q_index_fp8, (batch, num_heads, INDEX_HEAD_DIM), "[B, H, 128]")
    if num_heads < 1:
        raise ArgumentValueError("q_index_fp8: expected shape [B, H, 128] with H >= 1; got H = 0")
    check_cache("k_index_cache_fp8", k_index_cache_fp8)
    require_dtype("weights", weights, torch.float32)
    require_shape("weights", weights, (batch, num_heads), "[B, H]")
    require_dtype("seq_lens", seq_lens, torch.int32)
    require_shape("seq_lens", seq_lens, (batch,), "[B]")
    require_dtype("block_table", block_table, torch.int32)
    require_rank("block_table", block_table, (2,), "[B, max_pages]")
    require_shape("block_table", block_table, (batch, block_table.shape[1]), "[B, max_pages]")
    for name, tensor in (
        ("q_index_fp8", q_index_fp8),
        ("k_index_cache_fp8", k_index_cache_fp8),
        ("weights", weights),
        ("seq_lens", seq_lens),
        ("block_table", block_table),
    ):
        require_device(name, tensor, q_index_fp8.device, "q_index_fp8")
        require_dense_rows(name, tensor)
    return Problem(
        operation=operation,
        device=q_index_fp8.device.type,
        dtype=dtype_name(q_index_fp8.dtype),
        num_heads=num_heads,
        d_qk=INDEX_HEAD_DIM,
        topk=topk,
        sorted=sorted,
    )


def check_topk_out(topk_indices: Tensor, q_index_fp8: Tensor) -> None:
    """The output buffer of the indexer: (B, topk) int32 on q's device."""
    require_dtype("topk_indices", topk_indices, torch.int32)
    require_rank("topk_indices", topk_indices, (2,), "[B, topk]")
    batch = q_index_fp8.shape[0]
    require_shape("topk_indices", topk_indices, (batch, topk_indices.shape[1]), "[B, topk]")
    if topk_indices.shape[1] < 1:
        raise ArgumentValueError("topk_indices: expected shape [B, topk] with topk >= 1; got 0")
    require_device("topk_indices", topk_indices, q_index_fp8.device, "q_index_fp8")
    require_dense_rows("topk_indices", topk_indices)


def check_cache(name: str, cache: Tensor) -> None:
    """A packed cache: (num_pages, 64, 1, 132) bytes, each page's 8,448 bytes contiguous."""
    layout = f"[num_pages, {PAGE_SIZE}, 1, {INDEX_TOKEN_BYTES}]"
    require_dtype(name, cache, torch.uint8, torch.int8)
    require_rank(name, cache, (4,), layout)
    num_pages = cache.shape[0]
    require_shape(name, cache, (num_pages, PAGE_SIZE, 1, INDEX_TOKEN_BYTES), layout)
    if cache.stride(3) != 1 or cache.stride(1) != INDEX_TOKEN_BYTES:
        raise ArgumentValueError(
            f"{name}: expected each page's bytes to be contiguous; got strides "
            f"{list(cache.stride())}"
        )
    if cache.stride(0) % 4 or cache.storage_offset() % 4:
        raise ArgumentValueError(
            f"{name}: expected pages aligned to 4 bytes for their fp32 scales; got page stride "
            f"{cache.stride(0)} and offset {cache.storage_offset()}"
        )
    if num_pages > MAX_PAGES:
        raise ArgumentValueError(
            f"{name}: expected at most {MAX_PAGES} pages (int32 token ids); got {num_pages}"
        )


def scores_problem(scores: Tensor, lengths: Tensor, topk: int, sorted: bool) -> Problem:
    """Check scores (B, max_len) fp32 and lengths (B,) int32."""
    require_dtype("scores", scores, torch.float32)
    require_rank("scores", scores, (2,), "[B, max_len]")
    require_dense_rows("scores", scores)
    require_dtype("lengths", lengths, torch.int32)
    require_shape("lengths", lengths, (scores.shape[0],), "[B]")
    require_device("lengths", lengths, scores.device, "scores")
    require_positive("topk", topk)
    return Problem(
        operation=Operation.TOPK_INDICES,
        device=scores.device.type,
        dtype=dtype_name(scores.dtype),
        topk=topk,
        sorted=sorted,
    )


def key_problem(operation: Operation, k: Tensor) -> Problem:
    """Check indexer keys k (T, 128)."""
    require_dtype("k", k, *_QUANTIZABLE)
    require_rank("k", k, (2,), f"[T, {INDEX_HEAD_DIM}]")
    require_shape("k", k, (k.shape[0], INDEX_HEAD_DIM), f"[T, {INDEX_HEAD_DIM}]")
    require_dense_rows("k", k)
    return Problem(operation, k.device.type, dtype_name(k.dtype), d_qk=INDEX_HEAD_DIM)


def query_problem(q: Tensor, weights: Tensor) -> Problem:
    """Check indexer queries q (B, H, 128) and weights (B, H) fp32."""
    require_dtype("q", q, *_QUANTIZABLE)
    require_rank("q", q, (3,), f"[B, H, {INDEX_HEAD_DIM}]")
    batch, num_heads, _ = q.shape
    require_shape("q", q, (batch, num_heads, INDEX_HEAD_DIM), f"[B, H, {INDEX_HEAD_DIM}]")
    require_dense_rows("q", q)
    require_dtype("weights", weights, torch.float32)
    require_shape("weights", weights, (batch, num_heads), "[B, H]")
    require_device("weights", weights, q.device, "q")
    return Problem(
        Operation.QUANTIZE_INDEX_Q,
        q.device.type,
        dtype_name(q.dtype),
        num_heads=num_heads,
        d_qk=INDEX_HEAD_DIM,
    )


def slots_problem(operation: Operation, slots: Tensor, cache: Tensor) -> Problem:
    """Check slots (T,) int32 or int64 and the cache they address."""
    check_cache("cache", cache)
    require_dtype("slots", slots, torch.int32, torch.int64)
    require_rank("slots", slots, (1,), "[T]")
    require_device("slots", slots, cache.device, "cache")
    return Problem(operation, cache.device.type, dtype_name(cache.dtype))


def write_problem(k: Tensor, slots: Tensor, cache: Tensor) -> Problem:
    """Check keys k (T, 128), their slots (T,) and the cache that they go to."""
    slots_problem(Operation.WRITE_INDEX_K_CACHE, slots, cache)
    problem = key_problem(Operation.WRITE_INDEX_K_CACHE, k)
    require_shape("slots", slots, (k.shape[0],), "[T], one a key")
    require_device("k", k, cache.device, "cache")
    return problem
