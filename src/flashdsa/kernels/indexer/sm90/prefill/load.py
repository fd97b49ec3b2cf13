"""Role load: one warp brings each tile's queries, and its keys 64 at a time."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Uint8, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl.pipeline import RingProducer, acquire_reused
from flashdsa.dsl.tma import EVICT_FIRST, EVICT_LAST, load_box
from flashdsa.kernels.indexer.sm90.prefill.memory import PrefillMemory
from flashdsa.kernels.indexer.sm90.prefill.plan import QUERY_GROUP, SPAN_BYTES, TILE_KEYS
from flashdsa.kernels.indexer.sm90.prefill.tiles import (
    Ranges,
    Tile,
    key_tile_at,
    num_turns,
    stretch_of,
    tile_at,
    tile_number,
)
from flashdsa.problem import INDEX_HEAD_DIM

LINE_WORDS = 32
"""Words of a line of the second-level cache."""


class LoadContext(NamedTuple):
    """Arrives at key_full and query_full, waits for key_empty and query_empty."""

    memory: PrefillMemory
    ranges: Ranges
    queries_map: Any  # pointers to tensor maps: see `query_map`
    keys_map: Any
    scales_map: Any  # None if keys have no scales
    weights: cute.Tensor  # (S, H) fp32, device memory

    @property
    def plan(self) -> Any:
        """The plan."""
        return self.memory.plan


@cute.jit
def load_all(ctx: LoadContext, lane: Int32) -> None:
    """Load every tile of this CTA that needs scores."""
    plan = ctx.plan
    loaded, number = Int32(0), Int32(0)  # tiles, and key tiles, so far
    for turn in cutlass.range(num_turns(ctx.ranges, plan), unroll=1):
        tile_idx = tile_number(ctx.ranges, turn, plan)
        if tile_idx >= 0:
            tile = tile_at(ctx.ranges, tile_idx, lane, plan)
            if tile.key_tiles > 0:
                prefetch_weights(ctx, tile, lane)
                own = stretch_of(tile, plan)
                if lane == 0:
                    load_queries(ctx, tile, loaded)
                    for i in cutlass.range_constexpr(plan.sample_tiles):
                        load_keys(ctx, own.samples[i], number + i)
                    for i in cutlass.range(own.key_tiles, unroll=1):
                        first_key = own.first_key + key_tile_at(own, i, plan) * TILE_KEYS
                        load_keys(ctx, first_key, number + plan.sample_tiles + i)
                number += own.key_tiles + plan.sample_tiles
                loaded += 1


@cute.jit
def prefetch_weights(ctx: LoadContext, tile: Tile, lane: Int32) -> None:
    """Prefetch a tile's weights to the second-level cache: before its first product, warps wait for
    them."""
    plan = ctx.plan
    word = tile.first_query * plan.num_heads + lane * LINE_WORDS
    if lane * LINE_WORDS < plan.columns and word < ctx.ranges.num_queries * plan.num_heads:
        cute.arch.inline_ptx(
            "prefetch.global.L2 [{$r0}];", read_only_args=[ctx.weights.iterator + word]
        )


@cute.jit
def load_queries(ctx: LoadContext, tile: Tile, number: Int32) -> None:
    """Load a tile's columns; queries past the last one become zeros."""
    plan = ctx.plan
    ring = RingProducer(ctx.memory.query_full, ctx.memory.query_empty)
    state = ring.state(number)
    acquire_reused(ring, state, number)
    full = ring.expect(state.stage)
    stage_bytes = plan.chunks * plan.query_chunk_bytes
    target = ctx.memory.queries.bytes() + state.stage * stage_bytes
    group_bytes = QUERY_GROUP * plan.num_heads * SPAN_BYTES
    for chunk in cutlass.range_constexpr(plan.chunks):
        for group in cutlass.range_constexpr(plan.groups):
            load_box(
                target + (chunk * plan.query_chunk_bytes + group * group_bytes),
                ctx.queries_map,
                [
                    Int32(chunk * SPAN_BYTES),
                    Int32(0),
                    tile.first_query + group * QUERY_GROUP,
                    Int32(0),
                ],
                full,
                EVICT_FIRST,
            )


@cute.jit
def load_keys(ctx: LoadContext, first_key: Int32, number: Int32) -> None:
    """Load 64 keys and their scales; keys past the last one become zeros."""
    plan = ctx.plan
    ring = RingProducer(ctx.memory.key_full, ctx.memory.key_empty)
    state = ring.state(number)
    acquire_reused(ring, state, number)
    full = ring.expect(state.stage)
    target = ctx.memory.keys.bytes() + state.stage * (plan.chunks * plan.key_chunk_bytes)
    for chunk in cutlass.range_constexpr(plan.chunks):
        load_box(
            target + chunk * plan.key_chunk_bytes,
            ctx.keys_map,
            [Int32(chunk * SPAN_BYTES), first_key],
            full,
            EVICT_LAST,
        )
    if cutlass.const_expr(plan.is_fp8):
        load_box(
            ctx.memory.scales.bytes() + state.stage * (TILE_KEYS * 4),
            ctx.scales_map,
            [first_key],
            full,
            EVICT_LAST,
        )


def row_bytes(plan: Any) -> int:
    """Bytes of a query head, or of a key."""
    return int(plan.chunks * SPAN_BYTES)


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
        box_dims=(SPAN_BYTES, 2, QUERY_GROUP, plan.num_heads // 2),
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
        box_dims=(SPAN_BYTES, TILE_KEYS),
        stride_order=(0, 1),
        swizzle=tensor_map.TensorMapSwizzle.s128b,
    )


def scale_map(k_scale: cute.Tensor) -> Any:
    """Boxes of the scales of 64 keys."""
    return tensor_map.create_tensor_map_tiled_from_view(
        k_scale, box_dims=(TILE_KEYS,), stride_order=(0,)
    )


assert INDEX_HEAD_DIM == SPAN_BYTES  # an e4m3 row is one span
