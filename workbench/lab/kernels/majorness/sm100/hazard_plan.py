"""Pairs of tcgen05.mma on one accumulator, and what may stand between them, as data."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.errors import ArgumentValueError
from workbench.lab.kernels.majorness.plan import InstructionLimitError
from workbench.lab.kernels.majorness.sm100.plan import SHAPES, Sm100Plan

VARIANTS = (
    "pair",
    "threads",
    "shapes",
    "early-read",
    "overwrite",
    "late-operand",
    "fence-only",
)
"""What happens to part 0 (clears) and part 1 (accumulates):

pair: one thread issues both, back to back. threads: one thread of warp 0 issues part 0, one of
warp 1 part 1. shapes: part 1 is two MMAs of half the columns for each k-step. early-read: D is read
behind a barrier, but no commit and wait. overwrite: B is overwritten behind such a barrier.
late-operand: part 1's B is written while part 0 is issued, with no barrier before part 1.
fence-only: between the parts a barrier, tcgen05.fence and D read back, no commit.
"""
WS_ROWS = (32, 64, 128)
WS_COLUMNS = (64, 128, 256)


@dataclass(frozen=True)
class HazardPlan(Sm100Plan):
    """A variant on a small problem.

    Attributes:
        variant: one of VARIANTS. ws: the MMAs are tcgen05.mma.ws.
    """

    variant: str = "pair"
    ws: bool = False

    def check_instruction(self) -> None:
        """Raise for a variant or shape that there is not."""
        if self.variant not in VARIANTS:
            raise ArgumentValueError(
                f"variant: expected one of {', '.join(VARIANTS)}; got {self.variant!r}"
            )
        if not self.ws:
            super().check_instruction()
            return
        if self.m not in WS_ROWS:
            raise InstructionLimitError(
                f"m: tcgen05.mma.ws has M = 32, 64 or 128; got {self.m} ({SHAPES})"
            )
        if self.n not in WS_COLUMNS:
            raise InstructionLimitError(
                f"n: tcgen05.mma.ws has N = 64, 128 or 256; got {self.n} ({SHAPES})"
            )

    @property
    def d_columns(self) -> int:
        """TMEM columns of D."""
        return self.n * self.m // 128 if self.ws else self.n

    def place_of_d(self, row: int, column: int) -> tuple[int, int]:
        """TMEM lane and column of an element of D (ISA, "Data Path Layout Organization").

        .ws cuts N into 128 / M parts, one for each group of M lanes (layouts D, E, G).
        """
        if not self.ws:
            return self.row_of_d(row), column
        part, within = divmod(column, self.d_columns)
        return row + self.m * part, within
