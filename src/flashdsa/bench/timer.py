"""Take times: contenders by turns in random order, by the wall clock or by CUDA events."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median as median_of
from typing import Any, Protocol

import torch

from flashdsa.errors import FlashDsaError

Call = Callable[[], object]
WARMUP_CALLS = 3
SAMPLE_SECONDS = 0.05
"""Least length of a sample by the wall clock: shorter calls are repeated inside it."""
FLUSH_BYTES = 256 << 20
SPIN_CYCLES, MOST_SPIN_CYCLES = 400_000, 6_400_000
LONG_US, PAUSE_SECONDS = 1000.0, 0.06
"""A cold call this long begins after a pause, at the clocks of a GPU that idled."""
SHORT_US, GRAPH_CALLS = 200.0, 20
"""Hot calls shorter than this are replayed from a graph: the host could not keep up with them."""
HOT_SECONDS, HOT_ROUNDS = 0.16, 3
HOST_CALLS, HOST_BATCHES, HOST_BATCH_US = 100, 9, 20_000.0
HANG_SECONDS = 20.0


class GpuHangError(FlashDsaError, RuntimeError):
    """A kernel does not end; this process can do nothing more with its GPU."""


@dataclass(frozen=True)
class Times:
    """Microseconds of a call: median, 10th and 90th percentile of its samples.

    Attributes:
        late: samples thrown away because the GPU had to wait for the host.
    """

    median: float
    p10: float | None = None
    p90: float | None = None
    late: int = 0

    @classmethod
    def of(cls, samples: list[float], late: int = 0) -> Times:
        """The statistics of some samples, by linear interpolation."""
        ordered = sorted(samples)
        median, p10, p90 = (_quantile(ordered, q) for q in (0.5, 0.1, 0.9))
        return cls(median, p10, p90, late)


def _quantile(ordered: list[float], q: float) -> float:
    place = q * (len(ordered) - 1)
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


class Timer(Protocol):
    """Takes times on a device.

    Attributes:
        protocol: the rules, as a sentence of the result.
        conditions: what `in_turns` can take.
    """

    protocol: str
    conditions: tuple[str, ...]

    def in_turns(self, calls: Mapping[str, Call], condition: str, repeats: int) -> dict[str, Times]:
        """Times of the calls, one sample of each at a time in an order of its own."""

    def host_us(self, call: Call) -> float | None:
        """Microseconds that a call keeps the host busy; None where the host does the work."""

    def synchronize(self, what: str) -> None:
        """Wait for the device.

        Raises:
            GpuHangError: `what` does not end.
        """


class WallTimer:
    """The wall clock, for what runs on the CPU."""

    protocol = (
        f"{WARMUP_CALLS} warm-up calls each; then by turns in random order one sample of every "
        f"contender and of the ceiling; a sample repeats the call until it lasts {SAMPLE_SECONDS} "
        "s and is divided by the count; all threads"
    )
    conditions: tuple[str, ...] = ("hot",)

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)

    def in_turns(self, calls: Mapping[str, Call], condition: str, repeats: int) -> dict[str, Times]:
        """Times of the calls; `condition` is "hot"."""
        counts = {name: self._calls_per_sample(call) for name, call in calls.items()}
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name in self._draw.sample(list(calls), len(calls)):
                samples[name].append(1e6 * _seconds(calls[name], counts[name]))
        return {name: Times.of(taken) for name, taken in samples.items()}

    def _calls_per_sample(self, call: Call) -> int:
        seconds = [_seconds(call, 1) for _ in range(WARMUP_CALLS)][-1]
        return max(1, math.ceil(SAMPLE_SECONDS / max(seconds, 1e-9)))

    def host_us(self, call: Call) -> float | None:
        return None

    def synchronize(self, what: str) -> None:
        """Nothing to wait for."""


def _seconds(call: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


class CudaTimer:
    """CUDA events on the current device, for calls that are queued there."""

    protocol = (
        f"{WARMUP_CALLS} warm-up calls each; contenders and the ceiling by turns in random order; "
        f"cold: L2 flushed by reading {FLUSH_BYTES >> 20} MiB, a spinning kernel, CUDA event, "
        "call, event; a sample counts only if the host had queued all of it before the GPU reached "
        f"the first event; calls of {LONG_US / 1e3:g} ms and more begin after "
        f"{1e3 * PAUSE_SECONDS:g} ms of idling; hot: "
        f"{HOT_ROUNDS} rounds, each the mean of {HOT_SECONDS:g} s back to back after half as much "
        f"warm-up, calls below {SHORT_US:g} us as replays of a graph of {GRAPH_CALLS}; host: "
        f"median of {HOST_BATCHES} batches of up to {HOST_CALLS} calls, waits outside the clock"
    )
    conditions: tuple[str, ...] = ("cold", "hot")

    hot_seconds, warm_seconds, hot_rounds = HOT_SECONDS, HOT_SECONDS / 2, HOT_ROUNDS
    short_us, long_us, pause_seconds = SHORT_US, LONG_US, PAUSE_SECONDS

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
        self._spin = SPIN_CYCLES

    def in_turns(self, calls: Mapping[str, Call], condition: str, repeats: int) -> dict[str, Times]:
        """Times of the calls, cold or hot."""
        about = {name: self._warm_up(name, call) for name, call in calls.items()}
        if condition == "hot":
            return self._hot(calls, about)
        return self._cold(calls, about, repeats)

    def _warm_up(self, name: str, call: Call) -> float:
        """Microseconds of a call, about."""
        for _ in range(WARMUP_CALLS):
            call()
        self.synchronize(name)
        return self._span(name, call, 1)

    def _cold(
        self, calls: Mapping[str, Call], about: Mapping[str, float], repeats: int
    ) -> dict[str, Times]:
        samples: dict[str, list[float]] = {name: [] for name in calls}
        late = dict.fromkeys(calls, 0)
        while any(len(taken) < repeats for taken in samples.values()):
            events = {}
            for name in self._draw.sample(list(calls), len(calls)):
                if about[name] >= self.long_us:
                    time.sleep(self.pause_seconds)
                events[name] = self._sample(calls[name])
            for name, (start, end, in_time) in events.items():
                _wait(end, name)
                if in_time or self._spin >= MOST_SPIN_CYCLES:
                    samples[name].append(1e3 * start.elapsed_time(end))
                late[name] += not in_time
            if not all(in_time for _, _, in_time in events.values()):
                self._spin = min(2 * self._spin, MOST_SPIN_CYCLES)
        return {name: Times.of(taken, late[name]) for name, taken in samples.items()}

    def _sample(self, call: Call) -> tuple[Any, Any, bool]:
        start, end = _events()
        self._flush.sum()
        torch.cuda._sleep(self._spin)
        start.record()
        call()
        end.record()
        return start, end, not start.query()

    def _hot(self, calls: Mapping[str, Call], about: Mapping[str, float]) -> dict[str, Times]:
        ready = {name: self._ready(call, about[name]) for name, call in calls.items()}
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.hot_rounds):
            for name in self._draw.sample(list(calls), len(calls)):
                call, calls_in_it = ready[name]
                us = about[name] * calls_in_it
                self._span(name, call, max(1, round(1e6 * self.warm_seconds / us)))
                count = max(2, round(1e6 * self.hot_seconds / us))
                samples[name].append(self._span(name, call, count) / calls_in_it)
        return {name: Times.of(taken) for name, taken in samples.items()}

    def _ready(self, call: Call, about: float) -> tuple[Call, int]:
        """The function that is called back to back, and how many calls it makes."""
        many = replay_of(call, GRAPH_CALLS) if about < self.short_us else None
        return (call, 1) if many is None else (many, GRAPH_CALLS)

    def _span(self, name: str, call: Call, count: int) -> float:
        """Microseconds of one of `count` calls back to back."""
        start, end = _events()
        start.record()
        for _ in range(count):
            call()
        end.record()
        _wait(end, name)
        return 1e3 * float(start.elapsed_time(end)) / count

    def host_us(self, call: Call) -> float | None:
        """Microseconds that a call keeps the host busy: never so many that the queue is full."""
        about = self._warm_up("launch", call)
        count = max(3, min(HOST_CALLS, int(HOST_BATCH_US / about)))
        batches = []
        for _ in range(HOST_BATCHES):
            self.synchronize("launch")
            batches.append(1e6 * _seconds(call, count))
        self.synchronize("launch")
        return median_of(batches)

    def synchronize(self, what: str) -> None:
        """Wait for the device; raises GpuHangError after HANG_SECONDS."""
        end = torch.cuda.Event()
        end.record()
        _wait(end, what)


def new_timer(device: str, seed: int = 0) -> Timer:
    """The timer of a device: "cpu" or "cuda"."""
    return CudaTimer(seed) if device == "cuda" else WallTimer(seed)


def _events() -> tuple[Any, Any]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def replay_of(call: Call, count: int) -> Call | None:
    """The replay of a CUDA graph of `count` calls; None where the call cannot be captured."""
    # One call of 400 draws was not captured, and could be the next time.
    return _capture(call, count) or _capture(call, count)


def _capture(call: Call, count: int) -> Call | None:
    graph, kept = torch.cuda.CUDAGraph(), None
    try:
        with torch.cuda.graph(graph):
            for _ in range(count):
                kept = call()  # the graph writes there
    except Exception:  # a peer may wait for the device, or load code
        return None

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def _wait(event: Any, what: str) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not event.query():
        if time.monotonic() > deadline:
            raise GpuHangError(f"{what}: the GPU did not end it within {HANG_SECONDS:g} s")
        time.sleep(1e-4)
