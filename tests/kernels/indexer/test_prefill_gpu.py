"""The indexer over shared keys on a Hopper GPU, where a CTA has many tiles."""

from __future__ import annotations

import pytest
import torch

import flashdsa
from flashdsa.verify.prefill_cases import PrefillCase, make_prefill_inputs
from tests.kernels.hopper_gpu import HOPPER_GPU

pytestmark = HOPPER_GPU
TOPK = 20
QUERIES = 4400
"""At least four tiles for each of 132 CTAs, with any number of heads."""


@pytest.mark.parametrize("by_score", [False, True])
@pytest.mark.parametrize("length", [24, 60, 150])
@pytest.mark.parametrize("num_heads", [16, 32, 64])
def test_many_short_documents(num_heads: int, length: int, by_score: bool) -> None:
    """Most tiles have a key tile or two, so that either warpgroup may have none."""
    ranges = tuple((t // length * length, t + 1) for t in range(QUERIES))
    x = make_prefill_inputs(PrefillCase("documents", ranges, TOPK, num_heads), 0, "cuda")
    ids = x.output_buffer()
    options = {**x.options, "backend": "sm90"}
    flashdsa.dsa_topk_prefill(*x.operands, ids, sorted=by_score, **options)
    scores = flashdsa.prefill_logits(*x.operands, **options)
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :TOPK].int()
    seen = torch.arange(QUERIES, device="cuda") % length + 1
    missing = torch.arange(TOPK, device="cuda") >= seen[:, None]
    if not by_score:
        best = best.masked_fill(missing, QUERIES).sort(dim=1).values
    assert torch.equal(ids, best.masked_fill(missing, -1).int())
