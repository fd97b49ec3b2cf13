"""The majorness study as data: sizes, operand forms, and what follows for both machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashdsa.errors import ArgumentValueError
from flashdsa.hw import SM100

ELEMENT_BYTES = {"bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1}
"""Types of A and B; the accumulator is f32."""
SWIZZLES = (0, 32, 64, 128)
MAJORS = ("k", "mn")
CUTS = ("tile", "shape")
STEP_BYTES = 32
"""Bytes of a row of A or B along K that one MMA takes, whatever the type."""
NUM_PARTS = 2
OTHER_SHARED_BYTES = 1024
"""Barriers and alignment."""


class InstructionLimitError(ArgumentValueError):
    """The instruction takes no such operand; the message names the limit and the ISA's section."""


@dataclass(frozen=True)
class MajornessPlan:
    """dV (m keys, n dims) = S^T dO over k heads; `part` 0 of the heads clears, part 1 accumulates.

    A is S^T (m, k), B is dO^T (n, k).

    Attributes:
        dtype: of A and B, a key of ELEMENT_BYTES.
        swizzle: span in bytes of the swizzle of both operands, 0 for none.
        a_major, b_major: "k" or "mn": the dimension along which neighbours lie next to each other.
        cut: how part and k-step are cut out of the tile: a Tile (a tuple of layouts) or a Shape.
        boundary: part 0 is committed, waited for and read back before part 1 is issued.
    """

    m: int = 64
    n: int = 256
    k: int = 128
    dtype: str = "bf16"
    swizzle: int = 128
    a_major: str = "k"
    b_major: str = "k"
    cut: str = "tile"
    boundary: bool = True

    LAYOUTS: ClassVar[str] = ""
    """The ISA's section on canonical layouts."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("dtype", tuple(ELEMENT_BYTES)),
            ("swizzle", SWIZZLES),
            ("a_major", MAJORS),
            ("b_major", MAJORS),
            ("cut", CUTS),
        ):
            value = getattr(self, name)
            if value not in choices:
                expected = ", ".join(map(str, choices))
                raise ArgumentValueError(f"{name}: expected one of {expected}; got {value!r}")
        self.check_instruction()
        step = NUM_PARTS * self.step_k
        self.limit(
            self.k >= step and self.k % step == 0,
            f"k: two parts of whole MMAs of K = {self.step_k} ({self.dtype}) need a multiple "
            f"of {step}; got {self.k}",
            self.LAYOUTS,
        )
        self._check_tile("A", self.m, self.a_major)
        self._check_tile("B", self.n, self.b_major)
        if self.smem_bytes + OTHER_SHARED_BYTES > SM100.smem_bytes:
            raise ArgumentValueError(
                f"m, n, k: the operands need {self.smem_bytes} bytes of shared memory; a CTA has "
                f"{SM100.smem_bytes - OTHER_SHARED_BYTES}"
            )

    @staticmethod
    def limit(holds: bool, message: str, section: str) -> None:
        """Raise InstructionLimitError unless the limit holds."""
        if not holds:
            raise InstructionLimitError(f"{message} ({section})")

    def check_instruction(self) -> None:
        """Raise InstructionLimitError for what the machine's MMA does not take."""
        raise NotImplementedError

    def _check_tile(self, name: str, rows: int, major: str) -> None:
        span = (self.swizzle or 16) // self.element_bytes
        along, across = (self.k, rows) if major == "k" else (rows, self.k)
        first, second = ("K", "rows") if major == "k" else ("rows", "K")
        self.limit(
            along % span == 0 and across % 8 == 0,
            f"{name} {major.upper()}-major with swizzle {self.swizzle}: whole atoms need {first} "
            f"to be a multiple of {span} and {second} of 8; got {rows} rows and K = {self.k}",
            self.LAYOUTS,
        )

    def row_of_d(self, row: int) -> int:
        """The row of the kernel's output `accumulators` that holds a row of D."""
        return row

    @property
    def num_d_rows(self) -> int:
        return self.m

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def step_k(self) -> int:
        return STEP_BYTES // self.element_bytes

    @property
    def part_k(self) -> int:
        return self.k // NUM_PARTS

    @property
    def steps(self) -> int:
        return self.part_k // self.step_k

    @property
    def b_offset(self) -> int:
        """First byte of B in the operands' shared memory: after A, on a swizzle's period."""
        return -(-self.m * self.k * self.element_bytes // 1024) * 1024

    @property
    def b_bytes(self) -> int:
        return self.n * self.k * self.element_bytes

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory for A and B."""
        return self.b_offset + self.b_bytes

    def swizzle_name(self, major: str) -> str:
        """The layout atom of an operand: "K_SW128", "MN_INTER"... as CuTe names them."""
        return f"{major.upper()}_{f'SW{self.swizzle}' if self.swizzle else 'INTER'}"
