"""Rank 7 of 4,096 in one process: torch's fake process group moves nothing and checks sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from flashdsa.distributed import SequenceLayout, context_parallel_sparse_mla

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
