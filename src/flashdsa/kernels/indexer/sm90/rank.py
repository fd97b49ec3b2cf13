"""The consumers: score the pages of each segment, keep what can still win, rank it."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, const_expr, cute

from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.pipeline import PackedPhases
from flashdsa.dsl.static import Static
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer.sm90.bins import sortable
from flashdsa.kernels.indexer.sm90.emit import Output, Stretch, emit_in_order, own_stretch
from flashdsa.kernels.indexer.sm90.emit_bitmap import emit_by_position
from flashdsa.kernels.indexer.sm90.emit_sorted import emit_sorted
from flashdsa.kernels.indexer.sm90.exchange import EVENTS
from flashdsa.kernels.indexer.sm90.listing import append, compact, consumer_sync, put, reset
from flashdsa.kernels.indexer.sm90.memory import SCRATCH_COUNT, Inputs, Mailboxes, Ranking
from flashdsa.kernels.indexer.sm90.place import Place
from flashdsa.kernels.indexer.sm90.plan import FILLS
from flashdsa.kernels.indexer.sm90.ranges import Part
from flashdsa.kernels.indexer.sm90.read_scores import read_batch
from flashdsa.kernels.indexer.sm90.score import (
    Scorer,
    Span,
    load_weights,
    make_scorer,
    score_span,
)
from flashdsa.kernels.indexer.sm90.segments import Segment, wait_for_segment, word_in
from flashdsa.kernels.indexer.sm90.teams import arrive, list_published, merged_part, publish
from flashdsa.kernels.indexer.sm90.threshold import Threshold, find_threshold
from flashdsa.problem import PAGE_SIZE


class Batch(NamedTuple):
    """Pages to score: those of the segment from its page `begin` on."""

    segment: Segment
    slot: Int32  # of queries and weights
    begin: Int32


class Consumer(NamedTuple):
    """Role rank. Waits for page_full and segment_full; releases page_empty and segment_empty."""

    inputs: Inputs
    ranking: Ranking
    mail: Mailboxes
    place: Place
    output: Output
    published: Any  # None: a row is one cluster's
    scores: Any = None  # (B, max_len) fp32, device memory, where pages are scored already


@cute.jit
def consume(c: Consumer, thread: Int32, plan: cutlass.Constexpr) -> None:
    """Rank every segment that the producer announces.

    The inner loop has one copy of the search for a threshold: over the caller's part when the list
    is full, over the whole row, with the other CTAs of the group, when the part is scored.
    """
    lane = thread % WARP_SIZE
    scorer = None
    if const_expr(c.scores is None):
        scorer = make_scorer(c.inputs.pages, c.inputs.queries, thread, plan)
    phases = PackedPhases(Int32(0), Static(EVENTS))  # and the number of segments
    reset(c.ranking, thread, plan)
    # No message before every CTA of the cluster has initialised its barriers.
    cute.arch.cluster_wait()
    segment = wait_for_segment(c.inputs, Int32(0), plan)
    while segment.row >= 0:
        entries, done = Int32(0), Int32(0)  # of the list; pages scored
        floor = Uint32(0)  # keys below it cannot win any more
        ranked = cutlass.Boolean(False)
        merges = cutlass.Boolean(False)
        while not ranked:
            part = Part(Int32(0), Int32(0), Int32(0))
            slot = segment_stage(c, phases)
            if merges:
                part = merged_part(c.ranking, entries)
            else:
                batch = Batch(segment, slot, done)
                if const_expr(c.scores is None):
                    entries, done = score_batch(c, scorer, batch, entries, floor, thread, plan)
                else:
                    entries, done = read_batch(
                        c.ranking, c.scores, batch, entries, floor, thread, plan
                    )
                part = part_of(segment, entries)
            scored = done == segment.num_pages
            if scored and not merges and lane == 0:
                # Queries, weights and description have been read: the slot may be refilled.
                c.inputs.segment_ring.release(segment_stage(c, phases))
            full = plan.list_capacity - entries < plan.refill_entries
            # The list leaves the order of positions, which floor 0 stands for, by a compaction.
            if scored or full or floor == 0:
                publishes, in_order = cutlass.Boolean(False), cutlass.Boolean(False)
                stretch = Stretch(Int32(0), Int32(0), Int32(0))
                if const_expr(c.published is not None):
                    publishes = scored and segment.teams > 1 and not merges
                if const_expr(c.scores is None and not plan.sorted):
                    in_order = scored and floor == 0
                    if const_expr(c.published is not None):
                        in_order = in_order and segment.teams == 1
                    if in_order:
                        stretch = own_stretch(c.output, segment.row, part, thread, plan)
                shared = scored and c.place.parts > 1
                threshold, phases = find_threshold(
                    c.ranking, c.mail, c.place, shared, publishes, part, phases, thread, plan
                )
                if not scored:
                    entries = compact(
                        c.ranking, entries, threshold.key, threshold.position, thread, plan
                    )
                    floor = threshold.key + 1  # an equal key further on has a larger position
                elif publishes:
                    if const_expr(c.published is not None):
                        merges, entries = publish_part(
                            c, segment.row, part, threshold, thread, plan
                        )
                        ranked = not merges
                else:
                    phases = emit_row(
                        c, segment.row, part, in_order, stretch, threshold, phases, thread, plan
                    )
                    ranked = cutlass.Boolean(True)
        reset(c.ranking, thread, plan)
        phases = phases.next_number()
        segment = wait_for_segment(c.inputs, phases.number, plan)


def segment_stage(c: Consumer, phases: PackedPhases) -> Int32:
    """Of the segment that `phases` numbers. Computed anew wherever it is asked for: what follows
    from it would take registers in the loops that score, and others would be spilled."""
    number = phases._replace(bits=opaque(phases.bits)).number
    return c.inputs.segment_ring.state(number).stage


@cute.jit
def emit_row(
    c: Consumer,
    row: Int32,
    part: Part,
    in_order: cutlass.Boolean,
    stretch: Stretch,
    threshold: Threshold,
    phases: PackedPhases,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> PackedPhases:
    """The ids of the part's winners."""
    if const_expr(plan.sorted):
        winners = compact(c.ranking, part.entries, threshold.key, threshold.position, thread, plan)
        phases = emit_sorted(
            c.ranking, c.mail, c.output, row, c.place, winners, threshold, phases, thread, plan
        )
    elif in_order:
        emit_in_order(c.ranking, c.output, row, c.place, part, stretch, threshold, thread, plan)
    else:
        emit_by_position(c.ranking, c.output, row, c.place, part, threshold, thread, plan)
    return phases


