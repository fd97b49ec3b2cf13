"""The indexer oracle agrees with scores and selections worked out by hand."""

import math

import pytest
import torch

from flashdsa import reference

NAN, INF = math.nan, math.inf


@pytest.fixture
def pages() -> torch.Tensor:
    """Three pages; token (page, offset) has a key of ones times 2^-page and scale offset + 1."""
    cache = torch.zeros(3, 8448, dtype=torch.uint8)
    for page, code in enumerate((0x38, 0x30, 0x28)):  # 1, 0.5, 0.25
        cache[page, :8192] = code
        scales = torch.arange(1, 65, dtype=torch.float32)
        cache[page, 8192:] = scales.view(torch.uint8)
    return cache.view(3, 64, 1, 132)


@pytest.fixture
def query() -> torch.Tensor:
    """One row, two heads: ones, and minus ones."""
    codes = torch.full((1, 2, 128), 0x38, dtype=torch.uint8)
    codes[0, 1] = 0xB8
    return codes.view(torch.float8_e4m3fn)


def lens(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def table(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_a_score_is_the_scaled_weighted_sum_of_positive_products(pages, query):
    weights = torch.tensor([[-3.0, 100.0]])  # the second head's product is negative: relu drops it
    scores = reference.indexer_logits(query, pages, weights, lens(67), table([2, 0]), 70)
    assert scores.shape == (1, 70) and scores.dtype == torch.float64
    assert scores[0, :64].tolist() == [-3.0 * 32 * (t + 1) for t in range(64)]
    assert scores[0, 64:67].tolist() == [-3.0 * 128 * (t + 1) for t in range(3)]
    assert scores[0, 67:].tolist() == [-INF] * 3
    operands = (query, pages, weights, lens(67), table([2, 0]), 70)
    size = reference.indexer_logits(*operands, absolute="weights")
    assert torch.equal(size[0, :67], -scores[0, :67])


def test_ids_are_page_times_64_plus_offset(pages, query):
    weights = torch.tensor([[1.0, 0.0]])
    args = (query, pages, weights, lens(67), table([2, 0]))
    # page 2: 32 (o + 1) for o < 64; page 0: 128, 256, 384
    best = reference.dsa_topk_indexer(*args, 2, sorted=True)
    assert best.tolist() == [[2 * 64 + 63, 2 * 64 + 62]]
    assert reference.dsa_topk_indexer(*args, 2).tolist() == [[2 * 64 + 62, 2 * 64 + 63]]
    every = reference.dsa_topk_indexer(*args, 70)
    assert every.tolist() == [[128 + o for o in range(64)] + [0, 1, 2] + [-1] * 3]
    assert every.dtype == torch.int32


def test_a_repeated_page_gives_its_tokens_twice(pages, query):
    args = (query, pages, torch.ones(1, 2), lens(128), table([1, 1]))
    best = reference.dsa_topk_indexer(*args, 4, sorted=True)
    assert best.tolist() == [[64 + 63, 64 + 63, 64 + 62, 64 + 62]]


def test_bad_pages_narrow_tables_and_negative_lengths_emit_nothing(pages, query):
    q, w = query.repeat(4, 1, 1), torch.ones(4, 2)
    rows = table([0, 3], [-1, 1], [2, 0], [2**31 - 1, -(2**31)])
    best = reference.dsa_topk_indexer(q, pages, w, lens(66, 66, -4, 1000), rows, 3, sorted=True)
    assert best.tolist() == [[63, 62, 61], [65, 64, -1], [-1] * 3, [-1] * 3]
    narrow = reference.dsa_topk_indexer(query, pages, w[:1], lens(1000), table([1]), 70)
    assert narrow.tolist() == [[64 + o for o in range(64)] + [-1] * 6]


def test_given_scores_are_ranked_instead_of_the_own_ones(pages, query):
    scores = torch.tensor([[5.0, 1.0, 7.0, 7.0]])
    args = (query, pages, torch.ones(1, 2), lens(4), table([1]))
    best = reference.dsa_topk_indexer(*args, 3, sorted=True, scores=scores)
    assert best.tolist() == [[64 + 2, 64 + 3, 64]]


@pytest.mark.parametrize(
    ("row", "length", "topk", "by_position", "by_score"),
    [
        ([1.0, 3.0, 2.0], 3, 2, [1, 2], [1, 2]),
        ([1.0, 3.0, 2.0, 9.0], 3, 2, [1, 2], [1, 2]),
        ([2.0, 1.0, 2.0, 2.0], 4, 2, [0, 2], [0, 2]),
        ([1.0, 2.0, 1.0, 3.0], 4, 3, [0, 1, 3], [3, 1, 0]),
        ([NAN, -INF, NAN, 0.0], 4, 2, [1, 3], [3, 1]),
        ([NAN, -INF, NAN, 0.0], 4, 3, [0, 1, 3], [3, 1, 0]),
        ([-0.0, 0.0, -0.0], 3, 2, [0, 1], [0, 1]),
        ([0.0, INF], 2, 4, [0, 1, -1, -1], [1, 0, -1, -1]),
        ([5.0], 0, 1, [-1], [-1]),
        ([5.0], -2, 1, [-1], [-1]),
        ([5.0, 6.0], 9, 3, [0, 1, -1], [1, 0, -1]),
    ],
)
def test_topk_by_hand(row, length, topk, by_position, by_score):
    scores = torch.tensor([row])
    assert reference.topk_indices(scores, lens(length), topk).tolist() == [by_position]
    assert reference.topk_indices(scores, lens(length), topk, sorted=True).tolist() == [by_score]


def test_a_nan_key_byte_makes_its_token_s_score_nan(pages, query):
    pages.view(3, 8448)[0, 5 * 128 + 3] = 0x7F
    scores = reference.indexer_logits(query, pages, torch.ones(1, 2), lens(64), table([0]), 64)
    assert scores[0].isnan().nonzero().flatten().tolist() == [5]
