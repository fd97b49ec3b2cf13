"""Role reduce: dO into TMEM; each part of dKV to global memory as soon as it is computed.

A part leaves in slices of 4 KiB: TMEM -> registers (thread = lane = dim) -> a slot of the ring ->
one bulk reduce-add for each valid row. Nothing else writes to dKV. The deterministic variant copies
to the slot's own row instead, and adds nothing: see `ordered_sum.py`.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Vector, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl import pipeline, smem, swizzle, tmem
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm100.bwd.load import Context, load_lane, store_lane
from flashdsa.kernels.attention.sm100.bwd.mma import owned_before, owns_rope
from flashdsa.kernels.attention.sm100.core.tile import BF16, BOX_DIMS, FP32, PAIR_ROWS

NAMED_BARRIER = 2
WARPS = WARPGROUP_SIZE // WARP_SIZE


class Reducer(NamedTuple):
    """Reads dkv and rows, owns the ring; signals do_stored, dkv_free, rows_free."""

    ctx: Context
    dkv: Any  # (S_kv, 576) fp32, device memory
    slots: Any  # pointer to the row of the query's first slot, or None: add to dkv

    @property
    def rows(self) -> pipeline.RingConsumer:
        """Row numbers: the use of the ring is the block's running number."""
        return pipeline.RingConsumer(self.ctx.memory.rows_full, self.ctx.memory.rows_free)


