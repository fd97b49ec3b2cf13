"""e4m3 numbers from their bit definition, the indexer's quantization rule, and its page layout.

A page holds 64 tokens in 8,448 bytes: 64 x 128 e4m3 bytes, token after token, then 64 fp32 scales;
or in 4,352 bytes: 64 x 64 bytes of e2m1 codes, then 64 x 4 ue8m0 scales (MXFP4).

Bytes that must be exact are computed on the CPU: a GPU divides by a number as if by a product with
its reciprocal. All else is computed where the operands are.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "decode_e4m3",
    "encode_e4m3",
    "fake_quantize_index",
    "quantize_index_k",
    "quantize_index_q",
    "read_index_k_cache",
    "write_index_k_cache",
]

PAGE_TOKENS = 64
HEAD_DIM = 128
SCALES_AT = PAGE_TOKENS * HEAD_DIM  # byte offset of the first scale in a page
GROUP = 32  # columns of an MXFP4 scale
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # of codes 0 to 7; bit 3 is the sign
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4


def f64(x: Tensor) -> Tensor:
    """The values of any tensor, in float64, where it is."""
    return x.detach().to(torch.float64)


def full(like: Tensor, shape: Sequence[int], value: float = 0.0) -> Tensor:
    """float64 of one value, where `like` is."""
    return like.new_full(shape, value, dtype=torch.float64)


def _e4m3_value(code: int) -> float:
    """Return the value of one e4m3 (fn) byte: 1 sign, 4 exponent (bias 7), 3 mantissa bits."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return float("nan")  # the only NaN; there is no infinity
    if exponent == 0:
        return sign * mantissa * 2.0**-9  # subnormal: mantissa / 8 * 2^-6
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)  # (1 + mantissa / 8) * 2^(exponent - 7)


E4M3 = torch.tensor([_e4m3_value(code) for code in range(256)], dtype=torch.float64)
"""The value of each byte."""


def decode_e4m3(codes: Tensor) -> Tensor:
    """Bytes (uint8, int8 or a torch fp8 tensor) of any shape -> their values in float64."""
    bytes_ = codes.detach().view(torch.uint8).long()
    return E4M3.to(bytes_.device)[bytes_]


def encode_e4m3(values: Tensor) -> Tensor:
    """Values of any shape -> uint8 codes: nearest, ties to the even code, saturating at 448.

    A NaN becomes 0x7f.  The sign of a zero is kept.
    """
    x = f64(values).cpu()
    size = x.abs().clamp(max=E4M3_MAX)
    # A number's step: an eighth of the power of two below it, and of 2^-6 for subnormal ones.
    exponent = torch.frexp(size.clamp(min=2.0**-6)).exponent - 4
    steps = torch.ldexp(size, -exponent).round()  # ties to even; 8 to 16, or fewer: subnormal
    code = steps + 8 * (exponent + 9)
    code = code + torch.where(torch.signbit(x), 0x80, 0)
    return torch.where(torch.isnan(x), 0x7F, code).to(torch.uint8)


