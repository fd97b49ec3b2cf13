"""Quantisation of indexer keys and queries to e4m3 with one fp32 scale a vector, by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashdsa.backends.mxfp4 import quantize as to_mxfp4
from flashdsa.backends.packed_rows import next_power_of_two, scale_of

if TYPE_CHECKING:
    from flashdsa.ops.index_k_cache import IndexKOperands, IndexQOperands


def quantize(x: Tensor, *, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """e4m3 vectors and their scales over the last dimension, all arithmetic in fp32."""
    x = x.float()
    scale = scale_of(x)
    scale = next_power_of_two(scale) if power_of_two else scale
    return (x / scale[..., None]).to(torch.float8_e4m3fn), scale


def quantize_index_k(
    operands: IndexKOperands, *, mxfp4: bool, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Keys (T, 128) -> e4m3 (T, 128) and scales (T,) fp32; key = fp8 * scale."""
    return to_mxfp4(operands.k) if mxfp4 else quantize(operands.k, power_of_two=power_of_two)


def quantize_index_q(
    operands: IndexQOperands, *, mxfp4: bool, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Queries (B, H, 128) -> e4m3 and weights (B, H) fp32 with each head's scale multiplied in."""
    q = operands.q
    fp8, scale = to_mxfp4(q) if mxfp4 else quantize(q, power_of_two=power_of_two)
    return fp8, operands.weights * scale
