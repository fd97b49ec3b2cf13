"""Shapes, types and options that the ISA allows for a tcgen05.mma."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from ptxemu.descriptors import (
    BLOCK_SCALED_KINDS,
    BlockScaledInstructionDescriptor,
    InstructionDescriptor,
    Swizzle,
    decode_instruction,
)
from ptxemu.descriptors.matrix_layout import Major
from ptxemu.memory.tmem import LANES, DataPath, data_path
from ptxemu.numerics import dot

AnyInstructionDescriptor: TypeAlias = InstructionDescriptor | BlockScaledInstructionDescriptor
SHAPES = 'PTX ISA, "tcgen05.mma", "Matrix Shape", "Various combinations of .kind and shapes"'
TRANSPOSES = 'PTX ISA, "tcgen05.mma", "Transpose and Negate operations"'
SCALES = 'PTX ISA, "tcgen05.mma", "Valid combinations of scale_vectorsize with types and MMA-Kind"'
LAYOUTS = 'PTX ISA, "tcgen05.mma", "Data Path Layout Organization"'
SWIZZLES = 'PTX ISA, "tcgen05.mma", "Valid Combinations of Type-Size, Major-ness and Swizzling"'
_WS_COLUMNS = (64, 128, 256)


@dataclass(frozen=True, slots=True, eq=False)
class MmaForm:
    """Parts of a tcgen05.mma that are known at decode time.

    Attributes:
        scale_count: scale factors of a row for one instruction (.scale_vec::NX); 0 without them.
    """

    kind: str
    cta_group: int
    ws: bool = False
    scale_count: int = 0
    a_in_tmem: bool = False
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class MmaPlan:
    """A form with its instruction descriptor."""

    descriptor: AnyInstructionDescriptor
    path: DataPath

    @property
    def k(self) -> int:
        """Columns of A and rows of B, the zeros of a sparse A included."""
        return self.kept * 2 if self.descriptor.sparsity else self.kept

    @property
    def kept(self) -> int:
        """Columns of A that are stored."""
        return self.descriptor.k

    def packing(self, type_: str, *, in_tmem: bool) -> str:
        """Return the packing of elements (see `numerics.dot.numbers`); "natural" from 8 bits on."""
        if dot.BITS[type_] >= 8:
            return "natural"
        if self.descriptor.kind in ("mxf4", "mxf4nvf4"):
            return "nibbles"
        return "containers" if in_tmem else "padded"


@lru_cache(maxsize=256)
def mma_plan(form: MmaForm, instruction_descriptor: int) -> MmaPlan:
    """Decode and check an instruction descriptor.

    Raises:
        ValueError: the ISA has no such tcgen05.mma; names the limit and the section.
    """
    descriptor = decode_instruction(instruction_descriptor, form.kind)
    problem = (
        _unsupported(form, descriptor)
        or _shape_problem(form, descriptor)
        or _transpose_problem(form, descriptor)
        or _type_problem(form, descriptor)
    )
    if problem is not None:
        raise ValueError(problem)
    path = data_path(descriptor.m, form.cta_group, form.ws)
    if path is None:
        raise ValueError(f"M = {descriptor.m} has no data path ({LAYOUTS})")
    return MmaPlan(descriptor, path)


def _unsupported(form: MmaForm, descriptor: AnyInstructionDescriptor) -> str | None:
    if descriptor.sparsity != form.sparse:
        says, opcode = ("sparse", "has no .sp") if descriptor.sparsity else ("dense", "has .sp")
        return f"A is {says} by the instruction descriptor, but the opcode {opcode} ({SHAPES})"
    rows = descriptor.m // form.cta_group
    if form.sparse and not form.ws and rows != LANES:
        return f"ptxemu does not know the layout of sparsity metadata for {rows} rows a CTA"
    if isinstance(descriptor, BlockScaledInstructionDescriptor) and descriptor.k_is_96:
        return f"K = 96 needs sm_103a ({SHAPES})"
    return None


def _shape_problem(form: MmaForm, descriptor: AnyInstructionDescriptor) -> str | None:
    m, n, kind = descriptor.m, descriptor.n, form.kind
    scaled = kind in BLOCK_SCALED_KINDS
    if form.ws:
        if scaled:
            return f".ws has no .kind::{kind} ({SHAPES})"
        allowed_m: tuple[int, ...] = (32, 64, 128)
    elif form.cta_group == 2:
        allowed_m = (128, 256)
    else:
        allowed_m = (128,) if scaled else (64, 128)
    where = f".kind::{kind} with .cta_group::{form.cta_group}{' and .ws' if form.ws else ''}"
    if m not in allowed_m:
        return f"{where} has M = {' or '.join(map(str, allowed_m))}; got {m} ({SHAPES})"
    if form.ws:
        if n not in _WS_COLUMNS:
            return f"{where} has N = 64, 128 or 256; got {n} ({SHAPES})"
        return None
    step = 8 * form.cta_group
    if kind == "i8" and (form.cta_group == 2 or n > 32):
        step *= 2
    if n % step or not step <= n <= 256:
        return f"{where} has N from {step} to 256 in steps of {step}; got {n} ({SHAPES})"
    return None


def _transpose_problem(form: MmaForm, descriptor: AnyInstructionDescriptor) -> str | None:
    if form.a_in_tmem and descriptor.transpose_a:
        return f"A in TMEM cannot be transposed ({TRANSPOSES})"
    transposed = [descriptor.atype] if descriptor.transpose_a else []
    transposed += [descriptor.btype] if descriptor.transpose_b else []
    narrow = [t for t in transposed if dot.BITS[t] < 8]
    if narrow:
        return f".{narrow[0]} cannot be transposed ({SWIZZLES})"
    if descriptor.transpose_b and dot.BITS[descriptor.btype] == 8:
        step = 16 * form.cta_group
        if descriptor.n % step:
            return (
                f"a transposed 8-bit B has N in steps of {step}; got {descriptor.n} ({TRANSPOSES})"
            )
    if form.kind == "i8" and (descriptor.negate_a or descriptor.negate_b):
        return f".kind::i8 has no negation ({TRANSPOSES})"
    return None


def _type_problem(form: MmaForm, descriptor: AnyInstructionDescriptor) -> str | None:
    if isinstance(descriptor, InstructionDescriptor):
        halves = descriptor.atype == descriptor.btype == "f16"
        if form.kind == "f16" and descriptor.dtype == "f16" and not halves:
            return f"D of type f16 needs A and B of type f16 ({SHAPES})"
        return None
    count, scale_type = form.scale_count, descriptor.scale_type
    valid = {
        "mxf8f6f4": {(1, "ue8m0")},
        "mxf4": {(2, "ue8m0")},
        "mxf4nvf4": {(2, "ue8m0"), (4, "ue8m0"), (4, "ue4m3")},
    }
    if (count, scale_type) not in valid[form.kind]:
        return f".kind::{form.kind} has no .scale_vec::{count}X with {scale_type} ({SCALES})"
    for name, id_ in (("A", descriptor.scale_factor_a_id), ("B", descriptor.scale_factor_b_id)):
        if id_ % count or id_ + count > 4:
            return f"scale factor {name} ID {id_} with .scale_vec::{count}X ({SCALES})"
    return None


def major_of(transpose: bool, type_: str, swizzle: Swizzle) -> Major:
    """The major-ness of an operand in shared memory.

    Raises:
        ValueError: the ISA does not have it with this swizzle.
    """
    if not transpose:
        return Major.K
    if (swizzle is Swizzle.B128_ATOM_32B) != (type_ == "tf32"):
        raise ValueError(
            f"a transposed .{type_} matrix cannot have the swizzling mode {swizzle.name}: 128B "
            f"with 32B atomicity is for tf32, and tf32 for it ({SWIZZLES})"
        )
    return Major.MN
