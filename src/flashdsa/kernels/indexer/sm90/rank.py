"""The consumers: score the pages of each segment, keep what can still win, rank it."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, const_expr, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.kernels.indexer.sm90.emit import Output, emit_best
from flashdsa.kernels.indexer.sm90.memory import SCRATCH_COUNT, Pipeline, Ranking
from flashdsa.kernels.indexer.sm90.merge import (
    Header,
    Share,
    Workspace,
    any_may_win,
    gather_backs,
    list_backs,
    publish,
    rank_fronts,
)
from flashdsa.kernels.indexer.sm90.plan import SEGMENT_WORDS, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer.sm90.read_scores import read_batch
from flashdsa.kernels.indexer.sm90.schedule import (
    CHUNK_PAGES,
    FIRST_CHUNK,
    FIRST_PAGE,
    HEAD_PAGES,
    LENGTH,
    NUM_PAGES,
    ODD_START,
    PART,
    PARTS,
    ROW,
    ROW_PAGES,
)
from flashdsa.kernels.indexer.sm90.score import (
    Scorer,
    issue,
    load_scale,
    load_weights,
    make_scorer,
    reduce_heads,
    sortable,
    token_of_lane,
)
from flashdsa.kernels.indexer.sm90.select import (
    append,
    compact,
    consumer_sync,
    find_bin,
    find_threshold,
    lowest_key,
    reset,
)
from flashdsa.problem import PAGE_SIZE

NEXT, SCORE, FRONTS, BACKS, STOP = range(5)
"""What a step of the consumers adds to the list, and where they wait or end."""


class Batch(NamedTuple):
    """Pages to score: of `count` pages from page `first` of the row, those from `begin` on."""

    slot: Int32  # of queries and weights
    first: Int32
    begin: Int32
    count: Int32
    length: Int32  # tokens of the row
    pages_done: Int32  # pages of this CTA before the segment


class Consumer(NamedTuple):
    """Role rank. Waits for page_full and segment_full; releases page_empty and segment_empty."""

    pipeline: Pipeline
    ranking: Ranking
    workspace: Workspace
    output: Output
    scores: Any = None  # (B, max_len) fp32, device memory, where pages are scored already


@cute.jit
def consume(c: Consumer, thread: Int32, plan: cutlass.Constexpr) -> None:
    """Rank every segment that the producer announces.

    One loop in which each step adds entries to the list (scores, other CTAs' fronts or backs) and
    then, if the list is complete or full, finds a threshold in it. So there is one copy of the
    ranking code, and it is in the instruction cache when the last CTA merges.
    """
    lane = thread % WARP_SIZE
    scorer, weights = None, None
    if const_expr(c.scores is None):
        scorer = make_scorer(c.pipeline.pages, c.pipeline.queries, thread, plan)
        weights = cute.make_rmem_tensor(plan.num_heads // 4, Float32)
    pages_done = Int32(0)
    segment = Int32(0)
    row, first, length, slot = Int32(0), Int32(0), Int32(0), Int32(0)
    share = Share(*(Int32(1) for _ in Share._fields))
    header = Header(Int32(0), Uint32(0), Uint32(0))
    entries, used = Int32(0), Int32(0)  # of the list, and the tokens among them
    done, todo = Int32(0), Int32(0)  # pages scored, or parts merged
    floor = Uint32(0)  # keys below it cannot win any more
    at_key, at_position = Uint32(0), Uint32(0)  # the threshold
    step = Int32(NEXT)
    while step != STOP:
        if step == NEXT:
            reset(c.ranking, thread, plan)
            slot = segment % plan.segment_stages
            cute.arch.mbarrier_wait(
                c.pipeline.segment_full + slot, (segment // plan.segment_stages) & 1
            )
            row = c.pipeline.segments[slot * SEGMENT_WORDS + ROW]
            step = Int32(STOP)
            if row >= 0:
                first, todo, length, share = read_segment(c.pipeline.segments, slot)
                if const_expr(c.scores is None):
                    load_weights(weights, c.pipeline.weights, slot, lane, plan)
                entries, done = Int32(0), Int32(0)
                floor = Uint32(0)
                step = Int32(SCORE)
        if step != STOP:
            if step == SCORE and done < todo:
                batch = Batch(slot, first, done, todo, length, pages_done)
                if const_expr(c.scores is None):
                    entries, done = score_batch(
                        c, scorer, weights, batch, entries, floor, thread, plan
                    )
                else:
                    entries, done = read_batch(
                        c.ranking, c.scores, row, batch, entries, floor, thread, plan
                    )
                if done == todo:
                    # Queries, weights and description have been read: the slot may be refilled.
                    if lane == 0:
                        cute.arch.mbarrier_arrive(c.pipeline.segment_empty + slot)
                    segment += 1
                    pages_done += todo
            found = cutlass.Boolean(False)
            if step == FRONTS:
                header, fronts = rank_fronts(c.ranking, c.workspace, share, thread, plan)
                entries, used, found = fronts.entries, fronts.used, fronts.found
                at_key, at_position = fronts.at_key, fronts.at_position
            if step == BACKS:
                entries = gather_backs(
                    c.ranking, c.workspace, share, at_key, at_position, thread, plan
                )
            if step != FRONTS:
                used = entries
            publishes = done == todo and step == SCORE and share.parts > 1
            emits = done == todo and not publishes
            compacts = done < todo and plan.list_capacity - entries < plan.refill_entries
            lowest = Uint32(0)
            if publishes and entries > plan.topk:
                chosen, above, within = find_bin(c.ranking, Int32(plan.topk), thread, plan)
                # A plateau is cut here, where all CTAs do it at once, not by the last of them.
                compacts = above + within > plan.topk * 3 // 2
                publishes = not compacts
                if entries > plan.list_capacity - plan.topk:  # the room of the list's reader
                    lowest = lowest_key(chosen)
            if publishes:
                last = publish(
                    c.ranking, c.workspace, row, share, first, entries, lowest, thread, plan
                )
                step = Int32(FRONTS) if last else Int32(NEXT)
                done, todo = Int32(0), Int32(0)
            elif emits or compacts:
                if not found:
                    at_key, at_position = find_threshold(
                        c.ranking,
                        entries,
                        used,
                        Int32(plan.topk),
                        step != FRONTS,
                        thread,
                        plan,
                    )
                if (
                    emits
                    and step >= FRONTS
                    and any_may_win(header, done, at_key, at_position, thread, plan)
                ):
                    room = Int32(plan.list_capacity - plan.topk)
                    done = list_backs(
                        c.ranking, header, done, room, at_key, at_position, thread, plan
                    )
                    step = Int32(BACKS)
                    todo = done
                    emits = cutlass.Boolean(False)
                    compacts = cutlass.Boolean(True)
                if compacts:
                    entries = compact(c.ranking, entries, at_key, at_position, thread, plan)
                    floor = at_key + 1  # an equal key further on has a larger position
                if emits:
                    emit_best(
                        c.ranking, c.output, row, length, entries, at_key, at_position, thread, plan
                    )
                    step = Int32(NEXT)


def read_segment(segments: cute.Tensor, slot: Int32) -> tuple[Any, ...]:
    """(first page, pages, length, share) of the announced segment."""
    words = slot * SEGMENT_WORDS
    share = Share(
        parts=segments[words + PARTS],
        part=segments[words + PART],
        first_chunk=segments[words + FIRST_CHUNK],
        odd_start=segments[words + ODD_START],
        row_pages=segments[words + ROW_PAGES],
        head_pages=segments[words + HEAD_PAGES],
        chunk_pages=segments[words + CHUNK_PAGES],
    )
    return (
        segments[words + FIRST_PAGE],
        segments[words + NUM_PAGES],
        segments[words + LENGTH],
        share,
    )


@cute.jit
def score_batch(
    c: Consumer,
    scorer: Scorer,
    weights: cute.Tensor,
    batch: Batch,
    entries: Int32,
    floor: Uint32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> tuple[Int32, Int32]:
    """Score as many pages as the list has room for: (its length, the next page)."""
    warp = thread // WARP_SIZE
    lane = thread % WARP_SIZE
    group = thread // WARPGROUP_SIZE
    token = token_of_lane(warp, lane)
    room = (plan.list_capacity - entries) // PAGE_SIZE
    stop = cutlass.min(batch.count, batch.begin + room)
    # This warpgroup's pages are those whose number in the ring is `group` modulo the groups.
    skip = (group - batch.pages_done - batch.begin) & (plan.consumer_warpgroups - 1)
    for page in cutlass.range(batch.begin + skip, stop, plan.consumer_warpgroups, unroll=1):
        number = batch.pages_done + page
        stage = number % plan.stages
        # page_full[stage]: keys and scales are there, or page_valid says that none are.
        cute.arch.mbarrier_wait(c.pipeline.page_full + stage, (number // plan.stages) & 1)
        issue(scorer, stage, batch.slot)
        scale = load_scale(scorer, stage, token, plan)
        valid = c.pipeline.page_valid[stage]
        warpgroup.wait_group(0)
        # All reads of the stage are done in this warp; four warps make it empty.
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(c.pipeline.page_empty + stage)
        score = reduce_heads(scorer, weights, scale, lane, plan)
        position = (batch.first + page) * PAGE_SIZE + token
        key = sortable(score)
        wanted = lane % 4 < 2 and position < batch.length and valid != 0 and key >= floor
        append(c.ranking, key, Uint32(position), wanted)
    consumer_sync(plan)
    entries = c.ranking.scratch[SCRATCH_COUNT]
    consumer_sync(plan)  # everyone has read the count
    return entries, stop
