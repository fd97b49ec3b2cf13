"""The Hopper backward on a GPU, where it is not what every backend's tests ask for."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import flashdsa
from flashdsa.backends.sm90 import mla_bwd
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import check_backward, forward_results
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, SparseMlaInputs, make_sparse_mla_inputs
from tests.support.attention_launches import without_tickets
from tests.support.hopper_gpu import HOPPER_GPU, by_turns_on_streams, capture

pytestmark = HOPPER_GPU


LISTS: tuple[dict[str, Any], ...] = (
    {},
    {"extra_keys": 300, "extra_topk": 70},
    {"extra_keys": 200, "extra_topk": 128, "ranges": "extra_kv"},
    {"extra_keys": 90, "extra_topk": 3, "ranges": "extra_kv", "index_block": 4},
)
"""One source or two."""


def fuzzed(seed: int) -> SparseMlaCase:
    """A shape and features drawn at random."""
    rng = random.Random(seed)
    num_keys, topk = rng.choice((1, 40, 200, 1000)), rng.choice((1, 7, 64, 70, 129, 300))
    return SparseMlaCase(
        f"fuzz {seed}", rng.choice((1, 2, 3, 5, 9, 17, 100)), num_keys,
        rng.choice((8, 16, 32, 64, 128)), topk, duplicates=rng.random() < 0.3,
        invalid=rng.random() < 0.5, empty_rows=rng.random() < 0.3, topk_length=rng.random() < 0.5,
        poison=rng.random() < 0.5, attn_sink=rng.choice((None, "finite", "infinite")),
        strided=rng.random() < 0.2, cancels=num_keys == 1 or topk == 1, d_qk=rng.choice((512, 576)),
        **rng.choice(LISTS),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_fuzzed_shapes_are_within_the_contract(seed: int) -> None:
    inputs = make_sparse_mla_inputs(fuzzed(seed), seed, "cuda")
    assert failures(check_backward(inputs, "sm90")) == []


def gradients(inputs: SparseMlaInputs) -> tuple[torch.Tensor, ...]:
    """dQ and dKV on the current stream."""
    O, lse = forward_results(inputs)
    operands = (inputs.q, inputs.kv, inputs.do, lse.cuda(), O.cuda(), inputs.indices)
    return flashdsa.mla_bwd(*operands, backend="sm90")[:2]


@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_replays_it_on_new_values(heads: int) -> None:
    """dQ bit for bit, dKV but for the order of its sums; the choice of groups is on the device."""
    inputs = make_sparse_mla_inputs(SparseMlaCase("graph", 200, 300, heads, 64), 0, "cuda")
    O, lse = (x.cuda() for x in forward_results(inputs))

    def backward() -> tuple[torch.Tensor, ...]:
        operands = (inputs.q, inputs.kv, inputs.do, lse, O, inputs.indices)
        return flashdsa.mla_bwd(*operands, backend="sm90")[:2]

    graph, captured = capture(backward)
    inputs.indices.copy_(inputs.indices[:1].expand_as(inputs.indices).clone())
    graph.replay()
    torch.cuda.synchronize()
    dq, dkv = backward()
    assert torch.equal(captured[0], dq)
    torch.testing.assert_close(captured[1], dkv, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("heads", "queries", "topk"), [(64, 700, 300), (64, 300, 600), (16, 1400, 200)]
)
def test_drawn_items_give_the_bits_of_turns(
    heads: int,
    queries: int,
    topk: int,
    monkeypatch: pytest.MonkeyPatch,
    new_calls: Callable[[], None],
) -> None:
    """More items than CTAs, of up to ten tiles, on a graph's replays too."""
    features = {"topk_length": True, "invalid": True, "poison": True, "empty_rows": True}
    case = SparseMlaCase("drawn", queries, 3000, heads, topk, **features)
    inputs = make_sparse_mla_inputs(case, 0, "cuda")
    assert failures(check_backward(inputs, "sm90")) == []
    O, lse = (x.cuda() for x in forward_results(inputs))
    operands = (inputs.q, inputs.kv, inputs.do, lse, O, inputs.indices)
    backward = partial(flashdsa.mla_bwd, *operands, topk_length=inputs.topk_length, backend="sm90")
    drawn = [backward() for _ in range(5)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backward()
    for _ in range(3):
        captured[0].zero_()
        graph.replay()
        drawn.append(tuple(x.clone() for x in captured))
    monkeypatch.setattr(mla_bwd, "choose", without_tickets)
    new_calls()
    in_turns = backward()
    for dq, dkv, *_ in drawn:
        assert torch.equal(dq, in_turns[0])
        torch.testing.assert_close(dkv, in_turns[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("heads", "queries"), [(16, 2400), (64, 1400), (128, 1200)])
def test_a_graph_replays_the_choice_of_slots(heads: int, queries: int) -> None:
    """Ids at random over far rows take slots, which give the bits of `deterministic=True`; lists
    that are alike do not. Memory holds NaN before."""
    generator = torch.Generator("cuda").manual_seed(heads)
    normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16, generator=generator)
    num_keys, topk = 300_000, 1024
    q, kv, dO = normal(queries, heads, 576), normal(num_keys, 576), normal(queries, heads, 512)
    parts = torch.arange(topk, device="cuda")
    drawn = torch.rand(queries, topk, device="cuda", generator=generator) + parts
    ids = (drawn * (num_keys // topk)).int()
    indices, O, lse = ids.clone(), torch.empty_like(dO), torch.empty(queries, heads, device="cuda")
    forward = partial(flashdsa.sparse_mla_fwd, q, kv, indices, out=O, lse=lse, backend="sm90")
    backward = partial(flashdsa.mla_bwd, q, kv, dO, lse, O, indices, backend="sm90")
    forward()
    torch.full((3 << 28,), torch.nan, device="cuda")
    graph, captured = capture(backward)
    for alike in (False, True, False):
        indices.copy_(ids[:1].expand_as(ids) if alike else ids)
        forward()
        graph.replay()
        in_order = backward(deterministic=True)
        torch.testing.assert_close(captured[0], in_order[0], rtol=2e-2, atol=1e-3)
        most = in_order[1].abs().max().item()
        torch.testing.assert_close(captured[1], in_order[1], rtol=1e-2, atol=2e-3 * most)
        assert torch.equal(captured[1], in_order[1]) == (not alike)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_a_graph_replays_two_sources_on_new_ranges(heads: int, deterministic: bool) -> None:
    """Windows move: their starts and ends are read on the device alone."""
    queries, rows = 300, 400
    torch.manual_seed(heads)
    q = torch.randn(queries, heads, 512, device="cuda").bfloat16()
    entries, window = (torch.randn(n, 512, device="cuda").bfloat16() for n in (100, rows))
    ids = torch.randint(0, 100, (queries, 40), device="cuda", dtype=torch.int32)
    starts = torch.arange(queries, device="cuda", dtype=torch.int32) - 127
    ends = starts + 128
    lists = {"extra_kv": window, "extra_indices": (starts, ends)}
    O, lse = flashdsa.sparse_mla_fwd(q, entries, ids, backend="sm90", **lists)
    options = {**lists, "deterministic": deterministic, "backend": "sm90"}

    def backward() -> tuple[torch.Tensor, ...]:
        return flashdsa.mla_bwd(q, entries, O.sin(), lse, O, ids, **options)

    graph, captured = capture(backward)
    starts += 90
    ends += 60
    graph.replay()
    torch.cuda.synchronize()
    dq, *of_sources = backward()
    assert torch.equal(captured[0], dq)
    for got, wanted in zip(captured[1:], of_sources, strict=True):
        if deterministic:
            assert torch.equal(got, wanted)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)


def test_two_streams_do_not_share_a_workspace() -> None:
    case = SparseMlaCase("streams", 300, 500, 128, 200)
    inputs = [make_sparse_mla_inputs(case, seed, "cuda") for seed in range(2)]
    alone = [gradients(one) for one in inputs]
    together = by_turns_on_streams([partial(gradients, one) for one in inputs], 3)
    for results, expected in zip(together, alone, strict=True):
        for got in results:
            assert torch.equal(got[0], expected[0])
            torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=1e-3)


def tables(kind: str, queries: int, num_keys: int, topk: int) -> torch.Tensor:
    """(queries, topk) int32 on the GPU.

    Args:
        kind: a query names "dense": the same stretch of rows as its neighbours, and rows far away;
            "windowed": rows of a window that moves with it; "random": any rows, distinct;
            "repeated": any rows, several of them again and again.
    """
    weights = torch.rand(queries, num_keys, device="cuda")
    query = torch.arange(queries, device="cuda")[:, None]
    row = torch.arange(num_keys, device="cuda")
    if kind == "dense":
        weights += (row < topk * 3 // 4) * 2.0
    elif kind == "windowed":
        weights += ((row - query * (num_keys // queries)) % num_keys < topk * 5 // 4) * 2.0
    chosen = weights.topk(topk, dim=1).indices.int()
    if kind == "repeated":
        chosen[:, : topk // 8] = chosen[:, :1]
    return chosen


@pytest.mark.parametrize("d_qk", [512, 576])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("kind", ["dense", "windowed", "random", "repeated"])
def test_deterministic_bits_are_equal_over_50_calls(kind: str, heads: int, d_qk: int) -> None:
    torch.manual_seed(heads)
    queries, num_keys, topk = 384, 4096, 1024
    q, kv = (torch.randn(n, d_qk, device="cuda") for n in (queries * heads, num_keys))
    q, kv = q.view(queries, heads, d_qk).bfloat16(), kv.bfloat16()
    do = torch.randn(queries, heads, 512, device="cuda").bfloat16()
    indices = tables(kind, queries, num_keys, topk)
    O, lse = flashdsa.sparse_mla_fwd(q, kv, indices, backend="sm90")
    backward = partial(
        flashdsa.mla_bwd, q, kv, do, lse, O, indices, deterministic=True, backend="sm90"
    )
    first = backward()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(49):
        for got, expected in zip(backward(), first, strict=True):
            different += (got != expected).sum()
    assert int(different) == 0
