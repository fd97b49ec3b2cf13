"""vLLM's backends on tensors, without vLLM: stand-ins for its base classes and its batches.

They run in vLLM's own classes in test_vllm_construction.py.
"""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.integrations import vllm
from tests.support.formulas import assert_close, attention
from tests.support.vllm_batches import require_best, stub_registry
from tests.support.vllm_stand_ins import ATTENTION, HEADS, TOPK, Indexer, layer_of

PAGES = 20


@pytest.mark.parametrize("columns", [576, 512])
@pytest.mark.parametrize("split", [False, True], ids=["one query", "latent and RoPE apart"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_kernel_method_reads_blocks_that_lie_apart(
    made: Any, split: bool, packed: bool, columns: int
) -> None:
    """Packed rows have 576 columns, of which a model without RoPE leaves the last ones zero."""
    torch.manual_seed(2)
    values = torch.randn(3, 64, columns)
    memory = torch.full((3, 96, columns), torch.nan)
    if packed:
        rows = torch.cat((values, torch.zeros(3, 64, 576 - columns)), dim=2).bfloat16()
        coded = flashdsa.quantize_kv(rows.flatten(0, 1))
        memory = torch.full((3, 96, 656), 255, dtype=torch.uint8)
        memory[:, :64] = coded.view(3, 64, 656)
        values = flashdsa.read_kv_cache(coded, torch.arange(192)).view(3, 64, 576).float()
        values = values[..., :columns]
    else:
        values = values.bfloat16().float()
        memory[:, :64] = values
        memory = memory.bfloat16()
    cache = memory[:, :64]
    q = torch.randn(3, 4, columns).bfloat16()
    slots = torch.tensor([[0, 100, 63], [200, 97, 70], [80, 1, 2]], dtype=torch.int32)
    counts = torch.tensor([3, 2, 0], dtype=torch.int32)
    kind = made.backend.FlashDsaMLASparseImpl
    layer = layer_of(kind, "fp8_ds_mla" if packed else "auto", columns)
    made.workspace.is_locked = True
    given = (q[..., :512], q[..., 512:]) if split else q
    out, lse = layer._forward_mqa_kernel(
        given, cache, slots, counts, layer=None, block_size=64, is_decode=True
    )
    flat = torch.full((3, 96, columns), torch.nan)
    flat[:, :64] = values
    chosen = [[0, 100, 63], [200, 97], []]
    expected, expected_lse = attention(q.float(), flat.flatten(0, 1), chosen, 0.2)
    expected_lse[2] = -torch.inf
    assert_close(out.float(), expected, 2e-2)
    assert_close(lse, expected_lse, 2e-2 if packed else 1e-5)
    assert layer.lse_base_on_e
    layer.need_to_return_lse_for_decode = False
    assert layer._forward_mqa_kernel(
        given, cache, slots, counts, layer=None, block_size=64, is_decode=True
    )[1] is None  # fmt: skip


def test_vllm_is_told_what_the_backends_serve(made: Any) -> None:
    backend = made.backend
    for name, served in (
        (vllm.NAME, backend.FlashDsaMLASparseBackend),
        (vllm.INDEXER_NAME, backend.FlashDsaMLASparseIndexerBackend),
    ):
        assert served.get_name() == name
        assert vllm.CLASSES[name] == f"{served.__module__}.{served.__name__}"
        assert served.is_mla() and served.is_sparse()
        assert served.get_supported_head_sizes() == [576, 512]
        assert served.get_supported_kernel_block_sizes() == [("multiple of", 64)]
        assert served.customize_spec("spec") == ("aligned", "spec")
        for major, minor in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
            here = SimpleNamespace(major=major, minor=minor)
            assert served.supports_compute_capability(here) == (major >= 8)
        for cache in (None, *served.supported_kv_cache_dtypes):
            assert served.supports_combination(576, torch.bfloat16, cache, 64, True) is None
        reason = served.supports_combination(576, torch.bfloat16, "fp8", 64, True)
        assert reason == f"{name} takes --kv-cache-dtype fp8_ds_mla, not fp8"
    with pytest.raises(NotImplementedError, match=r"kv_lora_rank: .* 512 columns of V; got 448"):
        layer_of(backend.FlashDsaMLASparseImpl, kv_lora_rank=448)


def test_batches_of_equal_decodes_are_captured(made: Any) -> None:
    served = made.backend.FlashDsaMLASparseBackend.get_builder_cls()
    assert served._cudagraph_support == 2
    assert served.metadata_cls is made.backend.FlashDsaMLASparseMetadata
    builder = served()
    assert builder.ordered_by == (1, True) and builder.supports_draft_decode_metadata_update
    batch = SimpleNamespace(query_start_loc="starts", req_id_per_token="requests")
    for batch.num_decode_tokens in (0, 5):
        builder.update_draft_decode_metadata(batch)
    assert made.left == [("starts", "requests", 5, 5)]


@pytest.mark.parametrize("slack", [0, 1, 500])
@pytest.mark.parametrize("rows_at_once", [1, 160, 10**6])
def test_prompts_of_a_packed_cache_read_rows_unpacked_once(
    made: Any, monkeypatch: pytest.MonkeyPatch, rows_at_once: int, slack: int
) -> None:
    """Decodes go vLLM's way; each prompt's positions are rows of its own, in parts or together.
    The host may know the lengths as upper bounds only, `slack` above each."""
    monkeypatch.setattr(made.backend, "ROWS_AT_ONCE", rows_at_once)
    monkeypatch.setattr(made.backend, "ROWS_OF_A_PART", 100)
    generator = torch.Generator().manual_seed(3)
    lengths, queries = torch.tensor([70, 3, 90, 64, 130]), torch.tensor([1, 2, 5, 1, 30])
    starts = torch.tensor([0, *queries.tolist()]).cumsum(0).int()
    tables = torch.randperm(15, generator=generator).view(5, 3).int()
    coded = flashdsa.quantize_kv(torch.randn(15 * 64, 576, generator=generator).bfloat16())
    rows = flashdsa.read_kv_cache(coded, torch.arange(len(coded)))
    cache = torch.full((15, 96, 656), 255, dtype=torch.uint8)
    cache[:, :64] = coded.view(15, 64, 656)
    owners = torch.arange(5).repeat_interleave(queries)
    ids = torch.randint(-1, 130, (len(owners), TOPK), generator=generator).int()
    ids = torch.where(ids < lengths[owners, None], ids, -1)
    batch = SimpleNamespace(
        num_decodes=2, num_decode_tokens=3, num_prefills=3, block_size=64, block_table=tables,
        seq_lens=lengths.int(), seq_lens_cpu_upper_bound=lengths + slack, query_start_loc=starts,
        query_start_loc_cpu=starts, prompts=(),
    )  # fmt: skip
    builder = made.backend.FlashDsaMLASparseBuilder()
    parts = len(builder.build(0, batch).prompts)
    assert parts == {1: 3, 160: 2 if slack < 4 else 3}.get(rows_at_once, 1)
    layer = layer_of(made.backend.FlashDsaMLASparseImpl, "fp8_ds_mla")
    made.workspace.is_locked = True
    layer.topk_indices_buffer = torch.cat((ids, ids))
    q = torch.randn(len(owners), 4, 576, generator=generator).bfloat16() / 4
    out, lse = layer.forward_mqa((q[..., :512], q[..., 512:]), cache[:, :64], batch, None)
    chosen = [
        [int(tables[owner, i // 64]) * 64 + i % 64 for i in row if i >= 0]
        for owner, row in zip(owners.tolist(), ids.tolist(), strict=True)
    ]
    expected, _ = attention(q.float(), rows.float(), chosen, 0.2)
    assert lse is None and not out[:3].any()
    assert_close(out[3:].float(), expected[3:], 2e-2)
    # Drafts and decodes of a batch with prompts come alone where prompts are dense.
    assert layer.forward_mqa((q[:3], q[:3]), cache, batch, None)[1] == "lse"
    batch.num_prefills, batch.prompts = 0, ()
    assert builder.build_for_cudagraph_capture(batch).prompts == ()


def test_vllm_finds_the_backends_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each process: one that is given a member first, and loads plugins afterwards, too."""
    known = stub_registry(monkeypatch)
    for _ in range(2):
        vllm.register()
    found = {name: one.value for name, one in known.__members__.items()}
    assert found == {"THEIRS": "theirs", **vllm.CLASSES}
    pickled = [pickle.dumps(known[name]) for name in vllm.CLASSES]
    fresh = stub_registry(monkeypatch)
    assert [pickle.loads(one) for one in pickled] == [fresh[name] for name in vllm.CLASSES]
    vllm.register()


# The indexer


class Shard:
    """Rows of prompts from `start` on are this rank's; the exchange is noted."""

    def __init__(self, start: int) -> None:
        self.start, self.exchanged = start, 0

    def narrow(self, chunk: Any) -> Any:
        begin = max(chunk.token_start, self.start)
        if begin >= chunk.token_end:
            return None
        skipped = begin - chunk.token_start
        bounds = chunk.cu_seqlen_ks[skipped:], chunk.cu_seqlen_ke[skipped:]
        return begin, chunk.token_end, *bounds

    def exchange_topk(self, ids: Tensor, width: int) -> None:
        self.exchanged = width


def batch_of(next_n: int, flat: bool, shard: Shard | None = None) -> tuple[Any, list[int], Tensor]:
    """A batch of three decodes and three prompts, as vLLM describes it; each token's keys, and its
    request's pages."""
    generator = torch.Generator().manual_seed(4)
    lengths, queries = [70, 5, 0, 130, 1, 64], [next_n, next_n, next_n, 30, 1, 4]
    tables = torch.zeros(6, 3, dtype=torch.int32)
    order = torch.randperm(PAGES, generator=generator).int()
    for request, length in enumerate(lengths):
        pages = -(-length // 64)
        tables[request, :pages], order = order[:pages], order[pages:]
    seen = [
        max(length - count + 1 + j, 0)
        for length, count in zip(lengths, queries, strict=True)
        for j in range(count)
    ]
    owners = torch.arange(6).repeat_interleave(torch.tensor(queries))
    tokens = 3 * next_n
    seq_lens = torch.tensor(seen[:tokens], dtype=torch.int32)
    decode = SimpleNamespace(
        seq_lens=seq_lens.view(-1, 1) if flat else seq_lens.view(3, next_n),
        block_table=tables[owners[:tokens]] if flat else tables[:3],
        decode_lens=torch.tensor([1] * tokens if flat else [next_n] * 3),
        requires_padding=False,
    )
    # The first prompt's queries come in two chunks, of which the second finds its keys.
    chunks = []
    for requests, begin, end in (((3,), 0, 20), ((3,), 20, 30), ((4, 5), 30, 35)):
        sizes = torch.tensor([0, *(lengths[one] for one in requests)]).cumsum(0).int()
        own = owners[tokens + begin : tokens + end] - requests[0]
        starts = sizes[own]
        ends = starts + torch.tensor(seen[tokens + begin : tokens + end]).int()
        chunks.append(
            SimpleNamespace(
                block_table=tables[list(requests)], cu_seq_lens=sizes, cu_seqlen_ks=starts,
                cu_seqlen_ke=ends, total_seq_lens=int(sizes[-1]), skip_kv_gather=begin == 20,
                token_start=tokens + begin, token_end=tokens + end,
            )
        )  # fmt: skip
    described = SimpleNamespace(
        num_decodes=3, num_decode_tokens=tokens, num_prefills=3, decode=decode,
        prefill=SimpleNamespace(chunks=chunks, shard=shard),
    )  # fmt: skip
    return described, seen, tables[owners]


def operands(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """A cache with blocks that lie apart, queries and weights."""
    generator = torch.Generator().manual_seed(5)
    memory = torch.zeros(PAGES, 2, 64, 132, dtype=torch.uint8)
    cache = memory[:, 0]
    flashdsa.write_index_k_cache(
        torch.randn(PAGES * 64, 128, generator=generator),
        torch.arange(PAGES * 64),
        cache.unsqueeze(2),
    )
    q = torch.randn(num_tokens, HEADS, 128, generator=generator)
    return cache, *flashdsa.quantize_index_q(q, torch.randn(num_tokens, HEADS, generator=generator))


def serve(made: Any) -> Indexer:
    """A layer with an index, whose cache is the engine's."""
    indexer = Indexer()
    made.layers["layer.k_cache"] = indexer.k_cache
    layer_of(made.backend.FlashDsaMLASparseIndexerImpl, indexer=indexer)
    return indexer


def run(
    made: Any, described: Any, cache: Tensor, q: Tensor, weights: Tensor, **others: Any
) -> tuple[Any, Tensor]:
    """Call the function that vLLM's layers call, with its arguments, or with `others`."""
    made.batch = {"layer.k_cache": described, **(made.batch or {})}
    ids = torch.full((len(q) + 2, TOPK), -7, dtype=torch.int32)
    called = sys.modules[ATTENTION].sparse_attn_indexer  # type: ignore[attr-defined]
    named = {
        "skip_k_cache_insert": True, "use_pcp": False, "pcp_shard_decode_requests": False,
        "dense_mha_metadata_layer_name": "layer", "dcp_rank": 0, "dcp_world_size": 1,
        "cp_kv_cache_interleave_size": 1, "skip_topk_buffer_clear": True, "topk_backend": "auto",
    }  # fmt: skip
    given = (
        torch.zeros(len(q), 8), "layer.k_cache", cache, q, None, None, weights, 128, "ue8m0", TOPK,
        128, 256, 512, ids,
    )  # fmt: skip
    got = called(*given, **(named | others))
    return got, ids


@pytest.mark.parametrize(("next_n", "flat"), [(1, True), (2, False), (3, True), (4, False)])
def test_the_indexer_chooses_for_decodes_and_prompts(made: Any, next_n: int, flat: bool) -> None:
    serve(made)
    serve(made)
    layer_of(made.backend.FlashDsaMLASparseIndexerImpl, indexer=None)
    described, seen, tables = batch_of(next_n, flat)
    inputs = operands(len(seen))
    got, ids = run(made, described, *inputs)
    assert got is ids and not made.left
    assert (ids[len(seen) :] == -7).all()
    require_best(ids[: len(seen)], seen, tables, *inputs)


def test_the_indexer_chooses_for_its_share_of_the_prompts(made: Any) -> None:
    """Of a tensor-parallel group's prompts a rank has some rows, from within the second chunk."""
    serve(made)
    shard = Shard(start=3 + 25)
    described, seen, tables = batch_of(1, True, shard)
    inputs = operands(len(seen))
    _, ids = run(made, described, *inputs)
    assert shard.exchanged == TOPK and (ids[3:28] == -7).all()
    mine = [*range(3), *range(28, len(seen))]
    cache, q, weights = inputs
    require_best(ids[mine], [seen[i] for i in mine], tables[mine], cache, q[mine], weights[mine])


def test_what_the_indexer_leaves_to_vllm(made: Any) -> None:
    """A run without a batch; prompts with dense attention; decodes of unequal lengths."""
    serve(made)
    described, seen, _ = batch_of(2, False)
    inputs = operands(len(seen))
    assert run(made, None, *inputs)[0] == "vLLM's"
    described.decode.requires_padding = True
    assert run(made, described, *inputs)[0] == "vLLM's"
    described.decode.requires_padding, described.num_decode_tokens = False, 5
    assert run(made, described, *inputs)[0] == "vLLM's"
    described.num_decode_tokens = 15  # 5 a request: more than kernels have
    assert run(made, described, *inputs)[0] == "vLLM's"
    described.num_decode_tokens = 0
    dense = SimpleNamespace(prefill=SimpleNamespace(use_dense_mha=True), num_decode_tokens=0)
    made.batch = {"layer": dense}
    assert run(made, described, *inputs)[0] == "vLLM's"
    assert len(made.left) == 5 and all(given[1] == "layer.k_cache" for given in made.left)
    made.batch["layer"].num_decode_tokens = 1
    assert isinstance(run(made, described, *inputs)[0], Tensor)


def test_what_the_indexer_refuses_before_a_server_starts(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(Indexer):
        head_dim = 64

    kind = made.backend.FlashDsaMLASparseIndexerImpl
    with pytest.raises(
        NotImplementedError, match=r"serves DeepseekV32Indexer .* got Other with 64"
    ):
        layer_of(kind, indexer=Other())
    made.parallel.decode_context_parallel_size = 2
    with pytest.raises(NotImplementedError, match="decode_context_parallel_size 1; got 2"):
        layer_of(kind, indexer=Indexer())
    made.parallel.decode_context_parallel_size = 1
    monkeypatch.setenv("FLASHDSA_BACKEND", "emulate-sm90")
    monkeypatch.setattr(Indexer, "topk_tokens", 4096)
    with pytest.raises(NotImplementedError, match="topk: takes 1 to 2048; got 4096"):
        layer_of(kind, indexer=Indexer())
    assert sys.modules[ATTENTION].sparse_attn_indexer is made.theirs  # type: ignore[attr-defined]
