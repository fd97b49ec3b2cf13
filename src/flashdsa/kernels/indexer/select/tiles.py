"""The consumers' loop over the tiles of their CTA, and two of its modes.

Who shares a row makes the mode, which selects in one tile: one cluster, or several clusters.

A mode's loop has one copy of the search for a threshold: over the caller's part when the list is
full, and over the whole row, with the other CTAs of the group, when the part is scored. A mode that
also merges what others published compares to learn whether it has listed all: with a flag that is
constant where it merges, ptxas would copy the search (12 % more instructions). The loop does not
know the source of the scores: `fill` scores pages, or reads given scores. `fill(s, source, tile,
stage, listed)` lists scores of the tile while the list has room and returns the `Listed` after it;
`stage` is the tile's.

Long rows are split: several clusters share a row, as the lengths decide. Each cluster of a split
row selects in its part as it does in a whole row, but stops at a bin: entries in better bins or in
the bin of the k-th best are *published*, each CTA into its own slot in device memory. The last
cluster selects from the published entries, again as in a whole row: each of its CTAs takes
neighbouring slots, one for each cluster of the row. It knows a range of keys from the slots'
headers: no entry below the highest of the clusters' bins wins, and none is above the best one. The
range is cut into steps for its first round, which are narrow, so that few entries are left after
it, also where scores are in order. No cluster waits for another.
"""

from typing import Any

import cutlass
from cutlass import Int32, Uint32, cute

from flashdsa.dsl.cluster import send
from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.pipeline import PackedPhases
from flashdsa.dsl.static import Static
from flashdsa.dsl.warp import prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer import emit, sizes
from flashdsa.kernels.indexer.schedule.work_tile import (
    Coord,
    WorkTile,
    from_both_ends,
    pages_from_front,
    wait_for_tile,
)
from flashdsa.kernels.indexer.select import exchange, lists, sort_keys
from flashdsa.kernels.indexer.select.published import (
    CHUNKS_TOGETHER,
    Header,
    chunks_of,
    load_entry,
    load_header,
    publish,
)
from flashdsa.kernels.indexer.select.threshold import Threshold, find_threshold
from flashdsa.kernels.indexer.smem_views import Scratch, Selecting, consumer_sync
from flashdsa.problem import PAGE_SIZE


@cute.jit
def select_tiles(
    s: Selecting, source: Any, fill: cutlass.Constexpr, select_tile: cutlass.Constexpr
) -> None:
    """Select in every tile that the load warps announce. source: of scores, what `fill` takes.
    select_tile: (s, source, fill, tile, phases) of the mode; returns the phases after it."""
    phases = PackedPhases(Int32(0), Static(exchange.EVENTS))  # and the number of the tile
    lists.reset(s)
    # The cluster's barrier: every CTA of it has initialised its mbarriers, so that messages may be
    # sent to them.
    cute.arch.cluster_wait()
    tile = wait_for_tile(s.inputs, Int32(0), s.plan)
    while tile.row >= 0:
        phases = select_tile(s, source, fill, tile, phases)
        lists.reset(s)
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


def nothing_listed() -> lists.Listed:
    """The state of an empty list, in the order of positions until it is compacted."""
    return lists.Listed(Int32(0), Int32(0), Uint32(0))


def is_full(s: Selecting, entries: Int32) -> cutlass.Boolean:
    """Whether a list of so many entries must be compacted before more are added."""
    return s.plan.lists.capacity - entries < s.plan.refill_entries


def part_of(tile: WorkTile, entries: Int32) -> sort_keys.Part:
    """The caller's part of the row."""
    first = tile.first_page * PAGE_SIZE
    return sort_keys.Part(
        first, cutlass.min(first + tile.num_pages * PAGE_SIZE, tile.length), entries
    )


@cute.jit
def next_floor(
    tile: WorkTile, listed: lists.Listed, threshold: Threshold, plan: cutlass.Constexpr
) -> Uint32:
    """The least key of an entry that may still win, after a list is cut at the threshold."""
    floor = threshold.key + 1
    if from_both_ends(tile.num_pages, plan):
        unseen = tile.first_page + pages_from_front(listed.pages, tile.num_pages, plan)
        if threshold.position >= Uint32(unseen * PAGE_SIZE):
            # An equal key of a page to come may have a smaller position.
            floor = cutlass.max(threshold.key, Uint32(sort_keys.LOWEST_KEY))
    return floor


