"""Times of calls that take milliseconds: one behind a pause, and many back to back."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch

from flashdsa.bench.gpu.turns import Call

PAUSE_SECONDS, BURSTS = 0.06, 5
SPIN_CYCLES = 4_000_000
HOT_SECONDS, HOT_ROUNDS = 0.16, 3


@dataclass(frozen=True)
class BurstTimes:
    """Milliseconds of a call."""

    burst_ms: float
    hot_ms: float


class CudaBurstTimer:
    """Burst: the median of BURSTS calls; hot: of HOT_ROUNDS rounds of HOT_SECONDS back to back."""

    def __init__(self, seed: int = 0, *, with_host: bool = False) -> None:
        """With `with_host` a burst has what the host takes in it: no kernel spins before it."""
        self._draw = random.Random(seed)
        self._with_host = with_host

    def in_turns(self, calls: Mapping[str, Call]) -> dict[str, BurstTimes]:
        """Times of every call, the calls in random order."""
        burst: dict[str, list[float]] = {name: [] for name in calls}
        hot: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            _milliseconds(call, 2)
        for _ in range(BURSTS):
            for name in self._draw.sample(list(calls), len(calls)):
                time.sleep(PAUSE_SECONDS)
                if not self._with_host:
                    torch.cuda._sleep(SPIN_CYCLES)  # the host has queued the call before it begins
                burst[name].append(_milliseconds(calls[name], 1))
        for _ in range(HOT_ROUNDS):
            for name in self._draw.sample(list(calls), len(calls)):
                count = max(2, round(1e3 * HOT_SECONDS / median(burst[name])))
                _milliseconds(calls[name], count // 2)
                hot[name].append(_milliseconds(calls[name], count))
        return {name: BurstTimes(median(burst[name]), median(hot[name])) for name in calls}


def _milliseconds(call: Call, count: int) -> float:
    """Of one of `count` calls back to back."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / count
