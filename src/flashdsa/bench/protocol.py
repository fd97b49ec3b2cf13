"""How a time is taken: an operation and its ceiling in turns, warmed up, medians of repeats."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

SAMPLE_SECONDS = 0.05
"""A sample lasts at least this long: shorter calls are repeated inside it."""
WARMUP_CALLS = 2

PROTOCOL = (
    f"{WARMUP_CALLS} warm-up calls each; then in turns one sample of the operation and one of its "
    f"ceiling; a sample repeats the call until it lasts {SAMPLE_SECONDS} s and is divided by the "
    "count; median, 10th and 90th percentile of the samples; random data, all threads; "
    "ratio = rate at the median over the ceiling's rate at its median"
)


@dataclass(frozen=True)
class Times:
    """Seconds a call: median, 10th and 90th percentile."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, samples: list[float]) -> Times:
        """The statistics of some samples, by linear interpolation."""
        ordered = sorted(samples)
        return cls(*(_quantile(ordered, q) for q in (0.5, 0.1, 0.9)))


def _quantile(ordered: list[float], q: float) -> float:
    place = q * (len(ordered) - 1)
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def time_in_turns(
    operation: Callable[[], object],
    ceiling: Callable[[], object],
    repeats: int,
    after_sample: Callable[[], None] = lambda: None,
) -> tuple[Times, Times]:
    """Times of `operation` and of `ceiling`, measured in turns so that both see the same machine.

    `after_sample` is called `repeats` times, once after each pair of samples.
    """
    counts = [_calls_per_sample(call) for call in (operation, ceiling)]
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for call, count, taken in zip((operation, ceiling), counts, samples, strict=True):
            taken.append(_seconds(call, count))
        after_sample()
    return Times.of(samples[0]), Times.of(samples[1])


def _calls_per_sample(call: Callable[[], object]) -> int:
    for _ in range(WARMUP_CALLS):
        seconds = _seconds(call, 1)
    return max(1, math.ceil(SAMPLE_SECONDS / max(seconds, 1e-9)))


def _seconds(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count
