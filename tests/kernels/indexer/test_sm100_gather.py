"""The Blackwell indexer where the table has a slot for each token, on ptxemu: exact, no findings.

Scores are exact in any order of additions (see exact_inputs.py), so that ids must be the CPU's.
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
from tests.kernels.indexer.exact_inputs import make_inputs, scattered
from tests.kernels.indexer.test_sm100_logits import emulated_scores

pytestmark = pytest.mark.usefixtures("lines")

SMALL = IndexerPlan(num_heads=16, gathers=True)
OUTSIDE = (-1, 2**31 - 1, -(2**31))


def holes(row: torch.Tensor, pattern: list[int]) -> None:
    """Make the row's slots bad where the pattern, which is repeated, has a 0."""
    every = torch.arange(len(row))
    bad = torch.tensor(pattern)[every % len(pattern)] == 0
    row[bad] = torch.tensor(OUTSIDE, dtype=torch.int32)[every[bad] % len(OUTSIDE)]


@pytest.mark.parametrize("tail", [1, 2, 3, 4])
def test_the_last_gather_of_a_row_is_narrower(tail: int) -> None:
    """Rows that are scored and, with at most topk tokens, rows that are not."""
    lengths = [512 + tail, 700 + tail, tail, 508 + tail]
    assert_as_the_cpu(SMALL, scattered(make_inputs(lengths, num_heads=16), 1), 2, 2)


def test_any_of_four_tokens_may_be_outside_the_cache() -> None:
    """Each of the 16 sets of four, so that 0 to 4 rows of a gather are wanted; also unscored."""
    inputs = scattered(make_inputs([1200, 400], num_heads=16), 1)
    sets = [bit >> k & 1 for bit in range(16) for k in range(4)]
    holes(inputs.block_table[0], sets)
    holes(inputs.block_table[1], sets[:-1])
    assert_as_the_cpu(SMALL, inputs, 1, 2)


def test_ids_are_positions() -> None:
    """Of a scored row and one that is not, both with holes."""
    inputs = scattered(make_inputs([700, 40], num_heads=16), 1)
    for row in inputs.block_table:
        holes(row, [1, 1, 0, 1, 0])
    assert_as_the_cpu(SMALL, inputs, 1, 2, positions=True)


def test_a_slot_that_is_named_twice_counts_twice() -> None:
    inputs = scattered(make_inputs([900, 30], num_heads=16), 1)
    inputs.block_table[0, 100:300] = inputs.block_table[0, 500:700].clone()
    inputs.block_table[0, 801:804] = inputs.block_table[0, 800]
    inputs.block_table[1, :30] = inputs.block_table[1, 0]
    assert_as_the_cpu(SMALL, inputs, 2, 1)


@pytest.mark.parametrize("values", ["equal", "nan", "ascending"])
def test_ties_nan_and_a_list_that_is_compacted(values: str) -> None:
    length = 9003 if values == "ascending" else 1402
    inputs = scattered(make_inputs([length], num_heads=16, values=values), 1)
    assert_as_the_cpu(SMALL, inputs, 1, 1 if values == "ascending" else 3)


@pytest.mark.parametrize("seed", [0, 1])
def test_queries_of_a_request_share_its_slots_whoever_comes_first(seed: int) -> None:
    inputs = scattered(make_inputs([522, 2, 531, 700, 3, 650], num_heads=16), 1)
    table = inputs.block_table[torch.tensor([2, 3])]
    assert_as_the_cpu(SMALL, inputs._replace(block_table=table), 2, 2, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "clusters", "by_score"),
    [
        (
            replace(SMALL, rows=By.CLUSTERS, sharing=Sharing(select_pages=1, merge_pages=3)),
            (4, 1),
            False,
        ),
        (SMALL, (1, 3), True),
    ],
    ids=["clusters", "sorted"],
)
def test_kinds_of_selection(plan: IndexerPlan, clusters: tuple[int, int], by_score: bool) -> None:
    long = scattered(make_inputs([1500, 700], num_heads=16, values="two"), 1)
    assert_as_the_cpu(plan, long, *clusters, by_score=by_score)


def test_scores_of_gathered_tokens() -> None:
    plan, lengths = LogitsPlan(num_heads=16, gathers=True), [300, 0, 1, 66, 127]
    inputs = scattered(make_inputs(lengths, num_heads=16, seed=1), 1)
    expected = flashdsa.indexer_logits(*inputs, 317, table_page_size=1, backend="cpu")
    holes(inputs.block_table[0, :300], [1, 1, 0, 1, 0])
    expected[0, :300][torch.tensor([1, 1, 0, 1, 0]).repeat(60) == 0] = -torch.inf
    assert torch.equal(emulated_scores(plan, inputs, 317), expected)


@pytest.mark.usefixtures("small_device")
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_public_calls_with_short_pages(size: int) -> None:
    """The model's sizes; a table of more than one token an entry is spelt out."""
    inputs = scattered(make_inputs([2300, 1, 70]), size)
    expected, ids = inputs.output(2048), inputs.output(2048)
    given = {"table_page_size": size}
    flashdsa.dsa_topk_indexer(*inputs, expected, **given, backend="cpu")
    flashdsa.dsa_topk_indexer(*inputs, ids, **given, backend="emulate-sm100")
    assert torch.equal(ids, expected)
    scores = flashdsa.indexer_logits(*inputs, 2300, **given, backend="emulate-sm100")
    assert torch.equal(scores, flashdsa.indexer_logits(*inputs, 2300, **given, backend="cpu"))


def test_plans_that_no_kernel_has() -> None:
    assert all(plan.num_heads == 64 for plan in INDEXER_SM100.plans if plan.gathers)
