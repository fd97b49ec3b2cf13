"""Sums over heads at the slots of each query, for Hopper: a CTA takes a query at a time, or a part.

gather                | consumer 0                  | consumer 1
--------------------- | --------------------------- | ---------------------------
a tile's rows, piece  | K Q^T of tile 0             |
by piece; with a      | exponentials, sums          | K Q^T of tile 1
query's first, its Q  | K Q^T of tile 2             | exponentials, sums
"""

from typing import Any

import cutlass
from cutlass import Float32, GridConstant, Int32, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl.arena import Arena, allocate, initialise_barriers
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer_training.sm90.head_sums.add import Adder, add_all
from flashdsa.kernels.indexer_training.sm90.head_sums.context import Context
from flashdsa.kernels.indexer_training.sm90.head_sums.gather import LOG2_E, Gatherer, gather_all
from flashdsa.plan.row_tiles import CHUNK_COLUMNS


@cute.kernel
def head_sums_kernel(
    q_map: GridConstant[tensor_map.TensorMap],
    keys: cute.Tensor,
    indices: cute.Tensor,
    topk_length: cute.Tensor,
    lse: cute.Tensor,
    attn_sink: cute.Tensor,
    out: cute.Tensor,
    sm_scale: Float32,
    plan: cutlass.Constexpr,
):
    """One CTA; arguments as in `launch_head_sums`."""
    thread, _, _ = cute.arch.thread_idx()
    arena = allocate(plan)
    initialise_barriers(arena, thread)
    cute.arch.sync_threads()
    group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP_SIZE // WARP_SIZE)
    if group == 0:
        cute.arch.setmaxregister_decrease(plan.gather.registers)
        ctx = locate(arena, indices, topk_length, keys)
        gather_all(Gatherer(ctx, q_map.get_ptr(), keys, lse, attn_sink))
    else:
        cute.arch.setmaxregister_increase(plan.add.registers)
        ctx = locate(arena, indices, topk_length, keys)
        add_all(Adder(ctx, out, sm_scale * LOG2_E, group - 1))


@cute.jit
def locate(
    arena: Arena, indices: cute.Tensor, topk_length: cute.Tensor, keys: cute.Tensor
) -> Context:
    """This thread's context."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    num_keys = Int32(keys.shape[0])
    return Context(arena, indices, topk_length, num_keys, cta, num_ctas, thread % WARPGROUP_SIZE)


@cute.jit
def launch_head_sums(
    q: cute.Tensor,
    keys: cute.Tensor,
    indices: cute.Tensor,
    topk_length: cute.Tensor,
    lse: cute.Tensor,
    attn_sink: cute.Tensor,
    out: cute.Tensor,
    sm_scale: Float32,
    num_ctas: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch on `stream`.

    Args:
        q: (S, H, width) bf16, H at most plan.num_heads. keys: (S_kv, width) bf16, S_kv at least 1.
        indices: (S, topk) int32. topk_length: (S,) int32, or (0,): every slot counts.
        lse: (S, H) fp32, natural, without sinks.
        attn_sink: (H,) fp32, or (0,): none.
        out: (S, topk) fp32, written.
        num_ctas: at most the tiles of all queries; best the number that runs at once.
    """
    q_map = tensor_map.create_tensor_map_tiled_from_view(
        q,
        box_dims=(1, plan.num_heads, CHUNK_COLUMNS),
        stride_order=(2, 1, 0),
        swizzle=tensor_map.TensorMapSwizzle.s128b,
    )
    head_sums_kernel(q_map, keys, indices, topk_length, lse, attn_sink, out, sm_scale, plan).launch(
        grid=[num_ctas, 1, 1], block=[plan.threads, 1, 1], stream=stream, min_blocks_per_mp=1
    )
