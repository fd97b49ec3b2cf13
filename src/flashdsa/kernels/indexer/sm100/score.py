"""Role mma, and scores from its products in tensor memory.

One warp issues the products of every stage and says when they are complete. Stage n of the ring,
accumulator n % 4:
   page_full | score_empty of use n - 4 | 4 steps along K a product | commit to score_full

score[t] = scale[t] * sum_h weight[h] * relu(sum_d q[h, d] * k[t, d]). Tokens are the rows of the
product and heads its columns, so that the sum over heads stays within a thread, which has a token's
product with every head. relu(x) is (x + |x|) / 2, with the half in the scale: both steps are exact,
and NaN stays NaN.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl import tmem
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.pipeline import RingConsumer, RingProducer
from flashdsa.dsl.smem import VECTOR, load4
from flashdsa.dsl.static import Static
from flashdsa.dsl.umma_issue import commit, issue
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer.schedule.work_tile import WorkTile, wait_for_tile
from flashdsa.kernels.indexer.score_batch import PageScoring, PageSource, Scoring, doubled_relu
from flashdsa.kernels.indexer.select.lists import PageRange
from flashdsa.kernels.indexer.sm100.plan import GATHERED
from flashdsa.kernels.indexer.smem_views import InputBuffers, input_buffers_in
from flashdsa.problem import PAGE_SIZE

COLUMNS_AT_ONCE = 32
"""Columns of tensor memory that a thread has in registers."""


class Scorer(NamedTuple):
    """Source of a consumer's products, and its other operands of a score."""

    tmem: Int32  # address of the calling warpgroup's accumulator
    scales: cute.Tensor  # (ring_stages * stage_tokens,) Float32
    score_ring: RingConsumer  # score_full, score_empty: a stage a warpgroup


@cute.jit
def make_scorer(
    address: Int32, scales: cute.Tensor, score_ring: RingConsumer, thread: Int32, plan: Any
) -> Scorer:
    """Return the calling consumer's scorer; `address`: of the allocation."""
    group = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE)
    return Scorer(address + group * plan.num_heads, scales, score_ring)


def prepare(x: Scoring, tile_stage: Int32) -> None:
    """Do nothing: weights are read from shared memory as they are needed."""


