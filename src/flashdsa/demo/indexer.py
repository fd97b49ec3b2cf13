"""The lightning indexer: scores keys with 64 small heads, selects in fp8, learns in float32."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from flashdsa import (
    causal_ranges,
    dsa_topk_indexer,
    dsa_topk_prefill,
    quantize_index_k,
    quantize_index_q,
    write_index_k_cache,
)
from flashdsa.demo.model import D_EMBED, D_MODEL, D_ROPE, normalise, random_weight, rotate
from flashdsa.demo.paging import PagePool

NUM_INDEX_HEADS = 64
D_INDEX = 128


class IndexerActivations(NamedTuple):
    """The indexer's operands before quantisation; S queries, T keys per window."""

    q_index: Tensor  # [batch, S, NUM_INDEX_HEADS, D_INDEX]
    k_index: Tensor  # [batch, T, D_INDEX]
    weights: Tensor  # [batch, S, NUM_INDEX_HEADS]


class LightningIndexer(nn.Module):
    """score(query, key) = sum_h weights[h] * relu(q_index[h] . k_index), as in DeepSeek-V3.2."""

    def __init__(self) -> None:
        """Create float32 master weights."""
        super().__init__()
        self.w_q = random_weight(D_MODEL, NUM_INDEX_HEADS, D_INDEX)
        self.w_k = random_weight(D_MODEL + D_EMBED, D_INDEX)
        self.w_weights = random_weight(D_MODEL, NUM_INDEX_HEADS)

    def project(self, hidden: Tensor, key_input: Tensor) -> IndexerActivations:
        """hidden [batch, S, D_MODEL] of the last S positions, key_input [batch, T, ...] of all."""
        position = torch.arange(key_input.shape[1], device=key_input.device)
        return self.project_at(hidden, position[-hidden.shape[1] :], key_input, position)

    def project_at(
        self, hidden: Tensor, query_position: Tensor, key_input: Tensor, key_position: Tensor
    ) -> IndexerActivations:
        """The operands of the scores, of queries [S] and keys [T] at any positions.

        The inputs are detached: the indexer learns from its own loss and does not bend the model.
        """
        hidden, key_input = hidden.detach(), key_input.detach()
        q_index = torch.einsum("bsd,dhk->bhsk", hidden, self.w_q)
        q_index = rotate_some(q_index, query_position).transpose(1, 2)
        k_index = rotate_some(normalise(key_input @ self.w_k), key_position)
        weights = hidden @ self.w_weights * (NUM_INDEX_HEADS * D_INDEX) ** -0.5
        return IndexerActivations(q_index, k_index, weights)


def rotate_some(x: Tensor, position: Tensor) -> Tensor:
    """Rotate the first D_ROPE of the last axis, leave the rest without position."""
    return torch.cat([rotate(x[..., :D_ROPE], position), x[..., D_ROPE:]], dim=-1)


class IndexerOperands(NamedTuple):
    """What `dsa_topk_indexer` reads; B = batch * S rows, one per query."""

    q_index_fp8: Tensor  # [B, NUM_INDEX_HEADS, D_INDEX] float8_e4m3fn
    cache: Tensor  # [num_pages, 64, 1, 132] uint8
    weights: Tensor  # [B, NUM_INDEX_HEADS] float32, the queries' scales folded in
    seq_lens: Tensor  # [B] int32
    block_table: Tensor  # [B, pages_per_window] int32


@torch.no_grad()
def quantise(pool: PagePool, inputs: IndexerActivations) -> IndexerOperands:
    """Round queries and keys to fp8 and write the keys into the pool's packed pages.

    The query at position p sees p + 1 tokens, those up to itself: its `seq_lens` entry.
    """
    num_queries = inputs.q_index.shape[1]
    q_index = inputs.q_index.flatten(0, 1).bfloat16()  # [B, NUM_INDEX_HEADS, D_INDEX]
    q_index_fp8, weights = quantize_index_q(q_index, inputs.weights.flatten(0, 1))
    cache = pool.empty_index_cache()
    keys = inputs.k_index.flatten(0, 1).bfloat16()  # [batch * T, D_INDEX]
    write_index_k_cache(keys, pool.slots.flatten(), cache)
    seq_lens = torch.arange(pool.window - num_queries + 1, pool.window + 1, device=cache.device)
    return IndexerOperands(
        q_index_fp8,
        cache,
        weights,
        seq_lens.repeat(pool.batch).int(),
        pool.tables_per_query(num_queries),
    )


@torch.no_grad()
def select(operands: IndexerOperands, topk: int, backend: str) -> Tensor:
    """The physical ids [B, topk] int32 of each query's best keys, in the pool's page order."""
    num_rows = len(operands.seq_lens)
    indices = operands.seq_lens.new_empty((num_rows, topk))
    dsa_topk_indexer(*operands, indices, backend=backend)
    return indices


class SharedOperands(NamedTuple):
    """What `dsa_topk_prefill` reads; B = batch * S queries.

    Key row i * T + t is token t of window i.
    """

    q_index_fp8: Tensor  # [B, NUM_INDEX_HEADS, D_INDEX] float8_e4m3fn
    k_index_fp8: Tensor  # [batch * T, D_INDEX] float8_e4m3fn
    weights: Tensor  # [B, NUM_INDEX_HEADS] float32, the queries' scales folded in
    starts: Tensor  # [B] int32, the first row that a query sees
    ends: Tensor  # [B] int32, the row behind the last one
    k_scale: Tensor  # [batch * T] float32


@torch.no_grad()
def quantise_shared(inputs: IndexerActivations) -> SharedOperands:
    """Round queries and keys to fp8. The queries of a window share its keys."""
    batch, num_queries = inputs.q_index.shape[:2]
    window = inputs.k_index.shape[1]
    q_index = inputs.q_index.flatten(0, 1).bfloat16()  # [batch * S, NUM_INDEX_HEADS, D_INDEX]
    q_index_fp8, weights = quantize_index_q(q_index, inputs.weights.flatten(0, 1))
    k_index_fp8, k_scale = quantize_index_k(inputs.k_index.flatten(0, 1).bfloat16())
    windows = torch.arange(batch + 1, device=q_index.device)
    starts, ends = causal_ranges(
        windows * num_queries, windows * window, num_queries=batch * num_queries
    )
    return SharedOperands(q_index_fp8, k_index_fp8, weights, starts, ends, k_scale)


@torch.no_grad()
def select_shared(operands: SharedOperands, topk: int, backend: str) -> Tensor:
    """The rows [B, topk] int32 of each query's best keys."""
    indices = operands.ends.new_empty((len(operands.ends), topk))
    dsa_topk_prefill(*operands[:-1], indices, k_scale=operands.k_scale, backend=backend)
    return indices
