"""What `flashdsa inspect` knows of the backward: its roles' files, and their variables."""

from __future__ import annotations

from flashdsa.kernels.sparse_mla.sm100.bwd.plan import BwdPlan
from flashdsa.plan.inspected import InspectedKernel, InspectedRole

FILES = {
    "softmax": ("softmax.py",),
    "load": ("load.py",),
    "reduce": ("reduce_dkv.py",),
    "mma": ("mma.py", "products.py"),
}
"""What only a role's warps run; dq.py is run by two of them."""


def mla_bwd() -> InspectedKernel:
    """The backward of sparse MLA."""
    plan = BwdPlan()

    def compile_plan() -> object:
        from flashdsa.kernels.sparse_mla.sm100.bwd.build import compile_backward

        return compile_backward(plan)

    return InspectedKernel(
        name="mla_bwd",
        arch="sm_100a",
        compile=compile_plan,
        entry="backward_kernel",
        roles=tuple(InspectedRole(role, FILES[role.name]) for role in plan.roles),
        smem_bytes=plan.smem.total,
    )
