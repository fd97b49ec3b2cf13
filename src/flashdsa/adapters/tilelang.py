"""Indices of TileLang's sparse MLA examples as flashdsa takes them."""

from __future__ import annotations

import torch
from torch import Tensor


def indices_from_tilelang(indices: Tensor, q_positions: Tensor, num_keys: int) -> Tensor:
    """Slots of `sparse_mla_fwd_interface` with -1 where that kernel masks.

    There a slot is valid when the key is not behind the query; padding is the id `num_keys`.

    Args:
        indices: (..., S, G, topk) or (S, topk) int32.
        q_positions: (S,) the position of each query among the keys.
        num_keys: S_kv.

    Returns:
        int32 in the shape of `indices`.
    """
    shape = [1] * indices.dim()
    shape[0 if indices.dim() == 2 else -3] = len(q_positions)
    last = q_positions.view(shape).to(indices.device)
    seen = (indices >= 0) & (indices <= last) & (indices < num_keys)
    return torch.where(seen, indices, -1).to(torch.int32)
