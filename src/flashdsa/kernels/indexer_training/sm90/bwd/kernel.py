"""The backward of the index scores on Hopper: groups of neighbouring queries over common keys.

load                | multiply, two warpgroups
------------------- | --------------------------------------------------------------
Q of a group        |
keys of tile 0      |
keys of tile 1      | q k of tile 0, A = g w [q k > 0] to shared memory
...                 | dK of tile 0, q k of tile 1, dQ += A K of tile 0
                    | dK of tile 0 is added while the others run; A of tile 1
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.arena import Arena, allocate, initialise_barriers
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer_training.sm90.bwd.context import Context, Lists
from flashdsa.kernels.indexer_training.sm90.bwd.lists import launch_counts, launch_lists
from flashdsa.kernels.indexer_training.sm90.bwd.load import Loader, load_all
from flashdsa.kernels.indexer_training.sm90.bwd.multiply import Multiplier, multiply_all
from flashdsa.kernels.sparse_mla.sm90.choice import FIRST, SECOND, is_taken, launch_choice


@cute.kernel
def indexer_bwd_kernel(
    q: cute.Tensor,
    k: cute.Tensor,
    weights: cute.Tensor,
    lists: Lists,
    dq: cute.Tensor,
    dk: cute.Tensor,
    dw: cute.Tensor,
    choice: cute.Tensor,
    number: Int32,
    spread: Int32,
    plan: cutlass.Constexpr,
):
    """One CTA; arguments as in `launch_backward`."""
    thread, _, _ = cute.arch.thread_idx()
    arena = allocate(plan)
    initialise_barriers(arena, thread)
    cute.arch.sync_threads()
    group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP_SIZE // WARP_SIZE)
    # Each role finds its place for itself: what all share would be live in every role.
    if group == 0:
        cute.arch.setmaxregister_decrease(plan.load.registers)
        load_all(Loader(locate(arena, lists, choice, number, spread), q, k))
    else:
        cute.arch.setmaxregister_increase(plan.multiply.registers)
        ctx = locate(arena, lists, choice, number, spread)
        multiply_all(Multiplier(ctx, group - 1, weights, dq, dk, dw))


@cute.jit
def locate(
    arena: Arena, lists: Lists, choice: cute.Tensor, number: Int32, spread: Int32
) -> Context:
    """This thread's context."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    num_items = Int32(lists.counts.shape[0])
    if not is_taken(choice, number):
        num_items = Int32(0)
    return Context(arena, lists, cta, num_ctas, num_items, spread, thread % WARPGROUP_SIZE)


@cute.jit
def launch_group(
    q: cute.Tensor,
    k: cute.Tensor,
    weights: cute.Tensor,
    slots: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    lists: Lists,
    gradients: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    choice: cute.Tensor,
    number: Int32,
    scalars: tuple[Int32, Int32],
    plan: cutlass.Constexpr,
    stream: Any,
):
    """The lists of a plan's groups, and the backward."""
    dq, dk, dw = gradients
    spread, num_ctas = scalars
    launch_lists(*slots, Int32(k.shape[0]), lists, choice, number, plan, stream)
    indexer_bwd_kernel(q, k, weights, lists, dq, dk, dw, choice, number, spread, plan).launch(
        grid=[num_ctas, 1, 1], block=[plan.threads, 1, 1], stream=stream, min_blocks_per_mp=1
    )


@cute.jit
def launch_backward(
    q: cute.Tensor,
    k: cute.Tensor,
    weights: cute.Tensor,
    indices: cute.Tensor,
    grad_scores: cute.Tensor,
    topk_length: cute.Tensor,
    rows: cute.Tensor,
    gradients: cute.Tensor,
    counts: cute.Tensor,
    present: cute.Tensor,
    dq: cute.Tensor,
    dk: cute.Tensor,
    dw: cute.Tensor,
    choice: cute.Tensor,
    spread: Int32,
    num_ctas: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch the lists and the backward on `stream`.

    Args:
        q: (S * H, 128) bf16. k: (S_kv, 128) bf16. weights: (S * H,) fp32.
        indices: (S, topk) int32. grad_scores: (S, topk) fp32, read where a slot is valid.
        topk_length: (S,) int32, or (0,): every slot counts.
        rows, gradients, counts, present: the `Lists` of groups of plan.queries queries, written.
        dq: (S * H, 128) bf16 and dw (S * H,) fp32, written.
        dk: (S_kv, 128) fp32, added to; ordered: (groups * capacity, 128), of each place of the
            lists that has a key its row of dK, written.
        choice: nothing is done where it is not SECOND; (0,): it is done.
        spread: see `Context`.
        num_ctas: at most the groups; best so many as run at once.
    """
    lists = Lists(rows, gradients, counts, present)
    slots = indices, grad_scores, topk_length
    launch_group(
        q, k, weights, slots, lists, (dq, dk, dw), choice, Int32(SECOND), (spread, num_ctas), plan,
        stream,
    )  # fmt: skip


@cute.jit
def launch_chosen(
    q: cute.Tensor,
    k: cute.Tensor,
    weights: cute.Tensor,
    indices: cute.Tensor,
    grad_scores: cute.Tensor,
    topk_length: cute.Tensor,
    rows: cute.Tensor,
    gradients: cute.Tensor,
    counts: cute.Tensor,
    present: cute.Tensor,
    dq: cute.Tensor,
    dk: cute.Tensor,
    dw: cute.Tensor,
    choice: cute.Tensor,
    spread: Int32,
    num_ctas: Int32,
    sample_counts: cute.Tensor,
    sample_named: cute.Tensor,
    step: Int32,
    ratio: Float32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch the choice on `stream`, and lists and backward if the groups have enough in common.

    Args:
        As for `launch_backward`, and
        choice: (1,) int32, written: FIRST where these groups are taken.
        sample_counts, sample_named: (samples,) int32, written: of groups 0, step, ..., by which it
            is chosen. ratio: see `launch_choice`.
    """
    lists = Lists(rows, gradients, counts, present)
    slots = indices, grad_scores, topk_length
    launch_counts(*slots, Int32(k.shape[0]), sample_counts, sample_named, step, plan, stream)
    launch_choice(sample_counts, sample_named, choice, ratio, plan.queries, stream)
    launch_group(
        q, k, weights, slots, lists, (dq, dk, dw), choice, Int32(FIRST), (spread, num_ctas), plan,
        stream,
    )  # fmt: skip
