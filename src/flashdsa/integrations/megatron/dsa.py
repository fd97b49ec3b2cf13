"""The four hooks of Megatron's DeepSeek Sparse Attention: choice, the indexer's loss, attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashdsa.errors import UnsupportedError
from flashdsa.integrations.megatron.indexer import (
    Chosen,
    Loss,
    first_rows,
    flat,
    indexer_of,
    is_deterministic,
    row_weight,
    spread,
)
from flashdsa.ops.attention import sparse_mla, sparse_mla_fwd


def run_fused_qk_topk(
    *,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    starts: Tensor,
    ends: Tensor,
    use_relu: bool = True,
    **others: Any,
) -> tuple[Tensor, Tensor] | None:
    """Return the best keys of each query, by ``sum_h weights relu(q . k)``.

    Args:
        q: (sq, b, h, 128) bf16, fp16 or fp32. k: (skv, b, 128), q's dtype. weights: (sq, b, h).
        index_topk: keys to choose. starts, ends: (sq,) integers, the keys that a query sees.
        use_relu: whether scores are rectified; False is declined.
        others: arguments that change nothing here; an unknown one is declined.

    Returns:
        ids (b, sq, min(index_topk, skv)) int32, -1 after the last one, and their numbers (b, sq)
        int32; None declines.
    """
    indexer = indexer_of(q, k, weights, starts, ends, use_relu, others)
    if indexer is None:
        return None
    try:
        chosen = indexer.choose(index_topk)
    except UnsupportedError:
        return None
    return chosen.in_sequences(indexer.batch, len(k))


def run_fused_qk_topk_with_loss(  # noqa: PLR0913 - Megatron's arguments
    *,
    config: Any,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    starts: Tensor,
    ends: Tensor,
    query: Tensor,
    key: Tensor,
    softmax_scale: float,
    loss_coeff: float,
    pg_collection: Any,
    query_valid_rows: Tensor | None = None,
    calculate_per_token_loss: bool = False,
    use_relu: bool = True,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return `run_fused_qk_topk`'s ids and numbers, and the indexer's loss over the chosen keys.

    Args:
        config: its `kv_lora_rank` columns of key are V; a `dsa_indexer_precision` other than bf16
            is declined.
        query: (sq, b, heads, d). key: (skv, b, 1, d), both q's dtype; they get no gradient.
        softmax_scale: factor of the attention's logits. loss_coeff: factor of the loss.
        pg_collection: its `tp` has the other heads.
        query_valid_rows: (sq,), (1, sq) or (b, sq) bool, the queries that count.
        calculate_per_token_loss: sum over queries; otherwise their mean.
        q, k, weights, index_topk, starts, ends, use_relu, others: as for `run_fused_qk_topk`.

    Returns:
        ids, numbers and a scalar, differentiable in q, k and weights; None declines.
    """
    indexer = indexer_of(q, k, weights, starts, ends, use_relu, others, config)
    if indexer is None or not is_attention_of(query, key, q, k):
        return None
    loss = Loss(
        row_weight(query_valid_rows, query, calculate_per_token_loss, loss_coeff),
        softmax_scale,
        spread(pg_collection),
    )
    rows = flat(query.detach()), flat(key.detach().squeeze(2))
    try:
        chosen = indexer.choose(index_topk)
        lse = attend(*rows, chosen, config.kv_lora_rank, softmax_scale)[1]
        value = loss.over_chosen(indexer, chosen, *rows, lse)
    except UnsupportedError:
        return None
    return *chosen.in_sequences(indexer.batch, len(k)), value


