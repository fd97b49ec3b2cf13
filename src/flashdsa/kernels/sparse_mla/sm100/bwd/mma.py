"""Role mma: one thread issues every MMA of the CTA and says when operands and results are free.

Block b, in the order of issue:
    P(b+1) | dKV part 0 = S dO, + dS Q | dQ += dS K | dP(b+1) | dKV part 1 | owner: dKV part 2
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.static import Static
from flashdsa.kernels.operand_forms.sm100.plan import Product
from flashdsa.kernels.sparse_mla.sm100.bwd.context import Context, barrier_at, wait_for_mma
from flashdsa.kernels.sparse_mla.sm100.bwd.products import Products

ADDRESS_BITS = (1 << 18) - 1
"""Of shared memory, in a descriptor (PTX ISA, "Shared memory descriptor")."""
LOW_BITS = (1 << 32) - 1


class Issuer(NamedTuple):
    """Waits for operands and for read accumulators; commits to what the others wait for."""

    c: Context
    static: Static

    @property
    def products(self) -> Products:
        """Descriptors and columns, known when the kernel is compiled."""
        return self.static.value


@cute.jit
def issue(
    c: Context, product: cutlass.Constexpr[Product], clear: Any, a_offset: Any, b_offset: Any
) -> None:
    """The instructions of a product.

    Args:
        clear: whether the first instruction overwrites the accumulator.
        a_offset, b_offset: bytes from where the plan has A and B in shared memory.
    """
    # A cluster's CTAs have their rank above the 18 bits of an address that descriptors take.
    base = opaque((Int32(c.arena.toint()) & ADDRESS_BITS) >> 4)
    a_base, b_base = base + (Int32(a_offset) >> 4), base + (Int32(b_offset) >> 4)
    d = prims.make_tmem_ptr(c.tmem + product.column, Float32)
    for index, (left, right) in enumerate(product.steps()):
        if cutlass.const_expr(product.a_in_tmem):
            a = prims.make_tmem_ptr(c.tmem + left, BFloat16)
        else:
            a = descriptor(a_base, left)
        b = descriptor(b_base, right)
        accumulate = Boolean(True)
        if cutlass.const_expr(index == 0):
            accumulate = Boolean(True) ^ Boolean(clear)
        prims.tcgen05_mma("f16", "cta_1", d, a, b, product.instruction, accumulate)


def opaque(value: Any) -> Any:
    """The value, but new to the compiler, which would keep every descriptor of the loop in
    registers that the role does not have, and spill them."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


def descriptor(base: Any, relative: int) -> Any:
    """A descriptor `base` 16-byte units behind one that is relative to address 0.

    No start address is beyond the 14 bits of its field, so nothing is carried out of it.
    """
    low = Int64(Uint32(base + Int32(relative & LOW_BITS)))
    high = relative >> 32 << 32
    return low | Int64(high - (1 << 64) if high >> 63 else high)


def commit(barrier: Any) -> None:
    """Arrive at `barrier` when every MMA issued so far is done."""
    prims.tcgen05_commit(barrier.to_llvm_ptr(), group="cta_1")


@cute.jit
def issue_p(r: Issuer, block: Int32) -> None:
    """P(block), this CTA's dims of Q K^T."""
    c, plan = r.c, r.c.plan
    stage = block % plan.kv_stages
    wait_for_mma(barrier_at(c, "kv_full", stage), (block // plan.kv_stages) & 1)
    at = stage * plan.kv_bytes
    issue(c, r.products.p, True, 0, at)
    issue(c, r.products.p_rope, False, c.rank * (plan.own_rope_dims * 2), at)
    commit(barrier_at(c, "p_ready"))


@cute.jit
def issue_dp(r: Issuer, block: Int32) -> None:
    """dP(block), this CTA's dims of dO V^T."""
    c, plan = r.c, r.c.plan
    issue(c, r.products.dp, True, 0, (block % plan.kv_stages) * plan.kv_bytes)
    commit(barrier_at(c, "dp_ready"))


@cute.jit
def issue_block(r: Issuer, block: Int32) -> None:
    """Everything from P of the next block to dKV of this one."""
    c, plan = r.c, r.c.plan
    last = block + 1 == c.num_blocks
    owner = owns_rope(c.rank, block)
    parity = block & 1
    if not last:
        # p_free: the softmax has read P of this block.
        wait_for_mma(barrier_at(c, "p_free"), parity)
        issue_p(r, block + 1)
    wait_for_mma(barrier_at(c, "s_ready"), parity)
    # dkv_free: the last part of the block before has been read. Before the first: passes.
    if owns_rope(c.rank, block - 1) and block > 0:
        wait_for_mma(barrier_at(c, "dkv_free", 2), owned_parity(block - 1))
    else:
        wait_for_mma(barrier_at(c, "dkv_free", 1), (block - 1) & 1)
    of_s, of_ds = r.products.dkv[0]
    issue(c, of_s, True, 0, 0)
    wait_for_mma(barrier_at(c, "ds_ready"), parity)
    issue(c, of_ds, False, 0, 0)
    commit(barrier_at(c, "dkv_ready", 0))

    stage = block % plan.kv_stages
    at = stage * plan.kv_bytes
    issue(c, r.products.dq, block == 0, 0, at)
    issue(c, r.products.dq_rope, block == 0, 0, at)
    commit(barrier_at(c, "kv_free", stage))
    if not last:
        # dP overwrites the columns of dS: dQ, which reads them, must be done.
        wait_for_mma(barrier_at(c, "kv_free", stage), (block // plan.kv_stages) & 1)
        issue_dp(r, block + 1)

    wait_for_mma(barrier_at(c, "dkv_free", 0), parity)
    of_s, of_ds = r.products.dkv[1]
    issue(c, of_s, True, 0, 0)
    issue(c, of_ds, False, 0, 0)
    commit(barrier_at(c, "dkv_ready", 1))
    if owner:
        wait_for_mma(barrier_at(c, "dkv_free", 1), parity)
        issue(c, r.products.dkv[2][0], True, 0, 0)
        commit(barrier_at(c, "dkv_ready", 2))
    commit(barrier_at(c, "s_ds_free"))


def owns_rope(rank: Any, block: Any) -> Any:
    """Whether the CTA adds the block's RoPE dims of dKV: odd blocks CTA 0, even ones CTA 1."""
    return (block + rank) % 2 == 1


def owned_parity(block: Any) -> Any:
    """Parity of the phase of an owned block's part 2: the CTA owns every other block."""
    return (block >> 1) & 1


@cute.jit
def issue_all(r: Issuer) -> None:
    """One thread: every block of the query."""
    c = r.c
    wait_for_mma(barrier_at(c, "q_full"), 0)
    issue_p(r, Int32(0))
    wait_for_mma(barrier_at(c, "do_full"), 0)
    wait_for_mma(barrier_at(c, "do_stored"), 0)
    issue_dp(r, Int32(0))
    for block in cutlass.range(c.num_blocks, unroll=1):
        issue_block(r, block)
    commit(barrier_at(c, "dq_ready"))
