"""The lab's kernels as rows of data, for `flashdsa inspect`; production knows none of them."""

from __future__ import annotations

from flashdsa.dsl.umma import SharedOperand, SharedTile, TilePart, TmemOperand, UmmaProduct
from flashdsa.hw import SM90, SM100, TMEM_LANES
from flashdsa.plan.kernel_spec import KernelSpec
from workbench.lab.kernels.majorness.sm90.plan import Sm90Plan
from workbench.lab.kernels.majorness.sm100.plan import Sm100Plan
from workbench.lab.kernels.operand_forms.sm100.plan import FormPlan

N, K = 32, 64
"""Of the operand form's product; A has a row a lane."""
A_COLUMN = 64
"""Where A begins in tensor memory."""


def _a_from_tmem() -> FormPlan:
    """One of the forms of `python -m workbench lab forms`."""
    b = SharedOperand("K", N, (TilePart(SharedTile("b", 0, N, K, 128), K),))
    return FormPlan(UmmaProduct(TMEM_LANES, N, TmemOperand(A_COLUMN, K), b), "rows")


LAB_KERNELS = (
    KernelSpec(
        name="majorness",
        arch=SM90.name,
        operations=(),
        plans=(Sm90Plan(),),
        build="workbench.lab.kernels.majorness.build:compile_sm90",
        entry="majorness_kernel",
    ),
    KernelSpec(
        name="majorness",
        arch=SM100.name,
        operations=(),
        plans=(Sm100Plan(),),
        build="workbench.lab.kernels.majorness.build:compile_sm100",
        entry="majorness_kernel",
    ),
    KernelSpec(
        name="operand_form",
        arch=SM100.name,
        operations=(),
        plans=(_a_from_tmem(),),
        build="workbench.lab.kernels.operand_forms.sm100.build:compile_form",
        entry="form_kernel",
    ),
)
"""All rows."""
