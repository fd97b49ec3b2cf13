"""Small kernels beside Hopper's indexer on ptxemu: quantised keys, rows that need no scores."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import flashdsa

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from flashdsa.backends.emulated import devices
from flashdsa.backends.emulated.runner import Emulator, emulation
from flashdsa.kernels.catalog import INDEXER_UNSCORED
from flashdsa.kernels.indexer.plan import MOST_PAGES, most_pages
from tests.kernels.indexer.inputs import Inputs, make_inputs

pytestmark = pytest.mark.usefixtures("small_device")
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


@pytest.mark.parametrize("rule", ["fp32", "ue8m0"])
@DTYPES
def test_keys(dtype, rule):
    """By torch where a scale is a power of two."""
    keys = awkward_keys(dtype)
    fp8, scale = flashdsa.quantize_index_k(keys, scale=rule, backend="emulate-sm90")
    expected_fp8, expected_scale = flashdsa.quantize_index_k(keys, scale=rule, backend="cpu")
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


LENGTHS = [0, 1, 63, 64, 65, 127, 128, 447, 448, 512]
TOO_FEW, TOO_MANY = -5, 2**31 - 1


def write_all(inputs: Inputs, topk: int, *, positions: bool = False) -> torch.Tensor:
    """One checked launch of the kernel."""
    runner, ids = Emulator(), inputs.output(topk)
    function = runner.function(INDEXER_UNSCORED, INDEXER_UNSCORED.plan)
    with runner.launching():
        pages = len(inputs.k_index_cache_fp8)
        function(inputs.seq_lens, inputs.block_table, ids, pages, int(not positions))
    assert runner.findings == []
    return ids


def every_token(inputs: Inputs, topk: int, *, positions: bool = False) -> torch.Tensor:
    """The contract, row by row."""
    ids, (requests, width) = inputs.output(topk, fill=-1), inputs.block_table.shape
    next_n = len(ids) // requests
    for row, length in enumerate(inputs.seq_lens.tolist()):
        tokens = torch.arange(min(max(length, 0), 64 * width))
        page = inputs.block_table[row // next_n, tokens // 64]
        slots = tokens if positions else page * 64 + tokens % 64
        cached = slots[(page >= 0) & (page < len(inputs.k_index_cache_fp8))]
        ids[row, : len(cached)] = cached.int()
    return ids


@pytest.mark.parametrize("positions", [False, True], ids=["slots", "positions"])
@pytest.mark.parametrize("topk", [512, 600])
def test_rows_of_all_lengths(topk: int, positions: bool) -> None:
    """Also of fewer tokens than none and of more than the table has room for."""
    inputs = make_inputs(LENGTHS, num_heads=16)
    inputs.seq_lens[1], inputs.seq_lens[-1] = TOO_FEW, TOO_MANY
    got = write_all(inputs, topk, positions=positions)
    assert torch.equal(got, every_token(inputs, topk, positions=positions))


@pytest.mark.parametrize("positions", [False, True], ids=["slots", "positions"])
def test_tokens_of_bad_pages_are_passed_over(positions: bool) -> None:
    """The first page, one in the middle, the last, which is not full, all of a row."""
    inputs = make_inputs([300, 300, 300, 130, 0, 256], num_heads=16)
    inputs.block_table[0, 0] = inputs.block_table[1, 2] = -1
    inputs.block_table[2, 4] = len(inputs.k_index_cache_fp8)
    inputs.block_table[3] = 1 << 30
    got = write_all(inputs, 512, positions=positions)
    assert torch.equal(got, every_token(inputs, 512, positions=positions))
    assert (got[3] == -1).all()


@pytest.mark.parametrize("next_n", [2, 3])
def test_queries_of_a_request_have_its_pages(next_n: int) -> None:
    rows = make_inputs([400] * 3 * next_n, num_heads=16)
    rows.seq_lens[:: next_n + 1] = 130
    rows = rows._replace(block_table=rows.block_table[::next_n].contiguous())
    assert torch.equal(write_all(rows, 512), every_token(rows, 512))


def test_the_widest_table_with_rows_apart() -> None:
    """2,048 tokens, a page a lane."""
    inputs = make_inputs([2048, 2047, 1985], num_heads=16)
    wide = torch.nn.functional.pad(inputs.block_table, (0, 5), value=1 << 30)
    inputs = inputs._replace(block_table=wide[:, :MOST_PAGES])
    assert inputs.block_table.stride(0) == MOST_PAGES + 5
    assert torch.equal(write_all(inputs, 2048), every_token(inputs, 2048))


def test_no_wider_table_is_served() -> None:
    assert [most_pages(topk) for topk in (63, 64, 600, 2048, 4096)] == [0, 1, 9, 32, 32]


@pytest.mark.parametrize(
    ("topk", "pages", "by_score", "narrow"),
    [
        (512, 8, False, True),
        (512, 9, False, False),
        (600, 9, False, True),
        (600, 10, False, False),
        (512, 8, True, False),
    ],
)
def test_the_operation_takes_it_for_narrow_tables(
    topk: int, pages: int, by_score: bool, narrow: bool
) -> None:
    """Not where scores decide on the order."""
    inputs = make_inputs([70, 500, 0], num_heads=16)
    more = pages - inputs.block_table.shape[1]
    table = torch.nn.functional.pad(inputs.block_table, (0, more))
    expected, got = inputs.output(topk), inputs.output(topk)
    operands = inputs._replace(block_table=table)
    flashdsa.dsa_topk_indexer(*operands, expected, sorted=by_score, backend="cpu")
    with emulation(devices.SMALL) as emulator:
        flashdsa.dsa_topk_indexer(*operands, got, sorted=by_score, backend="emulate-sm90")
    assert torch.equal(got.sort().values, expected.sort().values)
    assert ("unscored_kernel" in emulator.setups[0].kernel) == narrow
