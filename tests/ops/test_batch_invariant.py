"""A row's result has the same bits alone, in any batch, at any place of it and in a wider table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.backends.emulated.devices import H200
from flashdsa.backends.emulated.runner import running_on
from flashdsa.backends.sm90.sparse_mla_decode import used_slots
from flashdsa.errors import UnsupportedError
from flashdsa.ops.attention import SparseMlaOperands
from flashdsa.verify.launch_list import Recorder
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


ATTENTION = ["bf16", "fp32", "packed", "two sources", "blocks"]
DTYPES = {"fp32": torch.float32}


def attention_batch(kind: str, device: str, seed: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Sources and parameters; and tensors with a row for each query, lists without -1 inside."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=g))

    on_gpu = device == "cuda"
    dtype = DTYPES.get(kind, torch.bfloat16)
    d_qk = 512 if kind == "blocks" else 576
    queries, width = draw(2, 300 if on_gpu else 9), draw(1, 2049 if on_gpu else 700)
    heads = [8, 16, 64, 128][draw(0, 4)] if on_gpu else draw(1, 5)
    rows = draw(1, 40_000 if on_gpu else 900)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device, dtype)

    def ids(count: int, most: int) -> Tensor:
        return torch.randint(count, (queries, most), generator=g, dtype=torch.int32).to(device)

    kv = randn(rows, d_qk)
    if kind == "packed":
        kv = flashdsa.quantize_kv(kv)
    shared: dict[str, Any] = {"kv": kv, "batch_invariant": True}
    own = {"q": randn(queries, heads, d_qk), "indices": ids(rows, width)}
    lengths = torch.randint(width + 1, (queries,), generator=g, dtype=torch.int32)
    if seed % 3:
        own["topk_length"] = lengths.to(device)
    if kind == "two sources":
        shared["extra_kv"] = randn(draw(1, 300), d_qk)
        own["starts"] = ids(len(shared["extra_kv"]), 1)[:, 0] - 20
        own["ends"] = own["starts"] + 128
    if kind == "blocks":
        shared["index_block"] = 4
    return shared, own


def attend(shared: dict[str, Any], own: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """O and lse."""
    own = dict(own)
    if "ends" in own:
        own["extra_indices"] = (own.pop("starts"), own.pop("ends"))  # type: ignore[assignment]
    return flashdsa.sparse_mla_fwd(**shared, **own)


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        *((kind, "cpu") for kind in ATTENTION),
        *(pytest.param(kind, "cuda", marks=HOPPER_GPU) for kind in ATTENTION if kind != "fp32"),
    ],
)
def test_attention(kind: str, device: str) -> None:
    """Alone, in a batch, turned round, and in a table that -1 widen."""
    for seed in range(8 if device == "cpu" else 40):
        shared, own = attention_batch(kind, device, seed)
        found = attend(shared, own)
        one = seed % len(own["q"])
        used = int(own["topk_length"][one]) if "topk_length" in own else own["indices"].shape[1]
        alone = {name: x[one : one + 1].contiguous() for name, x in own.items()}
        alone["indices"] = alone["indices"][:, : max(used, 1)].contiguous()
        turned = {name: x.flip(0) for name, x in own.items()}
        wide = torch.nn.functional.pad(own["indices"], (0, 1 + 37 * seed), value=-1)
        every = [attend(shared, own | {"indices": wide}), attend(shared, turned)]
        for number, result in enumerate(found):
            assert torch.equal(every[0][number], result), (seed, "wide")
            assert torch.equal(every[1][number].flip(0), result), (seed, "turned")
            assert torch.equal(attend(shared, alone)[number][0], result[one]), (seed, "alone")


@pytest.mark.parametrize(("heads", "packed"), [(16, False), (64, False), (16, True), (128, True)])
def test_one_kernel_serves_every_batch(heads: int, packed: bool) -> None:
    recorder = Recorder(H200)
    kv = torch.zeros(100, 576, dtype=torch.bfloat16)
    kv = flashdsa.quantize_kv(kv) if packed else kv
    names = set()
    with running_on(recorder):
        for queries in (1, 67, 133, 1000):
            recorder.launched.clear()
            q = torch.zeros(queries, heads, 576, dtype=torch.bfloat16)
            indices = torch.zeros(queries, 64, dtype=torch.int32)
            options: dict[str, Any] = {"batch_invariant": True, "backend": "emulate-sm90"}
            flashdsa.sparse_mla_fwd(q, kv, indices, **options)
            names.add(tuple(recorder.launched))
    assert len(names) == 1 and len(*names) == 1


def test_slots_after_the_last_row_count_for_no_share() -> None:
    q, kv = torch.zeros(4, 1, 576), torch.zeros(9, 656, dtype=torch.uint8)
    ids = torch.tensor([[3, -1, 8, -1], [-1, -1, -1, 9], [1, 2, 3, 4], [1, 2, 3, 4]]).int()
    lengths = torch.tensor([4, 4, 9, 2]).int()
    assert used_slots(SparseMlaOperands(q, kv, ids, lengths)).tolist() == [3, 0, 4, 2]
    assert used_slots(SparseMlaOperands(q, kv, ids)).tolist() == [3, 0, 4, 4]
    assert used_slots(SparseMlaOperands(q, kv, ids), 4).tolist() == [0, 0, 2, 2]


def test_blackwell_refuses() -> None:
    q, kv = torch.zeros(1, 128, 576).bfloat16(), torch.zeros(1, 576).bfloat16()
    ids = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="batch_invariant: needed, not there"):
        flashdsa.sparse_mla_fwd(q, kv, ids, batch_invariant=True, backend="emulate-sm100")
