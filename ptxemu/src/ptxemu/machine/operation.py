"""An asynchronous operation: an agent of its own whose steps the scheduler takes when it likes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ptxemu.machine.sleepers import Sleepers

if TYPE_CHECKING:
    from ptxemu.machine.warp import Warp
    from ptxemu.syntax.ast import Instruction


class Ordering(NamedTuple):
    """The operations that one comes behind, those included that have completed since.

    A checker takes its verdicts from it: what is in none of the three is not ordered by the issue.
    """

    after: Sequence[AsyncOperation] = ()
    """Behind these the ISA executes it."""
    if_synced: Sequence[AsyncOperation] = ()
    """Behind these too, if the issuing threads have synchronised around tcgen05.fence."""
    in_practice: Sequence[AsyncOperation] = ()
    """Behind these hardware executes it, though the ISA does not say so."""


NO_ORDER = Ordering()


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
        ordering: Ordering = NO_ORDER,
        after: Iterable[AsyncOperation] | None = None,
    ) -> None:
        """`after`: what the scheduler completes before; by default all of `ordering`."""
        self.agent_id = -1
        """Set by Machine.issue."""
        self.kind = kind
        """For people and counters: "cp.async.bulk.tensor", "wgmma", "tcgen05.mma"..."""
        self.issuer = issuer
        self.cta = issuer.cta
        self.instruction = instruction
        self.ordering = ordering
        self.completed: bool = False
        if after is None:
            after = (*ordering.after, *ordering.if_synced, *ordering.in_practice)
        self.after = [operation for operation in after if not operation.completed] if after else []
        """Those of them that have not completed yet."""
        self.steps: deque[Callable[[], None]] = deque()
        self.sources_read = False
        self.steps_taken = Sleepers()
        """Woken by every step."""
        self.registers: tuple[int, ...] = ()
        """Slots of the issuer's registers that a product reads or writes until it is waited for."""
        self.mbarriers: tuple[tuple[int, int], ...] = ()
        """The mbarriers that a commit arrives on: index of the CTA and offset."""
        self.shape: tuple[int, ...] | str | None = None
        """For people: of a product (m, n, k), of a copy to TMEM its .shape."""
        self.result_touched = False
        """Something was computed with its result before it was waited for, and that was told."""

    @property
    def label(self) -> str:
        """For people: "tcgen05.mma #17 issued by cta (0,0,0) warp 12"."""
        return f"{self.kind} #{self.agent_id} issued by {self.issuer.label}"

    def take_step(self) -> None:
        """Take the next step; complete with the last."""
        if self.steps:
            self.steps.popleft()()
        if not self.steps:
            self.sources_read = True
            self.completed = True
        self.steps_taken.wake()
