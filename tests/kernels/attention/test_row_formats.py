"""Packed rows of every format: each code, scale and byte of a page, and what writers do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.backends.packed_rows import aligned_pages
from flashdsa.row_formats import ROW_FORMATS, RowFormat
from tests.support.interleaved_caches import interleaved_caches

FORMATS = pytest.mark.parametrize("form", ROW_FORMATS.values(), ids=list(ROW_FORMATS))
FP32_SCALES = [1.0, -3.7, 2.0**-149, 2.0**119, 1e-4 / 448, 0.0]


def rows_of_every_code(form: RowFormat) -> Tensor:
    """(256, row_bytes): every code beside every scale; bytes without use are random."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(256, (256, form.row_bytes), generator=generator).to(torch.uint8)
    columns, groups = torch.arange(form.columns), torch.arange(form.num_scales)
    if form.fp4:
        codes = (columns % 16).unflatten(0, (-1, 2))
        rows[:, : form.code_bytes] = (codes[:, 0] + 16 * codes[:, 1]).to(torch.uint8)
    else:
        rows[:, : form.code_bytes] = (columns % 256).to(torch.uint8)
    number = torch.arange(256)[:, None] + groups
    if form.scale == "fp32":
        scales = torch.tensor(FP32_SCALES)[number // 2 % len(FP32_SCALES)].view(torch.uint8)
    else:
        scales = (number % 256).to(torch.uint8)
    rows[:, form.scales_at : form.scales_at + form.stored_scales] = scales
    if form.rope:
        rope = torch.randn(256, form.rope, generator=generator).bfloat16()
        rows[:, form.rope_at : form.rope_at + 2 * form.rope] = rope.view(torch.uint8)
    return rows


def same(found: Tensor, expected: Tensor) -> None:
    """Equal, with NaN in the same places."""
    assert found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@FORMATS
def test_every_code_beside_every_scale_is_read_exactly(form: RowFormat) -> None:
    rows = rows_of_every_code(form)
    values = reference.unpack_kv(rows, form.name)
    if form.scale != "fp32":
        assert values.isnan().any() and not values.isnan().all()
    read = flashdsa.read_kv_cache(rows, torch.arange(256), kv_format=form.name)
    if form.scale == "fp32":  # a product of 28 bits is rounded to fp32 before
        same(read, values.float().bfloat16())
    else:
        same(read, values.bfloat16())


def test_codes_by_hand() -> None:
    """Example H of DeepSeek-V4.1's entries, and e8m0's ends."""
    fp4 = torch.zeros(2, 288, dtype=torch.uint8)
    fp4[:, 0], fp4[:, 256] = 0x72, torch.tensor([0x38, 0x40], dtype=torch.uint8)
    fp4[1, 255], fp4[1, 287] = 0x9C, 0x38
    read = flashdsa.read_kv_cache(fp4, torch.arange(2), kv_format="v41_fp4")
    assert read[0, :3].tolist() == [1, 6, 0] and read[1, :3].tolist() == [2, 12, 0]
    assert read[1, -2:].tolist() == [-2, -0.5]
    v41 = torch.zeros(3, 528, dtype=torch.uint8)
    v41[:, 511], v41[:, 527] = 0x38, torch.tensor([0, 128, 255], dtype=torch.uint8)
    read = flashdsa.read_kv_cache(v41, torch.arange(3), kv_format="v41")
    assert read[:2, 511].tolist() == [2.0**-127, 2] and read[2, 480:].isnan().all()


@pytest.mark.parametrize(
    ("name", "slot", "page_size", "page_bytes", "data", "scales"),
    [
        ("v4", 3, 2, 1728, 1728 + 576, 1728 + 1152 + 8),
        ("v4", 64, 64, 37440, 37440, 37440 + 64 * 576),
        ("v4", 511, 256, 149760, 149760 + 255 * 576, 149760 + 256 * 576 + 255 * 8),
        ("v41", 127, 64, 33792, 33792 + 63 * 512, 33792 + 64 * 512 + 63 * 16),
        ("v41_fp4", 65, 64, 18432, 18432 + 256, 18432 + 64 * 256 + 32),
        ("v41_interleaved", 127, 64, 33792, 33792 + 63 * 528, 33792 + 63 * 528 + 512),
        ("v41_fp4_interleaved", 3, 2, 576, 576 + 288, 576 + 288 + 256),
        ("v32", 3, 2, 1312, 1312 + 656, 1312 + 656 + 512),
        ("v32_no_rope", 3, 2, 1056, 1056 + 528, 1056 + 528 + 512),
    ],
)
def test_addresses_by_hand(
    name: str, slot: int, page_size: int, page_bytes: int, data: int, scales: int
) -> None:
    """Example D: the one row that is written changes the bytes of its codes and scales alone."""
    form = ROW_FORMATS[name]
    assert form.page_bytes(page_size) == page_bytes
    buffer = torch.full((2, page_bytes), 0xAA, dtype=torch.uint8)
    rows = torch.full((1, form.d_qk), 3.0)
    cache = in_pages(buffer, form, page_size)
    flashdsa.write_kv_cache(rows, torch.tensor([slot]), cache, kv_format=name)
    changed = (buffer.flatten() != 0xAA).nonzero().flatten()
    starts = changed[torch.diff(changed, prepend=torch.tensor([-2])) > 1].tolist()
    assert starts == ([data, scales] if form.split else [data])
    assert len(changed) == form.row_bytes


def in_pages(buffer: Tensor, form: RowFormat, page_size: int) -> Tensor:
    """The rows of pages (num_pages, bytes) with padding, as servers pass them."""
    flat = buffer[:, : page_size * form.row_bytes]
    return flat.unflatten(1, (page_size, 1, form.row_bytes))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 64])
