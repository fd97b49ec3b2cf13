"""The limits of tcgen05.mma (cta_group::1) in the majorness study, and its TMEM columns."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.errors import ArgumentValueError
from flashdsa.hw import TMEM_LANES
from workbench.lab.kernels.majorness.plan import MajornessPlan

SHAPES = 'PTX ISA, "tcgen05.mma", "Matrix Shape"'
TRANSPOSES = 'PTX ISA, "tcgen05.mma", "Transpose and Negate operations"'
VARIANTS = ("pair", "threads", "shapes", "early-read", "overwrite", "late-operand", "fence-only")
"""The treatment of part 0 (clears) and part 1 (accumulates):

pair: one thread issues both, back to back. threads: one thread of warp 0 issues part 0, one of
warp 1 part 1. shapes: part 1 is two MMAs of half the columns for each k-step. early-read: D is read
after a barrier, but no commit and wait. overwrite: B is overwritten after such a barrier.
late-operand: part 1's B is written while part 0 is issued, with no barrier before part 1.
fence-only: between the parts a barrier, tcgen05.fence and D read back, no commit.
"""


@dataclass(frozen=True)
class Sm100Plan(MajornessPlan):
    """The study with tcgen05.mma."""

    LAYOUTS = 'PTX ISA, "tcgen05", "Canonical Layouts"'

    def check_instruction(self) -> None:
        """Raise InstructionLimitError for what tcgen05.mma with cta_group::1 does not take."""
        self.limit(
            self.m in (64, 128),
            f"m: tcgen05.mma with .cta_group::1 has M = 64 or 128; got {self.m}",
            SHAPES,
        )
        step = 8 if self.m == 64 else 16
        self.limit(
            self.n % step == 0 and step <= self.n <= 256,
            f"n: tcgen05.mma with M = {self.m} has N from {step} to 256 in steps of {step}; "
            f"got {self.n}",
            SHAPES,
        )
        self.limit(
            self.element_bytes == 2 or self.b_major == "k" or self.n % 16 == 0,
            f"n: an MN-major 8-bit B needs a multiple of 16; got {self.n}",
            TRANSPOSES,
        )

    @property
    def kind(self) -> str:
        """The instruction's .kind."""
        return "f16" if self.element_bytes == 2 else "f8f6f4"

    @property
    def num_d_rows(self) -> int:
        """Rows of `accumulators`: TMEM lanes."""
        return TMEM_LANES

    def row_of_d(self, row: int) -> int:
        """The TMEM lane of a row of D (ISA, "Data Path Layout Organization").

        M = 128 is layout D, M = 64 layout F: 16 rows in the lower half of each group of 32 lanes.
        """
        return row if self.m == 128 else row // 16 * 32 + row % 16


@dataclass(frozen=True)
class HazardPlan(Sm100Plan):
    """A variant on a small problem.

    Attributes:
        variant: one of VARIANTS. ws: the MMAs are tcgen05.mma.ws.
    """

    variant: str = "pair"
    ws: bool = False

    def check_instruction(self) -> None:
        """Raise for an unknown variant or shape."""
        if self.variant not in VARIANTS:
            raise ArgumentValueError(
                f"variant: expected one of {', '.join(VARIANTS)}; got {self.variant!r}"
            )
        if not self.ws:
            super().check_instruction()
            return
        message = f"m: tcgen05.mma.ws has M = 32, 64 or 128; got {self.m}"
        self.limit(self.m in (32, 64, 128), message, SHAPES)
        message = f"n: tcgen05.mma.ws has N = 64, 128 or 256; got {self.n}"
        self.limit(self.n in (64, 128, 256), message, SHAPES)

    @property
    def d_columns(self) -> int:
        return self.n * self.m // 128 if self.ws else self.n

    def cell_of_d(self, row: int, column: int) -> tuple[int, int]:
        """TMEM lane and column of an element of D (ISA, "Data Path Layout Organization").

        .ws cuts N into 128 / M parts, one for each group of M lanes (layouts D, E, G).
        """
        if not self.ws:
            return self.row_of_d(row), column
        part, within = divmod(column, self.d_columns)
        return row + self.m * part, within
