"""A line on stderr that says how far a long run is."""

from __future__ import annotations

import sys
import time

from ptxemu.cli.kernel_names import readable
from ptxemu.cli.terminal import plain
from ptxemu.events import LaunchProgress

_FIRST_AFTER_SECONDS = 2.0
_EVERY_SECONDS = 1.0
_EVERY_SECONDS_IN_A_PIPE = 10.0


class Progress:
    """Called with a kernel's name and how far its launch is; quiet for short runs.

    On a terminal one line is rewritten, elsewhere a line is added every tenth of the way, and every
    10 seconds.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._shown_at = 0.0
        self._shown_tenth = 0
        self._kernel = ""
        self._instructions = 0

    def __call__(self, kernel: str, progress: LaunchProgress) -> None:
        """Report it, or say nothing."""
        if self._quiet:
            return
        now = time.monotonic()
        done, total, instructions = progress
        if kernel != self._kernel or instructions < self._instructions:  # another launch
            self._kernel, self._started, self._shown_tenth = kernel, now, 0
        self._instructions = instructions
        if now - self._started < _FIRST_AFTER_SECONDS or now - self._shown_at < _EVERY_SECONDS:
            return
        tenth = 10 * done // max(total, 1)
        recent = now - self._shown_at < _EVERY_SECONDS_IN_A_PIPE
        if not self._terminal and tenth == self._shown_tenth and recent:
            return
        self._shown_at, self._shown_tenth = now, tenth
        text = f"{plain(_short(kernel))}: {done} of {total} clusters, {instructions:,} instructions"
        text += f", {now - self._started:.0f} s"
        sys.stderr.write(f"\r\033[K{text}" if self._terminal else f"{text}\n")
        sys.stderr.flush()

    def finish(self) -> None:
        """Remove the line."""
        if self._terminal and self._shown_at:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def _short(name: str) -> str:
    """The name without what CuTe DSL writes before it, so short that the line fits 80 columns."""
    return readable(name.removeprefix("kernel_cutlass_"), 20)
