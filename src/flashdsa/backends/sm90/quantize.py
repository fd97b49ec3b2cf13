"""Quantisation of indexer keys and queries to e4m3 on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.quantize import quantize as by_torch
from flashdsa.backends.memory import readable
from flashdsa.backends.mxfp4 import quantize as to_mxfp4
from flashdsa.backends.runner import Runner
from flashdsa.kernels.catalog import QUANTIZE_INDEX
from flashdsa.kernels.indexer.sm90.quantize_plan import QuantizePlan

if TYPE_CHECKING:
    from flashdsa.ops.index_k_cache import IndexKOperands, IndexQOperands


def bind_keys(
    runner: Runner, operands: IndexKOperands, *, mxfp4: bool, power_of_two: bool
) -> Callable[[Sequence[Any]], tuple[Tensor, Tensor]]:
    """Keys (T, 128) -> e4m3 (T, 128) and scales (T,) fp32; key = fp8 * scale."""
    return runner.on_device(_bind_vectors(runner, operands.k, mxfp4, power_of_two))


def bind_queries(
    runner: Runner, operands: IndexQOperands, *, mxfp4: bool, power_of_two: bool
) -> Callable[[Sequence[Any]], tuple[Tensor, Tensor]]:
    """Queries (B, H, 128) -> e4m3 and weights (B, H) fp32 with each head's scale multiplied in."""
    shape, dim = operands.q.shape, operands.q.shape[-1]
    vectors = operands.q.reshape(-1, dim)
    quantize = _bind_vectors(runner, vectors, mxfp4, power_of_two)

    def serve(operands: Sequence[Any]) -> tuple[Tensor, Tensor]:
        q, weights = operands
        fp8, scale = quantize((q.reshape(-1, dim),))
        return fp8.view(shape), weights * scale.view(weights.shape)

    return runner.on_device(serve)


def _bind_vectors(
    runner: Runner, vectors: Tensor, mxfp4: bool, power_of_two: bool
) -> Callable[[Sequence[Any]], tuple[Tensor, Tensor]]:
    """Vectors (T, 128) -> e4m3 and scales (T,) fp32; scales that are powers of two by torch."""
    if mxfp4:
        return lambda operands: to_mxfp4(*operands)
    if power_of_two:
        return lambda operands: by_torch(*operands, power_of_two=True)
    count = vectors.shape[0]
    empty_fp8 = runner.allocator(*vectors.shape, dtype=torch.uint8)
    empty_scale = runner.allocator(count, dtype=torch.float32)
    if count:
        function = runner.function(QUANTIZE_INDEX, QuantizePlan(dtype_name(vectors), False))

    def quantize(operands: Sequence[Any]) -> tuple[Tensor, Tensor]:
        (x,) = operands
        fp8, scale = empty_fp8(), empty_scale()
        if count:
            function(readable(x), fp8, scale)
        return fp8.view(torch.float8_e4m3fn), scale

    return quantize


def dtype_name(x: Tensor) -> str:
    """The dtype as plans call it."""
    return str(x.dtype).removeprefix("torch.")
