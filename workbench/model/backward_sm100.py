"""Our Blackwell backward: a unit is a block of 32 keys in one CTA of the pair.

Matrix products and bytes come from the plan, instructions from an emulated run; a test counts them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flashdsa.kernels.attention.sm100.bwd.plan import BwdPlan
from flashdsa.kernels.attention.sm100.bwd.products import products_of
from flashdsa.kernels.attention.sm100.core.tile import CLUSTER, PAIR_ROWS
from flashdsa.kernels.catalog import MLA_BWD
from flashdsa.problem import D_QK, D_V
from workbench.model import roofline
from workbench.model.machine import GpuModel
from workbench.model.roofline import Footprint, Matmul, Traffic, Work, matmul_of, mma_step
from workbench.model.timeline import BULK, DSMEM, After, Part, Step, transfer

PLAN: BwdPlan = MLA_BWD.plans[0]
"""The plan of the kernel that ships."""
INSTRUCTIONS = {"softmax": 2588, "load": 300, "reduce": 1610, "mma": 596}
"""PTX instructions of a block and CTA, all warps of the role."""
DIMS = 3 * D_QK + 2 * D_V
"""Multiply-adds of a (head, key) pair: P, dP, dQ and the two halves of dKV."""
SASS_PER_PTX = 3192 / 3364
"""Instructions of the cubin to those of the PTX, of which the run is counted."""


def matmuls(plan: BwdPlan) -> dict[str, Matmul]:
    """List those of a block; part 2 of dKV belongs to every other block of a CTA."""
    of = products_of(plan)
    found = {"P": of.p, "P RoPE": of.p_rope, "dP": of.dp, "dQ": of.dq, "dQ RoPE": of.dq_rope}
    (s0, d0), (s1, d1), (rope,) = of.dkv
    found |= {"dKV0 S": s0, "dKV0 dS": d0, "dKV1 S": s1, "dKV1 dS": d1}
    named = {name: matmul_of(product) for name, product in found.items()}
    return named | {"dKV2": matmul_of(rope, 1 / CLUSTER)}


def traffic(plan: BwdPlan = PLAN) -> Traffic:
    """Count one block and CTA."""
    part_bytes = plan.tile.keys * roofline.GRADIENT_ROW_BYTES / CLUSTER
    exchange = 2 * plan.partial_bytes
    # gathered, sent by the peer and read back
    rows = plan.tile.bytes + 2 * exchange + 2 * plan.score_bytes
    return Traffic(
        useful_flop=2.0 * PAIR_ROWS * plan.tile.keys * DIMS / CLUSTER,
        matmuls=tuple(matmuls(plan).values()),
        shared_bytes=rows + part_bytes,
        dsmem_bytes=exchange,
        # a part of 64 dims is read with all 128 lanes, hence 2.5 parts
        tmem_bytes=exchange + plan.score_bytes + 2.5 * plan.partial_bytes,
        read_bytes=plan.tile.bytes,
        reduce_bytes=part_bytes,
        exps=PAIR_ROWS * plan.tile.keys,
        instructions=sum(INSTRUCTIONS.values()) * SASS_PER_PTX,
    )


class Adds(NamedTuple):
    """One way in which dKV of a block and CTA reaches global memory.

    Attributes:
        issue_slots: warp instructions that send it, from accumulators in registers on.
        requests: that L2 gets.
        sectors: of 32 bytes, to which L2 adds.
    """

    way: str
    issue_slots: float
    requests: float
    sectors: float


def ways_to_add(plan: BwdPlan = PLAN) -> list[Adds]:
    """Count the kernel's bulk adds, and one `red.global.add.f32` per value in their place.

    A lane holds one dim of all keys. The kernel stores each key's dims to shared memory, and one
    lane sends a row's part. Without that a warp adds 32 dims of a key at once, after it has looked
    whether the key is valid and computed the row's address. Fences and barriers of the ring are
    left out.
    """
    parts = ((plan.part_dims, 1.0), (plan.part_dims, 1.0), (plan.tile.rope_dims, 1 / CLUSTER))
    rows = sum(plan.tile.keys * share for _, share in parts)
    sectors = sum(plan.tile.keys * share * dims * 4 / 32 for dims, share in parts)
    by_warps = 4 * rows  # of the role reduce
    return [
        Adds("bulk adds from shared memory", by_warps + rows, rows, sectors),
        Adds("red.global from registers", 3 * by_warps, by_warps, sectors),
    ]


def steps(machine: GpuModel, plan: BwdPlan = PLAN) -> Iterator[Step]:
    """Order the roles' steps as mma.py, softmax.py, reduce_dkv.py and load.py do.

    A step of the role mma or reduce that belongs to block b runs in unit b + 1, P and dP in unit b.
    A pair takes one query after the other: in the last unit of one, Q and dO of the next come.
    """
    of = matmuls(plan)
    bar = machine["barrier_latency"]

    def mma(name: str, parts: tuple[str, ...], *after: After) -> Step:
        chosen = tuple(of[part] for part in parts)
        part = Part.SCORES if name in ("P", "dP") else Part.RESULTS
        return mma_step(machine, name, chosen, *after, part=part)

    yield mma("P", ("P", "P RoPE"), ("P read", 1), ("gather", 0), ("Q, rest", 1))
    yield mma("dKV0 S", ("dKV0 S",), ("S ready", 1), ("part 2 read", 1))
    yield mma("dKV0 dS", ("dKV0 dS",), ("dS ready", 1))
    yield mma("dQ", ("dQ", "dQ RoPE"))
    yield mma("dP", ("dP",), ("dQ", 0), ("dO -> TMEM", 0))
    yield mma("dKV1", ("dKV1 S", "dKV1 dS"), ("part 0 read", 0))
    yield mma("dKV2", ("dKV2",), ("part 1 read", 0))

    gather = roofline.l2_cycles(machine, plan.tile.bytes)
    arrives = machine["l2_latency"] + bar
    behind = (("dQ", 1),)
    yield Step("load", "gather", gather, "gather", 0, behind, arrives, wait=False, part=Part.SCORES)
    half = roofline.l2_cycles(machine, plan.q_bytes / 2)
    rope = roofline.l2_cycles(machine, plan.q_rope_bytes)
    for name, cycles, last_read in (
        ("Q, first half", half, "dKV0 dS"),
        ("dO, first half", half, "dKV0 dS"),
        ("Q, rest", half + rope, "dKV2"),
        ("dO, rest", half, "dKV2"),
    ):
        freed = ((last_read, 0),)
        yield Step("query", name, cycles, "gather", 0, freed, arrives, False, (), Part.LAST)

    # A warp of each scheduler: clocks are instructions, or exponentials where those take longer.
    issue = INSTRUCTIONS["softmax"] * SASS_PER_PTX / 4
    send = plan.partial_bytes / machine["dsmem_rate"]
    heard = machine["dsmem_latency"] + bar
    exps = plan.tile.keys * 128 / machine["exp_rate"]

    def softmax(
        name: str, share: float, *after: After, latency: float = 0, least: float = 0
    ) -> Step:
        cycles = max(share * issue, least)
        return Step("softmax", name, cycles, "", 0, after, latency, part=Part.SCORES)

    def sending(name: str, *after: After) -> list[Step]:
        return transfer("softmax", name, send, DSMEM, *after, latency=heard, part=Part.SCORES)

    yield softmax("P read", 0.1, ("P", 0), latency=bar)
    yield from sending("send P", ("P read", 0), ("add dP", 1))
    yield softmax("add P", 0.4, ("send P", 0), least=exps)
    yield softmax("dP read", 0.1, ("dP", 0))
    yield from sending("send dP", ("dP read", 0))
    yield softmax("S ready", 0.1, ("dKV2", 0), latency=bar)
    yield softmax("add dP", 0.25, ("send dP", 0))
    yield softmax("dS ready", 0.05, latency=bar)

    stored = PAIR_ROWS * (plan.tile.dims + plan.tile.own_rope_dims) * 2 / machine["store_rate"]
    yield Step("softmax", "dQ out", stored, "", 0, (("dQ", 0),), part=Part.LAST)

    copied = plan.q_bytes * (1 / machine["operand_rate"] + 1 / machine["tmem_rate"])
    came = (("dO, rest", 1),)
    yield Step("reduce", "dO -> TMEM", copied, "", 0, came, bar, part=Part.FIRST)
    leave = traffic(plan).reduce_bytes / machine["bulk_read_rate"]
    issue = INSTRUCTIONS["reduce"] * SASS_PER_PTX / 4
    for part, mmas, share in ((0, "dKV0 dS", 0.4), (1, "dKV1", 0.4), (2, "dKV2", 0.2)):
        read, own = 0.2 * share * issue, max(leave * share, 0.8 * share * issue)
        yield Step("reduce", f"part {part} read", read, "", 0, ((mmas, 0),), bar, part=Part.RESULTS)
        yield from transfer("reduce", f"part {part} sent", own, BULK, part=Part.RESULTS)


def work(machine: GpuModel, queries: int, topk: int, s_kv: int) -> Work:
    """Take the kernel on a shape of 128 heads."""
    blocks = -(-topk // PLAN.tile.keys)
    footprint = Footprint(s_kv * roofline.GRADIENT_ROW_BYTES, s_kv * roofline.ROW_BYTES)
    units = float(queries * blocks * CLUSTER)
    return Work(traffic(), units, footprint, tuple(steps(machine)), item_units=blocks)
