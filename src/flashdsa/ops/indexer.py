"""The custom ops of the indexer: scores, top-k, quantisation and the packed index-K cache."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.backends.catalog import registry
from flashdsa.ops.checks import require_positive
from flashdsa.ops.indexer_checks import (
    check_topk_out,
    indexer_problem,
    key_problem,
    query_problem,
    scores_problem,
    slots_problem,
    write_problem,
)
from flashdsa.problem import INDEX_HEAD_DIM, Operation

_INDEXER_ARGS = (
    "Tensor q_index_fp8, Tensor k_index_cache_fp8, Tensor weights, Tensor seq_lens, "
    "Tensor block_table"
)


@torch.library.custom_op(
    "flashdsa::dsa_topk_indexer",
    mutates_args=("topk_indices",),
    schema=(
        f"({_INDEXER_ARGS}, Tensor(a!) topk_indices, bool sorted, bool check, str backend) -> ()"
    ),
)
def dsa_topk_indexer(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices: Tensor,
    sorted: bool,
    check: bool,
    backend: str,
) -> None:
    """Writes `topk_indices`; `check` asks for errors on bad lengths and page ids."""
    check_topk_out(topk_indices, q_index_fp8)
    problem = indexer_problem(
        Operation.DSA_TOPK_INDEXER,
        q_index_fp8,
        k_index_cache_fp8,
        weights,
        seq_lens,
        block_table,
        topk=topk_indices.shape[1],
        sorted=sorted,
    )
    run = registry.select(problem, backend).load()
    run(
        q_index_fp8,
        k_index_cache_fp8,
        weights,
        seq_lens,
        block_table,
        topk_indices,
        sorted=sorted,
        check=check,
    )


@dsa_topk_indexer.register_fake
def _(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices: Tensor,
    sorted: bool,
    check: bool,
    backend: str,
) -> None:
    check_topk_out(topk_indices, q_index_fp8)
    indexer_problem(
        Operation.DSA_TOPK_INDEXER, q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table
    )


@torch.library.custom_op(
    "flashdsa::indexer_logits",
    mutates_args=(),
    schema=f"({_INDEXER_ARGS}, int max_len, str backend) -> Tensor",
)
def indexer_logits(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_len: int,
    backend: str,
) -> Tensor:
    """Scores (B, max_len) fp32, -inf beyond each row's length."""
    require_positive("max_len", max_len)
    problem = indexer_problem(
        Operation.INDEXER_LOGITS, q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table
    )
    run = registry.select(problem, backend).load()
    scores: Tensor = run(
        q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, max_len=max_len
    )
    return scores


@indexer_logits.register_fake
def _(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_len: int,
    backend: str,
) -> Tensor:
    require_positive("max_len", max_len)
    indexer_problem(
        Operation.INDEXER_LOGITS, q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table
    )
    return weights.new_empty(weights.shape[0], max_len)


@torch.library.custom_op(
    "flashdsa::topk_indices",
    mutates_args=(),
    schema="(Tensor scores, Tensor lengths, int topk, bool sorted, str backend) -> Tensor",
)
def topk_indices(scores: Tensor, lengths: Tensor, topk: int, sorted: bool, backend: str) -> Tensor:
    """Positions (B, topk) int32 of the best scores, -1 beyond."""
    problem = scores_problem(scores, lengths, topk, sorted)
    run = registry.select(problem, backend).load()
    positions: Tensor = run(scores, lengths, topk=topk, sorted=sorted)
    return positions


@topk_indices.register_fake
def _(scores: Tensor, lengths: Tensor, topk: int, sorted: bool, backend: str) -> Tensor:
    scores_problem(scores, lengths, topk, sorted)
    return lengths.new_empty(scores.shape[0], topk)


@torch.library.custom_op(
    "flashdsa::quantize_index_k",
    mutates_args=(),
    schema="(Tensor k, str backend) -> (Tensor, Tensor)",
)
def quantize_index_k(k: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """e4m3 keys (T, 128) and scales (T,) fp32."""
    run = registry.select(key_problem(Operation.QUANTIZE_INDEX_K, k), backend).load()
    fp8, scale = run(k)
    return fp8, scale


@quantize_index_k.register_fake
def _(k: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    key_problem(Operation.QUANTIZE_INDEX_K, k)
    return (
        k.new_empty(k.shape, dtype=torch.float8_e4m3fn),
        k.new_empty(k.shape[0], dtype=torch.float32),
    )


@torch.library.custom_op(
    "flashdsa::quantize_index_q",
    mutates_args=(),
    schema="(Tensor q, Tensor weights, str backend) -> (Tensor, Tensor)",
)
def quantize_index_q(q: Tensor, weights: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """e4m3 queries (B, H, 128) and weights (B, H) with the scales folded in."""
    run = registry.select(query_problem(q, weights), backend).load()
    fp8, folded = run(q, weights)
    return fp8, folded


@quantize_index_q.register_fake
def _(q: Tensor, weights: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    query_problem(q, weights)
    return q.new_empty(q.shape, dtype=torch.float8_e4m3fn), weights.new_empty(weights.shape)


@torch.library.custom_op(
    "flashdsa::write_index_k_cache",
    mutates_args=("cache",),
    schema="(Tensor k, Tensor slots, Tensor(a!) cache, str backend) -> ()",
)
def write_index_k_cache(k: Tensor, slots: Tensor, cache: Tensor, backend: str) -> None:
    """Quantises k (T, 128) into the cache's slots."""
    run = registry.select(write_problem(k, slots, cache), backend).load()
    run(k, slots, cache)


@write_index_k_cache.register_fake
def _(k: Tensor, slots: Tensor, cache: Tensor, backend: str) -> None:
    write_problem(k, slots, cache)


@torch.library.custom_op(
    "flashdsa::read_index_k_cache",
    mutates_args=(),
    schema="(Tensor cache, Tensor slots, str backend) -> (Tensor, Tensor)",
)
def read_index_k_cache(cache: Tensor, slots: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """e4m3 keys (T, 128) and scales (T,) fp32 of the slots."""
    problem = slots_problem(Operation.READ_INDEX_K_CACHE, slots, cache)
    fp8, scale = registry.select(problem, backend).load()(cache, slots)
    return fp8, scale


@read_index_k_cache.register_fake
def _(cache: Tensor, slots: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    slots_problem(Operation.READ_INDEX_K_CACHE, slots, cache)
    count = slots.shape[0]
    return (
        cache.new_empty((count, INDEX_HEAD_DIM), dtype=torch.float8_e4m3fn),
        cache.new_empty(count, dtype=torch.float32),
    )
