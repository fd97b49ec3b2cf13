"""FlashMLA's calls give FlashMLA's results: shapes, lse, invalid slots over NaN rows, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.adapters import flash_mla
from flashdsa.errors import UnsupportedError
from flashdsa.row_formats import ROW_FORMATS
from tests.support.formulas import assert_close, attention, largest_logits
from tests.support.interleaved_caches import interleaved_caches

SCALE = 0.07


def _valid(ids: Tensor, lengths: list[int], num_rows: int) -> list[list[int]]:
    return [
        [i for i in row[:length] if 0 <= i < num_rows]
        for row, length in zip(ids.tolist(), lengths, strict=True)
    ]


def _prefill(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four queries, the last without a valid slot; rows that only invalid slots name are NaN."""
    torch.manual_seed(3)
    q, kv = torch.randn(4, 3, 576).to(dtype), torch.randn(40, 1, 576).to(dtype)
    indices = torch.randint(0, 30, (4, 1, 9), dtype=torch.int32)
    indices[0, 0, 3], indices[1, 0, 0], indices[2, 0, 1] = -1, 40, 2**31 - 1
    lengths = torch.tensor([9, 5, 7, 0], dtype=torch.int32)
    kv[30:] = torch.nan
    indices[1, 0, 6], indices[2, 0, 8], indices[3, 0, 0] = 33, 34, 35  # past topk_length
    return q, kv, indices, lengths


@pytest.mark.parametrize("base2", [None, True, False])
def test_prefill(base2: bool | None) -> None:
    q, kv, indices, lengths = _prefill()
    sink = torch.tensor([0.5, -torch.inf, 2.0])
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(
        q, kv, indices, SCALE, 512, sink, lengths, return_log2_lse=base2
    )
    rows = _valid(indices[:, 0], lengths.tolist(), 40)
    expected, expected_lse = attention(q, kv[:, 0], rows, SCALE, sink=sink)
    assert out.dtype == torch.bfloat16
    assert_close(out, expected, 4e-3)
    if base2 is False:
        assert lse is None and max_logits is None
        return
    assert lse is not None and max_logits is not None
    factor = torch.log2(torch.tensor(torch.e, dtype=torch.float64)) if base2 else 1
    assert_close(lse, expected_lse * factor, 1e-5)
    assert_close(max_logits, largest_logits(q, kv[:, 0], rows, SCALE) * factor, 1e-5)


def test_results_go_to_the_callers_buffer() -> None:
    q, kv, indices, lengths = _prefill()
    into = torch.full((4, 3, 512), torch.nan, dtype=torch.bfloat16)
    expected = flash_mla.flash_mla_sparse_fwd(q, kv, indices, SCALE, topk_length=lengths)[0]
    found = flash_mla.flash_mla_sparse_fwd(q, kv, indices, SCALE, topk_length=lengths, out=into)[0]
    assert found.data_ptr() == into.data_ptr() and torch.equal(into, expected)
    q, cache, indices, lengths = _decode_case()
    room = torch.full((2, 3, 5, 512), torch.nan, dtype=torch.bfloat16)
    expected = _decode(cache, q, indices, topk_length=lengths)[0]
    found = _decode(cache, q, indices, topk_length=lengths, out=room)[0]
    assert found.data_ptr() == room.data_ptr() and torch.equal(room, expected)


def _decode_case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """2 sequences of 3 queries, 2 pages of 64; the second page is NaN from row 20 on."""
    torch.manual_seed(4)
    q = torch.randn(2, 3, 5, 576).bfloat16()
    cache = torch.randn(2, 64, 1, 576).bfloat16()
    indices = torch.randint(0, 84, (2, 3, 7), dtype=torch.int32)
    indices[0, 1, 2], indices[1, 2, 0], indices[0, 0, 0] = -1, 128, -5
    indices[1, :, 6] = 100
    indices[1, 0, :] = -1
    lengths = torch.tensor([7, 6], dtype=torch.int32)
    cache[1, 20:] = torch.nan
    return q, cache, indices, lengths


def _decode(cache: Tensor, q: Tensor, indices: Tensor, **changed: Any) -> tuple[Tensor, Tensor]:
    metadata, _ = flash_mla.get_mla_metadata()
    return flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, 512, metadata, indices=indices, **changed
    )


