"""P and dS of the backward, for Hopper: a CTA takes two row blocks of a group at a time.

gather           | warpgroup 1               | warpgroup 2
---------------- | ------------------------- | -------------------------
a tile's rows,   | S, dP of its 64 rows      |
chunk by chunk   | P, dS -> spool            | S, dP of its 64 rows
                 | S, dP of the next tile    | P, dS -> spool
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.arena import Arena, allocate, initialise_barriers
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.delta import launch_delta
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.context import Context
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.gather import Gatherer, gather_all
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.plan import ITEM_BLOCKS
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.score import Scorer, score_all
from flashdsa.kernels.attention.sm90.core.tile import ROWS, TILE_KEYS
from flashdsa.kernels.attention.union.choice import FIRST, is_taken
from flashdsa.kernels.attention.union.launch import Lists, launch_union


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
    row_blocks = arena.plan.queries * heads // ROWS
    num_items = Int32(lists.counts.shape[0]) * row_blocks // ITEM_BLOCKS
    if cutlass.const_expr(choice is not None):
        if not is_taken(choice, Int32(FIRST)):
            num_items = Int32(0)
    return Context(arena, lists, row_blocks, cta, num_ctas, num_items, thread % WARPGROUP_SIZE)


class Operands(NamedTuple):
    """Arguments of every launch, in order."""

    q: cute.Tensor  # (S * H, 576) bf16
    kv: cute.Tensor  # (S_kv, 576) bf16
    do: cute.Tensor  # (S * H, 512) bf16
    lse: cute.Tensor  # (S * H,) fp32, natural, sinks in it
    delta: cute.Tensor  # (S * H,) fp32
    lists: Lists  # five tensors: of `workspace.py`; named: what the queries of a group name
    spool: cute.Tensor  # (row blocks of all groups, bytes) uint8, written
    heads: Int32  # H, a divisor of 128; plan.queries * H is 128 or 256
    sm_scale: Float32
    num_ctas: Int32  # at most pairs of row blocks; best the number that runs at once


LSE_END, LIST_TENSORS = 4, len(Lists._fields)


@cute.jit
def launch_scores(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Launch the scores on `stream`; if the plan is not optional, first delta and the lists.

    Args:
        arguments: those of `Operands`; if the plan is optional, then choice: (1,) int32; the
            kernel has work if it is FIRST. Else, after lse, out (S * H, 512) bf16, indices (S,
            topk) int32 and topk_length (S,) int32, or (0,): every slot counts; and delta and the
            lists are written.
    """
    before = () if plan.optional else arguments[LSE_END : LSE_END + 3]
    rest = arguments[LSE_END + len(before) :]
    lists = Lists(*rest[1 : 1 + LIST_TENSORS])
    own = rest[1 + LIST_TENSORS :]
    fields: tuple[Any, ...] = (*arguments[:LSE_END], rest[0], lists, *own[:4])
    x = Operands(*fields)
    choice = own[4] if plan.optional else None
    if cutlass.const_expr(not plan.optional):
        out, indices, lengths = before
        launch_delta(x.do, out, x.delta, stream)
        keys = Int32(x.kv.shape[0])
        launch_union(indices, lengths, lists, keys, plan.queries, stream, TILE_KEYS)
    operands = x.q, x.kv, x.do, x.lse, x.delta, lists, x.spool, x.heads, x.sm_scale
    scores_kernel(*operands, choice, plan).launch(
        grid=[x.num_ctas, 1, 1], block=[plan.threads, 1, 1], stream=stream, min_blocks_per_mp=1
    )
