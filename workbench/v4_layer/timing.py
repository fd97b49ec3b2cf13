"""Times of calls, by turns in random order: on a GPU between CUDA events, without CUDA graphs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from flashdsa.bench.timer import Times

Call = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)
WARMUP_CALLS = 3
CYCLES_A_SECOND = 2e9
"""An H200's clock, about: a spinning kernel counts cycles."""
SPIN_SECONDS, LONGEST_SPIN_SECONDS = 2e-4, 0.2

PROTOCOL = (
    f"{WARMUP_CALLS} warm-up calls each; by turns in random order; a sample calls twice: CUDA "
    "event, call, event on an idle GPU (elapsed), then, caches hot, a spinning kernel, event, "
    "call, event while the host is ahead (device); host: until that call has queued its work; "
    "medians; on a CPU the wall clock of one call"
)


@dataclass
class Samples:
    """Microseconds of one call's samples.

    Attributes:
        device: on the GPU, which waits for nothing; on a CPU, of the call.
        elapsed: on a GPU that was idle: it waits for the host, too.
        host: until the host goes on.
        late: device times of which the GPU reached the call before the host had queued it all.
    """

    device: list[float] = field(default_factory=list)
    elapsed: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    late: int = 0


@dataclass(frozen=True)
class Measured:
    """Microseconds of a call, see `Samples`; `elapsed` and `host` are None on a CPU."""

    device: Times
    elapsed: Times | None = None
    host: Times | None = None


def in_turns(
    calls: Mapping[Name, Call], device: str, repeats: int, seed: int
) -> dict[Name, Measured]:
    """Times of the calls, `repeats` samples of each."""
    draw, on_gpu = random.Random(seed), device == "cuda"
    spins = {name: _warm_up(call, on_gpu) for name, call in calls.items()}
    found = {name: Samples() for name in calls}
    for _ in range(repeats):
        for name in draw.sample(list(calls), len(calls)):
            if on_gpu:
                spins[name] = _sample(calls[name], found[name], spins[name])
            else:
                found[name].device.append(1e6 * _seconds(calls[name]))
    return {
        name: Measured(
            Times.of(x.device, x.late),
            Times.of(x.elapsed) if on_gpu else None,
            Times.of(x.host) if on_gpu else None,
        )
        for name, x in found.items()
    }


def _warm_up(call: Call, on_gpu: bool) -> float:
    """Seconds that the GPU has to spin for the host to get ahead of it."""
    for _ in range(WARMUP_CALLS):
        if on_gpu:
            torch.cuda.synchronize()
        seconds = _seconds(call)
    spin = SPIN_SECONDS + 1.5 * seconds
    while on_gpu and (longer := _sample(call, Samples(), spin)) > spin:
        spin = longer
    return spin


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _sample(call: Call, samples: Samples, spin: float) -> float:
    """Add a sample; return the seconds to spin before the next one. Waits for the GPU only where
    no event's time runs."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    torch.cuda.synchronize()
    events[0].record()
    call()
    events[1].record()
    torch.cuda._sleep(round(CYCLES_A_SECOND * spin))
    events[2].record()
    host = _seconds(call)
    events[3].record()
    is_late = events[2].query()
    torch.cuda.synchronize()
    samples.elapsed.append(1e3 * events[0].elapsed_time(events[1]))
    samples.device.append(1e3 * events[2].elapsed_time(events[3]))
    samples.host.append(1e6 * host)
    samples.late += is_late
    return min(2 * spin, LONGEST_SPIN_SECONDS) if is_late else spin
