"""Slots and lengths in int64, as torch.topk returns them: converted, no value wraps around."""

from __future__ import annotations

import torch

import flashdsa
from tests.ops import inputs

BEYOND_INT32 = [2**31, 2**32, 2**32 + 1, 2**63 - 1, -(2**31) - 1, -(2**32) + 2, -(2**63)]


def test_int64_gives_what_int32_gives() -> None:
    x = inputs.attention(torch.float32)
    q, kv = x.q.requires_grad_(), x.kv.requires_grad_()
    results = []
    for dtype in (torch.int32, torch.int64):
        indices, length = x.indices.to(dtype)[:, None], x.topk_length.to(dtype)
        out, lse = flashdsa.sparse_mla_fwd(q, kv, indices, d_v=x.d_v, topk_length=length)
        by_autograd = torch.autograd.grad(out.sum(), (q, kv))
        dO = torch.ones_like(out)
        dq, dkv = flashdsa.mla_bwd(q, kv, dO, lse, out, indices, topk_length=length)
        results.append([out, lse, *by_autograd, dq, dkv])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_values_that_int32_does_not_hold_are_invalid() -> None:
    """Cut to 32 bits, 2**32 + 1 would name row 1."""
    x = inputs.attention(torch.float32, num_queries=1)
    wanted = torch.tensor([[1, 2]])
    outside = torch.tensor([[1, *BEYOND_INT32, 2]])
    expected = flashdsa.sparse_mla(x.q, x.kv, wanted, d_v=x.d_v)
    got = flashdsa.sparse_mla(x.q, x.kv, outside, d_v=x.d_v)
    torch.testing.assert_close(got, expected)


def test_lengths_beyond_int32_are_clamped() -> None:
    x = inputs.attention(torch.float32, num_queries=3)
    indices = torch.tensor([[1, 2]] * 3)
    length = torch.tensor([2**32, -(2**32) + 1, 1])
    got = flashdsa.sparse_mla(x.q, x.kv, indices, d_v=x.d_v, topk_length=length)
    clamped = torch.tensor([2, 0, 1], dtype=torch.int32)
    expected = flashdsa.sparse_mla(x.q, x.kv, indices, d_v=x.d_v, topk_length=clamped)
    assert torch.equal(got, expected)
    assert not got[1].any()
