"""The Blackwell indexer on ptxemu: the CPU backend's ids, bit for bit, no findings.

Scores are exact in any order of additions (see exact_inputs.py), so the ids must be equal. What the
kernel shares with the Hopper kernel is tested there; here what feeds it.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

import flashdsa
from flashdsa.kernels.indexer.plan import By, Sharing
from flashdsa.kernels.indexer.sm100.plan import IndexerPlan
from tests.kernels.indexer.emulation import assert_as_the_cpu
from tests.kernels.indexer.exact_inputs import make_inputs
from tests.kernels.indexer.normal_inputs import normal_inputs

pytestmark = pytest.mark.usefixtures("lines")

MODEL = IndexerPlan()
SMALL = IndexerPlan(num_heads=16)
SPLITS = IndexerPlan(num_heads=16, rows=By.CLUSTERS, sharing=Sharing(select_pages=1, merge_pages=3))
EDGES = [0, 1, 64, 65, 2048, 2049]


def test_lengths_around_a_page_and_topk() -> None:
    assert_as_the_cpu(MODEL, make_inputs(EDGES), 2, 2, topk=2048)


@pytest.mark.parametrize("cluster_size", [1, 4, 16, pytest.param(2, marks=pytest.mark.slow)])
def test_ctas_share_a_row(cluster_size: int) -> None:
    """Parts of odd numbers of pages, the last page not full; 16 CTAs: some without a page."""
    length = 900 if cluster_size == 16 else 1401
    assert_as_the_cpu(SMALL, make_inputs([length], num_heads=16), 1, cluster_size)


@pytest.mark.parametrize(("values", "cluster_size"), [("equal", 3), ("two", 1), ("nan", 2)])
def test_plateaus_and_nan(values: str, cluster_size: int) -> None:
    assert_as_the_cpu(SMALL, make_inputs([1100], num_heads=16, values=values), 1, cluster_size)


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


@pytest.mark.slow
def test_ids_are_positions() -> None:
    """Of rows without scores, and of scored ones."""
    assert_as_the_cpu(SMALL, make_inputs([5, 700], num_heads=16), 1, 2, positions=True)


@pytest.mark.slow
def test_sorted_rows() -> None:
    """All rows are scored, also those of at most topk tokens."""
    inputs = make_inputs([65, 1100], num_heads=16, values="two")
    assert_as_the_cpu(SMALL, inputs, 1, 3, topk=1024, by_score=True)


@pytest.mark.usefixtures("small_device")
def test_ids_are_the_best_of_the_kernels_own_scores() -> None:
    lengths = [1100, 700, 512]
    inputs = normal_inputs(lengths, num_heads=16, seed=2)
    scores = flashdsa.indexer_logits(*inputs, max(lengths), backend="emulate-sm100")
    positions = flashdsa.topk_indices(scores, inputs.seq_lens, 512, backend="cpu")
    table = inputs.block_table.long().gather(1, positions // 64)
    fused = inputs.output(512)
    flashdsa.dsa_topk_indexer(*inputs, fused, backend="emulate-sm100")
    assert torch.equal(fused, (table * 64 + positions % 64).int())
