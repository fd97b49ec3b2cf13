"""Peers of a draw: each in its best legal form, and why one cannot serve."""

from __future__ import annotations

from functools import partial

from flashdsa.bench.attention import backward_call, judge_backward
from flashdsa.bench.cases import Case, Task
from flashdsa.bench.result import OURS
from flashdsa.bench.runner import Peer
from workbench.bench.attention import Prepared
from workbench.draws.distribution import Draw

DETERMINISTIC = f"{OURS}, deterministic"


def deterministic(backend: str, case: Case, task: Task) -> Prepared:
    """Ours with deterministic=True: no peer, but timed by turns with them."""
    call = partial(backward_call, task.inputs, True, backend)
    return call, lambda found: judge_backward(task.inputs, *found)


def peers_of(draw: Draw, backend: str) -> dict[str, Peer]:
    """The contenders beside ours, by name."""
    if draw.operation == "backward":
        return {DETERMINISTIC: partial(deterministic, backend)}
    return {}
