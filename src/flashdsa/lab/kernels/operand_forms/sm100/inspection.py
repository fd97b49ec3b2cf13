"""What `flashdsa inspect` knows of the operand-form kernel: a product with A from TMEM."""

from __future__ import annotations

from flashdsa.dsl.umma import (
    SharedOperand,
    SharedTile,
    TilePart,
    TmemOperand,
    UmmaProduct,
)
from flashdsa.hw import BULK_ALIGNMENT, TMEM_LANES
from flashdsa.lab.kernels.operand_forms.sm100.plan import FormPlan
from flashdsa.plan.inspected import InspectedKernel

N, K = 32, 64
"""Of the product; A has a row a lane."""
A_COLUMN = 64


def operand_form() -> InspectedKernel:
    """The kernel of `flashdsa lab forms`, for one of its forms."""
    b = SharedOperand("K", N, (TilePart(SharedTile("b", 0, N, K, 128), K),))
    plan = FormPlan(UmmaProduct(TMEM_LANES, N, TmemOperand(A_COLUMN, K), b), "rows")

    def compile_now() -> object:
        from cutlass import Int32, cute
        from cutlass.cute.runtime import make_fake_compact_tensor

        from flashdsa.lab.kernels.operand_forms.sm100.kernel import run_form

        shapes = (
            (1, plan.image_bytes // 4),
            (1, plan.a_rows, plan.a_words),
            (1, TMEM_LANES, plan.product.columns),
        )
        tensors = [
            make_fake_compact_tensor(
                Int32,
                shape,
                stride_order=tuple(reversed(range(len(shape)))),
                assumed_align=BULK_ALIGNMENT,
            )
            for shape in shapes
        ]
        return cute.compile(run_form, *tensors, plan)

    return InspectedKernel(
        name="operand_form",
        arch="sm_100a",
        compile=compile_now,
        entry="form_kernel",
        roles=(),
        smem_bytes=plan.arena_bytes,
    )
