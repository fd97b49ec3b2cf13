"""Facts of a GPU that the choice of a forward or decode of sparse MLA needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Times(NamedTuple):
    """Times of a decode kernel on a busy GPU, in us.

    Attributes:
        launch: launch, first keys, and rows of the last item. tile: 64 keys.
        item: end of an item and beginning of the next, or a further wave of CTAs.
        merge: of an item's two parts. part: a further one.
    """

    launch: float
    tile: float
    item: float = 0.0
    merge: float = 0.0
    part: float = 0.0


class Grouping(NamedTuple):
    """When groups of so many queries pay, by estimated times over that of queries one by one.

    Attributes:
        most_unlike: groups are taken if they take at most so much where queries name no row
            together.
        most_alike: a sample chooses if they take less than so much where queries name the same
            rows, and
        least_us: queries one by one take longer than this.
    """

    most_unlike: float
    most_alike: float
    least_us: float


@dataclass(frozen=True)
class SparseMlaConstants:
    """Times in us, shares and ratios, measured on one GPU.

    Attributes:
        group_lists: us of the kernels that write lists of groups of queries.
        groupings: by queries of a group.
        most_unsampled: us of queries one by one up to which groups are taken without a sample.
        used_slots: share of slots that count where lists have lengths.
        find_ends: us from which lists without lengths are looked through first.
        clusters: times of clusters of CTAs, by kind of item.
        single_cta: us by which a CTA of 64 heads that has an item for itself ends it earlier.
        single_cta_tiles: tiles up to which one CTA takes an item of 64 heads sooner than several.
        stream_k: times of tiles divided among all SMs, by kind of item.
        stream_k_gain: stream-K tiles are taken below this ratio to whole items.
        stream_k_gain_lengths: the same of lists with lengths of `long_tiles` or more.
        least_stream_k_tiles: tiles of lists with lengths from which stream-K is considered.
        long_tiles: see `stream_k_gain_lengths`.
        most_waves: waves of items beyond which tiles are not divided, by kind of item.
        forward_gain, forward_gain_far: stream-K tiles are taken in place of the forward below these
            ratios; the second where queries share rows of a kv larger than `near_rows`.
        near_rows: rows of kv that the second-level cache serves well.
        stream_k_code: us that a cold call waits for the code of stream-K beside the forward's.
        most_stream_k_turns: items for each SM up to which stream-K tiles replace the forward.
    """

    group_lists: float
    groupings: Mapping[int, Grouping]
    most_unsampled: float
    used_slots: float
    find_ends: float
    clusters: Mapping[str, Times]
    single_cta: float
    single_cta_tiles: int
    stream_k: Mapping[str, Times]
    stream_k_gain: float
    stream_k_gain_lengths: float
    least_stream_k_tiles: int
    long_tiles: int
    most_waves: Mapping[str, int]
    forward_gain: float
    forward_gain_far: float
    near_rows: int
    stream_k_code: float
    most_stream_k_turns: float
