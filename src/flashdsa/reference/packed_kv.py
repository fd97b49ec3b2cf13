"""Packed kv rows of 656 bytes: 512 e4m3, four fp32 scales of 128 columns each, 64 bf16."""

import math

import torch
from torch import Tensor

from flashdsa.reference.quant import AMAX_FLOOR, E4M3_MAX, decode_e4m3, encode_e4m3

LATENT, GROUP = 512, 128
SCALES_AT = LATENT  # byte offset of the first scale in a row
ROPE_AT = SCALES_AT + 4 * (LATENT // GROUP)


def is_packed(kv: Tensor) -> bool:
    """Whether kv has packed rows: bytes."""
    return kv.dtype in (torch.uint8, torch.int8)


def unpack_kv(rows: Tensor) -> Tensor:
    """Packed rows `[T, 656]` -> `[T, 576]` float64: e4m3 * scale, exactly, and the bf16 columns."""
    raw = rows.detach().cpu().view(torch.uint8)
    scales = raw[:, SCALES_AT:ROPE_AT].clone().view(torch.float32).double()
    latent = decode_e4m3(raw[:, :LATENT]) * scales.repeat_interleave(GROUP, dim=1)
    rope = raw[:, ROPE_AT:].clone().view(torch.bfloat16).double()
    return torch.cat([latent, rope], dim=1)


def quantize_kv(kv: Tensor, scale: str) -> Tensor:
    """Rows `[T, 576]` -> `[T, 656]` uint8; `scale` "fp32" or "ue8m0", a power of two."""
    x = kv.detach().to(device="cpu", dtype=torch.float32)
    floor = torch.tensor(AMAX_FLOOR, dtype=torch.float32)
    written = []
    for first in range(0, LATENT, GROUP):
        group = x[:, first : first + GROUP]
        scales = torch.maximum(group.abs().amax(dim=-1), floor) / torch.tensor(E4M3_MAX)
        if scale == "ue8m0":
            scales = torch.tensor([_power_of_two(one) for one in scales.tolist()])
        written.append((encode_e4m3(group / scales[:, None]), scales))
    codes = torch.cat([code for code, _ in written], dim=1)
    scales = torch.stack([one for _, one in written], dim=1)
    rope = x[:, LATENT:].to(torch.bfloat16)
    return torch.cat([codes, scales.view(torch.uint8), rope.view(torch.uint8)], dim=1)


def _power_of_two(value: float) -> float:
    """The smallest power of two that is not below a positive finite value; others unchanged."""
    if not math.isfinite(value):
        return value
    return 2.0 ** next(n for n in range(-40, 130) if 2.0**n >= value)
