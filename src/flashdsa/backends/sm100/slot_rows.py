"""The deterministic backward's slots: the key to whose dKV each belongs, and their number at a
time.

Each slot of `indices` gets a row of its own; then every key adds the rows of its slots in the order
of the slots (docs/decisions/0012).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.hw import SM100
from flashdsa.kernels.attention.sm100.core.tile import CLUSTER, FP32
from flashdsa.problem import D_QK

WORKSPACE_BYTES = 1 << 30
"""Bytes of the slots' rows; more only if a single query needs more. The gradients' bits do not
depend on it: a key adds in the order of all slots, however many of them are taken at a time."""


def queries_at_a_time(num_queries: int, topk: int) -> int:
    """Number of queries that have room, in whole waves of the GPU if that is possible."""
    room = max(1, WORKSPACE_BYTES // (topk * D_QK * FP32))
    wave = SM100.num_sms // CLUSTER
    whole_waves = room - room % wave if room >= wave else room
    return min(num_queries, whole_waves)


def slot_order(indices: Tensor, topk_length: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """(order, starts) int32: key k has the slots order[starts[k]:starts[k + 1]], ascending.

    Args:
        indices: (S, topk) int32. topk_length: (S,) int32.

    Returns:
        order: (S * topk,), the invalid slots after all others. starts: (num_keys + 1,).
    """
    position = torch.arange(indices.shape[1], device=indices.device)
    valid = (indices >= 0) & (indices < num_keys) & (position < topk_length[:, None])
    of_slot = torch.where(valid, indices, num_keys).flatten()
    keys, order = torch.sort(of_slot, stable=True)
    every_key = torch.arange(num_keys + 1, dtype=keys.dtype, device=keys.device)
    return order.int(), torch.searchsorted(keys, every_key, out_int32=True)
