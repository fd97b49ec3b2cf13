"""Which way serves a call of the indexer: the table, and what every choice keeps to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashdsa.backends.emulated import devices
from flashdsa.backends.emulated.runner import Emulator
from flashdsa.backends.indexer.choice import (
    USUAL_CLUSTER,
    Call,
    Gpu,
    Kind,
    Way,
    choose,
    clusters_for,
    gpu_of,
)
from flashdsa.backends.indexer.launch import Kernels
from flashdsa.kernels.catalog import INDEXER, INDEXER_ORDER, INDEXER_ORDER_SM100, INDEXER_SM100
from flashdsa.kernels.indexer.sizes import SPLITS_BY_SIZE
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from tests.support.subtests import CaseLoop

PAGES = (32, 64, 150, 200, 400, 500, 600, 900, 2000)
H200 = """\
next_n rows | 32       64       150      200      400      500      600      900      2000
1         1 | unscored row 1x8  row 1x13 row 1x13 row 1x13 row 1x13 row 1x13 sha 15x8 sha 15x8
1         7 | unscored row 7x8  row 7x13 row 7x13 row 7x13 row 7x13 row 7x13 sha 15x8 sha 15x8
1        15 | unscored row 15x8 row 15x8 row 15x8 row 15x8 row 15x8 sha 15x8 sha 15x8 sha 15x8
1        16 | unscored row 16x6 row 16x6 row 16x6 row 16x6 sha 15x8 sha 15x8 sha 15x8 sha 15x8
1        39 | unscored row 39x3 row 39x3 row 39x3 sha 15x8 sha 15x8 sha 15x8 sha 15x8 sha 15x8
1        40 | unscored sha 15x8 sha 15x8 sha 15x8 sha 15x8 sha 15x8 sha 15x8 sha 15x8 sha 15x8
1        61 | unscored row 61x2 row 61x2 sha 30x4 sha 30x4 sha 30x4 sha 30x4 sha 30x4 sha 30x4
1       300 | unscored sha 30x4 sha 30x4 sha 30x4 sha 30x4 sha 30x4 sha 30x4 sha 30x4 sha 30x4
2         2 | unscored row 2x8  row 2x13 row 2x13 row 2x13 row 2x13 row 2x13 ranked   ranked
2        14 | unscored row 14x8 row 14x8 row 14x8 row 14x8 row 14x8 ranked   ranked   ranked
2        32 | unscored row 32x3 row 32x3 row 32x3 ranked   ranked   ranked   ranked   ranked
2        34 | unscored row 34x3 row 34x3 row 34x3 ranked   ranked   ranked   ranked   ranked
2        62 | unscored row 62x2 row 62x2 ranked   ranked   ranked   ranked   ranked   ranked
2       120 | unscored ranked   ranked   ranked   ranked   ranked   ranked   ranked   ranked
2       122 | unscored ranked   ranked   ranked   ranked   ranked   ranked   ranked   ranked
3        33 | unscored row 33x3 row 33x3 row 33x3 sha 15x8 sha 15x8 sha 15x8 sha 15x8 sha 15x8
3       300 | unscored sha 30x4 sha 30x4 sha 30x4 sha 30x4 sha 30x4 sha 30x4 sha 30x4 sha 30x4
4        16 | unscored row 16x6 row 16x6 row 16x6 row 16x6 ranked   ranked   ranked   ranked
4       124 | unscored ranked   ranked   ranked   ranked   ranked   ranked   ranked   ranked
"""
"""The first letters of the kind; clusters x CTAs of each, in tables of so many pages a row."""


def ways_of(gpu: Gpu, rows: str) -> str:
    """The table of the calls whose next_n and rows begin the lines of `rows`."""
    first, *lines = rows.splitlines()
    table = [first]
    for line in lines:
        next_n, count = map(int, line.split("|")[0].split())
        call = Call(count, count // next_n, unscored_pages=32, ranks=True)
        ways = [choose(call, pages, gpu) for pages in PAGES]
        words = [
            f"{kind[:3]} {clusters}x{size}" if clusters else str(kind)
            for kind, clusters, size in ways[1:]
        ]
        assert ways[0].kind is Kind.UNSCORED
        words.insert(0, ways[0].kind)
        table.append(f"{next_n} {count:9} | {' '.join(f'{w:8}' for w in words)}".rstrip())
    return "\n".join(table) + "\n"


def test_the_table_of_ways() -> None:
    """What this fails with is the new table."""
    assert ways_of(gpu_of(Emulator(), IndexerPlan()), H200) == H200


def test_a_way_prints() -> None:
    way = choose(Call(1, 1), 900, gpu_of(Emulator(), IndexerPlan()))
    assert way == Way(Kind.SHARED, 15, 8)
    assert str(way) == "shared, 15 clusters of 8"


CHOSEN = [
    (1, (1, 13)),
    (7, (7, 13)),
    (8, (8, 8)),  # 9 is no choice
    (15, (15, 8)),
    (17, (17, 6)),
    (22, (22, 5)),
    (30, (30, 4)),
    (39, (39, 3)),
    (40, (30, 4)),  # halved, one for every row
    (60, (30, 4)),
    (61, (61, 2)),
    (66, (66, 2)),
    (67, (66, 2)),
    (100_000, (66, 2)),
]


def test_clusters_are_the_largest_of_which_every_row_has_one_or_a_half(subtests: CaseLoop) -> None:
    for rows, chosen in CHOSEN:
        with subtests.test(f"{rows} rows"):
            assert clusters_for(gpu_of(Emulator(), IndexerPlan()), rows) == chosen


@pytest.mark.parametrize(
    ("most", "ways"),
    [
        (16, [(1, 16), (8, 8), (15, 8), (30, 4)]),
        (3, [(1, 3), (8, 3), (39, 3), (39, 3)]),
        (1, [(1, 1), (8, 1), (132, 1), (132, 1)]),
    ],
)
def test_clusters_are_as_large_as_the_environment_allows(
    most: int, ways: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHDSA_MAX_CLUSTER", str(most))
    gpu = gpu_of(Emulator(), IndexerPlan())
    calls = ((1, 65), (8, 65), (8, 900), (67, 900))
    chosen = [choose(Call(rows, rows), pages, gpu) for rows, pages in calls]
    assert [way[1:] for way in chosen[:2]] == ways[:2]
    assert [way[1:] for way in chosen[2:]] == ways[2:]
    assert [way.kind for way in chosen] == [Kind.ROW] * 2 + [Kind.SHARED] * 2


def test_clusters_find_room_whichever_35_sms_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """One cluster of a batch at least, so that a call need not wait for other streams to end."""
    monkeypatch.delenv("FLASHDSA_MAX_CLUSTER", raising=False)
    gpcs, free = 8, devices.H200.num_sms - 35
    assert max(gpu_of(Emulator(), IndexerPlan()).clusters) == USUAL_CLUSTER
    assert free > gpcs * (USUAL_CLUSTER - 1), "all GPCs may have fewer free SMs"


def test_what_clusters_publish_fits_the_lists_of_the_last() -> None:
    """A CTA of it takes the slots of as many CTAs as the row has clusters, next to each other."""
    plan = IndexerPlan()
    for size in range(1, 17):
        for num_splits in range(2, SPLITS_BY_SIZE * size + 1):
            overlapping = 1 + -(-(num_splits - 1) // size)  # clusters whose CTAs those are
            most = plan.most_at_bin[num_splits > size + 1]
            assert min(num_splits, overlapping) * most <= plan.lists.capacity


def test_no_cluster_is_launched_that_the_device_cannot_run() -> None:
    """Sizes that do not fit have 0, as on a part of a GPU; or are not in the table."""
    full = devices.H200.clusters
    for capacity in (full, {**full, 16: 0, 14: 0, 12: 0, 10: 0}, {1: 8, 2: 4}, {1: 2, 2: 0}):
        gpu = Gpu(capacity[1], capacity)
        for rows in range(1, 300):
            for pages in PAGES:
                way = choose(Call(rows, -(-rows // 2)), pages, gpu)
                assert 1 <= way.clusters <= capacity[way.size]
                assert way.kind is not Kind.ROW or way.clusters == rows


def test_every_way_has_a_kernel() -> None:
    """Of both architectures."""
    for spec, order in ((INDEXER, INDEXER_ORDER), (INDEXER_SM100, INDEXER_ORDER_SM100)):
        for num_heads in (64, 16, 32):
            kernels = Kernels(spec, order, None, num_heads, 700, False, False)
            assert all(kernels.plan(kind) for kind in (Kind.ROW, Kind.SHARED))
    gathering = replace(INDEXER_SM100.plans[0], gathers=True)
    kernels = Kernels(INDEXER_SM100, INDEXER_ORDER_SM100, None, 64, 2048, False, False, True)
    assert kernels.plan(Kind.ROW) == gathering
