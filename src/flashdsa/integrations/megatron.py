"""Megatron-Core >= 0.19: sparse attention of absorbed MLA by flashdsa, as a DSA kernel backend.

    from flashdsa.integrations import megatron
    megatron.register()
    config = TransformerConfig(..., dsa_kernel_backend="flashdsa")

Megatron imports this module by its name and calls the hooks that it finds; those that are not here
(the indexer, its loss) it computes by itself.

DeepSeek-V4's layers (CSA, in Megatron's branch dev of 2026-08) have no table of backends:
`register_csa()` puts `csa_sparse_attn` in the place of Megatron's. Layers call it for windows, for
all entries and, without the indexer's loss, for selected ones.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from flashdsa.errors import UnsupportedError
from flashdsa.ops.attention import sparse_mla

NAME = "flashdsa"
"""Name of the backend, in `TransformerConfig.dsa_kernel_backend`."""


def register() -> None:
    """Make the backend known to Megatron-Core. Call it before a configuration names it.

    Raises:
        UnsupportedError: this Megatron-Core has no table of backends.
    """
    import megatron.core.utils as utils
    from megatron.core.transformer.experimental_attention_variant import dsa_kernels

    modules = getattr(dsa_kernels, "_BACKEND_MODULE_NAME_BY_BACKEND", None)
    valid = getattr(utils, "_VALID_DSA_KERNEL_BACKENDS", None)
    if modules is None or valid is None:
        raise UnsupportedError(
            "megatron-core: no table of DSA kernel backends in this version; 0.19 and 0.20 have one"
        )
    modules[NAME] = __name__
    if NAME not in valid:
        utils._VALID_DSA_KERNEL_BACKENDS = (*valid, NAME)


def register_csa() -> None:
    """Have Megatron's compressed sparse attention call `csa_sparse_attn` of this module.

    Raises:
        UnsupportedError: this Megatron-Core has no such attention, or another signature.
    """
    try:
        from megatron.core.transformer.experimental_attention_variant import csa
    except ImportError as error:
        raise UnsupportedError(f"megatron-core: no CSA in this version ({error})") from error
    known, own = (
        list(inspect.signature(one).parameters) for one in (csa.csa_sparse_attn, csa_sparse_attn)
    )
    if csa.csa_sparse_attn is not csa_sparse_attn and known != own:
        raise UnsupportedError(f"megatron-core: csa_sparse_attn({', '.join(known)}) is not known")
    csa.csa_sparse_attn = csa_sparse_attn


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
    )
    return out.reshape(*rows, -1)


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
    num_queries, batch, num_heads, width = query.shape
    num_keys = key.shape[0]
    if topk_indices.shape[:2] != (batch, num_queries) or key.shape[1:] != (batch, 1, width):
        return None
    first = torch.arange(batch, device=key.device)[:, None, None] * num_keys
    inside = (topk_indices >= 0) & (topk_indices < num_keys)
    slots = torch.where(inside, topk_indices + first, -1).to(torch.int32)
    try:
        out = sparse_mla(
            query.transpose(0, 1).flatten(0, 1),
            key.squeeze(2).transpose(0, 1).reshape(batch * num_keys, width),
            slots.flatten(0, 1),
            d_v=v_channels,
            sm_scale=softmax_scale,
            topk_length=None if topk_length is None else topk_length.reshape(-1),
        )
    except UnsupportedError:
        return None
    return out.view(batch, num_queries, num_heads, v_channels).transpose(0, 1)
