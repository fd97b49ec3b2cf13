"""The majorness study as data: sizes, operand forms, and what follows for both machines."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.errors import ArgumentValueError
from flashdsa.hw import SM100
from flashdsa.plan import Role

ELEMENT_BYTES = {"bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1, "tf32": 4}
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
        a_source: "smem", "tmem" (tcgen05) or "registers" (wgmma).
        a_major, b_major: "k" or "mn": along which dimension neighbours lie next to each other in
            shared memory. Elsewhere than in shared memory A is K-major.
        cut: how part and k-step are cut out of the tile: by a Tile (a tuple of layouts) or a Shape.
        boundary: part 0 is committed, waited for and read back before part 1 is issued.
    """

    m: int = 64
    n: int = 256
    k: int = 128
    dtype: str = "bf16"
    swizzle: int = 128
    a_source: str = "smem"
    a_major: str = "k"
    b_major: str = "k"
    cut: str = "tile"
    boundary: bool = True

    def __post_init__(self) -> None:
        """Refuse what no tile or instruction has."""
        for name, value, choices in (
            ("dtype", self.dtype, tuple(ELEMENT_BYTES)),
            ("swizzle", self.swizzle, SWIZZLES),
            ("a_major", self.a_major, MAJORS),
            ("b_major", self.b_major, MAJORS),
            ("cut", self.cut, CUTS),
        ):
            if value not in choices:
                expected = ", ".join(map(str, choices))
                raise ArgumentValueError(f"{name}: expected one of {expected}; got {value!r}")
        sources, section = self.sources()
        if self.a_source not in sources:
            raise InstructionLimitError(
                f"a_source: expected {' or '.join(sources)}; got {self.a_source!r} ({section})"
            )
        self.check_instruction()
        self._check_tile("A", self.m, self.a_major, in_shared=self.a_source == "smem")
        self._check_tile("B", self.n, self.b_major, in_shared=True)
        if self.smem_bytes + OTHER_SHARED_BYTES > SM100.smem_bytes:
            raise ArgumentValueError(
                f"m, n, k: the operands need {self.smem_bytes} bytes of shared memory; a CTA has "
                f"{SM100.smem_bytes - OTHER_SHARED_BYTES}"
            )

    @property
    def name(self) -> str:
        """Of the compiled function."""
        return "majorness"

    @property
    def roles(self) -> tuple[Role, ...]:
        """None: all warps do the same."""
        return ()

    @classmethod
    def sources(cls) -> tuple[tuple[str, ...], str]:
        """Where A may be, and the ISA's section that says so."""
        raise NotImplementedError

    def row_of_d(self, row: int) -> int:
        """Where the kernel's output `accumulators` has a row of D."""
        raise NotImplementedError

    @property
    def num_d_rows(self) -> int:
        """Rows of `accumulators`."""
        raise NotImplementedError

    @property
    def num_a_words(self) -> int:
        """32-bit words of A that a thread writes out where A is not in shared memory."""
        raise NotImplementedError

    def check_instruction(self) -> None:
        """Raise InstructionLimitError for what the machine's MMA does not take."""
        raise NotImplementedError

    @property
    def tile_section(self) -> str:
        """The ISA's section on canonical layouts."""
        raise NotImplementedError

    def _check_tile(self, name: str, rows: int, major: str, *, in_shared: bool) -> None:
        step = NUM_PARTS * self.step_k
        if self.k < step or self.k % step:
            raise InstructionLimitError(
                f"k: two parts of whole MMAs of K = {self.step_k} ({self.dtype}) need a multiple "
                f"of {step}; got {self.k} ({self.tile_section})"
            )
        if not in_shared:
            return
        span = (self.swizzle or 16) // self.element_bytes
        along, across = (self.k, rows) if major == "k" else (rows, self.k)
        if along % span or across % 8:
            sizes = ("K", "rows") if major == "k" else ("rows", "K")
            raise InstructionLimitError(
                f"{name} {major.upper()}-major with swizzle {self.swizzle}: whole atoms need "
                f"{sizes[0]} to be a multiple of {span} and {sizes[1]} of 8; got {rows} rows and "
                f"K = {self.k} ({self.tile_section})"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of A and B."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def step_k(self) -> int:
        """K of one MMA."""
        return STEP_BYTES // self.element_bytes

    @property
    def part_k(self) -> int:
        """Heads of one part."""
        return self.k // NUM_PARTS

    @property
    def steps(self) -> int:
        """MMAs of one part."""
        return self.part_k // self.step_k

    @property
    def a_bytes(self) -> int:
        """Bytes of A."""
        return self.m * self.k * self.element_bytes

    @property
    def b_bytes(self) -> int:
        """Bytes of B."""
        return self.n * self.k * self.element_bytes

    @property
    def b_offset(self) -> int:
        """Where B starts in the operands' shared memory: behind A, on a swizzle's period."""
        return -(-self.a_bytes // 1024) * 1024 if self.a_source == "smem" else 0

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory for A and B."""
        return self.b_offset + self.b_bytes

    @property
    def row_words(self) -> int:
        """32-bit words of a row of A along K: columns of TMEM where A is there."""
        return self.k * self.element_bytes // 4

    def swizzle_name(self, major: str) -> str:
        """The layout atom of an operand: "K_SW128", "MN_INTER"... as CuTe names them."""
        kind = f"SW{self.swizzle}" if self.swizzle else "INTER"
        if major == "mn" and self.dtype == "tf32" and self.swizzle == 128:
            kind = "SW128_32B"
        return f"{major.upper()}_{kind}"