@cute.jit
def compacted(
    s: Selecting, tile: WorkTile, listed: lists.Listed, threshold: Threshold
) -> lists.Listed:
    """Keep only the list's accepted entries. Ends synced."""
    entries = lists.compact(s, listed.entries, threshold.key, threshold.position)
    return lists.Listed(entries, listed.pages, next_floor(tile, listed, threshold, s.plan))


@cute.jit
def select_by_cluster(
    s: Selecting, source: Any, fill: cutlass.Constexpr, tile: WorkTile, phases: PackedPhases
) -> PackedPhases:
    """Select in a tile, whose row no other cluster has a part of; see tiles.py."""
    listed, scored = nothing_listed(), cutlass.Boolean(False)
    while not scored:
        listed = fill(s, source, tile, tile_stage(s, phases), listed)
        part = part_of(tile, listed.entries)
        scored = listed.pages == tile.num_pages
        if scored:
            release_tile(s, phases)
        in_order = listed.floor == 0  # a compaction ends that
        if scored or in_order or is_full(s, listed.entries):
            span = emit.WarpSpan(Int32(0), Int32(0), Int32(0))
            if scored and in_order:
                span = emit.own_span(s, tile.row, part)
            # A list that is compacted keeps at least topk entries; those of the last bin, too.
            threshold, phases = find_threshold(
                s, scored and s.coord.num_parts > 1, not scored, part, phases
            )
            if not scored:
                listed = compacted(s, tile, listed, threshold)
            elif in_order:
                emit.emit_in_order(s, tile.row, part, span, threshold)
            else:
                emit.emit_by_position(s, tile.row, part, threshold)
    return phases


@cute.jit
def select_by_clusters(
    s: Selecting, source: Any, fill: cutlass.Constexpr, tile: WorkTile, phases: PackedPhases
) -> PackedPhases:
    """Select in a tile; the last cluster of a split row also among all that they published. See
    tiles.py."""
    listed, selected = nothing_listed(), cutlass.Boolean(False)
    merges = cutlass.Boolean(False)  # the list has published entries
    scratch = s.select.scratch
    if s.thread == 0:
        # `fill` ends with a sync of all consumers.
        scratch[Scratch.RANGE], scratch[Scratch.RANGE + 1] = Int32(0), Int32(-1)
    while not selected:
        part, last = sort_keys.Part(Int32(0), Int32(0), Int32(0)), tile.num_pages
        if not merges:
            listed = fill(s, source, tile, tile_stage(s, phases), listed)
            part = part_of(tile, listed.entries)
        else:
            # As `list_published` left it in scratch, where it costs no registers meanwhile.
            first, end = scratch[Scratch.PART], scratch[Scratch.PART + 1]
            part, last = sort_keys.Part(first, end, listed.entries), listed.pages
        scored = listed.pages == last
        if scored and not merges:
            release_tile(s, phases)
        in_order = listed.floor == 0  # a compaction ends that
        if scored or in_order or is_full(s, listed.entries):
            here = placed(s, tile)
            publishes = scored and tile.num_splits > 1 and not merges
            in_order = scored and in_order and tile.num_splits == 1
            span = emit.WarpSpan(Int32(0), Int32(0), Int32(0))
            if in_order:
                span = emit.own_span(s, tile.row, part)
            # A list that is compacted keeps at least topk entries; those of the last bin, too.
            threshold, phases = find_threshold(
                here,
                scored and here.coord.num_parts > 1,
                publishes or not scored,
                part,
                phases,
                merges,
            )
            if not scored:
                listed = compacted(s, tile, listed, threshold)
            elif publishes:
                merges, entries = publish_part(here, tile, part, threshold)
                listed = listed._replace(entries=entries)
                selected = not merges
            else:
                if in_order:
                    emit.emit_in_order(here, tile.row, part, span, threshold)
                else:
                    emit.emit_by_position(here, tile.row, part, threshold)
                selected = cutlass.Boolean(True)
    return phases


