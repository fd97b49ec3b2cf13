"""Ragged batches on ptxemu: clusters share long rows, which changes no id and leaves nothing.

Scores are exact in any order of additions (see exact_inputs.py), so the ids must be equal.
"""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from flashdsa.backends.emulated.runner import Emulator
from flashdsa.kernels.indexer.plan import By, Sharing
from flashdsa.kernels.indexer.sizes import ORDERED_ROWS
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from tests.kernels.indexer.emulation import UNTOUCHED, assert_as_the_cpu, published_counts
from tests.kernels.indexer.exact_inputs import make_inputs, make_requests

pytestmark = pytest.mark.usefixtures("lines")

# Selecting takes next to no time, so that small batches are split as large ones are.
PLAN = IndexerPlan(num_heads=16, rows=By.CLUSTERS, sharing=Sharing(select_pages=1, merge_pages=3))
# Lists are read four entries at a time, and what lies behind the last one is passed over.
BEHIND_THE_LIST = {("uninitialised-read", "smem.py")}


def publishing_ctas(launch: Emulator) -> int:
    """How many CTAs published."""
    return int((published_counts(launch) != UNTOUCHED).sum())


def publishing_clusters(launch: Emulator, size: int) -> list[int]:
    """The clusters whose first CTAs published."""
    return (published_counts(launch)[::size] != UNTOUCHED).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("lengths", "values", "clusters", "publishing"),
    [
        ([530, 6000, 513, 600], "two", (3, 2), [0, 1]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ([6000, 513, 5000, 300, 700], "ascending", (5, 2), [0, 1, 2, 3]),
                ([9000], "descending", (7, 2), [0, 1, 2, 3]),
                ([700, 9000, 513], "random", (7, 2), [0, 1, 2, 3]),
                ([530, 6000, 513, 600], "equal", (3, 3), [0, 1]),
                ([9000, *[530] * 7], "random", (3, 4), [0, 1]),
            )
        ),
    ],
)
def test_a_long_row_gets_clusters_by_the_lengths(
    lengths: list[int], values: str, clusters: tuple[int, int], publishing: list[int]
) -> None:
    """At most twice as many as a cluster has CTAs; the other rows take turns on the rest."""
    inputs = make_inputs(lengths, num_heads=16, values=values)
    launch = assert_as_the_cpu(PLAN, inputs, *clusters, warnings=BEHIND_THE_LIST)
    assert publishing_clusters(launch, clusters[1]) == publishing


@pytest.mark.slow
@pytest.mark.parametrize("values", ["random", "descending"])
def test_clusters_with_fewer_tokens_than_topk_share_a_row(values: str) -> None:
    inputs = make_inputs([6000, 2100, 2049], num_heads=16, values=values)
    launch = assert_as_the_cpu(PLAN, inputs, 5, 2, seed=1, topk=2048)
    assert publishing_clusters(launch, 2) == [0, 1, 2]


def test_rows_of_many_requests_are_weighed_together() -> None:
    """A thread weighs a request's rows, as they are more than threads; lengths within a request may
    differ."""
    lengths = [3, 0, 1] * 175
    assert len(lengths) > ORDERED_ROWS
    for first, own in ((30, [700, 699, 600]), (300, [3, 5000, 900]), (522, [513, 512, 2000])):
        lengths[first : first + 3] = own
    inputs = make_requests(lengths, next_n=3)
    launch = assert_as_the_cpu(PLAN, inputs, 9, 1)
    assert publishing_ctas(launch) >= 2


def test_who_comes_last_changes_nothing() -> None:
    inputs = make_inputs([2500, 513, 2600], num_heads=16)
    for seed in range(2):
        launch = assert_as_the_cpu(PLAN, inputs, 5, 1, seed)
        assert publishing_ctas(launch) == 4


def test_even_rows_have_a_cluster_each_and_publish_nothing() -> None:
    launch = assert_as_the_cpu(PLAN, make_inputs([700, 650, 0, 600], num_heads=16), 4, 1)
    assert publishing_ctas(launch) == 0
