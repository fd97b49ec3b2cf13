"""The indexer over shared keys for Hopper: a CTA scores a tile of queries, and ranks it.

load | score, two warpgroups ------------------------- |
----------------------------------------------------------- a tile's queries | weights and ranges 64
keys, up to 8 in flight| 64 keys x all columns, relu, head sums -> workspace (in L2), bins ... |
after a segment: every team of warps ranks its queries the next tile's | rows of the best
"""

from typing import Any

import cutlass
from cutlass import GridConstant, Int32, Int64, cute
from cutlass.experimental import primitives as prims
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl.cluster import enter_cluster
from flashdsa.dsl.memory import initialise_barriers
from flashdsa.dsl.warp import uniform
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer.sm90.prefill.emit import emit_unscored
from flashdsa.kernels.indexer.sm90.prefill.listed import Listed
from flashdsa.kernels.indexer.sm90.prefill.load import (
    LoadContext,
    key_map,
    load_all,
    query_map,
    scale_map,
)
from flashdsa.kernels.indexer.sm90.prefill.memory import PrefillMemory
from flashdsa.kernels.indexer.sm90.prefill.score import (
    FIRST_TURN,
    ScoreContext,
    pass_turn,
    prepare,
    release_queries,
    score_segment,
    wait_for_turn,
)
from flashdsa.kernels.indexer.sm90.prefill.select import (
    SelectContext,
    prepare_select,
    select_segment,
)
from flashdsa.kernels.indexer.sm90.prefill.team import (
    SCRATCH_PHASES,
    clear,
    team_of,
)
from flashdsa.kernels.indexer.sm90.prefill.tiles import (
    Ranges,
    Tile,
    first_segment,
    num_turns,
    stretch_of,
    tile_at,
    tile_number,
)
from flashdsa.kernels.indexer.sm90.prefill.together import select_share
from flashdsa.kernels.indexer.sm90.prefill.window import score_sync


