"""Quantisation of indexer keys and queries to e4m3 with one fp32 scale a vector, on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashdsa.backends.mxfp4 import quantize as to_mxfp4
from flashdsa.backends.packed_rows import scale_of

if TYPE_CHECKING:
    from flashdsa.ops.index_k_cache import IndexKOperands, IndexQOperands


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 vectors and their scales over the last dimension, all arithmetic in fp32."""
    x = x.float()
    scale = scale_of(x)
    return (x / scale[..., None]).to(torch.float8_e4m3fn), scale


def quantize_index_k(operands: IndexKOperands, *, mxfp4: bool) -> tuple[Tensor, Tensor]:
    """Keys (T, 128) -> e4m3 (T, 128) and scales (T,) fp32; key = fp8 * scale."""
    return to_mxfp4(operands.k) if mxfp4 else quantize(operands.k)


def quantize_index_q(operands: IndexQOperands, *, mxfp4: bool) -> tuple[Tensor, Tensor]:
    """Queries (B, H, 128) -> e4m3 and weights (B, H) fp32 with each head's scale multiplied in."""
    fp8, scale = to_mxfp4(operands.q) if mxfp4 else quantize(operands.q)
    return fp8, operands.weights * scale
