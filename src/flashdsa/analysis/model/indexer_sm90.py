"""Our Hopper indexer: launch, the way to the first page, the stream of pages, the ranking.

What the slowest warp of the last CTA executes was counted in emulated runs of the shapes
(`flashdsa.verify.warp_path`; tests/analysis counts one again): one row with the CTAs that a GPU of
132 SMs gives it, since rows of a batch do not meet.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.analysis.model.machine import Machine
from flashdsa.problem import INDEX_HEAD_DIM, PAGE_BYTES, PAGE_SIZE

KEY_BYTES = PAGE_BYTES / PAGE_SIZE
NUM_HEADS = 64
SASS_PER_PTX = 4432 / 3966
"""Instructions of the cubin to those of the PTX, of which the runs are counted."""
WARPS_OF_A_SCHEDULER = 4
"""Of the 16 that score and rank."""


@dataclass(frozen=True)
class Executed:
    """What one warp executes, as `flashdsa.verify.warp_path` counts."""

    instructions: int
    global_trips: int
    shared_trips: int
    shuffles: int
    barriers: int

    def clocks(self, machine: Machine, warps: int, global_latency: float) -> float:
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
        ctas: that share a row. scoring: until the last page is scored. ranking: what comes behind.
    """

    name: str
    rows: int
    tokens: int
    ctas: int
    scoring: Executed
    ranking: Executed


FIRST_COPY = Executed(295, 4, 0, 17, 1)
"""The producer's way to its first page: schedule, segment, page ids."""

_COUNTED = {
    "1/8K": (43, (267, 0, 2, 3, 2), (1785, 2, 27, 34, 22)),
    "1/32K": (74, (483, 0, 4, 7, 3), (1976, 3, 26, 34, 22)),
    "1/128K": (128, (915, 0, 8, 15, 5), (2077, 4, 29, 36, 22)),
    "8/16K": (16, (883, 0, 8, 15, 5), (1681, 2, 24, 36, 22)),
    "32/4K": (4, (915, 0, 8, 15, 5), (1613, 2, 26, 36, 22)),
    "32/16K": (4, (3507, 0, 32, 63, 17), (1982, 2, 41, 55, 24)),
    "32/64K": (4, (15337, 0, 169, 304, 88), (2125, 3, 43, 57, 24)),
    "128/16K": (1, (15326, 1, 166, 304, 88), (1140, 1, 25, 28, 21)),
    "128/64K": (1, (57964, 0, 565, 1084, 323), (1385, 2, 28, 27, 21)),
}
"""CTAs of a row; the slowest warp until its last wgmma, and after it."""


def shapes() -> tuple[Shape, ...]:
    """The nine of the benchmark."""
    found = []
    for name, (ctas, scoring, ranking) in _COUNTED.items():
        rows, length = name.removesuffix("K").split("/")
        found.append(
            Shape(name, int(rows), int(length) * 1024, ctas, Executed(*scoring), Executed(*ranking))
        )
    return tuple(found)


@dataclass(frozen=True)
class IndexerPrediction:
    """Seconds of each part; the stream is the slower of device memory and scoring."""

    launch: float
    first_page: float
    stream: float
    publish: float
    ranking: float
    bound: str

    @property
    def seconds(self) -> float:
        """All parts, which follow each other."""
        return self.launch + self.first_page + self.stream + self.publish + self.ranking


def predict_indexer(shape: Shape, machine: Machine) -> IndexerPrediction:
    """By CUDA events around one launch, L2 flushed."""
    clock = machine.clock.value
    cold, near = machine.hbm_latency.value, machine.l2_latency.value
    first = FIRST_COPY.clocks(machine, 1, cold) + cold + machine.barrier_latency.value
    memory = shape.rows * shape.tokens * KEY_BYTES / machine.hbm.value
    scoring = shape.scoring.clocks(machine, WARPS_OF_A_SCHEDULER, near) / clock
    flop = 2.0 * NUM_HEADS * INDEX_HEAD_DIM * shape.rows * shape.tokens
    tensor = flop / (machine.sms.value * machine.fp8_rate.value * clock)
    parts = {"device memory": memory, "scoring": scoring, "tensor core": tensor}
    slowest = max(parts, key=lambda name: parts[name])
    publish = machine.release_latency.value + 2 * near if shape.ctas > 1 else 0.0
    ranking = shape.ranking.clocks(machine, WARPS_OF_A_SCHEDULER, near)
    fixed = machine.launch.value + (first + publish + ranking) / clock
    bound = slowest if parts[slowest] > fixed else "instructions and latencies"
    return IndexerPrediction(
        launch=machine.launch.value,
        first_page=first / clock,
        stream=parts[slowest],
        publish=publish / clock,
        ranking=ranking / clock,
        bound=bound,
    )
