"""Megatron-Core >= 0.19: sparse attention of absorbed MLA by flashdsa, as a DSA kernel backend.

    from flashdsa.integrations import megatron
    megatron.register()
    config = TransformerConfig(..., dsa_kernel_backend="flashdsa")

Megatron imports this module by its name and calls the hooks that it finds; those that are not here
(the indexer, its loss) it computes by itself.
"""

from __future__ import annotations

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
