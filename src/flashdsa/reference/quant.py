"""e4m3 numbers from their bit definition, the indexer's quantization rule, and its page layout.

A page holds 64 tokens in 8,448 bytes: 64 x 128 e4m3 bytes, token after token, then 64 fp32 scales.
"""

import torch
from torch import Tensor

PAGE_TOKENS = 64
HEAD_DIM = 128
SCALES_AT = PAGE_TOKENS * HEAD_DIM  # byte offset of the first scale in a page
PAGE_BYTES = SCALES_AT + 4 * PAGE_TOKENS
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4


def _e4m3_value(code: int) -> float:
    """Return the value of one e4m3 (fn) byte: 1 sign, 4 exponent (bias 7), 3 mantissa bits."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return float("nan")  # the only NaN; there is no infinity
    if exponent == 0:
        return sign * mantissa * 2.0**-9  # subnormal: mantissa / 8 * 2^-6
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)  # (1 + mantissa / 8) * 2^(exponent - 7)


def decode_e4m3(codes: Tensor) -> Tensor:
    """Bytes (uint8, int8 or a torch fp8 tensor) of any shape -> their values in float64."""
    table = torch.tensor([_e4m3_value(code) for code in range(256)], dtype=torch.float64)
    return table[codes.detach().cpu().view(torch.uint8).long()]


def encode_e4m3(values: Tensor) -> Tensor:
    """Values of any shape -> uint8 codes: nearest, ties to the even code, saturating at 448.

    A NaN becomes 0x7f.  The sign of a zero is kept.
    """
    # Codes 0x00..0x7e are the non-negative numbers in ascending order, so an even code has an
    # even mantissa, which is what "ties to even" asks for.
    grid = torch.tensor([_e4m3_value(code) for code in range(0x7F)], dtype=torch.float64)
    x = values.detach().to(device="cpu", dtype=torch.float64)
    size = x.abs().clamp(max=E4M3_MAX)
    upper = torch.searchsorted(grid, size).clamp(max=0x7E)  # first code whose value is >= size
    lower = (upper - 1).clamp(min=0)
    to_upper, to_lower = grid[upper] - size, size - grid[lower]
    take_lower = (to_lower < to_upper) | ((to_lower == to_upper) & (lower % 2 == 0))
    code = torch.where(take_lower, lower, upper)
    code = code + torch.where(torch.signbit(x), 0x80, 0)
    return torch.where(torch.isnan(x), 0x7F, code).to(torch.uint8)


def _quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`[..., 128]` -> e4m3 codes `[..., 128]` and fp32 scales `[...]`, all in fp32 arithmetic."""
    x32 = x.detach().to(device="cpu", dtype=torch.float32)
    floor = torch.tensor(AMAX_FLOOR, dtype=torch.float32)
    scale = torch.maximum(x32.abs().amax(dim=-1), floor) / torch.tensor(E4M3_MAX)
    return encode_e4m3(x32 / scale[..., None]), scale


def quantize_index_k(k: Tensor) -> tuple[Tensor, Tensor]:
    """Keys `[T, 128]` -> codes uint8 `[T, 128]`, scale fp32 `[T]` = max(amax|k|, 1e-4) / 448."""
    return _quantize_rows(k)


def fake_quantize_index(x: Tensor, scale: str) -> Tensor:
    """`[..., 128]` float64: each vector as e4m3 times its scale; "ue8m0": the next power of two."""
    codes, scales = _quantize_rows(x)
    if scale == "ue8m0":
        exponents = scales.double().log2().ceil()  # exact: a power of two has an exact log2
        scales = torch.exp2(exponents).float()
        x32 = x.detach().to(device="cpu", dtype=torch.float32)
        codes = encode_e4m3(x32 / scales[..., None])
    return decode_e4m3(codes) * scales.double()[..., None]


def quantize_index_q(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Queries `[B, H, 128]`, weights `[B, H]` -> codes uint8, fp32 weights * scale `[B, H]`."""
    codes, scale = _quantize_rows(q)
    return codes, weights.detach().to(device="cpu", dtype=torch.float32) * scale


def cache_bytes(cache: Tensor) -> Tensor:
    """A view of the cache `[num_pages, 64, 1, 132]` as the uint8 pages `[num_pages, 8448]`."""
    return cache.detach().view(torch.uint8).view(cache.shape[0], PAGE_BYTES)


def page_tokens(cache: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """One page's codes uint8 `[64, 128]` and scales fp32 `[64]`."""
    raw = cache_bytes(cache)[page].cpu()
    codes = raw[:SCALES_AT].reshape(PAGE_TOKENS, HEAD_DIM)
    return codes, raw[SCALES_AT:].clone().view(torch.float32)


def write_index_k_cache(k: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
    """A uint8 copy of the cache in which slot `page * 64 + offset` holds the quantized key.

    k `[T, 128]`, slots `[T]` integer (-1: padding, skipped), cache `[num_pages, 64, 1, 132]`.
    """
    codes, scale = quantize_index_k(k)
    written = cache.detach().cpu().view(torch.uint8).clone()
    pages = cache_bytes(written)
    for t, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, PAGE_TOKENS)
        pages[page, offset * HEAD_DIM : (offset + 1) * HEAD_DIM] = codes[t]
        at = SCALES_AT + 4 * offset
        pages[page, at : at + 4] = scale[t : t + 1].view(torch.uint8)
    return written


def read_index_k_cache(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The codes uint8 `[T, 128]` and scales fp32 `[T]` at slots `[T]` = `page * 64 + offset`."""
    codes = torch.empty(len(slots), HEAD_DIM, dtype=torch.uint8)
    scale = torch.empty(len(slots), dtype=torch.float32)
    for t, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, PAGE_TOKENS)
        page_codes, page_scale = page_tokens(cache, page)
        codes[t], scale[t] = page_codes[offset], page_scale[offset]
    return codes, scale
