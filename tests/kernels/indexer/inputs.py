"""Inputs of the indexer, and the ids and scores that they must give.

Exact ones have scores that are exact in any order of additions, so that backends must agree:
queries and keys are small integers, weights and scales multiples of powers of two; every score is a
multiple of 2**-5 far below 2**24, whatever adds it up. Normal ones are as in the model.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

import flashdsa
from flashdsa.problem import PAGE_BYTES, PAGE_KEY_BYTES
from flashdsa.verify.tolerances import PRODUCT_TOLERANCE

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


def expected_ids(inputs: Inputs, topk: int, by_score: bool = False) -> Tensor:
    """The contract in torch, row by row, bad lengths and pages included."""
    cache = inputs.k_index_cache_fp8.view(torch.uint8).view(-1, 8448)
    out = inputs.output(topk, fill=-1)
    offsets = torch.arange(64, device=cache.device)
    width = inputs.block_table.shape[1] * 64
    for row, length in enumerate(inputs.seq_lens.tolist()):
        length = min(max(length, 0), width)
        pages = inputs.block_table[row, : -(-length // 64)].long()
        good = (pages >= 0) & (pages < len(cache))
        valid = good.repeat_interleave(64)[:length]
        ids = (pages[:, None] * 64 + offsets).flatten()[:length][valid]
        if not by_score and length <= topk:
            out[row, : len(ids)] = ids.int()
            continue
        bytes_ = cache[pages.where(good, 0)]
        keys = bytes_[:, :PAGE_KEY_BYTES].contiguous().view(torch.float8_e4m3fn).view(-1, 128)
        scales = bytes_[:, PAGE_KEY_BYTES:].contiguous().view(torch.float32).flatten()
        dots = inputs.q_index_fp8[row].double() @ keys.double().t()
        scores = (dots.clamp_min(0) * inputs.weights[row].double()[:, None]).sum(0) * scales
        scores = scores[:length][valid].nan_to_num(nan=-torch.inf) + 0.0
        best = scores.sort(descending=True, stable=True).indices[:topk]
        best = best if by_score else best.sort().values
        out[row, : len(best)] = ids[best].int()
    return out


def select(inputs: Inputs, topk: int, by_score: bool = False) -> Tensor:
    """The operation's ids."""
    ids = inputs.output(topk)
    flashdsa.dsa_topk_indexer(*inputs, ids, sorted=by_score, backend="sm90")
    return ids


PAGE = 64


def normal_inputs(lengths: list[int], num_heads: int, seed: int = 0) -> Inputs:
    """Rows of standard-normal queries and keys, quantised as in the model."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-length // PAGE) for length in lengths]
    num_pages = sum(pages) + 2
    keys = torch.randn(num_pages * PAGE, 128, generator=generator).bfloat16()
    cache = torch.zeros(num_pages, PAGE, 1, 132, dtype=torch.uint8)
    flashdsa.write_index_k_cache(keys, torch.arange(len(keys)), cache, backend="cpu")
    q = torch.randn(len(lengths), num_heads, 128, generator=generator).bfloat16()
    weights = torch.randn(len(lengths), num_heads, generator=generator)
    fp8, weights = flashdsa.quantize_index_q(q, weights, backend="cpu")
    table = torch.full((len(lengths), max([1, *pages])), -7, dtype=torch.int32)
    order = iter(torch.randperm(num_pages, generator=generator).tolist())
    for row, count in enumerate(pages):
        table[row, :count] = torch.tensor([next(order) for _ in range(count)])
    return Inputs(fp8, cache, weights, torch.tensor(lengths, dtype=torch.int32), table)


def float64_scores(inputs: Inputs, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of the row's tokens, their sum of magnitudes over heads, and that of all products."""
    length = int(inputs.seq_lens[row])
    positions = torch.arange(length)
    slots = inputs.block_table[row, positions // PAGE].long() * PAGE + positions % PAGE
    fp8, scale = flashdsa.read_index_k_cache(inputs.k_index_cache_fp8, slots, backend="cpu")
    q, keys = inputs.q_index_fp8[row].double(), fp8.double()
    relu = (keys @ q.T).relu()
    weights, scale = inputs.weights[row].double(), scale.double()
    products = keys.abs() @ q.abs().T
    signed, absolute = weights, weights.abs()
    return (relu @ signed) * scale, (relu @ absolute) * scale, (products @ absolute) * scale


def assert_scores_are_right(scores: Tensor, inputs: Inputs) -> None:
    """Within the contract, and -inf beyond the rows' lengths."""
    num_heads = inputs.q_index_fp8.shape[1]
    for row, length in enumerate(inputs.seq_lens.tolist()):
        assert (scores[row, length:] == -math.inf).all()
        expected, magnitude, products = float64_scores(inputs, row)
        # Few heads can all be near zero, where the tensor cores' error is not.
        besides = 0 if num_heads == 64 else PRODUCT_TOLERANCE
        allowed = 3e-4 * magnitude + besides * products
        assert ((scores[row, :length].double() - expected).abs() <= allowed).all()
