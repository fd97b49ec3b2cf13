"""Role load: row numbers, the gather of each block's rows, and Q and dO once."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.gather4 import gather4
from flashdsa.kernels.sparse_mla.sm100.bwd.context import Context, barrier_at, shared_at
from flashdsa.kernels.sparse_mla.sm100.bwd.plan import B_H, B_TOPK, BOX_DIMS, D_V

ROWS_A_GATHER = 4


class Loader(NamedTuple):
    """Fills q, do, kv and rows. Signals q_full, do_full, kv_full, rows_full."""

    c: Context
    q_map: Any  # (S * 128, 576), boxes of 128 x 64
    do_map: Any  # (S * 128, 512), likewise
    kv_map: Any  # (S_kv, 576), boxes of 1 x 64
    kv_rope_map: Any  # the same, boxes of 1 x 32
    indices: Any  # (S, topk) int32
    num_slots: Int32  # slots of this query that may be valid
    num_rows: Int32  # S_kv


@cute.jit
def load_query(r: Loader) -> None:
    """One thread: Q's and dO's dims of this CTA, as boxes of 64."""
    c, plan = r.c, r.c.plan
    first_row = c.query * B_H
    box_bytes = B_H * BOX_DIMS * 2
    for name, full, tensor_map in (("q", "q_full", r.q_map), ("do", "do_full", r.do_map)):
        barrier = barrier_at(c, full)
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, plan.barrier(full).transaction_bytes)
        at = c.arena + plan.smem.offset(name)
        for box in cutlass.range_constexpr(plan.dims // BOX_DIMS):
            prims.cp_async_bulk_tensor_shared_cluster_global(
                (at + box * box_bytes).to_llvm_ptr(),
                tensor_map,
                [c.rank * plan.dims + box * BOX_DIMS, first_row],
                barrier.to_llvm_ptr(),
                [],
            )
    prims.cp_async_bulk_tensor_shared_cluster_global(
        (c.arena + plan.smem.offset("q_rope")).to_llvm_ptr(),
        r.q_map,
        [Int32(D_V), first_row],
        barrier_at(c, "q_full").to_llvm_ptr(),
        [],
    )


@cute.jit
def load_blocks(r: Loader) -> None:
    """One warp, lane = key: every block of the query."""
    c = r.c
    for block in cutlass.range(c.num_blocks, unroll=1):
        load_block(r, block)


@cute.jit
def load_block(r: Loader, block: Int32) -> None:
    """Which rows a block names, for the other roles; then the rows themselves."""
    c, plan = r.c, r.c.plan
    lane = c.thread % 32
    slot = block * B_TOPK + lane
    row = Int32(-1)
    if slot < r.num_slots:
        row = (r.indices.iterator + Int64(c.query) * r.indices.shape[1] + slot).load()
    if row >= r.num_rows:
        row = Int32(-1)
    if row < 0:
        row = Int32(-1)
    place = block % plan.index_stages
    cute.arch.mbarrier_wait(barrier_at(c, "rows_free", place), (block // plan.index_stages - 1) & 1)
    rows = cute.recast_ptr(c.arena + plan.smem.offset("rows"), dtype=Int32)
    (rows + place * B_TOPK + lane).store(row)
    # rows_full: every lane arrives behind its own store.
    cute.arch.mbarrier_arrive(barrier_at(c, "rows_full", place))

    stage = block % plan.kv_stages
    full = barrier_at(c, "kv_full", stage)
    # kv_free: dQ, the last MMA that reads the stage, has read the block before.
    cute.arch.mbarrier_wait(barrier_at(c, "kv_free", stage), (block // plan.kv_stages - 1) & 1)
    if lane == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(full, plan.kv_bytes)
    cute.arch.sync_warp()
    four = [cute.arch.shuffle_sync(row, (lane * ROWS_A_GATHER + i) % 32) for i in range(4)]
    if lane < B_TOPK // ROWS_A_GATHER:
        at = shared_at(c, "kv") + stage * plan.kv_bytes + lane * (ROWS_A_GATHER * BOX_DIMS * 2)
        for box in cutlass.range_constexpr(plan.dims // BOX_DIMS):
            gather4(
                at + box * (B_TOPK * BOX_DIMS * 2),
                r.kv_map,
                c.rank * plan.dims + box * BOX_DIMS,
                four,
                full,
            )
        rope_at = shared_at(c, "kv") + stage * plan.kv_bytes + plan.kv_value_bytes
        gather4(
            rope_at + lane * (ROWS_A_GATHER * plan.own_rope_dims * 2),
            r.kv_rope_map,
            D_V + c.rank * plan.own_rope_dims,
            four,
            full,
        )
    cute.arch.sync_warp()
