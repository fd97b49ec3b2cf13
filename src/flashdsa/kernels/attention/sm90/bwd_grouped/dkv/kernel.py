"""dKV += dS^T Q + P^T dO from the workspace: a CTA takes a slice of the dims of a group at a time.

Q and dO of the group's rows stay in shared memory for all of the list's tiles of 64 keys.

rows                | matrices           | multiply, even tiles      | odd tiles
------------------- | ------------------ | ------------------------- | --------------------------
Q and dO, in parts  | dS, P of tile 0    |                           |
                    | dS, P of tile 1    | products of tile 0        |
                    | dS, P of tile 2    | additions to dKV          | products of tile 1
                    | ...                | products of tile 2        | additions to dKV
next item's parts   |                    | last tile frees the parts | ...
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Uint8, cute

from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.dsl.grids import follow_grid
from flashdsa.dsl.memory import initialise_barriers
from flashdsa.hw import SM90, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.mend import flat
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.add import (
    GROUP_WARPS,
    Order,
    Publish,
    publish_all,
)
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.buffers import launch_merge, launch_zero
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.load import (
    Context,
    DkvMemory,
    Matrices,
    Rows,
    copy_all,
    load_matrices,
)
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.multiply import Multiply, multiply_all
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import WARPGROUPS, WORDS, DkvPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.items import Groups, Lists, work_of_cta


@cute.kernel
def dkv_kernel(
    workspace: cute.Tensor,
    ids: cute.Tensor,
    counts: cute.Tensor,
    present: cute.Tensor,
    q: cute.Tensor,
    do: cute.Tensor,
    dkv: cute.Tensor,
    heads: Int32,
    groups: Groups,
    order: Any,
    plan: cutlass.Constexpr,
):
    """One CTA; arguments as in `launch_dkv`. order: Order, or None."""
    thread, _, _ = cute.arch.thread_idx()
    memory = DkvMemory.allocate(plan)
    initialise_barriers(memory, thread)
    if cutlass.const_expr(order is not None):
        if thread < WARPGROUPS * GROUP_WARPS:
            (memory.added.pointer(Int32) + thread).store(Int32(0))
    cute.arch.sync_threads()
    follow_grid()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    group = warp // (WARPGROUP_SIZE // WARP_SIZE)
    # Each role computes its own coordinates: values shared by all would be live in every role.
    if group == 0:
        cute.arch.setmaxregister_decrease(plan.rows.registers)
        ctx = locate(memory, ids, counts, groups)
        if warp == 0:
            if thread == 0:
                load_matrices(Matrices(ctx, workspace))
        elif warp <= plan.row_warps:
            copy_all(Rows(ctx, q, do, present, heads))
        elif cutlass.const_expr(order is not None):
            publish_all(Publish(ctx, order, dkv))
    else:
        cute.arch.setmaxregister_increase(plan.multiply.registers)
        ctx = locate(memory, ids, counts, groups)
        multiply_all(Multiply(ctx, dkv, group - 1, order))


@cute.jit
def locate(memory: DkvMemory, ids: cute.Tensor, counts: cute.Tensor, groups: Groups) -> Context:
    """This thread's context."""
    thread, _, _ = cute.arch.thread_idx()
    work = work_of_cta(groups, memory.plan)
    return Context(memory, work, Lists(ids, counts), thread % WARPGROUP_SIZE)


class Operands(NamedTuple):
    """Arguments of every launch, in order; see workspace.py."""

    workspace: cute.Tensor  # (row blocks, bytes) uint8: of the groups of the launch
    ids: cute.Tensor  # (groups, capacity) int32
    counts: cute.Tensor  # (groups,) int32
    present: cute.Tensor  # (groups,) int32
    q: cute.Tensor  # (S, H, 576) bf16
    do: cute.Tensor  # (S, H, 512) bf16
    dkv: cute.Tensor  # (S_kv, 576) fp32, added to
    heads: Int32  # H, one of HEADS


@cute.jit
def launch_dkv(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Launch on `stream`; in order cooperatively.

    Args:
        arguments: those of `Operands`, those of `Groups`, and
            num_ctas: at most the work items, plan.slices a group; best as many as run at once; in
                order no more.
        in order, where group g of the call is added to dKV g % buffers, then
            words: (groups, plan.slices * WORDS) int32, 0.
            first: number in the call of the launch's first group.
            more: (buffers - 1, S_kv, 576) fp32, scratch: the dKVs from the second one on.
            is_last: 1 if no launch of the call follows, else 0.
    """
    last = len(Operands._fields)
    behind = last + len(Groups._fields)
    given, groups = Operands(*arguments[:last]), Groups(*arguments[last:behind])
    # The kernel sees the heads' rows one after another.
    x = given._replace(q=flat(given.q, plan.tile.d_qk), do=flat(given.do, plan.tile.d_v))
    num_ctas, *in_order = arguments[behind:]
    order = None
    if cutlass.const_expr(plan.ordered):
        words, first, more, is_last = in_order
        order = Order(words, x.present, first, more)
        if first == 0 and more.shape[0] > 0:
            launch_zero(more, groups.choice, stream)
    dkv_kernel(*x, groups, order, plan).launch(
        grid=[num_ctas, 1, 1],
        block=[plan.threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
        cooperative=plan.ordered,
        use_pdl=not plan.ordered,
    )
    if cutlass.const_expr(plan.ordered):
        if is_last == 1 and more.shape[0] > 0:
            launch_merge(x.dkv, more, groups.choice, stream)


def compile_dkv(plan: DkvPlan) -> Any:
    """Compile `launch_dkv`."""
    d_qk, d_v = plan.tile.d_qk, plan.tile.d_v
    blocks, block_bytes, groups, capacity, keys = (cute.sym_int32() for _ in range(5))
    rows = cute.sym_int32(), cute.sym_int32()
    order = []
    if plan.ordered:
        words = fake_tensor(Int32, (cute.sym_int32(), plan.slices * WORDS))
        more = fake_tensor(Float32, (cute.sym_int32(), keys, d_qk))
        order = [words, Int32(0), more, Int32(1)]
    return compile_launch(
        SM90,
        launch_dkv,
        plan,
        fake_tensor(Uint8, (blocks, block_bytes)),
        fake_tensor(Int32, (groups, capacity), 4),
        fake_tensor(Int32, (groups,), 4),
        fake_tensor(Int32, (groups,), 4),
        fake_tensor(BFloat16, (*rows, d_qk)),
        fake_tensor(BFloat16, (*rows, d_v)),
        fake_tensor(Float32, (keys, d_qk)),
        Int32(128),
        Int32(0),
        Int32(1),
        fake_tensor(Int32, (cute.sym_int32(),), 4),
        Int32(0),
        Int32(1),
        *order,
    )
