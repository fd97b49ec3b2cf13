"""DeepSeek-V4.1's two caches with interleaved rows, as vLLM has them on compute capability 10.x."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa import reference

WIDTHS = {"v41_interleaved": 528, "v41_fp4_interleaved": 288}
PAGE_SIZES = 64, 32
STRIDE = 3168
"""Bytes of which a block is a multiple: both widths divide it."""


def interleaved_caches(*counts: int) -> tuple[list[Tensor], list[Tensor]]:
    """Random rows in pages of one memory, a page of each cache in a block; other bytes are NaN.

    Args:
        counts: rows of the window's cache and of the entries', as many pages of either.

    Returns:
        The caches, (pages, 64, 1, 528) and (pages, 32, 1, 288) uint8, and their rows (n, 512) fp64.
    """
    used = [size * width for size, width in zip(PAGE_SIZES, WIDTHS.values(), strict=True)]
    block = -(-sum(used) // STRIDE) * STRIDE + STRIDE
    memory = torch.full((counts[0] // PAGE_SIZES[0], block), 0xFF, dtype=torch.uint8)
    caches, rows = [], []
    for (name, width), page_size, count in zip(WIDTHS.items(), PAGE_SIZES, counts, strict=True):
        first = sum(used[: len(caches)])
        packed = reference.quantize_kv(torch.randn(count, 512), "ue8m0", name)
        page = memory[:, first : first + page_size * width].unflatten(1, (page_size, 1, width))
        page.copy_(packed.view(page.shape))
        caches.append(page)
        rows.append(reference.unpack_kv(packed, name))
    return caches, rows
