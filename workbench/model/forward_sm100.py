"""Our Blackwell forward: a unit is a tile of 64 keys in one CTA of the pair.

Matrix products come from the plan. What threads move, and their instructions, were counted in an
emulated run (`COUNTED`); tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from flashdsa.dsl.umma import UmmaProduct
from flashdsa.kernels.catalog import SPARSE_MLA_FWD_SM100
from flashdsa.kernels.sparse_mla.sm100.fwd.plan import (
    BOX_BYTES,
    CLUSTER,
    FP32,
    HALF_KEYS,
    ROWS,
    TILE_KEYS,
    FwdPlan,
)
from flashdsa.kernels.sparse_mla.sm100.fwd.products import products_of
from workbench.model.machine import GpuModel
from workbench.model.predict import Work
from workbench.model.shapes import FORWARD_DIMS, QUERIES, ROW_BYTES, TOPK, l2_cycles
from workbench.model.timeline import Step, mma_step
from workbench.model.traffic import Footprint, Matmul, Source, Traffic

FORWARD_PLAN: FwdPlan = SPARSE_MLA_FWD_SM100.plans[0]
"""The plan of the kernel that ships, for 128 heads."""

S_KV = 8192
COUNTED = {
    "MMA shared read": 86_016,
    "global -> shared (TMA load)": 36_864,
    "shared ld": 17_408,
    "shared st": 25_096,
    "tmem ld": 32_768,
}
"""Bytes of a tile and CTA by ptxemu's paths: a run of 512 keys less one of 128, by twelve tiles."""
COUNTED_INSTRUCTIONS = {"softmax": 2096, "load": 295, "mma": 103}
"""PTX instructions of a tile and CTA, all warps of the role."""
THREADS = 128
"""Of the softmax role."""


def matmuls(plan: FwdPlan) -> tuple[Matmul, ...]:
    """Of a tile: a CTA's rows, and the columns of B that it reads."""
    products = products_of(plan)
    values = ((f"PV {part}", product) for part, product in enumerate(products.pv))
    named = (("S", products.qk), ("S RoPE", products.qk_rope), *values)
    return tuple(_matmul(name, product) for name, product in named)


def _matmul(name: str, product: UmmaProduct) -> Matmul:
    return Matmul(
        name,
        count=product.k // product.element.step_k,
        m=product.rows,
        n=product.n,
        a=Source.TMEM if product.a_in_tmem else Source.SHARED,
        shared_n=product.b.extent,
    )


def traffic(plan: FwdPlan) -> Traffic:
    """Of one tile and CTA."""
    exchange = 2 * THREADS * HALF_KEYS * FP32
    return Traffic(
        useful_flop=2.0 * ROWS * TILE_KEYS * FORWARD_DIMS,
        matmuls=matmuls(plan),
        shared_bytes=plan.kv_bytes + BOX_BYTES + exchange,
        tmem_bytes=THREADS * TILE_KEYS * FP32,
        read_bytes=plan.kv_bytes,
        exps=ROWS * TILE_KEYS,
        instructions=float(sum(COUNTED_INSTRUCTIONS.values())),
    )


def steps(plan: FwdPlan, machine: GpuModel) -> Iterator[Step]:
    """The roles' order of mma.py, softmax.py and load.py; P V of tile i runs in unit i + 1."""
    found = matmuls(plan)
    bar = machine.barrier_latency.value
    to_leader = machine.dsmem_latency.value + bar

    yield mma_step(machine, "mma", "S", found[:2], ("scores read", 1), ("gather", 0), wait=False)
    yield mma_step(machine, "mma", "PV", found[2:], ("P ready", 1), wait=False)

    gather = l2_cycles(machine, plan.kv_bytes)
    arrives = machine.l2_latency.value + bar
    freed = (("PV", plan.kv_stages - 1),)
    yield Step("load", "gather", gather, "gather", 0, freed, arrives, wait=False)

    # A warp of each scheduler: clocks are instructions, or exponentials where those take longer.
    issue = COUNTED_INSTRUCTIONS["softmax"] / 4
    exps = HALF_KEYS * THREADS / machine.exp_rate.value
    met = machine.shared_latency.value + bar

    def softmax(
        name: str, share: float, *after: tuple[str, int], latency: float = 0, wait: bool = True
    ) -> Step:
        return Step("softmax", name, share * issue, "", 0, after, latency, wait)

    yield softmax("scores read", 0.1, ("S", 0), latency=to_leader, wait=False)
    yield softmax("halves added", 0.3, latency=met)
    yield softmax("maxima met", 0.2, latency=met)
    yield Step("softmax", "P", max(exps, 0.3 * issue), "", 0, (("PV", 1),))
    yield softmax("P ready", 0.1, latency=to_leader, wait=False)


def work(
    machine: GpuModel,
    plan: FwdPlan | None = None,
    *,
    queries: int = QUERIES,
    topk: int = TOPK,
    s_kv: int = S_KV,
) -> Work:
    """The kernel on a shape of 128 heads."""
    plan = plan or FORWARD_PLAN
    return Work(
        name="mla_fwd sm_100a",
        traffic=traffic(plan),
        units=float(queries * -(-topk // TILE_KEYS) * CLUSTER),
        steps=tuple(steps(plan, machine)),
        footprint=Footprint(read=s_kv * ROW_BYTES),
    )
