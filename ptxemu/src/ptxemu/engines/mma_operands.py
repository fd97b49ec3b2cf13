"""The operands of a tcgen05.mma: their values in a thread, and what these say."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ptxemu.descriptors import Tcgen05Descriptor
from ptxemu.descriptors.matrix_layout import Major
from ptxemu.engines import tcgen05_code
from ptxemu.engines.mma_plan import LAYOUTS, MmaForm, MmaPlan, major_of, mma_plan
from ptxemu.engines.tcgen05 import AccumulatorKey
from ptxemu.memory.tmem import split_address


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


@lru_cache(maxsize=4096)
def decoded(form: MmaForm, operands: MmaOperands) -> Decoded:
    """What a form and its operands say.

    Raises:
        ValueError: a descriptor or an address that the ISA does not allow.
    """
    return Decoded(form, operands, mma_plan(form, operands.instruction_descriptor))


class Decoded:
    """What the operands say, whichever thread gives them.

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
        self.code = tcgen05_code.product(self)

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