def placed(s: Selecting, tile: WorkTile) -> Selecting:
    """The same with the coordinates that selecting in the tile needs."""
    return s._replace(coord=s.coord.unpacked()._replace(num_splits=tile.num_splits))


@cute.jit
def publish_part(
    s: Selecting, tile: WorkTile, part: sort_keys.Part, threshold: Threshold
) -> tuple[cutlass.Boolean, Int32]:
    """Publish the part's best. The list in the row's last cluster becomes what the caller selects
    from all clusters' best. Return (whether this is the last, entries of the list)."""
    entries = Int32(0)
    cta, _, _ = cute.arch.block_idx()
    # Of CTAs that have the same key as the last winner's, only the first ones accept it.
    floor = threshold.key if s.coord.part == 0 else Uint32(0)
    publish(s, cta, part, threshold, floor, part.first)
    if s.thread == 0:
        # Its stores to scratch are before those of others, which wait for its message below.
        s.select.scratch[Scratch.TOP], s.select.scratch[Scratch.FLOOR] = (
            Int32(sort_keys.SIGN),
            Int32(sort_keys.SIGN),
        )
    is_last = announce_published(s, tile.row)
    if is_last:
        entries = list_published(s, cta, tile.length)
    return is_last, entries


@cute.jit
def announce_published(s: Selecting, row: Int32) -> cutlass.Boolean:
    """Whether the caller's cluster is the row's last to publish: the same in all its CTAs.

    Each CTA draws a ticket from the row's counter and shows it to its cluster; the last ticket is
    in the last cluster. The last cluster sees all that clusters published: it is released and
    acquired with the tickets, first at the device's scope, then at the cluster's, where messages
    bring the numbers and arrivals the order. A CTA gets all of both before it can end.
    """
    cluster, coord, published, thread = s.cluster, s.coord, s.published, s.thread
    lane = thread % WARP_SIZE
    if thread < WARP_SIZE:
        ticket = Int32(0)
        if lane == 0:
            # The consumer sync before has ordered all consumers' stores before this release.
            ticket = cute.arch.atomic_add(
                published.arrivals.iterator + row, Int32(1), sem="acq_rel", scope="gpu"
            )
            cluster.tickets_full.expect_tx(coord.num_parts * 4)
        ticket = cute.arch.shuffle_sync(ticket, 0)
        if lane < coord.num_parts:
            dst = cluster.tickets.iterator + coord.part
            send(dst, [ticket], cluster.tickets_full.at(), lane)
            cluster.tickets_full.arrive_at_peer(lane)
        elif lane < sizes.MAX_CLUSTER:  # for the CTAs that the cluster does not have
            cluster.tickets_full.arrive()
    # tickets_full, the first phase, as a cluster has one split row: all its CTAs' tickets have
    # come. An acquire at cluster scope: what they and their predecessors published may be read.
    cluster.tickets_full.wait(0)
    latest = Int32(0)
    if lane < coord.num_parts:
        latest = cluster.tickets[lane]
    latest = cute.arch.warp_redux_sync(latest, "max")
    is_last = latest == coord.num_splits * coord.num_parts - 1
    if is_last and coord.part == 0 and thread == 0:
        (published.arrivals.iterator + row).store(Int32(0))
    return is_last


