"""Packed kv rows by the addresses of their bytes: codes, scales and bf16 columns; kv caches."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flashdsa.reference import quant

__all__ = ["fields", "quantize_kv", "read_kv_cache", "unpack_kv", "write_kv_cache"]


class _Row(NamedTuple):
    """Sizes of a row's fields."""

    row_bytes: int
    codes: int  # bytes: half as many of e2m1 as columns
    columns: int  # coded ones
    scales: int  # bytes, the one without use among them
    group: int  # columns a scale
    rope: int  # bf16 columns
    scale: str


ROWS = {
    "v32": _Row(656, 512, 512, 16, 128, 64, "fp32"),
    "v32_no_rope": _Row(528, 512, 512, 16, 128, 0, "fp32"),
    "v4": _Row(584, 448, 448, 8, 64, 64, "e8m0"),
    "v41": _Row(528, 512, 512, 16, 32, 0, "e8m0"),
    "v41_fp4": _Row(288, 256, 512, 32, 16, 0, "e4m3"),
    "v41_interleaved": _Row(528, 512, 512, 16, 32, 0, "e8m0"),
    "v41_fp4_interleaved": _Row(288, 256, 512, 32, 16, 0, "e4m3"),
}


def _addresses(form: str, page_size: int, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes of its page at which the codes, scales and bf16 columns of row `offset` begin."""
    if form == "v32":
        return 656 * offset, 656 * offset + 512, 656 * offset + 528
    if form in ("v32_no_rope", "v41_interleaved"):
        return 528 * offset, 528 * offset + 512, offset
    if form == "v4":
        return 576 * offset, 576 * page_size + 8 * offset, 576 * offset + 448
    if form == "v41":
        return 512 * offset, 512 * page_size + 16 * offset, offset
    if form == "v41_fp4_interleaved":
        return 288 * offset, 288 * offset + 256, offset
    return 256 * offset, 256 * page_size + 32 * offset, offset


def fields(form: str, page_size: int, slots: Tensor) -> list[Tensor]:
    """Indices `[T, width]` of the bytes of each slot's codes, scales and bf16 columns, in pages
    `[num_pages, page_size * row_bytes]` that are counted through."""
    row = ROWS[form]
    widths = row.codes, row.scales, 2 * row.rope
    page = slots // page_size * (page_size * row.row_bytes)
    return [
        (page + at)[:, None] + torch.arange(width, device=slots.device)
        for at, width in zip(_addresses(form, page_size, slots % page_size), widths, strict=True)
    ]


def is_packed(kv: Tensor) -> bool:
    """Whether kv has packed rows: bytes."""
    return kv.dtype in (torch.uint8, torch.int8)


def unpack_kv(rows: Tensor, form: str = "v32", slots: Tensor | None = None) -> Tensor:
    """Packed rows -> `[T, d]` float64: code * scale, exactly, and the bf16 columns.

    Rows are `[S_kv, bytes]`, or pages `[num_pages, page_size, bytes]` or with a 1 before the bytes;
    `slots` are of all of them, None: every one.
    """
    page_size = 1 if rows.dim() == 2 else rows.shape[1]
    if slots is None:
        slots = torch.arange(rows[..., 0].numel(), device=rows.device)
    raw = rows.detach().reshape(-1).view(torch.uint8)
    codes, scales, rope = (raw[at] for at in fields(form, page_size, slots.long()))
    is_e2m1 = ROWS[form].codes < ROWS[form].columns
    values = quant.decode_e2m1(codes) if is_e2m1 else quant.decode_e4m3(codes)
    values *= _decode_scales(scales, form).repeat_interleave(ROWS[form].group, dim=1)
    if not ROWS[form].rope:
        return values
    return torch.cat([values, rope.view(torch.bfloat16).double()], dim=1)


def _decode_scales(stored: Tensor, form: str) -> Tensor:
    row = ROWS[form]
    if row.scale == "fp32":
        return stored.view(torch.float32).double()
    if row.scale == "e4m3":
        return quant.decode_e4m3(stored)
    powers = [2.0 ** (byte - 127) for byte in range(255)]
    table = torch.tensor([*powers, math.nan], dtype=torch.float64, device=stored.device)
    return table[stored[:, : row.columns // row.group].long()]


def quantize_kv(kv: Tensor, scale: str, form: str = "v32") -> Tensor:
    """Rows `[T, d]` -> `[T, bytes]` uint8, each with its scales; `scale` "fp32" or "ue8m0", a
    power of two, is of fp32 scales."""
    x = kv.detach().to(device="cpu", dtype=torch.float32)
    row = ROWS[form]
    codes, stored = [], []
    for first in range(0, row.columns, row.group):
        group = x[:, first : first + row.group]
        scales, written = _scales(group.abs().amax(dim=-1), form, scale)
        scaled = group / scales[:, None]
        encode = quant.encode_e2m1 if row.codes < row.columns else quant.encode_e4m3
        codes.append(encode(scaled))
        stored.append(written)
    rows = torch.zeros(len(x), row.row_bytes, dtype=torch.uint8)
    rope = x[:, row.columns :].to(torch.bfloat16).contiguous().view(torch.uint8)
    written = torch.cat(stored, dim=1)
    written = torch.cat([written, written.new_zeros(len(x), row.scales - written.shape[1])], dim=1)
    places = fields(form, 1, torch.arange(len(x)))
    for at, field in zip(places, (torch.cat(codes, dim=1), written, rope), strict=True):
        rows.view(-1)[at] = field
    return rows


def _scales(amax: Tensor, form: str, rule: str) -> tuple[Tensor, Tensor]:
    """A group's scales `[T]` in fp32, and their bytes `[T, 1 or 4]`."""
    floor = torch.tensor(quant.AMAX_FLOOR, dtype=torch.float32)
    if ROWS[form].scale == "fp32":
        scales = torch.maximum(amax, floor) / torch.tensor(quant.E4M3_MAX)
        if rule == "ue8m0":
            scales = torch.tensor([_power_of_two(one) for one in scales.tolist()])
        return scales, scales[:, None].view(torch.uint8)
    if ROWS[form].scale == "e8m0":
        wanted = torch.maximum(amax / torch.tensor(quant.E4M3_MAX), floor).tolist()
        scales = torch.tensor([_power_of_two(one) for one in wanted])
        logs = [math.log2(x) if math.isfinite(x) else 128 for x in scales.tolist()]
        stored = [127 + int(log) for log in logs]
        return scales, torch.tensor(stored, dtype=torch.uint8)[:, None]
    nearest = quant.encode_e4m3((amax / torch.tensor(6.0)).clamp(2.0**-9, quant.E4M3_MAX))
    code = torch.where(amax.isfinite(), nearest, 0x7F).to(torch.uint8)
    return quant.decode_e4m3(code).float(), code[:, None]


def _power_of_two(value: float) -> float:
    """The smallest power of two that is not below a positive finite value; others unchanged."""
    if not math.isfinite(value):
        return value
    return 2.0 ** next(n for n in range(-40, 130) if 2.0**n >= value)


def write_kv_cache(
    kv: Tensor, slots: Tensor, cache: Tensor, scale: str, form: str = "v32"
) -> Tensor:
    """A copy of the cache, without gaps, in which slot `page * page_size + offset` has the row; -1
    skips it.

    kv `[T, d]`; cache `[S_kv, width]` or `[num_pages, page_size, width]`, with or without a 1
    before the width. `form` names packed rows.
    """
    written = cache.detach().cpu().clone(memory_format=torch.contiguous_format)
    kept = slots.cpu() >= 0
    rows, places = kv.detach().cpu()[kept], slots.cpu()[kept].long()
    if not is_packed(cache):
        written.view(-1, written.shape[-1])[places] = rows.to(cache.dtype)
        return written
    packed = quantize_kv(rows, scale, form).view(-1)
    page_size = 1 if cache.dim() == 2 else cache.shape[1]
    from_fields = fields(form, 1, torch.arange(len(rows)))
    for source, place in zip(from_fields, fields(form, page_size, places), strict=True):
        written.view(-1).view(torch.uint8)[place] = packed[source]
    return written


def read_kv_cache(cache: Tensor, slots: Tensor, form: str = "v32") -> Tensor:
    """Rows `[T, d]` in float64; `form` names packed rows."""
    if is_packed(cache):
        return unpack_kv(cache, form, slots)
    return quant.f64(cache.reshape(-1, cache.shape[-1])[slots.long()])
