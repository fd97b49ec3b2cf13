"""The kernels for Hopper that score pages, and their load warps.

The fused indexer: scores of every key and the exact best of each row, one launch. A row belongs to
a cluster of 1 to 16 CTAs or to an equal part of one, and a part of the row, a work tile, to each of
them (see load_tiles.py).

4 load warps              | 4 consumer warpgroups
------------------------- | -----------------------------------------------------------
                          | rows of at most topk tokens: ids without scores
a tile's head: q, weights |
pages, up to 12 in flight | score a page, append (key, position), histogram
the next tile's head ...  | counts to the other CTAs, theirs back: the row's threshold
"no more"                 | ids of the part's winners, after those of the parts before

The scores alone: every token's into a (B, max_len) matrix, or every block's best. The load warps
have a partition of all pages; consumers write -inf beyond the rows' lengths, then 64 scores a page.
Two rows of a request may be scored together, for a launch that ranks them.
"""

from typing import Any

import cutlass
from cutlass import Float32, GridConstant, Int32, const_expr, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl import pipeline, tma
from flashdsa.dsl.memory import Memory, initialise_barriers
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer import fused, launch, load_tiles, score_batch, sizes, smem_views
from flashdsa.kernels.indexer.schedule.work_tile import WorkTile, pairs_of, rows_of
from flashdsa.kernels.indexer.sm90.plan import BLOCK, IndexerPlan, LogitsPlan
from flashdsa.kernels.indexer.sm90.score import page_source
from flashdsa.kernels.indexer.sm90.score_pairs import page_source as pair_source
from flashdsa.kernels.indexer.write_scores import (
    OutputSink,
    WriteContext,
    consume_pages,
    load_partition,
    rows_to_score,
    store_score,
    write_ranked,
    write_scores,
)


