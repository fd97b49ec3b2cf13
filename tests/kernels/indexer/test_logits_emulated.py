"""Scores-only kernels, emulated and checked: right, and what the fused kernel ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

import flashdsa
from flashdsa.backends.emulated.runner import Emulator
from flashdsa.kernels.catalog import INDEXER_LOGITS_SM100
from flashdsa.kernels.indexer.sm100.plan import LogitsPlan
from flashdsa.verify.compare import failures
from flashdsa.verify.indexer_cases import (
    IndexerCase,
    IndexerInputs,
    make_indexer_inputs,
    pack_pages,
)
from flashdsa.verify.judge_indexer import check_cache_read, check_cache_write, check_scores
from tests.kernels.indexer.inputs import (
    PAGE,
    Inputs,
    assert_scores_are_right,
    make_inputs,
    normal_inputs,
)

pytestmark = pytest.mark.usefixtures("small_device")
BACKENDS = ["emulate-sm90", "emulate-sm100"]


def emulated_scores(plan: LogitsPlan, inputs: Inputs, max_len: int) -> Tensor:
    """Scores of the plan's kernel for Blackwell, without findings."""
    runner = Emulator()
    scores = runner.empty(len(inputs.seq_lens), max_len, dtype=torch.float32)
    q, cache, *others = inputs
    function = runner.function(INDEXER_LOGITS_SM100, plan)
    with runner.launching():
        function(q, cache.view(torch.uint8), *others, scores, 3)
    assert not runner.findings
    return scores


@pytest.mark.parametrize("num_heads", [16, 32, 64])
def test_scores_are_right_and_minus_infinity_beyond_the_rows(num_heads: int) -> None:
    inputs = normal_inputs([300, 0, 1, 63, 64, 65, 128], num_heads)
    scores = flashdsa.indexer_logits(*inputs, 317, backend="emulate-sm90")
    assert_scores_are_right(scores, inputs)


@pytest.mark.parametrize("num_heads", [64, pytest.param(32, marks=pytest.mark.slow), 16])
def test_scores_of_blackwell_are_right(num_heads: int) -> None:
    plan = LogitsPlan(num_heads=num_heads)
    lengths = [300, 0, 1, 64, 65, 129]
    inputs = normal_inputs(lengths, num_heads)
    assert_scores_are_right(emulated_scores(plan, inputs, 317), inputs)
    exact = make_inputs(lengths, num_heads=num_heads, seed=1)
    expected = flashdsa.indexer_logits(*exact, 300, backend="cpu")
    assert torch.equal(emulated_scores(plan, exact, 300), expected)


