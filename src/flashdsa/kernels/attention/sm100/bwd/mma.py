"""Role mma: one thread issues every MMA of the CTA, a warp brings Q and dO of each item.

Block b, in the order of issue:
    P(b+1) | dKV part 0 = S dO, + dS Q | dQ += dS K | dP(b+1) | dKV part 1 | owner: dKV part 2
P(0) and dP(0) of the next item follow the last block of an item. Blocks have running numbers.

Q and dO of an item come as soon as the previous item no longer needs their bytes: dKV's part 0 is
the last to read the first half of their value dims, part 1 the other half, part 2 Q's RoPE dims. So
they come in two steps, while the present item's last parts go on.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl import pipeline, tma, tmem, umma_issue
from flashdsa.dsl.memory import Memory, Region
from flashdsa.dsl.static import Static
from flashdsa.dsl.umma import UmmaProduct
from flashdsa.kernels.attention.sm100.bwd.load import Context, Turn
from flashdsa.kernels.attention.sm100.bwd.plan import QUERY_STEPS
from flashdsa.kernels.attention.sm100.bwd.products import Products
from flashdsa.kernels.attention.sm100.core.tile import BF16, BOX_DIMS, PAIR_ROWS


class QueryLoader(NamedTuple):
    """Fills q, q_rope and do. Signals q_full and do_full."""

    ctx: Context
    q_map: Any  # (S * H, 576), boxes of H x 64
    do_map: Any  # (S * H, 512), likewise
    present: Any  # of a group (items,) int32: bit i: query i names any row; else None


class Operand(NamedTuple):
    """Q or dO, and where its rows go."""

    tensor_map: Any
    region: Region
    full: pipeline.Barriers


@cute.jit
def load_query(role: QueryLoader) -> None:
    """One thread: load Q's and dO's dims of this CTA, Q's before dO's."""
    ctx, plan = role.ctx, role.ctx.plan
    free, boxes = ctx.memory.query_free, plan.tile.boxes
    for step in cutlass.range_constexpr(QUERY_STEPS):
        # query_free of the item before: the MMAs that read this half of Q and dO are done, and
        # reduce had copied dO before. The wait passes for the first item.
        free.wait_round(ctx.turn.items_before - 1, step)
        own = range(step * boxes // QUERY_STEPS, (step + 1) * boxes // QUERY_STEPS)
        q = Operand(role.q_map, ctx.memory.q, ctx.memory.q_full)
        load_boxes(role, q, own, step == 0, step == QUERY_STEPS - 1)
        do = Operand(role.do_map, ctx.memory.do, ctx.memory.do_full)
        load_boxes(role, do, own, step == 0, False)


@cute.jit
def load_boxes(
    role: QueryLoader,
    operand: Operand,
    own: cutlass.Constexpr[range],
    is_first: cutlass.Constexpr[bool],
    rope: cutlass.Constexpr[bool],
) -> None:
    """Load boxes of every query's rows of Q or dO; the first ones announce the bytes of all."""
    if cutlass.const_expr(is_first):
        operand.full.arrive_and_expect_tx()
    for query in cutlass.range(role.ctx.plan.group, unroll=1):
        load_rows(role, operand, query, own, rope)


@cute.jit
def load_rows(
    role: QueryLoader,
    operand: Operand,
    query: Int32,
    boxes: cutlass.Constexpr[range],
    rope: cutlass.Constexpr[bool],
) -> None:
    """Load a query's rows of Q or dO: boxes of 64 value dims, and the RoPE dims if asked for. A
    query of a group that names no row shares dKV's sums with others, and its Q and dO, NaN too,
    times S = 0 would be added: it is read from coordinates outside of the tensor, which gives
    zeros. So are queries past the last one."""
    ctx, plan = role.ctx, role.ctx.plan
    row = ctx.item * PAIR_ROWS + query * plan.group_heads
    if cutlass.const_expr(plan.group > 1):
        if (role.present[ctx.item] >> query) & 1 == 0:
            row = Int32(-PAIR_ROWS)
    first, barrier = query * (plan.group_heads * BOX_DIMS * BF16), operand.full.at()
    for box in cutlass.range_constexpr(boxes.start, boxes.stop):
        at = operand.region.bytes() + (first + box * (PAIR_ROWS * BOX_DIMS * BF16))
        dim = ctx.cta_rank * plan.tile.dims + box * BOX_DIMS
        tma.load_box(at, operand.tensor_map, [dim, row], barrier)
    if cutlass.const_expr(rope):
        at = ctx.memory.q_rope.bytes() + first
        tma.load_box(at, operand.tensor_map, [Int32(plan.tile.d_v), row], barrier)


def wait_until_read(memory: Memory, turn: Turn) -> None:
    """Wait, before the CTA ends, for the last commit of its MMAs; `turn` is the one after it."""
    memory.query_free.wait_round(turn.items_before - 1, QUERY_STEPS - 1)


class Issuer(NamedTuple):
    """Waits for operands and for accumulators that were read; commits to other roles' barriers."""

    ctx: Context
    static: Static

    @property
    def products(self) -> Products:
        return self.static.value

    @property
    def keys(self) -> pipeline.RingConsumer:
        """The key blocks: the use of the ring is the block's running number."""
        return pipeline.RingConsumer(self.ctx.memory.kv_full, self.ctx.memory.kv_free)

    def keys_offset(self, number: Any) -> Any:
        """Bytes from stage 0 of the keys to the block's."""
        return self.keys.state(number).stage * self.ctx.plan.tile.bytes