@cute.jit
def list_published(s: Selecting, cta: Int32, row_end: Int32) -> Int32:
    """Fill the list with the entries of the caller's slots, one slot for each cluster of the row,
    in the order of their parts; return the number of entries. Their part of the row is in scratch,
    and the range of the entries that may win, whose steps the histogram counts. Synced."""
    select, coord, thread, plan = s.select, s.coord, s.thread, s.plan
    lane, warp = thread % WARP_SIZE, thread // WARP_SIZE
    split = select.scratch[Scratch.COORD + Coord._fields.index("group")]
    first_cta = cta - coord.part - split * coord.num_parts
    first_slot = first_cta + coord.part * coord.num_splits
    # Those of the caller's slots, and the one after them.
    mine = Header(Int32(0), Int32(sort_keys.SIGN), Int32(sort_keys.SIGN), row_end)
    if lane <= coord.num_splits and first_slot + lane < first_cta + ctas_of_row(coord):
        mine = load_header(s, first_slot + lane)
    find_best_of_all(s, first_cta)
    lists.clear_histogram(s)
    # All consumers: the histogram is clear, the bounds of all CTAs are in scratch, and nobody reads
    # the old list any more.
    consumer_sync(plan)
    floor, top = select.scratch[Scratch.FLOOR], select.scratch[Scratch.TOP]
    low = sort_keys.unsigned(floor)
    high = cutlass.max(sort_keys.unsigned(top), low + 1)
    shift = sort_keys.step_bits(high - low, sort_keys.BIN_BITS)
    # A slot of which nothing can win is passed over.
    count = mine.count if lane < coord.num_splits and mine.top >= floor else Int32(0)
    end = prefix_sum(count, lane)
    chunks = chunks_of(count)
    chunk_end = prefix_sum(chunks, lane)
    # A warp loads a chunk of a slot, an entry a lane, and so some chunks before it uses the first.
    last_chunk = cute.arch.shuffle_sync(chunk_end, WARP_SIZE - 1)
    block = CHUNKS_TOGETHER * plan.consumer_warps
    for first in cutlass.range(warp, last_chunk, block, unroll=1):
        keys, positions, places = (cute.make_rmem_tensor(CHUNKS_TOGETHER, Int32) for _ in range(3))
        for i in cutlass.range_constexpr(CHUNKS_TOGETHER):
            keys[i], positions[i], places[i] = Int32(0), Int32(0), Int32(-1)
            chunk = first + i * plan.consumer_warps
            if chunk < last_chunk:
                ended = cute.arch.vote_ballot_sync(chunk_end <= chunk)
                slot = Int32(cute.arch.popc(ended))
                before = cute.arch.shuffle_sync(chunk_end - chunks, slot)
                entries = cute.arch.shuffle_sync(count, slot)
                start = cute.arch.shuffle_sync(end - count, slot)
                at = (chunk - before) * WARP_SIZE + lane
                if at < entries:
                    keys[i], positions[i] = load_entry(s, first_slot + slot, at)
                    places[i] = start + at
        for i in cutlass.range_constexpr(CHUNKS_TOGETHER):
            if places[i] >= 0:
                select.keys[places[i]], select.positions[places[i]] = keys[i], positions[i]
                if Uint32(keys[i]) >= low:
                    lists.count_in_bin(select, Int32((Uint32(keys[i]) - low) >> Uint32(shift)))
    if thread == 0:
        select.scratch[Scratch.PART] = mine.first
        select.scratch[Scratch.RANGE], select.scratch[Scratch.RANGE + 1] = Int32(low), Int32(high)
    if thread == coord.num_splits:
        select.scratch[Scratch.PART + 1] = mine.first
    consumer_sync(plan)
    return cute.arch.shuffle_sync(end, WARP_SIZE - 1)


def ctas_of_row(coord: Coord) -> Int32:
    """The CTAs that share the row."""
    return coord.num_splits * coord.num_parts


@cute.jit
def find_best_of_all(s: Selecting, first_cta: Int32) -> None:
    """Write to scratch the highest key that `topk` entries of a cluster have at least, and the best
    key, of all CTAs that share the row, as signed words; complete after a sync."""
    scratch, thread, plan = s.select.scratch.iterator, s.thread, s.plan
    ctas = ctas_of_row(s.coord)
    for first in cutlass.range(
        thread // WARP_SIZE * WARP_SIZE, ctas, plan.consumer_threads, unroll=1
    ):
        of_cta = Header(Int32(0), Int32(sort_keys.SIGN), Int32(sort_keys.SIGN), Int32(0))
        lane = thread % WARP_SIZE
        if first + lane < ctas:
            of_cta = load_header(s, first_cta + first + lane)
        top = cute.arch.warp_redux_sync(of_cta.top, "max")
        floor = cute.arch.warp_redux_sync(of_cta.floor, "max")
        if lane == 0:
            cute.arch.atomic_max(scratch + Scratch.TOP, top, sem="relaxed", scope="cta")
            cute.arch.atomic_max(scratch + Scratch.FLOOR, floor, sem="relaxed", scope="cta")
