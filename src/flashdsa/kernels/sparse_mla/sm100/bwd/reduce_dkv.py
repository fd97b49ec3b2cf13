"""Role reduce: dO into TMEM; each part of dKV to global memory as soon as it is computed.

A part leaves in slices of 4 KiB: TMEM -> registers (thread = lane = dim) -> a slot of the ring ->
one bulk reduce-add for each valid row. Nothing else writes to dKV. The deterministic variant copies
to a row of the slot's own instead, where nothing is added: see `ordered_sum.py`.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Vector, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.smem import load_words, store_float
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.sparse_mla.sm100.bwd.context import (
    Context,
    arrive_after_tmem,
    barrier_at,
    lanes_at,
    load_lane,
    shared_at,
    wait_for_mma,
)
from flashdsa.kernels.sparse_mla.sm100.bwd.mma import owned_parity, owns_rope
from flashdsa.kernels.sparse_mla.sm100.bwd.plan import (
    B_H,
    B_TOPK,
    BOX_DIMS,
    D_QK,
    D_V,
    FP32,
)

NAMED_BARRIER = 2


class Reducer(NamedTuple):
    """Reads dkv and rows, owns the ring; signals do_stored, dkv_free, rows_free."""

    c: Context
    dkv: Any  # (S_kv, 576) fp32, device memory
    slots: Any  # pointer to the row of the query's first slot, or None: add to dkv


@cute.jit
def store_do(c: Context) -> None:
    """dO from shared memory into TMEM: thread = lane = head."""
    cute.arch.mbarrier_wait(barrier_at(c, "do_full"), 0)
    for box in cutlass.range_constexpr(c.plan.dims // BOX_DIMS):
        at = shared_at(c, "do") + box * (B_H * BOX_DIMS * 2)
        words = []
        for unit in cutlass.range_constexpr(BOX_DIMS // 8):
            got = load_words(at + swizzled_128(c.thread, unit), Int32)
            words += [got[i] for i in range(4)]
        prims.tcgen05_st(
            "32x32b",
            lanes_at(c, "do", Int32, box * (BOX_DIMS // 2)),
            Vector.from_elements(words, Int32),
        )
    prims.tcgen05_wait("store")
    arrive_after_tmem(barrier_at(c, "do_stored"))


@cute.jit
def send_slice(
    r: Reducer, slot: Int32, block: Int32, first_key: int, keys: int, dims: int, first_dim: Int32
) -> None:
    """The first warp: a slice's rows, lane = key, each with one bulk copy or reduce-add."""
    c = r.c
    key, place = c.thread % 32, block % c.plan.index_stages
    if c.thread < 32:
        if key < keys:
            rows = cute.recast_ptr(c.arena + c.plan.smem.offset("rows"), dtype=Int32)
            row = (rows + place * B_TOPK + first_key + key).load()
            if row >= 0:
                ring = c.arena + c.plan.smem.offset("ring")
                if cutlass.const_expr(r.slots is None):
                    prims.cp_reduce_async_bulk_global_shared_cta(
                        (r.dkv.iterator + Int64(row) * D_QK + first_dim).to_llvm_ptr(),
                        (ring + slot * c.plan.slot_bytes + key * (dims * FP32)).to_llvm_ptr(),
                        dims * FP32,
                        op=prims.CpReduceOp.ADD,
                        type=prims.CpReduceType.F32,
                    )
                else:
                    own = Int64(block * B_TOPK + first_key + key)
                    prims.cp_async_bulk_global_shared_cta(
                        (r.slots + own * D_QK + first_dim).to_llvm_ptr(),
                        (ring + slot * c.plan.slot_bytes + key * (dims * FP32)).to_llvm_ptr(),
                        dims * FP32,
                    )
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def send_part(
    r: Reducer, block: Int32, part: cutlass.Constexpr[int], parity: Int32, slot: Int32
) -> Int32:
    """One part of a block's dKV; returns the ring's next slot."""
    c, plan = r.c, r.c.plan
    wait_for_mma(barrier_at(c, "dkv_ready", part), parity)
    values = load_lane(c, "dkv", B_TOPK)
    arrive_after_tmem(barrier_at(c, "dkv_free", part))
    dims = plan.part_dims if part < 2 else plan.rope_dims
    dim, holds = c.thread, c.thread >= 0
    first_dim = c.rank * plan.dims + part * plan.part_dims
    if cutlass.const_expr(part == 2):
        # M = 64: rows 16 w ... 16 w + 15 lie in the first half of warp w's lanes (layout F).
        dim, holds = c.thread // 32 * 16 + c.thread % 32, c.thread % 32 < 16
        first_dim = Int32(D_V)
    keys = plan.slot_bytes // (dims * FP32)
    for first_key in cutlass.range_constexpr(0, B_TOPK, keys):
        # The slot is free: see the wait below, which came before the last barrier.
        at = shared_at(c, "ring") + slot * plan.slot_bytes + dim * FP32
        if holds:
            for key in cutlass.range_constexpr(keys):
                store_float(at + key * (dims * FP32), values[first_key + key])
        # generic writes above -> the bulk copy reads through the async proxy
        cute.arch.fence_proxy("async.shared", space="cta")
        # All slices but the latest ring_slots - 2 have left the ring, so the slot behind this
        # one is free; the barrier tells the other warps, and that this slot is complete.
        if c.thread < 32:
            cute.arch.cp_async_bulk_wait_group(plan.ring_slots - 2, read=True)
        cute.arch.barrier(barrier_id=NAMED_BARRIER, number_of_threads=WARPGROUP_SIZE)
        send_slice(r, slot, block, first_key, keys, dims, first_dim)
        slot += 1
        if slot == plan.ring_slots:
            slot = Int32(0)
    return slot


@cute.jit
def reduce_block(r: Reducer, block: Int32, slot: Int32) -> Int32:
    """All parts of a block; returns the ring's next slot."""
    c, plan = r.c, r.c.plan
    place = block % plan.index_stages
    cute.arch.mbarrier_wait(barrier_at(c, "rows_full", place), (block // plan.index_stages) & 1)
    slot = send_part(r, block, 0, block & 1, slot)
    slot = send_part(r, block, 1, block & 1, slot)
    if owns_rope(c.rank, block):
        slot = send_part(r, block, 2, owned_parity(block), slot)
    cute.arch.sync_warp()
    if c.thread % 32 == 0:
        cute.arch.mbarrier_arrive(barrier_at(c, "rows_free", place))
    return slot


@cute.jit
def reduce_all(r: Reducer) -> None:
    """Every block of the query."""
    slot = Int32(0)
    for block in cutlass.range(r.c.num_blocks, unroll=1):
        slot = reduce_block(r, block, slot)


@cute.jit
def finish(r: Reducer) -> None:
    """Before the CTA ends: what it added has been added."""
    if r.c.thread < 32:
        cute.arch.cp_async_bulk_wait_group(0)