@FORMATS
def test_pages_are_written_and_read_beside_their_padding(
    form: RowFormat, page_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    width = form.page_bytes(page_size) + 48
    buffer = torch.randint(256, (3, width), generator=generator).to(torch.uint8).view(dtype)
    before, num_slots = buffer.clone(), 3 * page_size
    kv = torch.randn(num_slots, form.d_qk, generator=generator) * 20
    slots = torch.randperm(num_slots, generator=generator)
    slots[::3] = torch.where(slots[::3] == num_slots - 1, slots[::3], -1)  # the last one is written
    cache = in_pages(buffer, form, page_size)
    flashdsa.write_kv_cache(kv, slots, cache, kv_format=form.name)
    old = in_pages(before, form, page_size)
    expected = reference.write_kv_cache(kv, slots, old, "ue8m0", form.name)
    assert torch.equal(cache, expected)
    used = page_size * form.row_bytes
    assert torch.equal(buffer[:, used:], before[:, used:])
    written = slots[slots >= 0]
    read = flashdsa.read_kv_cache(cache, written, kv_format=form.name)
    assert torch.equal(read, reference.unpack_kv(cache, form.name, written).bfloat16())
    same_rows = flashdsa.quantize_kv(kv[slots >= 0], kv_format=form.name)
    assert torch.equal(read, reference.unpack_kv(same_rows, form.name).bfloat16())


@FORMATS
def test_writers_are_the_reference_s_bit_for_bit(form: RowFormat) -> None:
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(-7, 5, 200)[:, None]
    rows = torch.randn(200, form.d_qk, generator=generator) * size
    rows[:100] = rows[:100].bfloat16().float()
    rows[0], rows[1], rows[2] = 0, 448 * 2.0**-5, 6 * 2.0**-3
    rows[3] = torch.arange(form.d_qk) % 33 * 0.25 - 4  # ties of e2m1, e4m3 is exact
    packed = flashdsa.quantize_kv(rows, kv_format=form.name)
    assert packed.shape == (200, form.row_bytes)
    assert torch.equal(packed, reference.quantize_kv(rows, "ue8m0", form.name))
    # Values that are read are written as themselves; small e4m3 scales have few bits.
    kept = rows.abs().amax(dim=1) > 1 if form.fp4 else torch.ones(200, dtype=torch.bool)
    read = flashdsa.read_kv_cache(packed, torch.arange(200), kv_format=form.name)[kept]
    again = flashdsa.quantize_kv(read, kv_format=form.name)
    every = torch.arange(len(read))
    assert torch.equal(flashdsa.read_kv_cache(again, every, kv_format=form.name), read)


@pytest.mark.parametrize("name", ["v4", "v41"])
def test_small_groups_have_flashmla_s_scale(name: str) -> None:
    """`max(amax / 448, 1e-4)`: 2^-13. SGLang's writer for V4 would write 2^-22 here."""
    form = ROW_FORMATS[name]
    packed = flashdsa.quantize_kv(torch.full((1, 512), 1e-6), kv_format=name)
    scales = packed[0, form.scales_at : form.scales_at + form.num_scales]
    assert scales.tolist() == [127 - 13] * form.num_scales
    assert packed[0, form.scales_at + form.num_scales :].tolist() == [0] * form.unused


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@FORMATS
def test_a_group_that_is_not_finite_reads_as_nan_and_no_other(form: RowFormat, bad: float) -> None:
    rows = torch.full((1, form.d_qk), 6.0)  # exact in every format
    rows[0, form.group + 3] = bad
    packed = flashdsa.quantize_kv(rows, kv_format=form.name)
    read = flashdsa.read_kv_cache(packed, torch.tensor([0]), kv_format=form.name)
    expected = rows.bfloat16()
    expected[0, form.group : 2 * form.group] = torch.nan
    same(read, expected)


REFUSED = [
    ((4, 528), {}, "cache: rows of 528 bytes are v32_no_rope or v41 or .*; expected kv_format"),
    ((4, 288), {}, "cache: rows of 288 bytes are v41_fp4 or v41_fp4_interleaved; expected kv_f"),
    ((4, 584), {"kv_format": "v41"}, r"cache: expected rows of 528 bytes \(v41\); got .*584"),
    ((4, 584), {"kv_format": "V4"}, "kv_format: expected one of v32, v32_no_rope, v4, v41, "),
    ((4, 584), {"scale": "fp32"}, "scale: v4 has e8m0 scales; got 'fp32'"),
    ((4, 600), {}, r"cache: expected packed rows of .* 288 \(v41_fp4\), .*bytes; got .* 600\]"),
    ((2, 2, 1168), {}, "cache: expected pages without gaps inside, as v4 has all data"),
]


@pytest.mark.parametrize(("shape", "options", "message"), REFUSED)
def test_what_is_refused(shape: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    cache = torch.zeros(shape, dtype=torch.uint8)
    if len(shape) == 3:
        cache = cache[..., :584]
    with pytest.raises(ValueError, match=message):
        flashdsa.write_kv_cache(torch.zeros(2, 512), torch.arange(2), cache, **options)
    assert not cache.any()


@FORMATS
def test_attention_over_packed_rows_is_attention_over_their_values(form: RowFormat) -> None:
    """In fp64 exactly: queries that name one row each get it. Every finite code, every scale."""
    rows = rows_of_every_code(form)
    if form.scale != "fp32":
        scales = rows[:, form.scales_at : form.scales_at + form.stored_scales]
        scales[(scales == 255) | ((scales == 127) & form.fp4)] = 0
    if not form.fp4:
        codes = rows[:, : form.code_bytes]
        codes[codes % 128 == 127] = 0
    q = torch.zeros(256, 1, form.d_qk, dtype=torch.float64)
    slots = torch.arange(256, dtype=torch.int32)[:, None]
    for kv in (rows, rows.view(torch.int8)[:, None]):
        O, lse = flashdsa.sparse_mla_fwd(q, kv, slots, kv_format=form.name)
        assert torch.equal(O[:, 0], reference.unpack_kv(rows, form.name)[:, :512])
        assert not lse.any()


@pytest.mark.parametrize("page_size", [2, 64])
@FORMATS
def test_attention_over_pages_is_that_over_their_rows(form: RowFormat, page_size: int) -> None:
    """Padding, and rows that no slot names, hold NaN; slots of the last page are named."""
    generator = torch.Generator().manual_seed(0)
    buffer = torch.full((128 // page_size, form.page_bytes(page_size) + 32), 0xFF).byte()
    pages, slots = in_pages(buffer, form, page_size), torch.arange(128)
    kv = torch.randn(128, form.d_qk, generator=generator)
    flashdsa.write_kv_cache(kv, slots, pages, kv_format=form.name)
    read = flashdsa.read_kv_cache(pages, slots, kv_format=form.name).double()
    flashdsa.write_kv_cache(kv[::5] * torch.nan, slots[::5], pages, kv_format=form.name)
    q = torch.randn(5, 3, form.d_qk, generator=generator, dtype=torch.float64)
    indices = torch.randint(-1, 140, (5, 40), generator=generator).int()
    indices[(indices % 5 == 0) & (indices < 128)] = -1
    indices[:, 0] = 127
    found = flashdsa.sparse_mla_fwd(q, pages, indices, kv_format=form.name)
    expected = reference.sparse_mla_fwd(q, read, indices)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


NOT_ATTENDED = [
    ((9, 528), 512, None, "kv: rows of 528 bytes are v32_no_rope or v41 or .*; expected kv_f"),
    ((9, 656), 576, "v4", r"kv: expected rows of 584 bytes \(v4\); got shape \[9, 656\]"),
    ((9, 584), 576, None, r"kv: packed rows of 584 bytes \(v4\) are of 512 columns"),
    ((9, 512), 512, "v4", "kv_format: kv has dtype bfloat16, not packed rows; got 'v4'"),
    ((9, 584), 512, "V4", "kv_format: expected one of v32, .*; got 'V4'"),
    ((3, 64, 600), 512, None, "kv: expected packed rows of 656"),
]


@pytest.mark.parametrize(("shape", "d_qk", "kv_format", "message"), NOT_ATTENDED)
def test_attention_refuses(
    shape: tuple[int, ...], d_qk: int, kv_format: str | None, message: str
) -> None:
    kv = torch.zeros(shape, dtype=torch.bfloat16 if shape[-1] == 512 else torch.uint8)
    q, indices = torch.zeros(2, 1, d_qk).bfloat16(), torch.zeros(2, 1, dtype=torch.int32)
    for function in (flashdsa.sparse_mla_fwd, flashdsa.sparse_mla):
        with pytest.raises(ValueError, match=message):
            function(q, kv, indices, kv_format=kv_format)


def test_kernels_name_the_formats_that_they_lack() -> None:
    kv = flashdsa.quantize_kv(torch.zeros(9, 512), kv_format="v41_fp4")
    q, indices = torch.zeros(2, 16, 512).bfloat16(), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="kv_format: takes none; got v41_fp4"):
        flashdsa.sparse_mla_fwd(q, kv, indices, kv_format="v41_fp4", backend="emulate-sm100")


def test_the_name_of_one_source_tells_the_other_s_layout() -> None:
    """Rows of 288 bytes lie as those of 528 beside them: split with "v41", else interleaved."""
    torch.manual_seed(2)
    (window, entries), kept = interleaved_caches(128, 64)
    q, ids = torch.randn(3, 2, 512), torch.randint(64, (3, 9)).int()
    found, _ = flashdsa.sparse_mla_fwd(
        q, window, ids, extra_kv=entries, extra_indices=ids, kv_format="v41_interleaved"
    )
    expected, _ = reference.sparse_mla_fwd(q, torch.cat(kept), torch.cat([ids, ids + 128], dim=1))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="rows of 528 bytes are v32_no_rope or v41_interleaved"):
        flashdsa.sparse_mla_fwd(
            q, entries, ids, extra_kv=window, extra_indices=ids, kv_format="v41_fp4_interleaved"
        )


def test_pages_of_a_named_format_are_compiled() -> None:
    buffer = torch.zeros(3, ROW_FORMATS["v41"].page_bytes(4) + 16, dtype=torch.uint8)
    pages = in_pages(buffer, ROW_FORMATS["v41"], 4)
    flashdsa.write_kv_cache(torch.randn(12, 512), torch.arange(12), pages, kv_format="v41")
    q, indices = torch.randn(2, 4, 512), torch.tensor([[3, 11], [-1, 5]])
    eager = flashdsa.sparse_mla_fwd(q, pages, indices, kv_format="v41")
    compiled = torch.compile(flashdsa.sparse_mla_fwd, fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(q, pages, indices, kv_format="v41"), eager, strict=True):
        assert torch.equal(x, y)


def test_rows_without_pages_are_pages_of_one() -> None:
    """One page of all rows may have more bytes than kernels count in an Int32: the decode of 8
    million rows of 528 bytes read from outside."""
    rows = torch.empty(8_000_000, 528, dtype=torch.uint8, device="meta")
    pages = aligned_pages(rows)
    assert pages.shape == (8_000_000, 1, 528)
    assert pages.stride() == (528, 528, 1)