@cute.jit
def publish_part(
    c: Consumer,
    row: Int32,
    part: Part,
    threshold: Threshold,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> tuple[cutlass.Boolean, Int32]:
    """Publish the part's best. In the row's last team the list becomes what the caller ranks of
    all teams' best: (whether so, entries of the list)."""
    cta, _, _ = cute.arch.block_idx()
    publish(c.ranking, c.published, cta, part, threshold, thread, plan)
    is_last = arrive(c.mail, c.published, c.place, row, thread, plan)
    entries = Int32(0)
    if is_last:
        entries = list_published(c.ranking, c.published, c.place, cta, thread, plan)
    return is_last, entries


def part_of(segment: Segment, entries: Int32) -> Part:
    """The caller's part of the row."""
    first = segment.first_page * PAGE_SIZE
    end = cutlass.min(first + segment.num_pages * PAGE_SIZE, segment.length)
    return Part(first, end, entries)


@cute.jit
def score_batch(
    c: Consumer,
    scorer: Scorer,
    batch: Batch,
    entries: Int32,
    floor: Uint32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> tuple[Int32, Int32]:
    """Score as many pages as the list has room for: (its length, the next page)."""
    segment = batch.segment
    weights = cute.make_rmem_tensor(plan.num_heads // 4, Float32)
    load_weights(weights, c.inputs.weights, batch.slot, thread % WARP_SIZE, plan)
    group = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE)
    in_order = floor == 0
    room = (plan.list_capacity - entries) // PAGE_SIZE
    if in_order and segment.num_pages > room and c.place.parts == 1:
        room = first_fill(plan)
    # One register through the loops: else a second one keeps the sum, to be compared with later.
    stop = opaque(cutlass.min(segment.num_pages, batch.begin + room))
    # This warpgroup's pages are those whose number in the ring is `group` modulo the groups.
    groups = plan.consumer_warpgroups
    first_number = word_in(c.inputs.segments, batch.slot, "first_number")
    first = batch.begin + ((group - first_number - batch.begin) & (groups - 1))
    span = Span(
        count=cutlass.max(stop - first + groups - 1, Int32(0)) // groups,
        first_number=first_number + first,
        first_position=(segment.first_page + first) * PAGE_SIZE,
        slot=batch.slot,
    )
    taker = Taker(c.ranking, segment.first_page * PAGE_SIZE, segment.length, floor, in_order)
    score_span(c.inputs, scorer, weights, span, thread, list_score, taker, plan)
    consumer_sync(plan)  # behind all reads of what is in the segment's slot
    if in_order:
        entries = stop * PAGE_SIZE
    else:
        entries = c.ranking.scratch[SCRATCH_COUNT]
        consumer_sync(plan)  # everyone has read the count
    return entries, stop


@cute.jit
def first_fill(plan: cutlass.Constexpr) -> Int32:
    """Pages that the calling CTA lists before it compacts the list for the first time."""
    cta, _, _ = cute.arch.block_idx()
    return plan.first_fill_pages + cta % FILLS * plan.fill_step_pages


class Taker(NamedTuple):
    """Where scored tokens go. Until the list is first compacted, every token has the place of its
    position, so that no thread waits for a counter; then those that can win are appended."""

    ranking: Ranking
    first_position: Int32  # of the part
    length: Int32  # tokens of the row
    floor: Uint32  # keys below it cannot win any more
    in_order: cutlass.Boolean


@cute.jit
def list_score(
    taker: Taker, score: Float32, position: Int32, valid: cutlass.Boolean, present: cutlass.Boolean
) -> None:
    """Into the list, if it can win."""
    key = sortable(score)
    valid = valid and position < taker.length
    if taker.in_order:
        if present:
            put(taker.ranking, position - taker.first_position, key, position, valid)
    else:
        wanted = present and valid and key >= taker.floor
        append(taker.ranking, key, Uint32(position), wanted)
