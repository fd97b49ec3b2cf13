"""The majorness study with tcgen05.mma: one CTA of four warps that writes out what it did.

all warps: A, B -> shared memory; fence; barrier; image of shared memory -> global
one thread: MMAs of part 0
boundary:   commit -> all wait; D -> global; fences, barrier
one thread: MMAs of part 1; commit -> all wait; D -> global
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from flashdsa.hw import SM100
from workbench.lab.kernels.majorness.operands import (
    THREADS,
    Strides,
    copy_image,
    fill_operands,
    step_descriptors,
    write_descriptors,
)
from workbench.lab.kernels.majorness.sm100.plan import Sm100Plan

OPERAND_TYPES = {
    "bf16": cutlass.BFloat16,
    "f16": cutlass.Float16,
    "e4m3": cutlass.Float8E4M3FN,
    "e5m2": cutlass.Float8E5M2,
}
UNWRITTEN = 1e30
"""Content of D's columns before part 0, in every lane: an MMA that does not clear keeps it."""
_LD_COLUMNS = 8
_SWIZZLE_CODES = {
    "INTER": prims.Tcgen05SmemSwizzle(0),
    "SW128": prims.Tcgen05SmemSwizzle(2),
    "SW64": prims.Tcgen05SmemSwizzle(4),
    "SW32": prims.Tcgen05SmemSwizzle(6),
}


class Outputs(NamedTuple):
    """The kernel's outputs in global memory."""

    descriptors: cute.Tensor  # (2 cuts, 2 parts, steps, 2: A and B)  int64
    scalars: cute.Tensor  # (2,): instruction descriptor, shared address of the image  int32
    image: cute.Tensor  # (smem_bytes / 4,)  uint32
    accumulators: cute.Tensor  # (2 parts, 128 lanes, n columns)  float32


def instruction_descriptor(plan: Sm100Plan, columns: int) -> Any:
    """Build the 32 bits of one MMA of the plan with N = `columns`."""
    dtype = OPERAND_TYPES[plan.dtype]
    return prims.Tcgen05InstrDesc.build(
        c_dtype=Float32,
        a_dtype=dtype,
        b_dtype=dtype,
        a_major=int(plan.a_major == "mn"),
        b_major=int(plan.b_major == "mn"),
        n_dim=columns,
        m_dim=plan.m,
    )


def build_descriptor(address: Any, strides: Strides, swizzle: str) -> Any:
    """Build the 64 bits of a shared memory descriptor."""
    return prims.Tcgen05SmemDesc.build(
        Int32(address),
        leading_byte_offset=strides.leading,
        stride_byte_offset=strides.stride,
        layout=_SWIZZLE_CODES[swizzle],
    )


def _issue(plan: Sm100Plan, tmem: Any, a: Any, b: Any, idesc: Any, part: int) -> None:
    """Issue one part's MMAs, by one thread."""
    d = prims.make_tmem_ptr(tmem, Float32)
    for step in range(plan.steps):
        operands = (d, a[part][step], b[part][step], idesc)
        prims.tcgen05_mma(plan.kind, "cta_1", *operands, part > 0 or step > 0)


@cute.jit
def read_out(out: cute.Tensor, lane: Int32, tmem: Int32, count: cutlass.Constexpr) -> None:
    """Copy the first `count` TMEM columns of this warp's 32 lanes to out[lane, :]."""
    for first in cutlass.range(0, count, _LD_COLUMNS, unroll=1):
        values = prims.tcgen05_ld("32x32b", prims.make_tmem_ptr(tmem + first, Float32), num=8)
        prims.tcgen05_wait("load")
        for j in cutlass.range_constexpr(_LD_COLUMNS):
            out[lane, first + j] = values[j]


@cute.jit
def fill_tmem(lanes: Int32, count: cutlass.Constexpr, value: cutlass.Constexpr) -> None:
    """Store `value` (fp32) in the first `count` columns of this warp's 32 lanes."""
    fill = cute.make_rmem_tensor(_LD_COLUMNS, Float32)
    fill.fill(value)
    for first in cutlass.range(0, count, _LD_COLUMNS, unroll=1):
        prims.tcgen05_st("32x32b", prims.make_tmem_ptr(lanes + first, Float32), fill.load())
    prims.tcgen05_wait("store")


