"""Which parts of a kernel become machine code with their branches and plain loads and stores.

A stretch is a loop with all that is in it, or the whole kernel. It is made when what was executed
of it has taken longer than making it will.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from ptxemu.machine.program import Program
    from ptxemu.machine.warp import Warp

MOST_INSTRUCTIONS = 2000
"""Of a stretch; 1 to 2 ms each to make."""
ROUNDS = 800
"""How often a stretch's instructions are interpreted before it is made."""


class Stretch(Protocol):
    """Instructions as machine code."""

    @property
    def entries(self) -> frozenset[int]:
        """Where lanes may be when `run` begins."""
        ...

    def run(self, warp: Warp) -> bool:
        """Let the lanes that can run go on until they leave; whether anything was executed."""
        ...


class StretchMaker(Protocol):
    """Makes machine code of the instructions [first, end)."""

    def __call__(self, program: Program, first: int, end: int) -> Stretch | None:
        """A stretch, or None where too little of it can be machine code."""
        ...


Loop: TypeAlias = tuple[int, int]
"""First instruction and the one behind the branch back."""


class Stretches:
    """The stretches of one kernel.

    Attributes:
        at: by pc the stretch that a warp may enter there.
    """

    def __init__(self, program: Program, make: StretchMaker | None, loops: list[Loop]) -> None:
        self.at: dict[int, Stretch] = {}
        self._program = program
        self._make = make
        self._loops = loops
        self._executed: dict[Loop, int] = {}
        """Instructions executed in a loop or the kernel, about, until that is enough."""
        self._ranges: dict[Loop, Loop] = {}

    def went_back(self, first: int, branch: int) -> None:
        """A warp goes round a loop again."""
        self._count((first, branch + 1))

    def started(self) -> None:
        """A warp starts."""
        self._count((0, len(self._program.function.instructions)))

    def leave_out(self, stretch: Stretch) -> None:
        """It costs more than it saves."""
        self.at = {pc: other for pc, other in self.at.items() if other is not stretch}

    def _count(self, loop: Loop) -> None:
        if self._make is None:
            return
        executed = self._executed.get(loop, 0)
        if executed < 0:
            return
        first, end = self._range(loop)
        executed += loop[1] - loop[0]
        self._executed[loop] = executed
        if executed < ROUNDS * (end - first):
            return
        self._executed[loop] = -1
        stretch = self._make(self._program, first, end) if end - first > 1 else None
        if stretch is not None:
            self.at.update(dict.fromkeys(stretch.entries, stretch))
            self._program.plain -= stretch.entries

    def _range(self, loop: Loop) -> Loop:
        """The kernel, or the largest loop around a loop that is small enough."""
        if loop not in self._ranges:
            self._ranges[loop] = self._widest(loop)
        return self._ranges[loop]

    def _widest(self, loop: Loop) -> Loop:
        whole = 0, len(self._program.function.instructions)
        around = [o for o in (*self._loops, whole) if o[0] <= loop[0] and loop[1] <= o[1]]
        fitting = [o for o in around if o[1] - o[0] <= MOST_INSTRUCTIONS]
        return max(fitting, key=lambda o: o[1] - o[0], default=(0, 0))
