"""The Blackwell backward's budget, old against new: of a block and CTA, and between two queries.

What is now follows from the plan, the timeline and the counts of `backward_sm100`. What was is of
the kernel that a review counted: one warp gathered, one sent, the exchange released all memory, and
a pair of CTAs took one query.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.kernels.sparse_mla.sm100.bwd.plan import B_TOPK, BwdPlan
from workbench.model.backward_sm100 import (
    BACKWARD_PLAN,
    Reduction,
    counts,
    dq_bytes,
    steps,
    traffic,
)
from workbench.model.machine import GpuModel
from workbench.model.timeline import ends
from workbench.model.unknowns import ISSUING_WARPS, bulk_adds, gathers

FIRST_INSTRUCTIONS = 4411
"""Of the PTX, a block and CTA, all warps: counted in the review, as the two of FIRST_FENCES."""
FIRST_FENCES = 2
"""`MEMBAR.ALL.GPU` that a block's scores wait for; tests look for them in the machine code."""


@dataclass(frozen=True)
class Line:
    """A resource: what the first kernel, the present one, and that from registers need of it."""

    resource: str
    first: float
    now: float
    from_registers: float


def budget(machine: GpuModel, plan: BwdPlan = BACKWARD_PLAN) -> list[Line]:
    """Every line; clocks are of `machine`."""
    ways = (Reduction.BULK, Reduction.BULK, Reduction.ATOMIC)
    found = [traffic(plan, way) for way in ways]
    demands = [one.demands(machine) for one in found]
    executed = [sum(counts(way).instructions.values()) for way in ways]
    between = [
        ends(
            tuple(steps(plan, machine, way, stays=stays)),
            traffic(plan, way).other_port_cycles(machine),
        )
        for way, stays in zip(ways, (False, True, True), strict=True)
    ]
    dq, ports = dq_bytes(plan), (machine.operand_rate.value, machine.bulk_read_rate.value)
    by_smem = dq / ports[0] + dq / ports[1]
    adds = bulk_adds()
    return [
        Line("a block: MMAs, clocks", *(one.tensor_cycles(machine) for one in found)),
        Line(
            "a block: port of shared memory, clocks",
            *(one["shared memory port"] for one in demands),
        ),
        Line(
            "a block: L2, gathered and added, bytes",
            *(one.read_bytes + one.reduce_bytes for one in found),
        ),
        Line("a block: DSMEM, bytes", *(one.dsmem_bytes for one in found)),
        Line("a block: tensor memory, bytes", *(one.tmem_bytes for one in found)),
        Line("a block: red port, bytes", *(one.red_bytes for one in found)),
        Line("a block: bulk adds of the busiest warp", adds * ISSUING_WARPS, adds, 0),
        Line(
            "a block: gathers of the busiest warp",
            gathers(B_TOPK) * ISSUING_WARPS,
            gathers(B_TOPK),
            gathers(B_TOPK),
        ),
        Line("a block: MEMBAR.ALL.GPU its scores wait for", FIRST_FENCES, 0, 0),
        Line("a block: instructions of all warps", FIRST_INSTRUCTIONS, *executed[1:]),
        Line("a query: dQ through shared memory, clocks of its port", by_smem, 0, 0),
        Line("between two queries, clocks", *between),
    ]
