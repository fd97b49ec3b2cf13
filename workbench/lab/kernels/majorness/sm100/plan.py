"""What tcgen05.mma (cta_group::1) takes for the majorness study, and where its TMEM columns are."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.hw import SM100, TMEM_LANES
from workbench.lab.kernels.majorness.plan import InstructionLimitError, MajornessPlan

SOURCES = 'PTX ISA, "tcgen05.mma": A from a descriptor or TMEM'
SHAPES = 'PTX ISA, "tcgen05.mma", "Matrix Shape"'
TYPES = 'PTX ISA, "tcgen05.mma", "Valid Combinations of Type-Size, Major-ness and Swizzling"'
TRANSPOSES = 'PTX ISA, "tcgen05.mma", "Transpose and Negate operations"'
LAYOUTS = 'PTX ISA, "tcgen05", "Canonical Layouts"'
TMEM = 'PTX ISA, "Tensor Memory Addressing"'
KINDS = {"bf16": "f16", "f16": "f16", "e4m3": "f8f6f4", "e5m2": "f8f6f4", "tf32": "tf32"}
"""The .kind of tcgen05.mma of each type."""


@dataclass(frozen=True)
class Sm100Plan(MajornessPlan):
    """The study with tcgen05.mma: A from shared memory (SS) or TMEM (TS)."""

    @classmethod
    def sources(cls) -> tuple[tuple[str, ...], str]:
        """Where A may be, and the ISA's section that says so."""
        return ("smem", "tmem"), SOURCES

    @property
    def tile_section(self) -> str:
        """The ISA's section on canonical layouts."""
        return LAYOUTS

    def check_instruction(self) -> None:
        """Raise InstructionLimitError for what tcgen05.mma with cta_group::1 does not take."""
        if self.m not in (64, 128):
            raise InstructionLimitError(
                f"m: tcgen05.mma with .cta_group::1 has M = 64 or 128; got {self.m} ({SHAPES})"
            )
        step = 8 if self.m == 64 else 16
        if self.n % step or not step <= self.n <= 256:
            raise InstructionLimitError(
                f"n: tcgen05.mma with M = {self.m} has N from {step} to 256 in steps of {step}; "
                f"got {self.n} ({SHAPES})"
            )
        if self.a_source == "tmem" and self.a_major == "mn":
            raise InstructionLimitError(
                f"a_major: A in TMEM cannot be transposed; got mn ({TRANSPOSES})"
            )
        majors = [self.b_major] + ([self.a_major] if self.a_source == "smem" else [])
        if self.dtype == "tf32" and "mn" in majors and self.swizzle != 128:
            raise InstructionLimitError(
                "swizzle: an MN-major tf32 matrix needs 128-byte swizzling (with 32-byte "
                f"atomicity); got {self.swizzle} ({TYPES})"
            )
        if self.element_bytes == 1 and self.b_major == "mn" and self.n % 16:
            raise InstructionLimitError(
                f"n: an MN-major 8-bit B needs a multiple of 16; got {self.n} ({TRANSPOSES})"
            )
        if self.n + self.a_columns > SM100.tmem_columns:
            raise InstructionLimitError(
                f"n, k: D and A need {self.n + self.a_columns} TMEM columns; there are "
                f"{SM100.tmem_columns} ({TMEM})"
            )

    @property
    def a_columns(self) -> int:
        """TMEM columns of A, behind those of D; 0 where A is in shared memory."""
        return self.row_words if self.a_source == "tmem" else 0

    @property
    def kind(self) -> str:
        """The instruction's .kind."""
        return KINDS[self.dtype]

    @property
    def num_d_rows(self) -> int:
        """Rows of `accumulators`: TMEM lanes."""
        return TMEM_LANES

    @property
    def num_a_words(self) -> int:
        """Words of A in a lane; one that nobody writes where A is in shared memory."""
        return self.a_columns or 1

    def row_of_d(self, row: int) -> int:
        """The TMEM lane of a row of D, and of A there (ISA, "Data Path Layout Organization").

        M = 128 is layout D, M = 64 layout F: 16 rows in the lower half of each group of 32 lanes.
        """
        return row if self.m == 128 else row // 16 * 32 + row % 16
