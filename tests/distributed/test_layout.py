"""Layouts without communication: every token on one rank, tables that lead back, balance."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _load_balancer
from torch.testing._internal.distributed.fake_pg import FakeStore

from flashdsa.distributed import SequenceLayout, context_parallel_sparse_mla
from flashdsa.errors import ArgumentTypeError, ArgumentValueError

PAGE = 64


def _made(kind: str, seq_len: int, num_ranks: int, cuts: list[int]) -> list[SequenceLayout]:
    """The layout of every rank; a packed one has its documents cut at `cuts` (shares of 1,000)."""
    places = [(rank, num_ranks) for rank in range(num_ranks)]
    if kind == "packed":
        inner = {cut * seq_len // 1000 for cut in cuts} - {0, seq_len}
        bounds = (0, *sorted(inner), seq_len)
        return [SequenceLayout.packed(bounds, place) for place in places]
    if kind == "interleaved":
        return [SequenceLayout.interleaved(seq_len, place, block=2 * PAGE) for place in places]
    return [getattr(SequenceLayout, kind)(seq_len, place) for place in places]


@given(
    kind=st.sampled_from(["zigzag", "contiguous", "interleaved", "packed"]),
    seq_len=st.integers(1, 3000),
    num_ranks=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 1000), max_size=6),
)
def test_tables_lead_to_tokens_and_back(
    kind: str, seq_len: int, num_ranks: int, cuts: list[int]
) -> None:
    layouts = _made(kind, seq_len, num_ranks, cuts)
    one = layouts[0]
    gathered = torch.cat([layout.positions for layout in layouts])
    assert torch.equal(gathered, one.tokens)
    assert gathered[gathered >= 0].sort().values.tolist() == list(range(seq_len))
    tokens = torch.arange(seq_len)
    assert torch.equal(gathered[one.key_row(tokens).long()], tokens)
    assert torch.equal(one.token_of(one.key_row(tokens)), tokens.int())
    # The block table: token t of a document lies in page table[t // 64] at offset t % 64.
    for document, (start, end) in enumerate(zip(one.cu_seqlens, one.cu_seqlens[1:], strict=False)):
        place = torch.arange(end - start)
        rows = one.block_table[document, place // PAGE] * PAGE + place % PAGE
        assert torch.equal(rows, one.key_row(place + start))
    for layout in layouts:
        assert layout.num_local % PAGE == 0 and layout.num_local == one.num_local
        real = layout.positions >= 0
        starts = torch.tensor(layout.cu_seqlens)[layout.documents]
        assert torch.equal(layout.seq_lens[real], (layout.positions - starts + 1).int()[real])
        assert (layout.seq_lens[~real] == 0).all()
        assert torch.equal(layout.shard(tokens, padding=-1), layout.positions)
        assert layout.fingerprint == one.fingerprint
    assert torch.equal(one.restore(gathered), tokens)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_zigzag_has_torchs_order(num_ranks: int) -> None:
    """So that buffers which torch's `context_parallel` shards fit beside ours."""
    seq_len = num_ranks * 2 * PAGE * 3
    balancer = _load_balancer._HeadTailLoadBalancer(seq_len, num_ranks, "cpu")
    order = balancer._generate_indices(restore=False).flatten()
    assert torch.equal(SequenceLayout.zigzag(seq_len, (0, num_ranks)).tokens, order.long())


def _imbalance(layouts: list[SequenceLayout]) -> float:
    """The busiest rank's share of the indexer's scores, in means."""
    work = torch.tensor([float(layout.seq_lens.double().sum()) for layout in layouts])
    return float(work.max() / work.mean())


@pytest.mark.parametrize("num_ranks", [2, 8, 32])
def test_balance(num_ranks: int) -> None:
    seq_len = 1 << 17
    places = [(rank, num_ranks) for rank in range(num_ranks)]
    assert _imbalance([SequenceLayout.zigzag(seq_len, place) for place in places]) < 1.001
    contiguous = _imbalance([SequenceLayout.contiguous(seq_len, place) for place in places])
    assert contiguous == pytest.approx(2 - 1 / num_ranks, rel=1e-3)
    documents = (0, 70_000, 70_100, 90_000, seq_len)
    assert _imbalance([SequenceLayout.packed(documents, place) for place in places]) < 1.003


def test_interleaved_blocks_go_round() -> None:
    layout = SequenceLayout.interleaved(1024, (1, 2), block=128)
    assert layout.positions[:128].tolist() == list(range(128, 256))
    assert layout.positions[128] == 128 * 3


