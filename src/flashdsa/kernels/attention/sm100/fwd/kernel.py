"""The forward of sparse MLA for Blackwell: a pair of CTAs takes 128 rows of Q, 64 keys at a time.

load                  | mma (first CTA)           | softmax
--------------------- | ------------------------- | -------------------------------------------
Q                     |                           | Q -> TMEM
K[0], K[1], K[2]      | S(0) = Q K^T              |
K[3], K[4] over Q     |                           | S(0), both halves of the dims -> P(0)
                      | S(i+1) = Q K^T            | P(i), O scaled where maxima grew
K[i+5]                | O += P(i) V               | S(i+1) -> P(i+1)
                      |                           | O -> device memory
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, GridConstant, Int32, cute
from cutlass.experimental import primitives as prims
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl import cta_pair, fake_tensors, grids, pipeline, registers, tmem, umma_issue
from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.static import Static
from flashdsa.hw import SM100, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention import mend, union_slots
from flashdsa.kernels.attention.fake_operands import fake_lists, fake_max_logits, fake_operands
from flashdsa.kernels.attention.lists import Lists
from flashdsa.kernels.attention.operands import split
from flashdsa.kernels.attention.sm100.core.tile import BOX_DIMS, CLUSTER, PAIR_ROWS
from flashdsa.kernels.attention.sm100.fwd import load, softmax
from flashdsa.kernels.attention.sm100.fwd.plan import BOX_BYTES, P_STAGES, ROWS, FwdPlan
from flashdsa.kernels.attention.sm100.fwd.products import Products, products_of
from flashdsa.kernels.attention.union import launch_union


class Issuer(NamedTuple):
    """Waits for operands and for accumulators that were read; commits to barriers of both CTAs."""

    ctx: load.Context
    static: Static

    @property
    def products(self) -> Products:
        return self.static.value

    @property
    def keys(self) -> pipeline.RingConsumer:
        """Tiles of keys, in the states of `Context.keys_at`."""
        return pipeline.RingConsumer(self.ctx.memory.kv_full, self.ctx.memory.kv_free)


@cute.jit
def issue_scores(role: Issuer, tile: Int32) -> None:
    """Issue Q K^T of a tile."""
    ctx = role.ctx
    at = ctx.keys_at(tile)
    # kv_full: both CTAs' gathers have filled the tile's stage; it stays until kv_free, which is
    # committed after P V.
    role.keys.wait(at)
    tmem.after_sync()
    offset = at.stage * ctx.plan.tile.bytes
    umma_issue.issue(role.products.qk, ctx.memory.base, ctx.tmem, True, 0, offset)
    umma_issue.issue(role.products.qk_rope, ctx.memory.base, ctx.tmem, False, 0, offset)
    umma_issue.commit_to_pair(ctx.memory.s_ready)


@cute.jit
def issue_values(role: Issuer, tile: Int32) -> None:
    """Issue P V of a tile, added to O."""
    ctx = role.ctx
    at = ctx.keys_at(tile)
    p_offset = tile % P_STAGES * BOX_BYTES
    kv_offset = at.stage * ctx.plan.tile.bytes
    for product in role.products.pv:
        umma_issue.issue(product, ctx.memory.base, ctx.tmem, tile == 0, p_offset, kv_offset)
    if tile + role.keys.stages < ctx.num_tiles:
        # Only if a tile comes into the stage: an arrival that nobody waits for might come to a CTA
        # that has ended.
        umma_issue.commit_to_pair(role.keys.empty, at.stage)
    umma_issue.commit_to_pair(ctx.memory.p_free, tile % P_STAGES)


@cute.jit
def issue_all(role: Issuer) -> None:
    """One thread: issue every tile of the item."""
    ctx = role.ctx
    # q_stored, its only time: every warp of both CTAs has stored its lanes of Q.
    tmem.wait_for_tmem(ctx.memory.q_stored, 0)
    issue_scores(role, Int32(0))
    for tile in cutlass.range(ctx.num_tiles, unroll=1):
        if tile + 1 < ctx.num_tiles:
            # s_free, time i: both CTAs have read the scores that the next ones overwrite.
            tmem.wait_for_tmem(ctx.memory.s_free, tile)
            issue_scores(role, tile + 1)
        # p_ready, time i: P of both CTAs is in shared memory until p_free; O is against its maxima.
        tmem.wait_then_tcgen05(ctx.memory.p_ready, tile)
        issue_values(role, tile)


SOFTMAX, LOAD, MMA = range(3)
"""Warpgroups, in the plan's order of roles."""


