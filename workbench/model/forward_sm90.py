"""Our Hopper forward: a unit is a step, 128 keys of a work item of 64 rows of Q.

Matrix products come from the plan. What threads move, and their instructions, were counted in an
emulated run (`COUNTED`; tests/analysis counts again).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from flashdsa.kernels.sparse_mla.sm90.fwd.plan import (
    CHUNK,
    CHUNKS,
    HALF_DIMS,
    ROWS,
    STEP_KEYS,
    TILE_BYTES,
    TILE_KEYS,
    TILES,
)
from workbench.model.machine import GpuModel
from workbench.model.predict import Prediction, Work, predict
from workbench.model.shapes import (
    FORWARD_DIMS,
    QUERIES,
    ROW_BYTES,
    TOPK,
    l2_cycles,
)
from workbench.model.timeline import Step, mma_step
from workbench.model.traffic import Footprint, Matmul, Source, Traffic

MMA_K = 16
S_KV = 8192
COUNTED = {
    "MMA shared read": 442_368,
    "global -> shared (cp.async)": 147_456,
    "shared st": 16_920,
    "shared ld": 5_632,
}
"""Bytes of a step by ptxemu's paths: a run of 6 steps less one of 4, by two steps."""
COUNTED_INSTRUCTIONS = {"gather": 968, "left": 2984, "right": 2972}
"""PTX instructions of a step, all warps of the role."""


def matmuls() -> dict[str, Matmul]:
    """Of a step, by who computes what; P comes from its own consumer's registers."""
    scores = CHUNKS * CHUNK // MMA_K
    values = TILE_KEYS // MMA_K
    own, other = Source.REGISTERS, Source.SHARED
    found = [Matmul(f"S{tile}", scores, ROWS, TILE_KEYS) for tile in range(TILES)]
    for name, a in (("P0 left", own), ("P0 right", other), ("P1 left", other), ("P1 right", own)):
        found.append(Matmul(name, values, ROWS, HALF_DIMS, a=a))
    return {matmul.name: matmul for matmul in found}


def traffic() -> Traffic:
    """Of a step."""
    threads = COUNTED["shared st"] + COUNTED["shared ld"]
    return Traffic(
        useful_flop=2.0 * ROWS * STEP_KEYS * FORWARD_DIMS,
        matmuls=tuple(matmuls().values()),
        shared_bytes=TILES * TILE_BYTES + threads,
        read_bytes=STEP_KEYS * ROW_BYTES,
        exps=ROWS * STEP_KEYS,
        instructions=sum(COUNTED_INSTRUCTIONS.values()),
    )


def steps(machine: GpuModel) -> Iterator[Step]:
    """The roles' order of left.py, right.py and gather.py."""
    of = matmuls()
    heard = machine.barrier_latency.value
    half = l2_cycles(machine, TILE_BYTES / 2)
    arrives = machine.l2_latency.value + heard
    # A warp of each scheduler: a clock an instruction.
    softmax = {side: COUNTED_INSTRUCTIONS[side] / 4 for side in ("left", "right")}

    def mma(role: str, name: str, *after: tuple[str, int], wait: bool = True) -> Step:
        return mma_step(machine, role, name, (of[name],), *after, wait=wait)

    yield mma("left", "S0", ("half 0", 0), ("half 1", 0))
    yield Step("left", "softmax 0", softmax["left"], "", 0, (), heard)
    yield mma("left", "P0 left")
    yield mma("left", "P1 left", ("softmax 1", 0))

    yield mma("right", "S1", ("half 2", 0), ("half 3", 0), ("S0", 0))
    yield mma("right", "P0 right", ("softmax 0", 0), wait=False)
    yield Step("right", "softmax 1", softmax["right"], "", 0, (), heard)
    yield mma("right", "P1 right", ("P0 right", 0))

    for number, freed in enumerate(("P0 left", "P0 right", "P1 right", "P1 left")):
        name, after = f"half {number}", ((freed, 1),)
        yield Step("gather", name, half, "gather", 0, after, arrives, wait=False)


@dataclass(frozen=True)
class Prefill:
    """A call with 64 heads or a multiple of them."""

    heads: int
    queries: int = QUERIES
    topk: int = TOPK
    s_kv: int = S_KV

    @property
    def flop(self) -> float:
        """Of all slots."""
        return 2.0 * self.queries * self.heads * self.topk * FORWARD_DIMS

    @property
    def name(self) -> str:
        """Its sizes."""
        return f"H={self.heads}, S={self.queries}, topk={self.topk}, S_kv={self.s_kv}"


def work(case: Prefill, machine: GpuModel) -> Work:
    """The kernel on a call: every CTA has the time of the one with the most items."""
    items = case.queries * math.ceil(case.heads / ROWS)
    sms = machine.sms.value
    rounds = math.ceil(items / sms)
    return Work(
        name=f"mla_fwd sm_90a, {case.name}",
        traffic=traffic(),
        units=rounds * sms * math.ceil(case.topk / STEP_KEYS),
        steps=tuple(steps(machine)),
        footprint=Footprint(read=case.s_kv * ROW_BYTES),
    )


def predict_forward(case: Prefill, machine: GpuModel) -> Prediction:
    """Back to back, with the clock of busy tensor cores."""
    return predict(work(case, machine), machine)
