"""The majorness study with wgmma: one warpgroup that writes out what it did.

all threads: A, B -> shared memory; fence; barrier; image -> global
all threads: wgmmas of part 0
boundary:    commit_group, wait_group 0; D -> global
all threads: wgmmas of part 1; commit_group, wait_group 0; D -> global
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.wgmma import matrix_descriptor, mma_async
from workbench.lab.kernels.majorness import operands
from workbench.lab.kernels.majorness.operands import Strides
from workbench.lab.kernels.majorness.sm90.plan import Sm90Plan


class Outputs(NamedTuple):
    """The kernel's outputs in global memory."""

    descriptors: cute.Tensor  # (2 cuts, 2 parts, steps, 2: A and B)  int64
    scalars: cute.Tensor  # (2,): 0, shared address of the image  int32
    image: cute.Tensor  # (smem_bytes / 4,)  uint32
    accumulators: cute.Tensor  # (2 parts, m, n)  float32


def build_descriptor(address: Any, strides: Strides, swizzle: str) -> Any:
    """Build the 64 bits of a matrix descriptor."""
    return matrix_descriptor(address, strides.leading, strides.stride, swizzle)


def multiply(plan: Sm90Plan, accumulators: list[Any], a: Any, b: Any, part: int) -> list[Any]:
    """Issue the wgmmas of one part."""
    transposes: tuple[int, ...] = ()
    if plan.element_bytes == 2:  # other types have no such immediates
        transposes = (int(plan.a_major == "mn"), int(plan.b_major == "mn"))
    for step in range(plan.steps):
        accumulators = mma_async(
            plan.opcode,
            accumulators,
            a[part][step],
            b[part][step],
            accumulate=part > 0 or step > 0,
            transposes=transposes,
        )
    return accumulators


def write_d(out: Any, accumulators: list[Any], tid: Any) -> None:
    """Write D's registers to out (m, n): register 4j + 2h + q is row 16w + 8h + l / 4, column
    8j + 2 (l % 4) + q."""
    for i, value in enumerate(accumulators):
        row = tid // 32 * 16 + tid % 32 // 4 + i // 2 % 2 * 8
        out[row, i // 4 * 8 + tid % 4 * 2 + i % 2] = value


@cute.kernel
def majorness_kernel(
    s: cute.Tensor, do: cute.Tensor, out: Outputs, plan: cutlass.Constexpr
) -> None:
    """s (k heads, m keys), do (k heads, n dims): row-major, elements as unsigned integers."""
    tid, _, _ = cute.arch.thread_idx()
    arena = cutlass.memory.SmemAllocator().allocate(plan.smem_bytes, 1024)
    operands.fill_operands(s, do, arena, plan)
    # WHO every writer fences its own writes; WHICH the CTA barrier; WHAT the wgmmas (async proxy)
    # may read A and B from here on.
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier()
    operands.copy_image(out.image, arena, plan)
    a, b = operands.step_descriptors(arena, plan, build_descriptor)
    if tid == 0:
        out.scalars[1] = Int32(arena.toint())
        operands.write_descriptors(out.descriptors, plan, a, b)
    _multiply_parts(out, tid, a[plan.cut], b[plan.cut], plan)


def _multiply_parts(out: Outputs, tid: Any, a: Any, b: Any, plan: Sm90Plan) -> None:
    """Compute both parts, and write D after each. Plain Python: everything unrolls."""
    d = [Float32(0.0)] * (plan.n // 2)
    warpgroup.fence()
    d = multiply(plan, d, a, b, 0)
    if plan.boundary:
        # WHO this warpgroup's wgmmas of part 0; WHICH wait_group 0; WHAT D's registers are ours.
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        write_d(out.accumulators[0, None, None], d, tid)
        warpgroup.fence()
    d = multiply(plan, d, a, b, 1)
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    write_d(out.accumulators[1, None, None], d, tid)


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
    majorness_kernel(s, do, out, plan).launch(grid=(1, 1, 1), block=(operands.THREADS, 1, 1))
