"""Adapters without queries, without keys and without slots; shapes stay, and nothing is read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashdsa.adapters import cudnn_dsa, deep_gemm, flash_mla, flashinfer, tilelang

EMPTY = pytest.mark.parametrize(
    ("queries", "keys", "slots"), [(0, 9, 4), (3, 0, 4), (3, 9, 0), (0, 0, 0)], ids=str
)
DSA = cudnn_dsa.DSA


def lists(*shape: int) -> Tensor:
    """Ids of which none names a row where there is no key."""
    return torch.zeros(shape, dtype=torch.int32)


def require_nothing(out: Tensor, lse: Tensor, queries: int) -> None:
    """No query, or O of nothing."""
    assert len(out) == queries and not out.any()
    assert lse.shape[:1] == (queries,) and lse.isinf().all()


@EMPTY
def test_flash_mla(queries: int, keys: int, slots: int) -> None:
    q, kv = torch.randn(queries, 2, 576).bfloat16(), torch.randn(keys, 1, 576).bfloat16()
    ids = lists(queries, 1, slots)
    out, largest, lse = flash_mla.flash_mla_sparse_fwd(q, kv, ids, 0.1)
    assert lse is not None and largest is not None and largest.isneginf().all()
    require_nothing(out, lse, queries)
    for packed in (False, True):
        dtype, width = (torch.uint8, 656) if packed else (torch.bfloat16, 576)
        cache = torch.zeros(keys // 9, 9, 1, width, dtype=dtype)
        out, lse = flash_mla.flash_mla_with_kvcache(
            q[:, None], cache, None, None, 512, flash_mla.get_mla_metadata()[0], indices=ids
        )
        assert out.shape == (queries, 1, 2, 512) and lse.shape == (queries, 2, 1)
        assert not out.any() and lse.isposinf().all()


@EMPTY
def test_flashinfer(queries: int, keys: int, slots: int) -> None:
    ids = lists(queries, slots)
    q, kv = torch.randn(queries, 2, 576), torch.randn(keys, 576)
    parts = q[..., :512], q[..., 512:], kv[:, :512], kv[:, 512:]
    out, lse = flashinfer.dsa_sparse_attention(*parts, ids, return_lse=True)
    require_nothing(out, lse, queries)
    decoded = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        q[:, None].bfloat16(), kv.bfloat16().view(keys // 9, 9, 576), None, 128, 512, 64,
        ids[:, None], None, 128, sparse_mla_top_k=slots or 4,
    )  # fmt: skip
    assert isinstance(decoded, Tensor) and decoded.shape == (queries, 1, 2, 512)
    assert not decoded.any()
    lengths = torch.zeros(queries, dtype=torch.int32)
    for best in (
        flashinfer.top_k_page_table_transform(torch.zeros(queries, keys), ids, lengths, 3),
        flashinfer.top_k_ragged_transform(torch.zeros(queries, keys), lengths, lengths, 3),
    ):
        assert best.shape == (queries, 3) and (best == -1).all()


@EMPTY
def test_cudnn(queries: int, keys: int, slots: int) -> None:
    q, kv = torch.randn(queries, 2, 576), torch.randn(keys, 576)
    ids = lists(queries, slots)
    got = DSA.sparse_attention_forward_wrapper(q, kv, ids, indexer_topk=slots // 2)
    require_nothing(got.out, got.lse, queries)
    gradients = DSA.sparse_attention_backward_wrapper(
        q, kv, got.out, torch.randn_like(got.out), got.lse, torch.zeros(2), ids
    )
    assert gradients.dq.shape == q.shape and gradients.dkv.shape == kv.shape
    assert not any(gradients[name].any() for name in ("dq", "dkv", "d_sink"))
    best = DSA.indexer_top_k_wrapper(
        torch.zeros(queries, keys), torch.zeros(queries, dtype=torch.int32), 3
    )
    assert best.indices.shape == (queries, 3) and (best.indices == -1).all()


@EMPTY
def test_deep_gemm(queries: int, keys: int, slots: int) -> None:
    q = torch.zeros(queries, 1, 2, 128).to(torch.float8_e4m3fn)
    cache = torch.zeros(keys // 9, 64, 1, 132, dtype=torch.uint8)
    lengths, weights = torch.zeros(queries, dtype=torch.int32), torch.randn(queries, 2)
    table = lists(queries, slots)
    scores = deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lengths, table, None, 64)
    assert scores.shape == (queries, 64) and scores.isneginf().all()
    best = deep_gemm.fp8_paged_mqa_topk(q, cache, weights, lengths, table, 5)
    assert best.shape == (queries, 5) and (best == -1).all()


@EMPTY
def test_tilelang(queries: int, keys: int, slots: int) -> None:
    ids = lists(queries, slots)
    positions = torch.arange(queries, dtype=torch.int32)
    found = tilelang.indices_from_tilelang(ids, positions, num_keys=keys)
    assert found.shape == ids.shape and (keys > 0 or (found == -1).all())