@cute.jit
def load_pages(
    ctx: load_tiles.LoadContext,
    tile: WorkTile,
    first_ids: Int32,
    depth: Any,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Load this warp's pages of the tile into the ring. first_ids: what `announce` returned. depth:
    pages in flight, in steps of 1 / DEPTH_STEPS; None: one for each stage."""
    count = tile.num_pages
    ahead = first_ids  # this lane's page id of the next 32 turns
    for block in cutlass.range(0, count, WARP_SIZE, unroll=1):
        ids = ahead
        if block + WARP_SIZE + lane < count:
            ahead = load_tiles.ask_for_id(ctx, tile, block + WARP_SIZE + lane, plan)
        # A warp loads for one warpgroup: pages whose number is its own, modulo the warpgroups.
        first = (ctx.warp - tile.first_number - block) & (plan.consumer_warpgroups - 1)
        stop = cutlass.min(count - block, Int32(WARP_SIZE))
        for i in cutlass.range(first, stop, plan.consumer_warpgroups, unroll=1):
            page = cute.arch.shuffle_sync(ids, i)
            load_page(ctx, page, tile.first_number + block + i, depth, lane, plan)


@cute.jit
def load_page(
    ctx: load_tiles.LoadContext,
    page: Int32,
    number: Int32,
    depth: Any,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Load one page into its stage; a page id outside the cache is passed on as invalid, not
    read."""
    ring = ctx.inputs.page_ring
    state = ring.state(number)
    stage = state.stage
    if lane == 0:
        load_tiles.acquire_stage(ring, number, state, depth, plan)
        valid = page >= 0 and page < ctx.pages.num_pages
        ctx.inputs.page_valid[stage] = Int32(1) if valid else Int32(0)
        # page_full[stage]: this arrival releases page_valid, too; the phase of a valid page ends
        # with the last byte of the copy.
        if valid:
            # Orders the copy after the consumers' reads, which page_empty ordered before.
            cute.arch.fence_proxy("async.shared", space="cta")
            full = ring.expect(stage)
            tma.load_box(
                ctx.inputs.pages + stage * plan.stage_bytes,
                ctx.keys_map,
                [Int32(0), Int32(0), page],
                full,
                tma.EVICT_FIRST,
            )
        else:
            ring.commit(stage)


PAGES = load_tiles.TileLoader(load_tiles.announce, load_pages, load_tiles.finish)
"""Tiles with pages to score."""


@cute.kernel
def indexer_kernel(
    keys_map: GridConstant[tensor_map.TensorMap],
    queries_map: GridConstant[tensor_map.TensorMap],
    pages: load_tiles.Pages,
    results: fused.Results,
    plan: cutlass.Constexpr,
):
    """One CTA of the grid; arguments as in `launch_indexer`."""
    x = fused.set_up(keys_map, queries_map, pages, results, None, plan)
    loads, selects = plan.roles
    # The load role comes first: code more than 64 KB after a kernel's start is slow where it runs
    # first, and the other role is longer than that.
    if not x.caller.consumes:
        cute.arch.setmaxregister_decrease(loads.registers)
        ctx = load_tiles.loading(
            x.memory, (keys_map, queries_map), pages, x.rows, x.caller.warp, plan
        )
        # The cluster's barrier: all threads that arrived at it wait, and before they wait for
        # anything else: compute-sanitizer's racecheck lets none of them go on before all have come.
        cute.arch.cluster_wait()
        load_tiles.load_scheduled(ctx, PAGES, x.select, x.coord, x.lengths, x.caller.lane, plan)
    else:
        cute.arch.setmaxregister_increase(selects.registers)
        fused.consume(x, page_source, plan)


def compile_indexer(plan: IndexerPlan) -> Any:
    """See `launch.compile_indexer`."""
    return launch.compile_indexer(indexer_kernel, plan)


@cute.kernel
def logits_kernel(
    keys_map: GridConstant[tensor_map.TensorMap],
    queries_map: GridConstant[tensor_map.TensorMap],
    pages: load_tiles.Pages,
    scores: cute.Tensor,
    rest: Any,
    plan: cutlass.Constexpr,
):
    """One CTA of the grid; arguments as in `launch_logits`."""
    caller = fused.find_caller(plan)
    memory = Memory.allocate(plan)
    max_len = scores.shape[1]
    if const_expr(plan.ranked):
        counts, unscored = rest
        rows = rows_of(pages.seq_lens, pages.block_table)._replace(unscored=unscored)
    else:
        longest = max_len * plan.tokens_of_score
        rows = rows_to_score(pages.seq_lens, pages.block_table, longest)
    initialise_barriers(memory, caller.thread, sizes.INITIALISING_WARPS)
    cute.arch.sync_threads()
    loads, selects = plan.roles
    if not caller.consumes:
        cute.arch.setmaxregister_decrease(loads.registers)
        scored = pairs_of(rows) if const_expr(plan.in_pairs) else rows
        maps = keys_map, queries_map
        load_ctx = load_tiles.loading(memory, maps, pages, scored, caller.warp, plan)
        if const_expr(plan.ranked):
            # The ranking may take each SM that is free, and prepare itself there.
            cute.arch.griddepcontrol_launch_dependents()
        load_partition(load_ctx, PAGES, caller.lane, caller.cta, caller.num_ctas, plan)
    else:
        cute.arch.setmaxregister_increase(selects.registers)
        inputs = smem_views.input_buffers_in(memory, plan, pipeline.RingConsumer)
        ctx = WriteContext(inputs, scores, max_len, rows)
        if const_expr(plan.of_blocks):
            source = page_source(memory, caller.thread, plan)
            write_scores(ctx, source, caller.thread, write_block, plan)
        elif const_expr(plan.ranked):
            bins = memory.counts.array(Int32, plan.teams * sizes.RANK_BINS)
            for at in cutlass.range(
                caller.thread, plan.teams * sizes.RANK_BINS, plan.consumer_threads, unroll=1
            ):
                bins[at] = Int32(0)
            smem_views.consumer_sync(plan)  # all counts are 0
            ctx = ctx._replace(bins=bins, counts=counts)
            source_of = pair_source if const_expr(plan.in_pairs) else page_source
            source = source_of(memory, caller.thread, plan)
            write_scores(ctx, source, caller.thread, write_ranked, plan)
        else:
            consume_pages(ctx, caller, memory, page_source, plan)


@cute.jit
def write_block(
    sink: OutputSink,
    score: Float32,
    position: Int32,
    valid: cutlass.Boolean,
    present: cutlass.Boolean,
) -> None:
    """Write a block's best score to its number in the row; of a page outside the cache, NaN. All
    lanes call. Nothing is written beyond the row's blocks."""
    seen = present and position < sink.length
    if not (valid and seen):
        score = Float32.nan
    best = score_batch.best_of_block(score)
    if seen and cute.arch.lane_idx() < score_batch.LANES_APART[0]:
        store_score(sink.ctx, sink.row, position // BLOCK, best)


def compile_logits(plan: LogitsPlan) -> Any:
    """See `launch.compile_logits`."""
    return launch.compile_logits(logits_kernel, plan)
