"""Quantised indexer keys and queries, and the packed index-K cache."""

from __future__ import annotations

from torch import Tensor

from flashdsa.operands import (
    CacheReadOperands,
    CacheWriteOperands,
    IndexKOperands,
    IndexQOperands,
)
from flashdsa.ops.registration import call
from flashdsa.ops.table import (
    QUANTIZE_INDEX_K,
    QUANTIZE_INDEX_Q,
    READ_INDEX_K_CACHE,
    WRITE_INDEX_K_CACHE,
)


def quantize_index_k(k: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Indexer keys as e4m3 with a scale each: ``scale = max(amax|k|, 1e-4) / 448``.

    Args:
        k: (T, 128) bf16 or fp32.
        backend: "auto" or the name of one.

    Returns:
        fp8 (T, 128) float8_e4m3fn = round(k / scale), to nearest even, and scale (T,) fp32.
    """
    fp8_and_scale: tuple[Tensor, Tensor] = call(QUANTIZE_INDEX_K, IndexKOperands(k), backend)
    return fp8_and_scale


def quantize_index_q(q: Tensor, weights: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Indexer queries as e4m3, each head's scale (see `quantize_index_k`) folded into its weight.

    Args:
        q: (B, H, 128) bf16 or fp32.
        weights: (B, H) fp32.
        backend: "auto" or the name of one.

    Returns:
        fp8 (B, H, 128) float8_e4m3fn and folded weights (B, H) fp32.
    """
    fp8_and_folded: tuple[Tensor, Tensor] = call(
        QUANTIZE_INDEX_Q, IndexQOperands(q, weights), backend
    )
    return fp8_and_folded


def write_index_k_cache(k: Tensor, slots: Tensor, cache: Tensor, *, backend: str = "auto") -> None:
    """Quantise `k` and write it into the packed pages.

    Args:
        k: (T, 128) bf16 or fp32.
        slots: (T,) int32 or int64, distinct: ``page * 64 + offset``. -1 skips the key (padding).
        cache: (num_pages, 64, 1, 132) uint8 or int8, changed in place.
        backend: "auto" or the name of one.
    """
    call(WRITE_INDEX_K_CACHE, CacheWriteOperands(k, slots, cache), backend)


def read_index_k_cache(
    cache: Tensor, slots: Tensor, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The quantised keys of `slots`, as `quantize_index_k` returned them.

    Args:
        cache: (num_pages, 64, 1, 132) uint8 or int8.
        slots: (T,) int32 or int64 in [0, num_pages * 64).
        backend: "auto" or the name of one.

    Returns:
        fp8 (T, 128) float8_e4m3fn and scale (T,) fp32; the key is ``fp8 * scale``.
    """
    fp8_and_scale: tuple[Tensor, Tensor] = call(
        READ_INDEX_K_CACHE, CacheReadOperands(cache, slots), backend
    )
    return fp8_and_scale
