"""The outcome of one run of a command, or of several under different schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ptxemu.api import LaunchResult
from ptxemu.check import Finding
from ptxemu.errors import Interruption


class Ran(Protocol):
    """Results of the launches."""

    launches: list[LaunchResult]
    findings: list[Finding]
    failures: list[str]
    """Launches that could not run to their end, in words."""
    notes: list[str]
    unfinished: int
    """Warp instructions of launches that did not end."""


@dataclass
class Results:
    """Results of the launches, and nothing else: a `Ran` that can be sent."""

    launches: list[LaunchResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unfinished: int = 0

    @classmethod
    def of(cls, ran: Ran) -> Results:
        """The same results."""
        return cls(ran.launches, ran.findings, ran.failures, ran.notes, ran.unfinished)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run of a kernel or of host code."""

    name: str
    arch: str
    exit_code: int
    """Exit code of the host code; 0 of a kernel."""
    ran: Ran
    error: str | None = None
    """The traceback of a script that died."""
    interruption: Interruption | None = None
    """The signal or the time limit that ended it."""
    arrays: Sequence[dict[str, Any]] = ()
    """Facts on the arrays of a kernel, for JSON."""
    array_lines: Sequence[str] = ()
    """The same for people."""
    seeds: Sequence[int] = ()
    """Seeds of the schedules, where several were tried."""
    explored: Explored | None = None
    has_kernels: bool | None = None
    """Whether a program has kernels in it, which it is to launch; None: not of a script."""


@dataclass(frozen=True, slots=True)
class Explored:
    """The orders of synchronisation that were tried."""

    orders: int
    is_complete: bool
    left_out: Sequence[str]

    def to_json_dict(self) -> dict[str, Any]:
        """Return it for `--json`."""
        return {"tried": self.orders, "all": self.is_complete, "left_out": list(self.left_out)}

    @property
    def line(self) -> str:
        """The same for people."""
        orders = "order" if self.orders == 1 else "orders"
        text = f"{self.orders:,} {orders} of synchronisation"
        text = f"all {text}" if self.is_complete else f"{text}, and there are more: no proof"
        return text + (f"; left out: {', '.join(self.left_out)}" if self.left_out else "")
