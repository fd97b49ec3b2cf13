"""Times of calls, by turns in random order: on a GPU between CUDA events, without CUDA graphs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from flashdsa.bench.timer import Times

Call = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)
WARMUP_CALLS = 3
CYCLES_A_SECOND = 2e9
"""An H200's clock, about: a spinning kernel counts cycles."""
SPIN_SECONDS, TRIES = 2e-4, 4

PROTOCOL = (
    f"{WARMUP_CALLS} warm-up calls each; by turns in random order; a sample is two calls: event, "
    "call, event on an idle GPU (elapsed), then, caches hot, a spinning kernel, event, call, event "
    "with the host ahead (device); host: until that call has queued its work; no graphs; medians; "
    "on a CPU the wall clock of one call"
)


@dataclass(frozen=True)
class Measured:
    """Microseconds of a call.

    Attributes:
        device: on the GPU, which waits for nothing; on a CPU, of the call.
        elapsed: on a GPU that was idle: it waits for the host, too. host: until the host goes on.
            None on a CPU.
    """

    device: Times
    elapsed: Times | None = None
    host: Times | None = None


def in_turns(
    calls: Mapping[Name, Call], device: str, repeats: int, seed: int
) -> dict[Name, Measured]:
    """Times of the calls, `repeats` samples of each."""
    draw = random.Random(seed)
    sample = _on_gpu if device == "cuda" else _on_cpu
    for call in calls.values():
        for _ in range(WARMUP_CALLS):
            call()
    samples: dict[Name, list[tuple[float, ...]]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name in draw.sample(list(calls), len(calls)):
            samples[name].append(sample(calls[name]))
    return {name: _measured(taken) for name, taken in samples.items()}


def _measured(samples: list[tuple[float, ...]]) -> Measured:
    late, device, *others = (list(column) for column in zip(*samples, strict=True))
    return Measured(Times.of(device, int(sum(late))), *(Times.of(us) for us in others))


def _on_cpu(call: Call) -> tuple[float, ...]:
    return 0, 1e6 * _seconds(call)


def _on_gpu(call: Call) -> tuple[float, ...]:
    """Whether the host was late, and microseconds: device, elapsed, host. Waits for the GPU only
    where no event's time runs.

    The host is ahead if the GPU still spins when all is queued; if not, it spins longer.
    """
    spin = SPIN_SECONDS
    for _ in range(TRIES):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda.synchronize()
        events[0].record()
        spin += 2 * _seconds(call)
        events[1].record()
        torch.cuda._sleep(round(CYCLES_A_SECOND * spin))
        events[2].record()
        host = _seconds(call)
        events[3].record()
        is_late = events[2].query()
        torch.cuda.synchronize()
        if not is_late:
            break
    device, elapsed = (1e3 * events[at].elapsed_time(events[at + 1]) for at in (2, 0))
    return is_late, device, elapsed, 1e6 * host


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
