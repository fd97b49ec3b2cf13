"""Every backend quantizes, writes and reads index keys byte for byte as the contract says."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_indexer import (
    check_cache_read,
    check_cache_write,
    check_quantize_k,
    check_quantize_q,
)

NUM_PAGES = 5


def random_keys(count, seed, dtype=torch.bfloat16):
    return torch.randn(count, 128, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_cache(seed, dtype=torch.uint8):
    generator = torch.Generator().manual_seed(seed + 1)
    raw = torch.randint(256, (NUM_PAGES, 64, 1, 132), generator=generator)
    return raw.to(torch.uint8).view(dtype)


def test_keys_and_queries_of_any_size_quantize_bit_for_bit(subtests, backend, device, seed):
    for dtype, factor in product([torch.bfloat16, torch.float32], [1.0, 1e-6, 1e-4, 1e30, 0.0]):
        with subtests.test(f"{dtype}, {factor=}"):
            k = (random_keys(700, seed, torch.float32) * factor).to(dtype).to(device)
            q, generator = k.view(10, 70, 128), torch.Generator().manual_seed(seed)
            weights = torch.randn(10, 70, generator=generator).to(device)
            for scale in ("fp32", "ue8m0"):
                assert failures(check_quantize_k(k, backend, scale=scale)) == []
                assert failures(check_quantize_q(q, weights, backend, scale=scale)) == []


@given(
    values=st.lists(
        st.one_of(
            st.floats(-(2.0**100), 2.0**100, width=32),
            st.sampled_from([0.0, -0.0, 1e-4, -1e-4, 9.9e-5, 448.0, -448.0, 1e-38]),
        ),
        min_size=1,
        max_size=8,
    ),
    amax=st.sampled_from([0.0, 1.0, 448.0, 3e38]),
)
def test_any_finite_key_quantizes_bit_for_bit(backend, device, values, amax):
    k = torch.tensor(values).repeat(128)[:128].view(1, 128).clone()
    k[0, 127] = amax
    assert failures(check_quantize_k(k.to(device), backend)) == []


def test_every_rounding_tie_quantizes_to_even(backend, device):
    grid = reference.decode_e4m3(torch.arange(0x7F).to(torch.uint8)).float()
    k = torch.zeros(2, 128)
    k[0, :126] = (grid[1:] + grid[:-1]) / 2
    k[0, 127] = 448.0  # scale 1: ties stay ties
    k[1] = -k[0]
    fp8, scale = flashdsa.quantize_index_k(k.to(device), backend=backend)
    assert (scale == 1).all()
    lower = torch.arange(126)
    even = lower + lower % 2
    assert fp8[0, :126].view(torch.uint8).tolist() == even.tolist()
    assert fp8[1, :126].view(torch.uint8).tolist() == (even + 0x80).tolist()


def test_no_keys_and_no_queries_quantize_to_nothing(backend, device):
    fp8, scale = flashdsa.quantize_index_k(torch.empty(0, 128, device=device), backend=backend)
    assert fp8.shape == (0, 128) and scale.shape == (0,)
    fp8, folded = flashdsa.quantize_index_q(
        torch.empty(0, 64, 128, device=device), torch.empty(0, 64, device=device), backend=backend
    )
    assert fp8.shape == (0, 64, 128) and folded.shape == (0, 64)
    assert (fp8.dtype, folded.dtype) == (torch.float8_e4m3fn, torch.float32)


@pytest.mark.parametrize("scale", ["fp32", "ue8m0"])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("cache_dtype", [torch.uint8, torch.int8])
def test_written_pages_are_right_in_every_byte(
    cache_dtype, slot_dtype, scale, backend, device, seed
):
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(NUM_PAGES * 64, generator=generator)[:150]
    slots[::7] = -1
    verdicts = check_cache_write(
        random_keys(150, seed).to(device),
        slots.to(slot_dtype).to(device),
        random_cache(seed, cache_dtype).to(device),
        backend,
        scale=scale,
    )
    assert failures(verdicts) == []


@given(
    slots=st.lists(st.integers(0, NUM_PAGES * 64 - 1), max_size=20, unique=True),
    padding=st.integers(0, 3),
)
def test_any_slots_are_written_and_read_back(backend, device, slots, padding):
    k = random_keys(len(slots) + padding, len(slots)).to(device)
    targets = torch.tensor(slots + [-1] * padding, dtype=torch.int64, device=device)
    cache = random_cache(0).to(device)
    assert failures(check_cache_write(k, targets, cache, backend)) == []
    flashdsa.write_index_k_cache(k, targets, cache, backend=backend)
    assert failures(check_cache_read(cache, targets[: len(slots)], backend)) == []
    fp8, scale = flashdsa.read_index_k_cache(cache, targets[: len(slots)], backend=backend)
    codes, expected = reference.quantize_index_k(k[: len(slots)])
    assert torch.equal(fp8.view(torch.uint8).cpu(), codes) and torch.equal(scale.cpu(), expected)


@pytest.mark.parametrize("cache_dtype", [torch.uint8, torch.int8])
def test_reading_gives_the_raw_bytes_even_of_nan(cache_dtype, backend, device, seed):
    cache = random_cache(seed, cache_dtype)
    cache.view(torch.uint8).view(NUM_PAGES, 8448)[2, :128] = 0x7F
    nan_scale = torch.tensor([math.nan]).view(torch.uint8)
    cache.view(torch.uint8).view(NUM_PAGES, 8448)[2, 8192:8196] = nan_scale
    slots = torch.tensor([2 * 64, 2 * 64 + 1, 0, 319, 319], dtype=torch.int32)
    assert failures(check_cache_read(cache.to(device), slots.to(device), backend)) == []


def test_slots_beyond_2_to_the_31_bytes_are_written_and_read(backend, device, seed):
    num_pages = 2**31 // 8448 + 20
    try:
        cache = torch.empty(num_pages, 64, 1, 132, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        pytest.skip(f"cannot reserve 2.1 GB of address space: {error}")
    cache[[0, num_pages - 18, num_pages - 1]] = 0x55
    k = random_keys(3, seed).to(device)
    slots = torch.tensor([64 * num_pages - 1, 5, 64 * (num_pages - 18) + 63], device=device)
    flashdsa.write_index_k_cache(k, slots, cache, backend=backend)
    fp8, scale = flashdsa.read_index_k_cache(cache, slots, backend=backend)
    codes, expected = reference.quantize_index_k(k)
    assert torch.equal(fp8.view(torch.uint8).cpu(), codes) and torch.equal(scale.cpu(), expected)
    last = cache[num_pages - 1].reshape(-1)
    assert torch.equal(last[63 * 128 : 64 * 128].cpu(), codes[0])
    assert int((last != 0x55).sum()) <= 132, "the other tokens of the page are as they were"
    assert (last[: 63 * 128] == 0x55).all() and (last[8192 : 8192 + 4 * 63] == 0x55).all()


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
