"""The Hopper backward of the index scores on a GPU, where it is not what every backend is asked."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

import flashdsa
from flashdsa.heuristics.h200 import IndexBackward
from flashdsa.verify.compare import failures
from flashdsa.verify.indexer_training_cases import (
    IndexerTrainingCase,
    IndexerTrainingInputs,
    make_indexer_training_inputs,
)
from flashdsa.verify.judge_indexer_training import check_index_backward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase
from tests.support.hopper_gpu import by_turns_on_streams


@pytest.fixture(autouse=True)
def every_call_may_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device chooses between groups, however few slots there are."""
    monkeypatch.setattr(IndexBackward, "LEAST_CHOSEN_SLOTS", 0)


def fuzzed(seed: int) -> IndexerTrainingCase:
    """A shape and features drawn at random."""
    rng = random.Random(seed)
    queries = rng.choice((1, 2, 3, 5, 9, 17, 150, 600))
    keys = rng.choice((1, 40, 64, 200, 1000, 9000, 140_000))
    if keys > 9000:
        queries = min(queries, 17)  # the reference takes 0.1 s a query for the gradient of all keys
    case = SparseMlaCase(
        f"fuzz {seed}", queries, keys, 8, rng.choice((1, 7, 63, 64, 65, 129, 257, 300, 1100)),
        duplicates=rng.random() < 0.3, invalid=rng.random() < 0.5, empty_rows=rng.random() < 0.3,
        topk_length=rng.random() < 0.5, poison=rng.random() < 0.5, strided=rng.random() < 0.2,
    )  # fmt: skip
    heads = rng.choice((16, 32, 64))
    return IndexerTrainingCase(case, index_heads=heads, bf16_weights=rng.random() < 0.2)


@pytest.mark.parametrize("seed", range(20))
def test_fuzzed_shapes_are_within_the_contract(seed: int) -> None:
    """Queries of every third case name the same keys, so that large groups are taken."""
    inputs = make_indexer_training_inputs(fuzzed(seed), seed, "cuda")
    if seed % 3 == 0 and not inputs.case.attention.poison:
        inputs.indices[:] = inputs.indices[:1].clone()
    for deterministic in (False, True):
        judged = check_index_backward(inputs, "sm90", deterministic=deterministic)
        assert failures(judged) == []


def gradients(inputs: IndexerTrainingInputs, **options: bool) -> tuple[torch.Tensor, ...]:
    """On the current stream."""
    operands = (*inputs.operands, inputs.grad_scores)
    return flashdsa.indexer_bwd(*operands, backend="sm90", **options)


def many(seed: int = 0, queries: int = 700, heads: int = 64) -> IndexerTrainingInputs:
    """So many queries that the device chooses groups."""
    case = IndexerTrainingCase(SparseMlaCase("many", queries, 900, 8, 200), index_heads=heads)
    return make_indexer_training_inputs(case, seed, "cuda")


@pytest.mark.parametrize("heads", [16, 64])
def test_a_graph_replays_it_on_new_values(heads: int) -> None:
    """dQ and dW bit for bit, dK but for the order of its sums; the choice is on the device."""
    inputs = many(queries=2400 if heads == 16 else 700, heads=heads)
    gradients(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(inputs)
    inputs.indices.copy_(inputs.indices[:1].expand_as(inputs.indices).clone())
    graph.replay()
    torch.cuda.synchronize()
    dq, dk, dw = gradients(inputs)
    assert torch.equal(captured[0], dq)
    assert torch.equal(captured[2], dw)
    torch.testing.assert_close(captured[1], dk, rtol=1e-4, atol=1e-3)


def test_two_streams_do_not_share_a_workspace() -> None:
    inputs = [many(seed) for seed in range(2)]
    alone = [gradients(one) for one in inputs]
    together = by_turns_on_streams([partial(gradients, one) for one in inputs], 3)
    for results, expected in zip(together, alone, strict=True):
        for got in results:
            assert torch.equal(got[0], expected[0])
            torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=1e-3)


def test_it_has_the_same_bits_every_time_if_asked_for() -> None:
    inputs = many()
    first = gradients(inputs, deterministic=True)
    for _ in range(5):
        again = gradients(inputs, deterministic=True)
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