def test_shards_of_other_dimensions() -> None:
    layout = SequenceLayout.zigzag(200, (1, 2))
    x = torch.randn(3, 200, 2)
    assert torch.equal(layout.shard(x, dim=1)[2], layout.shard(x[2]))


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.bool]
)
def test_rows_of_one_byte(dtype: torch.dtype) -> None:
    """torch neither fills nor gathers some of them."""
    layouts = [SequenceLayout.zigzag(200, (rank, 2)) for rank in range(2)]
    x = torch.randint(0, 2, (200, 8), dtype=torch.uint8).view(dtype)
    parts = [layout.shard(x) for layout in layouts]
    assert all(part.dtype == dtype for part in parts)
    gathered = torch.cat([part.view(torch.uint8) for part in parts])
    assert not gathered[layouts[0].tokens < 0].any()
    found = layouts[0].restore(gathered.view(dtype))
    assert found.dtype == dtype and torch.equal(found.view(torch.uint8), x.view(torch.uint8))


def test_padding_of_fp8() -> None:
    layout = SequenceLayout.zigzag(200, (0, 2))
    local = layout.shard(torch.zeros(200, 4).to(torch.float8_e4m3fn), padding=-1.5)
    assert (local[layout.positions < 0].float() == -1.5).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SequenceLayout.zigzag(0, (0, 2)), "seq_len: expected at least 1; got 0"),
        (lambda: SequenceLayout.zigzag(64, (2, 2)), "mesh: expected a rank in"),
        (lambda: SequenceLayout.interleaved(64, (0, 2), block=96), "block: expected a multiple"),
        (lambda: SequenceLayout.packed((0, 5, 5), (0, 2)), "cu_seqlens: expected"),
        (lambda: SequenceLayout.packed((0,), (0, 2)), "cu_seqlens: expected"),
        (lambda: SequenceLayout.zigzag(64, (0, 2)).shard(torch.zeros(65)), "tensor: expected 64"),
        (lambda: SequenceLayout.zigzag(64, (0, 2)).unshard(torch.zeros(128)), "layout: expected"),
    ],
)
def test_errors(call: object, message: str) -> None:
    with pytest.raises(ArgumentValueError) as error:
        call()  # type: ignore[operator]
    assert str(error.value).startswith(message)


def test_a_mesh_that_is_none() -> None:
    with pytest.raises(ArgumentTypeError, match="mesh: expected a DeviceMesh or a ProcessGroup"):
        SequenceLayout.zigzag(64, "cp")  # type: ignore[arg-type]


RANK, NUM_RANKS = 7, 4096
SEQ_LEN = 1 << 20


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=NUM_RANKS)
    yield init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("cp",))
    dist.destroy_process_group()


def test_a_million_tokens(mesh: DeviceMesh) -> None:
    layout = SequenceLayout.zigzag(SEQ_LEN, mesh)
    assert layout.num_local == 2 * 2 * 64  # 2 chunks of 2 pages
    assert layout.positions[0] == RANK * 128
    assert layout.positions[-1] == SEQ_LEN - 1 - RANK * 128
    with FakeTensorMode():
        q = torch.empty(layout.num_local, 128, 576, dtype=torch.bfloat16, requires_grad=True)
        kv = torch.empty(layout.num_local, 576, dtype=torch.bfloat16, requires_grad=True)
        indices = torch.empty(layout.num_local, 2048, dtype=torch.int32)
        for options in ({}, {"grad_wire": "bf16"}):  # the second sums by hand, rank after rank
            out = context_parallel_sparse_mla(q, kv, indices, mesh, **options)
            assert out.shape == (layout.num_local, 128, 512)
            out.backward(torch.empty_like(out))
            assert q.grad is not None and q.grad.shape == q.shape
            assert kv.grad is not None and kv.grad.shape == kv.shape


def test_a_real_call(mesh: DeviceMesh) -> None:
    """The gathered rows are 4,096 shards, whatever is in them."""
    layout = SequenceLayout.zigzag(SEQ_LEN, mesh)
    q = torch.randn(2, 2, 8, requires_grad=True)
    kv = torch.randn(layout.num_local, 8, requires_grad=True)
    rows = layout.key_row(torch.tensor([[0, SEQ_LEN - 1, -1], [5, 6, SEQ_LEN]]))
    assert rows[1, 2] == -1 and int(rows.max()) < layout.num_local * NUM_RANKS
    out = context_parallel_sparse_mla(q, kv, rows, mesh, d_v=4)
    out.sum().backward()
    assert out.shape == (2, 2, 4) and kv.grad is not None and kv.grad.shape == kv.shape
