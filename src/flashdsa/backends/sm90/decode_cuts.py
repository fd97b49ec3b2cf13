"""Tiles of a decode divided among CTAs (stream-K), as the kernels do it, and the time that it takes.

`kernels/attention/sm90/decode/shared/stream_k.py` has the same rule on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from flashdsa.heuristics.sparse_mla import Times
from flashdsa.kernels.attention.sm90.decode.shared import plan


class Stretch(NamedTuple):
    """Tiles of an item that a CTA takes, from `first` to `end`; a part if they are not all."""

    item: int
    first: int
    end: int
    tiles: int  # of the item

    @property
    def is_part(self) -> bool:
        """Whether other CTAs take parts of the item."""
        return self.end - self.first != self.tiles


def cut_line(tiles: Sequence[int], num_ctas: int) -> list[tuple[int, int]]:
    """Cuts between CTAs, and both ends: (item, tile of it). `tiles`: of each item."""
    starts = list(accumulate((count + plan.OVERHEAD_TILES for count in tiles), initial=0))
    line, whole = starts[-1], range(0, len(tiles), -(-len(tiles) // num_ctas))
    shares = [b - a for a, b in pairwise([*(starts[i] for i in whole), line])]
    if stays_whole(line, max(shares), num_ctas):
        return [*((item, 0) for item in whole), (len(tiles), 0)]
    ctas = max(1, min(num_ctas, line // plan.LEAST_SHARE))
    cuts, item = [], 0
    for cta in range(ctas):
        place = cta * line // ctas
        while starts[item + 1] <= place:
            item += 1
        cuts.append((item, max(0, place - starts[item] - plan.OVERHEAD_TILES)))
    return [*cuts, (len(tiles), 0)]


def stays_whole(line: int, longest: int, num_ctas: int) -> bool:
    """Whether no item is cut; `longest`: share of whole ones."""
    return longest * num_ctas <= line + plan.WHOLE_TILES * num_ctas


def divide(tiles: Sequence[int], num_ctas: int) -> list[list[Stretch]]:
    """Stretches of each CTA that takes part."""
    shares = []
    for (item, tile), (last, end) in pairwise(cut_line(tiles, num_ctas)):
        ends = [*((i, tiles[i]) for i in range(item, last)), *([(last, end)] if end else [])]
        of_cta = [Stretch(i, 0, stop, tiles[i]) for i, stop in ends]
        if of_cta:
            of_cta[0] = of_cta[0]._replace(first=tile)
        shares.append(of_cta)
    return shares


def cut_equal_items(items: int, tiles: int, num_ctas: int) -> list[tuple[int, int]]:
    """`cut_line` of items of `tiles` each; its time does not depend on their number."""
    size = tiles + plan.OVERHEAD_TILES
    line, whole = items * size, -(-items // num_ctas)
    if stays_whole(line, whole * size, num_ctas):
        return [(item, 0) for item in range(0, items, whole)] + [(items, 0)]
    ctas = max(1, min(num_ctas, line // plan.LEAST_SHARE))
    cuts = []
    for cta in range(ctas):
        item, place = divmod(cta * line // ctas, size)
        cuts.append((item, max(0, place - plan.OVERHEAD_TILES)))
    return [*cuts, (items, 0)]


def time_of_waves(times: Times, tiles: int, waves: int) -> float:
    """Time of items that clusters take one by one. `tiles`: most of an item for a CTA."""
    return times.launch + times.item * (waves - 1) + times.tile * tiles * waves


@lru_cache(maxsize=1024)
def time_of_stream_k(times: Times, items: int, tiles: int, num_ctas: int) -> float:
    """Time of stream-K over items of `tiles` each."""
    cuts = cut_equal_items(items, tiles, num_ctas)
    cuts_inside = Counter(item for item, tile in cuts if tile)
    longest = 0.0
    for (item, tile), (last, end) in pairwise(cuts):
        stretches = last - item + (end > 0)
        time = times.tile * ((last - item) * tiles + end - tile)
        time += times.item * max(stretches - 1, 0)
        inside = max(cuts_inside[item], cuts_inside[last] if end else 0)
        if inside:
            time += times.merge + times.part * (inside - 1)
        longest = max(longest, time)
    return times.launch + longest
