"""The backward of 64 rows of Q in one kernel: P and dS never leave the streaming multiprocessor.

gather         | score                | right              | dkv
-------------- | -------------------- | ------------------ | -------------------------
               |                      | Q and dO           |
keys of tile 0 |                      |                    |
               | S, dP, P, dS         |                    |
               | dQ += dS K, left     | dQ += dS K, right  | P, dS to registers
keys of tile 1 |                      |                    | products, additions to dKV
               | S, dP, P, dS         |                    | ...
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.arena import Arena, allocate, initialise_barriers
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.sparse_mla.delta import launch_delta
from flashdsa.kernels.sparse_mla.sm90.bwd.fused.columns import launch_permute
from flashdsa.kernels.sparse_mla.sm90.bwd.fused.context import Context
from flashdsa.kernels.sparse_mla.sm90.bwd.fused.dkv import Dkv, dkv_all
from flashdsa.kernels.sparse_mla.sm90.bwd.fused.gather import Gatherer, gather_all
from flashdsa.kernels.sparse_mla.sm90.bwd.fused.right import Right, right_all
from flashdsa.kernels.sparse_mla.sm90.bwd.fused.score import Scorer, score_all
from flashdsa.kernels.sparse_mla.sm90.bwd.spool import BLOCK_ROWS, TILE_KEYS
from flashdsa.kernels.sparse_mla.sm90.choice import SECOND, is_taken, launch_choice
from flashdsa.kernels.sparse_mla.sm90.union import Lists, launch_union


@cute.kernel
def fused_kernel(
    operands: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    lse: cute.Tensor,
    delta: cute.Tensor,
    lists: Lists,
    dq: cute.Tensor,
    dkv: cute.Tensor,
    heads: Int32,
    sm_scale: Float32,
    spread: Int32,
    choice: Any,
    plan: cutlass.Constexpr,
):
    """One CTA; arguments as in `launch_fused`. operands: q, the copy
    of kv, do. choice: None: it is taken."""
    q, kv, do = operands
    thread, _, _ = cute.arch.thread_idx()
    arena = allocate(plan)
    initialise_barriers(arena, thread)
    cute.arch.sync_threads()
    group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP_SIZE // WARP_SIZE)
    # Each role finds its place for itself: what all share would be live in every role.
    if group == 0:
        cute.arch.setmaxregister_decrease(plan.gather.registers)
        gather_all(Gatherer(locate(arena, lists, heads, dq, spread, choice), kv))
    elif group == 1:
        cute.arch.setmaxregister_increase(plan.score.registers)
        ctx = locate(arena, lists, heads, dq, spread, choice)
        score_all(Scorer(ctx, lse, delta, dq, sm_scale))
    elif group == 2:
        cute.arch.setmaxregister_increase(plan.right.registers)
        right_all(Right(locate(arena, lists, heads, dq, spread, choice), q, do, dq))
    else:
        cute.arch.setmaxregister_decrease(plan.dkv.registers)
        dkv_all(Dkv(locate(arena, lists, heads, dq, spread, choice), dkv))


@cute.jit
def locate(
    arena: Arena, lists: Lists, heads: Int32, dq: cute.Tensor, spread: Int32, choice: Any
) -> Context:
    """This thread's context."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    num_items = (Int32(dq.shape[0]) + (BLOCK_ROWS - 1)) // BLOCK_ROWS
    if cutlass.const_expr(choice is not None):
        if not is_taken(choice, Int32(SECOND)):
            num_items = Int32(0)
    row_blocks = cutlass.max(heads // BLOCK_ROWS, Int32(1))
    own = thread % WARPGROUP_SIZE
    return Context(arena, lists, row_blocks, cta, num_ctas, num_items, spread, own)


@cute.jit
def launch_fused(
    q: cute.Tensor,
    kv: cute.Tensor,
    copy: cute.Tensor,
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
    dq: cute.Tensor,
    dkv: cute.Tensor,
    heads: Int32,
    sm_scale: Float32,
    spread: Int32,
    num_ctas: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch delta, the lists, the copy of kv and the backward on `stream`.

    Args:
        q: (S * H, 576) bf16. kv: (S_kv, 576) bf16. copy: the same size, written.
        do, out: (S * H, 512) bf16.
        lse: (S * H,) fp32, natural, sinks in it. indices: (S, topk) int32.
        topk_length: (S,) int32, or (0,): every slot counts.
        delta: (S * H,) fp32, written.
        rows, ...: the lists of `spool.py` of groups of plan.queries queries, written.
        dq: (S * H, 576) bf16, written. dkv: (S_kv, 576) fp32, added to.
        heads: H, one of spool.HEADS; plan.queries * H is 64, or 128.
        spread: see `Context`.
        num_ctas: at most the row blocks, S * H / 64; best so many as run at once.
    """
    launch_delta(do, out, delta, stream)
    lists = Lists(rows, members, counts, present, named)
    launch_union(indices, topk_length, lists, Int32(kv.shape[0]), plan.queries, stream, TILE_KEYS)
    launch_permute(kv, copy, None, stream)
    fused_kernel(
        (q, copy, do), lse, delta, lists, dq, dkv, heads, sm_scale, spread, None, plan
    ).launch(grid=[num_ctas, 1, 1], block=[plan.threads, 1, 1], stream=stream, min_blocks_per_mp=1)


@cute.jit
def launch_fused_or_choose(
    q: cute.Tensor,
    kv: cute.Tensor,
    copy: cute.Tensor,
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
    dq: cute.Tensor,
    dkv: cute.Tensor,
    heads: Int32,
    sm_scale: Float32,
    spread: Int32,
    num_ctas: Int32,
    more_rows: cute.Tensor,
    more_members: cute.Tensor,
    more_counts: cute.Tensor,
    more_present: cute.Tensor,
    more_named: cute.Tensor,
    choice: cute.Tensor,
    ratio: Float32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch delta, the lists of groups of plan.more queries, the choice, and the backward if those
    groups have too little in common.

    Args:
        As for `launch_fused`, and
        more_rows, ...: the lists of groups of plan.more queries, written.
        choice: (1,) int32, written: FIRST where they are taken. ratio: see `launch_choice`.
    """
    launch_delta(do, out, delta, stream)
    keys = Int32(kv.shape[0])
    first = Lists(more_rows, more_members, more_counts, more_present, more_named)
    launch_union(indices, topk_length, first, keys, plan.more, stream, TILE_KEYS)
    launch_choice(more_counts, more_named, choice, ratio, plan.more, stream)
    lists = Lists(rows, members, counts, present, named)
    launch_union(indices, topk_length, lists, keys, plan.queries, stream, TILE_KEYS, choice)
    launch_permute(kv, copy, choice, stream)
    fused_kernel(
        (q, copy, do), lse, delta, lists, dq, dkv, heads, sm_scale, spread, choice, plan
    ).launch(grid=[num_ctas, 1, 1], block=[plan.threads, 1, 1], stream=stream, min_blocks_per_mp=1)
