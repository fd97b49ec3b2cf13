"""Role reduce: each part of dKV, merged with the peer's, to global memory as soon as it is
computed.

A part is TMEM -> registers (lane = key) -> sdkv. The owner of the block adds what it reads in the
peer's sdkv, and issues one bulk reduce-add a valid row; odd blocks belong to CTA 0, even ones to
CTA 1. Nothing else writes to dKV.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl import tmem
from flashdsa.dsl.cluster import peer_address
from flashdsa.dsl.smem import VECTOR, store_words
from flashdsa.dsl.tmem import arrive_after_tcgen05, wait_then_tcgen05
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm100.bwd.load import load_lane
from flashdsa.kernels.attention.sm100.bwd.mma import owned_before, owns_rope
from flashdsa.kernels.attention.sm100.bwd.reduce_dkv import NAMED_BARRIER, WARPS, Reducer
from flashdsa.kernels.attention.sm100.core.tile import FP32
from workbench.lab.kernels.split_heads.load import lane_of, load_words_at_peer, peer_of
from workbench.lab.kernels.split_heads.plan import PARTS

COLUMNS = 32
"""Columns that are read at once, at most."""


def part_dims(role: Reducer, part: int) -> int:
    """Dims of a part: the last one has the RoPE dims."""
    return role.ctx.plan.tile.rope_dims if part == PARTS - 1 else role.ctx.plan.part_dims


@cute.jit
def stage_part(role: Reducer, part: cutlass.Constexpr[int], merge: cutlass.Constexpr[bool]) -> None:
    """Store this thread's key and dims of a part to sdkv; their sums with the peer's if asked
    for."""
    ctx = role.ctx
    own_dims = part_dims(role, part) // WARPS
    first_dim = ctx.thread // WARP_SIZE * own_dims
    row = ctx.memory.sdkv.address() + lane_of(ctx) * ctx.plan.part_row_bytes + first_dim * FP32
    there = peer_address(row, peer_of(ctx))
    region = "dkv_rope" if part == PARTS - 1 else "dkv"
    for first in cutlass.range_constexpr(0, own_dims, COLUMNS):
        values = load_lane(ctx, region, min(own_dims, COLUMNS), first)
        for unit in cutlass.range_constexpr(min(own_dims, COLUMNS) // VECTOR):
            four = [Float32(values[VECTOR * unit + i]) for i in range(VECTOR)]
            offset = (first + VECTOR * unit) * FP32
            if cutlass.const_expr(merge):
                got = load_words_at_peer(there + offset, Float32)
                four = [four[i] + got[i] for i in range(VECTOR)]
            store_words(row + offset, [value.bitcast(Int32) for value in four])


@cute.jit
def add_rows(role: Reducer, part: cutlass.Constexpr[int], block: Int32) -> None:
    """Add a part's valid rows, a quarter of them a warp, and wait until they have landed."""
    ctx, tile = role.ctx, role.ctx.plan.tile
    if lane_of(ctx) < tile.keys // WARPS:
        key = ctx.thread // WARP_SIZE * (tile.keys // WARPS) + lane_of(ctx)
        at = role.rows.state(block).stage * tile.keys + key
        row = (ctx.memory.rows.pointer(Int32) + at).load()
        if row >= 0:
            first = part * ctx.plan.part_dims
            prims.cp_reduce_async_bulk_global_shared_cta(
                (role.dkv.iterator + Int64(row) * tile.d_qk + first).to_llvm_ptr(),
                (ctx.memory.sdkv.bytes() + key * ctx.plan.part_row_bytes).to_llvm_ptr(),
                part_dims(role, part) * FP32,
                op=prims.CpReduceOp.ADD,
                type=prims.CpReduceType.F32,
            )
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def merge_part(role: Reducer, part: cutlass.Constexpr[int], block: Int32, owner: Any) -> None:
    """Merge one part of a block's dKV, and add it if this CTA owns the block."""
    ctx, memory, peer = role.ctx, role.ctx.memory, peer_of(role.ctx)
    # Parts that this CTA has merged, or handed over, in blocks of the same owner before.
    number = owned_before(block) * PARTS + part
    # dkv_ready of the part: its MMAs are done, whose columns may be read until dkv_done. They were
    # issued after dkv_done of the part before: its rows have landed, so sdkv may be written.
    wait_then_tcgen05(memory.dkv_ready, block, part)
    if owner:
        # merge_full by the peer's threads: their sdkv holds the part until merge_free.
        memory.merge_full.wait_round(number)
        # This wait followed dkv_ready's, which says that the columns may be read.
        tmem.after_sync()
        stage_part(role, part, True)
        cute.arch.sync_warp()
        if lane_of(ctx) == 0:
            memory.merge_free.arrive_at_peer(peer)
        # generic writes above -> the bulk reduce-adds read through the async proxy
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=NAMED_BARRIER, number_of_threads=WARPGROUP_SIZE)
        add_rows(role, part, block)
    else:
        stage_part(role, part, False)
        memory.merge_full.arrive_at_peer_for_shared(peer)
        # merge_free by the peer's warps: they have read sdkv, which may be written again.
        memory.merge_free.wait_round(number)
    arrive_after_tcgen05(memory.dkv_done, part)


@cute.jit
def merge_all(role: Reducer) -> None:
    """Merge every block."""
    for block in cutlass.range(role.ctx.num_blocks, unroll=1):
        merge_block(role, block)


@cute.jit
def merge_block(role: Reducer, block: Int32) -> None:
    """Merge all parts of a block."""
    at = role.rows.state(block)
    # rows_full: the load warp has stored the block's numbers; they stay until rows_free.
    role.rows.wait(at)
    for part in cutlass.range_constexpr(PARTS):
        merge_part(role, part, block, owns_rope(role.ctx.cta_rank, block))
    cute.arch.sync_warp()
    if lane_of(role.ctx) == 0:
        role.rows.release(at.stage)
