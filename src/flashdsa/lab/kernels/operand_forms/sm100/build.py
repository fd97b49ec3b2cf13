"""Compiles the operand-form kernel, for one case; needs no GPU."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_compact_tensor

from flashdsa.hw import BULK_ALIGNMENT, TMEM_LANES
from flashdsa.lab.kernels.operand_forms.sm100.kernel import run_form
from flashdsa.lab.kernels.operand_forms.sm100.plan import FormPlan


def compile_form(plan: FormPlan) -> Any:
    """The launch of the plan."""
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
