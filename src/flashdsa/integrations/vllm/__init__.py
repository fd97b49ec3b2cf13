"""vLLM >= 0.33: a sparse MLA attention backend, found by vLLM's plugins.

    vllm serve ... --attention-backend FLASHDSA_MLA_SPARSE

Tried by contract only: registration, validation and the kernel method on tensors; vLLM refuses
sparse attention without a GPU, and no server was run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.ops.attention import sparse_mla_fwd
from flashdsa.ops.merge import lse_for_merge

NAME = "FLASHDSA_MLA_SPARSE"
CLASS = "flashdsa.integrations.vllm.backend.FlashDsaMLASparseBackend"


def register() -> None:
    """The entry point, run in each of vLLM's processes: makes the backend's name known."""
    from vllm.v1.attention.backends.registry import register_backend

    register_backend(NAME, CLASS)


def attend(
    q: Tensor | tuple[Tensor, Tensor],
    rows: Tensor,
    topk_indices: Tensor,
    valid_counts: Tensor,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute the backend's attention.

    Args:
        q: (T, H, 576), or its latent and RoPE columns apart.
        rows: (N, 576) rows of the cache, as the ids count them.
        topk_indices: (T, topk) int32, the first `valid_counts` (T,) of each row in use.

    Returns:
        out (T, H, 512), lse (T, H) fp32, the natural logarithm, -inf for an empty row.
    """
    queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
    out, lse = sparse_mla_fwd(
        queries, rows, topk_indices, sm_scale=sm_scale, topk_length=valid_counts
    )
    return out, lse_for_merge(lse)