@cute.jit
def score_pages(
    x: Scoring, prepared: None, pages: PageRange, store: cutlass.Constexpr, sink: Any
) -> None:
    """Score the calling warpgroup's uses of the ring: those whose number is its own, modulo the
    warpgroups. The pages are whole stages, but for a tile's last one."""
    inputs, scorer, thread, plan = x.inputs, x.scorer, x.thread, x.plan
    groups, of_stage = plan.consumer_warpgroups, plan.pages_per_stage
    group = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE)
    first_use = (pages.first_number + pages.begin) // of_stage
    skipped = (group - first_use) & (groups - 1)
    end_use = first_use + (pages.end - pages.begin + of_stage - 1) // of_stage
    row = thread % WARPGROUP_SIZE  # of the product, in the thread's lane of tensor memory
    position = (pages.first_page + pages.begin + skipped * of_stage) * PAGE_SIZE + row
    end = (pages.first_page + pages.end) * PAGE_SIZE
    weights = pages.tile_stage * (plan.num_heads // VECTOR)
    for use in cutlass.range(first_use + skipped, end_use, groups, unroll=1):
        state = inputs.page_ring.state(use)
        stage = cute.arch.make_warp_uniform(state.stage)
        # score_full[warpgroup]: the products are in tensor memory, and have read the keys. The
        # issuing warp takes the stages in their order, so that no barrier that it has waited for is
        # a round late.
        scorer.score_ring.wait(scorer.score_ring.state(use))
        # page_full[stage]: TMA has written the scales, the load warp page_valid.
        inputs.page_ring.wait(state._replace(stage=stage))
        tmem.after_sync()
        scale = scorer.scales[stage * plan.stage_tokens + row] * 0.5
        valid = valid_bit(inputs.page_valid, stage, row, plan)
        score = sum_heads(scorer, inputs.weights, weights, row, plan) * scale
        # All lanes have read tensor memory, scales and page_valid. Four warps make the accumulator
        # and the stage empty.
        tmem.before_sync()
        cute.arch.sync_warp()
        if thread % WARP_SIZE == 0:
            scorer.score_ring.release(group)
            inputs.page_ring.release(stage)
        store(sink, score, position, valid != 0, position < end)
        position += groups * plan.stage_tokens


def valid_bit(valid: cute.Tensor, stage: Int32, token: Int32, plan: Any) -> Int32:
    """Return 0 if that token of the stage is not in the cache."""
    word = stage * plan.valid_words
    if plan.gathers:
        return valid[word + token // GATHERED] & (1 << token % GATHERED)
    return valid[word + token // PAGE_SIZE]


@cute.jit
def sum_heads(
    scorer: Scorer, weights: cute.Tensor, first_weight: Int32, row: Int32, plan: cutlass.Constexpr
) -> Float32:
    """Return the weighted sum over a row of the stage's product, doubled; all rows have one order.
    weights: (tile_stages * num_heads,) Float32. first_weight: in steps of VECTOR."""
    at_once = min(COLUMNS_AT_ONCE, plan.num_heads)
    low, high = (Float32(0.0), Float32(0.0)), (Float32(0.0), Float32(0.0))
    for first in cutlass.range_constexpr(0, plan.num_heads, at_once):
        products = tmem.load_lane(scorer.tmem, first, row, at_once)
        for four in cutlass.range_constexpr(at_once // VECTOR):
            weight = load4(weights, first_weight + (first // VECTOR + four))
            relu = [doubled_relu(products[four * VECTOR + i]) for i in range(VECTOR)]
            low = cute.arch.fma_packed_f32x2((relu[0], relu[1]), (weight[0], weight[1]), low)
            high = cute.arch.fma_packed_f32x2((relu[2], relu[3]), (weight[2], weight[3]), high)
    return (low[0] + low[1]) + (high[0] + high[1])


SCORING = PageScoring(prepare, score_pages)
"""See score_batch.py."""


class MmaContext(NamedTuple):
    """Role mma: waits for page_full, tile_full and score_empty; commits to score_full, arrives at
    tile_empty."""

    inputs: InputBuffers  # the consumer's end
    memory: Memory
    address: Int32  # of the allocation of tensor memory
    score_ring: RingProducer  # score_full, score_empty: a stage a warpgroup


@cute.jit
def issue_tiles(ctx: MmaContext, plan: cutlass.Constexpr) -> None:
    """A warp: issue the products of every tile that the load warps announce; all are read at the
    end."""
    number, used = Int32(0), Int32(0)  # of the tile; stages before it
    tile = wait_for_tile(ctx.inputs, number, plan)
    while tile.row >= 0:
        tile_stage = ctx.inputs.tile_ring.state(number).stage
        used = issue_tile(ctx, tile, tile_stage, plan)
        # tile_empty[stage]: all lanes have read the description. The queries are read by products,
        # for which the consumers wait before they arrive.
        cute.arch.sync_warp()
        if prims.elect_sync():
            ctx.inputs.tile_ring.release(tile_stage)
        number += 1
        tile = wait_for_tile(ctx.inputs, number, plan)
    # score_empty, the last use of each accumulator: tensor memory may be given back.
    for back in cutlass.range_constexpr(plan.consumer_warpgroups):
        if used > back:
            ctx.score_ring.wait_until_read(used - 1 - back)
    tmem.after_sync()


@cute.jit
def issue_tile(
    ctx: MmaContext, tile: WorkTile, tile_stage: Int32, plan: cutlass.Constexpr
) -> Int32:
    """Issue the products of a tile's stages; return the number of the next use of the ring."""
    pages = plan.pages_per_stage
    first = tile.first_number // pages
    end = first + (tile.num_pages + pages - 1) // pages
    query_offset = tile_stage * plan.query_bytes
    for use in cutlass.range(first, end, unroll=1):
        state, scores = ctx.inputs.page_ring.state(use), ctx.score_ring.state(use)
        # page_full[stage]: TMA has written the keys.
        ctx.inputs.page_ring.wait(state)
        # score_empty[accumulator]: its warpgroup has read the products before these.
        ctx.score_ring.acquire(scores)
        tmem.after_sync()
        column = ctx.address + scores.stage * plan.num_heads
        key_offset = state.stage * plan.stage_key_bytes
        if prims.elect_sync():
            issue(plan.product, ctx.memory.base, column, True, key_offset, query_offset)
            commit(ctx.score_ring.full, scores.stage)
        cute.arch.sync_warp()
    return end


@cute.jit
def allocate_tmem(memory: Memory, warp: Int32, plan: cutlass.Constexpr) -> None:
    """Allocate tensor memory. All warps call, and all threads of the CTA sync before any of them
    uses it."""
    if warp == plan.mma_warp:
        tmem.allocate(memory.tmem_start.pointer(Int32), plan.tmem.allocated)
    tmem.before_sync()


@cute.jit
def run_mma(memory: Memory, plan: cutlass.Constexpr) -> None:
    """The issuing warp: issue all products, then give tensor memory back."""
    address = memory.tmem_start.pointer(Int32).load()
    inputs = input_buffers_in(memory, plan, RingConsumer)
    ring = RingProducer(memory.score_full, memory.score_empty)
    issue_tiles(MmaContext(inputs, memory, address, ring), plan)
    tmem.free(address, plan.tmem.allocated)


def page_source(memory: Memory, thread: Int32, plan: Any) -> PageSource:
    """Return the consumer's source of page scores."""
    address = memory.tmem_start.pointer(Int32).load()
    scales = memory.scales.array(Float32, plan.ring_stages * plan.stage_tokens)
    ring = RingConsumer(memory.score_full, memory.score_empty)
    return PageSource(make_scorer(address, scales, ring, thread, plan), Static(SCORING))
