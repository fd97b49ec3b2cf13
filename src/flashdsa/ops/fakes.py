"""Shapes and dtypes of each operation's results, for tracing: uninitialised tensors of them.

Each function takes the operation's operands, which are checked, and its parameters by keyword.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flashdsa.operands import (
    AttentionTargetOperands,
    CacheReadOperands,
    CacheWriteOperands,
    IndexerBwdOperands,
    IndexerKlBwdOperands,
    IndexerKlOperands,
    IndexerOperands,
    IndexerScoresOperands,
    IndexKOperands,
    IndexQOperands,
    MlaBwdOperands,
    PrefillOperands,
    SparseMlaOperands,
    SparseMlaOutOperands,
    TopkIndexerOperands,
    TopkOperands,
    TopkPrefillOperands,
)
from flashdsa.ops.argument_rules import sum_dtype
from flashdsa.problem import INDEX_HEAD_DIM, Operation


def _sparse_mla_fwd(
    x: SparseMlaOperands, *, d_v: int, max_logits: bool, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    num_queries, num_heads, _d_qk = x.q.shape
    sums = sum_dtype(x.q.dtype)
    return (
        x.q.new_empty(num_queries, num_heads, d_v),
        x.q.new_empty(num_queries, num_heads, dtype=sums),
        x.q.new_empty((num_queries, num_heads) if max_logits else 0, dtype=sums),
    )


def _sparse_mla_fwd_out(_: SparseMlaOutOperands, **__: Any) -> None:
    return None


def _mla_bwd(
    x: MlaBwdOperands, *, dkv_dtype: torch.dtype | None, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    sums = sum_dtype(x.q.dtype)
    return (
        x.q.new_empty(x.q.shape),
        x.kv.new_empty(x.kv.shape, dtype=dkv_dtype or sums),
        x.q.new_empty(0, dtype=sums) if x.attn_sink is None else torch.empty_like(x.attn_sink),
    )


def _dsa_topk_indexer(_: TopkIndexerOperands, **__: Any) -> None:
    return None


def _indexer_logits(x: IndexerOperands, *, max_len: int) -> Tensor:
    return x.weights.new_empty(x.weights.shape[0], max_len)


def _topk_indices(x: TopkOperands, *, topk: int, **_: Any) -> Tensor:
    return x.lengths.new_empty(x.scores.shape[0], topk)


def _dsa_topk_prefill(_: TopkPrefillOperands, **__: Any) -> None:
    return None


def _prefill_logits(x: PrefillOperands) -> Tensor:
    return x.weights.new_empty(x.q_index.shape[0], x.k_index.shape[0])


def _keys_and_scales(like: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return (
        like.new_empty(count, INDEX_HEAD_DIM, dtype=torch.float8_e4m3fn),
        like.new_empty(count, dtype=torch.float32),
    )


def _quantize_index_k(x: IndexKOperands) -> tuple[Tensor, Tensor]:
    return _keys_and_scales(x.k, x.k.shape[0])


def _quantize_index_q(x: IndexQOperands) -> tuple[Tensor, Tensor]:
    fp8 = x.q.new_empty(x.q.shape, dtype=torch.float8_e4m3fn)
    return fp8, x.weights.new_empty(x.weights.shape)


def _write_index_k_cache(_: CacheWriteOperands) -> None:
    return None


def _read_index_k_cache(x: CacheReadOperands) -> tuple[Tensor, Tensor]:
    return _keys_and_scales(x.cache, x.slots.shape[0])


def _attention_target(x: AttentionTargetOperands, **_: Any) -> Tensor:
    return x.q.new_empty(x.indices.shape, dtype=sum_dtype(x.q.dtype))


def _indexer_scores(x: IndexerScoresOperands, **_: Any) -> Tensor:
    return x.q_index.new_empty(x.indices.shape, dtype=sum_dtype(x.q_index.dtype))


def _indexer_bwd(
    x: IndexerBwdOperands, *, dk_dtype: torch.dtype | None, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.q_index.new_empty(x.q_index.shape),
        x.k_index.new_empty(x.k_index.shape, dtype=dk_dtype or sum_dtype(x.k_index.dtype)),
        x.weights.new_empty(x.weights.shape),
    )


def _indexer_kl(x: IndexerKlOperands, **_: Any) -> Tensor:
    return x.scores.new_empty(x.scores.shape[0])


def _indexer_kl_bwd(x: IndexerKlBwdOperands) -> Tensor:
    return x.scores.new_empty(x.scores.shape)


FAKES: Mapping[Operation, Callable[..., Any]] = {
    Operation.SPARSE_MLA_FWD: _sparse_mla_fwd,
    Operation.SPARSE_MLA_FWD_OUT: _sparse_mla_fwd_out,
    Operation.MLA_BWD: _mla_bwd,
    Operation.DSA_TOPK_INDEXER: _dsa_topk_indexer,
    Operation.INDEXER_LOGITS: _indexer_logits,
    Operation.TOPK_INDICES: _topk_indices,
    Operation.DSA_TOPK_PREFILL: _dsa_topk_prefill,
    Operation.PREFILL_LOGITS: _prefill_logits,
    Operation.QUANTIZE_INDEX_K: _quantize_index_k,
    Operation.QUANTIZE_INDEX_Q: _quantize_index_q,
    Operation.WRITE_INDEX_K_CACHE: _write_index_k_cache,
    Operation.READ_INDEX_K_CACHE: _read_index_k_cache,
    Operation.ATTENTION_TARGET: _attention_target,
    Operation.INDEXER_SCORES: _indexer_scores,
    Operation.INDEXER_BWD: _indexer_bwd,
    Operation.INDEXER_KL: _indexer_kl,
    Operation.INDEXER_KL_BWD: _indexer_kl_bwd,
}
