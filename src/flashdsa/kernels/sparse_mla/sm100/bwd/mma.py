"""Role mma: one thread issues every MMA of the CTA and says when operands and results are free.

Block b, in the order of issue:
    P(b+1) | dKV part 0 = S dO, + dS Q | dQ += dS K | dP(b+1) | dKV part 1 | owner: dKV part 2
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.static import Static
from flashdsa.dsl.umma import UmmaProduct
from flashdsa.dsl.umma_issue import commit, issue
from flashdsa.kernels.sparse_mla.sm100.bwd.context import Context, barrier_at, wait_for_mma
from flashdsa.kernels.sparse_mla.sm100.bwd.products import Products


class Issuer(NamedTuple):
    """Waits for operands and for read accumulators; commits to what the others wait for."""

    c: Context
    static: Static

    @property
    def products(self) -> Products:
        """Descriptors and columns, known when the kernel is compiled."""
        return self.static.value


@cute.jit
def issue_product(
    c: Context, product: cutlass.Constexpr[UmmaProduct], clear: Any, a_offset: Any, b_offset: Any
) -> None:
    """A product's instructions; `clear`, `a_offset` and `b_offset` as in `issue`."""
    issue(product, c.arena, c.tmem, clear, a_offset, b_offset)


@cute.jit
def issue_p(r: Issuer, block: Int32) -> None:
    """P(block), this CTA's dims of Q K^T."""
    c, plan = r.c, r.c.plan
    stage = block % plan.kv_stages
    wait_for_mma(barrier_at(c, "kv_full", stage), (block // plan.kv_stages) & 1)
    at = stage * plan.kv_bytes
    issue_product(c, r.products.p, True, 0, at)
    issue_product(c, r.products.p_rope, False, c.rank * (plan.own_rope_dims * 2), at)
    commit(barrier_at(c, "p_ready"))


@cute.jit
def issue_dp(r: Issuer, block: Int32) -> None:
    """dP(block), this CTA's dims of dO V^T."""
    c, plan = r.c, r.c.plan
    issue_product(c, r.products.dp, True, 0, (block % plan.kv_stages) * plan.kv_bytes)
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
    issue_product(c, of_s, True, 0, 0)
    wait_for_mma(barrier_at(c, "ds_ready"), parity)
    issue_product(c, of_ds, False, 0, 0)
    commit(barrier_at(c, "dkv_ready", 0))

    stage = block % plan.kv_stages
    at = stage * plan.kv_bytes
    issue_product(c, r.products.dq, block == 0, 0, at)
    issue_product(c, r.products.dq_rope, block == 0, 0, at)
    commit(barrier_at(c, "kv_free", stage))
    if not last:
        # dP overwrites the columns of dS: dQ, which reads them, must be done.
        wait_for_mma(barrier_at(c, "kv_free", stage), (block // plan.kv_stages) & 1)
        issue_dp(r, block + 1)

    wait_for_mma(barrier_at(c, "dkv_free", 0), parity)
    of_s, of_ds = r.products.dkv[1]
    issue_product(c, of_s, True, 0, 0)
    issue_product(c, of_ds, False, 0, 0)
    commit(barrier_at(c, "dkv_ready", 1))
    if owner:
        wait_for_mma(barrier_at(c, "dkv_free", 1), parity)
        issue_product(c, r.products.dkv[2][0], True, 0, 0)
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
