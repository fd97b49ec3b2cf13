"""The indexer over shared keys for Hopper: a CTA scores a tile of queries, and ranks it.

load, one warp             | score, two warpgroups
-------------------------- | ---------------------------------------------------------------------
a tile's queries           | weights and ranges
64 keys, up to 8 in flight | 64 keys x all columns, relu, head sums -> workspace (in L2), bins
...                        | after a segment: every team of warps ranks its queries
the next tile's            | rows of the best
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float8E4M3FN, Float32, GridConstant, Int32, Int64, Uint8, cute
from cutlass.experimental import primitives as prims
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl import compile_options, grids, pipeline, tma
from flashdsa.dsl import fake_tensors as fake
from flashdsa.dsl.cluster import enter_cluster
from flashdsa.dsl.memory import Memory, initialise_barriers
from flashdsa.dsl.warp import uniform
from flashdsa.hw import SM90, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer.sm90.prefill import emit, segments, teams, tiles, together
from flashdsa.kernels.indexer.sm90.prefill import plan as sizes
from flashdsa.kernels.indexer.sm90.prefill.score import (
    FIRST_TURN,
    ScoreContext,
    pass_turn,
    prepare,
    release_queries,
    score_segment,
    wait_for_turn,
)
from flashdsa.problem import INDEX_HEAD_DIM

LINE_WORDS = 32
"""Words of a line of the second-level cache."""


class LoadContext(NamedTuple):
    """Arrives at key_full and query_full, waits for key_empty and query_empty."""

    memory: Memory
    ranges: tiles.Ranges
    queries_map: Any  # pointers to tensor maps: see `query_map`
    keys_map: Any
    scales_map: Any  # None if keys have no scales
    weights: cute.Tensor  # (S, H) fp32, device memory

    @property
    def plan(self) -> Any:
        return self.memory.plan


@cute.jit
def load_all(ctx: LoadContext, lane: Int32) -> None:
    """Load every tile of this CTA that needs scores."""
    plan = ctx.plan
    loaded, number = Int32(0), Int32(0)  # tiles, and key tiles, so far
    for turn in cutlass.range(tiles.num_turns(ctx.ranges, plan), unroll=1):
        tile_idx = tiles.tile_number(ctx.ranges, turn, plan)
        if tile_idx >= 0:
            tile = tiles.tile_at(ctx.ranges, tile_idx, lane, plan)
            if tile.key_tiles > 0:
                prefetch_weights(ctx, tile, lane)
                own = tiles.stretch_of(ctx.ranges, tile, turn, plan)
                if lane == 0:
                    load_queries(ctx, tile, loaded)
                    for i in cutlass.range_constexpr(plan.sample_tiles):
                        load_keys(ctx, own.samples[i], number + i)
                    for i in cutlass.range(own.key_tiles, unroll=1):
                        first_key = (
                            own.first_key + tiles.key_tile_at(own, i, plan) * sizes.TILE_KEYS
                        )
                        load_keys(ctx, first_key, number + plan.sample_tiles + i)
                number += own.key_tiles + plan.sample_tiles
                loaded += 1


@cute.jit
def prefetch_weights(ctx: LoadContext, tile: tiles.Tile, lane: Int32) -> None:
    """Prefetch a tile's weights to the second-level cache: before its first product, warps wait for
    them."""
    plan = ctx.plan
    word = tile.first_query * plan.num_heads + lane * LINE_WORDS
    if lane * LINE_WORDS < plan.columns and word < ctx.ranges.num_queries * plan.num_heads:
        cute.arch.inline_ptx(
            "prefetch.global.L2 [{$r0}];", read_only_args=[ctx.weights.iterator + word]
        )


@cute.jit
def load_queries(ctx: LoadContext, tile: tiles.Tile, number: Int32) -> None:
    """Load a tile's columns; queries past the last one become zeros."""
    plan = ctx.plan
    ring = pipeline.RingProducer(ctx.memory.query_full, ctx.memory.query_empty)
    state = ring.state(number)
    pipeline.acquire_reused(ring, state, number)
    full = ring.expect(state.stage)
    stage_bytes = plan.chunks * plan.query_chunk_bytes
    target = ctx.memory.queries.bytes() + state.stage * stage_bytes
    group_bytes = sizes.QUERY_GROUP * plan.num_heads * sizes.SPAN_BYTES
    for chunk in cutlass.range_constexpr(plan.chunks):
        for group in cutlass.range_constexpr(plan.groups):
            tma.load_box(
                target + (chunk * plan.query_chunk_bytes + group * group_bytes),
                ctx.queries_map,
                [
                    Int32(chunk * sizes.SPAN_BYTES),
                    Int32(0),
                    tile.first_query + group * sizes.QUERY_GROUP,
                    Int32(0),
                ],
                full,
                tma.EVICT_FIRST,
            )


