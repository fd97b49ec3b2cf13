"""Exact top-k of given scores, for Hopper: the fused indexer's ranking without its scoring.

producer warp | 4 consumer warpgroups
------------- | -----------------------------------------------------------------
              | rows of at most topk scores: all positions
segments      | append (key, position), histogram; the row's threshold; positions
"""

from typing import Any

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.arena import allocate
from flashdsa.dsl.cluster import enter_cluster
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.deal import produce_dealt
from flashdsa.kernels.indexer.sm90.emit import Output, emit_unscored_rows
from flashdsa.kernels.indexer.sm90.kernel import INITIALISING_WARPS
from flashdsa.kernels.indexer.sm90.load import Producer
from flashdsa.kernels.indexer.sm90.memory import mailboxes_in, ranking_in, segments_in
from flashdsa.kernels.indexer.sm90.order import first_lengths, settle
from flashdsa.kernels.indexer.sm90.place import find_place
from flashdsa.kernels.indexer.sm90.rank import Consumer, consume
from flashdsa.kernels.indexer.sm90.segments import Rows


@cute.kernel
def topk_kernel(
    scores: cute.Tensor,
    lengths: cute.Tensor,
    positions: cute.Tensor,
    plan: cutlass.Constexpr,
):
    """One CTA of the grid; arguments as in `launch_topk`."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = thread % WARP_SIZE
    arena = allocate(plan)
    ranking, mail = ranking_in(arena, plan), mailboxes_in(arena, plan)
    rows = Rows(lengths, lengths.shape[0], scores.shape[1])
    place = find_place(rows, Int32(1), plan)
    consumes = warp < plan.consumer_warps
    lengths_asked_for = first_lengths(ranking, rows, place, thread, consumes, plan)
    enter_cluster(arena, thread, INITIALISING_WARPS)
    place = settle(ranking, rows, place, lengths_asked_for, thread, consumes, plan)
    if consumes:
        output = Output(positions, None, Int32(0), rows)
        # From the far end: CTAs without segments, if any, have the highest numbers.
        emit_unscored_rows(
            output,
            (num_ctas - 1 - cta) * plan.consumer_warps + warp,
            num_ctas * plan.consumer_warps,
            lane,
            plan,
        )
        inputs = segments_in(arena, plan, arena.consumer)
        consume(Consumer(inputs, ranking, mail, place, output, None, scores), thread, plan)
    else:
        producer_warp = warp - plan.consumer_warps
        inputs = segments_in(arena, plan, arena.producer)
        producer = Producer(inputs, None, None, None, None, Int32(0), rows, producer_warp)
        cute.arch.cluster_wait()  # here for the same reason as in the fused kernel
        produce_dealt(producer, ranking, place, lengths_asked_for, lane, plan)


@cute.jit
def launch_topk(
    scores: cute.Tensor,
    lengths: cute.Tensor,
    positions: cute.Tensor,
    num_clusters: Int32,
    cluster_size: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch on `stream`.

    Args:
        scores: (B, max_len) fp32, any distance between rows. lengths: (B,) int32.
        positions: (B, topk) int32, written.
        num_clusters, cluster_size: as in `launch_indexer`.
    """
    topk_kernel(scores, lengths, positions, plan).launch(
        grid=[num_clusters * cluster_size, 1, 1],
        block=[plan.threads, 1, 1],
        cluster=[cluster_size, 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
    )