def _quantize_rows(x: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """`[..., 128]` -> e4m3 codes `[..., 128]` and fp32 scales `[...]`, all in fp32 arithmetic;
    "ue8m0": scales are the next powers of two."""
    x32 = x.detach().to(device="cpu", dtype=torch.float32)
    floor = torch.tensor(AMAX_FLOOR, dtype=torch.float32)
    scale = torch.maximum(x32.abs().amax(dim=-1), floor) / torch.tensor(E4M3_MAX)
    if rule == "ue8m0":  # exact: a power of two has an exact log2
        scale = torch.exp2(scale.double().log2().ceil()).float()
    return encode_e4m3(x32 / scale[..., None]), scale


def decode_e2m1(codes: Tensor) -> Tensor:
    """Bytes `[..., n]` -> float64 `[..., 2 n]`; the even column is in the low half."""
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64, device=codes.device)
    return torch.stack([table[(codes % 16).long()], table[(codes // 16).long()]], dim=-1).flatten(
        -2
    )


def encode_e2m1(values: Tensor) -> Tensor:
    """`[..., n]` -> bytes `[..., n / 2]`: nearest, ties to the even code; 6 at most."""
    distance = (values.double().abs()[..., None] - torch.tensor(E2M1, dtype=torch.float64)).abs()
    nearest = distance == distance.amin(dim=-1, keepdim=True)
    even = torch.tensor([2, 1] * 4)
    code = (nearest * even).argmax(dim=-1) + 8 * values.signbit()
    return (code[..., 0::2] + 16 * code[..., 1::2]).to(torch.uint8)


def _mxfp4_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`[..., 128]` -> e2m1 bytes `[..., 64]` and ue8m0 bytes `[..., 4]`: of a group the least
    power of two from 2^-126 on with which its largest number is at most 6."""
    groups = x.detach().cpu().double().unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1)
    exponents = (amax / 6).clamp(min=2.0**-126).log2().ceil()
    exponents = torch.where(amax.isfinite(), exponents, 128)
    codes = encode_e2m1(groups / torch.exp2(exponents)[..., None]).flatten(-2)
    return codes, (exponents + 127).to(torch.uint8)


def _mxfp4_as_e4m3(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """e2m1 `[..., 64]` and ue8m0 `[..., 4]` bytes -> e4m3 codes `[..., 128]` and scales fp32.

    The scale is 2^-6 of the largest; the others' numbers are rounded to e4m3 with it.
    """
    exponents = scales.double() - 127
    top = exponents.amax(-1)
    groups = decode_e2m1(codes).unflatten(-1, (-1, GROUP))
    scaled = groups * torch.exp2(exponents - top[..., None] + 6)[..., None]
    scale = torch.where(top == 128, math.nan, torch.exp2(top - 6)).float()
    return encode_e4m3(scaled).flatten(-2), scale


def quantize_index_k(
    k: Tensor, *, scale: str = "fp32", mxfp4: bool = False
) -> tuple[Tensor, Tensor]:
    """Keys `[T, 128]` -> codes uint8 `[T, 128]`, scale fp32 `[T]` = max(amax|k|, 1e-4) / 448, of
    `scale` "ue8m0" the next power of two; or rounded to MXFP4, then those of `_mxfp4_as_e4m3`."""
    return _mxfp4_as_e4m3(*_mxfp4_rows(k)) if mxfp4 else _quantize_rows(k, scale)


def fake_quantize_index(x: Tensor, scale: str) -> Tensor:
    """`[..., 128]` float64: each vector as e4m3 times its scale; "ue8m0": the next power of two;
    "mxfp4": e2m1 with four scales."""
    codes, scales = quantize_index_k(x, scale=scale, mxfp4=scale == "mxfp4")
    return decode_e4m3(codes) * scales.double()[..., None]


def quantize_index_q(
    q: Tensor, weights: Tensor, *, scale: str = "fp32", mxfp4: bool = False
) -> tuple[Tensor, Tensor]:
    """Queries `[B, H, 128]`, weights `[B, H]` -> codes uint8, fp32 weights * scale `[B, H]`."""
    codes, scales = quantize_index_k(q, scale=scale, mxfp4=mxfp4)
    return codes, weights.detach().to(device="cpu", dtype=torch.float32) * scales


def cache_bytes(cache: Tensor) -> Tensor:
    """A view of the cache `[num_pages, 64, 1, 132 or 68]` as uint8 pages `[num_pages, bytes]`."""
    return cache.detach().view(torch.uint8).view(cache.shape[0], PAGE_TOKENS * cache.shape[3])


def page_tokens(cache: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 `[P, 64, 128]` and scales fp32 `[P, 64]` of pages `[P]`."""
    raw = cache_bytes(cache)[pages]
    if cache.shape[3] == HEAD_DIM + 4:
        codes = raw[:, :SCALES_AT].unflatten(1, (PAGE_TOKENS, HEAD_DIM))
        return codes, raw[:, SCALES_AT:].contiguous().view(torch.float32)
    packed, scales = raw.cpu().split((SCALES_AT // 2, 4 * PAGE_TOKENS), dim=1)
    in_e4m3 = _mxfp4_as_e4m3(
        packed.unflatten(1, (PAGE_TOKENS, HEAD_DIM // 2)), scales.unflatten(1, (PAGE_TOKENS, 4))
    )
    codes, scale = (x.to(cache.device) for x in in_e4m3)
    return codes, scale


def write_index_k_cache(k: Tensor, slots: Tensor, cache: Tensor, *, scale: str = "fp32") -> Tensor:
    """A uint8 copy of the cache in which slot `page * 64 + offset` holds the quantized key.

    k `[T, 128]`, slots `[T]` integer (-1: padding, skipped), cache `[num_pages, 64, 1, 132]`, or
    `[..., 68]` of MXFP4 keys.
    """
    if cache.shape[3] == HEAD_DIM + 4:
        codes, factors = quantize_index_k(k, scale=scale)
        scales = factors[:, None].view(torch.uint8)
    else:
        codes, scales = _mxfp4_rows(k)
    written = cache.detach().cpu().view(torch.uint8).clone()
    pages, width = cache_bytes(written), codes.shape[1]
    for t, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, PAGE_TOKENS)
        pages[page, offset * width : (offset + 1) * width] = codes[t]
        at = PAGE_TOKENS * width + 4 * offset
        pages[page, at : at + 4] = scales[t]
    return written


def read_index_k_cache(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The codes uint8 `[T, 128]` and scales fp32 `[T]` at slots `[T]` = `page * 64 + offset`."""
    pages, offsets = slots.long() // PAGE_TOKENS, slots.long() % PAGE_TOKENS
    codes, scale = page_tokens(cache, pages)
    each = torch.arange(len(slots), device=slots.device)
    return codes[each, offsets], scale[each, offsets]
