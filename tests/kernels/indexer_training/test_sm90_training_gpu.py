"""The indexer's training on a Hopper GPU, where it is not what every backend's tests ask for."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.backends.sm90 import indexer_training
from flashdsa.heuristics.h200 import IndexBackward
from flashdsa.ops.indexer_training import AttentionTargetOperands, IndexerScoresOperands
from flashdsa.verify import judge_indexer_training as judge
from flashdsa.verify.compare import failures
from flashdsa.verify.indexer_training_cases import (
    IndexerTrainingCase,
    IndexerTrainingInputs,
    make_indexer_training_inputs,
)
from flashdsa.verify.judge_indexer_training import check_index_backward
from flashdsa.verify.judge_sparse_mla import forward_results
from flashdsa.verify.sparse_mla_cases import SparseMlaCase
from tests.support.hopper_gpu import HOPPER_GPU, Guarded, by_turns_on_streams, capture

pytestmark = HOPPER_GPU
CASE = IndexerTrainingCase(
    SparseMlaCase("many queries", 300, 400, 64, 140, invalid=True, topk_length=True), index_heads=64
)


def calls(inputs: IndexerTrainingInputs) -> dict[str, Callable[[], Tensor]]:
    """Both operations on the inputs."""
    x = inputs.attention
    _, lse = forward_results(x)
    options = {"topk_length": x.topk_length, "backend": "sm90"}
    return {
        "target": lambda: flashdsa.attention_target(
            x.q, x.kv, lse, inputs.indices, attn_sink=x.attn_sink, **options
        ),
        "scores": lambda: flashdsa.indexer_scores(*inputs.operands, **options),
    }


@pytest.mark.parametrize("what", ["target", "scores"])
def test_a_graph_replays_it_on_new_values(what: str) -> None:
    inputs = make_indexer_training_inputs(CASE, 0, "cuda")
    call = calls(inputs)[what]
    graph, captured = capture(call)
    for x in (inputs.attention.q, inputs.q_index, inputs.indices):
        x.copy_(x.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, call())


@pytest.mark.parametrize("what", ["target", "scores"])
def test_two_streams_do_not_disturb_each_other(what: str) -> None:
    both = [calls(make_indexer_training_inputs(CASE, seed, "cuda"))[what] for seed in range(2)]
    alone = [call() for call in both]
    for expected, results in zip(alone, by_turns_on_streams(both, 10), strict=True):
        assert all(torch.equal(one, expected) for one in results)


FUZZED = 200
BATCH = 20
"""Shapes of one test."""


def drawn(draw: random.Random, number: int) -> IndexerTrainingCase:
    """Any shape and features."""
    attention = SparseMlaCase(
        f"fuzzed {number}", draw.choice([1, 2, 3, 7, 140, 300]),
        draw.choice([1, 63, 64, 65, 300, 3000]), draw.choice([1, 8, 16, 20, 32, 64, 65, 100, 128]),
        draw.choice([1, 63, 64, 65, 128, 257, 320]), duplicates=draw.random() < 0.3,
        invalid=draw.random() < 0.5, empty_rows=draw.random() < 0.3,
        topk_length=draw.random() < 0.5, attn_sink=draw.choice([None, "finite", "infinite"]),
        poison=draw.random() < 0.3, strided=draw.random() < 0.3,
    )  # fmt: skip
    heads = draw.choice([1, 16, 30, 32, 64])
    return IndexerTrainingCase(attention, index_heads=heads, bf16_weights=draw.random() < 0.3)


@pytest.mark.parametrize("batch", range(FUZZED // BATCH))
def test_fuzzed_shapes_are_within_the_contract_and_repeat_bit_for_bit(batch: int) -> None:
    draw = random.Random(batch)
    for number in range(BATCH):
        case = drawn(draw, batch * BATCH + number)
        inputs = make_indexer_training_inputs(case, number, "cuda")
        assert failures(judge.check_target(inputs, "sm90")) == [], case
        assert failures(judge.check_index_scores(inputs, "sm90")) == [], case
        for call in calls(inputs).values():
            assert torch.equal(call(), call()), case


def test_nothing_outside_of_any_buffer_is_written_or_matters() -> None:
    inputs = make_indexer_training_inputs(CASE, 0, "cuda")
    x = inputs.attention
    _, lse = forward_results(x)
    runner = Guarded()
    assert x.topk_length is not None
    lengths, indices = runner.guarded(x.topk_length), runner.guarded(inputs.indices)
    of_target = AttentionTargetOperands(
        runner.guarded(x.q),
        runner.guarded(x.kv.view(-1, 576)),
        runner.guarded(lse),
        indices,
        lengths,
        None,
    )
    of_scores = IndexerScoresOperands(
        runner.guarded(inputs.q_index),
        runner.guarded(inputs.k_index),
        runner.guarded(inputs.weights),
        indices,
        lengths,
    )
    found = {
        "target": indexer_training.bind_target(runner, of_target, sm_scale=576**-0.5)(of_target),
        "scores": indexer_training.bind_scores(runner, of_scores)(of_scores),
    }
    for name, call in calls(inputs).items():
        assert torch.equal(found[name], call())
    assert runner.touched() == []


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
def test_a_graph_replays_gradients_on_new_values(heads: int) -> None:
    """dQ and dW bit for bit, dK but for the order of its sums; the choice is on the device."""
    inputs = many(queries=2400 if heads == 16 else 700, heads=heads)
    graph, captured = capture(lambda: gradients(inputs))
    inputs.indices.copy_(inputs.indices[:1].expand_as(inputs.indices).clone())
    graph.replay()
    torch.cuda.synchronize()
    dq, dk, dw = gradients(inputs)
    assert torch.equal(captured[0], dq)
    assert torch.equal(captured[2], dw)
    torch.testing.assert_close(captured[1], dk, rtol=1e-4, atol=1e-3)


def test_two_streams_of_gradients_do_not_share_a_workspace() -> None:
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
