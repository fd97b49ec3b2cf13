"""Index keys of 68 bytes: every code and scale, the bytes of a page, rounding, spans."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa import reference

CODES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
PAGES = 3


def cache_of(rows: Tensor) -> Tensor:
    """A cache (1, 64, 1, 68) whose first slots hold these rows (n, 68), written byte by byte."""
    page = torch.zeros(64 * 68, dtype=torch.uint8)
    for slot, row in enumerate(rows):
        page[64 * slot : 64 * slot + 64] = row[:64]
        page[4096 + 4 * slot : 4096 + 4 * slot + 4] = row[64:]
    return page.view(1, 64, 1, 68)


def keys_of(rows: Tensor) -> Tensor:
    """The keys (n, 128) float64 that a cache of these rows (n, 68) reads as."""
    fp8, scale = flashdsa.read_index_k_cache(cache_of(rows), torch.arange(len(rows)), backend="cpu")
    return fp8.double() * scale.double()[:, None]


def row(codes: list[int], scales: list[int]) -> Tensor:
    """One packed key: codes of 4 bits, two in a byte, the even column in the low half."""
    packed = [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)]
    return torch.tensor(packed + scales, dtype=torch.uint8)


def test_every_code_with_every_scale_is_exact() -> None:
    """All 16 codes in each group, of scales 2^-127 to 2^127 that span at most 2^14."""
    codes = [*range(16), *reversed(range(16))] * 4
    values = torch.tensor([CODES[c] for c in codes], dtype=torch.float64).view(4, 32)
    for first in range(0, 255, 60):
        tops = range(first, min(first + 60, 255))
        scales = [[max(top - 14, 0), top, max(top - 7, 0), max(top - 1, 0)] for top in tops]
        expected = values * torch.exp2(torch.tensor(scales).double() - 127)[..., None]
        got = keys_of(torch.stack([row(codes, one) for one in scales]))
        assert torch.equal(got.view(-1, 4, 32), expected)
        assert torch.equal(got.view(-1, 4, 32).signbit(), expected.signbit())


def test_scales_further_apart_round_to_multiples_of_the_largest() -> None:
    codes = [*range(16)] * 8
    values = torch.tensor(CODES, dtype=torch.float64)
    for below in range(15, 24):
        got = keys_of(row(codes, [130, 130 - below, 130, 130])[None]).view(4, 2, 16) / 2**3
        unit = 2.0**-15
        assert torch.equal(got[1], (values * 2.0**-below / unit).round().expand(2, 16) * unit)
        assert torch.equal(got[0], values.expand(2, 16))


def test_a_scale_of_255_makes_the_key_nan() -> None:
    rows = torch.stack([row([1] * 128, [127] * i + [255] + [127] * (3 - i)) for i in range(4)])
    assert keys_of(rows).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writing_rounds_as_the_format_says(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(5)
    k = torch.randn(100, 128, generator=draw) * torch.exp2(
        8 * torch.randn(100, 128, generator=draw)
    )
    k[0], k[1, 32:64], k[2] = 0, 0, 2.0**-130
    k = k.to(dtype)
    slots = torch.randperm(64 * PAGES, generator=draw)[:100]
    slots[7::9] = -1
    cache = torch.randint(256, (PAGES, 64, 1, 68), generator=draw).byte()
    expected = reference.write_index_k_cache(k, slots, cache)
    flashdsa.write_index_k_cache(k, slots, cache, backend="cpu")
    assert torch.equal(cache, expected)
    used = slots >= 0
    fp8, scale = flashdsa.read_index_k_cache(cache, slots[used], backend="cpu")
    again, scale_again = flashdsa.quantize_index_k(k[used], mxfp4=True, backend="cpu")
    assert torch.equal(fp8.view(torch.uint8), again.view(torch.uint8))
    assert torch.equal(scale, scale_again)


def test_a_groups_scale_is_the_least_power_of_two_that_holds_it() -> None:
    up = torch.nextafter(torch.tensor(6.0), torch.tensor(7.0)).item()
    k = torch.tensor([[6.0] * 32 + [up] * 32 + [3.0] * 32 + [5.0] * 32])
    cache = torch.zeros(1, 64, 1, 68, dtype=torch.uint8)
    flashdsa.write_index_k_cache(k, torch.tensor([0]), cache, backend="cpu")
    assert cache.flatten()[4096:4100].tolist() == [127, 128, 126, 127]
    assert cache.flatten()[0:64:16].tolist() == [0x77, 0x55, 0x77, 0x66]  # 5 is a tie: 4 is even


def test_fake_quantisation_gives_the_keys_that_are_ranked() -> None:
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    rounded = flashdsa.fake_quantize_index(x, scale="mxfp4")
    fp8, scale = flashdsa.quantize_index_k(x.detach(), mxfp4=True, backend="cpu")
    assert torch.equal(rounded.double(), fp8.double() * scale.double()[:, None])
    assert torch.equal(rounded.double(), reference.fake_quantize_index(x.float(), "mxfp4"))
    rounded.sum().backward()
    assert x.grad is not None and (x.grad == 1).all()


def test_other_sizes_are_errors() -> None:
    cache = torch.zeros(1, 64, 1, 100, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"cache: expected shape .*132\] or .*68\]; got .*100\]"):
        flashdsa.read_index_k_cache(cache, torch.tensor([0]), backend="cpu")
