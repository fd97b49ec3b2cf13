"""A row's result has the same bits alone, in any batch, at any place of it and in a wider table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashdsa
from tests.support.hopper_gpu import HOPPER_GPU

DEVICES = ["cpu", pytest.param("cuda", marks=HOPPER_GPU)]
DRAWS = {"cpu": 20, "cuda": 200}
HEADS, TOPK, PAGE = 16, 512, 64


def indexer_batch(lengths: list[int], device: str, seed: int) -> dict[str, Tensor]:
    """Rows of random keys, whose scores are not exact in every order of additions."""
    g = torch.Generator().manual_seed(seed)
    pages = [-(-length // PAGE) for length in lengths]
    k = torch.randn(sum(pages) * PAGE, 128, generator=g).to(device)
    cache = torch.zeros(sum(pages), PAGE, 1, 132, dtype=torch.uint8, device=device)
    slots = torch.arange(len(k), dtype=torch.int32, device=device)
    flashdsa.write_index_k_cache(k=k, slots=slots, cache=cache)
    q = torch.randn(len(lengths), HEADS, 128, generator=g).to(device)
    weights = torch.randn(len(lengths), HEADS, generator=g).to(device)
    q_fp8, weights = flashdsa.quantize_index_q(q, weights)
    table = torch.full((len(lengths), max(pages)), -1, dtype=torch.int32, device=device)
    order, first = torch.randperm(sum(pages), generator=g).int().to(device), 0
    for row, count in enumerate(pages):
        table[row, :count] = order[first : first + count]
        first += count
    return {
        "q_index_fp8": q_fp8,
        "k_index_cache_fp8": cache,
        "weights": weights,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=device),
        "block_table": table,
    }


def chosen(batch: dict[str, Tensor], rows: Tensor, pages: int, *, sorted: bool) -> Tensor:
    """Ids of some rows, of a table of so many pages."""
    cache = batch["k_index_cache_fp8"]
    some = {name: x[rows].contiguous() for name, x in batch.items() if x is not cache}
    some["block_table"] = some["block_table"][:, :pages].contiguous()
    ids = torch.full((len(rows), TOPK), -7, dtype=torch.int32, device=cache.device)
    flashdsa.dsa_topk_indexer(**some, k_index_cache_fp8=cache, topk_indices=ids, sorted=sorted)
    return ids


@pytest.mark.parametrize("sorted", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_the_indexers_ids(device: str, sorted: bool) -> None:
    g = torch.Generator().manual_seed(7)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=g))

    for seed in range(DRAWS[device]):
        most = 3000 if device == "cpu" else (40_000 if seed % 4 else 3000)
        lengths = [draw(0, most) + 1 for _ in range(draw(2, 8 if device == "cpu" else 200))]
        batch = indexer_batch(lengths, device, seed)
        every = torch.arange(len(lengths), device=device)
        ids = chosen(batch, every, batch["block_table"].shape[1], sorted=sorted)
        one = draw(0, len(lengths))
        pages = -(-lengths[one] // PAGE)
        alone = chosen(batch, every[one : one + 1], pages, sorted=sorted)
        turned = chosen(batch, every.flip(0), batch["block_table"].shape[1], sorted=sorted)
        assert torch.equal(alone[0], ids[one]), (seed, one, lengths[one])
        assert torch.equal(turned.flip(0), ids), seed
