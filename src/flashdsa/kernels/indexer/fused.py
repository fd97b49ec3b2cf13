"""Parts of the fused kernels that no architecture changes: set-up, role load, role select."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, const_expr, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl import gmem, pipeline, tmem
from flashdsa.dsl.cluster import enter_cluster
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.static import Static
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer import emit, sizes, smem_views
from flashdsa.kernels.indexer.load_tiles import Pages
from flashdsa.kernels.indexer.schedule.row_schedule import first_lengths, schedule_rows
from flashdsa.kernels.indexer.schedule.work_tile import Coord, Rows, find_coord, packed, rows_of
from flashdsa.kernels.indexer.score_batch import score_batch
from flashdsa.kernels.indexer.select import tiles

LINE_WORDS = 32
"""32-bit words of a cache line."""


class Caller(NamedTuple):
    """Coordinates of the calling thread."""

    thread: Int32  # of the CTA
    warp: Int32
    lane: Int32
    cta: Int32
    num_ctas: Int32
    consumes: cutlass.Boolean  # it scores and selects; the other threads follow them


class Results(NamedTuple):
    """Destination of the ids; see `launch_indexer`."""

    topk_indices: cute.Tensor
    words: cute.Tensor
    slots: Int32  # 1: ids are slots of the cache; 0: positions
    published: Any  # Published; None: a row is one cluster's


class Cta(NamedTuple):
    """A thread's view of its CTA after the set-up."""

    caller: Caller
    memory: Memory
    select: smem_views.SelectBuffers
    cluster: smem_views.ClusterBuffers
    coord: Coord
    lengths: Int32  # see `first_lengths`
    pages: Pages
    results: Results
    rows: Rows


def find_caller(plan: Any) -> Caller:
    """Return the calling thread's coordinates, at the kernel's start."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return Caller(thread, warp, thread % WARP_SIZE, cta, num_ctas, warp < plan.consumer_warps)


@cute.jit
def prefetch_inputs(pages: Pages, thread: Int32, threads: Int32, plan: cutlass.Constexpr) -> None:
    """Prefetch what is read after `seq_lens`; the caller is `thread` of `threads` that share the
    lines."""
    block_table, weights = pages.block_table, pages.weights
    lines = (block_table.shape[1] + LINE_WORDS - 1) // LINE_WORDS
    for line in cutlass.range(thread, block_table.shape[0] * lines, threads, unroll=1):
        row = line // lines
        at = Int64(row) * block_table.stride[0] + (line - row * lines) * LINE_WORDS
        gmem.prefetch(block_table.iterator + at)
    count = weights.shape[0] * plan.num_heads
    for at in cutlass.range(thread * LINE_WORDS, count, threads * LINE_WORDS, unroll=1):
        gmem.prefetch(weights.iterator + at)


@cute.jit
def set_up(
    keys_map: Any,
    queries_map: Any,
    pages: Pages,
    results: Results,
    allocate_tmem: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> Cta:
    """Initialise the CTA, by all of its threads; find its rows. allocate_tmem: (memory, warp, plan)
    of an architecture with tensor memory; or None."""
    caller = find_caller(plan)
    if caller.thread == plan.consumer_threads:
        prims.prefetch_tensormap(keys_map.get_ptr())
        prims.prefetch_tensormap(queries_map.get_ptr())
    memory = Memory.allocate(plan)
    select, cluster = (
        smem_views.select_buffers_in(memory, plan),
        smem_views.cluster_buffers_in(memory, plan),
    )
    rows = rows_of(pages.seq_lens, pages.block_table, plan.entry_tokens)
    # Tokens up to which a row needs no scores: all of them are among the best.
    unscored = Int32(results.topk_indices.shape[1])
    if results.words.shape[0] > 0:
        unscored = Int32(0)
    rows = rows._replace(unscored=unscored)
    coord = find_coord(rows, plan)
    # Asked for before anything else: the path to the first page begins with the lengths.
    lengths = first_lengths(select, rows, coord, caller.thread, caller.consumes, plan)
    if const_expr(allocate_tmem is not None):
        allocate_tmem(memory, caller.warp, plan)
    enter_cluster(memory, caller.thread, sizes.INITIALISING_WARPS)
    if const_expr(allocate_tmem is not None):
        tmem.after_sync()
    if const_expr(plan.splits):
        # Tables and weights, by the threads that do not order the rows.
        threads = plan.threads - plan.consumer_threads
        if not caller.consumes:
            thread = caller.cta * threads + caller.thread - plan.consumer_threads
            prefetch_inputs(pages, thread, caller.num_ctas * threads, plan)
    coord = schedule_rows(select, rows, coord, lengths, caller.thread, caller.consumes, plan)
    return Cta(caller, memory, select, cluster, coord, lengths, pages, results, rows)


@cute.jit
def consume(x: Cta, page_source: cutlass.Constexpr, plan: cutlass.Constexpr) -> None:
    """Role select: rows that need no scores, then the CTA's tiles. page_source: (memory, thread,
    plan) gives the PageSource of the calling thread."""
    caller, memory, coord, pages, results = x.caller, x.memory, x.coord, x.pages, x.results
    of_ids = results.topk_indices, results.words
    output = emit.Output(*of_ids, pages.block_table, pages.num_pages, results.slots, x.rows)
    if const_expr(not plan.splits):
        threads = plan.consumer_threads
        thread = caller.cta * threads + caller.thread
        prefetch_inputs(pages, thread, caller.num_ctas * threads, plan)
    # The last CTA takes the first rows: CTAs without pages, if any, have the highest numbers.
    emit.emit_unscored_rows(
        output,
        (caller.num_ctas - 1 - caller.cta) * plan.consumer_warps + caller.warp,
        caller.num_ctas * plan.consumer_warps,
        caller.lane,
        plan,
    )
    inputs = smem_views.input_buffers_in(memory, plan, pipeline.RingConsumer)
    coords = packed(coord) if const_expr(plan.splits) else coord
    source = page_source(memory, caller.thread, plan)
    s = smem_views.Selecting(
        inputs, x.select, x.cluster, coords, output, results.published, caller.thread, Static(plan)
    )
    if const_expr(plan.splits):
        tiles.select_tiles(s, source, score_batch, tiles.select_by_clusters)
    else:
        tiles.select_tiles(s, source, score_batch, tiles.select_by_cluster)
