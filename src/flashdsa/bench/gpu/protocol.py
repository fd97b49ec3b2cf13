"""How a time is taken on a GPU: contenders in turns, cold L2, CUDA events; and on its host."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

from flashdsa.bench.gpu.turns import Call
from flashdsa.bench.protocol import Times
from flashdsa.errors import FlashDsaError

FLUSH_BYTES = 256 << 20
WARMUP_CALLS = 3
SPIN_CYCLES = 400_000
MOST_SPIN_CYCLES = 6_400_000
HOST_CALLS, HOST_BATCH = 2000, 200
HOST_WAITS = 15
HANG_SECONDS = 20.0

PROTOCOL = (
    f"{WARMUP_CALLS} warm-up calls each; then in turns, in another order each time, one sample of "
    "every contender: L2 flushed "
    f"by reading {FLUSH_BYTES >> 20} MiB (torch.sum, fp32), a spinning kernel, CUDA event, call, "
    "event; a sample counts only if the host had queued all of it before the GPU reached the first "
    "event; median, 10th and 90th percentile; a pair of peers is one call of both kernels, its "
    "scores warm in L2; timed apart, L2 is flushed before each; DeepGEMM's scheduling metadata "
    "is counted, turning the peers' positions into token ids is not. "
    f"Host: {HOST_CALLS} calls, a synchronisation outside the clock "
    f"after every {HOST_BATCH}, median of those batches"
)


class GpuHangError(FlashDsaError, RuntimeError):
    """A kernel does not end; this process can do nothing more with its GPU."""


@dataclass(frozen=True)
class GpuTimes:
    """Microseconds of one contender."""

    us: Times
    late: int
    """Samples thrown away because the GPU had to wait for the host."""


class Timer(Protocol):
    """Takes times on a device."""

    def in_turns(self, calls: Mapping[str, Call], repeats: int) -> dict[str, GpuTimes]:
        """Times of every call, one sample of each at a time."""

    def captured(self, call: Call) -> Call:
        """The replay of a CUDA graph of the call."""

    def host_us(self, call: Call) -> float:
        """Microseconds that one call keeps the host busy."""

    def synchronize(self, what: str) -> None:
        """Wait for the device.

        Raises:
            GpuHangError: `what` does not end.
        """


class CudaTimer:
    """The protocol on the current CUDA device."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
        self._spin = SPIN_CYCLES

    def in_turns(self, calls: Mapping[str, Call], repeats: int) -> dict[str, GpuTimes]:
        """Times of every call, one sample of each at a time."""
        for name, call in calls.items():
            for _ in range(WARMUP_CALLS):
                call()
            self.synchronize(name)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        late = dict.fromkeys(calls, 0)
        while any(len(taken) < repeats for taken in samples.values()):
            order = self._draw.sample(list(calls), len(calls))
            events = {name: self._sample(calls[name]) for name in order}
            for name, (_, end, _) in events.items():
                _wait(end, name)
            for name, (start, end, in_time) in events.items():
                if in_time or self._spin >= MOST_SPIN_CYCLES:
                    samples[name].append(1e3 * start.elapsed_time(end))
                late[name] += not in_time
            if not all(in_time for _, _, in_time in events.values()):
                self._spin = min(2 * self._spin, MOST_SPIN_CYCLES)
        return {name: GpuTimes(Times.of(taken), late[name]) for name, taken in samples.items()}

    def _sample(self, call: Call) -> tuple[Any, Any, bool]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.sum()
        torch.cuda._sleep(self._spin)
        start.record()
        call()
        end.record()
        return start, end, not start.query()

    def captured(self, call: Call) -> Call:
        """The replay of a CUDA graph of the call, which has been called before."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = call()  # the graph writes there

        def replay() -> object:
            graph.replay()
            return kept

        return replay

    def host_us(self, call: Call) -> float:
        """Microseconds that one call keeps the host busy: never so many that the queue is full."""
        for _ in range(HOST_BATCH):
            call()
        batches = []
        for _ in range(HOST_CALLS // HOST_BATCH):
            self.synchronize("launch")
            start = time.perf_counter()
            for _ in range(HOST_BATCH):
                call()
            batches.append(1e6 * (time.perf_counter() - start) / HOST_BATCH)
        self.synchronize("launch")
        return median(batches)

    def waited_host_us(self, call: Call) -> float:
        """The same of a call alone whose process waited for the GPU before, by when caches and
        branch predictors have forgotten it: the median of HOST_WAITS."""
        taken = []
        for _ in range(HOST_WAITS):
            self._flush.sum()
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            taken.append(1e6 * (time.perf_counter() - start))
        self.synchronize("launch")
        return median(taken)

    def synchronize(self, what: str) -> None:
        """Wait for the device; raises GpuHangError after HANG_SECONDS."""
        end = torch.cuda.Event()
        end.record()
        _wait(end, what)


def _wait(event: Any, what: str) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not event.query():
        if time.monotonic() > deadline:
            raise GpuHangError(f"{what}: the GPU did not end it within {HANG_SECONDS:g} s")
        time.sleep(1e-4)


def read_bandwidths(timer: Timer, device: str, mebibytes: int = 4096) -> dict[str, float]:
    """GB/s of torch calls that read a buffer once; the fastest is what reading can reach."""
    x = torch.randn(mebibytes << 18, device=device)
    square = x.view(-1, 4096)
    ones = torch.ones(4096, device=device)
    calls: dict[str, Call] = {
        "torch.sum, fp32": x.sum,
        "torch.sum, bf16": x.view(torch.bfloat16).sum,
        "torch.amax, fp32": x.amax,
        "torch.mv, fp32 rows of 4096": lambda: torch.mv(square, ones),
    }
    times = timer.in_turns(calls, 10)
    size = x.numel() * x.element_size()
    return {name: size / taken.us.median / 1e3 for name, taken in times.items()}
