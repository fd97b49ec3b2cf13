"""Our Blackwell forward: a unit is a tile of 64 keys in one CTA of the pair.

Matrix products come from the plan. The bytes of threads, and their instructions, were counted in an
emulated run (`MOVED`, `INSTRUCTIONS`); tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from flashdsa.kernels.attention.sm100.core.tile import CLUSTER, FP32
from flashdsa.kernels.attention.sm100.fwd.plan import BOX_BYTES, ROWS, FwdPlan
from flashdsa.kernels.attention.sm100.fwd.products import products_of
from flashdsa.kernels.catalog import SPARSE_MLA_FWD_SM100
from workbench.model.machine import GpuModel
from workbench.model.predict import Work
from workbench.model.timeline import Step, mma_step
from workbench.model.traffic import (
    FORWARD_DIMS,
    QUERIES,
    ROW_BYTES,
    S_KV,
    TOPK,
    Footprint,
    Matmul,
    Traffic,
    l2_cycles,
    matmul_of,
)

PLAN: FwdPlan = SPARSE_MLA_FWD_SM100.plans[0]
"""The plan of the kernel that ships, for 128 heads."""
MOVED = {
    "MMA shared read": 86_016,
    "global -> shared (TMA load)": 36_864,
    "shared ld": 17_408,
    "shared st": 25_096,
    "tmem ld": 32_768,
}
"""Bytes of a tile and CTA by ptxemu's paths: a run of 512 keys less one of 128, by twelve tiles."""
INSTRUCTIONS = {"softmax": 2096, "load": 295, "mma": 103}
"""PTX instructions of a tile and CTA, all warps of the role."""
THREADS = 128
"""Threads of the softmax role."""


def matmuls(plan: FwdPlan) -> tuple[Matmul, ...]:
    """List those of a tile: a CTA's rows, and the columns of B that it reads."""
    products = products_of(plan)
    values = (matmul_of("PV", product) for product in products.pv)
    return (matmul_of("S", products.qk), matmul_of("S RoPE", products.qk_rope), *values)


def traffic(plan: FwdPlan = PLAN) -> Traffic:
    """Count one tile and CTA."""
    exchange = 2 * THREADS * plan.half_keys * FP32
    return Traffic(
        useful_flop=2.0 * ROWS * plan.tile.keys * FORWARD_DIMS,
        matmuls=matmuls(plan),
        shared_bytes=plan.tile.bytes + BOX_BYTES + exchange,
        tmem_bytes=THREADS * plan.tile.keys * FP32,
        read_bytes=plan.tile.bytes,
        exps=ROWS * plan.tile.keys,
        instructions=float(sum(INSTRUCTIONS.values())),
    )


def steps(machine: GpuModel, plan: FwdPlan = PLAN) -> Iterator[Step]:
    """Order the roles' steps as the kernel does; P V of tile i runs in unit i + 1."""
    found = matmuls(plan)
    bar = machine["barrier_latency"]
    to_leader = machine["dsmem_latency"] + bar

    yield mma_step(machine, "mma", "S", found[:2], ("scores read", 1), ("gather", 0))
    yield mma_step(machine, "mma", "PV", found[2:], ("P ready", 1))

    gather = l2_cycles(machine, plan.tile.bytes)
    arrives = machine["l2_latency"] + bar
    freed = (("PV", plan.kv_stages - 1),)
    yield Step("load", "gather", gather, "gather", 0, freed, arrives, wait=False)

    # A warp of each scheduler: clocks are instructions, or exponentials where those take longer.
    issue = INSTRUCTIONS["softmax"] / 4
    exps = plan.half_keys * THREADS / machine["exp_rate"]
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


def work(machine: GpuModel, *, queries: int = QUERIES, topk: int = TOPK, s_kv: int = S_KV) -> Work:
    """Take the kernel on a shape of 128 heads."""
    return Work(
        name="mla_fwd sm_100a",
        traffic=traffic(),
        units=float(queries * -(-topk // PLAN.tile.keys) * CLUSTER),
        steps=tuple(steps(machine)),
        footprint=Footprint(read=s_kv * ROW_BYTES),
    )
