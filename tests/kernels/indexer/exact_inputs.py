"""Indexer inputs whose scores are exact in any order of additions, so that backends must agree.

Queries and keys are small integers, weights and scales multiples of powers of two: every score is a
multiple of 2**-5 far below 2**24, whatever adds it up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashdsa.problem import PAGE_BYTES, PAGE_KEY_BYTES

NAN_BYTE = 0x7F
EDGES = [0, 1, 63, 64, 65, 2047, 2048, 2049, 2111, 4096, 4097, 8191, 8192, 8193]
"""Lengths around a page, the largest top-k, and multiples of 4,096 tokens."""


class Inputs(NamedTuple):
    """The operands of `dsa_topk_indexer`, in its order."""

    q_index_fp8: Tensor
    k_index_cache_fp8: Tensor
    weights: Tensor
    seq_lens: Tensor
    block_table: Tensor

    def output(self, topk: int, fill: int = -99) -> Tensor:
        """A row of `topk` a query, poisoned."""
        rows = len(self.seq_lens)
        return torch.full((rows, topk), fill, dtype=torch.int32, device=self.seq_lens.device)

    def to(self, device: str) -> Inputs:
        """The same on another device."""
        return Inputs(*(x.to(device) for x in self))


def make_inputs(
    lengths: list[int],
    *,
    num_heads: int = 64,
    values: str = "random",
    seed: int = 0,
    spare_pages: int = 3,
) -> Inputs:
    """Rows of these lengths on pages in random order.

    Args:
        values: "random"; "equal": one key everywhere; "two": one of two keys a token; "ascending":
            scores that grow with the position, all different; "descending"; "level": they grow up
            to the middle of a row, and stay; "nan": every third token's key is NaN, as far as it
            has one; "pages": every page has the same keys; "crowded": random scores within 2**-10
            above 1.
    """
    generator = torch.Generator().manual_seed(seed)
    pages_of = [-(-length // 64) for length in lengths]
    num_pages, width = sum(pages_of) + spare_pages, max([1, *pages_of])

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator).float()

    keys, scales = integers(-2, 2, num_pages, 64, 128), 2.0 ** integers(-3, 0, num_pages, 64)
    q, weights = integers(-2, 2, len(lengths), num_heads, 128), integers(-3, 4, len(lengths), 1)
    weights = (weights + integers(-3, 3, len(lengths), num_heads)) / 4
    order = torch.randperm(num_pages, generator=generator)
    table = torch.full((len(lengths), width), -7, dtype=torch.int32)
    at = 0
    for row, pages in enumerate(pages_of):
        table[row, :pages] = order[at : at + pages]
        at += pages
    if values in ("equal", "two"):
        kinds = integers(0, 1, num_pages, 64, 1) if values == "two" else torch.zeros(1)
        keys = keys[0, 0] * (1 - kinds) + keys[0, 1] * kinds
        keys, scales = keys.expand(num_pages, 64, 128).clone(), torch.ones(num_pages, 64)
    if values == "pages":
        keys[:], scales[:] = keys[0].clone(), scales[0].clone()
    if values == "nan":
        keys[:, ::3, 5] = torch.nan
    if values in ("ascending", "descending", "level", "crowded"):
        _set_scores(q, keys, weights, scales, table, lengths, values)
    cache = torch.empty(num_pages, PAGE_BYTES, dtype=torch.uint8)
    cache[:, :PAGE_KEY_BYTES] = keys.to(torch.float8_e4m3fn).view(torch.uint8).view(num_pages, -1)
    cache[:, PAGE_KEY_BYTES:] = scales.view(torch.uint8).view(num_pages, -1)
    return Inputs(
        q.to(torch.float8_e4m3fn),
        cache.view(num_pages, 64, 1, 132),
        weights,
        torch.tensor(lengths, dtype=torch.int32),
        table,
    )


def scattered(inputs: Inputs, size: int) -> Inputs:
    """The same rows with their entries of `size` tokens in random places of a larger cache, whose
    other keys are NaN."""
    pages, each = inputs.k_index_cache_fp8.flatten(1), 64 // size
    num_pages = len(pages)
    generator = torch.Generator().manual_seed(size)
    slots = torch.randperm(2 * num_pages * each, generator=generator)
    cache = torch.full((2 * num_pages, PAGE_BYTES), NAN_BYTE, dtype=torch.uint8)
    for part in (slice(0, PAGE_KEY_BYTES), slice(PAGE_KEY_BYTES, None)):
        entries = cache[:, part].reshape(2 * num_pages * each, -1)
        entries[slots[: num_pages * each]] = pages[:, part].reshape(num_pages * each, -1)
        cache[:, part] = entries.view(2 * num_pages, -1)
    named = inputs.block_table.long()[:, :, None] * each + torch.arange(each)
    table = torch.where(named < 0, -1, slots[named.clamp_min(0)]).flatten(1)
    return inputs._replace(k_index_cache_fp8=cache.view(-1, 64, 1, 132), block_table=table.int())


def _set_scores(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    scales: Tensor,
    table: Tensor,
    lengths: list[int],
    values: str,
) -> None:
    """Make the score position + 1, at most half the length if `values` is "level", length -
    position, or a little more than 1: the key is one 1, the scale the rest."""
    q.zero_()
    q[:, 0, 0] = 1
    weights.zero_()
    weights[:, 0] = 1
    keys.zero_()
    keys[:, :, 0] = 1
    for row, length in enumerate(lengths):
        pages = table[row, : -(-length // 64)].long()
        rising = torch.arange(1, len(pages) * 64 + 1).float()
        scores = length + 1 - rising if values == "descending" else rising
        if values == "level":
            scores = rising.clamp_max(length // 2)
        if values == "crowded":
            generator = torch.Generator().manual_seed(row)
            scores = 1 + torch.rand(len(rising), generator=generator).mul(2**12).floor() * 2**-22
        scales[pages] = scores.view(-1, 64)


def make_requests(
    lengths: list[int], *, num_heads: int = 16, values: str = "random", next_n: int = 2
) -> Inputs:
    """Neighbouring rows of each request, over the pages of the longest one."""
    rows = make_inputs(lengths, num_heads=num_heads, values=values)
    of_requests = rows.seq_lens.view(-1, next_n)
    longest = next_n * torch.arange(len(of_requests)) + of_requests.argmax(1)
    return rows._replace(block_table=rows.block_table[longest].contiguous())
