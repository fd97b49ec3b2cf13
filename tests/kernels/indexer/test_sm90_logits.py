"""The Hopper scores-only kernel, emulated and checked: right, and what the fused kernel ranks."""

from __future__ import annotations

import math

import pytest
import torch

import flashdsa

pytest.importorskip("llvmlite", reason="llvmlite is not installed")
pytest.importorskip("cutlass.cute", reason="CuTe DSL is not installed")

from tests.kernels.indexer.exact_inputs import make_inputs
from tests.kernels.indexer.normal_inputs import PAGE, assert_scores_are_right, normal_inputs

pytestmark = pytest.mark.usefixtures("small_device")


@pytest.mark.parametrize("num_heads", [16, 32, 64])
def test_scores_are_right_and_minus_infinity_beyond_the_rows(num_heads):
    lengths = [300, 0, 1, 63, 64, 65, 128]
    inputs = normal_inputs(lengths, num_heads)
    scores = flashdsa.indexer_logits(*inputs, 317, backend="emulate-sm90")
    assert_scores_are_right(scores, inputs)


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
