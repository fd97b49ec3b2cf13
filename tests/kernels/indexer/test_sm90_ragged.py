"""Ragged batches on ptxemu: long rows are split among CTAs or clusters, which changes no id and
leaves nothing.

Scores are exact in any order of additions (see exact_inputs.py), so the ids must be equal.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from flashdsa.backends.emulated.runner import Emulator
from flashdsa.kernels.indexer.plan import By, Lists, Sharing
from flashdsa.kernels.indexer.sizes import ORDERED_ROWS
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.problem import PAGE_SIZE
from tests.kernels.indexer.emulation import UNTOUCHED, assert_as_the_cpu, published_counts
from tests.kernels.indexer.exact_inputs import make_inputs, make_requests

pytestmark = pytest.mark.usefixtures("lines")

# Selecting takes next to no time, so that small batches are split as large ones are.
PLAN = IndexerPlan(
    num_heads=16, topk=512, rows=By.CTAS, sharing=Sharing(select_pages=1, merge_pages=3)
)
CLUSTERS = replace(PLAN, rows=By.CLUSTERS, by_lengths=True)
DEALT = replace(CLUSTERS, by_lengths=False, sharing=Sharing(split_pages=20))
TIGHT = replace(PLAN, lists=Lists(capacity=2048, first_fill_pages=10, fill_step_pages=2))
OF_BAD_PAGES = {("uninitialised-async-read", "score.py"), ("uninitialised-read", "score.py")}
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
        ([6000, 513, 5000, 300, 700], "ascending", (5, 2), [0, 1, 2, 3]),
        pytest.param([700, 9000, 513], "random", (7, 2), [0, 1, 2, 3], marks=pytest.mark.slow),
        pytest.param([530, 6000, 513, 600], "equal", (3, 3), [0, 1], marks=pytest.mark.slow),
        pytest.param([9000, *[530] * 7], "random", (3, 4), [0, 1], marks=pytest.mark.slow),
    ],
)
def test_a_long_row_gets_clusters_by_the_lengths(
    lengths: list[int], values: str, clusters: tuple[int, int], publishing: list[int]
) -> None:
    """At most twice as many as a cluster has CTAs; the other rows take turns on the rest."""
    inputs = make_inputs(lengths, num_heads=16, values=values)
    launch = assert_as_the_cpu(CLUSTERS, inputs, *clusters, warnings=BEHIND_THE_LIST)
    assert publishing_clusters(launch, clusters[1]) == publishing


@pytest.mark.slow
@pytest.mark.parametrize("values", ["random", "descending"])
def test_clusters_with_fewer_tokens_than_topk_share_a_row(values: str) -> None:
    inputs = make_inputs([6000, 2100, 2049], num_heads=16, values=values)
    launch = assert_as_the_cpu(replace(CLUSTERS, topk=2048), inputs, 5, 2, seed=1)
    assert publishing_clusters(launch, 2) == [0, 1, 2]


@pytest.mark.parametrize(
    ("lengths", "values", "clusters", "publishing"),
    [
        ([700, 400, 2500], "two", (5, 1, 3), [1, 2, 3]),
        ([1500, 4000], "ascending", (5, 2, 4), [1, 2, 3]),
        ([3000, 3000, 700], "random", (5, 1, 2), [0, 1, 2, 3]),
        pytest.param([600, 700], "random", (4, 2, 4), [], marks=pytest.mark.slow),
        pytest.param([300, 2500, 0, 513], "equal", (7, 2, 4), [0, 1, 2, 3], marks=pytest.mark.slow),
    ],
)
def test_a_few_rows_are_dealt_clusters(
    lengths: list[int], values: str, clusters: tuple[int, int, int], publishing: list[int]
) -> None:
    """Rows without scores get none, short ones one, and long ones those that are left."""
    inputs = make_inputs(lengths, num_heads=16, values=values)
    number, size, most = clusters
    launch = assert_as_the_cpu(
        DEALT, inputs, number, size, num_splits=most, warnings=BEHIND_THE_LIST
    )
    assert publishing_clusters(launch, size) == publishing


@pytest.mark.parametrize("values", [pytest.param("random", marks=pytest.mark.slow), "two"])
def test_a_long_row_gets_clusters_of_its_own_and_each_cta_selects_alone(values: str) -> None:
    inputs = make_inputs([530, 6000, 513, 600], num_heads=16, values=values)
    launch = assert_as_the_cpu(PLAN, inputs, 3, 2)
    assert publishing_ctas(launch) == 4


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


@pytest.mark.parametrize(("pages", "num_clusters", "least"), [(100, 10, 6), (163, 6, 5)])
def test_more_is_published_than_the_list_holds(pages: int, num_clusters: int, least: int) -> None:
    """Equal scores: every CTA publishes topk, of which the first part's are the winners. Of 163
    pages some parts are cut before their end, and publish counts of bins, and others do not."""
    inputs = make_inputs([PAGE_SIZE * pages, 513], num_heads=16, values="equal")
    launch = assert_as_the_cpu(TIGHT, inputs, num_clusters, 1)
    published = published_counts(launch)
    published = published[published != UNTOUCHED]
    assert len(published) >= least and int(published.sum()) > TIGHT.lists.capacity


@pytest.mark.parametrize(
    "values",
    [
        "ascending",
        pytest.param("random", marks=pytest.mark.slow),
        pytest.param("descending", marks=pytest.mark.slow),
    ],
)
def test_the_list_holds_what_can_win_of_all_that_is_published(values: str) -> None:
    """The row's counts and the CTAs' floors say so, before a slot is listed."""
    inputs = make_inputs([9600, 513], num_heads=16, values=values)
    launch = assert_as_the_cpu(TIGHT, inputs, 10, 1, seed=3, warnings=BEHIND_THE_LIST)
    assert publishing_ctas(launch) >= 6


def test_bad_pages_of_a_split_row_leave_the_rest_empty() -> None:
    """Some CTAs publish nothing."""
    inputs = make_inputs([5000, 600], num_heads=16)
    inputs.block_table[0, 5:] = -1
    launch = assert_as_the_cpu(PLAN, inputs, 4, 1, warnings=OF_BAD_PAGES)
    assert publishing_ctas(launch) == 3


def test_even_rows_have_a_cluster_each_and_publish_nothing() -> None:
    launch = assert_as_the_cpu(PLAN, make_inputs([700, 650, 0, 600], num_heads=16), 4, 1)
    assert publishing_ctas(launch) == 0


@pytest.mark.parametrize("values", [pytest.param("random", marks=pytest.mark.slow), "ascending"])
def test_lists_that_are_compacted_count_each_entry_once(values: str) -> None:
    """The parts are longer than a list: an entry counted twice would raise the row's floor."""
    inputs = make_inputs([9000, 513], num_heads=16, values=values)
    assert 3 * TIGHT.lists.capacity < 9000
    launch = assert_as_the_cpu(TIGHT, inputs, 3, 1, seed=1, warnings=BEHIND_THE_LIST)
    assert publishing_ctas(launch) == 2


@pytest.mark.parametrize(
    ("values", "ctas", "first_pages"),
    [
        pytest.param("random", 2, 1, marks=pytest.mark.slow),
        ("crowded", 2, 1000),
        ("crowded", Sharing.settling_ctas, 1000),  # the row has fewer, and more than a list's
    ],
)
def test_ctas_that_wait_for_all_counts_publish_little_more_than_wins(
    values: str, ctas: int, first_pages: int
) -> None:
    """Many entries lie in the group of the last winner, or in its bin: steps are counted, too."""
    patience = {"settling_ctas": ctas, "settling_pages": first_pages, "crowded_pages": 1}
    sharing = replace(TIGHT.sharing, **patience, count_polls=1_000_000)
    inputs = make_inputs([6000, 513], num_heads=16, values=values)
    patient = replace(TIGHT, sharing=sharing)
    launch = assert_as_the_cpu(patient, inputs, 4, 1, seed=2, warnings=BEHIND_THE_LIST)
    published = published_counts(launch)
    published = published[published != UNTOUCHED]
    assert len(published) >= 3 and PLAN.topk <= int(published.sum()) <= 620