def run_fused_dsa_attention(  # noqa: PLR0913 - Megatron's arguments
    *,
    config: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    up_v_weight: Tensor | None,
    q_indexer: Tensor,
    k_indexer: Tensor,
    indexer_weights: Tensor,
    indexer_topk: int,
    softmax_scale: float,
    loss_coeff: float,
    sparse_loss: bool,
    calculate_per_token_loss: bool,
    absorbed_mla: bool,
    attn_mask_type: Any,
    varlen_starts: Tensor | None,
    varlen_ends: Tensor | None,
    key_positions: Tensor | None,
    query_valid_rows: Tensor | None,
    use_relu: bool,
    pg_collection: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None] | None:
    """Return attention over the chosen keys, and the indexer's loss by the same lse.

    Args:
        query: (sq, b, heads, d), absorbed. key: (skv, b, 1, d), latent and RoPE.
        value: None; V is key's first `kv_lora_rank` columns. up_v_weight: (heads, v, kv_lora_rank).
        q_indexer, k_indexer, indexer_weights, indexer_topk, use_relu, others: see
            `run_fused_qk_topk`.
        loss_coeff: 0 asks for no loss. sparse_loss: over the chosen keys; otherwise over all that a
            query sees, for which ranks gather the queries of all heads.
        attn_mask_type: causal; None, a mask of its own, is declined.
        varlen_starts, varlen_ends: (sq,) integers, the keys that a query sees.
        key_positions: None: key t is at position t.
        config, softmax_scale, calculate_per_token_loss, query_valid_rows: see
            `run_fused_qk_topk_with_loss`.

    Returns:
        (sq, b, heads * v), differentiable in query, key and up_v_weight, and the loss or None; None
        instead of both declines, as where torch asks for deterministic algorithms.
    """
    if not absorbed_mla or value is not None or up_v_weight is None or attn_mask_type is None:
        return None
    if varlen_starts is None or varlen_ends is None or key_positions is not None:
        return None
    operands = q_indexer, k_indexer, indexer_weights, varlen_starts, varlen_ends
    indexer = indexer_of(*operands, use_relu, others, config)
    if indexer is None or not is_attention_of(query, key, q_indexer, k_indexer):
        return None
    if is_deterministic():
        return None
    with_loss = loss_coeff > 0 and torch.is_grad_enabled()
    rows = flat(query), flat(key.squeeze(2))
    detached = rows[0].detach(), rows[1].detach()
    weight = row_weight(query_valid_rows, query, calculate_per_token_loss, loss_coeff)
    loss, kl = Loss(weight, softmax_scale, spread(pg_collection)), None
    try:
        chosen = indexer.choose(indexer_topk)
        out, lse = attend(*rows, chosen, config.kv_lora_rank, softmax_scale)
        if with_loss and sparse_loss:
            kl = loss.over_chosen(indexer, chosen, *detached, lse)
        elif with_loss:
            kl = loss.over_all(indexer, *detached, config.kv_lora_rank)
    except UnsupportedError:
        return None
    out = out.unflatten(0, (indexer.batch, -1)).transpose(0, 1)
    return torch.einsum("sbhc,hdc->sbhd", out, up_v_weight).flatten(2), kl


def run_fused_absorbed_sparse_attention(
    query: Tensor,
    key: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    v_channels: int,
    topk_length: Tensor | None = None,
) -> Tensor | None:
    """Sparse attention over latents, differentiable in query and key.

    Args:
        query: (sq, b, heads, d), absorbed. key: (skv, b, 1, d), latent and RoPE.
        topk_indices: (b, sq, topk) int64 or int32, keys of the same sequence; -1 is invalid.
        softmax_scale: factor of the logits. v_channels: the first columns of key that are V.
        topk_length: (b, sq) int32, slots in use.

    Returns:
        (sq, b, heads, v_channels); None declines, and Megatron computes it in torch.
    """
    if query.dim() != 4 or key.dim() != 4 or topk_indices.dim() != 3 or key.shape[2] != 1:
        return None
    num_queries, batch, _, width = query.shape
    num_keys = key.shape[0]
    if topk_indices.shape[:2] != (batch, num_queries) or key.shape[1:] != (batch, 1, width):
        return None
    inside = (topk_indices >= 0) & (topk_indices < num_keys)
    slots = topk_indices + first_rows(topk_indices, num_keys)[..., None]
    try:
        out = sparse_mla(
            flat(query),
            flat(key.squeeze(2)),
            torch.where(inside, slots, -1).to(torch.int32).flatten(0, 1),
            d_v=v_channels,
            sm_scale=softmax_scale,
            topk_length=None if topk_length is None else topk_length.reshape(-1),
            deterministic=is_deterministic(),
        )
    except UnsupportedError:
        return None
    result: Tensor = out.unflatten(0, (batch, num_queries)).transpose(0, 1)
    return result


def is_attention_of(query: Tensor, key: Tensor, q: Tensor, k: Tensor) -> bool:
    """Whether query (sq, b, heads, d) and key (skv, b, 1, d) are of the indexer's tokens."""
    return (
        query.dim() == 4
        and query.shape[:2] == q.shape[:2]
        and key.shape == (*k.shape[:2], 1, query.shape[3])
        and query.dtype == key.dtype == q.dtype
    )


def attend(
    query: Tensor, key: Tensor, chosen: Chosen, d_v: int, scale: float
) -> tuple[Tensor, Tensor]:
    """O (rows, heads, d_v), differentiable, and lse (rows, heads)."""
    out, lse = sparse_mla_fwd(
        query, key, chosen.ids, d_v=d_v, sm_scale=scale, topk_length=chosen.lengths
    )
    return out, lse
