"""VeOmni >= 0.1.12 and verl with it: GLM-5's indexer and attention by flashdsa, in training.

    actor_rollout_ref.model.external_lib=flashdsa.integrations.veomni
    actor_rollout_ref.actor.veomni.dsa_indexer_implementation=cudnn
    actor_rollout_ref.actor.veomni.dsa_attention_implementation=flashmla_cudnn

VeOmni knows no other names, and has no table of them: its model imports three functions from a
module that needs cuDNN Frontend and FlashMLA. Importing this module puts it in that one's place;
neither package is needed then.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from flashdsa.errors import UnsupportedError
from flashdsa.ops.attention import sparse_mla
from flashdsa.ops.prefill import dsa_topk_prefill

TARGET = "veomni.ops.kernels.deepseek_sparse_attention.flashmla_cudnn"
"""The module that VeOmni's GLM-5 imports when a layer runs."""


def register() -> None:
    """Have VeOmni's names "cudnn" and "flashmla_cudnn" mean this module's functions."""
    sys.modules[TARGET] = sys.modules[__name__]


def indexer_select_topk(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    top_k: int,
    *,
    ratio: int = 1,
    qhead_per_kv_head: int | None = None,
    sm_scale: float = 1.0,
) -> Tensor:
    """Return the best keys of each query in causal order, by ``sum_h w relu(q . k)``.

    Args:
        q: (B, S, H, 128) bf16 or fp16. k: (B, S, 128) or (B, S, 1, 128). w: (B, S, H).
        top_k: keys to choose. ratio: 1, a key a token.
        qhead_per_kv_head: not used. sm_scale: positive, so that it changes no choice.

    Returns:
        (B, S, min(top_k, S)) int64. A query with fewer keys before it gets later ones at the list's
        end, as of VeOmni's other indexers: the attention leaves them out.

    Raises:
        UnsupportedError: another ratio, or keys of more tokens than queries.
    """
    k = k.squeeze(2) if k.dim() == 4 else k
    batch, length = q.shape[:2]
    if ratio != 1 or k.shape[1] != length:
        raise UnsupportedError(
            f"expected ratio 1 and as many keys as queries; got ratio {ratio}, {k.shape[1]} keys "
            f"and {length} queries"
        )
    first = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None] * length
    ends = torch.arange(1, length + 1, dtype=torch.int32, device=q.device) + first
    chosen = ends.new_empty(batch * length, min(top_k, length))
    with torch.no_grad():
        dsa_topk_prefill(
            q.flatten(0, 1),
            k.flatten(0, 1),
            w.flatten(0, 1).float(),
            first.expand(-1, length).flatten(),
            ends.flatten(),
            chosen,
        )
    ids = chosen.view(batch, length, -1)
    # A list of n keys is full up to slot n - 1: slot i then names key i, which is a later one.
    later = torch.arange(ids.shape[2], dtype=torch.int32, device=q.device)
    return torch.where(ids < 0, later, ids - first[..., None]).long()


def check_flash_mla_sparse_forward_compatible(
    q_pe: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    q_nope: Tensor,
    gather_kv_indices: Tensor | None,
    learnable_sink: Tensor | None = None,
) -> tuple[bool, str]:
    """Return whether the attention below serves these tensors, and else why not."""
    if gather_kv_indices is None or learnable_sink is not None:
        return False, "flashdsa: expected chosen keys and no sink"
    if k_pe.shape[2] != 1 or k_pe.shape[1] != q_pe.shape[1]:
        return False, (
            "flashdsa: expected latents that all heads share, as many as queries; got k_pe "
            f"{list(k_pe.shape)} and q_pe {list(q_pe.shape)}"
        )
    return True, ""


def flash_mla_sparse_attention_with_cudnn_backward(
    q_pe: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    q_nope_absorbed: Tensor,
    topk_indices: Tensor,
    *,
    softmax_scale: float | None = None,
) -> Tensor:
    """Causal attention over the chosen keys, differentiable in its first four arguments.

    Args:
        q_pe: (B, S, H, 64). k_pe: (B, S, 1, 64), with rotary position.
        kv_cache: (B, S, 1, 512), latents. q_nope_absorbed: (B, S, H, 512).
        topk_indices: (B, S, topk) integers, keys of the same sequence; later ones than the query
            and negative ones are left out.
        softmax_scale: factor of the logits; ``576 ** -0.5`` by default.

    Returns:
        (B, S, H, 512).
    """
    batch, length = q_pe.shape[:2]
    position = torch.arange(length, device=q_pe.device)[:, None]
    first = torch.arange(batch, device=q_pe.device)[:, None, None] * length
    seen = (topk_indices >= 0) & (topk_indices <= position)
    out = sparse_mla(
        torch.cat([q_nope_absorbed, q_pe], dim=-1).flatten(0, 1),
        torch.cat([kv_cache, k_pe], dim=-1).flatten(0, 2),
        torch.where(seen, topk_indices + first, -1).to(torch.int32).flatten(0, 1),
        d_v=kv_cache.shape[-1],
        sm_scale=softmax_scale,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    result: Tensor = out.unflatten(0, (batch, length))
    return result


register()
