"""Kernels in which nothing orders what must be ordered, and the pair that the ISA orders."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from flashdsa.hw import SM100
from workbench.lab.kernels.majorness.operands import (
    THREADS,
    descriptors_of_tile,
    erase_b,
    fill_operands,
    pieces,
    tile_a,
    tile_b,
)
from workbench.lab.kernels.majorness.sm100 import kernel
from workbench.lab.kernels.majorness.sm100.plan import HazardPlan


def _mma(plan: HazardPlan, part: int, operands: tuple[Any, ...], accumulate: bool) -> None:
    """One MMA; each part has its own source lines, which findings then name."""
    if plan.ws:
        if part == 0:
            prims.tcgen05_mma_ws(plan.kind, *operands, accumulate)
        else:
            prims.tcgen05_mma_ws(plan.kind, *operands, accumulate)
    elif part == 0:
        prims.tcgen05_mma(plan.kind, "cta_1", *operands, accumulate)
    else:
        prims.tcgen05_mma(plan.kind, "cta_1", *operands, accumulate)


def _issue_part(plan: HazardPlan, tmem: Any, arena: Any, part: int) -> None:
    """The MMAs of one part, by one thread."""
    a = descriptors_of_tile(
        tile_a(arena, plan), plan.m, plan, plan.a_major, plan.cut, kernel.build_descriptor
    )
    halves = 2 if plan.variant == "shapes" and part == 1 else 1
    columns = plan.n // halves
    whole = pieces(tile_b(arena, plan), columns, plan.k, plan.cut)
    for half in range(halves):
        tile = whole[None, None, half, 0]
        b = descriptors_of_tile(
            tile, columns, plan, plan.b_major, plan.cut, kernel.build_descriptor
        )
        idesc = kernel.instruction_descriptor(plan, columns)
        d = prims.make_tmem_ptr(tmem + columns * half, Float32)
        for step in range(plan.steps):
            operands = (d, a[part][step], b[part][step], idesc)
            _mma(plan, part, operands, part > 0 or step > 0)


@cute.kernel
def hazard_kernel(s: cute.Tensor, do: cute.Tensor, d: cute.Tensor, plan: cutlass.Constexpr) -> None:
    """s (k, m), do (k, n): elements as unsigned integers; d (2: read back between the parts,
    result; 128 lanes, d_columns) fp32."""
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    shared = cutlass.memory.SmemAllocator()
    arena = shared.allocate(plan.smem_bytes, 1024)
    mbarriers = shared.allocate(Int64, 16)
    address = shared.allocate(Int32, 16)
    fill_operands(s, do, arena, plan)
    if cutlass.const_expr(plan.variant == "late-operand"):
        cute.arch.barrier()
        erase_b(arena, plan, plan.part_k)
    if tid == 0:
        cute.arch.mbarrier_init(mbarriers, 1)
        cute.arch.mbarrier_init(mbarriers + 1, 1)
    cute.arch.mbarrier_init_fence()
    if warp == 0:
        prims.tcgen05_alloc(address.to_llvm_ptr(), SM100.tmem_columns, group="cta_1")
        prims.tcgen05_relinquish_alloc_permit(group="cta_1")
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier()
    tmem = address.load()
    lanes = tmem + ((warp % 4) << 21)
    kernel.fill_tmem(lanes, plan.d_columns, kernel.UNWRITTEN)
    prims.tcgen05_fence("before_thread_sync")
    cute.arch.barrier()
    prims.tcgen05_fence("after_thread_sync")
    _run_variant(do, d, arena, mbarriers, tmem, plan)
    if cutlass.const_expr(plan.variant != "early-read"):
        kernel.read_out(d[1, None, None], tid, lanes, plan.d_columns)
    prims.tcgen05_fence("before_thread_sync")
    cute.arch.barrier()
    if warp == 0:
        prims.tcgen05_fence("after_thread_sync")
        prims.tcgen05_dealloc(prims.make_tmem_ptr(tmem, Float32), SM100.tmem_columns, group="cta_1")


@cute.jit
def _write_part_1(do: cute.Tensor, arena: cute.Pointer, plan: cutlass.Constexpr) -> None:
    """Part 1 of B into shared memory, by warps 1 to 3, fenced but behind no barrier."""
    tid, _, _ = cute.arch.thread_idx()
    s_b = tile_b(arena, plan)
    for i in cutlass.range(tid - 32, plan.n * plan.part_k, THREADS - 32):
        k = plan.part_k + i // plan.n
        s_b[i % plan.n, k] = do[k, i % plan.n]  # HAZARD: part 1 may be reading it already
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def _issue(
    parts: cutlass.Constexpr,
    commit: cutlass.Constexpr,
    arena: cute.Pointer,
    mbarriers: cute.Pointer,
    tmem: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Some parts by one thread of warp 0, and a commit to the first mbarrier if so wanted."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        if prims.elect_sync():
            prims.tcgen05_fence("after_thread_sync")
            for part in cutlass.range_constexpr(*parts):
                _issue_part(plan, tmem, arena, part)
            if cutlass.const_expr(commit):
                prims.tcgen05_commit(mbarriers.to_llvm_ptr(), group="cta_1")


@cute.jit
def _issue_from_two_warps(
    arena: cute.Pointer, mbarriers: cute.Pointer, tmem: Int32, plan: cutlass.Constexpr
) -> None:
    """HAZARD: part 0 by a thread of warp 0, part 1 by one of warp 1; each commits to its own."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp < 2:
        if prims.elect_sync():
            if warp == 0:
                _issue_part(plan, tmem, arena, 0)
            else:
                _issue_part(plan, tmem, arena, 1)
            prims.tcgen05_commit((mbarriers + warp).to_llvm_ptr(), group="cta_1")
    cute.arch.mbarrier_wait(mbarriers + 1, 0)


