"""Quantisation of indexer keys and queries to e4m3 on Hopper GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.hw import BULK_ALIGNMENT
from flashdsa.jit.loader import load
from flashdsa.kernels.catalog import QUANTIZE_INDEX
from flashdsa.kernels.indexer.sm90.quantize_plan import QuantizePlan
from flashdsa.operands import IndexKOperands, IndexQOperands


def quantize_index_k(operands: IndexKOperands) -> tuple[Tensor, Tensor]:
    """Keys (T, 128) -> e4m3 (T, 128) and scales (T,) fp32; key = fp8 * scale."""
    k = operands.k
    fp8 = torch.empty(k.shape, dtype=torch.float8_e4m3fn, device=k.device)
    scale = torch.empty(k.shape[0], dtype=torch.float32, device=k.device)
    if k.shape[0]:
        function = load(QUANTIZE_INDEX, QuantizePlan(dtype_name(k), 0))
        with torch.cuda.device(k.device):
            function(readable(k), fp8.view(torch.uint8), scale)
    return fp8, scale


def quantize_index_q(operands: IndexQOperands) -> tuple[Tensor, Tensor]:
    """Queries (B, H, 128) -> e4m3 and weights (B, H) fp32 with each head's scale multiplied in."""
    q, weights = operands
    fp8, scale = quantize_index_k(IndexKOperands(q.reshape(-1, q.shape[-1])))
    return fp8.view(q.shape), weights * scale.view(weights.shape)


def dtype_name(x: Tensor) -> str:
    """The dtype as plans call it."""
    return str(x.dtype).removeprefix("torch.")


def readable(x: Tensor) -> Tensor:
    """`x`, or a copy where its rows have gaps or an address that the kernel cannot read from."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % BULK_ALIGNMENT else x
