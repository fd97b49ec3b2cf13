"""The Blackwell indexer on ptxemu, of pages or of a slot a token: the CPU's ids, no findings.

Scores are exact in any order of additions (see inputs.py), so the ids must be equal. What the
kernel shares with the Hopper kernel is tested there; here what feeds it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

import flashdsa
from flashdsa.kernels.catalog import INDEXER_SM100
from flashdsa.kernels.indexer.plan import By, Sharing
from flashdsa.kernels.indexer.sm100.plan import IndexerPlan, LogitsPlan
from tests.kernels.indexer.emulation import assert_as_the_cpu
from tests.kernels.indexer.inputs import make_inputs, scattered
from tests.kernels.indexer.test_logits_emulated import emulated_scores

pytestmark = pytest.mark.usefixtures("lines")

LATER = pytest.mark.slow
MODEL = IndexerPlan()
SMALL = IndexerPlan(num_heads=16)
SPLITS = IndexerPlan(num_heads=16, rows=By.CLUSTERS, sharing=Sharing(select_pages=1, merge_pages=3))
EDGES = [0, 1, 64, 65, 2048, 2049]


def test_lengths_around_a_page_and_topk() -> None:
    assert_as_the_cpu(MODEL, make_inputs(EDGES), 2, 2, topk=2048)


@pytest.mark.parametrize("cluster_size", [1, 4, *(pytest.param(n, marks=LATER) for n in (2, 16))])
def test_ctas_share_a_row(cluster_size: int) -> None:
    """Parts of odd numbers of pages, the last page not full; 16 CTAs: some without a page."""
    length = 900 if cluster_size == 16 else 1401
    assert_as_the_cpu(SMALL, make_inputs([length], num_heads=16), 1, cluster_size)


@pytest.mark.parametrize(
    ("values", "cluster_size"), [pytest.param("equal", 3, marks=LATER), ("two", 1), ("nan", 2)]
)
def test_plateaus_and_nan(values: str, cluster_size: int) -> None:
    assert_as_the_cpu(SMALL, make_inputs([1100], num_heads=16, values=values), 1, cluster_size)


@LATER
@pytest.mark.parametrize("values", ["equal", "ascending"])
def test_a_part_is_compacted_and_then_followed_by_a_short_row(values: str) -> None:
    """Of equal scores the first ones stay; of ascending ones every page replaces others."""
    inputs = make_inputs([600, 9000], num_heads=16, values=values)
    assert_as_the_cpu(SMALL, inputs, 1, 1)


def test_ragged_rows_in_turns_of_warps_and_copies() -> None:
    lengths = [513, 1300, 3, 900, 700, 640]
    assert_as_the_cpu(SMALL, make_inputs(lengths, num_heads=16, values="two"), 2, 2, seed=1)


def test_bad_pages_are_not_read_and_repeated_ones_are() -> None:
    """Half a stage that is bad, a whole one, and pages that stand in a row twice."""
    inputs = make_inputs([1200, 1200], num_heads=16)
    inputs.block_table[0, 3], inputs.block_table[0, 6:9] = -1, 2**31 - 1
    inputs.block_table[1, 4:8] = inputs.block_table[1, 10:14].flip(0)
    assert_as_the_cpu(SMALL, inputs, 2, 2)


def test_clusters_share_a_long_row() -> None:
    inputs = make_inputs([1500, 700], num_heads=16, values="two")
    assert_as_the_cpu(SPLITS, inputs, 4, 1)


def test_queries_of_a_request_share_its_row_of_the_table() -> None:
    inputs = make_inputs([520, 2, 530], num_heads=16)
    assert_as_the_cpu(SMALL, inputs._replace(block_table=inputs.block_table[2:]), 1, 2)


@LATER
def test_ids_are_positions() -> None:
    """Of rows without scores, and of scored ones."""
    assert_as_the_cpu(SMALL, make_inputs([5, 700], num_heads=16), 1, 2, positions=True)


@LATER
def test_sorted_rows() -> None:
    """All rows are scored, also those of at most topk tokens."""
    inputs = make_inputs([65, 1100], num_heads=16, values="two")
    assert_as_the_cpu(SMALL, inputs, 1, 3, topk=1024, by_score=True)


GATHERS = IndexerPlan(num_heads=16, gathers=True)
OUTSIDE = (-1, 2**31 - 1, -(2**31))


def holes(row: torch.Tensor, pattern: list[int]) -> None:
    """Make the row's slots bad where the pattern, which is repeated, has a 0."""
    every = torch.arange(len(row))
    bad = torch.tensor(pattern)[every % len(pattern)] == 0
    row[bad] = torch.tensor(OUTSIDE, dtype=torch.int32)[every[bad] % len(OUTSIDE)]


