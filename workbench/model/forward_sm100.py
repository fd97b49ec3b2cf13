"""Our Blackwell forward: a unit is a tile of 64 keys in one CTA of the pair.

Matrix products and bytes come from the plan, instructions from an emulated run.
"""

from __future__ import annotations

from collections.abc import Iterator

from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm100.core.tile import CLUSTER, FP32
from flashdsa.kernels.attention.sm100.fwd.plan import BOX_BYTES, ROWS, FwdPlan
from flashdsa.kernels.attention.sm100.fwd.products import products_of
from flashdsa.kernels.catalog import SPARSE_MLA_FWD_SM100
from flashdsa.problem import D_QK, D_V
from workbench.model import roofline
from workbench.model.machine import GpuModel
from workbench.model.roofline import Footprint, Matmul, Traffic, Work, matmul_of, mma_step
from workbench.model.timeline import Step

PLAN: FwdPlan = SPARSE_MLA_FWD_SM100.plans[0]
"""The plan of the kernel that ships, for 128 heads."""
INSTRUCTIONS = {"softmax": 2096, "load": 295, "mma": 103}
"""PTX instructions of a tile and CTA, all warps of the role."""


def matmuls(plan: FwdPlan) -> tuple[Matmul, ...]:
    """List those of a tile: a CTA's rows, and the columns of B that it reads."""
    products = products_of(plan)
    return tuple(map(matmul_of, (products.qk, products.qk_rope, *products.pv)))


def traffic(plan: FwdPlan = PLAN) -> Traffic:
    """Count one tile and CTA."""
    exchange = 2 * WARPGROUP_SIZE * plan.half_keys * FP32
    return Traffic(
        useful_flop=2.0 * ROWS * plan.tile.keys * (D_QK + D_V),
        matmuls=matmuls(plan),
        shared_bytes=plan.tile.bytes + BOX_BYTES + exchange,
        tmem_bytes=WARPGROUP_SIZE * plan.tile.keys * FP32,
        read_bytes=plan.tile.bytes,
        exps=ROWS * plan.tile.keys,
        instructions=float(sum(INSTRUCTIONS.values())),
    )


def steps(machine: GpuModel, plan: FwdPlan = PLAN) -> Iterator[Step]:
    """Order the roles' steps as the kernel does; P V of tile i runs in unit i + 1."""
    found = matmuls(plan)
    bar = machine["barrier_latency"]
    to_leader = machine["dsmem_latency"] + bar

    yield mma_step(machine, "S", found[:2], ("scores read", 1), ("gather", 0))
    yield mma_step(machine, "PV", found[2:], ("P ready", 1))

    gather = roofline.l2_cycles(machine, plan.tile.bytes)
    arrives = machine["l2_latency"] + bar
    freed = (("PV", plan.kv_stages - 1),)
    yield Step("load", "gather", gather, "gather", 0, freed, arrives, wait=False)

    # A warp of each scheduler: clocks are instructions, or exponentials where those take longer.
    issue = INSTRUCTIONS["softmax"] / 4
    exps = plan.half_keys * WARPGROUP_SIZE / machine["exp_rate"]
    met = machine["shared_latency"] + bar

    def softmax(
        name: str, share: float, *after: tuple[str, int], latency: float = 0, wait: bool = True
    ) -> Step:
        return Step("softmax", name, share * issue, "", 0, after, latency, wait)

    yield softmax("scores read", 0.1, ("S", 0), latency=to_leader, wait=False)
    yield softmax("halves added", 0.3, latency=met)
    yield softmax("maxima met", 0.2, latency=met)
    yield Step("softmax", "P", max(exps, 0.3 * issue), "", 0, (("PV", 1),))
    yield softmax("P ready", 0.1, latency=to_leader, wait=False)


def work(machine: GpuModel, queries: int, topk: int, s_kv: int) -> Work:
    """Take the kernel on a shape of 128 heads."""
    units = float(queries * -(-topk // PLAN.tile.keys) * CLUSTER)
    footprint = Footprint(read=s_kv * roofline.ROW_BYTES)
    return Work(traffic(), units, footprint, tuple(steps(machine)))
