"""Turns of a draw's contenders: a rough time of each, hot and cold of those that may be fastest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashdsa.backends.packed_rows import num_rows
from flashdsa.bench.cases import Task, products_ceiling, reading_ceiling
from flashdsa.bench.result import OURS
from flashdsa.bench.timer import Call, CudaTimer, Times, WallTimer, replay_of
from workbench.draws.two_sources import Source

SLOW = 1.3
"""A peer of this much of the fastest one's rough time, or more, keeps its rough time."""
SHORT_US = 500.0
"""Hot calls shorter than this are replayed from a graph, so that no wrapper's Python counts."""
REST_SPIN_CYCLES = 3_200_000


@dataclass(frozen=True)
class Protocol:
    """Seconds and samples of a draw's contenders.

    Attributes:
        warm, hot: seconds of load before and inside a hot sample. rounds: hot samples, by turns.
        cold: cold samples. pause: seconds of rest before a cold sample of a long call.
        parts_cold: training is timed cold, too.
    """

    name: str
    warm: float
    hot: float
    rounds: int
    cold: int
    pause: float
    parts_cold: bool

    def __str__(self) -> str:
        return (
            f"{self.name}: by turns in an order of the draw's own; hot: {self.rounds} x "
            f"{self.hot:g} s after {self.warm:g} s of load, calls below "
            f"{SHORT_US:g} us in graphs of 20; "
            f"cold: median of {self.cold}, L2 flushed by reading: a graph of one call; forward, "
            f"backward and training: one call after {self.pause:g} s of rest"
            f"{'' if self.parts_cold else ' (training not cold)'}; a peer of {SLOW:g} times the "
            "fastest one's rough time is not timed further"
        )


FULL = Protocol("full", 0.25, 0.25, 1, 9, 0.12, True)
SHORT = Protocol("short", 0.03, 0.05, 2, 3, 0.12, False)
SHORT_SECONDS = 4.0
"""Seconds a draw below which a budget asks for the short protocol."""


def microseconds(call: Call) -> float:
    """Roughly, back to back."""
    timer = DrawTimer(SHORT, 0, False) if torch.cuda.is_available() else WallTimer()
    return timer.in_turns({OURS: call}, "hot", 1)[OURS].median


class DrawTimer(CudaTimer):
    """The clock of one draw.

    Args:
        rests: calls are long, and a cold one begins after a rest; else it is a graph's.
    """

    def __init__(self, protocol: Protocol, seed: int, rests: bool) -> None:
        super().__init__(seed)
        self.protocol = str(protocol)
        self.warm_seconds, self.hot_seconds = protocol.warm, protocol.hot
        self.hot_rounds, self.pause_seconds = protocol.rounds, protocol.pause
        self.short_us, self.long_us = SHORT_US, 0.0 if rests else float("inf")
        if rests:  # the host needs longer for a call that it has not made for a while
            self._spin = REST_SPIN_CYCLES
        self.rests = rests
        self._rough: dict[str, float] = {}
        self._made: dict[Call, tuple[Call, int]] = {}

    def in_turns(self, calls: Mapping[str, Call], condition: str, repeats: int) -> dict[str, Times]:
        """Times of the calls, hot or cold; of slow peers the rough ones."""
        if not self._rough:
            self._rough = {name: self._roughly(name, call) for name, call in calls.items()}
        peers = {name: us for name, us in self._rough.items() if not name.startswith(OURS)}
        best = min(peers.values(), default=0.0)
        slow = {name: Times(us) for name, us in peers.items() if us > SLOW * best}
        timed = {name: call for name, call in calls.items() if name not in slow}
        about = {name: self._rough[name] for name in timed}
        if condition == "hot":
            return self._hot(timed, about) | slow
        if not self.rests:
            timed = {name: replay_of(call, 1) or call for name, call in timed.items()}
        return self._cold(timed, about, repeats) | slow

    def _warm_up(self, name: str, call: Call) -> float:
        """Without the host's part, which a spin hides: it must not decide what is captured."""
        super()._warm_up(name, call)
        torch.cuda._sleep(self._spin)
        return self._span(name, call, 1)

    def _ready(self, call: Call, about: float) -> tuple[Call, int]:
        """A graph is made once."""
        if call not in self._made:
            self._made[call] = super()._ready(call, about)
        return self._made[call]

    def _roughly(self, name: str, call: Call) -> float:
        """Microseconds of a call, without the host's part of a short one."""
        ready, calls = self._ready(call, self._warm_up(name, call))
        self._span(name, ready, 1)
        return self._span(name, ready, 2) / calls


MACHINE = 900e12 / 4.5e12
"""Products a byte of device memory, of an H200: more, and products bind."""


def bound(task: Task, q: Tensor, sources: Iterable[Source]) -> Task:
    """The task of an attention whose work is its products; its ceiling is reading instead where
    that takes longer: q, O, and each row that a query names once."""
    bytes_read = 2.0 * q.element_size() * q.numel()
    for one in sources:
        rows = num_rows(one.kv)
        valid = one.valid(slice(None)) & (one.ids < rows)
        named = torch.zeros(rows, dtype=torch.bool, device=one.ids.device)
        named[one.ids[valid].long()] = True
        bytes_read += float(named.sum()) * one.kv.shape[-1] * one.kv.element_size()
    if task.ceiling.unit == "FLOP" and task.work >= MACHINE * bytes_read:
        return task
    return replace(task, work=bytes_read, ceiling=reading_ceiling(q.device.type))


def time_ceilings() -> dict[str, Times]:
    """Hot times of both ceilings on this GPU, by name."""
    found = {}
    for one in (products_ceiling("cuda"), reading_ceiling("cuda")):
        found[one.name] = DrawTimer(FULL, 0, False).in_turns({OURS: one.call}, "hot", 1)[OURS]
    return found
