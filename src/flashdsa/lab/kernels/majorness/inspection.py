"""What `flashdsa inspect` knows of the majorness study: its default plan, on both architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashdsa.hw import BULK_ALIGNMENT, TMEM_LANES
from flashdsa.lab.kernels.majorness.plan import NUM_PARTS, MajornessPlan
from flashdsa.lab.kernels.majorness.sm90.plan import Sm90Plan
from flashdsa.lab.kernels.majorness.sm100.plan import Sm100Plan
from flashdsa.plan.inspected import InspectedKernel


def compile_study(launch: Callable[..., Any], plan: MajornessPlan) -> object:
    """The launch of the plan, as `flashdsa lab majorness` makes it; needs no GPU."""
    from cutlass import Float32, Int32, Int64, Uint16, Uint32, cute
    from cutlass.cute.runtime import make_fake_compact_tensor

    shapes = (
        (Uint16, (plan.k, plan.m)),
        (Uint16, (plan.k, plan.n)),
        (Int64, (NUM_PARTS, 2, plan.steps, 2)),
        (Int32, (2,)),
        (Uint32, (plan.shared_bytes // 4,)),
        (Uint32, (TMEM_LANES, plan.num_a_words)),
        (Float32, (NUM_PARTS, plan.num_d_rows, plan.n)),
    )
    tensors = [
        make_fake_compact_tensor(
            dtype,
            shape,
            stride_order=tuple(reversed(range(len(shape)))),
            assumed_align=BULK_ALIGNMENT,
        )
        for dtype, shape in shapes
    ]
    return cute.compile(launch, *tensors, plan)


def _inspected(
    arch: str, plan: MajornessPlan, compile_now: Callable[[], object]
) -> InspectedKernel:
    return InspectedKernel(
        name="majorness",
        arch=arch,
        compile=compile_now,
        entry="majorness_kernel",
        roles=(),
        smem_bytes=plan.shared_bytes,
    )


def sm90() -> InspectedKernel:
    """With wgmma."""
    plan = Sm90Plan()

    def compile_now() -> object:
        from flashdsa.lab.kernels.majorness.sm90.kernel import launch

        return compile_study(launch, plan)

    return _inspected("sm_90a", plan, compile_now)


def sm100() -> InspectedKernel:
    """With tcgen05.mma."""
    plan = Sm100Plan()

    def compile_now() -> object:
        from flashdsa.lab.kernels.majorness.sm100.kernel import launch

        return compile_study(launch, plan)

    return _inspected("sm_100a", plan, compile_now)
