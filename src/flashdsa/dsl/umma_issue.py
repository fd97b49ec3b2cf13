"""Issue of the instructions of a `UmmaProduct`: one thread, descriptors relative to an address."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.pipeline import Barriers
from flashdsa.dsl.umma import UmmaProduct

ADDRESS_BITS = (1 << 18) - 1
"""Address bits of shared memory in a descriptor (PTX ISA, "Shared memory descriptor")."""
LOW_BITS = (1 << 32) - 1
BOTH_CTAS = 0b11
"""Ranks in a cluster of two, a bit each."""


@cute.jit
def issue(
    product: cutlass.Constexpr[UmmaProduct],
    memory: cute.Pointer,
    tmem: Int32,
    clear: Any,
    a_offset: Any,
    b_offset: Any,
) -> None:
    """Issue the instructions of a product, by one thread; nothing is committed.

    Args:
        memory: base of the product's tiles in shared memory.
        tmem: base of its columns, a TMEM address.
        clear: whether the first instruction overwrites the accumulator.
        a_offset, b_offset: bytes from where the product has A and B in shared memory.
    """
    # The CTAs of a cluster have their rank above the 18 bits of an address that descriptors take.
    base = opaque((Int32(memory.toint()) & ADDRESS_BITS) >> 4)
    a_base, b_base = base + (Int32(a_offset) >> 4), base + (Int32(b_offset) >> 4)
    d = prims.make_tmem_ptr(tmem + product.column, Float32)
    kind = product.element.kind
    for index, (left, right) in enumerate(product.steps()):
        if cutlass.const_expr(product.a_in_tmem):
            a = prims.make_tmem_ptr(tmem + left, BFloat16)
        else:
            a = descriptor(a_base, left)
        b = descriptor(b_base, right)
        accumulate = Boolean(True)
        if cutlass.const_expr(index == 0):
            accumulate = Boolean(True) ^ Boolean(clear)
        if cutlass.const_expr(product.ws):
            prims.tcgen05_mma_ws(kind, d, a, b, product.instruction, accumulate)
        else:
            group = f"cta_{product.cta_group}"
            prims.tcgen05_mma(kind, group, d, a, b, product.instruction, accumulate)


def descriptor(base: Any, relative: int) -> Any:
    """A descriptor 16 * `base` bytes after one that is relative to address 0.

    No start address is beyond the 14 bits of its field, so nothing is carried out of it.
    """
    low = Int64(Uint32(base + Int32(relative & LOW_BITS)))
    high = relative >> 32 << 32
    return low | Int64(high - (1 << 64) if high >> 63 else high)


def commit(barriers: Barriers, stage: Any = 0) -> None:
    """Arrive when every MMA that this thread has issued so far is done; CTAs on their own."""
    prims.tcgen05_commit(barriers.at(stage).to_llvm_ptr(), group="cta_1")


def commit_to_pair(barriers: Barriers, stage: Any = 0) -> None:
    """Arrive at the barrier of either CTA of the pair when every MMA that this thread has issued so
    far is done."""
    prims.tcgen05_commit(barriers.at(stage).to_llvm_ptr(), multicast_mask=BOTH_CTAS, group="cta_2")
