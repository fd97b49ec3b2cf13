"""Our Hopper decode of 64 heads an item: steps of 128 keys as in the forward, and what a launch
takes besides. There is no prediction for the kernel of few heads.

Packed rows are expanded by the gather's warps, whose instructions of a step were counted in an
emulated run (`COUNTED`; tests/analysis counts again).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from flashdsa.backends.emulated.runner import Emulator
from flashdsa.backends.sm90.sparse_mla_decode import choose, cluster_size_for
from flashdsa.kernels.sparse_mla.sm90.few_heads.plan import FewHeadsPlan
from flashdsa.kernels.sparse_mla.sm90.fwd.plan import ROWS, STEP_KEYS, TILE_KEYS, TILES
from flashdsa.problem import KV_ROW_BYTES
from workbench.model import forward_sm90
from workbench.model.machine import GpuModel
from workbench.model.predict import Prediction, Work, predict
from workbench.model.shapes import FORWARD_DIMS, ROW_BYTES, TOPK, l2_cycles
from workbench.model.timeline import Step
from workbench.model.traffic import Footprint, Traffic

CLUSTERS_AT_ONCE = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15, 16: 7}
"""Of an H200, by CTAs, as its driver says of this kernel (workbench/results/sparse_mla_decode)."""
EMPTY_SECONDS = {1: 5.3e-6, 2: 5.3e-6, 8: 5.6e-6, 16: 6.8e-6}
"""A call with nothing to do, by CTAs of its clusters, measured there."""
COUNTED = {
    "MMA shared read": 442_368,
    "global -> shared (cp.async)": 81_920,
    "shared st": 147_984,
    "shared ld": 71_680,
}
"""Bytes of a step of packed rows by ptxemu's paths: a run of 6 steps less one of 4, by two."""
COUNTED_INSTRUCTIONS = {"gather": 6422, "left": 3124, "right": 3108}
"""PTX instructions of a step of packed rows, all warps of the role."""
GATHER_WARPS = 4
TAKING = 250
"""Clocks from a half's bytes to their first values, while the products take shared memory: a
load, a shuffle and a barrier of the warp; assumed."""
FIRST_STEP = 3
"""Ways to device memory before the first products: ids, rows of kv, Q; and O's way back."""


SHAPES = (
    (64, 1),
    (64, 8),
    (64, 32),
    (64, 128),
    (128, 1),
    (128, 8),
    (128, 64),
    (128, 256),
    (16, 8),
    (16, 128),
)
"""Heads and queries of `flashdsa bench sparse_mla_decode`."""


@dataclass(frozen=True)
class Decode:
    """A call of few queries.

    Attributes:
        queries: of all requests. packed: rows of 656 bytes, else bf16.
        s_kv: rows of the cache.
    """

    heads: int
    queries: int
    packed: bool = True
    topk: int = TOPK
    s_kv: int = 2**22

    @property
    def items(self) -> int:
        """64 heads of a query each."""
        return self.queries * math.ceil(self.heads / ROWS)

    @property
    def flop(self) -> float:
        """Of all slots."""
        return 2.0 * self.queries * self.heads * self.topk * FORWARD_DIMS

    @property
    def row_bytes(self) -> int:
        """Of a row of the cache."""
        return KV_ROW_BYTES if self.packed else ROW_BYTES

    @property
    def num_ctas(self) -> int:
        """Of an item, on an H200."""
        return cluster_size_for(CLUSTERS_AT_ONCE, self.items, self.topk)

    @property
    def few_heads(self) -> bool:
        """Whether the kernel of few heads takes it on an H200, of which there is no prediction."""
        sizes = self.packed, self.queries, self.heads, self.topk
        return isinstance(choose(Emulator(), *sizes)[0], FewHeadsPlan)

    @property
    def name(self) -> str:
        """Its sizes."""
        rows = "packed" if self.packed else "bf16"
        return f"H={self.heads}, S={self.queries}, topk={self.topk}, {rows}"


def traffic(packed: bool) -> Traffic:
    """Of a step. Packed rows reach shared memory, leave it, and come back as f16."""
    if not packed:
        return forward_sm90.traffic()
    of_forward = forward_sm90.traffic()
    return Traffic(
        useful_flop=of_forward.useful_flop,
        matmuls=of_forward.matmuls,
        shared_bytes=sum(COUNTED.values()) - COUNTED["MMA shared read"],
        read_bytes=STEP_KEYS * KV_ROW_BYTES,
        exps=of_forward.exps,
        instructions=sum(COUNTED_INSTRUCTIONS.values()),
    )


def steps(machine: GpuModel, packed: bool) -> Iterator[Step]:
    """The forward's roles; of packed rows the gather of `expand.py`, a tile after the other."""
    of_forward = list(forward_sm90.steps(machine))
    if not packed:
        yield from of_forward
        return
    yield from (step for step in of_forward if step.role != "gather")
    heard = machine.barrier_latency.value
    half = l2_cycles(machine, STEP_KEYS / TILES / 2 * KV_ROW_BYTES)
    arrives = machine.hbm_latency.value
    expanding = TAKING + COUNTED_INSTRUCTIONS["gather"] / GATHER_WARPS / (2 * TILES)
    freed = (("P0 left", "P0 right"), ("P1 right", "P1 left"))
    for tile in range(TILES):
        numbers = (2 * tile, 2 * tile + 1)
        for number, by in zip(numbers, freed[tile], strict=True):
            name = f"copy {number}"
            yield Step("gather", name, half, "copies", 0, ((by, 1),), arrives, wait=False)
        for number in numbers:
            after = ((f"copy {number}", 0),)
            yield Step("gather", f"half {number}", expanding, "", 0, after, heard)


def predict_decode(case: Decode, machine: GpuModel) -> Prediction:
    """Back to back in a graph: a launch, the first step's way, and the steps of a CTA."""
    num_steps = math.ceil(math.ceil(case.topk / TILE_KEYS) / case.num_ctas) / TILES
    sms = machine.sms.value
    ctas = case.items * case.num_ctas
    rounds = math.ceil(ctas / sms)
    found = predict(
        Work(
            name=f"mla_decode sm_90a, {case.name}",
            traffic=traffic(case.packed),
            units=rounds * num_steps * min(ctas, sms),
            steps=tuple(steps(machine, case.packed)),
            footprint=Footprint(read=case.s_kv * case.row_bytes),
            sms=min(ctas, sms),
        ),
        machine,
    )
    empty = min(EMPTY_SECONDS[size] for size in EMPTY_SECONDS if size >= case.num_ctas)
    chain = FIRST_STEP * machine.hbm_latency.value / machine.clock.value
    seconds = found.seconds + empty + chain
    return Prediction(
        found.name,
        found.machine,
        found.demands,
        found.chip_cycles,
        found.cycles,
        seconds,
        case.flop / seconds / 1e12,
        found.bound,
    )
