"""kv caches: packed rows bit for bit, writing and reading by slot, and what is refused."""

from __future__ import annotations

import pytest
import torch

import flashdsa
from flashdsa import reference
from flashdsa.errors import UnsupportedError
from tests.support.subtests import CaseLoop

SCALES = ["ue8m0", "fp32"]
T = 6


def rows_of_any_size() -> torch.Tensor:
    """(T, 576) fp32 from 1e-6 to 1e4, one of zeros, powers of two that are exact amax."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(T, 576, generator=generator) * torch.logspace(-6, 4, T)[:, None]
    rows[2] = 0
    rows[3, :512] = 448 * 2.0**-3
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_packed_rows_are_the_reference_s_bit_for_bit(scale: str, dtype: torch.dtype) -> None:
    rows = rows_of_any_size().to(dtype)
    packed = flashdsa.quantize_kv(rows, scale=scale)
    assert torch.equal(packed, reference.quantize_kv(rows, scale))
    assert torch.equal(packed, flashdsa.quantize_kv(rows[:, None], scale=scale))


def test_scales_are_powers_of_two_unless_told_otherwise() -> None:
    scales = flashdsa.quantize_kv(rows_of_any_size())[:, 512:528].contiguous().view(torch.float32)
    assert (torch.frexp(scales).mantissa == 0.5).all()
    assert scales[3, 0] == 2.0**-3  # amax / 448 is one already


def test_a_nan_stays_in_its_group() -> None:
    rows = rows_of_any_size()
    rows[0, 130] = torch.nan
    values = reference.unpack_kv(flashdsa.quantize_kv(rows))
    assert values[0, 128:256].isnan().all() and values[1:].isfinite().all()
    assert values[0, :128].isfinite().all() and values[0, 256:].isfinite().all()


@pytest.mark.parametrize("shape", [(10,), (2, 5), (2, 5, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.int8], ids=str)
def test_rows_are_written_and_read_by_slot(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = rows_of_any_size().bfloat16()
    width = 576 if dtype == torch.bfloat16 else 656
    cache = torch.full((*shape, width), 3).to(dtype)
    slots = torch.tensor([9, -1, 0, 4, 5, 7], dtype=torch.int32)
    flashdsa.write_kv_cache(rows, slots, cache, scale="fp32")
    used = slots >= 0
    flat = cache.view(10, width)
    written = rows if dtype == torch.bfloat16 else flashdsa.quantize_kv(rows, scale="fp32")
    assert torch.equal(flat[slots[used].long()], written[used].view(dtype))
    untouched = [slot for slot in range(10) if slot not in slots.tolist()]
    assert (flat[untouched] == 3).all()
    expected = rows[used] if dtype == torch.bfloat16 else reference.unpack_kv(written[used])
    read = flashdsa.read_kv_cache(cache, slots[used].long())
    assert torch.equal(read, expected.bfloat16())


@pytest.mark.parametrize("slots", [[-1] * T, [-1, -1, -1, 2, -1, -1]])
def test_padding_writes_nothing(slots: list[int]) -> None:
    cache = torch.full((4, 576), 3.0).bfloat16()
    rows = rows_of_any_size().bfloat16()
    flashdsa.write_kv_cache(rows, torch.tensor(slots), cache)
    for slot in range(4):
        expected = rows[slots.index(slot)] if slot in slots else torch.full_like(rows[0], 3.0)
        assert torch.equal(cache[slot], expected)


def test_where_values_are_not_checked_slots_outside_are_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flashdsa.dispatch.checks.are_values_read", lambda slots: False)
    cache = torch.full((4, 576), 3.0).bfloat16()
    rows = rows_of_any_size().bfloat16()
    flashdsa.write_kv_cache(rows, torch.tensor([-7, 4, 0, 99, 3, -1]), cache)
    assert torch.equal(cache[[0, 3]], rows[[2, 4]]) and (cache[1:3] == 3).all()
    read = flashdsa.read_kv_cache(cache, torch.tensor([3, 4, -1]))
    assert torch.equal(read[0], rows[4]) and not read[1:].any()


REFUSED = [
    ({"kv": torch.zeros(T, 575)}, ValueError, r"kv: expected shape .*576.*; got .*575"),
    ({"kv": torch.zeros(T, 576).half()}, TypeError, "kv: expected dtype bfloat16 or float32"),
    ({"kv": torch.zeros(T, 576, device="meta")}, ValueError, "cache: expected device meta"),
    ({"slots": torch.zeros(T)}, TypeError, "slots: expected dtype int32 or int64; got float"),
    ({"slots": torch.arange(5)}, ValueError, r"slots: .*\[6\]; got shape \[5\]"),
    ({"slots": torch.arange(T) + 5}, ValueError, r"slots: expected slots in \[0, 10\); got 10"),
    ({"slots": torch.arange(T) - 2}, ValueError, r"slots: expected slots in .*; got -2"),
    ({"slots": torch.tensor([1, 2, 3, 1, -1, -1])}, ValueError, "distinct slots; got 1 2 t"),
    ({"cache": torch.zeros(10, 656)}, TypeError, "cache: expected dtype bfloat16 or uint8"),
    ({"cache": torch.zeros(10, 576).byte()}, ValueError, r"cache: .*656.*got shape .*576"),
    ({"cache": torch.zeros(5, 1, 2, 576).bfloat16()}, ValueError, "cache: expected shape"),
    ({"scale": "bf16"}, ValueError, "scale: expected one of ue8m0, fp32; got 'bf16'"),
]


def test_what_is_refused(subtests: CaseLoop) -> None:
    for change, error, message in REFUSED:
        with subtests.test(message):
            cache = change.pop("cache", torch.zeros(10, 656, dtype=torch.uint8))
            before = cache.clone()
            arguments = {"kv": torch.ones(T, 576), "slots": torch.arange(T), **change}
            with pytest.raises(error, match=message):
                flashdsa.write_kv_cache(cache=cache, **arguments)
            assert torch.equal(cache, before)


def test_read_refuses_slots_outside() -> None:
    with pytest.raises(ValueError, match=r"slots: expected slots in \[0, 10\); got -1"):
        flashdsa.read_kv_cache(torch.zeros(10, 656, dtype=torch.uint8), torch.tensor([3, -1]))


def test_bf16_pages_give_what_their_rows_give_and_a_gradient_of_their_shape() -> None:
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(2, 64, 576, generator=generator).bfloat16().requires_grad_()
    rows = pages.detach().view(128, 576).requires_grad_()
    q = torch.randn(3, 4, 576, generator=generator).bfloat16()
    indices = torch.randint(-1, 128, (3, 20), generator=generator).int()
    for kv in (pages, rows):
        flashdsa.sparse_mla(q, kv, indices).float().sum().backward()
    assert pages.grad is not None and rows.grad is not None
    assert torch.equal(pages.grad.view(128, 576), rows.grad)


def test_packed_rows_have_no_gradient() -> None:
    """The forward says so: nothing is computed whose backward would be an error."""
    q, sink = torch.randn(2, 4, 576).bfloat16(), torch.randn(4)
    kv = flashdsa.quantize_kv(torch.randn(9, 576))
    indices = torch.zeros(2, 3, dtype=torch.int32)
    for function in (flashdsa.sparse_mla, flashdsa.sparse_mla_fwd):
        for wanted in (q, sink):
            function(q, kv, indices, attn_sink=sink)
            wanted.requires_grad_()
            with pytest.raises(UnsupportedError, match="packed rows of kv have no gradient"):
                function(q, kv, indices, attn_sink=sink)
            with torch.no_grad():
                function(q, kv, indices, attn_sink=sink)
            wanted.requires_grad_(False)
