"""What a demo run found out, as plain data that the CLI prints and JSON carries."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flashdsa.demo.device import Served
from flashdsa.demo.options import DemoOptions


@dataclass(frozen=True)
class StepRecord:
    """One training step: nats per byte, and nats of the indexer's divergence, in its warm-up over
    every key that a query sees and behind it over the selected ones."""

    step: int
    train_loss: float
    indexer_kl: float


@dataclass(frozen=True)
class CapturedMass:
    """Share of dense attention's probability that a choice of `topk` keys holds, in [0, 1].

    Mean over held-out queries and heads. `recent` takes the newest keys, `random` any visible ones
    (its expectation), `best` the heaviest ones, which no choice can beat.
    """

    indexer: float
    recent: float
    random: float
    best: float


@dataclass(frozen=True)
class HeldOutRecord:
    """Losses on held-out text after `step` steps, nats per byte, the same weights for both."""

    step: int
    sparse_loss: float
    dense_loss: float
    captured: CapturedMass


@dataclass(frozen=True)
class OutputDifference:
    """Sparse against dense attention on the same held-out text and weights."""

    output: str
    max_abs: float
    relative: float


@dataclass(frozen=True)
class ErrorRow:
    """One output of an operation on the trained layer's tensors, against float64.

    `relative_error` is `||out - ref|| / ||ref||`. `worst` and `limit` are the contract's rule for
    any data: the largest error of a row relative to what the row allows (O, dQ, dKV), the largest
    share of the allowed error (lse, scores: limit 1), or the number of differing ids (limit 0).
    """

    operation: str
    output: str
    dtype: str
    relative_error: float
    worst: float
    limit: float
    passed: bool


@dataclass(frozen=True)
class Example:
    """A held-out query and the far-away key that it gave the most attention to.

    `key_text` ends before the key, `followed_by` begins with its byte, which is also the byte that
    comes after the query. `distance` is in bytes, `attention` the share that key drew.
    """

    query_text: str
    key_text: str
    followed_by: str
    distance: int
    attention: float


@dataclass(frozen=True)
class DemoResult:
    """Everything that a run reports. Losses are nats per byte."""

    options: DemoOptions
    text_sources: tuple[str, ...]
    train_bytes: int
    held_out_bytes: int
    steps: tuple[StepRecord, ...]
    held_out: tuple[HeldOutRecord, ...]
    differences: tuple[OutputDifference, ...]
    errors: tuple[ErrorRow, ...]
    examples: tuple[Example, ...]
    picture: str
    seconds: float
    seconds_by_part: dict[str, float]
    processes: int = 1  # that trained it
    device_name: str = "the CPU"
    served: tuple[Served, ...] = ()

    @property
    def before(self) -> HeldOutRecord:
        """Held-out numbers of the untrained model."""
        return self.held_out[0]

    @property
    def after_warm_up(self) -> HeldOutRecord:
        """Held-out numbers behind the steps in which dense attention taught the indexer."""
        steps = self.options.warm_up_steps
        return next(record for record in self.held_out if record.step == steps)

    @property
    def after(self) -> HeldOutRecord:
        """Held-out numbers of the trained model."""
        return self.held_out[-1]

    @property
    def passed(self) -> bool:
        """Whether every error against float64 is within the contract's limits."""
        return all(row.passed for row in self.errors)

    def to_json_dict(self) -> dict[str, Any]:
        """The same as dictionaries, lists, numbers and strings."""
        plain = asdict(self)
        plain["options"]["picture"] = str(self.options.picture)
        indices = self.options.indices
        plain["options"]["indices"] = None if indices is None else str(indices)
        plain["passed"] = self.passed
        return plain
