"""Choices that need no device: ways of Hopper's indexer, and cuts of the stream-K decode."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise

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
from flashdsa.backends.sm90.decode_cuts import (
    Times,
    cut_equal_items,
    cut_line,
    divide,
    stays_whole,
    time_of_stream_k,
    time_of_waves,
)
from flashdsa.kernels.attention.sm90.decode.shared.plan import OVERHEAD_TILES, WHOLE_TILES
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


TIMES = Times(launch=9.4, tile=2.53, item=5.0, merge=3.5, part=1.0)


def drawn(seed: int) -> tuple[list[int], int]:
    """Tiles of items, and CTAs: equal, unequal and empty items, few and many."""
    draw = random.Random(seed)
    most = draw.choice((1, 5, 6, 32, 130))
    tiles = [draw.choice((0, 1, most, draw.randint(0, most))) for _ in range(draw.randint(1, 300))]
    return tiles, draw.choice((1, 2, 4, 7, 132))


@pytest.mark.parametrize("seed", range(60))
def test_stretches_are_all_tiles_of_all_items_once(seed: int) -> None:
    tiles, num_ctas = drawn(seed)
    shares = divide(tiles, num_ctas)
    assert len(shares) <= num_ctas
    following = [(stretch.item, stretch.first) for of_cta in shares for stretch in of_cta]
    ends = [(stretch.item, stretch.end) for of_cta in shares for stretch in of_cta]
    assert following[0] == (0, 0)
    assert ends[-1] == (len(tiles) - 1, tiles[-1])
    for (item, end), (next_item, first) in zip(ends, following[1:], strict=False):
        whole = next_item == item + 1 and end == tiles[item] and first == 0
        assert whole or (next_item == item and first == end)


@pytest.mark.parametrize("seed", range(60))
def test_only_a_cta_s_first_and_last_stretch_are_parts_and_none_is_empty(seed: int) -> None:
    for of_cta in divide(*drawn(seed)):
        assert not any(stretch.is_part for stretch in of_cta[1:-1])
        assert all(stretch.first < stretch.end for stretch in of_cta if stretch.is_part)


@pytest.mark.parametrize("seed", range(60))
def test_no_cta_has_more_than_its_share(seed: int) -> None:
    tiles, num_ctas = drawn(seed)
    shares = divide(tiles, num_ctas)
    starts = list(accumulate((count + OVERHEAD_TILES for count in tiles), initial=0))
    whole = -(-len(tiles) // num_ctas)
    longest = max(b - a for a, b in pairwise([*starts[::whole], starts[-1]]))
    most = starts[-1] / len(shares)
    if stays_whole(starts[-1], longest, num_ctas):
        most = starts[-1] / num_ctas + WHOLE_TILES
    for of_cta in shares:
        assert sum(stretch.end - stretch.first for stretch in of_cta) < most + 1


def test_equal_items_are_cut_alike_by_either_rule() -> None:
    draw = random.Random(0)
    for _ in range(200):
        items, tiles, ctas = draw.randint(1, 400), draw.randint(1, 40), draw.choice((1, 4, 132))
        assert cut_equal_items(items, tiles, ctas) == cut_line([tiles] * items, ctas)


def test_items_stay_whole_where_the_longest_share_is_little_longer() -> None:
    whole = 0
    for seed in range(200):
        tiles, ctas = drawn(seed)
        each = -(-len(tiles) // ctas)
        sizes = [count + OVERHEAD_TILES for count in tiles]
        longest = max(sum(sizes[i : i + each]) for i in range(0, len(sizes), each))
        cuts = cut_line(tiles, ctas)
        if longest <= sum(sizes) / ctas + WHOLE_TILES:
            whole += 1
            assert cuts == [*((item, 0) for item in range(0, len(tiles), each)), (len(tiles), 0)]
        else:
            assert cuts != [(item, 0) for item in range(0, len(tiles), each)] + [(len(tiles), 0)]
    assert 40 < whole < 160


@pytest.mark.parametrize(
    ("items", "by_design"), [(134, 106.5), (160, 121.6), (200, 147.8), (266, 192.4), (512, 348.2)]
)
def test_times_are_between_those_of_the_design_and_even_shares(
    items: int, by_design: float
) -> None:
    """The design, whose parts have three tiles at least, took 1 to 6 % less than FlashMLA."""
    even = TIMES.launch + TIMES.tile * items * 32 / 132
    assert even < time_of_stream_k(TIMES, items, 32, 132) < 1.01 * by_design


def test_whole_waves_have_one_stretch_each() -> None:
    for waves in (1, 2):
        assert all(len(of_cta) == waves for of_cta in divide([32] * 132 * waves, 132))
        items = 132 * waves
        assert time_of_stream_k(TIMES, items, 32, 132) == time_of_waves(TIMES, 32, waves)