@cute.kernel
def prefill_kernel(
    queries_map: GridConstant[tensor_map.TensorMap],
    keys_map: GridConstant[tensor_map.TensorMap],
    scales_map: GridConstant[tensor_map.TensorMap],
    weights: cute.Tensor,
    starts: cute.Tensor,
    ends: cute.Tensor,
    listed: Any,
    num_keys: Int32,
    topk_indices: Any,
    topk_scores: Any,
    scores: cute.Tensor,
    plan: cutlass.Constexpr,
):
    """One CTA; arguments as in `launch_prefill`. scores: the workspace, or (S, S_kv)."""
    thread, _, _ = cute.arch.thread_idx()
    memory = PrefillMemory.allocate(plan)
    if cutlass.const_expr(plan.shared):
        enter_cluster(memory, thread)
    else:
        initialise_barriers(memory, thread)
        cute.arch.sync_threads()
    score, load = plan.roles
    topk = Int32(0)
    if cutlass.const_expr(not plan.scores_only):
        topk = Int32(topk_indices.shape[1])
    ranges = Ranges(starts, ends, num_keys, topk, listed)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = thread % WARP_SIZE
    if warp >= plan.select_warps:
        cute.arch.setmaxregister_decrease(load.registers)
        if cutlass.const_expr(plan.shared):
            cute.arch.cluster_wait()  # all threads that arrived wait, see sm90/kernel.py
        if warp == plan.select_warps:
            if lane == 0:
                prims.prefetch_tensormap(queries_map.get_ptr())
                prims.prefetch_tensormap(keys_map.get_ptr())
            of_scales = None
            if cutlass.const_expr(plan.is_fp8):
                of_scales = scales_map.get_ptr()
            queries, keys = queries_map.get_ptr(), keys_map.get_ptr()
            load_ctx = LoadContext(memory, ranges, queries, keys, of_scales, weights)
            load_all(load_ctx, lane)
    else:
        cute.arch.setmaxregister_increase(score.registers)
        cta, _, _ = cute.arch.block_idx()
        to = cute.recast_ptr(scores.iterator, dtype=Int32)
        if cutlass.const_expr(not plan.scores_only):
            to = to + Int64(cta) * plan.workspace_words
        # Uniform, and so are stages and descriptors of products, which follow from it.
        group = uniform(thread // WARPGROUP_SIZE)
        score_ctx = ScoreContext(memory, ranges, weights, to, group)
        select_ctx = SelectContext(ranges, to, topk_indices, topk_scores)
        score_all(score_ctx, select_ctx, thread)


@cute.jit
def score_all(ctx: ScoreContext, select: SelectContext, thread: Int32) -> None:
    """Score every tile of this CTA."""
    plan = ctx.plan
    lane, warp = thread % WARP_SIZE, thread // WARP_SIZE
    if cutlass.const_expr(not plan.scores_only):
        clear_histograms(ctx.memory, thread, plan)
    if cutlass.const_expr(plan.shared):
        # The cluster's barrier: every CTA of it has initialised its mbarriers, so that messages may
        # be sent to them.
        cute.arch.cluster_wait()
    scored, number = Int32(0), Int32(0)  # tiles, and key tiles, so far
    if cutlass.const_expr(plan.in_turns):
        if ctx.group == 1:
            pass_turn(Int32(FIRST_TURN))
    for turn in cutlass.range(num_turns(ctx.ranges, plan), unroll=1):
        tile_idx = tile_number(ctx.ranges, turn, plan)
        if tile_idx >= 0:
            tile = tile_at(ctx.ranges, tile_idx, lane, plan)
            if tile.key_tiles > 0:
                own = stretch_of(tile, plan)
                score_tile(ctx, select, own, scored, number + plan.sample_tiles, thread)
                scored += 1
                number += own.key_tiles + plan.sample_tiles
            elif cutlass.const_expr(not plan.scores_only):
                if is_first_cta(plan):
                    emit_unscored(ctx.ranges, tile, select.topk_indices, warp, lane, plan)
                    if cutlass.const_expr(plan.with_scores):
                        # Its queries see no keys at all: -1, which are no scores either.
                        emit_unscored(ctx.ranges, tile, select.topk_scores, warp, lane, plan)
    if cutlass.const_expr(plan.in_turns):
        if ctx.group == number % 2:
            wait_for_turn(FIRST_TURN + ctx.group)  # it was passed on after the last product


@cute.jit
def clear_histograms(memory: PrefillMemory, thread: Int32, plan: cutlass.Constexpr) -> None:
    """Clear the histograms of all queries of a tile, and the phases of messages, by all warps that
    score. These count after the barrier of a tile's sample at the earliest."""
    team = team_of(memory, thread, plan)
    if cutlass.const_expr(plan.shared):
        if team.member == 0 and team.lane == 0:
            team.scratch[SCRATCH_PHASES] = Int32(0)
    for query in cutlass.range(team.number, plan.tile_queries, plan.teams, unroll=1):
        clear(team, memory.histogram.array(Int32, plan.bins, query), plan.bins)


@cute.jit
def score_tile(
    ctx: ScoreContext,
    select: SelectContext,
    tile: Tile,
    scored: Int32,
    number: Int32,
    thread: Int32,
) -> None:
    """Score a tile, a segment of its keys at a time."""
    plan = ctx.plan
    lane = thread % WARP_SIZE
    prepared = prepare(ctx, tile, scored, lane)
    if cutlass.const_expr(plan.scores_only):
        score_segment(ctx, prepared, tile, number, Int32(0), tile.key_tiles, thread)
        release_queries(ctx, scored, lane)
    else:
        team = team_of(ctx.memory, thread, plan)
        begin, end = Int32(0), first_segment(tile, plan)
        more = begin < tile.key_tiles
        if cutlass.const_expr(plan.shared):
            more = cutlass.Boolean(True)  # a CTA without keys takes part, too
        while more:
            score_segment(ctx, prepared, tile, number, begin, end, thread)
            if end == tile.key_tiles:
                release_queries(ctx, scored, lane)
            seen = prepare_select(select, team, tile, prepared, begin, end)
            # All that score: the segment's scores are in the workspace.
            score_sync(plan)
            if cutlass.const_expr(plan.shared):
                select_share(select, team, tile, seen, begin)
            else:
                select_segment(select, team, tile, seen, begin)
            # They have been read, so that the next ones may be written.
            score_sync(plan)
            begin = end
            end = cutlass.min(begin + plan.segment // plan.tile_entries, tile.key_tiles)
            more = begin < tile.key_tiles


def is_first_cta(plan: Any) -> Any:
    """Whether this CTA is the first of those that share its tiles."""
    return cute.arch.block_idx_in_cluster() == 0 if plan.shared else True


@cute.jit
def launch_prefill(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Launch on `stream`.

    Args:
        arguments:
            q_index: (S, H, 128) e4m3 or bf16. k_index: (S_kv, 128) likewise; at least one.
            k_scale: (S_kv,) fp32, of bf16 keys anything. weights: (S, H) fp32.
            starts: (S,) int32, or (0,): all start at row 0. ends: (S,) int32.
        of a plan with `among`
            listed, counts: `Listed`, listed.py. Rows of `listed` have bits up to 64 past S_kv.
        of a plan that ranks
            topk_indices: (S, topk) int32, written; topk at most 2048.
            topk_scores: only for a plan with scores: (S, topk) int32, words of `entries.py`,
                written: of no key where topk_indices is -1.
            workspace: (num_ctas, plan.workspace_words) int32.
        of the scores alone
            scores: (S, S_kv) fp32; written where a query sees the key.
        and at last
            num_ctas: best one an SM.
            cluster_size: only for a plan whose CTAs share tiles: CTAs of a cluster, which divides
                `num_ctas`; 1 to plan.most_parts.
    """
    q_index, k_index, k_scale, weights, starts, ends, *best, scores, num_ctas = arguments
    cluster: dict[str, Any] = {}
    listed = None
    if cutlass.const_expr(plan.shared):
        *best, scores, num_ctas, cluster_size = (*best, scores, num_ctas)
        cluster = {"cluster": [cluster_size, 1, 1]}
    if cutlass.const_expr(plan.among):
        bits, counts, *best = best
        listed = Listed(bits, counts)
    topk_indices, topk_scores = (*best, None, None)[:2]
    keys_map = key_map(k_index, plan)
    prefill_kernel(
        query_map(q_index, plan),
        keys_map,
        scale_map(k_scale) if cutlass.const_expr(plan.is_fp8) else keys_map,
        weights,
        starts,
        ends,
        listed,
        k_index.shape[0],
        topk_indices,
        topk_scores,
        scores,
        plan,
    ).launch(
        grid=[num_ctas, 1, 1],
        block=[plan.threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
        **cluster,
    )
