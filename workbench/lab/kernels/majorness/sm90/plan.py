"""The limits of wgmma in the majorness study, and of its pairs that lack a wait."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.errors import ArgumentValueError
from workbench.lab.kernels.majorness.plan import MajornessPlan

SHAPES = 'PTX ISA, "Asynchronous Warpgroup Level Matrix Shape"'
TRANSPOSES = 'PTX ISA, "wgmma.mma_async", imm-trans-a and imm-trans-b'
VARIANTS = ("pair", "early-read", "overwrite", "no-fence")
"""The treatment of part 0 (clears) and part 1 (accumulates):

pair: both in one commit group, waited for. early-read: D's registers are read before wait_group.
overwrite: B is overwritten before it. no-fence: no wgmma.fence before the first wgmma.
"""


@dataclass(frozen=True)
class Sm90Plan(MajornessPlan):
    """The study with wgmma."""

    LAYOUTS = 'PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout"'

    def check_instruction(self) -> None:
        """Raise InstructionLimitError for what wgmma does not take."""
        self.limit(self.m == 64, f"m: wgmma has M = 64; got {self.m}", SHAPES)
        self.limit(
            self.n % 8 == 0 and 8 <= self.n <= 256,
            f"n: wgmma has N from 8 to 256 in steps of 8; got {self.n}",
            SHAPES,
        )
        for name in ("a_major", "b_major"):
            self.limit(
                self.element_bytes == 2 or getattr(self, name) == "k",
                f"{name}: wgmma reads {self.dtype} K-major only, MN-major is for 16-bit types; "
                f"got mn",
                f"{TRANSPOSES}; {self.LAYOUTS}",
            )

    @property
    def opcode(self) -> str:
        """The instruction of one k-step."""
        shape = f"m64n{self.n}k{self.step_k}"
        return f"wgmma.mma_async.sync.aligned.{shape}.f32.{self.dtype}.{self.dtype}"


@dataclass(frozen=True)
class WgmmaHazardPlan(Sm90Plan):
    """A variant on a small problem."""

    variant: str = "pair"

    def check_instruction(self) -> None:
        """Raise for an unknown variant or shape."""
        if self.variant not in VARIANTS:
            raise ArgumentValueError(
                f"variant: expected one of {', '.join(VARIANTS)}; got {self.variant!r}"
            )
        super().check_instruction()

    @property
    def d_columns(self) -> int:
        return self.n

    def cell_of_d(self, row: int, column: int) -> tuple[int, int]:
        """The kernel writes D as it is."""
        return row, column
