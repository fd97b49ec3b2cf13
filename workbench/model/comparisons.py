"""The model against what was measured: every comparison there is, with the error it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workbench.model import probes, published
from workbench.model.forward_sm90 import Prefill, predict_forward
from workbench.model.indexer_sm90 import predict_indexer, shapes
from workbench.model.machine import B200, H200
from workbench.model.predict import Work, predict

HOPPER_AIM, BLACKWELL_AIM = 0.15, 0.25
"""Relative errors that the model is meant to stay within."""

INDEXER_SOURCE = "workbench/results/indexer/2026-11-22-all-h200.json"
INDEXER_MICROSECONDS = {
    "1/8K": 11.7,
    "1/32K": 17.3,
    "1/128K": 22.8,
    "8/16K": 15.7,
    "32/4K": 14.5,
    "32/16K": 29.0,
    "32/64K": 82.9,
    "128/16K": 76.3,
    "128/64K": 261.1,
}
FORWARD_SOURCE = "workbench/results/sparse_mla_fwd/2026-11-21-bench-h200.json"
FORWARD_MILLISECONDS = {128: 3.805, 64: 1.97}
"""By heads, of random ids, back to back."""


@dataclass(frozen=True)
class Comparison:
    """One kernel, predicted and measured in `unit`.

    Attributes:
        why: what is known to be missing where the aim is missed.
    """

    group: str
    name: str
    unit: str
    predicted: float
    measured: float
    bound: str
    aim: float
    source: str
    why: str = ""

    @property
    def error(self) -> float:
        """Relative; positive: the model predicts more of the unit."""
        return self.predicted / self.measured - 1

    @property
    def within(self) -> bool:
        """Whether the aim is met."""
        return abs(self.error) <= self.aim

    def to_json_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "group": self.group,
            "kernel": self.name,
            "unit": self.unit,
            "predicted": self.predicted,
            "measured": self.measured,
            "error": self.error,
            "aim": self.aim,
            "within": self.within,
            "bound": self.bound,
            "source": self.source,
            "why": self.why,
        }


def indexer() -> list[Comparison]:
    """Our Hopper indexer at the nine shapes."""
    found = []
    for shape in shapes():
        prediction = predict_indexer(shape, H200)
        found.append(
            Comparison(
                "indexer, H200",
                shape.name,
                "us",
                prediction.seconds * 1e6,
                INDEXER_MICROSECONDS[shape.name],
                prediction.bound,
                HOPPER_AIM,
                INDEXER_SOURCE,
            )
        )
    return found


def forward() -> list[Comparison]:
    """Our Hopper forward of 64 and 128 heads, back to back."""
    found = []
    for heads, measured in FORWARD_MILLISECONDS.items():
        case = Prefill(heads)
        prediction = predict_forward(case, H200)
        found.append(
            Comparison(
                "forward of sparse MLA, H200",
                case.name,
                "ms",
                prediction.seconds * 1e3,
                measured,
                prediction.bound,
                HOPPER_AIM,
                FORWARD_SOURCE,
            )
        )
    return found


def probe() -> list[Comparison]:
    """The structure of our Blackwell backward, as a loop that was timed on Hopper."""
    prediction = predict(probes.dims_split_backward(), H200)
    return [
        Comparison(
            "probe, H200",
            prediction.name,
            "clk a unit",
            prediction.cycles,
            probes.CLOCKS,
            prediction.bound,
            HOPPER_AIM,
            probes.SOURCE,
            "it was not tuned, and overlapped little: its products, exchange, gather and adds one "
            "behind the other are 11,788 clocks; a bound knows no waiting",
        )
    ]


_L2_OF_B200 = (
    "its adds alone run at 4.3 TB/s; 3.9 is assumed of B200's L2 (the H200's bytes a clock and SM)"
)


def blackwell() -> list[Comparison]:
    """What others published of B200; a range by its middle."""
    rows: list[tuple[Callable[[], Work], float, str]] = [
        (published.fa4_forward, 1180, ""),
        (published.fa4_backward, 820, ""),
        (published.cudnn_backward, (642 + 684) / 2, _L2_OF_B200),
    ]
    found = []
    for make, measured, why in rows:
        prediction = predict(make(), B200)
        found.append(
            Comparison(
                "published, B200",
                prediction.name,
                "TFLOPS",
                prediction.tflops,
                measured,
                prediction.bound,
                BLACKWELL_AIM,
                published.SOURCE,
                why,
            )
        )
    return found


def all_comparisons() -> list[Comparison]:
    """Every one, in the order of the report."""
    return [*indexer(), *forward(), *probe(), *blackwell()]