@cute.kernel
def forward_kernel(
    q_map: GridConstant[tensor_map.TensorMap],
    kv_map: GridConstant[tensor_map.TensorMap],
    kv_rope_map: GridConstant[tensor_map.TensorMap],
    out_map: GridConstant[tensor_map.TensorMap],
    num_rows: Int32,
    slots: cute.Tensor,
    num_slots: cute.Tensor,
    members: Any,
    attn_sink: cute.Tensor,
    lse: cute.Tensor,
    max_logits: cute.Tensor,
    sm_scale: Float32,
    plan: cutlass.Constexpr,
):
    """One CTA of a pair; arguments as in `launch_pairs`."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = Memory.allocate(plan)
    hold = cta_pair.enter_pair(memory, thread, warp, CLUSTER)

    # Each role computes its own coordinates: values shared by all would be live in every role.
    group = warp // (WARPGROUP_SIZE // WARP_SIZE)
    if group == SOFTMAX:
        registers.take_registers(plan, "softmax")
        ctx = locate(slots, num_slots, memory)
        scale = softmax.make_scale(sm_scale * softmax.LOG2_E)
        softmax.store_query(ctx)
        row = softmax.softmax_all(softmax.Softmax(ctx, scale))
        softmax.write_rows(
            softmax.Output(ctx, out_map.get_ptr(), lse, max_logits, attn_sink, scale), row
        )
    elif group == LOAD:
        registers.take_registers(plan, "load")
        ctx = locate(slots, num_slots, memory)
        loader = load.Loader(
            ctx, q_map.get_ptr(), kv_map.get_ptr(), kv_rope_map.get_ptr(), slots, members, num_rows
        )
        if ctx.thread // WARP_SIZE == 1:
            if prims.elect_sync():
                load.load_query(loader)
            cute.arch.sync_warp()
        load.load_all(loader)
    else:
        registers.take_registers(plan, "mma")
        ctx = locate(slots, num_slots, memory)
        if ctx.thread // WARP_SIZE == 0 and ctx.cta_rank == load.LEADER:
            if prims.elect_sync():
                issue_all(Issuer(ctx, Static(products_of(plan))))
            cute.arch.sync_warp()
    cta_pair.leave_pair(plan, hold, warp, CLUSTER, relaxed=True)


@cute.jit
def locate(slots: cute.Tensor, num_slots: cute.Tensor, memory: Memory) -> load.Context:
    """This thread's context."""
    thread, block, _ = grids.place_in_grid()
    item, keys = block // CLUSTER, memory.plan.tile.keys
    count = union_slots.slots_of(slots, num_slots, item)
    return load.Context(
        memory=memory,
        tmem=memory.tmem_start.pointer(Int32).load(),
        cta_rank=cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()),
        item=item,
        num_slots=count,
        num_tiles=cutlass.max((count + keys - 1) // keys, Int32(1)),
        thread=thread % WARPGROUP_SIZE,
    )


