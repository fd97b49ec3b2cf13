"""Compiles the operand-form kernel, for one case; needs no GPU."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute

from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.hw import TMEM_LANES
from workbench.lab.kernels.operand_forms.sm100.kernel import run_form
from workbench.lab.kernels.operand_forms.sm100.plan import FormPlan


def compile_form(plan: FormPlan) -> Any:
    """The launch of the plan."""
    shapes = (
        (1, plan.image_bytes // 4),
        (1, plan.a_rows, plan.a_words),
        (1, TMEM_LANES, plan.product.columns),
    )
    return cute.compile(run_form, *(fake_tensor(Int32, shape) for shape in shapes), plan)
