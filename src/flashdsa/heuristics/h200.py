"""Constants measured on an H200, by which kernels are chosen: one class an operation.

`python -m workbench ways --fit` fits those of attention to documents, of another GPU, too.
"""

from __future__ import annotations

from typing import ClassVar

from flashdsa.heuristics.sparse_mla import Grouping, SparseMlaConstants, Times

SPARSE_MLA = SparseMlaConstants(
    group_lists=10.0,
    groupings={2: Grouping(1.05, 0.65, 130), 4: Grouping(1.3, 0.5, 80), 8: Grouping(1.1, 0.5, 80)},
    most_unsampled=400,
    used_slots=0.7,
    find_ends=100,
    clusters={
        "packed": Times(9.4, 2.53, item=9.4),
        "bf16": Times(9.4, 1.9, item=9.4),
        "few heads": Times(6.4, 1.41, item=5.5),
    },
    single_cta=1.9,
    single_cta_tiles=2,
    stream_k={
        "packed": Times(9.3, 2.55, item=4.5, merge=3.4, part=2.9),
        "bf16": Times(7.6, 1.67, item=3.0, merge=4.4, part=0.7),
        "few heads": Times(6.0, 1.43, item=3.8, merge=4.4, part=1.3),
    },
    stream_k_gain=0.97,
    stream_k_gain_lengths=1.05,
    least_stream_k_tiles=5,
    long_tiles=10,
    most_waves={"packed": 32, "bf16": 32, "few heads": 20},
    forward_gain=0.92,
    forward_gain_far=0.8,
    near_rows=65_536,
    stream_k_code=6.0,
    most_stream_k_turns=6.5,
)


class Backward:
    """The backward of sparse MLA."""

    LEAST_SPREAD = 256
    """Slots of a query from which on few queries are spread over more groups: padding, and the
    copies back, take some 10 us, as much as three tiles of keys."""
    PACED_ROWS: ClassVar = {8: 57_344, 16: 57_344, 32: 28_672, 64: 28_672, 128: 28_672}
    """Rows of dKV above which CTAs keep pace, by heads."""
    SPREAD = 5
    """Tiles from the first tile of a CTA to the next CTA's, so that they do not add to the same
    rows."""
    NEAR_ROWS = 12_288
    """Rows of dKV that the second-level cache holds. CTAs sweep them together if they are more."""
    LEAST_SAVED_US = 100.0
    """Time that slots may save, from which on the device chooses: its choice and launches without
    work take 20 to 50 us."""
    LENGTHS = (2, 4, 8, 16)
    """Parts of their slots that lists are taken to have where lengths are given: half, and so
    on."""
    RATIO: ClassVar = {128: 1.16, 64: 1.16}
    """Longest list of a group of 256 rows, as a multiple of a query's list, in whole tiles, on
    average, by heads. The backward of 64 rows is faster with longer lists; with fewer heads it
    always is."""
    FEW_NAMED = 1
    """Slots of all queries for each row of kv up to which any groups whose lists have room are
    taken: the backward of 64 rows copies kv first, of which few rows are named then. Ten calls with
    0.1 to 1.0 slots a row took 0.67 to 1.01 of its time, five of short lists with 1.1 to 1.8 0.70
    to 1.01 (one H200), three of full lists with 1.5 to 2.0 1.18 to 1.28 (one H100)."""
    LEAST_ROUNDS = 6
    """Items of dKV for each streaming multiprocessor from which on large groups pay in other calls:
    3.8 rounds and fewer took 1.26 to 1.51 of the time of 64 rows, 7 the same, 20 and more 0.89 to
    0.94 (one H200, one H100). Calls that cannot take them need no lists of them either: 1.05 to
    1.2."""
    MOST_LENGTH = 1.5
    """Longest single list of such a group, as a multiple of a query's list. The workspace has room
    for that much; if one list is longer the backward of 64 rows is taken."""
    MOST_RANGE_KEYS = 6144
    """The same in keys, where ranges give the slots: they may be as many as a source's rows, and
    are hardly ever."""


class IndexBackward:
    """The indexer's backward."""

    RATIO = 1.7
    """Longest list of a larger group, as a multiple of a query's list, on average."""
    LEAST_CHOSEN_SLOTS = (1 << 22) + 1
    """Slots of a call from which on the device chooses between groups. The choice takes 30 us and
    more, and larger groups save an eighth of the time where they pay."""
    SPREAD = 5
    """Tiles from the first tile of a CTA to the next CTA's, so that they do not add to the same
    rows."""
    NEAR_KEYS = 55_296
    """Most keys whose dK stays in the second-level cache. With more, CTAs begin together, so that
    what they add to at the same time stays there."""
    MOST_CLEARED = 256
    """Rows of dK for each group of queries that the kernel of their lists sets to 0; more take
    longer than a launch of their own."""


class IndexScores:
    """The indexer's scores at given slots."""

    OVERHEAD = 1.1
    """Time of a CTA without a tile, in tiles: those that share an SM take it one after another."""
    ALONE = 2.6
    """Time of a CTA that has an SM alone, of the time that it adds where four share one."""
    MOST_PARTS = 3
    """Parts that are tried for queries that are more than run at once."""
    GAIN = 0.95
    """Share of the time from which on another number of parts is taken."""


class Prefill:
    """The indexer's prefill, in times that a CTA takes for 64 keys."""

    RANKING, SHARING, LAUNCH, UNSCORED = 9.0, 13.0, 11.0, 3.0
    """Time of a turn besides its keys: to load and rank a tile, more of it if CTAs share the tile.
    Time of a launch, and of a turn whose tile needs no scores."""
    SCORING = 4.0
    """Time of a CTA's part of a tile besides its keys, if it is scored alone."""
    WORTHWHILE = 0.97
    """Share of the time without clusters from which on clusters are taken."""


class Indexer:
    """The indexer; rows are counted for each SM."""

    PAGES_ALONE = 60
    """Pages of the table for each CTA of a cluster, and as many more, from which clusters share a
    row; a row of a narrower table is one cluster's."""
    MANY_ROWS = 0.46
    """Rows for each SM from which rows are *many*: two SMs for each are too many."""
    SHARING_FEW, SHARING_MANY = 8, 4
    """CTAs of each of the clusters that share rows, of fewer rows and of many."""
    RANK_CLUSTERS = ((0.0625, 8), (0.25, 4), (0.5, 2))
    """Rows for each SM up to which a ranking gives each row a cluster, and its CTAs. More rows get
    a CTA each."""
    NARROW_PAGES, NARROW_CLUSTER = 64, 8
    """Pages of the table up to which a row gains nothing from more CTAs, and these."""
    SIZES = (16, 14, 13, 12, 10, 8, 7, 6, 5, 4, 3, 2)
    """CTAs of a cluster that has a row, largest first; of two sizes of which equally many run at
    once the larger one is better. 9 is missing: eight rows of 16K tokens take as long with 9 CTAs
    each as with 8, or 0.6 us longer."""
