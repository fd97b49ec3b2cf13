"""The Hopper top-k kernel, emulated and checked: exact whatever scores, order and lengths."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.backends.emulated.runner import Emulator
from flashdsa.errors import UnsupportedError

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from flashdsa.kernels.catalog import INDEXER_RANK
from flashdsa.kernels.indexer.order.plan import OrderPlan
from flashdsa.kernels.indexer.select import sort_keys as keys
from flashdsa.kernels.indexer.sm90.rank.plan import Of, plan_of_many
from flashdsa.verify.compare import failures
from ptxemu import Policy
from workbench.small_calls import direct
from workbench.small_calls.call import emulator_of
from workbench.small_calls.direct import Order

pytestmark = pytest.mark.usefixtures("small_device", "lines")

WIDTH = 700
PLAN = plan_of_many(Of.SCORES)


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
    scores: Tensor,
    lengths: list[int],
    cluster: tuple[int, int],
    topk: int = 512,
    *,
    unscored: int | None = None,
    seed: int = 0,
) -> None:
    """The emulated kernel gives what the CPU backend gives, and nothing is found.

    Args:
        cluster: CTAs of it, and 1: it has a row; 0: each of its CTAs has one.
        unscored: entries of rows that are all written; default: topk.
    """
    given = torch.tensor(lengths, dtype=torch.int32)
    positions = torch.full((len(lengths), topk), -99, dtype=torch.int32)
    runner, nothing = Emulator(policy=Policy(seed=seed)), torch.empty(0, 0, dtype=torch.int32)
    from_0 = torch.empty(0, dtype=torch.int32)
    function = runner.function(INDEXER_RANK, PLAN)
    with runner.launching():
        most = topk if unscored is None else unscored
        function(scores, from_0, given, nothing, 0, 0, most, positions, nothing, *cluster)
    clamped = given.clamp(0, scores.shape[1])
    expected = flashdsa.topk_indices(scores, clamped, topk, backend="cpu")
    wrong = (positions != expected).any(1).nonzero().flatten().tolist()
    assert wrong == [] and runner.findings == []


@pytest.mark.parametrize("cluster", [(1, 1), (4, 0)], ids=["alone", "a CTA each"])
def test_awkward_scores(cluster):
    rows = awkward_scores()
    assert_exact(torch.stack(list(rows.values())), [WIDTH] * len(rows), cluster)


@pytest.mark.parametrize("unscored", [512, 0])
def test_any_lengths_and_distances_between_rows(unscored):
    lengths = [0, 1, 511, 512, 513, 65, 1500, 64, -5, 2**31 - 1]
    wide = torch.randn(len(lengths), 1600, generator=torch.Generator().manual_seed(1))
    assert_exact(wide[:, 3:1503], lengths, (2, 1), unscored=unscored)


CROWDED = {
    "random": lambda x: x,
    "near each other": lambda x: x * 1e-3 + 100,
    "rounded": lambda x: x.mul(4).round(),
    "two values": lambda x: (x > 0).float(),
    "one value": lambda x: x * 0 - 2.5,
    "nearly all NaN": lambda x: torch.where(x > 2.9, x, math.nan),
}
"""Rows by what is in the bin of the last winner: few entries, more than the list has room for,
more than one key, one key."""


@pytest.mark.parametrize(
    "values",
    [
        *("random", "rounded", "nearly all NaN"),
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("near each other", "two values", "one value")
        ),
    ],
)
def test_rows_that_the_ctas_of_a_cluster_share(values):
    """The second row is one CTA's, the third ends in the middle of a part."""
    ctas = 4 if values == "random" else 2
    scores = torch.randn(3, 5000 * ctas, generator=torch.Generator().manual_seed(2))
    lengths = [5000 * ctas, 4000, 4096 * (ctas - 1) + 1]
    assert_exact(CROWDED[values](scores), lengths, (ctas, 1), 1000)


@pytest.mark.parametrize("values", ["random", pytest.param("one value", marks=pytest.mark.slow)])
def test_a_cluster_shares_the_longest_of_its_ctas_rows(values):
    """It is longer than the others together; the second cluster has no such row, and a CTA without
    one."""
    lengths = [513, 17_000, 100, 5000, 3000, 2900, 600]
    scores = torch.randn(len(lengths), 17_000, generator=torch.Generator().manual_seed(3))
    assert_exact(CROWDED[values](scores), lengths, (4, 0))


def test_rows_in_order():
    """The best are all in one part, and in the first or the last one."""
    scores = torch.arange(18_000.0)[None]
    for sign in (1, -1):
        assert_exact(sign * scores, [18_000], (4, 1))


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2))])
def test_no_order_of_warps_matters(seed):
    scores = torch.randn(1, 9000, generator=torch.Generator().manual_seed(4)).mul(8).round()
    assert_exact(scores, [9000], (2, 1), seed=seed)


@pytest.mark.slow
def test_the_plan_for_few_rows():
    scores = torch.randn(2, 9000, generator=torch.Generator().manual_seed(9))
    lengths = torch.tensor([9000, 700], dtype=torch.int32)
    got = flashdsa.topk_indices(scores, lengths, 512, backend="emulate-sm90")
    assert torch.equal(got, flashdsa.topk_indices(scores, lengths, 512, backend="cpu"))


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


LATER = pytest.mark.slow


@pytest.mark.parametrize(
    ("pattern", "topk"),
    [
        ("close", 300),
        ("nan", 40),
        pytest.param("plateaus", 512, marks=LATER),
        pytest.param("random", 1000, marks=LATER),
        pytest.param("random", 2048, marks=LATER),
        pytest.param("nan", 2048, marks=LATER),
        pytest.param("close", 2048, marks=LATER),
        pytest.param("random", 1, marks=LATER),
    ],
)
def test_lists_are_in_the_order_of_their_scores(pattern: str, topk: int) -> None:
    """The first is full, the second has a few entries, the third none."""
    call = Order(topk, pattern)
    runner = emulator_of(call)
    assert failures(call.judge(runner)) == []
    assert runner.findings == []


def test_words_are_the_kernel_s() -> None:
    assert (direct.INVALID, direct.NAN) == (keys.INVALID, keys.NAN)


def test_a_width_that_no_list_has_is_refused() -> None:
    with pytest.raises(ValueError, match="width: expected one of"):
        OrderPlan(300)
