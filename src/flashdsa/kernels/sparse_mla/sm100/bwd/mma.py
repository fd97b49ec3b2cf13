"""Role mma: one thread issues every MMA of the CTA and says when operands and results are free.

Block b, in the order of issue:
    P(b+1) | dKV part 0 = S dO, + dS Q | dQ += dS K | dP(b+1) | dKV part 1 | owner: dKV part 2
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.pipeline import RingConsumer
from flashdsa.dsl.static import Static
from flashdsa.dsl.tmem import wait_then_tcgen05
from flashdsa.dsl.umma import UmmaProduct
from flashdsa.dsl.umma_issue import commit, issue
from flashdsa.kernels.sparse_mla.sm100.bwd.context import Context
from flashdsa.kernels.sparse_mla.sm100.bwd.products import Products


class Issuer(NamedTuple):
    """Waits for operands and for read accumulators; commits to what the others wait for."""

    ctx: Context
    static: Static

    @property
    def products(self) -> Products:
        """Descriptors and columns, known when the kernel is compiled."""
        return self.static.value

    @property
    def keys(self) -> RingConsumer:
        """The key blocks: use b of the ring is block b."""
        return self.ctx.arena.consumer("kv_full", "kv_free")

    def keys_offset(self, block: Any) -> Any:
        """Bytes from stage 0 of the keys to the block's."""
        return self.keys.state(block).stage * self.ctx.plan.kv_bytes


@cute.jit
def issue_product(
    ctx: Context, product: cutlass.Constexpr[UmmaProduct], clear: Any, a_offset: Any, b_offset: Any
) -> None:
    """A product's instructions; `clear`, `a_offset` and `b_offset` as in `issue`."""
    issue(product, ctx.arena.base, ctx.tmem, clear, a_offset, b_offset)


@cute.jit
def issue_p(role: Issuer, block: Int32) -> None:
    """P(block), this CTA's dims of Q K^T."""
    ctx, plan = role.ctx, role.ctx.plan
    # kv_full: the gather has filled the block's stage; it stays until kv_free, committed behind dQ.
    wait_then_tcgen05(role.keys.full, block)
    at = role.keys_offset(block)
    issue_product(ctx, role.products.p, True, 0, at)
    rope_offset = ctx.cta_rank * (plan.own_rope_dims * 2)
    issue_product(ctx, role.products.p_rope, False, rope_offset, at)
    commit(ctx.barriers("p_ready"))


@cute.jit
def issue_dp(role: Issuer, block: Int32) -> None:
    """dP(block), this CTA's dims of dO V^T."""
    issue_product(role.ctx, role.products.dp, True, 0, role.keys_offset(block))
    commit(role.ctx.barriers("dp_ready"))


@cute.jit
def issue_block(role: Issuer, block: Int32) -> None:
    """Everything from P of the next block to dKV of this one."""
    ctx = role.ctx
    ready, free = ctx.barriers("dkv_ready"), ctx.barriers("dkv_free")
    last = block + 1 == ctx.num_blocks
    owner = owns_rope(ctx.cta_rank, block)
    if not last:
        # p_free, time b: the softmax has read P(b), whose columns P(b+1) overwrites.
        wait_then_tcgen05(ctx.barriers("p_free"), block)
        issue_p(role, block + 1)
    # s_ready, time b: S(b) is in shared memory, visible to the async proxy, until s_ds_free.
    wait_then_tcgen05(ctx.barriers("s_ready"), block)
    # dkv_free of the block before's last part: the reduce role has read it, so part 0 may overwrite
    # the columns. Before the first block the wait passes.
    if owns_rope(ctx.cta_rank, block - 1) and block > 0:
        wait_then_tcgen05(free, owned_before(block - 1), 2)
    else:
        wait_then_tcgen05(free, block - 1, 1)
    of_s, of_ds = role.products.dkv[0]
    issue_product(ctx, of_s, True, 0, 0)
    # ds_ready, time b: dS(b) is in shared memory until s_ds_free, and in TMEM, where dP(b) was,
    # until dQ has read it.
    wait_then_tcgen05(ctx.barriers("ds_ready"), block)
    issue_product(ctx, of_ds, False, 0, 0)
    commit(ready, 0)

    at = role.keys_offset(block)
    issue_product(ctx, role.products.dq, block == 0, 0, at)
    issue_product(ctx, role.products.dq_rope, block == 0, 0, at)
    commit(role.keys.empty, role.keys.state(block).stage)
    if not last:
        # kv_free of this block, its own commit: dQ has read dS, whose columns dP(b+1) overwrites.
        wait_then_tcgen05(role.keys.empty, block)
        issue_dp(role, block + 1)

    # dkv_free of part 0, time b: the reduce role has read the columns that part 1 overwrites.
    wait_then_tcgen05(free, block, 0)
    of_s, of_ds = role.products.dkv[1]
    issue_product(ctx, of_s, True, 0, 0)
    issue_product(ctx, of_ds, False, 0, 0)
    commit(ready, 1)
    if owner:
        # dkv_free of part 1, time b: likewise for part 2.
        wait_then_tcgen05(free, block, 1)
        issue_product(ctx, role.products.dkv[2][0], True, 0, 0)
        commit(ready, 2)
    commit(ctx.barriers("s_ds_free"))


def owns_rope(cta_rank: Any, block: Any) -> Any:
    """Whether the CTA adds the block's RoPE dims of dKV: odd blocks CTA 0, even ones CTA 1."""
    return (block + cta_rank) % 2 == 1


def owned_before(block: Any) -> Any:
    """How many blocks before this one of its own the CTA has owned: every other one."""
    return block >> 1


@cute.jit
def issue_all(role: Issuer) -> None:
    """One thread: every block of the query."""
    ctx = role.ctx
    # q_full, its only time: TMA has brought Q, which stays until dQ overwrites it.
    wait_then_tcgen05(ctx.barriers("q_full"), 0)
    issue_p(role, Int32(0))
    # do_full and do_stored, their only times: dO is in shared memory for dKV, in TMEM for dP.
    wait_then_tcgen05(ctx.barriers("do_full"), 0)
    wait_then_tcgen05(ctx.barriers("do_stored"), 0)
    issue_dp(role, Int32(0))
    for block in cutlass.range(ctx.num_blocks, unroll=1):
        issue_block(role, block)
    commit(ctx.barriers("dq_ready"))
