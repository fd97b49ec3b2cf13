"""The start of role softmax: Q from shared memory to tensor memory, where Q K^T reads it."""

import cutlass
from cutlass import Int32, Vector, cute

from flashdsa.dsl import tmem
from flashdsa.dsl.smem import VECTOR, load_words
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm100.fwd.context import LEADER, Context
from flashdsa.kernels.attention.sm100.fwd.plan import (
    BF16,
    BOX_BYTES,
    BOX_DIMS,
    Q_BOXES,
    ROPE_DIMS,
    ROWS,
    VALUE_BOXES,
)

UNIT_DIMS = 8
"""bf16 of 16 bytes."""


@cute.jit
def arrive_at_leader(ctx: Context, name: cutlass.Constexpr[str]) -> None:
    """All lanes of a warp: finish their accesses to tensor memory; one of them arrives at the
    barrier of the pair's first CTA."""
    tmem.before_sync()
    cute.arch.sync_warp()
    if ctx.thread % WARP_SIZE == 0:
        ctx.barriers(name).arrive_at_peer_for_tmem(LEADER)


@cute.jit
def store_units(
    ctx: Context,
    box: Int32,
    first_unit: Int32,
    dims: cutlass.Constexpr[int],
    column: cutlass.Constexpr[int],
) -> None:
    """Store `dims` dims of this thread's row of Q, from `first_unit` of a box on, to a column of
    its lane."""
    at = ctx.arena.address("kv") + box * BOX_BYTES
    words = []
    for unit in cutlass.range_constexpr(dims // UNIT_DIMS):
        got = load_words(at + swizzled_128(ctx.thread % ROWS, first_unit + unit), Int32)
        words += [got[i] for i in range(VECTOR)]
    tmem.store_lane(ctx.tmem, column, ctx.thread, Vector.from_elements(words, Int32))


@cute.jit
def store_query(ctx: Context) -> None:
    """Store a row of Q (thread = lane), the dims of the first CTA in lanes 0 to 63, else the
    second's."""
    half = ctx.thread // ROWS
    # q_full, its only time: TMA has brought Q, whose bytes the keys overwrite after q_read.
    ctx.barriers("q_full").wait_round(0)
    columns = ctx.plan.tmem
    for box in cutlass.range_constexpr(VALUE_BOXES):
        column = columns.column("q") + box * (BOX_DIMS * BF16 // 4)
        store_units(ctx, half * VALUE_BOXES + box, Int32(0), BOX_DIMS, column)
    rope_unit = half * (ROPE_DIMS // UNIT_DIMS)
    store_units(ctx, Int32(Q_BOXES - 1), rope_unit, ROPE_DIMS, columns.column("q_rope"))
    # generic reads above -> the gather writes through the async proxy
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    if ctx.thread % WARP_SIZE == 0:
        # Every lane of the warp has read its row.
        ctx.barriers("q_read").arrive()
    tmem.wait_stored()
    arrive_at_leader(ctx, "q_stored")
