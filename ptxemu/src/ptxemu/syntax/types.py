"""The names of PTX's types: how many bits each has and which class of value it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

TypeClass: TypeAlias = Literal["int", "float", "pred", "bits"]


@dataclass(frozen=True, slots=True)
class PtxType:
    """A type as PTX writes it after the dot; `bits` counts all `lanes` of a packed type."""

    name: str
    bits: int
    kind: TypeClass
    lanes: int = 1

    @property
    def size(self) -> int:
        """Bytes of storage: a predicate takes one, a sub-byte type is rounded up."""
        return (self.bits + 7) // 8


_ROWS: tuple[tuple[TypeClass, int, str], ...] = (
    ("pred", 1, "pred"),
    *(("bits", bits, f"b{bits}") for bits in (1, 4, 8, 16, 32, 64, 128)),
    *(("int", bits, f"{s}{bits}") for bits in (4, 8, 16, 32, 64) for s in "us"),
    *(("int", 32, f"{s}16x2 {s}8x4") for s in "us"),
    # NOTE: a packed type pads a 6-bit float to a byte, and packs 4-bit floats tightly.
    ("float", 4, "e2m1"),
    ("float", 6, "e2m3 e3m2"),
    ("float", 8, "e4m3 e5m2 e2m1x2 ue8m0 ue4m3"),
    ("float", 16, "f16 bf16 e4m3x2 e5m2x2 e2m3x2 e3m2x2 e2m1x4 ue8m0x2 s2f6x2"),
    ("float", 32, "f32 tf32 f16x2 bf16x2 e4m3x4 e5m2x4 e2m3x4 e3m2x4"),
    ("float", 64, "f64 f32x2"),
)
"""Class, bits and names; what follows an x is the number of lanes."""
TYPES: dict[str, PtxType] = {
    name: PtxType(name, bits, kind, int(name.partition("x")[2] or 1))
    for kind, bits, names in _ROWS
    for name in names.split()
}
"""Every type name that may stand in a declaration or in an opcode."""

FUNDAMENTAL: frozenset[str] = frozenset(
    ["pred", "f16", "f16x2", "f32", "f64", "b8", "b16", "b32", "b64", "b128"]
    + [f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64)]
)
"""The types that a register, variable or parameter may be declared with."""


def is_type(name: str) -> bool:
    """Whether `name` (without its dot) is a PTX type."""
    return name in TYPES
