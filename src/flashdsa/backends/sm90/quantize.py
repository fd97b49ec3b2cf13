"""Quantisation of indexer keys and queries to e4m3 on Hopper GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.backends.memory import readable
from flashdsa.backends.runner import Runner
from flashdsa.kernels.catalog import QUANTIZE_INDEX
from flashdsa.kernels.indexer.sm90.quantize_plan import QuantizePlan
from flashdsa.operands import IndexKOperands, IndexQOperands


def quantize_index_k(runner: Runner, operands: IndexKOperands) -> tuple[Tensor, Tensor]:
    """Keys (T, 128) -> e4m3 (T, 128) and scales (T,) fp32; key = fp8 * scale."""
    (k,) = operands
    fp8 = runner.empty(*k.shape, dtype=torch.uint8)
    scale = runner.empty(k.shape[0], dtype=torch.float32)
    if k.shape[0]:
        function = runner.function(QUANTIZE_INDEX, QuantizePlan(dtype_name(k), 0))
        with runner.launching():
            function(readable(k), fp8, scale)
    return fp8.view(torch.float8_e4m3fn), scale


def quantize_index_q(runner: Runner, operands: IndexQOperands) -> tuple[Tensor, Tensor]:
    """Queries (B, H, 128) -> e4m3 and weights (B, H) fp32 with each head's scale multiplied in."""
    q, weights = operands
    fp8, scale = quantize_index_k(runner, IndexKOperands(q.reshape(-1, q.shape[-1])))
    return fp8.view(q.shape), weights * scale.view(weights.shape)


def dtype_name(x: Tensor) -> str:
    """The dtype as plans call it."""
    return str(x.dtype).removeprefix("torch.")