@cute.jit
def store_do(ctx: Context) -> None:
    """Store dO from shared memory into TMEM: thread = lane = head."""
    # do_full of this item: TMA has brought dO, which stays for dKV. It came after the last dP of
    # the item before, so dO's columns may be overwritten.
    tmem.wait_then_tcgen05(ctx.memory.do_full, ctx.turn.items_before)
    for box in cutlass.range_constexpr(ctx.plan.tile.boxes):
        at = ctx.memory.do.address() + box * (PAIR_ROWS * BOX_DIMS * BF16)
        words = []
        for unit in cutlass.range_constexpr(BOX_DIMS // 8):
            got = smem.load_words(at + swizzle.swizzled_128(ctx.thread, unit), Int32)
            words += [got[i] for i in range(4)]
        store_lane(ctx, "do", Vector.from_elements(words, Int32), box * (BOX_DIMS // 2))
    tmem.wait_stored()
    tmem.arrive_after_tcgen05(ctx.memory.do_stored)


@cute.jit
def send_slice(
    role: Reducer, slot: Int32, block: Int32, first_key: int, keys: int, dims: int, first_dim: Int32
) -> None:
    """Send a slice's rows, a quarter of them a warp, each with one bulk copy or reduce-add. Only
    one lane of a warp issues at a time, so four warps take a quarter of the time."""
    ctx = role.ctx
    lane = ctx.thread % WARP_SIZE
    key = ctx.thread // WARP_SIZE * (keys // WARPS) + lane
    if lane < keys // WARPS:
        rows = ctx.memory.rows.pointer(Int32)
        stage = role.rows.state(ctx.number(block)).stage
        row = (rows + stage * ctx.plan.tile.keys + first_key + key).load()
        if row >= 0:
            ring = ctx.memory.ring.bytes()
            if cutlass.const_expr(role.slots is None):
                prims.cp_reduce_async_bulk_global_shared_cta(
                    (role.dkv.iterator + Int64(row) * ctx.plan.tile.d_qk + first_dim).to_llvm_ptr(),
                    (ring + slot * ctx.plan.slot_bytes + key * (dims * FP32)).to_llvm_ptr(),
                    dims * FP32,
                    op=prims.CpReduceOp.ADD,
                    type=prims.CpReduceType.F32,
                )
            else:
                own = Int64(block * ctx.plan.tile.keys + first_key + key)
                prims.cp_async_bulk_global_shared_cta(
                    (role.slots + own * ctx.plan.tile.d_qk + first_dim).to_llvm_ptr(),
                    (ring + slot * ctx.plan.slot_bytes + key * (dims * FP32)).to_llvm_ptr(),
                    dims * FP32,
                )
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def send_slices(
    role: Reducer,
    block: Int32,
    values: Any,
    slot: Int32,
    dims: cutlass.Constexpr[int],
    dim: Int32,
    first_dim: Int32,
    holds: Any,
) -> Int32:
    """Send one part of a block through the ring; return the ring's next slot. `dims`, `first_dim`:
    of the part. `dim`: this thread's, if `holds`; `values`: its keys'."""
    ctx, plan = role.ctx, role.ctx.plan
    keys = plan.slot_bytes // (dims * FP32)
    for first_key in cutlass.range_constexpr(0, ctx.plan.tile.keys, keys):
        # The slot is free: see the wait below, which came before the last barrier.
        at = ctx.memory.ring.address() + slot * plan.slot_bytes + dim * FP32
        if holds:
            for key in cutlass.range_constexpr(keys):
                smem.store_float(at + key * (dims * FP32), values[first_key + key])
        # generic writes above -> the bulk copy reads through the async proxy
        cute.arch.fence_proxy("async.shared", space="cta")
        # This lane's copies of all slices but the latest ring_slots - 2 have left the ring; every
        # lane's have after the barrier, so the slot after this one is free, and this slot is
        # complete.
        cute.arch.cp_async_bulk_wait_group(plan.ring_slots - 2, read=True)
        cute.arch.barrier(barrier_id=NAMED_BARRIER, number_of_threads=WARPGROUP_SIZE)
        send_slice(role, slot, block, first_key, keys, dims, first_dim)
        slot = pipeline.next_stage(slot, plan.ring_slots)
    return slot


@cute.jit
def send_part(
    role: Reducer, block: Int32, part: cutlass.Constexpr[int], number: Int32, slot: Int32
) -> Int32:
    """Send one part of a block's dKV; return the ring's next slot. `number`: how many of these
    parts the CTA has computed before."""
    ctx, plan = role.ctx, role.ctx.plan
    # dkv_ready of the part: its MMAs are done; the columns may be read until dkv_free.
    tmem.wait_then_tcgen05(ctx.memory.dkv_ready, number, part)
    values = load_lane(ctx, "dkv", ctx.plan.tile.keys)
    tmem.arrive_after_tcgen05(ctx.memory.dkv_free, part)
    dims = plan.part_dims if part < 2 else plan.tile.rope_dims
    dim, holds = ctx.thread, ctx.thread >= 0
    first_dim = ctx.cta_rank * plan.tile.dims + part * plan.part_dims
    if cutlass.const_expr(part == 2):
        # M = 64: rows 16 w ... 16 w + 15 lie in the first half of warp w's lanes (layout F).
        lane = ctx.thread % WARP_SIZE
        dim, holds = ctx.thread // WARP_SIZE * 16 + lane, lane < 16
        first_dim = Int32(ctx.plan.tile.d_v)
    return send_slices(role, block, values, slot, dims, dim, first_dim, holds)


@cute.jit
def reduce_block(role: Reducer, block: Int32, slot: Int32) -> Int32:
    """Send all parts of a block; return the ring's next slot."""
    ctx, number = role.ctx, role.ctx.number(block)
    at = role.rows.state(number)
    # rows_full: the load warp has stored the block's numbers; they stay until rows_free.
    role.rows.wait(at)
    slot = send_part(role, block, 0, number, slot)
    slot = send_part(role, block, 1, number, slot)
    if owns_rope(ctx.cta_rank, number):
        slot = send_part(role, block, 2, owned_before(number), slot)
    cute.arch.sync_warp()
    if ctx.thread % WARP_SIZE == 0:
        role.rows.release(at.stage)
    return slot


@cute.jit
def reduce_item(role: Reducer, slot: Int32) -> Int32:
    """Send every block of an item; return the ring's next slot."""
    for block in cutlass.range(role.ctx.num_blocks, unroll=1):
        slot = reduce_block(role, block, slot)
    return slot


def finish() -> None:
    """Wait, before the CTA ends, until the bulk operations that it issued are done."""
    cute.arch.cp_async_bulk_wait_group(0)
