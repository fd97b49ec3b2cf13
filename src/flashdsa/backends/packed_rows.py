"""Packed kv rows of 656 bytes, in torch and on any device: quantised, and read back.

A row: 512 e4m3 (the latent columns), four fp32 scales (one for each 128 of them), 64 bf16 (RoPE).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.backends.e4m3_scales import scale_of
from flashdsa.problem import D_V, KV_GROUP, KV_ROPE_AT, KV_SCALES_AT


def is_packed(kv: Tensor) -> bool:
    """Whether rows of `kv` are bytes."""
    return kv.dtype in (torch.uint8, torch.int8)


def pack(kv: Tensor, *, power_of_two: bool) -> Tensor:
    """Rows (T, 576) bf16 or fp32 as (T, 656) uint8.

    A group's scale is max(amax, 1e-4) / 448 in fp32; with `power_of_two` the next power of two
    that is not below it. Values are rounded to nearest even.
    """
    groups = kv[:, :D_V].float().unflatten(1, (-1, KV_GROUP))
    scale = scale_of(groups)
    if power_of_two:
        scale = next_power_of_two(scale)
    latent = (groups / scale[..., None]).to(torch.float8_e4m3fn)
    rope = kv[:, D_V:].to(torch.bfloat16)
    return torch.cat(
        [
            latent.flatten(1).view(torch.uint8),
            scale.view(torch.uint8),
            rope.contiguous().view(torch.uint8),
        ],
        dim=1,
    )


def next_power_of_two(scale: Tensor) -> Tensor:
    """The least power of two that is not below each of `scale`: fp32, positive, no subnormals.

    NaN and infinity stay.
    """
    # A significand above 1.0 carries into the exponent.
    rounded = (scale.view(torch.int32) + (2**23 - 1)) & (0xFF << 23)
    return torch.where(scale.isfinite(), rounded.view(torch.float32), scale)


def unpack(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Packed rows (T, 656) as (T, 576) of `dtype`: e4m3 * scale in fp32, in fp64 for fp64."""
    rows = rows.contiguous().view(torch.uint8)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    latent = rows[:, :KV_SCALES_AT].contiguous().view(torch.float8_e4m3fn).to(wide)
    scale = rows[:, KV_SCALES_AT:KV_ROPE_AT].contiguous().view(torch.float32).to(wide)
    rope = rows[:, KV_ROPE_AT:].contiguous().view(torch.bfloat16)
    latent = (latent.unflatten(1, (-1, KV_GROUP)) * scale[..., None]).flatten(1)
    return torch.cat([latent.to(dtype), rope.to(dtype)], dim=1)
