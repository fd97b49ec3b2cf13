"""The instruction descriptor of tcgen05.mma: types, shape and options in 32 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ptxemu.descriptors.bits import put, take

PLAIN_KINDS = ("f16", "tf32", "f8f6f4", "i8")
BLOCK_SCALED_KINDS = ("mxf8f6f4", "mxf4", "mxf4nvf4")
KINDS = PLAIN_KINDS + BLOCK_SCALED_KINDS

_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_OPERAND_TYPES: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": _F8F6F4,
    "i8": {0: "u8", 1: "s8"},
    "mxf8f6f4": _F8F6F4,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
_RESULT_TYPES = {0: "f16", 1: "f32", 2: "s32"}
_RESULTS_OF_KIND = {"f16": ("f16", "f32"), "tf32": ("f32",), "f8f6f4": ("f16", "f32")}
_SCALE_TYPES = {0: "ue4m3", 1: "ue8m0"}
_MAXIMUM_SHIFTS = (0, 8, 16, 32)
_FLAGS = {"sparsity": 2, "negate_a": 13, "negate_b": 14, "transpose_a": 15, "transpose_b": 16}
_PLAIN_FLAGS = {**_FLAGS, "saturate": 3}
_SCALED_FLAGS = {**_FLAGS, "k_is_96": 31}
"""Bits of the fields that are true or false."""


def _flags_of(value: int, bits: dict[str, int]) -> dict[str, Any]:
    return {name: bool(take(value, bit, 1)) for name, bit in bits.items()}


def _bits_of(descriptor: object, bits: dict[str, int]) -> int:
    return sum(put(int(getattr(descriptor, name)), bit, 1, name) for name, bit in bits.items())


def _operand_type(kind: str, code: int, name: str) -> str:
    types = _OPERAND_TYPES[kind]
    if code not in types:
        known = ", ".join(f"{c} ({t})" for c, t in types.items())
        raise ValueError(f"{name} of .kind::{kind}: expected {known}; got {code}")
    return types[code]


def _operand_code(kind: str, type_: str, name: str) -> int:
    for code, known in _OPERAND_TYPES[kind].items():
        if known == type_:
            return code
    raise ValueError(f"{name}: .kind::{kind} has no type {type_}")


def _code(table: dict[int, str], value: str, name: str) -> int:
    for code, known in table.items():
        if known == value:
            return code
    raise ValueError(f"{name}: expected one of {', '.join(table.values())}; got {value}")


def _size(value: int, unit_bits: int, name: str) -> int:
    if value % (1 << unit_bits):
        raise ValueError(f"{name}: expected a multiple of {1 << unit_bits}; got {value}")
    return value >> unit_bits


@dataclass(frozen=True, slots=True)
class InstructionDescriptor:
    """Descriptor for .kind::f16, tf32, f8f6f4 and i8 (PTX ISA, "Instruction descriptor").

    Attributes:
        kind: f16, tf32, f8f6f4 or i8; not in the bits, but it gives them their meaning.
        m, n: the matrix shape.
        dtype, atype, btype: types of D, A and B: "f32", "bf16", "e4m3", "s8"...
        negate_a, negate_b: A or B is multiplied by -1.
        transpose_a, transpose_b: A or B is MN-major in shared memory.
        saturate: for i8, D is clamped instead of wrapped.
        sparsity, sparsity_selector: A is sparse, and which metadata.
        maximum_shift: of B's columns while .ws reuses B: 0, 8, 16 or 32.
    """

    kind: str
    m: int
    n: int
    dtype: str
    atype: str
    btype: str
    negate_a: bool = False
    negate_b: bool = False
    transpose_a: bool = False
    transpose_b: bool = False
    saturate: bool = False
    sparsity: bool = False
    sparsity_selector: int = 0
    maximum_shift: int = 0

    @classmethod
    def decode(cls, value: int, kind: str) -> InstructionDescriptor:
        """The fields of a 32-bit descriptor for `.kind::<kind>`.

        Raises:
            ValueError: a type that the kind does not have.
        """
        if kind not in PLAIN_KINDS:
            raise ValueError(f"kind: expected one of {', '.join(PLAIN_KINDS)}; got {kind}")
        dtype = _RESULT_TYPES.get(take(value, 4, 2), "reserved")
        allowed = _RESULTS_OF_KIND.get(kind, ("s32",))
        if dtype not in allowed:
            known = " or ".join(allowed)
            raise ValueError(f"dtype of .kind::{kind}: expected {known}; got {dtype}")
        return cls(
            kind,
            take(value, 24, 5) << 4,
            take(value, 17, 6) << 3,
            dtype,
            _operand_type(kind, take(value, 7, 3), "atype"),
            _operand_type(kind, take(value, 10, 3), "btype"),
            sparsity_selector=take(value, 0, 2),
            maximum_shift=_MAXIMUM_SHIFTS[take(value, 30, 2)],
            **_flags_of(value, _PLAIN_FLAGS),
        )

    def encode(self) -> int:
        """The 32-bit descriptor.

        Raises:
            ValueError: a field that the kind does not have, or that does not fit.
        """
        return (
            _bits_of(self, _PLAIN_FLAGS)
            | put(self.sparsity_selector, 0, 2, "sparsity_selector")
            | put(_code(_RESULT_TYPES, self.dtype, "dtype"), 4, 2, "dtype")
            | put(_operand_code(self.kind, self.atype, "atype"), 7, 3, "atype")
            | put(_operand_code(self.kind, self.btype, "btype"), 10, 3, "btype")
            | put(_size(self.n, 3, "n"), 17, 6, "n")
            | put(_size(self.m, 4, "m"), 24, 5, "m")
            | put(_MAXIMUM_SHIFTS.index(self.maximum_shift), 30, 2, "maximum_shift")
        )

    @property
    def k(self) -> int:
        """Columns of A that one dense instruction takes."""
        return {"f16": 16, "tf32": 8}.get(self.kind, 32)


@dataclass(frozen=True, slots=True)
class BlockScaledInstructionDescriptor:
    """Descriptor for .kind::mxf8f6f4, mxf4 and mxf4nvf4 (PTX ISA, "Instruction descriptor").

    Attributes:
        kind: mxf8f6f4, mxf4 or mxf4nvf4; not in the bits, but it gives them their meaning.
        m, n: the matrix shape.
        atype, btype: types of A and B: "e4m3", "e2m1"...
        scale_type: type of both scale matrices, "ue8m0" or "ue4m3".
        scale_factor_a_id, scale_factor_b_id: first byte of a TMEM word with the scale factors.
        negate_a, negate_b, transpose_a, transpose_b, sparsity: as in InstructionDescriptor.
        k_is_96: mxf4 kinds only: K is 96 instead of 64 (sm_103a).
    """

    kind: str
    m: int
    n: int
    atype: str
    btype: str
    scale_type: str
    scale_factor_a_id: int = 0
    scale_factor_b_id: int = 0
    negate_a: bool = False
    negate_b: bool = False
    transpose_a: bool = False
    transpose_b: bool = False
    sparsity: bool = False
    k_is_96: bool = False

    @classmethod
    def decode(cls, value: int, kind: str) -> BlockScaledInstructionDescriptor:
        """The fields of a 32-bit descriptor for `.kind::<kind>`.

        Raises:
            ValueError: a type that the kind does not have.
        """
        if kind not in BLOCK_SCALED_KINDS:
            raise ValueError(f"kind: expected one of {', '.join(BLOCK_SCALED_KINDS)}; got {kind}")
        b_bits = 3 if kind == "mxf8f6f4" else 2
        return cls(
            kind,
            take(value, 27, 2) << 7,
            take(value, 17, 6) << 3,
            _operand_type(kind, take(value, 7, 3), "atype"),
            _operand_type(kind, take(value, 10, b_bits), "btype"),
            _SCALE_TYPES[take(value, 23, 1)],
            take(value, 29, 2),
            take(value, 4, 2),
            **_flags_of(value, _SCALED_FLAGS),
        )

    def encode(self) -> int:
        """The 32-bit descriptor.

        Raises:
            ValueError: a field that the kind does not have, or that does not fit.
        """
        return (
            _bits_of(self, _SCALED_FLAGS)
            | put(self.scale_factor_b_id, 4, 2, "scale_factor_b_id")
            | put(_operand_code(self.kind, self.atype, "atype"), 7, 3, "atype")
            | put(_operand_code(self.kind, self.btype, "btype"), 10, 3, "btype")
            | put(_size(self.n, 3, "n"), 17, 6, "n")
            | put(_code(_SCALE_TYPES, self.scale_type, "scale_type"), 23, 1, "scale_type")
            | put(_size(self.m, 7, "m"), 27, 2, "m")
            | put(self.scale_factor_a_id, 29, 2, "scale_factor_a_id")
        )

    @property
    def dtype(self) -> str:
        """D is always f32."""
        return "f32"

    @property
    def k(self) -> int:
        """Columns of A that one dense instruction takes."""
        if self.kind == "mxf8f6f4":
            return 32
        return 96 if self.k_is_96 else 64


def decode_instruction(
    value: int, kind: str
) -> InstructionDescriptor | BlockScaledInstructionDescriptor:
    """The instruction descriptor of a tcgen05.mma of `.kind::<kind>`."""
    if kind in BLOCK_SCALED_KINDS:
        return BlockScaledInstructionDescriptor.decode(value, kind)
    return InstructionDescriptor.decode(value, kind)
