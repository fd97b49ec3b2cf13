"""The forward of sparse MLA for Hopper: a CTA takes 64 rows of Q, a work item, at a time.

Steps of two tiles of 64 keys; halves of the tiles are freed, and filled again, once they are read.

gather                | consumer0                   | consumer1
--------------------- | --------------------------- | ---------------------------------------
Q, both tiles         | S0 = Q K0^T                 |
                      | P0 = exp2(S0) -> shared     | S1 = Q K1^T
                      | O += P0 V0, low dims        | O += P0 V0, high dims, meanwhile
tile 0 low, high      |                             |     P1 = exp2(S1) -> shared
                      | O += P1 V1, low dims        | O += P1 V1, high dims
tile 1 high, low      |     then the next step's S0 |
"""

from typing import Any

import cutlass
from cutlass import Float32, GridConstant, Int32, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl.memory import initialise_barriers
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.lists import Lists
from flashdsa.kernels.attention.mend import launch_mend_out
from flashdsa.kernels.attention.operands import split
from flashdsa.kernels.attention.sm90.core.softmax import LOG2_E, make_scale
from flashdsa.kernels.attention.sm90.core.tile import CHUNK, ROWS
from flashdsa.kernels.attention.sm90.fwd.consumers import Consumer, consume0, consume1
from flashdsa.kernels.attention.sm90.fwd.context import FwdMemory, locate
from flashdsa.kernels.attention.sm90.fwd.gather import Gatherer, gather_all
from flashdsa.kernels.attention.union import launch_union

GATHER, CONSUMER0, CONSUMER1 = range(3)
"""Warpgroups, in the plan's order of roles."""


@cute.kernel
def forward_kernel(
    q_map: GridConstant[tensor_map.TensorMap],
    kv: cute.Tensor,
    slots: cute.Tensor,
    num_slots: cute.Tensor,
    members: Any,
    attn_sink: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    max_logits: cute.Tensor,
    sm_scale: Float32,
    plan: cutlass.Constexpr,
):
    """One CTA; arguments as in `launch_forward`.

    Args:
        slots, num_slots: indices and topk_length, or rows and counts of the groups' lists.
        members: of the lists; None: no group.
    """
    thread, _, _ = cute.arch.thread_idx()
    memory = FwdMemory.allocate(plan)
    initialise_barriers(memory, thread)
    cute.arch.sync_threads()
    group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP_SIZE // WARP_SIZE)
    # Each role computes its own coordinates: values shared by all would be live in every role.
    if group == GATHER:
        cute.arch.setmaxregister_decrease(plan.gather.registers)
        ctx = locate(lse, memory)
        gather_all(Gatherer(ctx, q_map.get_ptr(), kv, slots, num_slots, members))
    elif group == CONSUMER0:
        cute.arch.setmaxregister_increase(plan.consumer0.registers)
        ctx = locate(lse, memory)
        scale = make_scale(sm_scale * LOG2_E)
        consume0(Consumer(ctx, out, lse, max_logits, attn_sink, scale))
    else:
        cute.arch.setmaxregister_increase(plan.consumer1.registers)
        ctx = locate(lse, memory)
        scale = make_scale(sm_scale * LOG2_E)
        consume1(Consumer(ctx, out, lse, max_logits, attn_sink, scale))


@cute.jit
def launch_forward(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Launch the forward on `stream`; the kernel for the groups' unions comes first.

    Args:
        arguments: those of `Operands`, of a group with H = plan.group_heads. Then
            max_logits: (S * H,) fp32, written; of a plan without them (0,).
            num_ctas: at most the work items, which are S * ceil(H / 64) or the groups; best
            the number that runs at once.
        and of a group
            rows, members: (groups, plan.group * topk) int32 and uint8, written.
            counts: (groups,) int32, written.
    """
    x, (max_logits, num_ctas, *of_group) = split(arguments)
    make, wide = tensor_map.create_tensor_map_tiled_from_view, tensor_map.TensorMapSwizzle.s128b
    if cutlass.const_expr(plan.group > 1):
        lists = Lists(*of_group)
        launch_union(x.indices, x.topk_length, lists, Int32(x.kv.shape[0]), plan.group, stream)
        slots = lists.rows, lists.counts, lists.members
        rows, d_qk = x.q.shape[0] * plan.group_heads, plan.tile.d_qk
        flat = cute.make_tensor(x.q.iterator, cute.make_layout((rows, d_qk), stride=(d_qk, 1)))
        q_map = make(flat, box_dims=(ROWS, CHUNK), swizzle=wide)
    else:
        slots = x.indices, x.topk_length, None
        q_map = make(x.q, box_dims=(1, ROWS, CHUNK), stride_order=(2, 1, 0), swizzle=wide)
    results = x.out, x.lse, max_logits
    forward_kernel(q_map, x.kv, *slots, x.attn_sink, *results, x.sm_scale, plan).launch(
        grid=[num_ctas, 1, 1], block=[plan.threads, 1, 1], stream=stream, min_blocks_per_mp=1
    )
    if cutlass.const_expr(plan.group > 1):
        launch_mend_out(x, plan.group, stream)
