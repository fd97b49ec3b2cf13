"""The Blackwell scores-only kernel, emulated and checked, with every number of pages a stage."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("llvmlite", reason="llvmlite is not installed")
pytest.importorskip("cutlass.cute", reason="CuTe DSL is not installed")

import flashdsa
from flashdsa.backends.emulated.runner import Emulator
from flashdsa.kernels.catalog import INDEXER_LOGITS_SM100
from flashdsa.kernels.indexer.sm100.plan import LogitsPlan
from tests.kernels.indexer.exact_inputs import Inputs, make_inputs
from tests.kernels.indexer.normal_inputs import assert_scores_are_right, normal_inputs

LENGTHS = [300, 0, 1, 64, 65, 129]


def emulated_scores(plan: LogitsPlan, inputs: Inputs, max_len: int) -> torch.Tensor:
    """Scores of the plan's kernel, without findings but the known ones of the fused kernel."""
    runner = Emulator()
    scores = runner.empty(len(inputs.seq_lens), max_len, dtype=torch.float32)
    q, cache, *others = inputs
    function = runner.function(INDEXER_LOGITS_SM100, plan)
    with runner.launching():
        function(q, cache.view(torch.uint8), *others, scores, 3)
    assert not runner.findings
    return scores


@pytest.mark.parametrize("num_heads", [64, 32, 16])
def test_scores_are_right(num_heads: int) -> None:
    plan = LogitsPlan(num_heads=num_heads)
    inputs = normal_inputs(LENGTHS, num_heads)
    assert_scores_are_right(emulated_scores(plan, inputs, 317), inputs)
    exact = make_inputs(LENGTHS, num_heads=num_heads, seed=1)
    expected = flashdsa.indexer_logits(*exact, 300, backend="cpu")
    assert torch.equal(emulated_scores(plan, exact, 300), expected)


@pytest.mark.usefixtures("small_device")
def test_bad_pages_and_lengths_reach_nothing_outside() -> None:
    inputs = make_inputs([300, 200], seed=4)
    expected = flashdsa.indexer_logits(*inputs, 300, backend="cpu")
    inputs.block_table[0, 1], inputs.block_table[0, 3] = -1, len(inputs.k_index_cache_fp8)
    inputs.block_table[1, 0] = 2**31 - 1
    expected[0, 64:128] = expected[0, 192:256] = expected[1, :64] = -torch.inf
    scores = flashdsa.indexer_logits(*inputs, 300, backend="emulate-sm100")
    assert torch.equal(scores, expected)
    scores = flashdsa.indexer_logits(*inputs, 100, backend="emulate-sm100")
    assert torch.equal(scores, expected[:, :100])


@pytest.mark.usefixtures("small_device")
def test_a_token_scores_the_same_wherever_it_lies() -> None:
    inputs = make_inputs([640], values="equal")
    keys = torch.randn(128, generator=torch.Generator().manual_seed(3)).to(torch.float8_e4m3fn)
    pages = inputs.k_index_cache_fp8.view(-1, 8448)
    pages[:, :8192] = keys.view(torch.uint8).repeat(64)
    scores = flashdsa.indexer_logits(*inputs, 640, backend="emulate-sm100")
    assert scores.unique().numel() == 1
