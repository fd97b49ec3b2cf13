"""The Hopper scores-only kernel, emulated and checked: right, and what the fused kernel ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import flashdsa

pytest.importorskip("llvmlite", reason="llvmlite is not installed")
pytest.importorskip("cutlass.cute", reason="CuTe DSL is not installed")

from tests.kernels.indexer.exact_inputs import Inputs, make_inputs

pytestmark = pytest.mark.usefixtures("small_device")

PAGE = 64


def normal_inputs(lengths: list[int], num_heads: int, seed: int = 0) -> Inputs:
    """Rows of standard-normal queries and keys, quantised as in the model."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-length // PAGE) for length in lengths]
    num_pages = sum(pages) + 2
    keys = torch.randn(num_pages * PAGE, 128, generator=generator).bfloat16()
    cache = torch.zeros(num_pages, PAGE, 1, 132, dtype=torch.uint8)
    flashdsa.write_index_k_cache(keys, torch.arange(len(keys)), cache, backend="cpu")
    q = torch.randn(len(lengths), num_heads, 128, generator=generator).bfloat16()
    weights = torch.randn(len(lengths), num_heads, generator=generator)
    fp8, weights = flashdsa.quantize_index_q(q, weights, backend="cpu")
    table = torch.full((len(lengths), max([1, *pages])), -7, dtype=torch.int32)
    order = iter(torch.randperm(num_pages, generator=generator).tolist())
    for row, count in enumerate(pages):
        table[row, :count] = torch.tensor([next(order) for _ in range(count)])
    return Inputs(fp8, cache, weights, torch.tensor(lengths, dtype=torch.int32), table)


def float64_scores(inputs: Inputs, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of the row's tokens, their sum of magnitudes over heads, and that of all products."""
    length = int(inputs.seq_lens[row])
    positions = torch.arange(length)
    slots = inputs.block_table[row, positions // PAGE].long() * PAGE + positions % PAGE
    fp8, scale = flashdsa.read_index_k_cache(inputs.k_index_cache_fp8, slots, backend="cpu")
    q, keys = inputs.q_index_fp8[row].double(), fp8.double()
    relu = (keys @ q.T).relu()
    weights, scale = inputs.weights[row].double(), scale.double()
    products = keys.abs() @ q.abs().T
    signed, absolute = weights, weights.abs()
    return (relu @ signed) * scale, (relu @ absolute) * scale, (products @ absolute) * scale


@pytest.mark.parametrize("num_heads", [16, 32, 64])
def test_scores_are_right_and_minus_infinity_beyond_the_rows(num_heads):
    lengths = [300, 0, 1, 63, 64, 65, 128]
    inputs = normal_inputs(lengths, num_heads)
    scores = flashdsa.indexer_logits(*inputs, 317, backend="emulate-sm90")
    for row, length in enumerate(lengths):
        assert (scores[row, length:] == -math.inf).all()
        expected, magnitude, products = float64_scores(inputs, row)
        # Few heads can all be near zero, where the tensor cores' error is not.
        allowed = 3e-4 * magnitude if num_heads == 64 else 3e-4 * magnitude + 3e-5 * products
        assert ((scores[row, :length].double() - expected).abs() <= allowed).all()


def test_exact_scores_are_the_cpus():
    inputs = make_inputs([500, 129, 1000], seed=1)
    scores = flashdsa.indexer_logits(*inputs, 1000, backend="emulate-sm90")
    assert torch.equal(scores, flashdsa.indexer_logits(*inputs, 1000, backend="cpu"))


def test_the_fused_kernel_ranks_these_very_scores():
    lengths = [1100, 700, 512]
    inputs = normal_inputs(lengths, num_heads=16, seed=2)
    scores = flashdsa.indexer_logits(*inputs, max(lengths), backend="emulate-sm90")
    positions = flashdsa.topk_indices(scores, inputs.seq_lens, 512, sorted=True, backend="cpu")
    table = inputs.block_table.long().gather(1, positions // PAGE)
    fused = inputs.output(512)
    flashdsa.dsa_topk_indexer(*inputs, fused, sorted=True, backend="emulate-sm90")
    assert torch.equal(fused, (table * PAGE + positions % PAGE).int())


def test_a_token_scores_the_same_wherever_it_lies():
    inputs = make_inputs([640], values="equal")
    keys = torch.randn(128, generator=torch.Generator().manual_seed(3)).to(torch.float8_e4m3fn)
    pages = inputs.k_index_cache_fp8.view(-1, 8448)
    pages[:, :8192] = keys.view(torch.uint8).repeat(PAGE)
    scores = flashdsa.indexer_logits(*inputs, 640, backend="emulate-sm90")
    assert scores.unique().numel() == 1


def test_bad_pages_and_lengths_reach_nothing_outside():
    inputs = make_inputs([300, 200], seed=4)
    expected = flashdsa.indexer_logits(*inputs, 300, backend="cpu")
    inputs.block_table[0, 1], inputs.block_table[0, 3] = -1, len(inputs.k_index_cache_fp8)
    inputs.block_table[1, 0] = 2**31 - 1
    expected[0, 64:128] = expected[0, 192:256] = expected[1, :64] = -math.inf
    scores = flashdsa.indexer_logits(*inputs, 300, backend="emulate-sm90")
    assert torch.equal(scores, expected)
    # Too long for the output, too long for the table, negative.
    assert torch.equal(
        flashdsa.indexer_logits(*inputs, 100, backend="emulate-sm90"), expected[:, :100]
    )
    inputs.seq_lens[:] = torch.tensor([-3, 2**31 - 1])
    scores = flashdsa.indexer_logits(*inputs, 400, backend="emulate-sm90")
    assert (scores[0] == -math.inf).all()
    assert (scores[1, 320:] == -math.inf).all()
    assert torch.equal(scores[1, 64:200], expected[1, 64:200])


@pytest.mark.parametrize(
    ("row_length", "page", "max_len", "message"),
    [
        (-1, 0, 300, r"seq_lens\[0\] = -1"),
        (321, 0, 400, r"block_table: expected at least 6 pages"),
        (300, 99, 300, r"block_table\[0, 0\] = 99"),
        (300, 0, 200, r"max_len: expected at least the longest of seq_lens, 300; got 200"),
    ],
)
def test_checked_values_are_errors(row_length, page, max_len, message, monkeypatch):
    monkeypatch.setenv("FLASHDSA_CHECK", "1")
    inputs = make_inputs([300, 100])
    inputs.seq_lens[0], inputs.block_table[0, 0] = row_length, page
    with pytest.raises(ValueError, match=message):
        flashdsa.indexer_logits(*inputs, max_len, backend="emulate-sm90")
