"""Our Hopper indexer: launch, the way to the first page, the stream of pages, the ranking.

What the slowest warp of a row's CTAs executes was counted in emulated runs of the shapes
(workbench/probes/count_indexer_paths.py; tests/analysis counts one again): one row with the CTAs
that an H200 gives it, since rows of a batch do not meet.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.problem import INDEX_HEAD_DIM, PAGE_BYTES, PAGE_SIZE
from workbench.model.machine import GpuModel

TOKEN_BYTES = PAGE_BYTES / PAGE_SIZE
NUM_HEADS = 64
SASS_PER_PTX = 2920 / 2870
"""Instructions of the cubin to those of the PTX, of which the runs are counted."""
WARPS_OF_A_SCHEDULER = 4
"""Of the 16 that score and rank."""


@dataclass(frozen=True)
class Executed:
    """What one warp executes, as workbench/probes/count_indexer_paths.py counts."""

    instructions: int
    global_trips: int
    shared_trips: int
    shuffles: int
    barriers: int

    def clocks(self, machine: GpuModel, warps: int, global_latency: float) -> float:
        """In order: an instruction each time its scheduler comes round, and every wait.

        Args:
            warps: of its scheduler, which all have the same to do.
        """
        return (
            self.instructions * SASS_PER_PTX * max(machine.alu_latency.value, warps)
            + self.global_trips * global_latency
            + self.shared_trips * machine.shared_latency.value
            + self.shuffles * machine.shuffle_latency.value
            + self.barriers * machine.barrier_latency.value
        )


@dataclass(frozen=True)
class Shape:
    """A benchmark shape and its counts.

    Attributes:
        ctas: that share a row. num_splits: clusters that they form.
        scoring: until the last page is scored. ranking: what comes behind.
    """

    name: str
    rows: int
    tokens: int
    ctas: int
    num_splits: int
    scoring: Executed
    ranking: Executed


FIRST_COPY = Executed(181, 2, 0, 5, 2)
"""A producer's way to its first page: length, segment, page ids."""
MESSAGES = 3
"""Of a cluster's CTAs to each other, one after the other: counts of groups, of bins, candidates."""

SKEW = 500
"""Clocks that a CTA waits at a message for the slowest of its cluster, beyond the message's way;
measured at 1/8K and 1/32K (workbench/results/indexer/NOTES.md)."""

_COUNTED = {
    "1/8K": (13, 1, (758, 1, 5, 10, 5), (1407, 1, 18, 33, 9)),
    "1/32K": (13, 1, (2209, 1, 12, 26, 12), (1641, 1, 18, 38, 9)),
    "1/128K": (91, 7, (1433, 1, 8, 16, 8), (2901, 9, 35, 91, 20)),
    "8/16K": (8, 1, (1809, 2, 10, 21, 10), (1193, 1, 16, 33, 9)),
    "32/4K": (3, 1, (1386, 2, 8, 16, 8), (1092, 1, 17, 33, 9)),
    "32/16K": (3, 1, (4770, 2, 24, 56, 24), (1394, 1, 17, 43, 9)),
    "32/64K": (3, 1, (20407, 2, 141, 313, 105), (1648, 1, 23, 36, 13)),
    "128/16K": (1, 1, (15484, 2, 111, 248, 82), (1444, 1, 23, 35, 14)),
    "128/64K": (1, 1, (62778, 2, 492, 1035, 332), (1356, 1, 20, 35, 14)),
}
"""CTAs of a row, clusters that they form; the slowest warp until its last wgmma, and after it."""


def shapes() -> tuple[Shape, ...]:
    """The nine of the benchmark."""
    found = []
    for name, (ctas, num_splits, scoring, ranking) in _COUNTED.items():
        rows, length = name.removesuffix("K").split("/")
        counts = Executed(*scoring), Executed(*ranking)
        found.append(Shape(name, int(rows), int(length) * 1024, ctas, num_splits, *counts))
    return tuple(found)


@dataclass(frozen=True)
class IndexerPrediction:
    """Seconds of each part; the stream is the slower of device memory and scoring."""

    launch: float
    first_page: float
    stream: float
    messages: float
    ranking: float
    bound: str

    @property
    def seconds(self) -> float:
        """All parts, which follow each other."""
        return self.launch + self.first_page + self.stream + self.messages + self.ranking


def predict_indexer(shape: Shape, machine: GpuModel) -> IndexerPrediction:
    """By CUDA events around one launch, L2 flushed."""
    clock = machine.clock.value
    cold, near = machine.hbm_latency.value, machine.l2_latency.value
    first = FIRST_COPY.clocks(machine, 1, cold) + cold + machine.barrier_latency.value
    memory = shape.rows * shape.tokens * TOKEN_BYTES / machine.hbm.value
    scoring = shape.scoring.clocks(machine, WARPS_OF_A_SCHEDULER, near) / clock
    flop = 2.0 * NUM_HEADS * INDEX_HEAD_DIM * shape.rows * shape.tokens
    tensor = flop / (machine.sms.value * machine.fp8_rate.value * clock)
    parts = {"device memory": memory, "scoring": scoring, "tensor core": tensor}
    slowest = max(parts, key=lambda name: parts[name])
    message = machine.dsmem_latency.value + SKEW
    messages = MESSAGES * message if shape.ctas > shape.num_splits else 0.0
    # Clusters of a split row publish and draw tickets, and one of them reads and selects again.
    if shape.num_splits > 1:
        messages += messages + machine.release_latency.value + 2 * near + message
    ranking = shape.ranking.clocks(machine, WARPS_OF_A_SCHEDULER, near)
    fixed = machine.launch.value + (first + messages + ranking) / clock
    bound = slowest if parts[slowest] > fixed else "instructions and latencies"
    return IndexerPrediction(
        launch=machine.launch.value,
        first_page=first / clock,
        stream=parts[slowest],
        messages=messages / clock,
        ranking=ranking / clock,
        bound=bound,
    )
