"""An asynchronous operation: an agent of its own whose steps the scheduler takes when it likes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptxemu.machine.warp import Warp
    from ptxemu.syntax.ast import Instruction


class AsyncOperation:
    """One copy, reduction, matrix product or commit that runs beside the warps.

    Its `steps` are taken in order, each at a moment of the scheduler's choice, none before every
    operation in `after` has completed (pipelined tcgen05 instructions). Typical steps: read the
    source and write the destination; then signal an mbarrier. `sources_read` turns true when the
    step that reads the sources is done, `completed` after the last.
    """

    def __init__(
        self,
        kind: str,
        issuer: Warp,
        instruction: Instruction,
        *,
        after: Iterable[AsyncOperation] = (),
    ) -> None:
        self.agent_id = -1
        """Set by Machine.issue."""
        self.kind = kind
        """For people and counters: "cp.async.bulk.tensor", "wgmma", "tcgen05.mma"..."""
        self.issuer = issuer
        self.cta = issuer.cta
        self.instruction = instruction
        self.completed: bool = False
        self.after = [operation for operation in after if not operation.completed]
        self.steps: deque[Callable[[], None]] = deque()
        self.sources_read = False
        self.details: dict[str, Any] = {}
        """For the tracer and the reports: bytes, shape, destination..."""

    @property
    def label(self) -> str:
        """For people: "tcgen05.mma #17 issued by cta (0,0,0) warp 12"."""
        return f"{self.kind} #{self.agent_id} issued by {self.issuer.label}"

    @property
    def ready(self) -> bool:
        """Whether its next step may be taken now."""
        if self.after:
            self.after = [operation for operation in self.after if not operation.completed]
        return not self.after

    def take_step(self) -> None:
        """Take the next step; complete with the last."""
        if self.steps:
            self.steps.popleft()()
        if not self.steps:
            self.sources_read = True
            self.completed = True