@cute.kernel
def majorness_kernel(
    s: cute.Tensor, do: cute.Tensor, out: Outputs, plan: cutlass.Constexpr
) -> None:
    """s (k heads, m keys), do (k heads, n dims): row-major, elements as unsigned integers."""
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    shared = cutlass.memory.SmemAllocator()
    arena = shared.allocate(plan.smem_bytes, 1024)
    mbarriers = shared.allocate(Int64, 16)
    address = shared.allocate(Int32, 16)
    fill_operands(s, do, arena, plan)
    if tid == 0:
        cute.arch.mbarrier_init(mbarriers, 1)
        cute.arch.mbarrier_init(mbarriers + 1, 1)
    cute.arch.mbarrier_init_fence()
    if warp == 0:
        prims.tcgen05_alloc(address.to_llvm_ptr(), SM100.tmem_columns, group="cta_1")
        prims.tcgen05_relinquish_alloc_permit(group="cta_1")
    # WHO every writer fences its own writes; WHICH the CTA barrier; WHAT the MMAs (async proxy)
    # may read A and B from here on, and every thread the TMEM address.
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier()
    tmem = address.load()
    copy_image(out.image, arena, plan)
    lanes = tmem + ((warp % 4) << 21)
    fill_tmem(lanes, plan.n, UNWRITTEN)
    # WHO every writer of TMEM, after wait::st; WHICH the CTA barrier; WHAT the MMAs may use D.
    prims.tcgen05_fence("before_thread_sync")
    cute.arch.barrier()
    _multiply(plan, out, arena, mbarriers, tmem)
    if warp == 0:
        prims.tcgen05_fence("after_thread_sync")
        prims.tcgen05_dealloc(prims.make_tmem_ptr(tmem, Float32), SM100.tmem_columns, group="cta_1")


@cute.jit
def _multiply(
    plan: cutlass.Constexpr, out: Outputs, arena: cute.Pointer, mbarriers: cute.Pointer, tmem: Int32
) -> None:
    """Compute both parts, and write D after each."""
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lanes = tmem + ((warp % 4) << 21)
    idesc = instruction_descriptor(plan, plan.n)
    a, b = step_descriptors(arena, plan, build_descriptor)
    if tid == 0:
        out.scalars[0] = Int32(idesc)
        out.scalars[1] = Int32(arena.toint())
        write_descriptors(out.descriptors, plan, a, b)
    a_used, b_used = a[plan.cut], b[plan.cut]
    if cutlass.const_expr(plan.boundary):
        if warp == 0:
            if prims.elect_sync():
                prims.tcgen05_fence("after_thread_sync")
                _issue(plan, tmem, a_used, b_used, idesc, 0)
                prims.tcgen05_commit(mbarriers.to_llvm_ptr(), group="cta_1")
        # WHO the MMAs of part 0, by their commit; WHICH mbarrier 0, phase 0; WHAT everyone may
        # read D, and after the barrier part 1 may write it.
        cute.arch.mbarrier_wait(mbarriers, 0)
        prims.tcgen05_fence("after_thread_sync")
        read_out(out.accumulators[0, None, None], tid, lanes, plan.n)
        prims.tcgen05_fence("before_thread_sync")
        cute.arch.barrier()
    if warp == 0:
        if prims.elect_sync():
            prims.tcgen05_fence("after_thread_sync")
            if cutlass.const_expr(not plan.boundary):
                _issue(plan, tmem, a_used, b_used, idesc, 0)
            _issue(plan, tmem, a_used, b_used, idesc, 1)
            prims.tcgen05_commit((mbarriers + 1).to_llvm_ptr(), group="cta_1")
    cute.arch.mbarrier_wait(mbarriers + 1, 0)
    prims.tcgen05_fence("after_thread_sync")
    read_out(out.accumulators[1, None, None], tid, lanes, plan.n)
    prims.tcgen05_fence("before_thread_sync")
    cute.arch.barrier()


@cute.jit
def launch(
    s: cute.Tensor,
    do: cute.Tensor,
    descriptors: cute.Tensor,
    scalars: cute.Tensor,
    image: cute.Tensor,
    accumulators: cute.Tensor,
    plan: cutlass.Constexpr,
) -> None:
    """Launch one CTA."""
    out = Outputs(descriptors, scalars, image, accumulators)
    majorness_kernel(s, do, out, plan).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))
