"""A line on stderr that says how far a long run is."""

from __future__ import annotations

import sys
import time

_FIRST_AFTER_SECONDS = 2.0
_EVERY_SECONDS = 1.0


class Progress:
    """Called with (kernel, finished clusters, all clusters); quiet for short runs.

    On a terminal one line is rewritten, elsewhere a line is added every tenth of the way.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._shown_at = 0.0
        self._shown_tenth = 0
        self._kernel = ""

    def __call__(self, kernel: str, done: int, total: int) -> None:
        """Report `done` of `total` clusters of a launch."""
        if self._quiet:
            return
        now = time.monotonic()
        if kernel != self._kernel or done <= 1:
            self._kernel, self._started, self._shown_tenth = kernel, now, 0
        if now - self._started < _FIRST_AFTER_SECONDS or now - self._shown_at < _EVERY_SECONDS:
            return
        tenth = 10 * done // max(total, 1)
        if not self._terminal and tenth == self._shown_tenth:
            return
        self._shown_at, self._shown_tenth = now, tenth
        text = f"{_short(kernel)}: {done} of {total} clusters, {now - self._started:.0f} s"
        sys.stderr.write(f"\r\033[K{text}" if self._terminal else f"{text}\n")
        sys.stderr.flush()

    def finish(self) -> None:
        """Remove the line."""
        if self._terminal and self._shown_at:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def _short(name: str, width: int = 60) -> str:
    return name if len(name) <= width else name[: width - 3] + "..."
