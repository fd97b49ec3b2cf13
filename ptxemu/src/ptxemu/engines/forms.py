"""Products as their instructions and operands say them: wgmma and tcgen05.mma."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from ptxemu.descriptors import Tcgen05Descriptor
from ptxemu.descriptors.matrix_layout import Major
from ptxemu.engines.mma_plan import LAYOUTS, MmaForm, MmaPlan, major_of
from ptxemu.memory.tmem import Block, split_address

if TYPE_CHECKING:
    from ptxemu.engines.shared_matrix import Placed
    from ptxemu.engines.tcgen05 import AccumulatorKey

_PLAIN = ("bf16", "f16")


@dataclass(frozen=True, slots=True, eq=False)
class Accumulator:
    """The registers of a D: one object for equal ones."""

    slots: frozenset[int]


@cache
def _accumulator(d: tuple[int, ...]) -> Accumulator:
    return Accumulator(frozenset(d))


@dataclass(frozen=True, slots=True, eq=False)
class WgmmaForm:
    """Parts of a wgmma.mma_async that are known at decode time.

    Attributes:
        n, k: the shape; dtype, atype, btype: the types of D, A and B.
        d: slots of D's registers; a: slots of A's registers, () where A is in shared memory.
        negate_a, negate_b, a_major, b_major, saturate: modifiers and immediates.
        metadata: slot of the sparsity metadata's register, None where A is dense.
        givers: lanes of every four that give metadata: the first, and the one after the last.
    """

    n: int
    k: int
    dtype: str
    atype: str
    btype: str
    d: tuple[int, ...]
    a: tuple[int, ...]
    negate_a: bool = False
    negate_b: bool = False
    a_major: Major = Major.K
    b_major: Major = Major.K
    saturate: bool = False
    metadata: int | None = None
    givers: tuple[int, int] = (0, 4)
    accumulator: Accumulator = field(init=False)
    """That of `d`."""
    is_plain: bool = field(init=False)
    """A dense product of 16-bit floats, which machine code knows."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "accumulator", _accumulator(self.d))
        is_plain = self.dtype == "f32" and self.atype in _PLAIN and self.metadata is None
        object.__setattr__(self, "is_plain", is_plain)

    @property
    def kept(self) -> int:
        """Columns of A that are stored."""
        return self.k if self.metadata is None else self.k // 2

    @property
    def sources(self) -> tuple[int, ...]:
        """Slots of the registers that the product reads."""
        return self.a if self.metadata is None else (*self.a, self.metadata)


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A matrix in shared memory.

    Attributes:
        reading: arguments of `products.matrix_reader` after the memory: address of the chunks'
            numbers, lines, chunks of one.
        strides: arguments of it after the target: bytes between lines, chunks and elements.
    """

    type: str
    placed: Placed
    reading: tuple[int, int, int]
    strides: tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A product in the CTAs of a group.

    Attributes:
        a: A's rows of one CTA; None where they are in tensor memory, from `a_column` on.
        b: B's columns of one CTA; columns: how many.
        lane, column: D's first one; blocks: D's.
    """

    type_a: str
    a: Matrix | None
    a_column: int
    b: Matrix
    columns: int
    lane: int
    column: int
    blocks: tuple[Block, ...]
    accumulate: bool
    is_negated: bool


class MmaOperands(NamedTuple):
    """The values of a tcgen05.mma's operands in the thread that issues it.

    Attributes:
        d: TMEM address of D; a: of A, or a shared memory descriptor; b: a descriptor.
        instruction_descriptor: its 32 bits.
        accumulate: enable-input-d; scale_d: the power of two that D is divided by.
        disabled_lanes: disable-output-lane, 128 bits a CTA.
        scale_a, scale_b: TMEM addresses of scale factors.
        zero_mask: zero-column-mask-desc.
        metadata: TMEM address of the sparsity metadata.
    """

    d: int
    a: int
    b: int
    instruction_descriptor: int
    accumulate: bool
    scale_d: int = 0
    disabled_lanes: int = 0
    scale_a: int = 0
    scale_b: int = 0
    zero_mask: int = 0
    metadata: int = 0


class Decoded:
    """Decoded operands of a tcgen05.mma, the same whichever thread gives them.

    Attributes:
        lane, column: D's first ones; a: A's descriptor, None where it is in tensor memory, from
            `a_column` on; b: B's descriptor.
        shape: (m, n, k); key: D, for what is pipelined; tmem_operands: addresses of operands in
            tensor memory.
        code: the product for machine code; None where that does not know it.
        problems: what the ISA forbids in the descriptors, in words.
    """

    def __init__(self, form: MmaForm, operands: MmaOperands, plan: MmaPlan) -> None:
        self.form, self.operands, self.plan = form, operands, plan
        self.problems: list[str] = []
        descriptor = plan.descriptor
        self.lane, self.column = self._checked_lane(operands.d, "D")
        self.b = self._matrix_descriptor(operands.b)
        self.b_major = major_of(descriptor.transpose_b, descriptor.btype, self.b.swizzle)
        self.a: Tcgen05Descriptor | None = None
        self.a_major, self.a_column = Major.K, 0
        if form.a_in_tmem:
            a_lane, self.a_column = self._checked_lane(operands.a, "A")
            if a_lane != self.lane:
                raise ValueError(
                    f"A and D have the lane alignments {a_lane} and {self.lane} ({LAYOUTS})"
                )
        else:
            self.a = self._matrix_descriptor(operands.a)
            self.a_major = major_of(descriptor.transpose_a, descriptor.atype, self.a.swizzle)
        m, n = descriptor.m, descriptor.n
        self.shape = (m, n, plan.k)
        self.key: AccumulatorKey = (form.cta_group, form.kind, m, n, form.ws, operands.d)
        self.tmem_operands = [operands.a] if form.a_in_tmem else []
        if form.scale_count:
            self.tmem_operands += [operands.scale_a, operands.scale_b]
        if form.sparse:
            self.tmem_operands.append(operands.metadata)
        self.code: Product | None = None

    def _checked_lane(self, address: int, name: str) -> tuple[int, int]:
        lane, column = split_address(address)
        allowed = (0, 16) if self.plan.path.half_lanes else (0,)
        if lane not in allowed:
            raise ValueError(
                f"{name} at lane {lane}: layout {self.plan.path.value} needs a lane alignment of "
                f"{' or '.join(map(str, allowed))} ({LAYOUTS})"
            )
        return lane, column

    def _matrix_descriptor(self, value: int) -> Tcgen05Descriptor:
        descriptor = Tcgen05Descriptor.decode(value)
        for problem in descriptor.problems():
            self.problems.append(f"shared memory descriptor 0x{value:016x}: {problem}")
        return descriptor
