"""P and dS of the backward, for Hopper: a CTA takes two row blocks of a group at a time.

gather           | warpgroup 1               | warpgroup 2
---------------- | ------------------------- | -------------------------
a tile's rows,   | S, dP of its 64 rows      |
chunk by chunk   | P, dS -> spool            | S, dP of its 64 rows
                 | S, dP of the next tile    | P, dS -> spool
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.arena import Arena, allocate, initialise_barriers
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.sparse_mla.delta import launch_delta
from flashdsa.kernels.sparse_mla.sm90.bwd.scores.context import Context
from flashdsa.kernels.sparse_mla.sm90.bwd.scores.gather import Gatherer, gather_all
from flashdsa.kernels.sparse_mla.sm90.bwd.scores.plan import ITEM_BLOCKS
from flashdsa.kernels.sparse_mla.sm90.bwd.scores.score import Scorer, score_all
from flashdsa.kernels.sparse_mla.sm90.bwd.spool import BLOCK_ROWS, TILE_KEYS
from flashdsa.kernels.sparse_mla.sm90.choice import FIRST, is_taken
from flashdsa.kernels.sparse_mla.sm90.union import Lists, launch_union


@cute.kernel
def scores_kernel(
    q: cute.Tensor,
    kv: cute.Tensor,
    do: cute.Tensor,
    lse: cute.Tensor,
    delta: cute.Tensor,
    lists: Lists,
    spool: cute.Tensor,
    heads: Int32,
    sm_scale: Float32,
    choice: Any,
    plan: cutlass.Constexpr,
):
    """One CTA; arguments as in `launch_scores`. choice: None: it is taken."""
    thread, _, _ = cute.arch.thread_idx()
    arena = allocate(plan)
    initialise_barriers(arena, thread)
    cute.arch.sync_threads()
    group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP_SIZE // WARP_SIZE)
    if group == 0:
        cute.arch.setmaxregister_decrease(plan.gather.registers)
        gather_all(Gatherer(locate(arena, lists, heads, choice), kv))
    else:
        cute.arch.setmaxregister_increase(plan.score.registers)
        ctx = locate(arena, lists, heads, choice)
        score_all(Scorer(ctx, q, do, lse, delta, spool, heads, sm_scale, group - 1))


@cute.jit
def locate(arena: Arena, lists: Lists, heads: Int32, choice: Any) -> Context:
    """This thread's context."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    row_blocks = arena.plan.queries * heads // BLOCK_ROWS
    num_items = Int32(lists.counts.shape[0]) * row_blocks // ITEM_BLOCKS
    if cutlass.const_expr(choice is not None):
        if not is_taken(choice, Int32(FIRST)):
            num_items = Int32(0)
    return Context(arena, lists, row_blocks, cta, num_ctas, num_items, thread % WARPGROUP_SIZE)


@cute.jit
def launch_scores(
    q: cute.Tensor,
    kv: cute.Tensor,
    do: cute.Tensor,
    lse: cute.Tensor,
    out: cute.Tensor,
    indices: cute.Tensor,
    topk_length: cute.Tensor,
    delta: cute.Tensor,
    rows: cute.Tensor,
    members: cute.Tensor,
    counts: cute.Tensor,
    present: cute.Tensor,
    named: cute.Tensor,
    spool: cute.Tensor,
    heads: Int32,
    sm_scale: Float32,
    num_ctas: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch delta, the lists and the scores on `stream`.

    Args:
        q: (S * H, 576) bf16. kv: (S_kv, 576) bf16. do, out: (S * H, 512) bf16.
        lse: (S * H,) fp32, natural, sinks in it. indices: (S, topk) int32.
        topk_length: (S,) int32, or (0,): every slot counts.
        delta: (S * H,) fp32, written.
        rows, members, counts, present: the lists of `spool.py`, written. named: (groups,) int32,
            written: what the queries of a group name, one by one.
        spool: (row blocks of all groups, bytes) uint8, written.
        heads: H, a divisor of 128; plan.queries * H is 128 or 256.
        num_ctas: at most pairs of row blocks; best so many as run at once.
    """
    launch_delta(do, out, delta, stream)
    lists = Lists(rows, members, counts, present, named)
    launch_union(indices, topk_length, lists, Int32(kv.shape[0]), plan.queries, stream, TILE_KEYS)
    scores_kernel(q, kv, do, lse, delta, lists, spool, heads, sm_scale, None, plan).launch(
        grid=[num_ctas, 1, 1], block=[plan.threads, 1, 1], stream=stream, min_blocks_per_mp=1
    )


@cute.jit
def launch_scores_alone(
    q: cute.Tensor,
    kv: cute.Tensor,
    do: cute.Tensor,
    lse: cute.Tensor,
    delta: cute.Tensor,
    rows: cute.Tensor,
    members: cute.Tensor,
    counts: cute.Tensor,
    present: cute.Tensor,
    named: cute.Tensor,
    spool: cute.Tensor,
    heads: Int32,
    sm_scale: Float32,
    num_ctas: Int32,
    choice: cute.Tensor,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch the scores on `stream`, of delta and lists that are there.

    Args:
        As for `launch_scores`, and choice: (1,) int32; the kernel has work where it is FIRST.
    """
    lists = Lists(rows, members, counts, present, named)
    scores_kernel(q, kv, do, lse, delta, lists, spool, heads, sm_scale, choice, plan).launch(
        grid=[num_ctas, 1, 1], block=[plan.threads, 1, 1], stream=stream, min_blocks_per_mp=1
    )
