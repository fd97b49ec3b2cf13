"""DeepGEMM's index scores: ranges, lengths, shapes and strides, with NaN wherever none may look."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.adapters import deep_gemm
from tests.support.formulas import assert_close, index_scores

E4M3 = torch.float8_e4m3fn


def _e4m3(*shape: int) -> Tensor:
    return torch.randn(*shape).to(E4M3)


def _ragged(num_keys: int) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    keys, scales = _e4m3(num_keys, 128), torch.rand(num_keys)
    start = torch.tensor([0, 0, 70, 64, 130, 200], dtype=torch.int32)
    end = torch.tensor([1, 150, 90, 64, num_keys, num_keys], dtype=torch.int32)
    return _e4m3(6, 4, 128), (keys, scales), torch.randn(6, 4), start, end


def test_ragged_scores() -> None:
    """-inf outside each range."""
    q, (keys, scales), weights, start, end = _ragged(215)
    got = deep_gemm.fp8_mqa_logits(q, (keys, scales), weights, start, end)
    key = torch.arange(215)
    inside = (key >= start[:, None]) & (key < end[:, None])
    expected = index_scores(q, keys, scales, weights).masked_fill(~inside, -torch.inf)
    assert_close(got, expected, 1e-5)
    assert got.shape == (6, 215) and got.stride() == (256, 1)
    by_other_names = deep_gemm.fp8_mqa_logits(q, (keys, scales), weights, ks=start, ke=end)
    assert torch.equal(by_other_names, got)


def test_ragged_scores_with_nan_keys_outside_the_ranges() -> None:
    q, (keys, scales), weights, _, _ = _ragged(215)
    start = torch.full((6,), 66, dtype=torch.int32)
    end = torch.full((6,), 140, dtype=torch.int32)
    expected = index_scores(q, keys, scales, weights)
    scales[:66], scales[140:] = torch.nan, torch.nan
    got = deep_gemm.fp8_mqa_logits(q, (keys, scales), weights, start, end)
    assert_close(got[:, 66:140], expected[:, 66:140], 1e-5)
    assert got[:, :66].isneginf().all() and got[:, 140:].isneginf().all()


def test_compressed_ragged_scores_begin_at_each_rows_first_key() -> None:
    q, kv, weights, start, end = _ragged(215)
    full = deep_gemm.fp8_mqa_logits(q, kv, weights, start, end)
    got = deep_gemm.fp8_mqa_logits(q, kv, weights, start, end, False, 160)
    rounded = deep_gemm.fp8_fp4_mqa_logits(
        (q, None), kv, weights, start, end, False, 160, torch.bfloat16
    )
    assert torch.equal(rounded, got.bfloat16()) and rounded.stride(0) % 512 == 0
    assert got.shape == (6, 160) and got.stride(0) % 256 == 0
    for row, (first, last) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        count = max(0, last - first)
        assert torch.equal(got[row, :count], full[row, first : first + count])
        assert got[row, count:].isneginf().all()
    with pytest.raises(ValueError, match="clean_logits"):
        deep_gemm.fp8_mqa_logits(q, kv, weights, start, end, max_seqlen_k=160)


def test_fewer_dims_are_padded_with_zeros() -> None:
    q, (keys, scales), weights, start, end = _ragged(215)
    wide = q.clone()
    wide.view(torch.uint8)[..., 64:] = 0
    expected = deep_gemm.fp8_mqa_logits(wide, (keys, scales), weights, start, end)
    kv = (keys[:, :64].contiguous(), scales)
    got = deep_gemm.fp8_fp4_mqa_logits((q[..., :64].contiguous(), None), kv, weights, start, end)
    assert torch.equal(got, expected)


def test_no_key_and_no_query() -> None:
    q, (keys, scales), weights, start, end = _ragged(215)
    nothing = deep_gemm.fp8_mqa_logits(q, (keys[:0], scales[:0]), weights, start * 0, end * 0)
    assert nothing.shape == (6, 0)
    compressed = deep_gemm.fp8_mqa_logits(
        q, (keys[:0], scales[:0]), weights, start * 0, end * 0, False, 3
    )
    assert compressed.shape == (6, 3) and compressed.isneginf().all()
    none = deep_gemm.fp8_mqa_logits(q[:0], (keys, scales), weights[:0], start[:0], end[:0])
    assert none.shape == (0, 215)


def _paged(next_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """3 sequences on 8 pages; tokens from each length on have NaN scales."""
    torch.manual_seed(2)
    lengths = torch.tensor([130, 64, 3], dtype=torch.int32)
    table = torch.tensor([[5, 1, 7], [2, 8, 9], [0, -1, -1]], dtype=torch.int32)
    cache = torch.zeros(8, 64, 1, 132, dtype=torch.uint8)
    flashdsa.write_index_k_cache(torch.randn(512, 128), torch.arange(512), cache)
    scales = cache.view(8, -1)[:, 8192:].view(torch.float32)
    scales[7, 2:], scales[0, 3:], scales[6] = torch.nan, torch.nan, torch.nan
    return _e4m3(3, next_n, 4, 128), cache, torch.randn(3 * next_n, 4), lengths, table


def _expected(q: Tensor, cache: Tensor, weights: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
    rows = q.flatten(0, 1)
    out = torch.full((len(rows), 192), -torch.inf, dtype=torch.float64)
    for row, length in enumerate(lengths.flatten().tolist()):
        t = torch.arange(length)
        slots = table[row // q.shape[1], t // 64] * 64 + t % 64
        keys, scales = flashdsa.read_index_k_cache(cache, slots)
        one = slice(row, row + 1)
        out[row, :length] = index_scores(rows[one], keys, scales, weights[one])[0]
    return out


@pytest.mark.parametrize("next_n", [1, 2])
def test_paged_scores(next_n: int) -> None:
    q, cache, weights, lengths, table = _paged(next_n)
    metadata = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, deep_gemm.get_num_sms())
    assert metadata.shape == (deep_gemm.get_num_sms() + 1, 2) and metadata.dtype == torch.int32
    of_rows = lengths[:, None] - next_n + 1 + torch.arange(next_n, dtype=torch.int32)
    expected = _expected(q, cache, weights, of_rows, table)
    for context_lens in (of_rows, lengths):
        got = deep_gemm.fp8_paged_mqa_logits(q, cache, weights, context_lens, table, metadata, 192)
        assert_close(got, expected, 1e-5)
        assert got.stride(0) % 256 == 0
    rounded = deep_gemm.fp8_fp4_paged_mqa_logits(
        (q, None), cache, weights, lengths, table, metadata, 192, logits_dtype=torch.bfloat16
    )
    assert torch.equal(rounded, got.bfloat16())


@pytest.mark.parametrize("ids", ["slot", "position"])
def test_paged_topk_is_of_the_scores(ids: str) -> None:
    q, cache, weights, lengths, table = _paged(2)
    got = deep_gemm.fp8_paged_mqa_topk(q, cache, weights, lengths, table, 40, ids=ids)
    scores = deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lengths, table, None, 192)
    of_rows = (lengths[:, None] + torch.tensor([-1, 0])).flatten().to(torch.int32)
    best = flashdsa.topk_indices(scores.contiguous(), of_rows, 40)
    if ids == "slot":
        pages = table.repeat_interleave(2, dim=0).gather(1, best.clamp_min(0).long() // 64)
        best = torch.where(best < 0, best, pages * 64 + best % 64)
    assert torch.equal(got, best)


def test_rows_of_other_requests_and_empty_ones() -> None:
    q, cache, weights, lengths, table = _paged(1)
    request = torch.tensor([2, 0, 0], dtype=torch.int32)
    context_lens = torch.tensor([[3], [130], [0]], dtype=torch.int32)
    got = deep_gemm.fp8_paged_mqa_logits(
        q, cache, weights, context_lens, table, None, 192, indices=request
    )
    assert_close(got, _expected(q, cache, weights, context_lens, table[request.long()]), 1e-5)
    nothing = deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lengths * 0, table, None, 192)
    assert nothing.isneginf().all()


def test_what_is_refused_is_named() -> None:
    q, kv, weights, start, end = _ragged(215)
    with pytest.raises(NotImplementedError, match=r"q: .*float8_e4m3fn.*bfloat16"):
        deep_gemm.fp8_mqa_logits(q.bfloat16(), kv, weights, start, end)
    with pytest.raises(NotImplementedError, match=r"q: .*tuple"):
        deep_gemm.fp8_mqa_logits((q, start), kv, weights, start, end)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="q: FP4"):
        deep_gemm.fp8_fp4_mqa_logits((q, start), kv, weights, start, end)
    with pytest.raises(TypeError, match="q: expected a pair"):
        deep_gemm.fp8_fp4_mqa_logits(q, kv, weights, start, end)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="logits_dtype"):
        deep_gemm.fp8_fp4_mqa_logits((q, None), kv, weights, start, end, logits_dtype=torch.float16)
    q4, cache, weights, lengths, table = _paged(2)
    with pytest.raises(NotImplementedError, match="next_n"):
        deep_gemm.fp8_paged_mqa_logits(
            q4, cache, weights, lengths, table, None, 192, indices=lengths
        )


def test_number_of_sms_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm, "_num_sms", None)
    assert deep_gemm.get_num_sms() >= 1
    deep_gemm.set_num_sms(77)
    assert deep_gemm.get_num_sms() == 77
