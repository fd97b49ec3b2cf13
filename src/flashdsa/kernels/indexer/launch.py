"""Launches of the kernels that every architecture has: the fused indexer and the scores alone.

`kernel` is the architecture's. It takes the tensor maps, what it needs of the cache (see the plan's
`cache_operand`), the other operands and the plan.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, Uint8, const_expr, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl import fake_tensors as fake
from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.grids import launch_plan
from flashdsa.hw import SM90
from flashdsa.kernels.indexer.fused import Results
from flashdsa.kernels.indexer.load_tiles import Pages
from flashdsa.kernels.indexer.select.published import published_in
from flashdsa.kernels.indexer.sizes import CACHE_ROW_BYTES, page_step
from flashdsa.problem import INDEX_HEAD_DIM, PAGE_SIZE


class Scored(NamedTuple):
    """First arguments of every launch, in order."""

    q_index_fp8: Any  # (B, H, 128) e4m3
    # (num_pages, 64, 1, 132) bytes, any multiple of 16 bytes between pages; of gathered tokens a
    # multiple of 128
    k_index_cache_fp8: Any
    weights: Any  # (B, H) fp32
    seq_lens: Any  # (B,) int32
    block_table: Any  # (B / next_n, max_pages) int32, any distance between rows


@cute.jit
def launch_indexer(
    plan: cutlass.Constexpr,
    stream: Any,
    kernel: cutlass.Constexpr,
    q_index_fp8: cute.Tensor,
    k_index_cache_fp8: cute.Tensor,
    weights: cute.Tensor,
    seq_lens: cute.Tensor,
    block_table: cute.Tensor,
    topk_indices: cute.Tensor,
    words: cute.Tensor,
    *rest: Any,
):
    """Launch on `stream`. The first five operands are those of `Scored`.

    Args:
        topk_indices: (B, topk) int32, any distance between rows, written: at most
            `plan.lists.most_topk` a row, by position, then -1.
        words: (B, topk) int32, written: words of the ids' scores, for `launch_order`; (0, 0): not
            wanted, and rows of at most topk tokens are not scored.
        rest:
        of a plan with splits
            arrivals: (MOST_WEIGHED,) int32, counters, 0 before and after the launch.
            slots: (CTAs, slot_words) int32.
        and at last
            slots: 1: ids are slots of the cache; 0: positions.
            num_clusters: best the number that runs at once.
            cluster_size: CTAs of each, 1 to 16.
    """
    *workspace, slots, num_clusters, cluster_size = rest
    scored = Scored(q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table)
    published = published_in(workspace[0], workspace[1], plan) if const_expr(plan.splits) else None
    results = Results(topk_indices, words, slots, published)
    made = kernel(*scored_in(plan, scored), results, plan)
    ctas = num_clusters * cluster_size
    launch_plan(made, plan, ctas, stream, cluster=cluster_size, use_pdl=False)


@cute.jit
def launch_logits(
    plan: cutlass.Constexpr,
    stream: Any,
    kernel: cutlass.Constexpr,
    q_index_fp8: cute.Tensor,
    k_index_cache_fp8: cute.Tensor,
    weights: cute.Tensor,
    seq_lens: cute.Tensor,
    block_table: cute.Tensor,
    scores: cute.Tensor,
    *rest: Any,
):
    """Launch the scores-only kernel on `stream`. The first five operands are those of `Scored`, but
    that block_table is (B, max_pages) without a launch that ranks.

    Args:
        scores: (B, max_len) fp32, written: -inf beyond a row's length and in bad pages. Ranked
            ones: nothing beyond, and the word INVALID in bad pages.
        rest:
        of ranked scores
            counts: (n,) int32, RANK_BINS a row, added to: its scores in each bin. (0,): no.
            unscored: tokens up to which a row is not scored.
        and at last
            num_ctas: CTAs of the grid, best one an SM.
    """
    *ranked, num_ctas = rest
    scored = Scored(q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table)
    more = (tuple(ranked),) if const_expr(plan.arch is SM90) else ()
    made = kernel(*scored_in(plan, scored), scores, *more, plan)
    launch_plan(made, plan, num_ctas, stream, use_pdl=False)


def scored_in(plan: Any, x: Scored) -> tuple[Any, Any, Pages]:
    """(tensor map of keys, of queries, the other operands)."""
    pages = Pages(plan.cache_operand(x.k_index_cache_fp8), *x[2:])
    return *make_tensor_maps(x.k_index_cache_fp8, x.q_index_fp8, plan), pages


def make_tensor_maps(cache: cute.Tensor, queries: cute.Tensor, plan: Any) -> tuple[Any, Any]:
    """(cache as pages of rows of 128 bytes, box of a page's `page_box_rows`, or as rows that are
    gathered; queries as such rows, box of a row)."""
    pages, apart = cache.shape[0], cache.stride[0]
    shape: tuple[Any, ...] = (plan.page_rows,)
    stride: tuple[Any, ...] = (CACHE_ROW_BYTES,)
    box: tuple[Any, ...] = (plan.page_box_rows,)
    if plan.gathers:  # a gather has no third dimension
        shape = ((pages - 1) * (apart // CACHE_ROW_BYTES) + plan.page_rows,)
    else:
        shape, stride, box = (pages, *shape), (apart, *stride), (1, *box)
    cache_rows = cute.make_tensor(
        cache.iterator, cute.make_layout((*shape, CACHE_ROW_BYTES), stride=(*stride, 1))
    )
    query_rows = cute.make_tensor(
        cute.recast_ptr(queries.iterator, dtype=Uint8),
        cute.make_layout(
            (queries.shape[0] * plan.num_heads, INDEX_HEAD_DIM), stride=(INDEX_HEAD_DIM, 1)
        ),
    )
    swizzle = tensor_map.TensorMapSwizzle.s128b
    return (
        tensor_map.create_tensor_map_tiled_from_view(
            cache_rows,
            box_dims=(*box, CACHE_ROW_BYTES),
            stride_order=tuple(range(len(box), -1, -1)),
            swizzle=swizzle,
        ),
        tensor_map.create_tensor_map_tiled_from_view(
            query_rows, box_dims=(plan.tile_heads, INDEX_HEAD_DIM), swizzle=swizzle
        ),
    )


def fake_scored(plan: Any, rows: Any, requests: Any) -> Scored:
    """Operands without memory, of so many requests' rows."""
    return Scored(
        fake.fake_tensor(Float8E4M3FN, (rows, plan.num_heads, INDEX_HEAD_DIM)),
        fake.fake_pages(Uint8, (PAGE_SIZE, 1, plan.token_bytes), page_step(plan.gathers)),
        fake.fake_tensor(Float32, (rows, plan.num_heads)),
        fake.words(rows),
        fake.rows_apart(Int32, requests, cute.sym_int32()),
    )


def compile_indexer(kernel: Any, plan: Any) -> Any:
    """Compile `launch_indexer`."""
    rows, requests, topk, counters, slots, ordered, width = fake.symbols(7)
    workspace = fake.words(counters), fake.fake_tensor(Int32, (slots, plan.slot_words))
    outputs = fake.rows_apart(Int32, rows, topk), fake.words(ordered, width)
    x = *fake_scored(plan, rows, requests), *outputs, *(workspace if plan.splits else ())
    last = (Int32(1) for _ in range(3))
    return compile_launch(plan.arch, launch_indexer, plan, kernel, *x, *last)


def compile_logits(kernel: Any, plan: Any) -> Any:
    """Compile `launch_logits`."""
    rows, requests, width, counted = fake.symbols(4)
    x = *fake_scored(plan, rows, requests if plan.ranked else rows), fake.numbers(rows, width)
    ranked = (fake.fake_tensor(Int32, (counted,)), Int32(1)) if plan.ranked else ()
    return compile_launch(plan.arch, launch_logits, plan, kernel, *x, *ranked, Int32(1))
