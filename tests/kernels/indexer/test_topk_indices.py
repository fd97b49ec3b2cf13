"""Every backend's topk_indices is exact: ties, NaN, infinities, signed zeros, any lengths."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashdsa
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_indexer import check_topk

COARSE = st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45])
ANY = st.floats(width=32)


@given(data=st.data(), by_score=st.booleans())
def test_any_scores_lengths_and_topk(backend, device, data, by_score):
    batch, width = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 80))
    element = data.draw(st.sampled_from([COARSE, ANY, st.integers(0, 2).map(float)]))
    row = st.lists(element, min_size=width, max_size=width)
    scores = torch.tensor([data.draw(row) for _ in range(batch)]).view(batch, width)
    lengths = [data.draw(st.integers(0, width)) for _ in range(batch)]
    topk = data.draw(st.integers(1, 90))
    verdicts = check_topk(
        scores.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        topk,
        backend,
        sorted=by_score,
    )
    assert failures(verdicts) == []


def awkward_scores(kind: str, seed: int) -> torch.Tensor:
    """`[3, 6000]` scores whose cut-off at 2048 lies where the kind says."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, 6000, generator=generator)
    if kind == "a plateau at the cut":
        scores[:, 1000:5000] = scores.median()
    elif kind == "one plateau":
        scores[:] = -2.5
    elif kind == "coarse":
        scores = scores.mul(4).round() / 4
    elif kind == "mostly NaN":
        scores[:, torch.randperm(6000, generator=generator)[:4500]] = torch.nan
    elif kind == "mostly -inf":
        scores[:, torch.randperm(6000, generator=generator)[:4500]] = -torch.inf
        scores[:, ::7] = torch.nan
    elif kind == "neighbours in the last bit":
        scores = (scores.view(torch.int32) & 3 | 0x3F800000).view(torch.float32)
    elif kind == "ascending":
        scores = scores.sort(dim=1).values
    elif kind == "denormal":
        scores = (scores * 1e-39).float()
    return scores


KINDS = [
    "random",
    "a plateau at the cut",
    "one plateau",
    "coarse",
    "mostly NaN",
    "mostly -inf",
    "neighbours in the last bit",
    "ascending",
    "denormal",
]


def test_awkward_scores_at_model_size(subtests, backend, device, seed):
    for kind, topk, by_score in product(KINDS, [1, 2048, 5999, 6000, 7000], [False, True]):
        with subtests.test(f"{kind}, {topk=}, sorted={by_score}"):
            scores = awkward_scores(kind, seed).to(device)
            lengths = torch.tensor([6000, 3001, 2048], dtype=torch.int32, device=device)
            assert failures(check_topk(scores, lengths, topk, backend, sorted=by_score)) == []


def lengths_at_powers_of_two(longest: int) -> list[int]:
    """Every power of two up to `longest`, one less and one more."""
    found = {2**n + one for n in range(longest.bit_length()) for one in (-1, 0, 1)}
    return sorted(length for length in found if length <= longest)


@pytest.mark.parametrize(
    ("topk", "longest"), [(100, 1024), pytest.param(3000, 131_072, marks=pytest.mark.slow)]
)
def test_scores_that_differ_in_their_ten_lowest_bits(topk, longest, backend, device, seed):
    """Rows as long as each power of two and its neighbours: 3,000 of 131,072 as vLLM's tests."""
    generator = torch.Generator().manual_seed(seed)
    lengths = lengths_at_powers_of_two(longest)
    bits = torch.randint(1024, (len(lengths), longest), generator=generator) | 0x3F800000
    scores = bits.int().view(torch.float32).to(device)
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    for served_by in (backend, "torch") if backend == "cpu" else (backend,):
        assert failures(check_topk(scores, counts, topk, served_by, sorted=True)) == []


def test_scores_at_and_beyond_the_length_are_not_looked_at(backend, device):
    scores = torch.tensor([[1.0, 2.0, math.inf, math.inf], [math.nan, 9.0, 9.0, 9.0]])
    lengths = torch.tensor([2, 1], dtype=torch.int32, device=device)
    positions = flashdsa.topk_indices(scores.to(device), lengths, 3, backend=backend)
    assert positions.tolist() == [[0, 1, -1], [0, -1, -1]]
    assert positions.dtype == torch.int32


def test_strided_scores_are_read_by_their_strides(backend, device, seed):
    memory = torch.randn(6, 500, generator=torch.Generator().manual_seed(seed)).to(device)
    scores = memory[::2, 7:407]
    lengths = torch.tensor([400, 100, 399], dtype=torch.int32, device=device)
    assert failures(check_topk(scores, lengths, 50, backend, sorted=True)) == []


@pytest.mark.parametrize("by_score", [False, True], ids=["default order", "sorted"])
def test_positions_are_identical_from_run_to_run(by_score, backend, device, seed):
    scores = awkward_scores("coarse", seed).to(device)
    lengths = torch.tensor([6000, 3001, 2048], dtype=torch.int32, device=device)
    runs = [
        flashdsa.topk_indices(scores, lengths, 2048, sorted=by_score, backend=backend)
        for _ in range(4)
    ]
    assert all(torch.equal(run, runs[0]) for run in runs)
