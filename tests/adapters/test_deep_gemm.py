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
        deep_gemm.fp8_mqa_logits(q, kv, weights, start, end, True, 160)


def test_a_width_in_sixth_place_is_a_compressed_result() -> None:
    """DeepGEMM 2.8 has max_seqlen_k there, then schedule_meta, and takes q alone."""
    q, kv, weights, start, end = _ragged(215)
    expected = deep_gemm.fp8_fp4_mqa_logits(q, kv, weights, start, end, max_seqlen_k=160)
    assert expected.shape == (6, 160)
    metadata = torch.zeros(3, 2)
    for rest in ((160,), (160, metadata), (160, None)):
        got = deep_gemm.fp8_fp4_mqa_logits([q, None], kv, weights, start, end, *rest)
        assert torch.equal(got, expected)
    named = deep_gemm.fp8_fp4_mqa_logits(
        (q, None), kv, weights, start, end, max_seqlen_k=160, schedule_meta=metadata
    )
    assert torch.equal(named, expected)
    whole = deep_gemm.fp8_fp4_mqa_logits(q, kv, weights, start, end, True)
    assert whole.shape == (6, 215)


def test_weights_in_bf16_are_their_values() -> None:
    q, kv, weights, start, end = _ragged(215)
    rounded = weights.bfloat16()
    got = deep_gemm.fp8_mqa_logits(q, kv, rounded, start, end)
    assert torch.equal(got, deep_gemm.fp8_mqa_logits(q, kv, rounded.float(), start, end))


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def _fp4(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random codes (..., 64), scales (...) int32, and the numbers (..., 128) they are."""
    codes = torch.randint(0, 256, (*shape, 64), dtype=torch.uint8)
    exponents = torch.randint(120, 132, (*shape, 4), dtype=torch.uint8)
    pair = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()
    values = E2M1[pair & 7] * torch.where(pair > 7, -1, 1)
    factors = torch.exp2(exponents.double() - 127).repeat_interleave(32, dim=-1)
    return codes, exponents.contiguous().view(torch.int32).squeeze(-1), values * factors


def test_fp4_queries_and_keys() -> None:
    """Contiguous, and in pages of 68 bytes a key, which are flashdsa's."""
    torch.manual_seed(5)
    q, q_scales, queries = _fp4(6, 4)
    k, k_scales, keys = _fp4(128)
    weights = torch.randn(6, 4)
    start, end = torch.zeros(6, dtype=torch.int32), torch.full((6,), 128, dtype=torch.int32)
    dots = torch.einsum("shd,td->sht", queries, keys).relu()
    expected = (dots * weights.double()[..., None]).sum(1)
    got = deep_gemm.fp8_fp4_mqa_logits((q, q_scales), (k, k_scales), weights, start, end)
    assert_close(got, expected, 1e-6)
    cache = torch.cat(
        [k.view(2, -1), k_scales.view(2, -1).contiguous().view(torch.uint8)], dim=1
    ).view(2, 64, 1, 68)
    table = torch.arange(2, dtype=torch.int32).expand(6, 2)
    paged = deep_gemm.fp8_fp4_paged_mqa_logits(
        (q[:, None], q_scales[:, None]), cache, weights.bfloat16(), end, table, None, 128
    )
    dots = dots * weights.bfloat16().double()[..., None]
    assert_close(paged, dots.sum(1), 1e-6)


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


def _paged(next_n: int, heads: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """3 sequences on 8 pages; tokens from each length on have NaN scales."""
    torch.manual_seed(2)
    lengths = torch.tensor([130, 64, 3], dtype=torch.int32)
    table = torch.tensor([[5, 1, 7], [2, 8, 9], [0, -1, -1]], dtype=torch.int32)
    cache = torch.zeros(8, 64, 1, 132, dtype=torch.uint8)
    flashdsa.write_index_k_cache(torch.randn(512, 128), torch.arange(512), cache)
    scales = cache.view(8, -1)[:, 8192:].view(torch.float32)
    scales[7, 2:], scales[0, 3:], scales[6] = torch.nan, torch.nan, torch.nan
    weights = torch.randn(3 * next_n, heads)
    return _e4m3(3, next_n, heads, 128), cache, weights, lengths, table


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


@pytest.mark.parametrize(("next_n", "heads"), [(1, 4), (2, 4), (6, 8), (8, 8)])
def test_paged_scores(next_n: int, heads: int) -> None:
    """Of more queries a request than it has tokens the first see nothing."""
    q, cache, weights, lengths, table = _paged(next_n, heads)
    metadata = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, deep_gemm.get_num_sms())
    assert metadata.shape == (deep_gemm.get_num_sms() + 1, 2) and metadata.dtype == torch.int32
    of_rows = lengths[:, None] - next_n + 1 + torch.arange(next_n, dtype=torch.int32)
    of_rows = of_rows.clamp_min(0)
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


@pytest.mark.parametrize("place", ["by name", "in eighth place"])
def test_indices_only_group_rows_which_have_pages_of_their_own(place: str) -> None:
    """Three rows, two of one request whose number is no row of the table; one sees nothing."""
    q, cache, weights, _, table = _paged(1)
    request = torch.tensor([7, 7, 9], dtype=torch.int32)
    context_lens = torch.tensor([[129], [64], [0]], dtype=torch.int32)
    expected = _expected(q, cache, weights, context_lens, table)
    arguments = q, cache, weights, context_lens, table, None, 192
    if place == "by name":
        got = deep_gemm.fp8_fp4_paged_mqa_logits(*arguments, indices=request)
        chosen = deep_gemm.fp8_paged_mqa_topk(*arguments[:5], 30, indices=request)
        assert torch.equal(chosen, deep_gemm.fp8_paged_mqa_topk(*arguments[:5], 30))
    else:
        got = deep_gemm.fp8_fp4_paged_mqa_logits(*arguments, request)
    assert_close(got, expected, 1e-5)


def test_what_is_refused_is_named() -> None:
    q, kv, weights, start, end = _ragged(215)
    with pytest.raises(NotImplementedError, match=r"q: .*float8_e4m3fn.*bfloat16"):
        deep_gemm.fp8_mqa_logits(q.bfloat16(), kv, weights, start, end)
    with pytest.raises(NotImplementedError, match=r"q: scales beside torch\.float8_e4m3fn"):
        deep_gemm.fp8_fp4_mqa_logits((q, start), kv, weights, start, end)
    with pytest.raises(TypeError, match=r"q: expected a tensor, or a pair .* got tuple of Tensor"):
        deep_gemm.fp8_fp4_mqa_logits((q, q, q), kv, weights, start, end)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match=r"q: FP4 is served of 128 dims.*\[6, 4, 32\]"):
        bytes_of = q[..., :32].contiguous().view(torch.uint8)
        deep_gemm.fp8_fp4_mqa_logits((bytes_of, start), kv, weights, start, end)
    with pytest.raises(NotImplementedError, match="logits_dtype"):
        deep_gemm.fp8_fp4_mqa_logits((q, None), kv, weights, start, end, logits_dtype=torch.float16)


def test_number_of_sms_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm, "_num_sms", None)
    assert deep_gemm.get_num_sms() >= 1
    deep_gemm.set_num_sms(77)
    assert deep_gemm.get_num_sms() == 77
