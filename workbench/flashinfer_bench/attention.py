"""Sparse attention where a token's latent and RoPE columns are tensors apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

import flashdsa

if TYPE_CHECKING:
    from flashdsa.backends.runner import Runner


def attend(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    sparse_indices: Tensor,
    sm_scale: float,
    output: Tensor,
    lse: Tensor,
    *,
    runner: Runner | None = None,
) -> None:
    """Write sparse attention into the caller's buffers.

    On Blackwell both caches are read in place; elsewhere the rows that are named, not the whole
    cache, are gathered first, as kernels there take rows of all 576 columns.

    Args:
        q_nope: (T, 16, 512) bf16. q_pe: (T, 16, 64).
        ckv_cache: (pages, page_size, 512). kpe_cache: (pages, page_size, 64).
        sparse_indices: (T, topk) int32 slots; -1, and what lies outside, is invalid.
        sm_scale: factor of the logits.
        output: (T, 16, 512), written. lse: (T, 16) fp32, written, base 2, -inf for an empty row.
        runner: of a Blackwell device; None: that of the tensors' GPU, if it is one.
    """
    q = torch.cat([q_nope, q_pe], dim=-1)
    caches = ckv_cache.flatten(0, 1), kpe_cache.flatten(0, 1)
    if runner is None:
        runner = blackwell_of(q.device)
    if runner is not None and len(q) and len(caches[0]):
        natural = attend_in_place(runner, q, caches, sparse_indices, float(sm_scale), output)
    else:
        natural = attend_gathered(q, caches, sparse_indices, float(sm_scale), output)
    lse.copy_(flashdsa.lse_to_base2(flashdsa.lse_for_merge(natural)))


def blackwell_of(device: torch.device) -> Runner | None:
    """The runner of a Blackwell GPU; None of any other device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 10:
        return None
    from flashdsa.backends.gpu.runner import gpu

    return gpu(device)


def attend_in_place(
    runner: Runner,
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    indices: Tensor,
    sm_scale: float,
    output: Tensor,
) -> Tensor:
    """Write O from the caches as they lie; return lse, natural."""
    from flashdsa.backends.sm100.sparse_mla import write_apart
    from flashdsa.ops.attention import SparseMlaOutOperands

    latent, rope = (cache.contiguous() for cache in caches)
    out = torch.empty_like(output, memory_format=torch.contiguous_format)
    natural = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    operands = SparseMlaOutOperands(q, latent, indices.contiguous(), out, natural)
    write_apart(runner, operands, rope, sm_scale)
    output.copy_(out)
    return natural


def attend_gathered(
    q: Tensor, caches: tuple[Tensor, Tensor], indices: Tensor, sm_scale: float, output: Tensor
) -> Tensor:
    """Write O from a copy of the rows that are named; return lse, natural."""
    latent, rope = caches
    valid = (indices >= 0) & (indices < len(latent))
    used, places = torch.unique(indices[valid], return_inverse=True)
    ids = torch.full_like(indices, -1)
    ids.masked_scatter_(valid, places.to(ids.dtype))
    kv = torch.cat([latent[used.long()], rope[used.long()]], dim=-1)
    out, natural = flashdsa.sparse_mla_fwd(q, kv, ids, sm_scale=sm_scale)
    output.copy_(out)
    return natural
