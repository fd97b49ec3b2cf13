"""Our Blackwell backward: a unit is a block of 32 keys in one CTA of the pair.

Matrix products come from the plan. What threads move, and their instructions, were counted in an
emulated run (`COUNTS`; tests/analysis counts again); tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from flashdsa.dsl.umma import UmmaProduct
from flashdsa.kernels.catalog import MLA_BWD
from flashdsa.kernels.sparse_mla.sm100.bwd.plan import B_H, B_TOPK, CLUSTER, BwdPlan
from flashdsa.kernels.sparse_mla.sm100.bwd.products import products_of
from workbench.model.machine import GpuModel
from workbench.model.predict import Work
from workbench.model.shapes import (
    BACKWARD_DIMS,
    GRADIENT_ROW_BYTES,
    QUERIES,
    ROW_BYTES,
    TOPK,
    l2_cycles,
)
from workbench.model.timeline import BULK, DSMEM, RED, Part, Step, mma_step, transfer
from workbench.model.traffic import Footprint, Matmul, Source, Traffic

BACKWARD_PLAN: BwdPlan = MLA_BWD.plans[0]
"""The plan of the kernel that ships."""

S_KV = 8192


@dataclass(frozen=True)
class Counts:
    """Of a block and CTA in an emulated run: one of 128 keys less one of 64, by two blocks.

    Attributes:
        moved: bytes by ptxemu's paths. instructions: of the PTX, all warps of the role.
    """

    from_registers: bool
    moved: Mapping[str, int]
    instructions: Mapping[str, int]


_EITHER = {
    "MMA shared read": 303_104,
    "shared -> DSMEM (remote store)": 32_768,
    "global -> shared (TMA load)": 18_432,
    "tmem ld": 73_728,
    "tmem st": 8_192,
}
COUNTS = {
    "bulk": Counts(
        False,
        {
            **_EITHER,
            "shared -> global (bulk reduce)": 36_864,
            "shared ld": 33_600,
            "shared st": 53_376,
        },
        {"softmax": 2588, "load": 300, "reduce": 1610, "mma": 596},
    ),
    # A row number that all lanes of a warp load is counted once a lane.
    "from registers": Counts(
        True,
        {**_EITHER, "global atomic": 36_864, "shared ld": 70_144, "shared st": 16_512},
        {"softmax": 2588, "load": 300, "reduce": 2976, "mma": 596},
    ),
}
"""By the way that dKV takes."""
SASS_PER_PTX = 3192 / 3364
"""Instructions of the cubin to those of the PTX, of which the run is counted."""


class Reduction(StrEnum):
    """How dKV reaches device memory."""

    BULK = "bulk reduce-add from shared memory (ours)"
    ATOMIC = "red.global.add.f32, thread = dim, from registers"
    ATOMIC_V4 = "red.global.add.v4.f32, turned in shared memory"


def counts(reduction: Reduction) -> Counts:
    """Of the kernel that adds so; of red.v4, which there is not, of the one that is nearest."""
    return COUNTS["bulk" if reduction is Reduction.BULK else "from registers"]


def matmuls(plan: BwdPlan) -> tuple[Matmul, ...]:
    """Of a block; part 2 of dKV belongs to every other block of a CTA."""
    products = products_of(plan)
    (s0, d0), (s1, d1), (rope,) = products.dkv
    named = (
        ("P", products.p, 1.0),
        ("P RoPE", products.p_rope, 1.0),
        ("dP", products.dp, 1.0),
        ("dQ", products.dq, 1.0),
        ("dQ RoPE", products.dq_rope, 1.0),
        ("dKV0 S", s0, 1.0),
        ("dKV0 dS", d0, 1.0),
        ("dKV1 S", s1, 1.0),
        ("dKV1 dS", d1, 1.0),
        ("dKV2", rope, 1 / CLUSTER),
    )
    return tuple(_matmul(name, product, share) for name, product, share in named)


def _matmul(name: str, product: UmmaProduct, share: float) -> Matmul:
    return Matmul(
        name,
        count=product.k // product.element.step_k * share,
        m=product.rows,
        n=product.n,
        a=Source.TMEM if product.a_in_tmem else Source.SHARED,
        half_rate=product.data_path == "F",
    )


def traffic(plan: BwdPlan, reduction: Reduction = Reduction.BULK) -> Traffic:
    """Of one block and CTA."""
    part_bytes = B_TOPK * GRADIENT_ROW_BYTES / CLUSTER
    exchange = 2 * plan.partial_bytes
    scores = 2 * plan.score_bytes
    rows = plan.kv_bytes + exchange + exchange + scores  # gathered, sent by the peer and read back
    bulk = reduction is Reduction.BULK
    staged = {Reduction.BULK: 1, Reduction.ATOMIC: 0, Reduction.ATOMIC_V4: 2}[reduction]
    return Traffic(
        useful_flop=2.0 * B_H * B_TOPK * BACKWARD_DIMS / CLUSTER,
        matmuls=matmuls(plan),
        shared_bytes=rows + staged * part_bytes,
        bulk_read_bytes=part_bytes if bulk else 0,
        dsmem_bytes=exchange,
        # a part of 64 dims is read with all 128 lanes, hence 2.5 parts
        tmem_bytes=exchange + plan.score_bytes + 2.5 * plan.partial_bytes,
        read_bytes=plan.kv_bytes,
        reduce_bytes=part_bytes,
        red_bytes=0 if bulk else part_bytes,
        red_width=4 if reduction is Reduction.ATOMIC else 16,
        exps=B_H * B_TOPK,
        instructions=sum(counts(reduction).instructions.values()) * SASS_PER_PTX,
    )


def steps(
    plan: BwdPlan, machine: GpuModel, reduction: Reduction, *, stays: bool = True
) -> Iterator[Step]:
    """The roles' order of mma.py, softmax.py, reduce_dkv.py and load.py.

    A step of the role mma or reduce that belongs to block b runs in unit b + 1, P and dP in unit b.
    A pair takes one query after the other: in the last unit of one, Q and dO of the next come.

    Args:
        stays: what ships. Else a pair takes one query, as the kernel did: the next one's first copy
            begins behind the last write. How long CTAs take to start is not counted.
    """
    of = {matmul.name: matmul for matmul in matmuls(plan)}
    bar = machine.barrier_latency.value

    def mma(name: str, parts: tuple[str, ...], *after: tuple[str, int]) -> Step:
        chosen = tuple(of[part] for part in parts)
        step = mma_step(machine, "mma", name, chosen, *after, wait=False)
        return replace(step, part=Part.SCORES if name in ("P", "dP") else Part.RESULTS)

    yield mma("P", ("P", "P RoPE"), ("P read", 1), ("gather", 0), ("Q, rest", 1))
    yield mma("dKV0 S", ("dKV0 S",), ("S ready", 1), ("part 2 read", 1))
    yield mma("dKV0 dS", ("dKV0 dS",), ("dS ready", 1))
    yield mma("dQ", ("dQ", "dQ RoPE"))
    yield mma("dP", ("dP",), ("dQ", 0), ("dO -> TMEM", 0))
    yield mma("dKV1", ("dKV1 S", "dKV1 dS"), ("part 0 read", 0))
    yield mma("dKV2", ("dKV2",), ("part 1 read", 0))

    gather = l2_cycles(machine, plan.kv_bytes)
    arrives = machine.l2_latency.value + bar
    behind = (("dQ", 1),)
    yield Step("load", "gather", gather, "gather", 0, behind, arrives, wait=False, part=Part.SCORES)
    half = l2_cycles(machine, plan.q_bytes / 2)
    rope = l2_cycles(machine, plan.q_rope_bytes)
    for name, cycles, last_read in (
        ("Q, first half", half, "dKV0 dS"),
        ("dO, first half", half, "dKV0 dS"),
        ("Q, rest", half + rope, "dKV2"),
        ("dO, rest", half, "dKV2"),
    ):
        freed: tuple[tuple[str, int], ...] = (
            ((last_read, 0),) if stays else (("dQ out", 0), ("part 2 sent", 0))
        )
        yield Step("query", name, cycles, "gather", 0, freed, arrives, False, (), Part.LAST)

    # A warp of each scheduler: clocks are instructions, or exponentials where those take longer.
    executed = counts(reduction).instructions
    issue = executed["softmax"] * SASS_PER_PTX / 4
    send = plan.partial_bytes / machine.dsmem_rate.value
    heard = machine.dsmem_latency.value + bar
    exps = B_TOPK * 128 / machine.exp_rate.value

    def softmax(
        name: str, share: float, *after: tuple[str, int], latency: float = 0, least: float = 0
    ) -> Step:
        cycles = max(share * issue, least)
        return Step("softmax", name, cycles, "", 0, after, latency, part=Part.SCORES)

    def sending(name: str, *after: tuple[str, int]) -> Iterator[Step]:
        for step in transfer("softmax", name, send, DSMEM, *after, latency=heard):
            yield replace(step, part=Part.SCORES)

    yield softmax("P read", 0.1, ("P", 0), latency=bar)
    yield from sending("send P", ("P read", 0), ("add dP", 1))
    yield softmax("add P", 0.4, ("send P", 0), least=exps)
    yield softmax("dP read", 0.1, ("dP", 0))
    yield from sending("send dP", ("dP read", 0))
    yield softmax("S ready", 0.1, ("dKV2", 0), latency=bar)
    yield softmax("add dP", 0.25, ("send dP", 0))
    yield softmax("dS ready", 0.05, latency=bar)

    stored = dq_bytes(plan) / machine.store_rate.value
    yield Step("softmax", "dQ out", stored, "", 0, (("dQ", 0),), part=Part.LAST)

    copied = plan.q_bytes * (1 / machine.operand_rate.value + 1 / machine.tmem_rate.value)
    came = (("dO, rest", 1),)
    yield Step("reduce", "dO -> TMEM", copied, "", 0, came, bar, part=Part.FIRST)
    way = BULK if reduction is Reduction.BULK else RED
    leave = reduction_cycles(plan, machine, reduction)
    issue = executed["reduce"] * SASS_PER_PTX / 4
    for part, mmas, share in ((0, "dKV0 dS", 0.4), (1, "dKV1", 0.4), (2, "dKV2", 0.2)):
        read, own = 0.2 * share * issue, max(leave * share, 0.8 * share * issue)
        yield Step("reduce", f"part {part} read", read, "", 0, ((mmas, 0),), bar, part=Part.RESULTS)
        for step in transfer("reduce", f"part {part} sent", own, way):
            yield replace(step, part=Part.RESULTS)


def dq_bytes(plan: BwdPlan) -> int:
    """Of a query's dQ in one CTA, bf16."""
    return B_H * (plan.dims + plan.own_rope_dims) * 2


def reduction_cycles(plan: BwdPlan, machine: GpuModel, reduction: Reduction) -> float:
    """Clocks that a block's dKV needs to leave the SM."""
    part_bytes = traffic(plan, reduction).reduce_bytes
    rate = {
        Reduction.BULK: machine.bulk_read_rate,
        Reduction.ATOMIC: machine.red_scalar_rate,
        Reduction.ATOMIC_V4: machine.red_rate,
    }[reduction]
    return part_bytes / rate.value


def work(
    machine: GpuModel,
    plan: BwdPlan | None = None,
    reduction: Reduction = Reduction.BULK,
    *,
    queries: int = QUERIES,
    topk: int = TOPK,
    s_kv: int = S_KV,
) -> Work:
    """The kernel on a shape of 128 heads."""
    plan = plan or BACKWARD_PLAN
    return Work(
        name=f"mla_bwd sm_100a, {reduction.value}",
        traffic=traffic(plan, reduction),
        units=float(queries * -(-topk // B_TOPK) * CLUSTER),
        steps=tuple(steps(plan, machine, reduction)),
        footprint=Footprint(reduced=s_kv * GRADIENT_ROW_BYTES, read=s_kv * ROW_BYTES),
        item_units=-(-topk // B_TOPK),
    )
