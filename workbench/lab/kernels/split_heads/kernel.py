"""The backward of sparse MLA with its heads split over a pair of CTAs: a cluster a query, four
warpgroups a CTA."""

from typing import Any

import cutlass
from cutlass import Float32, GridConstant, Int32, Int64, cute
from cutlass.experimental import primitives as prims
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.cta_pair import enter_pair, leave_pair
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.static import Static
from flashdsa.hw import SM100, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.delta import launch_delta
from flashdsa.kernels.attention.sm100.bwd.kernel import Operands, fake_operands
from flashdsa.kernels.attention.sm100.bwd.load import Context, Loader, first_turn, locate
from flashdsa.kernels.attention.sm100.bwd.mma import Issuer, QueryLoader
from flashdsa.kernels.attention.sm100.bwd.reduce_dkv import Reducer
from flashdsa.kernels.attention.sm100.bwd.softmax import Softmax
from flashdsa.kernels.attention.sm100.core.tile import BOX_DIMS, CLUSTER, PAIR_ROWS
from workbench.lab.kernels.split_heads.load import load_all
from workbench.lab.kernels.split_heads.mma import issue_all, load_heads, products_of
from workbench.lab.kernels.split_heads.plan import HEADS, HeadsPlan
from workbench.lab.kernels.split_heads.reduce_dkv import merge_all
from workbench.lab.kernels.split_heads.softmax import head_of, send_dq, softmax_all

SOFTMAX, LOAD, REDUCE, MMA = range(4)
"""Warpgroups, in the plan's order of roles."""


@cute.kernel
def heads_kernel(
    q_map: GridConstant[tensor_map.TensorMap], do_map: GridConstant[tensor_map.TensorMap],
    kv_map: GridConstant[tensor_map.TensorMap], lse: cute.Tensor, delta: cute.Tensor,
    indices: cute.Tensor, topk_length: cute.Tensor, dq: cute.Tensor, dkv: cute.Tensor,
    scale: Float32, plan: cutlass.Constexpr,
):  # fmt: skip
    """One CTA of a pair; arguments as in `Operands`."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = Memory.allocate(plan)
    hold = enter_pair(memory, thread, warp, 1)

    group = warp // (WARPGROUP_SIZE // WARP_SIZE)
    if group == SOFTMAX:
        cute.arch.setmaxregister_increase(plan.roles[SOFTMAX].registers)
        ctx = locate(topk_length, indices, memory, first_turn())
        softmax_all(Softmax(ctx, scale, of_head(ctx, lse), of_head(ctx, delta)))
        send_dq(ctx, dq)
    elif group == LOAD:
        cute.arch.setmaxregister_decrease(plan.roles[LOAD].registers)
        ctx = locate(topk_length, indices, memory, first_turn())
        load_all(Loader(ctx, kv_map.get_ptr(), None, indices, None, Int32(dkv.shape[0])))
    elif group == REDUCE:
        cute.arch.setmaxregister_increase(plan.roles[REDUCE].registers)
        merge_all(Reducer(locate(topk_length, indices, memory, first_turn()), dkv, None))
    else:
        cute.arch.setmaxregister_decrease(plan.roles[MMA].registers)
        if warp % (WARPGROUP_SIZE // WARP_SIZE) == 0:
            if prims.elect_sync():
                ctx = locate(topk_length, indices, memory, first_turn())
                issue_all(Issuer(ctx, Static(products_of(plan))))
            cute.arch.sync_warp()
        elif warp % (WARPGROUP_SIZE // WARP_SIZE) == 1:
            if prims.elect_sync():
                ctx = locate(topk_length, indices, memory, first_turn())
                load_heads(QueryLoader(ctx, q_map.get_ptr(), do_map.get_ptr(), None))
            cute.arch.sync_warp()
    leave_pair(plan, hold, warp, 1, True)


def of_head(ctx: Context, values: cute.Tensor) -> Float32:
    """lse or delta (S, 128) of this thread's head."""
    row = Int64(ctx.item) * PAIR_ROWS + ctx.cta_rank * HEADS + head_of(ctx.thread)
    return (values.iterator + row).load()


@cute.jit
def launch_heads(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Launch delta, dQ and dKV on `stream`.

    Args:
        arguments: those of `Operands`, then scale, and the number of pairs, which is not used: a
            cluster takes one query.
    """
    count = len(Operands._fields)
    x, scale = Operands(*arguments[:count]), arguments[count]
    launch_delta(x.do, x.out, x.delta, stream)
    make, swizzle = tensor_map.create_tensor_map_tiled_from_view, tensor_map.TensorMapSwizzle.s128b
    heads_kernel(
        make(x.q, box_dims=(HEADS, BOX_DIMS), swizzle=swizzle),
        make(x.do, box_dims=(HEADS, BOX_DIMS), swizzle=swizzle),
        make(x.kv, box_dims=(1, BOX_DIMS), swizzle=swizzle),
        x.lse,
        x.delta,
        x.indices,
        x.topk_length,
        x.dq,
        x.dkv,
        scale,
        plan,
    ).launch(
        grid=[x.topk_length.shape[0] * CLUSTER, 1, 1],
        block=[plan.threads, 1, 1],
        cluster=[CLUSTER, 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
    )


def compile_heads(plan: HeadsPlan) -> Any:
    """Compile `launch_heads`."""
    return compile_launch(
        SM100, launch_heads, plan, *fake_operands(PAIR_ROWS), Float32(1.0), Int32(1)
    )
