"""wgmma kernels in which something that must be waited for is not, and the pair that is ordered."""

from typing import Any

import cutlass
from cutlass import Float32, cute
from cutlass.cute.nvgpu import warpgroup

from workbench.lab.kernels.majorness import operands
from workbench.lab.kernels.majorness.sm90.kernel import build_descriptor, multiply, write_d
from workbench.lab.kernels.majorness.sm90.plan import WgmmaHazardPlan


@cute.kernel
def hazard_kernel(s: cute.Tensor, do: cute.Tensor, d: cute.Tensor, plan: cutlass.Constexpr) -> None:
    """s (k, m), do (k, n): elements as unsigned integers; d (2: unused, result; m, n) fp32."""
    tid, _, _ = cute.arch.thread_idx()
    arena = cutlass.memory.SmemAllocator().allocate(plan.smem_bytes, 1024)
    operands.fill_operands(s, do, arena, plan)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier()
    _run_variant(d, arena, tid, plan)


def _run_variant(d: Any, arena: Any, tid: Any, plan: WgmmaHazardPlan) -> None:
    """Both parts, and what the variant leaves out."""
    a, b = operands.step_descriptors(arena, plan, build_descriptor)
    products = [Float32(0.0)] * (plan.n // 2)
    if plan.variant != "no-fence":
        warpgroup.fence()
    for part in range(2):
        products = multiply(plan, products, a[plan.cut], b[plan.cut], part)
    warpgroup.commit_group()
    if plan.variant == "early-read":
        write_d(d[1, None, None], products, tid)  # HAZARD: the registers are still the MMA's
    if plan.variant == "overwrite":
        operands.erase_b(arena, plan, 0)  # HAZARD: still being read
    warpgroup.wait_group(0)
    if plan.variant != "early-read":
        write_d(d[1, None, None], products, tid)


@cute.jit
def launch(s: cute.Tensor, do: cute.Tensor, d: cute.Tensor, plan: cutlass.Constexpr) -> None:
    """One CTA."""
    hazard_kernel(s, do, d, plan).launch(grid=(1, 1, 1), block=(operands.THREADS, 1, 1))
