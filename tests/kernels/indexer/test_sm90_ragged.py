"""Ragged batches on ptxemu: clusters share long rows, which changes no id and leaves nothing; rows
of a request that are scored together.

Scores are exact in any order of additions (see inputs.py), so the ids must be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from flashdsa.backends.emulated import devices
from flashdsa.backends.emulated.runner import Emulator, emulation
from flashdsa.backends.indexer import launch as launches
from flashdsa.backends.indexer.choice import Kind, Way
from flashdsa.dispatch.registration import custom_op
from flashdsa.kernels.indexer.plan import By
from flashdsa.kernels.indexer.sizes import ORDERED_ROWS
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan, LogitsPlan
from flashdsa.ops.indexer import DSA_TOPK_INDEXER
from tests.kernels.indexer.emulation import SPLITS, UNTOUCHED, assert_as_the_cpu, published_counts
from tests.kernels.indexer.inputs import make_inputs, make_requests

pytestmark = pytest.mark.usefixtures("lines")

LONG_LISTS = replace(SPLITS, lists=IndexerPlan().lists)
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
    launch = assert_as_the_cpu(SPLITS, inputs, *clusters, warnings=BEHIND_THE_LIST)
    assert publishing_clusters(launch, clusters[1]) == publishing


@pytest.mark.slow
@pytest.mark.parametrize("values", ["random", "descending"])
def test_clusters_with_fewer_tokens_than_topk_share_a_row(values: str) -> None:
    inputs = make_inputs([6000, 2100, 2049], num_heads=16, values=values)
    launch = assert_as_the_cpu(LONG_LISTS, inputs, 5, 2, seed=1, topk=2048)
    assert publishing_clusters(launch, 2) == [0, 1, 2]


def test_rows_of_many_requests_are_weighed_together() -> None:
    """A thread weighs a request's rows, as they are more than threads; lengths within a request may
    differ."""
    lengths = [3, 0, 1] * 175
    assert len(lengths) > ORDERED_ROWS
    for first, own in ((30, [700, 699, 600]), (300, [3, 5000, 900]), (522, [513, 512, 2000])):
        lengths[first : first + 3] = own
    inputs = make_requests(lengths, next_n=3)
    launch = assert_as_the_cpu(SPLITS, inputs, 9, 1)
    assert publishing_ctas(launch) >= 2


def test_who_comes_last_changes_nothing() -> None:
    inputs = make_inputs([2500, 513, 2600], num_heads=16)
    launch = assert_as_the_cpu(SPLITS, inputs, 5, 1, seed=1)
    assert publishing_ctas(launch) == 4


def test_even_rows_have_a_cluster_each_and_publish_nothing() -> None:
    launch = assert_as_the_cpu(SPLITS, make_inputs([700, 650, 0, 600], num_heads=16), 4, 1)
    assert publishing_ctas(launch) == 0


LATER = pytest.mark.slow


TWO_LAUNCHES = {
    "3 x 2": ([2100, 2101, 5, 0, 6000, 5900], 2, (64, 2048, "slot")),
    "positions": ([2100, 2101, 2049, 2048], 2, (32, 2048, "position")),
    "2 x 4": ([0, 700, 5, 513, 590, 1500, 701, 90], 4, (16, 512, "slot")),
    "1 x 4": ([1100, 1025, 3000, 0], 4, (32, 1024, "slot")),
    "sorted": ([0, 700, 5, 530], 2, (16, 100, "sorted")),
}
VALUES = {"random": False, "nan": True, "two": True, "crowded": False}
"""Whether pages are bad beside them."""
ALWAYS = {("2 x 4", "random"), ("sorted", "nan")}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        pytest.param(*one, marks=() if one in ALWAYS else LATER)
        for one in product(TWO_LAUNCHES, VALUES)
    ],
)
def test_the_public_operation_scores_and_ranks_by_two_launches(
    name: str, values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer tokens than topk may be left where pages are bad."""
    monkeypatch.setattr(launches, "choose", lambda *_: Way(Kind.RANKED))
    lengths, next_n, (heads, topk, kind) = TWO_LAUNCHES[name]
    inputs = make_requests(lengths, num_heads=heads, next_n=next_n, values=values)
    if VALUES[values]:
        inputs.block_table[:, ::3] = -1
    ids = [inputs.output(topk) for _ in range(2)]
    rank = custom_op(DSA_TOPK_INDEXER)
    how = None, kind == "sorted", kind == "position", 64, 1, False
    rank(*inputs, ids[0], *how, "cpu")
    with emulation(devices.SMALL) as emulator:
        rank(*inputs, ids[1], *how, "emulate-sm90")
    assert torch.equal(*ids)
    assert not any(counts.any() for (counts,) in emulator.workspaces.values())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda: IndexerPlan(rows=By.PAIRS, stages=16), "for a launch that ranks them"),
        (lambda: LogitsPlan(rows=By.PAIRS), "pairs are scored for a launch that ranks them"),
        (lambda: LogitsPlan(rows=By.PAIRS, ranked=True, stages=12), "a power of two"),
    ],
    ids=["fused", "not ranked", "stages"],
)
def test_plans_that_cannot_work_are_refused(plan: Callable[[], IndexerPlan], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan()
