"""Launches of programs and their findings, for the report."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ptxemu.api import LaunchResult
from ptxemu.check import Finding
from ptxemu.errors import ExecutionError, Interruption, StoppedError, UnsupportedInstructionError
from ptxemu.events import LaunchProgress
from ptxemu.global_writes import Earlier
from ptxemu.launch_setup import LaunchSetup, OnLaunch
from ptxemu.sched.policy import Policy

INTERRUPTED = 130
"""Exit code of what Ctrl-C ended, as a shell says."""
Progress = Callable[[str, LaunchProgress], None]
"""Called with the kernel's name and how far its launch is."""


@dataclass
class Log:
    """Settings of the launches, and their results in order."""

    check: bool = True
    policy: Policy = field(default_factory=Policy)
    on_progress: Progress | None = None
    on_launch: OnLaunch | None = None
    """Called before each launch; the observer that it returns listens to it."""
    unchecked: re.Pattern[str] | None = None
    """Kernels with it in their names run without the check."""
    launches: list[LaunchResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Launches that could not run to their end, in words."""
    notes: list[str] = field(default_factory=list)
    """Notes for readers of the results: refused calls, functions that are not emulated."""

    unfinished: int = 0
    """Warp instructions of launches that did not end."""
    stopped: str = field(default="", init=False)
    """Why launches are to end: nobody waits for them any more."""
    earlier: Earlier | None = field(default=None, init=False)
    """The last launch, if it lets the next one begin before its end."""
    interruption: Interruption | None = field(default=None, init=False)
    """The signal or the time limit that ended the run."""

    def stop(self, reason: str) -> None:
        """End the launch that is under way, in whatever thread, and let none begin."""
        self.stopped = self.stopped or reason

    def interrupted(self, by: KeyboardInterrupt) -> None:
        """A signal or the time limit ends the run."""
        if self.interruption is None:
            plain = Interruption("interrupted", INTERRUPTED)
            self.interruption = by if isinstance(by, Interruption) else plain
        self.stop(self.interruption.reason)

    def run(self, setup: LaunchSetup, *, is_programmatic: bool = False) -> LaunchResult:
        """Run a launch and remember what it did.

        Args:
            is_programmatic: it may begin before the end of the launch before.

        Raises:
            PtxEmuError: as `Module.launch`; failures are remembered too.
            StoppedError: `stop` was called.
        """
        kernel = setup.kernel
        self._go_on(kernel)
        is_spared = self.unchecked is not None and self.unchecked.search(kernel) is not None
        if is_spared and self.check:
            self.note(f"kernel {kernel} was not checked, as --unchecked says")
        if is_programmatic:
            setup = replace(setup, earlier=self.earlier)
        self.earlier = None
        try:
            result = setup.launch(
                policy=self.policy,
                observer=None if self.on_launch is None else self.on_launch(setup),
                check=self.check and not is_spared,
                on_progress=lambda now: self._tell(kernel, now),
            )
        except (ExecutionError, StoppedError, Interruption) as error:
            self.findings.extend(error.findings)
            self.unfinished += error.warp_instructions
            if isinstance(error, ExecutionError):
                self.failures.append(f"kernel {kernel}: {error}")
            elif isinstance(error, Interruption):
                self.fail(f"kernel {kernel}: {error.reason}")
            raise
        except UnsupportedInstructionError as error:
            self.failures.append(f"kernel {kernel}: {error}")
            raise
        self.earlier = result.earlier
        self.launches.append(result)
        self.findings.extend(result.findings)
        return result

    def _tell(self, kernel: str, now: LaunchProgress) -> None:
        self._go_on(kernel)
        if self.on_progress is not None:
            self.on_progress(kernel, now)

    def _go_on(self, kernel: str) -> None:
        if self.stopped:
            raise StoppedError(f"kernel {kernel}: {self.stopped}")

    def fail(self, text: str) -> None:
        """Remember a failure once."""
        if text not in self.failures:
            self.failures.append(text)

    def note(self, text: str) -> None:
        """Remember a sentence once."""
        if text not in self.notes:
            self.notes.append(text)
