"""Our Blackwell indexer on B200: nothing was measured, so a range, from what is carried over.

What follows the scores is the Hopper kernel's code: its counts are the Hopper model's. A range goes
from device memory at its data sheet's rate and messages as on the H200 to memory at the share of it
that the H200 gives and messages that cross from one die to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashdsa.kernels.indexer.sm100.plan import PAGES_PER_STAGE, IndexerPlan
from flashdsa.problem import INDEX_HEAD_DIM, PAGE_BYTES, PAGE_SIZE
from workbench.model.indexer_sm90 import (
    FIRST_COPY,
    MESSAGES,
    NUM_HEADS,
    SKEW,
    TOKEN_BYTES,
    WARPS_OF_A_SCHEDULER,
    Shape,
    shapes,
)
from workbench.model.machine import H200, Constant, GpuModel

H200_SHEET = 4.8e12
"""B/s of the H200's data sheet: a stream there reaches H200.hbm."""
DIES_LATENCY = 300
"""Clocks that a message from one die to the other takes more (SemiAnalysis, Dissecting Blackwell:
of L2; assumed of shared memory)."""
CARRIED = (
    "ranking and the first page's way: the Hopper kernel's counts",
    "waiting for the slowest of a cluster: 500 clk a message, measured on an H200",
    "launch: 4.0 us, measured on an H200",
    "B200 driver's clusters: assumed from GPCs of 18 and 20 SMs",
)
EPILOGUE = 3 * NUM_HEADS // 2 + NUM_HEADS // 4 + 80
"""Instructions of a warp for 32 tokens: an addition a head, a packed FMA and a quarter of a load of
weights for two; 80 for scale, key, list and histogram, estimated."""
RESOLUTION = 0.1e-6
"""Seconds: what differs by less is equal, as far as this model knows."""
_CTAS = {
    "1/8K": (13, 1), "1/32K": (13, 1), "1/128K": (104, 8), "8/16K": (13, 1), "32/4K": (4, 1),
    "32/16K": (4, 1), "32/64K": (4, 1), "128/16K": (1, 1), "128/64K": (1, 1),
}  # fmt: skip
"""CTAs of a row and clusters that they form, as backends/indexer/clusters.py chooses for the
emulator's B200."""


@dataclass(frozen=True)
class StagePrediction:
    """A shape with so many pages a stage: seconds at best and at worst, and what binds."""

    shape: Shape
    pages_per_stage: int
    low: float
    high: float
    bound: str

    def to_json_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "shape": self.shape.name,
            "pages_per_stage": self.pages_per_stage,
            "ctas_of_a_row": self.shape.ctas,
            "microseconds": [self.low * 1e6, self.high * 1e6],
            "bound": self.bound,
        }


def b200_shapes() -> tuple[Shape, ...]:
    """The nine of the benchmark, with the CTAs that a B200 gives a row."""
    return tuple(
        replace(shape, ctas=_CTAS[shape.name][0], num_splits=_CTAS[shape.name][1])
        for shape in shapes()
    )


def product_clocks(plan: IndexerPlan, machine: GpuModel) -> float:
    """Of the products of one stage: the tensor core, or shared memory, from which both operands
    come."""
    clocks = 0.0
    for product in plan.products:
        rate = machine.fp8_rate.value
        if product.m <= machine.half_rate_m.value:
            rate /= 2
        operands = (product.m + product.n) * INDEX_HEAD_DIM
        flop = 2 * product.m * product.n * INDEX_HEAD_DIM
        clocks += max(flop / rate, operands / machine.operand_rate.value)
    return clocks


def epilogue_clocks(plan: IndexerPlan, machine: GpuModel, warps: int) -> float:
    """From a stage's products to the list, of a warp among so many that its scheduler has."""
    tokens_a_thread = max(1, plan.stage_tokens // 128)
    loads = plan.stage_tokens * plan.num_heads * 4 / machine.tmem_rate.value
    return tokens_a_thread * EPILOGUE * max(warps, 1) + loads


def predict_stages(shape: Shape, plan: IndexerPlan, machine: GpuModel) -> StagePrediction:
    """The time of a shape, by CUDA events around one launch, L2 flushed."""
    low = _seconds(shape, plan, machine, machine.hbm, H200.dsmem_latency.value)
    share = H200.hbm.value / H200_SHEET
    slow = replace(machine.hbm, value=machine.hbm.value * share)
    high = _seconds(shape, plan, machine, slow, machine.dsmem_latency.value + DIES_LATENCY)
    return StagePrediction(shape, plan.pages_per_stage, low[0], high[0], high[1])


def _seconds(
    shape: Shape, plan: IndexerPlan, machine: GpuModel, hbm: Constant, message: float
) -> tuple[float, str]:
    clock, near = machine.clock.value, machine.l2_latency.value
    pages = -(-shape.tokens // PAGE_SIZE)
    own = -(-pages // shape.ctas)
    rounds = -(-shape.rows * shape.ctas // int(machine.sms.value))
    stages = -(-own // plan.pages_per_stage) * rounds
    of_sm = machine.l2_read.value / machine.sms.value / clock
    epilogue = epilogue_clocks(plan, machine, WARPS_OF_A_SCHEDULER) / plan.consumer_warpgroups
    sm_parts = {
        "an SM's reads": plan.pages_per_stage * PAGE_BYTES / of_sm,
        "products": product_clocks(plan, machine),
        "epilogue": epilogue,
    }
    slowest = max(sm_parts, key=lambda name: sm_parts[name])
    parts = {
        "device memory": shape.rows * shape.tokens * TOKEN_BYTES / hbm.value,
        slowest: stages * sm_parts[slowest] / clock,
    }
    bound = max(parts, key=lambda name: parts[name])
    # Behind the last page: its stage's product and a warp's own epilogue, with few beside it.
    active = min(plan.consumer_warpgroups, stages)
    last = product_clocks(plan, machine) + machine.mma_latency.value
    last += epilogue_clocks(plan, machine, active)
    cold = machine.hbm_latency.value
    first = FIRST_COPY.clocks(machine, 1, cold) + cold + machine.barrier_latency.value
    one_message = message + SKEW
    messages = MESSAGES * one_message if shape.ctas > shape.num_splits else 0.0
    if shape.num_splits > 1:
        messages += messages + machine.release_latency.value + 2 * near + one_message
    ranking = shape.ranking.clocks(machine, WARPS_OF_A_SCHEDULER, near)
    fixed = machine.launch.value + (first + last + messages + ranking) / clock
    total = fixed + parts[bound]
    return total, bound if parts[bound] > fixed else "launch, messages and ranking"


def predict_all(machine: GpuModel) -> dict[str, Sequence[StagePrediction]]:
    """Shape -> predictions by pages per stage, the best one first."""
    return {
        shape.name: sorted(
            (
                predict_stages(shape, IndexerPlan(pages_per_stage=pages), machine)
                for pages in sorted(PAGES_PER_STAGE, key=lambda pages: pages != 2)
            ),
            key=lambda one: round(one.low + one.high, 8),
        )
        for shape in b200_shapes()
    }