def test_exact_scores_are_the_cpus() -> None:
    inputs = make_inputs([500, 129, 1000], seed=1)
    scores = flashdsa.indexer_logits(*inputs, 1000, backend="emulate-sm90")
    assert torch.equal(scores, flashdsa.indexer_logits(*inputs, 1000, backend="cpu"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_fused_kernel_ranks_these_very_scores(backend: str) -> None:
    lengths = [1100, 700, 512]
    inputs = normal_inputs(lengths, num_heads=16, seed=2)
    scores = flashdsa.indexer_logits(*inputs, max(lengths), backend=backend)
    by_score = backend == "emulate-sm90"
    positions = flashdsa.topk_indices(scores, inputs.seq_lens, 512, sorted=by_score, backend="cpu")
    table = inputs.block_table.long().gather(1, positions // PAGE)
    fused = inputs.output(512)
    flashdsa.dsa_topk_indexer(*inputs, fused, sorted=by_score, backend=backend)
    assert torch.equal(fused, (table * PAGE + positions % PAGE).int())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_scores_the_same_wherever_it_lies(backend: str) -> None:
    inputs = make_inputs([640], values="equal")
    keys = torch.randn(128, generator=torch.Generator().manual_seed(3)).to(torch.float8_e4m3fn)
    pages = inputs.k_index_cache_fp8.view(-1, 8448)
    pages[:, :8192] = keys.view(torch.uint8).repeat(PAGE)
    scores = flashdsa.indexer_logits(*inputs, 640, backend=backend)
    assert scores.unique().numel() == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_pages_and_lengths_reach_nothing_outside(backend: str) -> None:
    inputs = make_inputs([300, 200], seed=4)
    expected = flashdsa.indexer_logits(*inputs, 300, backend="cpu")
    inputs.block_table[0, 1], inputs.block_table[0, 3] = -1, len(inputs.k_index_cache_fp8)
    inputs.block_table[1, 0] = 2**31 - 1
    expected[0, 64:128] = expected[0, 192:256] = expected[1, :64] = -math.inf
    scores = flashdsa.indexer_logits(*inputs, 300, backend=backend)
    assert torch.equal(scores, expected)
    # Too long for the output, too long for the table, negative.
    assert torch.equal(flashdsa.indexer_logits(*inputs, 100, backend=backend), expected[:, :100])
    inputs.seq_lens[:] = torch.tensor([-3, 2**31 - 1])
    scores = flashdsa.indexer_logits(*inputs, 400, backend=backend)
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
def test_checked_values_are_errors(
    row_length: int, page: int, max_len: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHDSA_CHECK", "1")
    inputs = make_inputs([300, 100])
    inputs.seq_lens[0], inputs.block_table[0, 0] = row_length, page
    with pytest.raises(ValueError, match=message):
        flashdsa.indexer_logits(*inputs, max_len, backend="emulate-sm90")


def scores_of(inputs: IndexerInputs, cache: Tensor) -> Tensor:
    """Of pages of 68-byte keys or of e4m3 ones."""
    q, _, weights, lengths, table = inputs.operands
    return flashdsa.indexer_logits(q, cache, weights, lengths, table, 200, backend=BACKENDS[0])


@pytest.mark.parametrize(
    "num_heads", [16, *(pytest.param(x, marks=pytest.mark.slow) for x in (32, 64))]
)
def test_scores_have_the_bits_of_e4m3_keys(num_heads: int) -> None:
    """Every code in each group, scales that span 0 to 23 powers of two, in tokens of any place."""
    inputs = make_indexer_inputs(IndexerCase("", (200, 130), 9, num_heads, mxfp4=True), seed=7)
    pages = inputs.cache.view(-1, 64 * 68)
    token = torch.arange(64).view(1, 64, 1)
    below = (token + torch.arange(len(pages)).view(-1, 1, 1) * 5 + torch.arange(4) * 7) % 24
    below[..., 1] = 0
    pages[:, 4096:] = (140 - below).byte().view(len(pages), 256)
    every = flashdsa.read_index_k_cache(inputs.cache, torch.arange(64 * len(pages)), backend="cpu")
    got = scores_of(inputs, inputs.cache)
    expected = scores_of(inputs, pack_pages(every[0].view(torch.uint8), every[1]))
    assert torch.equal(got, expected) and got[0].unique().numel() > 150


def test_scales_at_both_ends_and_nan() -> None:
    inputs = make_indexer_inputs(IndexerCase("", (128,), 9, 16, mxfp4=True), seed=8)
    pages = inputs.cache.view(-1, 64 * 68)
    pages[:, 4096:] = torch.arange(256).byte()
    pages[:, 4096:4352:40] = 255
    got = scores_of(inputs, inputs.cache)
    q, cache, weights, lengths, table = inputs.operands
    expected = flashdsa.indexer_logits(q, cache, weights, lengths, table, 200, backend="cpu")
    assert torch.equal(got.isnan(), expected.isnan()) and 4 < got.isnan().sum() < 60
    sizes = expected.abs().nan_to_num(0, posinf=0)
    assert ((got - expected).abs().nan_to_num(0) <= 1e-4 * sizes + 2.0**-140).all()


def test_scores_of_68_byte_keys_are_within_the_contract() -> None:
    case = IndexerCase("", (200, 65, 0, 1), 9, 16, mxfp4=True, nan_keys=True, zero_scores=True)
    assert failures(check_scores(make_indexer_inputs(case, seed=9), BACKENDS[0])[1]) == []


def test_the_cache_is_written_and_read_and_skipped_slots_are_left() -> None:
    draw = torch.Generator().manual_seed(1)
    cache = torch.randint(250, (2, 64, 1, 68), generator=draw).byte()
    slots = torch.tensor([3, -1, 127, 64])
    k = torch.randn(4, 128, generator=draw)
    assert failures(check_cache_write(k, slots, cache, BACKENDS[0])) == []
    assert failures(check_cache_write(k, torch.full((4,), -1), cache, BACKENDS[0])) == []
    assert failures(check_cache_read(cache, torch.arange(128), BACKENDS[0])) == []
    outside = torch.tensor([200, -1])
    fp8, scale = flashdsa.read_index_k_cache(cache, outside, backend=BACKENDS[0])
    assert not fp8.float().any() and not scale.any()
