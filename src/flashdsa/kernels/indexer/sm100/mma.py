"""Role mma: one warp issues the products of every stage and says when they are complete.

stage n of the ring, accumulator n % 4:
   page_full | score_empty of use n - 4 | 4 steps along K a product | commit to score_full
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl import tmem
from flashdsa.dsl.pipeline import RingConsumer, RingProducer
from flashdsa.dsl.static import Static
from flashdsa.dsl.umma_issue import commit, issue
from flashdsa.kernels.indexer.schedule.work_tile import WorkTile, wait_for_tile
from flashdsa.kernels.indexer.score_batch import PageSource
from flashdsa.kernels.indexer.sm100.score import SCORING, make_scorer
from flashdsa.kernels.indexer.smem_views import IndexerMemory, InputBuffers, input_buffers_in


class MmaContext(NamedTuple):
    """Role mma: waits for page_full, tile_full and score_empty; commits to score_full, arrives at
    tile_empty."""

    inputs: InputBuffers  # the consumer's end
    memory: IndexerMemory
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
        column = ctx.address + scores.stage * plan.accumulator_columns
        key_offset = state.stage * plan.stage_key_bytes
        if prims.elect_sync():
            for product in plan.products:
                issue(product, ctx.memory.base, column, True, key_offset, query_offset)
            commit(ctx.score_ring.full, scores.stage)
        cute.arch.sync_warp()
    return end


@cute.jit
def allocate_tmem(memory: IndexerMemory, warp: Int32, plan: cutlass.Constexpr) -> None:
    """Allocate tensor memory. All warps call, and all threads of the CTA sync before any of them
    uses it."""
    if warp == plan.mma_warp:
        tmem.allocate(memory.tmem_start.pointer(Int32), plan.tmem.allocated)
    tmem.before_sync()


@cute.jit
def run_mma(memory: IndexerMemory, plan: cutlass.Constexpr) -> None:
    """The issuing warp: issue all products, then give tensor memory back."""
    address = memory.tmem_start.pointer(Int32).load()
    inputs = input_buffers_in(memory, plan, RingConsumer)
    ring = RingProducer(memory.score_full, memory.score_empty)
    issue_tiles(MmaContext(inputs, memory, address, ring), plan)
    tmem.free(address, plan.tmem.allocated)


def page_source(memory: IndexerMemory, thread: Int32, plan: Any) -> PageSource:
    """Return the consumer's source of page scores."""
    address = memory.tmem_start.pointer(Int32).load()
    scales = memory.scales.array(Float32, plan.ring_stages * plan.stage_tokens)
    ring = RingConsumer(memory.score_full, memory.score_empty)
    return PageSource(make_scorer(address, scales, ring, thread, plan), Static(SCORING))