@cute.jit
def load_keys(ctx: LoadContext, first_key: Int32, number: Int32) -> None:
    """Load 64 keys and their scales; keys past the last one become zeros."""
    plan = ctx.plan
    ring = pipeline.RingProducer(ctx.memory.key_full, ctx.memory.key_empty)
    state = ring.state(number)
    pipeline.acquire_reused(ring, state, number)
    full = ring.expect(state.stage)
    target = ctx.memory.keys.bytes() + state.stage * (plan.chunks * plan.key_chunk_bytes)
    for chunk in cutlass.range_constexpr(plan.chunks):
        tma.load_box(
            target + chunk * plan.key_chunk_bytes,
            ctx.keys_map,
            [Int32(chunk * sizes.SPAN_BYTES), first_key],
            full,
            tma.EVICT_LAST,
        )
    if cutlass.const_expr(plan.is_fp8):
        tma.load_box(
            ctx.memory.scales.bytes() + state.stage * (sizes.TILE_KEYS * 4),
            ctx.scales_map,
            [first_key],
            full,
            tma.EVICT_LAST,
        )


def row_bytes(plan: Any) -> int:
    """Bytes of a query head, or of a key."""
    return int(plan.chunks * sizes.SPAN_BYTES)


def query_map(q_index: cute.Tensor, plan: Any) -> Any:
    """Boxes of a span of all heads of four queries, in the order of columns: column 8 c + 2 j + o
    is head 2 c + o of query j, so that a lane of a product has all heads of one query."""
    of_head = row_bytes(plan)
    of_query = plan.num_heads * of_head
    view = cute.make_tensor(
        cute.recast_ptr(q_index.iterator, dtype=Uint8),
        cute.make_layout(
            (of_head, 2, q_index.shape[0], plan.num_heads // 2),
            stride=(1, of_head, of_query, 2 * of_head),
        ),
    )
    return tensor_map.create_tensor_map_tiled_from_view(
        view,
        box_dims=(sizes.SPAN_BYTES, 2, sizes.QUERY_GROUP, plan.num_heads // 2),
        stride_order=(0, 1, 2, 3),
        swizzle=tensor_map.TensorMapSwizzle.s128b,
    )


def key_map(k_index: cute.Tensor, plan: Any) -> Any:
    """Boxes of a span of 64 keys."""
    of_key = row_bytes(plan)
    view = cute.make_tensor(
        cute.recast_ptr(k_index.iterator, dtype=Uint8),
        cute.make_layout((of_key, k_index.shape[0]), stride=(1, of_key)),
    )
    return tensor_map.create_tensor_map_tiled_from_view(
        view,
        box_dims=(sizes.SPAN_BYTES, sizes.TILE_KEYS),
        stride_order=(0, 1),
        swizzle=tensor_map.TensorMapSwizzle.s128b,
    )


def scale_map(k_scale: cute.Tensor) -> Any:
    """Boxes of the scales of 64 keys."""
    return tensor_map.create_tensor_map_tiled_from_view(
        k_scale, box_dims=(sizes.TILE_KEYS,), stride_order=(0,)
    )


assert INDEX_HEAD_DIM == sizes.SPAN_BYTES  # an e4m3 row is one span


@cute.kernel
def prefill_kernel(
    queries_map: GridConstant[tensor_map.TensorMap],
    keys_map: GridConstant[tensor_map.TensorMap],
    scales_map: GridConstant[tensor_map.TensorMap],
    weights: cute.Tensor,
    starts: cute.Tensor,
    ends: cute.Tensor,
    num_keys: Int32,
    topk_indices: Any,
    scores: cute.Tensor,
    parts: Any,
    unscored: Any,
    plan: cutlass.Constexpr,
):
    """One CTA; arguments as in `launch_prefill`. scores: the workspace, or the scores alone."""
    thread, _, _ = cute.arch.thread_idx()
    memory = Memory.allocate(plan)
    if cutlass.const_expr(plan.shared):
        enter_cluster(memory, thread)
    else:
        initialise_barriers(memory, thread)
        cute.arch.sync_threads()
    score, load = plan.roles
    topk = unscored
    if cutlass.const_expr(not plan.scores_only):
        topk = Int32(topk_indices.shape[1])
    ranges = tiles.Ranges(starts, ends, num_keys, topk, parts)
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
        select_ctx = segments.SelectContext(ranges, to, topk_indices)
        score_all(score_ctx, select_ctx, thread)


@cute.jit
def score_all(ctx: ScoreContext, select: segments.SelectContext, thread: Int32) -> None:
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
    for turn in cutlass.range(tiles.num_turns(ctx.ranges, plan), unroll=1):
        tile_idx = tiles.tile_number(ctx.ranges, turn, plan)
        if tile_idx >= 0:
            tile = tiles.tile_at(ctx.ranges, tile_idx, lane, plan)
            if tile.key_tiles > 0:
                own = tiles.stretch_of(ctx.ranges, tile, turn, plan)
                score_tile(ctx, select, own, scored, number + plan.sample_tiles, thread)
                scored += 1
                number += own.key_tiles + plan.sample_tiles
            elif cutlass.const_expr(not plan.scores_only):
                if is_first_cta(plan):
                    emit.emit_unscored(ctx.ranges, tile, select.topk_indices, warp, lane, plan)
    if cutlass.const_expr(plan.in_turns):
        if ctx.group == number % 2:
            wait_for_turn(FIRST_TURN + ctx.group)  # it was passed on after the last product


@cute.jit
def clear_histograms(memory: Memory, thread: Int32, plan: cutlass.Constexpr) -> None:
    """Clear the histograms of all queries of a tile, and the phases of messages, by all warps that
    score. These count after the barrier of a tile's sample at the earliest."""
    team = teams.team_of(memory, thread, plan)
    if cutlass.const_expr(plan.shared):
        if team.member == 0 and team.lane == 0:
            team.scratch[teams.TeamScratch.PHASES] = Int32(0)
    for query in cutlass.range(team.number, plan.tile_queries, plan.teams, unroll=1):
        teams.clear(team, memory.histogram.array(Int32, plan.bins, query), plan.bins)


@cute.jit
def score_tile(
    ctx: ScoreContext,
    select: segments.SelectContext,
    tile: tiles.Tile,
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
        team = teams.team_of(ctx.memory, thread, plan)
        begin, end = Int32(0), tiles.first_segment(tile, plan)
        more = begin < tile.key_tiles
        if cutlass.const_expr(plan.shared):
            more = cutlass.Boolean(True)  # a CTA without keys takes part, too
        while more:
            score_segment(ctx, prepared, tile, number, begin, end, thread)
            if end == tile.key_tiles:
                release_queries(ctx, scored, lane)
            seen = segments.prepare_select(select, team, tile, prepared, begin, end)
            # All that score: the segment's scores are in the workspace.
            teams.score_sync(plan)
            if cutlass.const_expr(plan.shared):
                together.select_share(select, team, tile, seen, begin)
            else:
                segments.select_segment(select, team, tile, seen, begin)
            # They have been read, so that the next ones may be written.
            teams.score_sync(plan)
            begin = end
            end = cutlass.min(begin + plan.segment // sizes.TILE_KEYS, tile.key_tiles)
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
        of a plan that ranks
            topk_indices: (S, topk) int32, written; topk at most 2048.
            workspace: (num_ctas, plan.workspace_words) int32.
        of the scores alone
            scores: (S, S_kv) fp32; written where a query sees the key. Of blocks
                (S, ceil(S_kv / BLOCK)): where it sees the first of the keys.
        and at last
            num_ctas: best one an SM.
            cluster_size: only for a plan whose CTAs share tiles: CTAs of a cluster, which divides
                `num_ctas`; 1 to plan.most_parts.
            parts: only of the scores alone: CTAs among which the keys of a tile are divided;
                parts + 1 times the key tiles fit int32.
            unscored: likewise: tiles are not scored whose queries see at most so many keys each.
    """
    q_index, k_index, k_scale, weights, starts, ends, *outputs = arguments
    topk_indices, parts, unscored, cluster = None, None, None, None
    if cutlass.const_expr(plan.shared):
        *outputs, cluster = outputs
    if cutlass.const_expr(plan.scores_only):
        scores, num_ctas, parts, unscored = outputs
    else:
        topk_indices, scores, num_ctas = outputs
    keys_map = key_map(k_index, plan)
    of_scales = scale_map(k_scale) if cutlass.const_expr(plan.is_fp8) else keys_map
    ranges = weights, starts, ends, k_index.shape[0]
    made = prefill_kernel(
        query_map(q_index, plan), keys_map, of_scales, *ranges, topk_indices, scores, parts,
        unscored, plan,
    )  # fmt: skip
    grids.launch_plan(made, plan, num_ctas, stream, cluster=cluster, use_pdl=False)


def compile_prefill(plan: sizes.PrefillPlan) -> Any:
    """Compile `launch_prefill`; a plan says which arguments it has. Needs no GPU."""
    queries, keys, starts, scales, topk, ctas = fake.symbols(6)
    element = Float8E4M3FN if plan.is_fp8 else BFloat16
    if plan.scores_only:
        width = cute.sym_int32() if plan.of_blocks else keys
        outputs: tuple[Any, ...] = (fake.numbers(queries, width),)
    else:
        workspace = fake.fake_tensor(Int32, (ctas, plan.workspace_words))
        outputs = fake.words(queries, topk), workspace
    operands = (
        fake.fake_tensor(element, (queries, plan.num_heads, INDEX_HEAD_DIM)),
        fake.fake_tensor(element, (keys, INDEX_HEAD_DIM)),
        fake.fake_tensor(Float32, (scales,)),
        fake.fake_tensor(Float32, (queries, plan.num_heads)),
        *(fake.words(starts), fake.words(queries)),
    )
    last = [Int32(1)] * (1 + plan.shared + 2 * plan.scores_only)
    return compile_options.compile_launch(SM90, launch_prefill, plan, *operands, *outputs, *last)