@cute.jit
def issue_product(
    ctx: Context, product: cutlass.Constexpr[UmmaProduct], clear: Any, a_offset: Any, b_offset: Any
) -> None:
    """Issue a product's instructions; `clear`, `a_offset` and `b_offset` as in `issue`."""
    umma_issue.issue(product, ctx.memory.base, ctx.tmem, clear, a_offset, b_offset)


@cute.jit
def issue_p(role: Issuer, number: Int32) -> None:
    """Issue P of a block, this CTA's dims of Q K^T."""
    ctx, plan = role.ctx, role.ctx.plan
    # kv_full: the gather has filled the block's stage; it stays until kv_free, committed after dQ.
    tmem.wait_then_tcgen05(role.keys.full, number)
    at = role.keys_offset(number)
    issue_product(ctx, role.products.p, True, 0, at)
    rope_offset = ctx.cta_rank * (plan.tile.own_rope_dims * BF16)
    issue_product(ctx, role.products.p_rope, False, rope_offset, at)
    umma_issue.commit(ctx.memory.p_ready)


@cute.jit
def issue_dp(role: Issuer, number: Int32) -> None:
    """Issue dP of a block, this CTA's dims of dO V^T."""
    issue_product(role.ctx, role.products.dp, True, 0, role.keys_offset(number))
    umma_issue.commit(role.ctx.memory.dp_ready)


@cute.jit
def issue_block(role: Issuer, block: Int32) -> None:
    """Issue everything from P of the item's next block to dKV of this one."""
    ctx, number = role.ctx, role.ctx.number(block)
    ready, free = ctx.memory.dkv_ready, ctx.memory.dkv_free
    last = block + 1 == ctx.num_blocks
    owner = owns_rope(ctx.cta_rank, number)
    if not last:
        # p_free of this block: the softmax has read P, whose columns the next block's overwrites.
        tmem.wait_then_tcgen05(ctx.memory.p_free, number)
        issue_p(role, number + 1)
    # s_ready of this block: S is in shared memory, visible to the async proxy, until s_ds_free.
    tmem.wait_then_tcgen05(ctx.memory.s_ready, number)
    # dkv_free of the block before's last part: the reduce role has read it, so part 0 may overwrite
    # the columns. The wait passes for the first block.
    if owns_rope(ctx.cta_rank, number - 1) and number > 0:
        tmem.wait_then_tcgen05(free, owned_before(number - 1), 2)
    else:
        tmem.wait_then_tcgen05(free, number - 1, 1)
    of_s, of_ds = role.products.dkv[0]
    issue_product(ctx, of_s, True, 0, 0)
    # ds_ready of this block: dS is in shared memory until s_ds_free, and in TMEM, where dP was,
    # until dQ has read it.
    tmem.wait_then_tcgen05(ctx.memory.ds_ready, number)
    issue_product(ctx, of_ds, False, 0, 0)
    umma_issue.commit(ready, 0)
    if last:
        umma_issue.commit(ctx.memory.query_free, 0)

    # The softmax had read the previous dQ, whose columns this one overwrites, when it came to dS of
    # this item.
    at = role.keys_offset(number)
    issue_product(ctx, role.products.dq, block == 0, 0, at)
    issue_product(ctx, role.products.dq_rope, block == 0, 0, at)
    umma_issue.commit(role.keys.empty, role.keys.state(number).stage)
    if last:
        umma_issue.commit(ctx.memory.dq_ready)
    else:
        # kv_free of this block, its own commit: dQ has read dS, whose columns the next block's dP
        # overwrites.
        tmem.wait_then_tcgen05(role.keys.empty, number)
        issue_dp(role, number + 1)

    # dkv_free of part 0: the reduce role has read the columns that part 1 overwrites.
    tmem.wait_then_tcgen05(free, number, 0)
    of_s, of_ds = role.products.dkv[1]
    issue_product(ctx, of_s, True, 0, 0)
    issue_product(ctx, of_ds, False, 0, 0)
    umma_issue.commit(ready, 1)
    if owner:
        # dkv_free of part 1: likewise for part 2.
        tmem.wait_then_tcgen05(free, number, 1)
        issue_product(ctx, role.products.dkv[2][0], True, 0, 0)
        umma_issue.commit(ready, 2)
    umma_issue.commit(ctx.memory.s_ds_free)
    if last:
        umma_issue.commit(ctx.memory.query_free, 1)


def owns_rope(cta_rank: Any, number: Any) -> Any:
    """Whether the CTA adds a block's RoPE dims of dKV: odd numbers CTA 0, even ones CTA 1."""
    return (number + cta_rank) % 2 == 1


def owned_before(number: Any) -> Any:
    """Number of blocks that the CTA has owned before this one of its own: every other one."""
    return number >> 1


@cute.jit
def issue_item(role: Issuer) -> None:
    """One thread: issue every block of an item."""
    ctx, first = role.ctx, role.ctx.number(0)
    before = ctx.turn.items_before
    # q_full of this item: TMA has brought Q, which stays until query_free. It came after all MMAs
    # of the item before: P's columns, read before S was ready, and dP's may be overwritten.
    tmem.wait_then_tcgen05(ctx.memory.q_full, before)
    issue_p(role, first)
    # do_full and do_stored of this item: dO is in shared memory for dKV, until query_free, and in
    # TMEM for dP.
    tmem.wait_then_tcgen05(ctx.memory.do_full, before)
    tmem.wait_then_tcgen05(ctx.memory.do_stored, before)
    issue_dp(role, first)
    for block in cutlass.range(ctx.num_blocks, unroll=1):
        issue_block(role, block)