@cute.jit
def _seed_repair(
    readback: cute.Tensor,
    arena: cute.Pointer,
    mbarriers: cute.Pointer,
    tmem: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Both parts with four things between them: fence, barrier, D read back, fence."""
    tid, _, _ = cute.arch.thread_idx()
    lanes = tmem + ((tid // 32) << 21)
    _issue((0, 1), False, arena, mbarriers, tmem, plan)
    prims.tcgen05_fence("after_thread_sync")
    cute.arch.barrier()
    kernel.read_out(readback, tid, lanes, plan.d_columns)  # HAZARD: part 0 may be under way
    prims.tcgen05_fence("before_thread_sync")
    cute.arch.barrier()
    _issue((1, 2), True, arena, mbarriers, tmem, plan)


@cute.jit
def _run_variant(
    do: cute.Tensor,
    d: cute.Tensor,
    arena: cute.Pointer,
    mbarriers: cute.Pointer,
    tmem: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Issue both parts as the variant says, and wait for both; the hazard is what lies between."""
    tid, _, _ = cute.arch.thread_idx()
    lanes = tmem + ((tid // 32) << 21)
    if cutlass.const_expr(plan.variant == "threads"):
        _issue_from_two_warps(arena, mbarriers, tmem, plan)
    elif cutlass.const_expr(plan.variant == "fence-only"):
        _seed_repair(d[0, None, None], arena, mbarriers, tmem, plan)
    else:
        _issue((0, 2), True, arena, mbarriers, tmem, plan)
        if cutlass.const_expr(plan.variant == "early-read"):
            cute.arch.barrier()
            prims.tcgen05_fence("after_thread_sync")
            # HAZARD: nobody has waited for the commit
            kernel.read_out(d[1, None, None], tid, lanes, plan.d_columns)
        if cutlass.const_expr(plan.variant == "overwrite"):
            cute.arch.barrier()
            erase_b(arena, plan, 0)  # HAZARD: still being read
        if cutlass.const_expr(plan.variant == "late-operand"):
            if tid >= 32:
                _write_part_1(do, arena, plan)
    cute.arch.mbarrier_wait(mbarriers, 0)
    prims.tcgen05_fence("after_thread_sync")


@cute.jit
def launch(s: cute.Tensor, do: cute.Tensor, d: cute.Tensor, plan: cutlass.Constexpr) -> None:
    """One CTA."""
    hazard_kernel(s, do, d, plan).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))
