"""Our Blackwell indexer on B200: nothing was measured, so a range, from carried-over numbers.

The code after the scores is the Hopper kernel's. A range goes from device memory at its data
sheet's rate and messages as on the H200 to memory at the share of it that the H200 gives and
messages that cross from one die to the other.
"""

from __future__ import annotations

from typing import NamedTuple

from flashdsa.kernels.indexer.sm100.plan import IndexerPlan
from flashdsa.problem import PAGE_BYTES, PAGE_SIZE
from workbench.model.machine import H200, GpuModel
from workbench.model.roofline import matmul_of

PLAN = IndexerPlan()
WARPS_OF_A_SCHEDULER = 4
"""Warps of each scheduler, of the 16 that score and rank."""
H200_SHEET = 4.8e12
"""B/s of the H200's data sheet: a stream there reaches its "hbm"."""
DIES_LATENCY = 300
"""Clocks that a message from one die to the other takes more (SemiAnalysis, Dissecting Blackwell:
of L2; assumed of shared memory)."""
MESSAGES, SKEW = 3, 500
"""Messages of a cluster's CTAs to each other, one after the other; clocks that each waits for the
slowest of the cluster besides, measured on an H200 at 1/8K and 1/32K."""
EPILOGUE = 3 * PLAN.num_heads // 2 + PLAN.num_heads // 4 + 80
"""Instructions of a warp for 32 tokens: an addition a head, a packed FMA and a quarter of a load of
weights for two; 80 for scale, key, list and histogram, estimated."""
FIRST_COPY = 1_982
"""Clocks of a producer's way to its first page: length, segment, page ids."""


class Shape(NamedTuple):
    """A benchmark shape: ctas share a row, in num_splits clusters; ranking follows the scores."""

    name: str
    rows: int
    tokens: int
    ctas: int
    num_splits: int
    ranking: int


class IndexerRange(NamedTuple):
    """Seconds of a shape at best and at worst, and the bound."""

    shape: Shape
    low: float
    high: float
    bound: str


K = 1024
SHAPES = (
    Shape("1/8K", 1, 8 * K, 13, 1, 7_824),
    Shape("1/32K", 1, 32 * K, 13, 1, 8_891),
    Shape("1/128K", 1, 128 * K, 128, 16, 18_607),
    Shape("8/16K", 8, 16 * K, 13, 1, 6_895),
    Shape("32/4K", 32, 4 * K, 4, 1, 6_513),
    Shape("32/16K", 32, 16 * K, 4, 1, 7_972),
    Shape("32/64K", 32, 64 * K, 4, 1, 9_259),
    Shape("128/16K", 128, 16 * K, 1, 1, 8_466),
    Shape("128/64K", 128, 64 * K, 1, 1, 8_020),
)
"""CTAs of a row and clusters that they form, as backends/indexer/choice.py and the kernel's
schedule choose for the emulator's B200; clocks of the slowest warp after its last scores: its
instructions, loads, shuffles and barriers, counted in emulated runs of the Hopper kernel, at the
H200's latencies."""


def product_clocks(machine: GpuModel) -> float:
    """Count the clocks of a stage's product: of the tensor core, or of the operands' port."""
    return matmul_of(PLAN.product).cycles(machine)


def _epilogue_clocks(machine: GpuModel, warps: int) -> float:
    loads = PLAN.stage_tokens * PLAN.num_heads * 4 / machine["tmem_rate"]
    return EPILOGUE * max(warps, 1) + loads


def _seconds(shape: Shape, machine: GpuModel, message: float) -> tuple[float, str]:
    clock, sms = machine["clock"], machine["sms"]
    own = -(-shape.tokens // PAGE_SIZE // shape.ctas)
    stages = -(-own // PLAN.pages_per_stage) * -(-shape.rows * shape.ctas // int(sms))
    groups = PLAN.consumer_warpgroups
    of_stage = {
        "an SM's reads": PLAN.pages_per_stage * PAGE_BYTES * sms * clock / machine["l2_read"],
        "products": product_clocks(machine),
        "epilogue": _epilogue_clocks(machine, WARPS_OF_A_SCHEDULER) / groups,
    }
    parts = {name: stages * clocks / clock for name, clocks in of_stage.items()}
    parts["device memory"] = shape.rows * shape.tokens / PAGE_SIZE * PAGE_BYTES / machine["hbm"]
    bound = max(parts, key=lambda name: parts[name])
    first = FIRST_COPY + machine["hbm_latency"] + machine["barrier_latency"]
    # After the last page: its stage's product and a warp's own epilogue, with few beside it.
    last = product_clocks(machine) + machine["mma_latency"]
    last += _epilogue_clocks(machine, min(groups, stages))
    messages = MESSAGES * (message + SKEW) if shape.ctas > shape.num_splits else 0.0
    if shape.num_splits > 1:
        messages += messages + machine["release_latency"] + 2 * machine["l2_latency"]
        messages += message + SKEW
    fixed = machine["launch"] + (first + last + messages + shape.ranking) / clock
    return fixed + parts[bound], bound if parts[bound] > fixed else "launch, messages and ranking"


def predict_all(machine: GpuModel) -> dict[str, IndexerRange]:
    """Predict the time of every shape by CUDA events around one launch, L2 flushed."""
    slow = machine.with_values({"hbm": machine["hbm"] * H200["hbm"] / H200_SHEET})
    found = {}
    for shape in SHAPES:
        low, _ = _seconds(shape, machine, H200["dsmem_latency"])
        high, bound = _seconds(shape, slow, machine["dsmem_latency"] + DIES_LATENCY)
        found[shape.name] = IndexerRange(shape, low, high, bound)
    return found
