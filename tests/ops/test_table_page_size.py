"""Tables of the indexer whose entries name fewer tokens than a page of the cache has."""

from __future__ import annotations

import pytest
import torch

import flashdsa
from flashdsa.backends.catalog import registry
from flashdsa.ops.indexer import DSA_TOPK_INDEXER, TopkIndexerOperands
from tests.kernels.indexer.inputs import make_inputs, scattered

LENGTHS = [0, 3, 64, 130, 700]
TOPK = 100


@pytest.mark.parametrize("size", [1, 2, 16, 32])
@pytest.mark.parametrize("sort", [False, True])
def test_tokens_win_wherever_their_entries_lie(size: int, sort: bool) -> None:
    whole = make_inputs(LENGTHS, values="two")
    short, expected, ids = scattered(whole, size), whole.output(TOPK), whole.output(TOPK)
    flashdsa.dsa_topk_indexer(*whole, expected, ids="position", sorted=sort, backend="cpu")
    flashdsa.dsa_topk_indexer(
        *short, ids, ids="position", sorted=sort, table_page_size=size, backend="cpu"
    )
    assert torch.equal(ids, expected)
    slots = whole.output(TOPK)
    flashdsa.dsa_topk_indexer(*short, slots, sorted=sort, table_page_size=size, backend="cpu")
    entry = short.block_table.long().gather(1, expected.clamp_min(0).long() // size)
    named = entry * size + expected.clamp_min(0) % size
    assert torch.equal(slots, torch.where(expected < 0, -1, named).int())
    scores = flashdsa.indexer_logits(*short, 700, table_page_size=size, backend="cpu")
    assert torch.equal(scores, flashdsa.indexer_logits(*whole, 700, backend="cpu"))


@pytest.mark.parametrize("size", [0, 3, 128])
def test_a_size_that_no_page_is_made_of_is_an_error(size: int) -> None:
    inputs = make_inputs([5])
    with pytest.raises(ValueError, match=r"table_page_size: expected (a divisor of 64|at least 1)"):
        flashdsa.dsa_topk_indexer(*inputs, inputs.output(TOPK), table_page_size=size, backend="cpu")


def test_a_bad_slot_is_an_error_that_names_it() -> None:
    inputs = scattered(make_inputs([70]), 1)
    inputs.block_table[0, 69] = len(inputs.k_index_cache_fp8) * 64
    ids = inputs.output(TOPK)
    with pytest.raises(ValueError, match=r"block_table\[0, 69\] = "):
        flashdsa.dsa_topk_indexer(*inputs, ids, table_page_size=1, backend="cpu")
    assert (ids == -99).all()


def test_hopper_refuses_by_name() -> None:
    inputs = make_inputs([5])
    operands = TopkIndexerOperands(*inputs, inputs.output(TOPK))
    values = DSA_TOPK_INDEXER.filled(operands, {"table_page_size": 1, "check": True})
    problem = DSA_TOPK_INDEXER.problem(operands, values, DSA_TOPK_INDEXER.check(operands, values))
    for implementation in registry.implementations("dsa_topk_indexer"):
        if implementation.backend == "sm90":
            reasons = [str(reason) for reason in implementation.features.missing(problem)]
            assert "table_page_size: takes 64; got 1" in reasons