def test_decode_of_bf16_rows() -> None:
    q, cache, indices, lengths = _decode_case()
    sink = torch.randn(5)
    out, lse = _decode(cache, q, indices, topk_length=lengths, attn_sink=sink)
    rows = _valid(indices.flatten(0, 1), [7, 7, 7, 6, 6, 6], 128)
    expected, expected_lse = attention(
        q.flatten(0, 1), cache.flatten(0, 2), rows, 576**-0.5, sink=sink
    )
    assert_close(out, expected.view(2, 3, 5, 512), 4e-3)
    assert lse.shape == (2, 5, 3) and lse.is_contiguous()
    assert_close(lse, expected_lse.view(2, 3, 5).transpose(1, 2), 1e-5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("served", [True, False], ids=["by the backend", "rows made bf16 first"])
def test_decode_of_packed_rows(
    served: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Valid slots name finite rows; the bytes of the others are NaN, latent, scale and RoPE."""
    q, cache, indices, lengths = _decode_case()
    finite = cache.nan_to_num().flatten(0, 2)
    packed = flashdsa.quantize_kv(finite, scale="fp32")
    values = flashdsa.read_kv_cache(packed, torch.arange(128))
    packed[84:] = 0xFF
    pages = packed.view(dtype).view(2, 64, 1, 656)
    if not served:

        def refuse_bytes(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
            if kv.element_size() == 1:
                raise UnsupportedError("packed rows")
            return flashdsa.sparse_mla_fwd(q, kv, *args, **options)

        monkeypatch.setattr(flash_mla, "sparse_mla_fwd", refuse_bytes)
    out, lse = _decode(pages, q, indices, topk_length=lengths, softmax_scale=SCALE)
    rows = _valid(indices.flatten(0, 1), [7, 7, 7, 6, 6, 6], 128)
    expected, expected_lse = attention(q.flatten(0, 1), values, rows, SCALE)
    assert_close(out, expected.view(2, 3, 5, 512), 4e-3)
    assert_close(lse, expected_lse.view(2, 3, 5).transpose(1, 2), 3e-3 if not served else 1e-3)


@pytest.mark.parametrize("gap", [1, 3])
@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "packed"])
def test_decode_of_pages_with_gaps_between_them(packed: bool, gap: int) -> None:
    """The gaps hold NaN; results have the bits of pages without gaps."""
    q, cache, indices, lengths = _decode_case()
    if packed:
        rows = flashdsa.quantize_kv(cache.nan_to_num().flatten(0, 2), scale="fp32")
        cache = rows.view(2, 64, 1, 656)
    wide = torch.full((2, 64 + gap, 1, cache.shape[3]), 0xFF, dtype=torch.uint8).to(cache.dtype)
    wide = wide if packed else wide.fill_(torch.nan)
    wide[:, :64] = cache
    spread = wide[:, :64]
    assert not spread.is_contiguous()
    expected = _decode(cache, q, indices, topk_length=lengths)
    found = _decode(spread, q, indices, topk_length=lengths)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_decode_without_any_valid_slot_of_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, _, indices, _ = _decode_case()
    pages = torch.full((2, 64, 1, 656), 0xFF, dtype=torch.uint8)
    out, lse = _decode(pages, q, torch.full_like(indices, -1))
    assert not out.any() and lse.isposinf().all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("descale_q", torch.zeros(1)),
        ("descale_k", torch.zeros(1)),
        ("causal", True),
        ("indices", None),
    ],
)
def test_what_is_refused_is_named(name: str, value: Any) -> None:
    q, cache, indices, _ = _decode_case()
    arguments = {"q": q, "cache": cache, "indices": indices, name: value}
    with pytest.raises(NotImplementedError, match=name):
        _decode(**arguments)


def test_wrong_caches_are_errors() -> None:
    q, cache, indices, _ = _decode_case()
    with pytest.raises(ValueError, match="kv: expected"):
        _decode(torch.zeros(2, 64, 1, 600, dtype=torch.uint8), q, indices)
    with pytest.raises(ValueError, match="is_fp8_kvcache"):
        _decode(torch.zeros(2, 64, 1, 576).bfloat16(), q, indices, is_fp8_kvcache=True)
    with pytest.raises(ValueError, match="extra_k_cache and extra_indices_in_kvcache together"):
        _decode(cache, q, indices, extra_k_cache=cache)


LEGACY: dict[str, Any] = {"use_legacy": True}
PAIRS: list[tuple[str | None, str | None, dict[str, Any]]] = [
    (None, None, {}),
    ("v4", "v4", {}),
    ("v41_interleaved", "v41_fp4_interleaved", {}),
    ("v41_interleaved", "v41_interleaved", {"use_legacy": False}),
    ("v41", "v41_fp4", {"kv_format": "V41"}),
    ("v41", "v41_fp4", LEGACY),
    ("v41", "v41_fp4", LEGACY | {"kv_format": "V41_FP4"}),
    ("v41_fp4", "v41_fp4", LEGACY),
    ("v32_no_rope", "v32_no_rope", LEGACY | {"kv_format": "V32_NO_ROPE"}),
]
PAGES = [(64, 64), (256, 2), (256, 64)]
"""Of both caches; servers keep a window's 256 tokens, and 2 or 64 entries, in a page."""


def _cache_of(rows: Tensor, name: str | None, page_size: int) -> Tensor:
    """Pages of a format, each with padding, which is NaN; bf16 pages have a row of it."""
    pages = len(rows) // page_size
    if name is None:
        wide = torch.full((pages, page_size + 1, 1, rows.shape[1]), torch.nan).bfloat16()
        wide[:, :page_size] = rows.view(pages, page_size, 1, -1)
        return wide[:, :page_size]
    form = ROW_FORMATS[name]
    memory = torch.full((pages, form.page_bytes(page_size) + form.data_bytes), 0xFF).byte()
    cache = memory[:, : page_size * form.row_bytes].view(pages, page_size, 1, form.row_bytes)
    flashdsa.write_kv_cache(rows, torch.arange(len(rows)), cache, kv_format=name)
    return cache


@pytest.mark.parametrize("served", [True, False], ids=["by the backend", "rows made bf16 first"])
@pytest.mark.parametrize("page_sizes", PAGES, ids=str)
@pytest.mark.parametrize(("main", "extra", "told"), PAIRS, ids=str)
def test_decode_from_two_caches(
    main: str | None,
    extra: str | None,
    told: dict[str, Any],
    page_sizes: tuple[int, int],
    served: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """512 columns; some rows are in both lists, and count twice."""
    torch.manual_seed(6)
    q = torch.randn(2, 3, 5, 512).bfloat16()
    kept = [torch.randn(count, 512).bfloat16() for count in (512, 192)]
    caches = [_cache_of(*each) for each in zip(kept, (main, extra), page_sizes, strict=True)]
    if main is not None:
        kept = [
            flashdsa.read_kv_cache(cache, torch.arange(len(rows)), kv_format=name)
            for cache, rows, name in zip(caches, kept, (main, extra), strict=True)
        ]
    ids = [torch.randint(-2, len(rows) + 3, (2, 3, n), dtype=torch.int32)
           for rows, n in zip(kept, (7, 12), strict=True)]  # fmt: skip
    lengths = torch.tensor([7, 5]).int(), torch.tensor([0, 12]).int()
    if not served:

        def refuse_bytes(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
            if kv.element_size() == 1:
                raise UnsupportedError("packed rows")
            return flashdsa.sparse_mla_fwd(q, kv, *args, **options)

        monkeypatch.setattr(flash_mla, "sparse_mla_fwd", refuse_bytes)
    sink = torch.randn(5)
    out, lse = _decode(
        caches[0], q, ids[0], topk_length=lengths[0], attn_sink=sink, extra_k_cache=caches[1],
        extra_indices_in_kvcache=ids[1], extra_topk_length=lengths[1], **told,
    )  # fmt: skip
    found = [
        _valid(x.flatten(0, 1), n.repeat_interleave(3).tolist(), len(rows))
        for x, n, rows in zip(ids, lengths, kept, strict=True)
    ]
    rows = [[*a, *(512 + i for i in b)] for a, b in zip(*found, strict=True)]
    joined = torch.cat(kept)
    expected, expected_lse = attention(q.flatten(0, 1), joined, rows, 512**-0.5, sink=sink)
    assert_close(out, expected.view(2, 3, 5, 512), 4e-3)
    assert_close(lse, expected_lse.view(2, 3, 5).transpose(1, 2), 1e-3)


@pytest.mark.parametrize("entries", [False, True], ids=["the window alone", "both caches"])
def test_pages_of_the_current_kernels_are_interleaved(entries: bool) -> None:
    """Bytes by the reference's addresses; those between pages are NaN."""
    torch.manual_seed(7)
    caches, rows = interleaved_caches(128, 64)
    q = torch.randn(2, 1, 4, 512).bfloat16()
    ids = [torch.randint(len(x), (2, 1, 9)).int() for x in rows]
    more = {"extra_k_cache": caches[1], "extra_indices_in_kvcache": ids[1]} if entries else {}
    out, lse = _decode(caches[0], q, ids[0], **more)
    lists = zip(*(x[:, 0].tolist() for x in ids), strict=True)
    chosen = [[*a, *(128 + i for i in b if entries)] for a, b in lists]
    expected, expected_lse = attention(q[:, 0], torch.cat(rows), chosen, 512**-0.5)
    assert_close(out[:, 0], expected, 4e-3)
    assert_close(lse[..., 0], expected_lse, 1e-3)
