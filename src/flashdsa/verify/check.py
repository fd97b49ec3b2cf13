"""`flashdsa check`: the public operations on fresh random inputs, at real sizes and edges."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from flashdsa.backends.catalog import registry
from flashdsa.backends.emulated.devices import A100, B200, H200
from flashdsa.backends.emulated.runner import EmulatedProgress, emulation
from flashdsa.backends.gpu.runner import gpu
from flashdsa.errors import UnsupportedError
from flashdsa.verify.check_list import COMPOSED, NEEDS, OPERATIONS, Check, checks_of
from flashdsa.verify.compile_ahead import compile_ahead

DEVICES = {"emulate-sm90": H200, "emulate-sm100": B200, "emulate-triton": A100}
"""Device that each emulated backend stands for."""
MOST = 0.99
"""Largest share that is shown for a case that still runs."""


class CaseProgress:
    """Says how far a case is, estimated from the instructions of smaller cases of its operation.

    Args:
        tell: called with (share of the case that is done, 0 where it is not known; text).
    """

    def __init__(self, tell: Callable[[float, str], None]) -> None:
        self._tell = tell
        self._rates: dict[str, float] = {}
        """Warp instructions a unit of work, by operation, as the last case of it needed."""

    @contextmanager
    def watch(self, backend: str, operation: str, work: int) -> Iterator[None]:
        """Report the progress of the case that runs in this context.

        Args:
            work: of the case, in a unit that is the same for all cases of the operation.
        """
        rate = self._rates.get(operation)
        so_far = 0

        def hear(now: EmulatedProgress) -> None:
            nonlocal so_far
            so_far = now.warp_instructions
            text = f"launch {now.launch}: {now.finished} of {now.clusters} clusters"
            share = 0.0
            if rate is not None:
                share = min(so_far / (rate * work), MOST)
            self._tell(share, f"{text}, {so_far:,} instructions")

        device = DEVICES.get(backend)
        with nullcontext() if device is None else emulation(device, on_progress=hear):
            yield
        if so_far:
            self._rates[operation] = so_far / work


__all__ = ["OPERATIONS", "CheckRow", "run_checks"]

logger = logging.getLogger("flashdsa.check")
ProgressHook = Callable[[float, int, str], None]


@dataclass(frozen=True)
class CheckRow:
    """One output of one case: its error, the limit it must keep, and whether every rule held."""

    operation: str
    case: str
    output: str
    error: float
    limit: float
    passed: bool
    seconds: float
    """Time of the whole case, reference included."""
    message: str


def _rows_of(check: Check) -> list[CheckRow]:
    start = time.perf_counter()
    verdicts = check.judge()
    seconds = time.perf_counter() - start
    return [
        CheckRow(
            check.operation,
            check.case,
            verdict.output,
            *verdict.headline,
            verdict.passed,
            seconds,
            verdict.message,
        )
        for verdict in verdicts
    ]


def _served(backend: str, operations: Collection[str]) -> tuple[str, ...]:
    """Those operations that the backend has in this version; a warning names the others."""
    has = {i.operation for i in registry.implementations() if i.backend == backend}
    anywhere = not backend.startswith("emulate")
    served = tuple(
        name
        for name in operations
        if NEEDS.get(name, {name}) <= has and (anywhere or name not in COMPOSED)
    )
    lacking = ", ".join(name for name in operations if name not in served)
    if not served:
        raise UnsupportedError(f"backend {backend!r} has no implementation of {lacking}")
    if lacking:
        logger.warning("not checked, as %s has no implementation: %s", backend, lacking)
    return served


def device_of(backend: str) -> str:
    """Type of the device that a backend's tensors are on; of torch a GPU, if there is one."""
    if backend == "torch" and (here := torch.accelerator.current_accelerator()) is not None:
        return here.type
    return "cuda" if backend.startswith(("sm", "triton")) else "cpu"


def run_checks(
    backend: str = "cpu",
    operations: Collection[str] | None = None,
    seed: int | None = 0,
    on_progress: ProgressHook | None = None,
    quick: bool = False,
    device: str | None = None,
) -> list[CheckRow]:
    """Judge a backend's operations on random inputs against the float64 reference.

    Args:
        backend: the name of one, as the operations take it; not "auto".
        operations: names out of `OPERATIONS`; None for all of them.
        seed: of the inputs; None draws one.
        on_progress: called with (checks done, checks in all, what runs now or "done"); of the check
            that runs the part that is done, where that is known.
        device: of the tensors, of torch alone; by default `device_of`.
        quick: only the first case of each operation that the backend takes.

    Returns:
        One row per output, in the order of `OPERATIONS`, small cases first.

    Raises:
        ValueError: an operation's name is unknown.
        NotImplementedError: the backend takes none of the cases; those that it does not take are
            left out with a warning in the log.
    """
    wanted = OPERATIONS if operations is None else tuple(operations)
    unknown = [name for name in wanted if name not in OPERATIONS]
    if unknown:
        raise ValueError(
            f"operations: no {', '.join(unknown)}; expected some of {', '.join(OPERATIONS)}"
        )
    wanted = _served(backend, wanted)
    seed = random.randrange(2**31) if seed is None else seed
    device = device or device_of(backend)
    checks = [check for check in checks_of(seed, backend, device) if check.operation in wanted]
    rows: list[CheckRow] = []
    tell = on_progress or (lambda done, total, what: None)
    now = (0, "")

    def tell_more(share: float, text: str) -> None:
        done, what = now
        part = f"about {share:.0%} of " if share else ""  # in front: a narrow screen cuts the end
        tell(done + share, len(checks), f"{part}{what} ({text})")

    progress = CaseProgress(tell_more)
    if backend == "triton" and not quick:
        runner = gpu(torch.device("cuda", torch.cuda.current_device()))
        compile_ahead(checks, runner, lambda what: tell(0, len(checks), what))
    refused: list[UnsupportedError] = []
    for done, check in enumerate(checks):
        if quick and any(row.operation == check.operation for row in rows):
            continue
        now = (done, f"{check.operation}: {check.case}")
        tell(done, len(checks), now[1])
        try:
            with progress.watch(backend, check.operation, check.work):
                rows += _rows_of(check)
        except UnsupportedError as error:
            if backend in ("cpu", "torch"):  # which take everything
                raise
            refused.append(error)
            logger.warning("not checked: %s, %s: %s", check.operation, check.case, error)
    if refused and not rows:
        raise refused[0]
    tell(len(checks), len(checks), "done")
    return rows
