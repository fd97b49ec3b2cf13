"""Tiles of a decode dealt out: each item's tiles once, and no CTA has more than two parts."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest

from flashdsa.backends.sm90.decode_cuts import (
    Times,
    cut_equal_items,
    cut_line,
    deal,
    stays_whole,
    time_of_dealt,
    time_of_waves,
)
from flashdsa.kernels.attention.sm90.decode.shared.plan import OVERHEAD_TILES, WHOLE_TILES

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
    dealt = deal(tiles, num_ctas)
    assert len(dealt) <= num_ctas
    following = [(stretch.item, stretch.first) for of_cta in dealt for stretch in of_cta]
    ends = [(stretch.item, stretch.end) for of_cta in dealt for stretch in of_cta]
    assert following[0] == (0, 0)
    assert ends[-1] == (len(tiles) - 1, tiles[-1])
    for (item, end), (next_item, first) in zip(ends, following[1:], strict=False):
        whole = next_item == item + 1 and end == tiles[item] and first == 0
        assert whole or (next_item == item and first == end)


@pytest.mark.parametrize("seed", range(60))
def test_only_a_cta_s_first_and_last_stretch_are_parts_and_none_is_empty(seed: int) -> None:
    for of_cta in deal(*drawn(seed)):
        assert not any(stretch.is_part for stretch in of_cta[1:-1])
        assert all(stretch.first < stretch.end for stretch in of_cta if stretch.is_part)


@pytest.mark.parametrize("seed", range(60))
def test_no_cta_has_more_than_its_share(seed: int) -> None:
    tiles, num_ctas = drawn(seed)
    dealt = deal(tiles, num_ctas)
    starts = list(accumulate((count + OVERHEAD_TILES for count in tiles), initial=0))
    whole = -(-len(tiles) // num_ctas)
    longest = max(b - a for a, b in pairwise([*starts[::whole], starts[-1]]))
    most = starts[-1] / len(dealt)
    if stays_whole(starts[-1], longest, num_ctas):
        most = starts[-1] / num_ctas + WHOLE_TILES
    for of_cta in dealt:
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


def test_cuts_ascend() -> None:
    for seed in range(20):
        assert all(a <= b for a, b in pairwise(cut_line(*drawn(seed))))


@pytest.mark.parametrize(
    ("items", "by_design"), [(134, 106.5), (160, 121.6), (200, 147.8), (266, 192.4), (512, 348.2)]
)
def test_times_are_between_those_of_the_design_and_even_shares(
    items: int, by_design: float
) -> None:
    """The design, whose parts have three tiles at least, took 1 to 6 % less than FlashMLA."""
    even = TIMES.launch + TIMES.tile * items * 32 / 132
    assert even < time_of_dealt(TIMES, items, 32, 132) < 1.01 * by_design


def test_whole_waves_have_one_stretch_each() -> None:
    for waves in (1, 2):
        assert all(len(of_cta) == waves for of_cta in deal([32] * 132 * waves, 132))
        items = 132 * waves
        assert time_of_dealt(TIMES, items, 32, 132) == time_of_waves(TIMES, 32, waves)
