"""Index keys and queries in MXFP4, and as the e4m3 numbers that they stand for; on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.backends.packed_rows import e2m1_values, pack, parts_of
from flashdsa.problem import MXFP4_TOKEN_BYTES
from flashdsa.row_formats import INDEX_MXFP4

TOP = 6
"""Exponent with which the largest group is held: 6 * 2^6 is within e4m3."""
_NAN_SCALE = 255
_DEEPEST = 20
"""Exponents below the largest from which on each code rounds to 0."""


def has_mxfp4(cache: Tensor) -> bool:
    """Whether an index-K cache (num_pages, 64, 1, token_bytes) has keys of 68 bytes."""
    return cache.shape[3] == MXFP4_TOKEN_BYTES


def parts_of_cache(cache: Tensor) -> list[Tensor]:
    """Views of the cache's codes (num_pages, 64, 64) and scales (num_pages, 64, 4), uint8."""
    return parts_of(cache.view(torch.uint8).squeeze(2), INDEX_MXFP4)


def pack_keys(x: Tensor) -> Tensor:
    """Vectors (T, 128) as (T, 68) uint8: 64 bytes of e2m1 codes, 4 of ue8m0 scales."""
    return pack(x, INDEX_MXFP4, power_of_two=True)


def as_e4m3(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Packed vectors (T, 68) as e4m3 (T, 128) and a power of two each, (T,) fp32.

    The largest of the four scales is the vector's, times 2^-6. Codes of the others are rounded to
    the multiples of 2^-9 that e4m3 has there: none is if they are at most 2^14 times smaller.
    """
    codes = e2m1_values(rows[:, : INDEX_MXFP4.code_bytes]).unflatten(1, (-1, INDEX_MXFP4.group))
    exponents = rows[:, INDEX_MXFP4.scales_at :].int()
    top = exponents.amax(1)
    below = (exponents - top[:, None]).clamp_min(-_DEEPEST) + TOP
    factors = ((below + 127) << 23).view(torch.float32)
    fp8 = (codes * factors[..., None]).flatten(1).to(torch.float8_e4m3fn)
    # 2^(top - 127 - 6); below 2^-126 it is a subnormal number, a single bit.
    subnormal = torch.ones_like(top) << (23 - TOP - 1 + top.clamp_max(TOP))
    bits = torch.where(top > TOP, (top - TOP) << 23, subnormal)
    scale = bits.view(torch.float32).masked_fill(top == _NAN_SCALE, torch.nan)
    return fp8, scale


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors (..., 128) rounded to MXFP4, as e4m3 and a power of two each, (...,) fp32."""
    fp8, scale = as_e4m3(pack_keys(x.reshape(-1, x.shape[-1])))
    return fp8.view(x.shape), scale.view(x.shape[:-1])
