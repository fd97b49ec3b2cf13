"""Pairs of wgmma on one accumulator, and what may be left out around them, as data."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.errors import ArgumentValueError
from workbench.lab.kernels.majorness.sm90.plan import Sm90Plan

VARIANTS = ("pair", "early-read", "overwrite", "no-fence")
"""What happens to part 0 (clears) and part 1 (accumulates):

pair: both in one commit group, waited for. early-read: D's registers are read before wait_group.
overwrite: B is overwritten before it. no-fence: no wgmma.fence before the first wgmma.
"""


@dataclass(frozen=True)
class WgmmaHazardPlan(Sm90Plan):
    """A variant on a small problem."""

    variant: str = "pair"

    def check_instruction(self) -> None:
        """Raise for a variant or shape that there is not."""
        if self.variant not in VARIANTS:
            raise ArgumentValueError(
                f"variant: expected one of {', '.join(VARIANTS)}; got {self.variant!r}"
            )
        super().check_instruction()

    @property
    def d_columns(self) -> int:
        """Columns of the result."""
        return self.n

    def place_of_d(self, row: int, column: int) -> tuple[int, int]:
        """The kernel writes D as it is."""
        return row, column