@cute.jit
def launch_pairs(
    q: cute.Tensor,
    kv: cute.Tensor,
    kv_rope: cute.Tensor,
    slots: cute.Tensor,
    num_slots: cute.Tensor,
    members: Any,
    attn_sink: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    max_logits: cute.Tensor,
    sm_scale: Float32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch a pair of CTAs an item, on `stream`.

    Args:
        q: (S, H, 576) bf16 with H = plan.group_heads. kv: (S_kv, 576) bf16; (S_kv, 512) of keys
            that lie apart. kv_rope: their RoPE columns (S_kv, 64) bf16; otherwise kv.
        slots: (items, any) int32. num_slots: (items,) int32, or (0,): every slot counts.
        members: (items, any) uint8, bit i: query i of the item names the slot's row; None: the item
            is one query. attn_sink: (H,) fp32, or (0,): none.
        out: (S, H, 512) bf16, written. lse: (S, H) fp32, written.
        max_logits: (S * H,) fp32, written, or (0,): not asked for.
    """
    wide, narrow = tensor_map.TensorMapSwizzle.s128b, tensor_map.TensorMapSwizzle.s64b
    make = tensor_map.create_tensor_map_tiled_from_view
    tile, rows = plan.tile, lse.shape[0] * lse.shape[1]
    flat_q = cute.make_tensor(
        q.iterator, cute.make_layout((rows, tile.d_qk), stride=(tile.d_qk, 1))
    )
    flat_out = cute.make_tensor(
        out.iterator, cute.make_layout((rows, tile.d_v), stride=(tile.d_v, 1))
    )
    q_map, out_map = (make(x, box_dims=(ROWS, BOX_DIMS), swizzle=wide) for x in (flat_q, flat_out))
    kv_map = make(kv, box_dims=(1, BOX_DIMS), swizzle=wide)
    rope_map = make(kv_rope, box_dims=(1, tile.own_rope_dims), swizzle=narrow)
    maps, of_items = (q_map, kv_map, rope_map, out_map), (slots, num_slots, members)
    results = attn_sink, lse, max_logits, sm_scale
    made = forward_kernel(*maps, Int32(kv.shape[0]), *of_items, *results, plan)
    ctas = (rows + PAIR_ROWS - 1) // PAIR_ROWS * CLUSTER
    grids.launch_plan(made, plan, ctas, stream, cluster=CLUSTER, use_pdl=False)


@cute.jit
def launch_forward(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Launch the forward on `stream`; the kernel for the groups' unions comes first.

    Args:
        arguments: those of `Operands` with H = plan.group_heads. Then
            max_logits: (S * H,) fp32, written, or (0,): not asked for.
        then of keys that lie apart, whose kv is (S_kv, 512),
            kv_rope: (S_kv, 64) bf16.
        and of a group
            rows, members: (groups, plan.group * topk) int32 and uint8, written.
            counts: (groups,) int32, written.
    """
    x, (max_logits, *of_group) = split(arguments)
    kv_rope = None
    if cutlass.const_expr(plan.kv_apart):
        kv_rope, *of_group = of_group
    slots = x.indices, x.topk_length, None
    if cutlass.const_expr(plan.group > 1):
        lists = Lists(*of_group)
        launch_union(x.indices, x.topk_length, lists, Int32(x.kv.shape[0]), plan.group, stream)
        slots = lists.rows, lists.counts, lists.members
    keys = x.kv, x.kv if cutlass.const_expr(kv_rope is None) else kv_rope
    results = x.out, x.lse, max_logits
    launch_pairs(x.q, *keys, *slots, x.attn_sink, *results, x.sm_scale, plan, stream)
    if cutlass.const_expr(plan.group > 1):
        mend.launch_mend_out(x, plan.group, None, stream, kv_rope=kv_rope)


def compile_forward(plan: FwdPlan) -> Any:
    """Compile `launch_forward`."""
    operands = fake_operands(plan.group_heads)
    apart: tuple[Any, ...] = ()
    if plan.kv_apart:
        keys, tile = operands.kv.shape[0], plan.tile
        operands = operands._replace(kv=fake_tensors.fake_tensor(BFloat16, (keys, tile.d_v)))
        apart = (fake_tensors.fake_tensor(BFloat16, (keys, tile.d_qk - tile.d_v)),)
    lists = fake_lists(plan.group)[:3] if plan.group > 1 else ()
    further = fake_max_logits(), *apart, *lists
    return compile_launch(SM100, launch_forward, plan, *operands, *further)
