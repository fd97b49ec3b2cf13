"""A choice of blocks, and of tokens among them: against the contract's example and dense ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.backends.catalog import registry
from flashdsa.dispatch.registration import custom_op
from flashdsa.ops.indexer import DSA_TOPK_INDEXER, TopkIndexerOperands
from tests.kernels.indexer.inputs import make_inputs, scattered

MAXIMA = [7, 6, 0, 0, 3, 3, 3, 3, 9, 8, 1, 1, 5, 5, 5, 5, 1, 1, 1]
"""Scores of the contract's example F: 19 positions in blocks of four."""


def keys_with_scores(scores: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and weights of `dsa_topk_prefill` for one query with these scores."""
    k = torch.zeros(len(scores), 128)
    k[:, 5] = torch.tensor(scores)
    q = torch.zeros(1, 1, 128)
    q[0, 0, 5] = 1
    return q, k, torch.ones(1, 1)


def prefill(scores: list[float], topk: int, first: int = 0, **options: object) -> list[int]:
    """Ids of one query that sees these scores from row `first` on."""
    q, k, weights = keys_with_scores([99.0] * first + scores + [99.0])
    starts, ends = (torch.tensor([x], dtype=torch.int32) for x in (first, first + len(scores)))
    ids = torch.full((1, topk), -9, dtype=torch.int32)
    flashdsa.dsa_topk_prefill(q, k, weights, starts, ends, ids, backend="cpu", **options)
    return ids[0].tolist()


@pytest.mark.parametrize("first", [0, 3])
def test_example_f(first: int) -> None:
    scores = [float(x) for x in MAXIMA]
    assert prefill(scores, 3, first, block=4, sorted=True) == [4, 2, 0]
    assert prefill(scores, 3, first, block=4) == [0, 2, 4]
    blocks = torch.tensor([[4, 2, 0]], dtype=torch.int32)
    chosen = prefill(scores, 5, first, block=4, candidates=blocks, sorted=True)
    assert chosen == [first + t for t in (8, 9, 0, 1, 10)]
    assert prefill(scores, 5, first, sorted=True) == [first + t for t in (8, 9, 0, 1, 12)]


def test_lists_are_never_filled_from_outside() -> None:
    scores = [float(x) for x in MAXIMA]
    blocks = torch.tensor([[-1, 4, 4, 5, -(2**31), 2**31 - 1]], dtype=torch.int32)
    assert prefill(scores, 5, block=4, candidates=blocks) == [16, 17, 18, -1, -1]
    assert prefill(scores, 2, block=4, candidates=blocks[:, :1]) == [-1, -1]
    assert prefill(scores, 2, block=4, candidates=blocks[:, :0]) == [-1, -1]
    assert prefill(scores, 7, block=4) == [0, 1, 2, 3, 4, -1, -1]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=70), st.sampled_from([2, 4, 8]), st.data())
def test_both_levels_are_a_dense_ranking(
    levels: list[int], block: int, data: st.DataObject
) -> None:
    """Few distinct scores, so that most cuts go through a tie."""
    scores = [float(x) for x in levels]
    count = -(-len(scores) // block)
    best = [max(scores[j * block : (j + 1) * block]) for j in range(count)]
    ranked = sorted(range(count), key=lambda j: (j != count - 1, -best[j], j))
    topk = data.draw(st.integers(1, count + 1))
    padding = [-1] * (topk - count)
    assert prefill(scores, topk, block=block, sorted=True) == ranked[:topk] + padding
    blocks = data.draw(st.lists(st.integers(-1, count), max_size=count))
    inside = [t for t in range(len(scores)) if t // block in blocks]
    inside.sort(key=lambda t: (-scores[t], t))
    listed = torch.tensor([blocks], dtype=torch.int32).view(1, -1)
    got = prefill(scores, topk, block=block, candidates=listed, sorted=True)
    assert got == inside[:topk] + [-1] * (topk - len(inside))


def test_a_block_of_nan_ranks_last_and_nan_is_no_blocks_best() -> None:
    nan = float("nan")
    assert prefill([nan, nan, 1.0, nan, 3.0, 0.0, 2.0, 2.0], 3, block=2, sorted=True) == [3, 2, 1]
    assert prefill([nan, nan, 1.0, nan, nan, nan], 3, block=2, sorted=True) == [2, 1, 0]


def paged(seed: int = 0) -> tuple[Tensor, ...]:
    """q, cache, weights, seq_lens and block_table of three rows."""
    draw = torch.Generator().manual_seed(seed)
    q, weights = reference.quantize_index_q(
        torch.randn(3, 2, 128, generator=draw), torch.rand(3, 2, generator=draw)
    )
    cache = torch.zeros(12, 64, 1, 132, dtype=torch.uint8)
    keys = torch.randn(12 * 64, 128, generator=draw)
    flashdsa.write_index_k_cache(keys, torch.randperm(12 * 64, generator=draw), cache)
    table = torch.randperm(12, generator=draw).view(3, 4).int()
    lengths = torch.tensor([256, 100, 0], dtype=torch.int32)
    return q.view(torch.float8_e4m3fn), cache, weights, lengths, table


def test_all_blocks_as_candidates_are_one_level() -> None:
    inputs = paged()
    one, two = (torch.empty(3, 40, dtype=torch.int32) for _ in range(2))
    every = torch.arange(32, dtype=torch.int32).repeat(3, 1)
    for by_score in (False, True):
        flashdsa.dsa_topk_indexer(*inputs, one, sorted=by_score, backend="cpu")
        options = {"sorted": by_score, "block": 8, "candidates": every}
        flashdsa.dsa_topk_indexer(*inputs, two, backend="cpu", **options)
        assert torch.equal(one, two)


def test_tokens_of_bad_pages_are_in_no_block() -> None:
    """Without checks of values, as a direct call of the operation has none."""
    q, cache, weights, lengths, table = paged()
    table[0, 1], table[0, 3] = -1, 12
    ids = torch.empty(3, 16, dtype=torch.int32)
    numbers = (*DSA_TOPK_INDEXER.filled((q,), {"block": 16}).values(), "cpu")
    custom_op(DSA_TOPK_INDEXER)(q, cache, weights, lengths, table, ids, None, *numbers)
    assert ids[0].tolist() == [*range(4), *range(8, 12), *[-1] * 8]
    some = torch.tensor([[5, 1, 13]] * 3, dtype=torch.int32)
    custom_op(DSA_TOPK_INDEXER)(q, cache, weights, lengths, table, ids, some, *numbers)
    assert ids[0].tolist() == [int(table[0, 0]) * 64 + t for t in range(16, 32)]


@pytest.mark.parametrize("block", [0, 3, 128])
def test_a_block_is_a_part_of_a_page(block: int) -> None:
    with pytest.raises(ValueError, match=r"block: expected (a divisor of 64|at least 1)"):
        prefill([1.0, 2.0], 2, block=block)


def test_candidates_are_checked() -> None:
    with pytest.raises(ValueError, match=r"candidates: expected shape"):
        prefill([1.0], 1, candidates=torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(TypeError, match="candidates: expected dtype int32"):
        prefill([1.0], 1, candidates=torch.zeros(1, 3))


def test_both_levels_of_mxfp4_keys_and_queries_are_the_models() -> None:
    """DeepSeek-V4.1's formulas in float64, dense, over the rounded numbers."""
    draw = torch.Generator().manual_seed(11)
    tokens, heads, block = 500, 32, 8
    k = torch.randn(tokens, 128, generator=draw)
    k *= torch.exp2(3 * torch.randn(tokens, 1, generator=draw))
    q, weights = torch.randn(1, heads, 128, generator=draw), torch.randn(1, heads, generator=draw)
    weights *= (128 * heads) ** -0.5
    rounded_q, rounded_k = (reference.fake_quantize_index(x, "mxfp4") for x in (q, k))
    scores = (weights[0].double()[:, None] * (rounded_q[0] @ rounded_k.T).relu()).sum(0)
    best = torch.nn.functional.pad(scores, (0, 4), value=-torch.inf).view(-1, block).amax(1)
    best[-1] = torch.inf
    blocks = best.topk(20).indices.sort().values
    listed = (blocks[:, None] * block + torch.arange(block)).flatten()
    listed = listed[listed < tokens]
    chosen = listed[scores[listed].topk(50).indices].sort().values

    cache = torch.zeros(8, 64, 1, 68, dtype=torch.uint8)
    table = torch.randperm(8, generator=draw).int()[None]
    at = torch.arange(tokens)
    flashdsa.write_index_k_cache(k, table[0, at // 64] * 64 + at % 64, cache, backend="cpu")
    fp8, folded = flashdsa.quantize_index_q(q, weights, mxfp4=True, backend="cpu")
    paged = fp8, cache, folded, torch.tensor([tokens], dtype=torch.int32), table
    first, second = (torch.empty(1, n, dtype=torch.int32) for n in (20, 50))
    flashdsa.dsa_topk_indexer(*paged, first, block=block, backend="cpu")
    options = {"block": block, "candidates": first, "backend": "cpu"}
    flashdsa.dsa_topk_indexer(*paged, second, ids="position", **options)
    assert torch.equal(first[0].long(), blocks) and torch.equal(second[0].long(), chosen)

    keys, scale = flashdsa.quantize_index_k(k, mxfp4=True, backend="cpu")
    shared = fp8, keys, folded, None, torch.tensor([tokens], dtype=torch.int32)
    flashdsa.dsa_topk_prefill(*shared, first, k_scale=scale, block=block, backend="cpu")
    flashdsa.dsa_topk_prefill(*shared, second, k_scale=scale, **options)
    assert torch.equal(first[0].long(), blocks) and torch.equal(second[0].long(), chosen)


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
