"""dQ = dS K from the spool: a CTA takes a slice of the dims of a group's rows at a time.

load                       | multiply (2 warpgroups)
-------------------------- | ---------------------------------------
dS and keys of tile 0      |
dS and keys of tile 1      | dQ += dS K of tile 0
dS and keys of tile 2      | dQ += dS K of tile 1, tile 0 is freed
...                        | ...
                           | dQ to device memory
"""

from typing import Any

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.arena import Arena, allocate, initialise_barriers
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.sparse_mla.sm90.bwd.dq.context import Context
from flashdsa.kernels.sparse_mla.sm90.bwd.dq.load import Load, load_all
from flashdsa.kernels.sparse_mla.sm90.bwd.dq.multiply import Multiply, multiply_all
from flashdsa.kernels.sparse_mla.sm90.bwd.grouped import Groups, Lists, work_of_cta


@cute.kernel
def dq_kernel(
    spool: cute.Tensor,
    ids: cute.Tensor,
    counts: cute.Tensor,
    kv: cute.Tensor,
    dq: cute.Tensor,
    groups: Groups,
    plan: cutlass.Constexpr,
):
    """One CTA; arguments as in `launch_dq`."""
    thread, _, _ = cute.arch.thread_idx()
    arena = allocate(plan)
    initialise_barriers(arena, thread)
    cute.arch.sync_threads()
    group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP_SIZE // WARP_SIZE)
    # Each role finds its place for itself: what all share would be live in every role.
    if group == 0:
        cute.arch.setmaxregister_decrease(plan.load.registers)
        load_all(Load(locate(arena, ids, counts, groups), spool, kv))
    else:
        cute.arch.setmaxregister_increase(plan.multiply.registers)
        ctx = locate(arena, ids, counts, groups)
        multiply_all(Multiply(ctx, dq, group - 1))


@cute.jit
def locate(arena: Arena, ids: cute.Tensor, counts: cute.Tensor, groups: Groups) -> Context:
    """This thread's context."""
    thread, _, _ = cute.arch.thread_idx()
    work = work_of_cta(groups, arena.plan.slices)
    return Context(arena, work, Lists(ids, counts), thread % WARPGROUP_SIZE)


@cute.jit
def launch_dq(
    spool: cute.Tensor,
    ids: cute.Tensor,
    counts: cute.Tensor,
    kv: cute.Tensor,
    dq: cute.Tensor,
    group_begin: Int32,
    group_end: Int32,
    choice: cute.Tensor,
    number: Int32,
    num_ctas: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch on `stream`. What the tensors hold is said in spool.py.

    Args:
        spool: (row blocks, bytes) uint8: images of the groups from group_begin to group_end, which
            is not one.
        ids: (groups, capacity) int32. counts: (groups,) int32.
        kv: (S_kv, 576) bf16. dq: (S * H, 576) bf16; all rows of the launch's groups are written.
        choice, number: see `choice.is_taken`.
        num_ctas: at most the work items, plan.slices a group; best so many as run at once.
    """
    dq_kernel(
        spool, ids, counts, kv, dq, Groups(group_begin, group_end, choice, number), plan
    ).launch(grid=[num_ctas, 1, 1], block=[plan.threads, 1, 1], stream=stream, min_blocks_per_mp=1)
