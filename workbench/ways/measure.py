"""Every way of a draw, timed by turns in one process: the document of a judgement.

A backend chooses a call's kernels by one function, `choose`, from those that `ways` names with
their estimated times. Here `choose` is replaced by what asks `ways`, and then by each of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from math import isfinite
from typing import Any, Protocol
from unittest.mock import patch

import torch

from flashdsa.backends.catalog import registry
from flashdsa.bench.cases import Task
from flashdsa.bench.checkout import find_checkout
from flashdsa.bench.machine import describe_machine
from flashdsa.bench.result import OURS
from flashdsa.bench.timer import Call, replay_of
from workbench.draws.distribution import Draw
from workbench.draws.inputs import make_task
from workbench.draws.timing import SHORT, DrawTimer

SCHEMA = "flashdsa-ways/1"
GRAPH_CALLS, SHORT_US = 20, 200.0
"""Calls of a graph, and the time of a call up to which a graph has several."""
Document = dict[str, Any]


class Way(Protocol):
    """A way of a call: `str` names its launches."""

    @property
    def kind(self) -> str:
        """The name under which ways are judged together."""


@dataclass(frozen=True)
class Choice:
    """The place where an operation's kernels are chosen.

    Attributes:
        module: it has `ways`, of the arguments of `choose`, to their estimated times.
        binds: the module that calls `choose`.
    """

    module: str
    binds: str

    def ways(self, arguments: Sequence[Any]) -> dict[Way, float]:
        """The ways of a call."""
        found: dict[Way, float] = import_module(self.module).ways(*arguments)
        return found

    @contextmanager
    def replaced(self, choose: Callable[..., Way]) -> Iterator[None]:
        """In this context new calls are served by what `choose` says, and every call is new."""
        assert registry.on_change is not None
        with patch.object(import_module(self.binds), "choose", choose):
            registry.on_change()
            yield
        registry.on_change()


_SPARSE_MLA = Choice("flashdsa.backends.sm90.sparse_mla_ways", "flashdsa.backends.sm90.sparse_mla")
CHOICES: Mapping[str, Choice] = {
    **dict.fromkeys(("forward", "prompts", "decode", "chats"), _SPARSE_MLA),
    **dict.fromkeys(("forward-512", "decode-512"), _SPARSE_MLA),
    "indexer": Choice("flashdsa.backends.indexer.choice", "flashdsa.backends.indexer.launch"),
}
"""By the operation of a draw."""


def ways_of(choice: Choice, task: Task) -> dict[Way, float]:
    """The ways of a task's call, each with its estimated time, the one that is taken first."""
    seen: list[Sequence[Any]] = []
    real = import_module(choice.module).choose

    def ask(*arguments: Any) -> Way:
        seen[:] = [arguments]
        way: Way = real(*arguments)
        return way

    with choice.replaced(ask):
        task.call()
    if not seen:
        return {}
    found = choice.ways(seen[0])
    taken = min(found, key=found.__getitem__)
    return {taken: found.pop(taken)} | found


def by_way(choice: Choice, task: Task, way: Way) -> Call:
    """The task's call, served by that way; always a new call."""

    def call() -> object:
        with choice.replaced(lambda *_: way):
            return task.call()

    return call


class WaysTimer(DrawTimer):
    """Calls are new each time, which the host takes long for: all are timed as graphs."""

    def _ready(self, call: Call, about: float) -> tuple[Call, int]:
        """A graph of one call, or of several short ones; made once."""
        if call not in self._made:
            count = GRAPH_CALLS if about < SHORT_US else 1
            replay = replay_of(call, count)
            self._made[call] = (replay, count) if replay else (call, 1)
        return self._made[call]


def measure_draw(draw: Draw, backend: str = "sm90") -> Document:
    """A row of the document. Each way's result is judged before it is timed."""
    task = make_task(draw, "", "cuda" if backend == "sm90" else "cpu", backend)
    choice = CHOICES[draw.operation]
    found = ways_of(choice, task)
    calls: dict[str, Call] = {}
    row: Document = {"line": draw.line, "ways": {}, "wrong": []}
    for way, estimate in found.items():
        call, name = by_way(choice, task, way), str(way)
        row["wrong"] += [f"{name}: {fault}" for fault in task.judge(call()).findings]
        calls[name] = call
        estimated = round(estimate, 1) if isfinite(estimate) else None
        row["ways"][name] = {"kind": str(way.kind), "estimate": estimated}
    names = list(calls)
    timed = {OURS if name == names[0] else name: calls[name] for name in names}
    timer = WaysTimer(SHORT, draw.values["tensors"], rests=False)
    for condition in ("hot", "cold") if len(timed) > 1 else ():
        for name, times in timer.in_turns(timed, condition, 5).items():
            own = names[0] if name == OURS else name
            row["ways"][own][condition] = round(times.median, 3)
    return row


def measure(
    draws: Sequence[Draw],
    budget: float | None,
    on_progress: Callable[[int, int, str], None],
    keep: Callable[[Document], None],
) -> Document:
    """The document of some draws of one operation.

    Args:
        budget: seconds after which no further draw begins.
        keep: gets the document after every draw: a machine may be taken away.
    """
    begin, checkout = time.monotonic(), find_checkout()
    document: Document = {
        "schema": SCHEMA,
        "operation": draws[0].operation,
        "seed": draws[0].seed,
        "git": checkout.as_dict() if checkout else None,
        "machine": describe_machine().as_dict(),
        "protocol": f"{SHORT}; every call a graph",
        "draws": [],
    }
    for number, draw in enumerate(draws):
        if budget is not None and time.monotonic() - begin > budget:
            break
        on_progress(number, len(draws), draw.line)
        document["draws"].append(measure_draw(draw))
        torch.cuda.empty_cache()
        keep(document)
    on_progress(len(draws), len(draws), "done")
    return document
