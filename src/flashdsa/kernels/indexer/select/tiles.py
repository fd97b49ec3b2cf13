"""The consumers' loop over the tiles of their CTA, and the verbs that its modes share.

Who shares a row makes the mode, which selects in one tile: one cluster (by_cluster.py), several
(by_clusters.py), or CTAs that select alone, in pairs of rows (by_pairs.py).

A mode's loop has one copy of the search for a threshold: over the caller's part when the list is
full, and over the whole row, with the other CTAs of the group, when the part is scored. A mode that
also merges what others published compares to learn whether it has listed all: with a flag that is
constant where it merges, ptxas would copy the search (12 % more instructions). The loop does not
know the source of the scores: `fill` scores pages, or reads given scores. `fill(s, source, tile,
stage, listed)` lists scores of the tile while the list has room and returns the `Listed` after it;
`stage` is the tile's.
"""

from typing import Any

import cutlass
from cutlass import Int32, Uint32, cute

from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.pipeline import PackedPhases
from flashdsa.dsl.static import Static
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.consumers import Selecting
from flashdsa.kernels.indexer.page_order import from_both_ends, pages_from_front
from flashdsa.kernels.indexer.schedule.work_tile import WorkTile, wait_for_tile
from flashdsa.kernels.indexer.select.exchange import EVENTS
from flashdsa.kernels.indexer.select.keys import LOWEST_KEY, Part
from flashdsa.kernels.indexer.select.lists import Listed, compact, reset
from flashdsa.kernels.indexer.select.threshold import Threshold
from flashdsa.problem import PAGE_SIZE


@cute.jit
def select_tiles(
    s: Selecting, source: Any, fill: cutlass.Constexpr, select_tile: cutlass.Constexpr
) -> None:
    """Select in every tile that the load warps announce.

    Args:
        source: of scores, what `fill` takes.
        select_tile: (s, source, fill, tile, phases) of the mode; returns the phases after it.
    """
    phases = PackedPhases(Int32(0), Static(EVENTS))  # and the number of the tile
    reset(s)
    # The cluster's barrier: every CTA of it has initialised its mbarriers, so that messages may be
    # sent to them.
    cute.arch.cluster_wait()
    tile = wait_for_tile(s.inputs, Int32(0), s.plan)
    while tile.row >= 0:
        phases = select_tile(s, source, fill, tile, phases)
        reset(s)
        phases = phases.next_number()
        tile = wait_for_tile(s.inputs, phases.number, s.plan)


def tile_stage(s: Selecting, phases: PackedPhases) -> Int32:
    """The stage of the tile that `phases` numbers, computed anew wherever it is asked for: kept in
    a register through the loops that score, it would make the compiler spill others."""
    number = phases._replace(bits=opaque(phases.bits)).number
    return s.inputs.tile_ring.state(number).stage


@cute.jit
def release_tile(s: Selecting, phases: PackedPhases) -> None:
    """Release the tile's stage, as `fill` has listed all of it."""
    if s.thread % WARP_SIZE == 0:
        # tile_empty[stage]: this warp has read queries, weights and description for the last time;
        # `fill` has ended with a sync of all consumers.
        s.inputs.tile_ring.release(tile_stage(s, phases))


def nothing_listed() -> Listed:
    """The state of an empty list, in the order of positions until it is compacted."""
    return Listed(Int32(0), Int32(0), Uint32(0))


def is_full(s: Selecting, entries: Int32) -> cutlass.Boolean:
    """Whether a list of so many entries must be compacted before more are added."""
    return s.plan.lists.capacity - entries < s.plan.refill_entries


def part_of(tile: WorkTile, entries: Int32) -> Part:
    """The caller's part of the row."""
    first = tile.first_page * PAGE_SIZE
    return Part(first, cutlass.min(first + tile.num_pages * PAGE_SIZE, tile.length), entries)


@cute.jit
def next_floor(
    tile: WorkTile, listed: Listed, threshold: Threshold, plan: cutlass.Constexpr
) -> Uint32:
    """The least key of an entry that may still win, after a list is cut at the threshold; of a list
    of what others published, perhaps the key below."""
    floor = threshold.key + 1
    if from_both_ends(tile.num_pages, plan):
        unseen = tile.first_page + pages_from_front(listed.pages, tile.num_pages, plan)
        if threshold.position >= Uint32(unseen * PAGE_SIZE):
            # An equal key of a page to come may have a smaller position.
            floor = cutlass.max(threshold.key, Uint32(LOWEST_KEY))
    return floor


@cute.jit
def compacted(s: Selecting, tile: WorkTile, listed: Listed, threshold: Threshold) -> Listed:
    """Keep only the list's accepted entries. Ends synced."""
    entries = compact(s, listed.entries, threshold.key, threshold.position)
    return Listed(entries, listed.pages, next_floor(tile, listed, threshold, s.plan))
