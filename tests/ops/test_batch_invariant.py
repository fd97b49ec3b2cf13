"""A row's result has the same bits alone, in any batch, at any place of it and in a wider table."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import flashdsa
from flashdsa.adapters import flash_mla
from flashdsa.backends.emulated.devices import H200
from flashdsa.backends.emulated.runner import running_on
from flashdsa.backends.recorder import Recorder
from flashdsa.errors import UnsupportedError
from tests.support.hopper_gpu import HOPPER_GPU

DEVICES = ["cpu", pytest.param("cuda", marks=HOPPER_GPU)]
DRAWS = {"cpu": 20, "cuda": 200}
HEADS, TOPK, PAGE = 16, 512, 64


def indexer_batch(lengths: list[int], device: str, seed: int) -> dict[str, Tensor]:
    """Rows of random keys, whose scores are not exact in every order of additions."""
    g = torch.Generator(device).manual_seed(seed)
    pages = [-(-length // PAGE) for length in lengths]
    k = torch.randn(sum(pages) * PAGE, 128, generator=g, device=device)
    cache = torch.zeros(sum(pages), PAGE, 1, 132, dtype=torch.uint8, device=device)
    slots = torch.arange(len(k), dtype=torch.int32, device=device)
    flashdsa.write_index_k_cache(k=k, slots=slots, cache=cache)
    q = torch.randn(len(lengths), HEADS, 128, generator=g, device=device)
    weights = torch.randn(len(lengths), HEADS, generator=g, device=device)
    q_fp8, weights = flashdsa.quantize_index_q(q, weights)
    table = torch.full((len(lengths), max(pages)), -1, dtype=torch.int32, device=device)
    order, first = torch.randperm(sum(pages), generator=g, device=device).int(), 0
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


ATTENTION = ["bf16", "fp32", "packed", "two sources", "blocks", "packed sources", "packed blocks"]
DTYPES = {"fp32": torch.float32}


def attention_batch(kind: str, device: str, seed: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Sources and parameters; and tensors with a row for each query, lists without -1 inside."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=g))

    on_gpu = device == "cuda"
    dtype = DTYPES.get(kind, torch.bfloat16)
    blocks, packed = kind.endswith("blocks"), kind.startswith("packed")
    d_qk = 512 if blocks or kind == "packed sources" else 576
    queries, width = draw(2, 300 if on_gpu else 9), draw(1, 2049 if on_gpu else 700)
    heads = [8, 16, 64, 128][draw(0, 4)] if on_gpu else draw(1, 5)
    rows = draw(1, 40_000 if on_gpu else 900)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device, dtype)

    def ids(count: int, most: int) -> Tensor:
        return torch.randint(count, (queries, most), generator=g, dtype=torch.int32).to(device)

    def source(count: int) -> Tensor:
        row_format = "v32" if d_qk == 576 else "v32_no_rope"
        return (
            flashdsa.quantize_kv(randn(count, d_qk), kv_format=row_format)
            if packed
            else randn(count, d_qk)
        )

    rows += -rows % 4 if blocks else 0
    shared: dict[str, Any] = {"kv": source(rows), "batch_invariant": True}
    if packed and d_qk == 512:
        shared["kv_format"] = "v32_no_rope"
    own = {"q": randn(queries, heads, d_qk), "indices": ids(rows, width)}
    lengths = torch.randint(width + 1, (queries,), generator=g, dtype=torch.int32)
    if seed % 3:
        own["topk_length"] = lengths.to(device)
    if kind in ("two sources", "packed blocks"):
        shared["extra_kv"] = source(64 * draw(1, 6))
        own["starts"] = ids(len(shared["extra_kv"]), 1)[:, 0] - 20
        own["ends"] = own["starts"] + 128
    if kind == "packed sources":
        shared["extra_kv"] = source(64 * draw(1, 6))
        own["extra_indices"] = ids(len(shared["extra_kv"]), 150)
        own["extra_topk_length"] = torch.randint(151, (queries,), generator=g).int().to(device)
    if blocks:
        shared["index_block"] = 4
    return shared, own


def lists_of(own: dict[str, Tensor]) -> dict[str, Any]:
    """Arguments of a call, a range as a pair."""
    given: dict[str, Any] = dict(own)
    if "ends" in given:
        given["extra_indices"] = (given.pop("starts"), given.pop("ends"))
    return given


def attend(shared: dict[str, Any], own: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """O and lse."""
    return flashdsa.sparse_mla_fwd(**shared, **lists_of(own))


KINDS = pytest.mark.parametrize(
    ("kind", "device"),
    [
        *((kind, "cpu") for kind in ATTENTION),
        *(pytest.param(kind, "cuda", marks=HOPPER_GPU) for kind in ATTENTION if kind != "fp32"),
    ],
)
SEEDS = {"cpu": 8, "cuda": 40}


@KINDS
def test_attention(kind: str, device: str) -> None:
    """Alone, in a batch, turned round, and in a table that -1 widen."""
    for seed in range(SEEDS[device]):
        shared, own = attention_batch(kind, device, seed)
        found = attend(shared, own)
        one = seed % len(own["q"])
        used = int(own["topk_length"][one]) if "topk_length" in own else own["indices"].shape[1]
        alone = {name: x[one : one + 1].contiguous() for name, x in own.items()}
        alone["indices"] = alone["indices"][:, : max(used, 1)].contiguous()
        turned = {name: x.flip(0) for name, x in own.items()}
        lists = [name for name in own if name.endswith("indices")]
        wide = {name: pad(own[name], (0, 1 + 37 * seed), value=-1) for name in lists}
        every = [attend(shared, own | wide), attend(shared, turned)]
        for number, result in enumerate(found):
            assert torch.equal(every[0][number], result), (seed, "wide")
            assert torch.equal(every[1][number].flip(0), result), (seed, "turned")
            assert torch.equal(attend(shared, alone)[number][0], result[one]), (seed, "alone")


def in_other_pages(
    shared: dict[str, Any], own: dict[str, Tensor], seed: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same rows at other places of pages of 64, among rows of NaN; ids follow them."""
    kv, unit = shared["kv"], shared.get("index_block", 1)
    count = len(kv) // unit
    units = -(-(count + 100) // 64) * 64
    places = torch.randperm(units, generator=torch.Generator().manual_seed(seed))[:count]
    nothing = 0xFF if kv.dtype == torch.uint8 else torch.nan
    moved = kv.new_full((units, unit, kv.shape[1]), nothing)
    moved[places.to(kv.device)] = kv.unflatten(0, (count, unit))
    sources = {"kv": moved.view(-1, 64, 1, kv.shape[1])}
    if "extra_kv" in shared:
        extra = shared["extra_kv"]
        sources["extra_kv"] = extra.view(-1, 64, extra.shape[1])
    ids = own["indices"]
    renamed = places.int().to(ids.device)[ids.clamp(max=count - 1).long()]
    return shared | sources, own | {"indices": torch.where(ids < count, renamed, -1)}


@KINDS
def test_attention_over_pages(kind: str, device: str) -> None:
    """Pages have the bits of flat rows, wherever in them the rows lie."""
    for seed in range(SEEDS[device]):
        shared, own = attention_batch(kind, device, seed)
        pages = attend(*in_other_pages(shared, own, seed))
        assert all(map(torch.equal, pages, attend(shared, own))), seed


@KINDS
def test_training_prefill_and_decode(kind: str, device: str) -> None:
    """The forward that keeps what gradients need, the one without, and each query alone. Lists end
    with -1 inside of their lengths, too."""
    for seed in range(SEEDS[device]):
        shared, own = attention_batch(kind, device, seed)
        prefill = attend(shared, own)
        longer = {"indices": pad(own["indices"], (0, 9), value=-1)}
        if "topk_length" in own:
            slot = torch.arange(longer["indices"].shape[1], device=device)
            longer["indices"].masked_fill_(slot >= own["topk_length"][:, None], -1)
            longer["topk_length"] = own["topk_length"] + 7
        for query in range(len(own["q"])):
            one = {name: x[query : query + 1] for name, x in (own | longer).items()}
            for decode, whole in zip(attend(shared, one), prefill, strict=True):
                assert torch.equal(decode[0], whole[query]), (seed, query)
        if kind.startswith("packed"):
            continue
        leaves = {"kv": shared["kv"], "extra_kv": shared.get("extra_kv"), "q": own["q"]}
        leaves = {name: x.clone().requires_grad_() for name, x in leaves.items() if x is not None}
        training = flashdsa.sparse_mla(**(shared | lists_of(own) | leaves))
        assert torch.equal(training, prefill[0]), seed
        training.sum().backward()
        assert all(leaf.grad is not None for leaf in leaves.values())


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
    kernels = ["mla_used_slots"] * packed
    assert [launched[:-1] for launched in names] == [tuple(kernels)]


@pytest.mark.parametrize(
    "kind",
    [
        "packed",
        *(pytest.param(f"packed {x}", marks=pytest.mark.slow) for x in ("sources", "blocks")),
    ],
)
def test_the_shares_of_a_list_on_hopper(kind: str) -> None:
    """CTAs of a cluster share a list: a query's bits alone, and in tables that slots without a row
    widen, among others."""
    shared, own = attention_batch(kind, "cpu", seed=5)
    shared["backend"] = "emulate-sm90"
    own = {name: x[:3].contiguous() for name, x in own.items() if not name.endswith("length")}
    own["indices"] = own["indices"][:, :300].contiguous()
    lists = [name for name in own if name.endswith("indices")]
    alone = attend(shared, {name: x[2:].contiguous() for name, x in own.items()})
    wide = {
        name: pad(pad(own[name], (0, 300), value=-1), (0, 400), value=1 << 30) for name in lists
    }
    for batch, single in zip(attend(shared, own | wide), alone, strict=True):
        assert torch.equal(batch[2], single[0])


def test_flashmlas_call_over_two_packed_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = partial(flashdsa.sparse_mla_fwd, backend="emulate-sm90")
    monkeypatch.setattr(flash_mla, "sparse_mla_fwd", forward)
    q = torch.zeros(2, 1, 64, 512, dtype=torch.bfloat16)
    cache = flashdsa.quantize_kv(torch.zeros(64, 512), kv_format="v4")[None, :, None]
    ids, recorder = torch.zeros(2, 1, 64, dtype=torch.int32), Recorder(H200)
    with running_on(recorder):
        flash_mla.flash_mla_with_kvcache(
            q, cache, None, None, 512, None, indices=ids, extra_k_cache=cache,
            extra_indices_in_kvcache=ids, enable_batch_invariant=True,
        )  # fmt: skip
    assert list(recorder.launched) == ["mla_used_slots", "mla_decode_v4_joined"]


def test_blackwell_refuses() -> None:
    q, kv = torch.zeros(1, 128, 576).bfloat16(), torch.zeros(1, 576).bfloat16()
    ids = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="batch_invariant: not supported"):
        flashdsa.sparse_mla_fwd(q, kv, ids, batch_invariant=True, backend="emulate-sm100")
