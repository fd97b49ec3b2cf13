"""The Hopper top-k kernel, emulated and checked: exact whatever scores, order and lengths."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.errors import UnsupportedError

pytest.importorskip("llvmlite", reason="llvmlite is not installed")
pytest.importorskip("cutlass.cute", reason="CuTe DSL is not installed")

from flashdsa.kernels.indexer.sizes import ORDERED_ROWS
from flashdsa.kernels.indexer.sm90.topk_plan import TopkPlan
from tests.kernels.indexer.emulation import emulate_topk

pytestmark = pytest.mark.usefixtures("small_device", "lines")

WIDTH = 700
# What the check says of the right kernel, by the file of the first access.
KNOWN_WARNINGS = {
    # `load4`: the list's last words are loaded as one vector with words behind its end, which are
    # compared and then not counted.
    ("uninitialised-read", "smem.py")
}


def awkward_scores() -> dict[str, Tensor]:
    """Rows of scores by what is awkward about them."""
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(WIDTH, generator=generator)
    halves = torch.randint(0, 2, (WIDTH,), generator=generator)
    mixed = normal.clone()
    mixed[::3], mixed[1::7], mixed[2::5] = math.nan, math.inf, -math.inf
    few = torch.full((WIDTH,), math.nan)
    few[::5] = -math.inf
    return {
        "random": normal,
        "all equal": torch.full((WIDTH,), -2.5),
        "two values": halves.float(),
        "signed zeros": torch.where(halves > 0, 0.0, -0.0),
        "ascending": normal.sort().values,
        "descending": normal.sort(descending=True).values,
        "NaN and infinities": mixed,
        "nearly all NaN": few,
        "neighbours in the last bit": (normal.view(torch.int32) & 3 | 0x3F800000).view(torch.float),
        "denormal": normal * 1e-39,
        "far apart": torch.exp(40 * normal),
    }


def assert_exact(
    plan: TopkPlan, scores: Tensor, lengths: list[int], clusters: tuple[int, int], seed: int = 0
) -> None:
    """The emulated kernel gives what the CPU backend gives; nothing unknown is found.

    Args:
        clusters: how many, and CTAs of each.
    """
    given = torch.tensor(lengths, dtype=torch.int32)
    positions = torch.full((len(lengths), plan.topk), -99, dtype=torch.int32)
    runner = emulate_topk(plan, scores, given, positions, clusters=clusters, seed=seed)
    clamped = given.clamp(0, scores.shape[1])
    expected = flashdsa.topk_indices(scores, clamped, plan.topk, sorted=plan.sorted, backend="cpu")
    wrong = (positions != expected).any(1).nonzero().flatten().tolist()
    assert wrong == []
    assert {
        (f.code, Path(f.first.source_file or "").name) for f in runner.findings
    } <= KNOWN_WARNINGS


def test_awkward_scores():
    rows = awkward_scores()
    assert_exact(TopkPlan(topk=512), torch.stack(list(rows.values())), [WIDTH] * len(rows), (1, 2))


@pytest.mark.slow
def test_awkward_scores_sorted():
    rows = awkward_scores()
    scores = torch.stack([rows[name] for name in ("two values", "NaN and infinities", "random")])
    assert_exact(TopkPlan(topk=512, sorted=True), scores, [WIDTH] * len(scores), (1, 3))


@pytest.mark.parametrize("by_score", [False, True], ids=["default order", "sorted"])
def test_any_lengths_and_distances_between_rows(by_score):
    lengths = [0, 1, 513, 65, 1500] if by_score else [0, 1, 511, 512, 513, 65, 1500, 64]
    wide = torch.randn(len(lengths), 1600, generator=torch.Generator().manual_seed(1))
    plan = TopkPlan(topk=512, sorted=by_score)
    assert_exact(plan, wide[:, 3:1503], lengths, (2, 2))


@pytest.mark.parametrize(
    "values", [pytest.param("random", marks=pytest.mark.slow), "ascending", "two"]
)
def test_rows_beyond_the_lists_capacity_on_one_cta_and_shared(values):
    length = 24_000 + (values == "ascending") * 10_000  # which is cut twice
    scores = torch.randn(2, length, generator=torch.Generator().manual_seed(2))
    if values == "ascending":
        scores = scores.sort(dim=1).values
    if values == "two":
        scores = (scores > 0).float()
    plan = TopkPlan(topk=512)
    assert length > plan.lists.capacity >= length / 2
    assert_exact(plan, scores[:1], [length - 1], (1, 1))
    # A part of one CTA is longer than its list, one of two is not.
    assert_exact(plan, scores, [length, 5000], (1, 2))


def test_a_part_longer_than_the_list_of_a_shared_row():
    """Both CTAs compact before they meet, and the second has all of the best."""
    scores = torch.arange(42_000.0)[None]
    for sign in (1, -1):
        assert_exact(TopkPlan(topk=512), sign * scores, [42_000], (1, 2))


def test_more_rows_than_are_ordered():
    """In the order of the batch: every consumer finds the place of one row, so of 512 at most."""
    lengths = [3, 0, 1, 2, 5, 4] * 87
    lengths[7:500:100] = [513, 700, 600, 514, 515]
    assert len(lengths) > ORDERED_ROWS
    scores = torch.randn(len(lengths), 700, generator=torch.Generator().manual_seed(6))
    assert_exact(TopkPlan(topk=512), scores, lengths, (9, 1))


def test_lengths_outside_the_scores_are_clamped():
    scores = torch.randn(3, 700, generator=torch.Generator().manual_seed(3))
    plan = TopkPlan(topk=512)
    assert_exact(plan, scores, [-5, 2**31 - 1, 701], (1, 2))


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2))])
def test_no_order_of_warps_and_copies_matters(seed):
    scores = torch.randn(1, 2000, generator=torch.Generator().manual_seed(4)).mul(8).round()
    plan = TopkPlan(topk=512)
    assert_exact(plan, scores, [2000], (1, 4), seed)


@pytest.mark.slow
def test_public_operation_with_the_models_topk():
    scores = torch.randn(2, 3000, generator=torch.Generator().manual_seed(5))
    lengths = torch.tensor([3000, 2048], dtype=torch.int32)
    got = flashdsa.topk_indices(scores, lengths, 2048, backend="emulate-sm90")
    assert torch.equal(got, flashdsa.topk_indices(scores, lengths, 2048, backend="cpu"))


def test_checked_lengths_are_errors(monkeypatch):
    monkeypatch.setenv("FLASHDSA_CHECK", "1")
    lengths = torch.tensor([64, 65], dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"lengths: expected values in \[0, 64\].*lengths\[1\] = 65"
    ):
        flashdsa.topk_indices(torch.zeros(2, 64), lengths, 512, backend="emulate-sm90")


def test_no_scores_at_all():
    lengths = torch.zeros(2, dtype=torch.int32)
    got = flashdsa.topk_indices(torch.empty(2, 0), lengths, 512, backend="emulate-sm90")
    assert got.tolist() == [[-1] * 512] * 2


@pytest.mark.parametrize("by_score", [False, True], ids=["ascending", "sorted"])
def test_fewer_than_the_kernels_width(by_score):
    """The best of coarse scores, whose ties at the cut go to the smallest positions."""
    scores = torch.randn(3, 700, generator=torch.Generator().manual_seed(8)).mul(4).round()
    lengths = torch.tensor([700, 300, 20], dtype=torch.int32)
    got = flashdsa.topk_indices(scores, lengths, 40, sorted=by_score, backend="emulate-sm90")
    expected = flashdsa.topk_indices(scores, lengths, 40, sorted=by_score, backend="cpu")
    assert torch.equal(got, expected) and got.is_contiguous()


def test_more_than_the_widest_kernels_are_refused_by_name():
    scores, lengths = torch.zeros(1, 64), torch.ones(1, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=r"topk: takes 1 to 2048; got 2049"):
        flashdsa.topk_indices(scores, lengths, 2049, backend="emulate-sm90")
