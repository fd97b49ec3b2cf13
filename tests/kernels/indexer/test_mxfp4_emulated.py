"""Hopper's scores of keys of 68 bytes, emulated: the bits of the keys that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.backends.emulated.devices import SMALL
from flashdsa.backends.emulated.runner import emulation
from flashdsa.verify.compare import failures
from flashdsa.verify.indexer_cases import (
    IndexerCase,
    IndexerInputs,
    make_indexer_inputs,
    pack_pages,
)
from flashdsa.verify.judge_indexer import check_cache_read, check_cache_write, check_scores

pytest.importorskip("llvmlite", reason="llvmlite is not installed")
pytest.importorskip("cutlass.cute", reason="CuTe DSL is not installed")

BACKEND = "emulate-sm90"


def scores_of(inputs: IndexerInputs, cache: Tensor) -> Tensor:
    q, _, weights, lengths, table = inputs.operands
    return flashdsa.indexer_logits(q, cache, weights, lengths, table, 200, backend=BACKEND)


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
    with emulation(SMALL):
        got = scores_of(inputs, inputs.cache)
        expected = scores_of(inputs, pack_pages(every[0].view(torch.uint8), every[1]))
    assert torch.equal(got, expected) and got[0].unique().numel() > 150


def test_scales_at_both_ends_and_nan() -> None:
    inputs = make_indexer_inputs(IndexerCase("", (128,), 9, 16, mxfp4=True), seed=8)
    pages = inputs.cache.view(-1, 64 * 68)
    pages[:, 4096:] = torch.arange(256).byte()
    pages[:, 4096:4352:40] = 255
    with emulation(SMALL):
        got = scores_of(inputs, inputs.cache)
    q, cache, weights, lengths, table = inputs.operands
    expected = flashdsa.indexer_logits(q, cache, weights, lengths, table, 200, backend="cpu")
    assert torch.equal(got.isnan(), expected.isnan()) and 4 < got.isnan().sum() < 60
    sizes = expected.abs().nan_to_num(0, posinf=0)
    assert ((got - expected).abs().nan_to_num(0) <= 1e-4 * sizes + 2.0**-140).all()


def test_scores_are_within_the_contract() -> None:
    case = IndexerCase("", (200, 65, 0, 1), 9, 32, mxfp4=True, nan_keys=True, zero_scores=True)
    with emulation(SMALL):
        assert failures(check_scores(make_indexer_inputs(case, seed=9), BACKEND)[1]) == []


def test_the_cache_is_written_and_read_and_skipped_slots_are_left() -> None:
    draw = torch.Generator().manual_seed(1)
    cache = torch.randint(250, (2, 64, 1, 68), generator=draw).byte()
    slots = torch.tensor([3, -1, 127, 64])
    k = torch.randn(4, 128, generator=draw)
    assert failures(check_cache_write(k, slots, cache, BACKEND)) == []
    assert failures(check_cache_write(k, torch.full((4,), -1), cache, BACKEND)) == []
    assert failures(check_cache_read(cache, torch.arange(128), BACKEND)) == []
    outside = torch.tensor([200, -1])
    fp8, scale = flashdsa.read_index_k_cache(cache, outside, backend=BACKEND)
    assert not fp8.float().any() and not scale.any()
