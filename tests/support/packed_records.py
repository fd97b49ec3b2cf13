"""Random records of packed rows, and what their bytes mean: in float64, from dsa.md alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from flashdsa.row_formats import RowFormat

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
"""Values of the codes 0 to 7; 8 is the sign."""
BYTES_OF_SCALE = {"fp32": 4, "e8m0": 1, "e4m3": 1}
MOST = {False: 448.0, True: 6.0}
"""The largest code, e4m3 and e2m1."""


def _e4m3() -> Tensor:
    """(256,) values of the bytes: an exponent of 4 bits with bias 7, no infinity."""
    byte = torch.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10).double()
    size = torch.where(exponent > 0, normal, mantissa * 2.0**-9)
    size[byte & 127 == 127] = torch.nan
    return torch.where(byte > 127, -size, size)


E4M3 = _e4m3()


def named(columns: int, group: int, scale: str, **more: int) -> RowFormat:
    """A record whose name has all its fields: no two have one name."""
    fields = [f"{field}{value}" for field, value in more.items()]
    name = "_".join(["record", str(columns), str(group), scale, *fields])
    flags = {key: bool(more[key]) for key in ("fp4", "split") if key in more}
    return RowFormat(name, columns, group, scale, **{**more, **flags})  # type: ignore[arg-type]


def drawn(seed: int) -> Iterator[RowFormat]:
    """Records of every kind of codes, scales and pages, in a random order, without an end; bytes
    without use often fill scales up to a multiple of 16."""
    draw = random.Random(seed)
    codes = product((448, 512), (16, 32, 64, 128), BYTES_OF_SCALE)
    kinds = list(product(codes, (0, 64), (0, 1), (0, 1)))
    while True:
        draw.shuffle(kinds)
        for (columns, group, scale), rope, fp4, split in kinds:
            if columns % group == 0:
                free = -(columns // group * BYTES_OF_SCALE[scale]) % 16
                unused = draw.choice([0, 1, 2, 4, 13, free, free, free + 16])
                yield named(columns, group, scale, rope=rope, fp4=fp4, unused=unused, split=split)


def scales_of(stored: Tensor, form: RowFormat) -> Tensor:
    """(T, num_scales) of a row's bytes of scales."""
    if form.scale == "fp32":
        return stored.view(torch.float32).double()
    if form.scale == "e4m3":
        return E4M3[stored.long()]
    return torch.where(stored == 255, torch.nan, 2.0 ** (stored.double() - 127))


def fields_of(pages: Tensor, form: RowFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and bf16 columns of all rows of pages (num_pages, page_size, row_bytes), in
    bytes, (rows, bytes) each."""
    num_pages, page_size, row_bytes = pages.shape
    codes = form.columns // (2 if form.fp4 else 1)
    scales = form.columns // form.group * BYTES_OF_SCALE[form.scale]
    found: list[list[Tensor]] = [[], [], []]
    for page, row in product(range(num_pages), range(page_size)):
        flat, data = pages[page].reshape(-1), codes + 2 * form.rope
        if form.split:
            first = row * data
            places = first, page_size * data + row * (scales + form.unused), first + codes
        else:
            first = row * row_bytes
            places = first, first + codes, first + codes + scales + form.unused
        for list_, place, size in zip(found, places, (codes, scales, 2 * form.rope), strict=True):
            list_.append(flat[place : place + size])
    return torch.stack(found[0]), torch.stack(found[1]), torch.stack(found[2])


def values_of(pages: Tensor, form: RowFormat) -> Tensor:
    """(rows, d_qk) fp64 of pages (num_pages, page_size, row_bytes) uint8."""
    codes, stored, rope = fields_of(pages, form)
    if form.fp4:
        halves = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1).long()
        coded = torch.where(halves > 7, -E2M1[halves & 7], E2M1[halves & 7])
    else:
        coded = E4M3[codes.long()]
    coded = coded * scales_of(stored, form).repeat_interleave(form.group, dim=1)
    return torch.cat([coded, rope.view(torch.bfloat16).double()], dim=1) if form.rope else coded


def expected_scales(kv: Tensor, form: RowFormat) -> Tensor:
    """(T, num_scales) fp64 that rows (T, d_qk) are written with, fp32 scales as powers of two."""
    amax = kv[:, : form.columns].double().unflatten(1, (-1, form.group)).abs().amax(2)
    most = MOST[form.fp4]
    if form.scale == "e4m3":
        wanted = (amax / most).clamp(2.0**-9, 448)
        return E4M3[(wanted[..., None] - E4M3[:127]).abs().argmin(-1)]
    if form.scale == "fp32":
        wanted = amax.clamp_min(1e-4) / most
    else:
        wanted = (amax / most).clamp_min(2.0**-126 if form.fp4 else 1e-4)
    return 2.0 ** wanted.log2().ceil()


def attention(q: Tensor, rows: Tensor, indices: Tensor, d_v: int) -> Tensor:
    """(S, H, d_v) fp64: softmax over the listed rows (rows, d_qk); an id outside them is no row."""
    valid = (indices >= 0) & (indices < len(rows))
    keys = rows[torch.where(valid, indices, 0).long()]
    scores = torch.einsum("shd,skd->shk", q.double(), keys) * q.shape[2] ** -0.5
    scores = scores.masked_fill(~valid[:, None], -torch.inf)
    return torch.einsum("shk,skd->shd", scores.softmax(2), keys[..., :d_v])
