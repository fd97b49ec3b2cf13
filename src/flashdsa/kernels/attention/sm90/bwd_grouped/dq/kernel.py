"""dQ = dS K from the spool: a CTA takes a slice of the dims of a group's rows at a time.

load                       | multiply (2 warpgroups)
-------------------------- | ---------------------------------------
dS and keys of tile 0      |
dS and keys of tile 1      | dQ += dS K of tile 0
dS and keys of tile 2      | dQ += dS K of tile 1, tile 0 is freed
...                        | ...
                           | dQ to device memory
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.arena import Arena, allocate, initialise_barriers
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.mend import Queries, launch_mend_dq
from flashdsa.kernels.attention.sm90.bwd_grouped.dq.context import Context
from flashdsa.kernels.attention.sm90.bwd_grouped.dq.load import Load, load_all
from flashdsa.kernels.attention.sm90.bwd_grouped.dq.multiply import Multiply, multiply_all
from flashdsa.kernels.attention.sm90.bwd_grouped.items import Groups, Lists, work_of_cta
from flashdsa.kernels.attention.sm90.core.tile import ROWS


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
    # Each role computes its own coordinates: values shared by all would be live in every role.
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


class Operands(NamedTuple):
    """Arguments of a launch, in order; workspace.py documents the contents of the tensors."""

    spool: cute.Tensor  # (row blocks, bytes) uint8: images of the groups of the launch
    ids: cute.Tensor  # (groups, capacity) int32
    counts: cute.Tensor  # (groups,) int32
    q: cute.Tensor  # (S * H, 576) bf16; it and what follows as far as delta: of the launch's groups
    kv: cute.Tensor  # (S_kv, 576) bf16
    do: cute.Tensor  # (S * H, 512) bf16
    lse: cute.Tensor  # (S * H,) fp32, natural, sinks in it
    indices: cute.Tensor  # (S, topk) int32
    topk_length: cute.Tensor  # (S,) int32, or (0,): every slot counts
    delta: cute.Tensor  # (S * H,) fp32
    dq: cute.Tensor  # (S * H, 576) bf16; all rows of the launch's groups are written
    heads: Int32  # H
    sm_scale: Float32


@cute.jit
def launch_dq(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Launch on `stream`.

    Args:
        arguments: those of `Operands`, those of `Groups`, and
            num_ctas: at most the work items, plan.slices a group; best as many as run at once.
    """
    count = len(Operands._fields)
    x, groups = Operands(*arguments[:count]), Groups(*arguments[count:-1])
    dq_kernel(x.spool, x.ids, x.counts, x.kv, x.dq, groups, plan).launch(
        grid=[arguments[-1], 1, 1], block=[plan.threads, 1, 1], stream=stream, min_blocks_per_mp=1
    )
    read = x.q, x.kv, x.indices, x.topk_length, x.lse
    together = plan.row_blocks * ROWS // x.heads
    queries = Queries(*read, x.heads, x.sm_scale, together)
    launch_mend_dq(queries, x.do, x.delta, x.dq, groups.choice, stream)
