"""Scores of pages for the two rows of a request at once: one product of 64 tokens with both rows'
heads, the first row's columns first.

Each row's sums have the order that they have in score.py, so that the scores are the same numbers.
A warp's 16 tokens have 32 scores, one a lane: in each four lanes, 0 and 1 end up with the first
row's, 2 and 3 with the second one's.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl import pipeline, smem, static, warp, wgmma
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.opaque import opaque
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer.schedule.work_tile import course_from
from flashdsa.kernels.indexer.score_batch import PageScoring, PageSource, Scoring
from flashdsa.kernels.indexer.select.lists import PageRange
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.kernels.indexer.sm90.score import (
    MMA_K,
    Sums,
    finish_pair,
    nothing_when_loaded,
    scale_of,
    sum_heads,
    word_of_scale,
)
from flashdsa.kernels.indexer.smem_views import InputBuffers, consumer_sync, input_buffers_in
from flashdsa.problem import INDEX_HEAD_DIM, PAGE_SIZE

OPCODE = "wgmma.mma_async.sync.aligned.m64n{}k32.f32.e4m3.e4m3"


class PairScorer(NamedTuple):
    """Operands with which a consumer scores pages for two rows."""

    keys: Int32  # low word of the descriptor of the first stage
    queries: Int32  # likewise
    pages: Any  # pointer to the pages' bytes


@cute.jit
def load_weights(
    mine: cute.Tensor, inputs: InputBuffers, row: int, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Load half the weights of a row's heads whose columns this lane holds, as in score.py."""
    for i in cutlass.range_constexpr(plan.num_heads // 16):
        four = smem.load4(inputs.halves, (row * plan.num_heads // 4 + 4 * i) + lane % 4)
        for k in cutlass.range_constexpr(4):
            mine[4 * i + k] = four[k]


def multiply(accumulator: cute.Tensor, keys: Int32, queries: Int32, plan: Any) -> None:
    """Start the product of a page's keys with all heads of both rows."""
    count = plan.tile_heads // 2
    warpgroup.fence()
    for k in range(INDEX_HEAD_DIM // MMA_K):
        values = wgmma.mma_async(
            OPCODE.format(plan.tile_heads),
            [accumulator[i] for i in range(count)],
            wgmma.descriptor_behind(keys, k * MMA_K),
            wgmma.descriptor_behind(queries, k * MMA_K),
            accumulate=k > 0,
            transposes=(),
        )
        for i in range(count):
            accumulator[i] = values[i]
    warpgroup.commit_group()


class Prepared(NamedTuple):
    """Values of a tile that a consumer keeps while it scores some of the tile's pages."""

    weights: cute.Tensor  # registers, of the first row
    group: Int32  # the calling warpgroup


@cute.jit
def prepare(x: Scoring, tile_stage: Int32) -> Prepared:
    """Load the first row's weights into registers. Starts and ends synced."""
    inputs, thread, plan = x.inputs, x.thread, x.plan
    # Halve the weights of both rows, into an order in which a lane gets four of its columns at a
    # time. All have read those of the tile before.
    if thread < plan.tile_heads:
        # Columns 8 c + 2 q + {0, 1} are those of the lanes with lane % 4 == q.
        index = thread & -16 | (thread & 6) << 1 | (thread & 8) >> 2 | thread & 1
        weight = inputs.weights[tile_stage * plan.tile_heads + thread]
        inputs.halves[index] = weight * Float32(0.5)
    # All consumers of the CTA: both rows' halved weights are written.
    consumer_sync(plan)
    weights = cute.make_rmem_tensor(plan.num_heads // 4, Float32)
    load_weights(weights, inputs, 0, thread % WARP_SIZE, plan)
    return Prepared(weights, warp.uniform(thread // WARPGROUP_SIZE))


@cute.jit
def score_pages(
    x: Scoring, prepared: Prepared, pages: PageRange, store: cutlass.Constexpr, sink: Any
) -> None:
    """Score the calling warpgroup's pages, one at a time; see score_batch.py. A lane's score is of
    the row of score_batch.py's `row_of_lane`."""
    inputs, scorer, thread, plan = x.inputs, x.scorer, x.thread, x.plan
    groups, ring = plan.consumer_warpgroups, inputs.page_ring
    begin = pages.begin + ((prepared.group - pages.first_number - pages.begin) & (groups - 1))
    # Kept in registers, uniform ones if possible: the loop would compute each of them anew.
    lane = Uint32(warp.kept(thread % WARP_SIZE, thread % WARP_SIZE))
    keys = warp.uniform(scorer.keys)
    queries = warp.uniform(scorer.queries + pages.tile_stage * (plan.query_bytes >> 4))
    first_number = warp.uniform(pages.first_number + begin)
    end_number = warp.uniform(pages.first_number + pages.end)
    token = thread // WARP_SIZE % 4 * 16 + Int32(lane // 4 + lane % 2 * 8)
    course = course_from(begin, pages.num_pages, plan)
    position = (pages.first_page + course.first) * PAGE_SIZE + token
    scales = opaque(Int32(scale_of(scorer, Int32(0), word_of_scale(token), plan).toint()))
    accumulator = cute.make_rmem_tensor(plan.tile_heads // 2, Float32)
    # The second row's weights go into registers that the first one's sums leave: all would be too
    # many.
    weights = cute.make_rmem_tensor(plan.num_heads // 4, Float32)
    for number in cutlass.range(first_number, end_number, groups, unroll=1):
        state = pipeline.Ring(ring.stages, by_masks=True).state(number)
        stage = state.stage
        # page_full[stage], the round's phase: TMA has brought keys and scales, or page_valid says
        # that none came. All may be read until this warp arrives at page_empty[stage].
        ring.wait(state)
        # This comes before the product, as in score.py: ptxas leaves nothing of the sync_warp below
        # in a warp that has not parted, and racecheck then takes the product's fence for what
        # orders the loads of all lanes and the arrival of one.
        scale = smem.load_float(scales + stage * plan.stage_bytes)
        valid = inputs.page_valid[stage]
        multiply(accumulator, keys + stage * (plan.stage_bytes >> 4), queries, plan)
        warpgroup.wait_group(0)
        # page_empty[stage]: the product has read the keys, and all lanes of this warp the rest. The
        # fourth warp's arrival completes the phase, and TMA may write.
        cute.arch.sync_warp()
        if lane == 0:
            ring.release(stage + nothing_when_loaded(scale, valid))
        upper, lower = sum_heads(accumulator, prepared.weights, 0, plan)
        first = Sums(upper, lower, scale, valid)
        load_weights(weights, inputs, 1, Int32(lane % 4), plan)
        upper, lower = sum_heads(accumulator, weights, plan.num_heads // 2, plan)
        score, is_valid = finish_pair(first, Sums(upper, lower, scale, valid), lane)
        store(sink, score, position, is_valid, cutlass.Boolean(True))
        position += course.tokens_apart


SCORING = PageScoring(prepare, score_pages)
"""See score_batch.py."""


def page_source(memory: Memory, thread: Int32, plan: IndexerPlan) -> PageSource:
    """Return the consumer's source of page scores."""
    inputs = input_buffers_in(memory, plan, pipeline.RingConsumer)
    scorer = PairScorer(
        wgmma.along_k(memory.pages.address()), wgmma.along_k(memory.queries.address()), inputs.pages
    )
    return PageSource(scorer, static.Static(SCORING))
