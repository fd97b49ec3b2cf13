"""What `flashdsa inspect` knows of the backward: its roles' files and variables."""

from __future__ import annotations

from flashdsa.kernels.sparse_mla.sm100.bwd.plan import B_TOPK, BOX_DIMS, BwdPlan
from flashdsa.plan.inspected import InspectedKernel, InspectedRole
from flashdsa.plan.variables import RoleEstimate, RoleVariable

FILES = {
    "softmax": ("softmax.py",),
    "load": ("load.py",),
    "reduce": ("reduce_dkv.py",),
    "mma": ("mma.py", "products.py", "umma_issue.py"),
}
"""What only a role's warps run; dq.py is run by two of them."""


def estimates() -> dict[str, RoleEstimate]:
    """The roles' variables, as its files have them: of each thread."""
    v = RoleVariable
    place = v("context: arena, TMEM, rank, query, blocks, thread", 6)
    box = v("a box of dQ: fp32 from TMEM", BOX_DIMS, first="dQ", last="dQ")
    packed_box = v("the box in bf16", BOX_DIMS, 16, "dQ", "dQ")
    return {
        "softmax": RoleEstimate(
            "softmax",
            ("P", "dP", "dS", "dQ"),
            (
                place,
                v("lse, delta, scale", 3, last="dS"),
                v("block, parity", 2, last="dS"),
                v("places of 8 swizzled units", 8),
                v("the peer's places and barrier", 9, last="dP"),
                v("P: own sums, then with the peer's, then S", B_TOPK, last="dS"),
                v("of the peer's sums, together", 4, last="dS"),
                v("valid keys, scale and lse in base 2", 3, last="P"),
                v("dP: own sums, then with the peer's", B_TOPK, first="dP", last="dS"),
                v("S in bf16", B_TOPK, 16, "dP", "dP"),
                v("dS in bf16", B_TOPK, 16, "dS", "dS"),
                box,
                packed_box,
            ),
        ),
        "load": RoleEstimate(
            "load",
            ("rows", "gather"),
            (
                place,
                v("pointers: indices, two maps", 6),
                v("slots, rows of KV, block", 3),
                v("lane, row, place, stage", 4),
                v("rows of a gather", 4, first="gather"),
                v("box, place, barrier", 4, first="gather"),
            ),
        ),
        "reduce": RoleEstimate(
            "reduce",
            ("dO", "dKV", "dQ"),
            (
                place,
                v("a box of dO in bf16", BOX_DIMS, 16, "dO", "dO"),
                v("places of 8 swizzled units", 8, first="dO", last="dO"),
                v("a lane of dKV's part: fp32 from TMEM", B_TOPK, first="dKV", last="dKV"),
                v("dim, slot, place, block, parity, key", 6, first="dKV", last="dKV"),
                v("pointers: dKV, a row's place", 4, first="dKV", last="dKV"),
                box,
                packed_box,
                v("places of 8 swizzled units in dQ", 8, first="dQ"),
            ),
        ),
        "mma": RoleEstimate(
            "mma",
            ("issue",),
            (
                place,
                v("block, stage, parity, last, owner", 5),
                v("bases of A and B, offset of the stage", 3),
                v("descriptors of A and B, column of D", 5),
            ),
        ),
    }


def mla_bwd_deterministic() -> InspectedKernel:
    """The variant that adds nothing in memory, and the sum that follows it."""
    return mla_bwd(deterministic=True)


def mla_bwd(deterministic: bool = False) -> InspectedKernel:
    """The backward of sparse MLA."""
    plan, estimated = BwdPlan(), estimates()

    def compile_plan() -> object:
        from flashdsa.kernels.sparse_mla.sm100.bwd.build import compile_backward

        return compile_backward(plan, deterministic)

    return InspectedKernel(
        name="mla_bwd" + ("_deterministic" if deterministic else ""),
        arch="sm_100a",
        compile=compile_plan,
        entry="backward_kernel",
        roles=tuple(
            InspectedRole(role, FILES[role.name], estimated[role.name]) for role in plan.roles
        ),
        smem_bytes=plan.smem.total,
    )