@pytest.mark.parametrize("tail", [1, *(pytest.param(n, marks=LATER) for n in (2, 3, 4))])
def test_the_last_gather_of_a_row_is_narrower(tail: int) -> None:
    """Rows that are scored and, with at most topk tokens, rows that are not."""
    lengths = [512 + tail, 700 + tail, tail, 508 + tail]
    assert_as_the_cpu(GATHERS, scattered(make_inputs(lengths, num_heads=16), 1), 2, 2)


def test_any_of_four_tokens_may_be_outside_the_cache() -> None:
    """Each of the 16 sets of four, so that 0 to 4 rows of a gather are wanted; also unscored."""
    inputs = scattered(make_inputs([1200, 400], num_heads=16), 1)
    sets = [bit >> k & 1 for bit in range(16) for k in range(4)]
    holes(inputs.block_table[0], sets)
    holes(inputs.block_table[1], sets[:-1])
    assert_as_the_cpu(GATHERS, inputs, 1, 2)


def test_ids_of_gathered_tokens_are_positions() -> None:
    """Of a scored row and one that is not, both with holes."""
    inputs = scattered(make_inputs([700, 40], num_heads=16), 1)
    for row in inputs.block_table:
        holes(row, [1, 1, 0, 1, 0])
    assert_as_the_cpu(GATHERS, inputs, 1, 2, positions=True)


def test_a_slot_that_is_named_twice_counts_twice() -> None:
    inputs = scattered(make_inputs([900, 30], num_heads=16), 1)
    inputs.block_table[0, 100:300] = inputs.block_table[0, 500:700].clone()
    inputs.block_table[0, 801:804] = inputs.block_table[0, 800]
    inputs.block_table[1, :30] = inputs.block_table[1, 0]
    assert_as_the_cpu(GATHERS, inputs, 2, 1)


@pytest.mark.parametrize("values", ["equal", "nan", pytest.param("ascending", marks=LATER)])
def test_ties_nan_and_a_list_that_is_compacted(values: str) -> None:
    length = 9003 if values == "ascending" else 1402
    inputs = scattered(make_inputs([length], num_heads=16, values=values), 1)
    assert_as_the_cpu(GATHERS, inputs, 1, 1 if values == "ascending" else 3)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=LATER), 1])
def test_queries_of_a_request_share_its_slots_whoever_comes_first(seed: int) -> None:
    inputs = scattered(make_inputs([522, 2, 531, 700, 3, 650], num_heads=16), 1)
    table = inputs.block_table[torch.tensor([2, 3])]
    assert_as_the_cpu(GATHERS, inputs._replace(block_table=table), 2, 2, seed)


@LATER
@pytest.mark.parametrize(
    ("plan", "clusters", "by_score"),
    [
        (
            replace(GATHERS, rows=By.CLUSTERS, sharing=Sharing(select_pages=1, merge_pages=3)),
            (4, 1),
            False,
        ),
        (GATHERS, (1, 3), True),
    ],
    ids=["clusters", "sorted"],
)
def test_kinds_of_selection(plan: IndexerPlan, clusters: tuple[int, int], by_score: bool) -> None:
    long = scattered(make_inputs([1500, 700], num_heads=16, values="two"), 1)
    assert_as_the_cpu(plan, long, *clusters, by_score=by_score)


def test_scores_of_gathered_tokens() -> None:
    plan, lengths = LogitsPlan(gathers=True), [300, 0, 1, 66, 127]
    inputs = scattered(make_inputs(lengths, seed=1), 1)
    expected = flashdsa.indexer_logits(*inputs, 317, table_page_size=1, backend="cpu")
    holes(inputs.block_table[0, :300], [1, 1, 0, 1, 0])
    expected[0, :300][torch.tensor([1, 1, 0, 1, 0]).repeat(60) == 0] = -torch.inf
    assert torch.equal(emulated_scores(plan, inputs, 317), expected)


@pytest.mark.usefixtures("small_device")
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_scores_of_a_public_call_with_short_pages(size: int) -> None:
    """A table of more than one token an entry is spelt out."""
    inputs, given = scattered(make_inputs([300, 1, 70]), size), {"table_page_size": size}
    scores = flashdsa.indexer_logits(*inputs, 300, **given, backend="emulate-sm100")
    assert torch.equal(scores, flashdsa.indexer_logits(*inputs, 300, **given, backend="cpu"))


@LATER
@pytest.mark.usefixtures("small_device")
@pytest.mark.parametrize("size", [1, 8])
def test_ids_of_a_public_call_with_short_pages(size: int) -> None:
    """The model's sizes."""
    inputs, given = scattered(make_inputs([2300, 1, 70]), size), {"table_page_size": size}
    expected, ids = inputs.output(2048), inputs.output(2048)
    flashdsa.dsa_topk_indexer(*inputs, expected, **given, backend="cpu")
    flashdsa.dsa_topk_indexer(*inputs, ids, **given, backend="emulate-sm100")
    assert torch.equal(ids, expected)


def test_plans_that_no_kernel_has() -> None:
    assert all(plan.num_heads == 64 for plan in INDEXER_SM100.plans if plan.gathers)
