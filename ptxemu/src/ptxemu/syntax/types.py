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
    signed: bool = False
    lanes: int = 1

    @property
    def size(self) -> int:
        """Bytes of storage: a predicate takes one, a sub-byte type is rounded up."""
        return (self.bits + 7) // 8


def _table() -> dict[str, PtxType]:
    types = [PtxType("pred", 1, "pred")]
    types += [PtxType(f"b{bits}", bits, "bits") for bits in (1, 4, 8, 16, 32, 64, 128)]
    for bits in (4, 8, 16, 32, 64):
        types += [PtxType(f"u{bits}", bits, "int"), PtxType(f"s{bits}", bits, "int", signed=True)]
    for lanes, bits in ((2, 16), (4, 8)):
        types += [
            PtxType(f"u{bits}x{lanes}", bits * lanes, "int", lanes=lanes),
            PtxType(f"s{bits}x{lanes}", bits * lanes, "int", signed=True, lanes=lanes),
        ]
    for bits in (16, 32, 64):
        types.append(PtxType(f"f{bits}", bits, "float", signed=True))
    for name, bits in (("bf16", 16), ("tf32", 32), ("e2m1", 4), ("e2m3", 6), ("e3m2", 6)):
        types.append(PtxType(name, bits, "float", signed=True))
    for name, bits in (("e4m3", 8), ("e5m2", 8)):
        types.append(PtxType(name, bits, "float", signed=True))
    for name in ("ue8m0", "ue4m3"):
        types.append(PtxType(name, 8, "float"))
    for name, bits in (("f16", 16), ("bf16", 16), ("f32", 32), ("e4m3", 8), ("e5m2", 8)):
        types.append(PtxType(f"{name}x2", bits * 2, "float", signed=True, lanes=2))
    # NOTE: a packed type pads a 6-bit float to a byte, and packs 4-bit floats tightly.
    for name, bits in (("e2m1x2", 8), ("e2m3x2", 16), ("e3m2x2", 16)):
        types.append(PtxType(name, bits, "float", signed=True, lanes=2))
    for name, bits in (("e2m1x4", 16), ("e2m3x4", 32), ("e3m2x4", 32)):
        types.append(PtxType(name, bits, "float", signed=True, lanes=4))
    for name in ("e4m3x4", "e5m2x4"):
        types.append(PtxType(name, 32, "float", signed=True, lanes=4))
    for name in ("ue8m0x2", "s2f6x2"):
        types.append(PtxType(name, 16, "float", lanes=2))
    return {t.name: t for t in types}


TYPES: dict[str, PtxType] = _table()
"""Every type name that may stand in a declaration or in an opcode."""

FUNDAMENTAL: frozenset[str] = frozenset(
    ["pred", "f16", "f16x2", "f32", "f64", "b8", "b16", "b32", "b64", "b128"]
    + [f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64)]
)
"""The types that a register, variable or parameter may be declared with."""


def is_type(name: str) -> bool:
    """Whether `name` (without its dot) is a PTX type."""
    return name in TYPES
