"""Attention of DeepSeek-V4's layers as Megatron calls it: one list of rows, and a sink."""

from __future__ import annotations

from torch import Tensor

from flashdsa.errors import UnsupportedError
from flashdsa.integrations.megatron.indexer import is_deterministic
from flashdsa.ops.attention import sparse_mla


def csa_sparse_attn(
    query: Tensor,
    kv: Tensor,
    attn_sink: Tensor,
    topk_idxs: Tensor,
    softmax_scale: float,
    topk_length: Tensor | None = None,
    indexer_topk: int = 0,
    is_thd: bool = False,
) -> Tensor:
    """Attention with a sink over listed rows, K and V alike; differentiable in query, kv and sink.

    Args:
        query: (sq, b, heads, d), or with is_thd (tokens, heads, d).
        kv: (skv, b, d), or (rows, d): tokens and entries in one tensor.
        attn_sink: (heads,) fp32.
        topk_idxs: (sq * b, topk) int32, rows of the flattened kv; -1 is invalid.
        softmax_scale: factor of the logits.
        topk_length: (sq * b,) int32, slots in use.
        indexer_topk: 0; more asks for a second lse, which only Megatron's own loss wants.

    Returns:
        (sq, b, heads * d), or (tokens, heads * d).

    Raises:
        UnsupportedError: indexer_topk is not 0.
    """
    if indexer_topk:
        raise UnsupportedError(f"indexer_topk: expected 0; got {indexer_topk}")
    rows = query.shape[:1] if is_thd else query.shape[:2]
    out = sparse_mla(
        query.flatten(0, -3),
        kv.flatten(0, -2),
        topk_idxs,
        d_v=kv.shape[-1],
        sm_scale=softmax_scale,
        topk_length=topk_length,
        attn_sink=attn_sink,
        deterministic=is_deterministic(),
    )
    return out.reshape(*rows, -1)
