"""The Hopper quantise-and-write kernel, emulated and checked: the CPU's bits, nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import flashdsa

pytestmark = pytest.mark.usefixtures("small_device")

pytest.importorskip("llvmlite", reason="llvmlite is not installed")
pytest.importorskip("cutlass.cute", reason="CuTe DSL is not installed")

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
UNTOUCHED = 0x11
NAN_BITS = 0x7F


def awkward_keys(dtype: torch.dtype) -> Tensor:
    """Keys of every size, all bit patterns of bf16 among them, and what has no scale."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(300, 128, generator=generator)
    keys *= torch.exp(8 * torch.randn(300, 1, generator=generator))
    patterns = torch.randint(-(2**15), 2**15, (150, 128), generator=generator).short()
    keys[:150] = patterns.view(torch.bfloat16).nan_to_num(0.0, 1.0, -1.0).float()
    keys[0], keys[1], keys[2], keys[3] = 0.0, -0.0, 1e-39, 3e38
    keys[4] = 448 * 2.0 ** torch.arange(-128, 0)
    keys[5], keys[6] = math.nan, math.inf
    keys[7, 3], keys[8, 77], keys[9, 0], keys[9, 1] = math.nan, -math.inf, math.inf, -math.nan
    return keys.to(dtype)


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """e4m3 bytes equal; NaN may have either sign, which no arithmetic promises."""
    got, expected = got.view(torch.uint8), expected.view(torch.uint8)
    is_nan = (expected & NAN_BITS) == NAN_BITS
    assert torch.equal((got & NAN_BITS) == NAN_BITS, is_nan)
    assert torch.equal(got.masked_fill(is_nan, 0), expected.masked_fill(is_nan, 0))


def assert_same_scales(got: Tensor, expected: Tensor) -> None:
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(-1), expected.nan_to_num(-1))


@DTYPES
def test_keys(dtype):
    keys = awkward_keys(dtype)
    fp8, scale = flashdsa.quantize_index_k(keys, backend="emulate-sm90")
    expected_fp8, expected_scale = flashdsa.quantize_index_k(keys, backend="cpu")
    assert_same_bits(fp8, expected_fp8)
    assert_same_scales(scale, expected_scale)


def test_the_cpus_scale_is_the_ieee_quotient():
    keys = torch.randn(500, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    _, scale = flashdsa.quantize_index_k(keys, backend="cpu")
    exact = keys.double().abs().amax(1) / 448
    assert torch.equal(scale, exact.float())


def test_queries():
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(3, 16, 128, generator=generator).bfloat16()
    weights = torch.randn(3, 16, generator=generator)
    fp8, folded = flashdsa.quantize_index_q(q, weights, backend="emulate-sm90")
    expected_fp8, expected = flashdsa.quantize_index_q(q, weights, backend="cpu")
    assert_same_bits(fp8, expected_fp8)
    assert torch.equal(folded, expected)


@DTYPES
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_written_pages_have_the_cpus_bytes(dtype, slot_dtype):
    keys = awkward_keys(dtype)[10:]
    generator = torch.Generator().manual_seed(3)
    slots = torch.randperm(6 * 64, generator=generator)[: len(keys)].to(slot_dtype)
    slots[::13] = -1
    expected = torch.full((6, 64, 1, 132), UNTOUCHED, dtype=torch.uint8)
    flashdsa.write_index_k_cache(keys, slots, expected, backend="cpu")
    cache = torch.full((6, 64, 1, 132), UNTOUCHED, dtype=torch.uint8)
    flashdsa.write_index_k_cache(keys, slots, cache, backend="emulate-sm90")
    assert torch.equal(cache, expected)


def test_slots_outside_the_cache_are_not_written():
    keys = awkward_keys(torch.bfloat16)[10:20]
    slots = torch.tensor([-1, 128, -2, 2**40, -(2**40), 2**31, 129, -128, 64, 63])
    pages = torch.full((4, 64, 1, 132), UNTOUCHED, dtype=torch.uint8)
    flashdsa.write_index_k_cache(keys, slots, pages[1:3], backend="emulate-sm90")
    assert (pages[0] == UNTOUCHED).all()
    assert (pages[3] == UNTOUCHED).all()
    fp8, _ = flashdsa.read_index_k_cache(pages[1:3], slots[-2:], backend="cpu")
    expected, _ = flashdsa.quantize_index_k(keys[-2:], backend="cpu")
    assert_same_bits(fp8, expected)
    written = pages.view(4, -1) != UNTOUCHED
    assert int(written.sum()) <= 2 * 132


@pytest.mark.parametrize(
    ("slots", "message"), [([0, 128], "got 128"), ([-2, 0], "got -2"), ([5, 5], "got 5 2 times")]
)
def test_checked_slots_are_errors_and_nothing_is_written(slots, message, monkeypatch):
    monkeypatch.setenv("FLASHDSA_CHECK", "1")
    cache = torch.full((2, 64, 1, 132), UNTOUCHED, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        flashdsa.write_index_k_cache(
            torch.zeros(2, 128), torch.tensor(slots), cache, backend="emulate-sm90"
        )
    assert (cache == UNTOUCHED).all()


def test_pages_apart_in_memory_are_written_in_place():
    memory = torch.full((8, 64, 1, 132), UNTOUCHED, dtype=torch.int8)
    keys, slots = awkward_keys(torch.bfloat16)[20:60], torch.arange(60, 100)
    expected = memory[::2].clone()
    flashdsa.write_index_k_cache(keys, slots, expected, backend="cpu")
    flashdsa.write_index_k_cache(keys, slots, memory[::2], backend="emulate-sm90")
    assert torch.equal(memory[::2], expected)
    assert (memory[1::2] == UNTOUCHED).all()


def test_rows_with_gaps_and_odd_addresses_are_read_right():
    wide = torch.randn(9, 131, generator=torch.Generator().manual_seed(4)).bfloat16()
    keys = wide[:, 1:129]
    fp8, scale = flashdsa.quantize_index_k(keys, backend="emulate-sm90")
    expected_fp8, expected_scale = flashdsa.quantize_index_k(keys, backend="cpu")
    assert_same_bits(fp8, expected_fp8)
    assert_same_scales(scale, expected_scale)


def test_nothing_to_quantise():
    fp8, scale = flashdsa.quantize_index_k(torch.empty(0, 128), backend="emulate-sm90")
    assert fp8.shape == (0, 128)
    assert scale.shape == (0,)
