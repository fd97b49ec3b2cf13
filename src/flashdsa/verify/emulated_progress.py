"""Progress of a case that runs on the emulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from flashdsa.backends.emulated.devices import B200, H200
from flashdsa.backends.emulated.runner import EmulatedProgress, emulation

DEVICES = {"emulate-sm90": H200, "emulate-sm100": B200}
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
