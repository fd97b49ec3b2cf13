"""What wgmma takes for the majorness study."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.lab.kernels.majorness.plan import NUM_PARTS, InstructionLimitError, MajornessPlan

SOURCES = 'PTX ISA, "wgmma.mma_async": A from a descriptor or registers'
SHAPES = 'PTX ISA, "Asynchronous Warpgroup Level Matrix Shape"'
LAYOUTS = 'PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout"'
TRANSPOSES = 'PTX ISA, "wgmma.mma_async", imm-trans-a and imm-trans-b'


@dataclass(frozen=True)
class Sm90Plan(MajornessPlan):
    """The study with wgmma: A from shared memory (SS) or registers (RS)."""

    @classmethod
    def sources(cls) -> tuple[tuple[str, ...], str]:
        """Where A may be, and the ISA's section that says so."""
        return ("smem", "registers"), SOURCES

    @property
    def tile_section(self) -> str:
        """The ISA's section on canonical layouts."""
        return LAYOUTS

    def check_instruction(self) -> None:
        """Raise InstructionLimitError for what wgmma does not take."""
        if self.m != 64:
            raise InstructionLimitError(f"m: wgmma has M = 64; got {self.m} ({SHAPES})")
        if self.n % 8 or not 8 <= self.n <= 256:
            raise InstructionLimitError(
                f"n: wgmma has N from 8 to 256 in steps of 8; got {self.n} ({SHAPES})"
            )
        if self.a_source == "registers" and self.a_major == "mn":
            raise InstructionLimitError(
                f"a_major: A in registers cannot be transposed; got mn ({TRANSPOSES})"
            )
        if self.element_bytes != 2:
            for name, major in (("a_major", self.a_major), ("b_major", self.b_major)):
                if major == "mn":
                    raise InstructionLimitError(
                        f"{name}: wgmma reads {self.dtype} K-major only, MN-major is for 16-bit "
                        f"types; got mn ({TRANSPOSES}; {LAYOUTS})"
                    )

    @property
    def num_d_rows(self) -> int:
        """Rows of `accumulators`."""
        return self.m

    @property
    def num_a_words(self) -> int:
        """A thread's registers of A: four for every k-step."""
        return 4 * NUM_PARTS * self.steps

    def row_of_d(self, row: int) -> int:
        """The kernel writes D as it is."""
        return row

    @property
    def opcode(self) -> str:
        """The instruction of one k-step."""
        shape = f"m64n{self.n}k{self.step_k}"
        return f"wgmma.mma_async.sync.aligned.{shape}.f32.{self.dtype}.{self.dtype}"
