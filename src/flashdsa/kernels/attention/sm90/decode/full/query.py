"""Q of the kernels of whole steps, and scores of Q as it was given."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.fragments import THREAD_ROWS, row_of_thread
from flashdsa.kernels.attention.sm90.core.gather import load_query
from flashdsa.kernels.attention.sm90.core.tile import ROWS
from flashdsa.kernels.attention.sm90.decode.shared.context import Context
from flashdsa.kernels.attention.sm90.decode.shared.query import convert_query


@cute.jit
def load_item_query(ctx: Context, q_map: Any) -> None:
    """One thread: load the item's rows of Q; those past the last head become zeros.

    Nothing is loaded if the CTA has no slot. If none of its slots is valid nobody multiplies Q, but
    both consumers wait for it.
    """
    if ctx.num_steps > 0:
        ctx.memory.q_full.arrive_and_expect_tx()
        load_query(ctx, q_map, [ctx.head, ctx.query])


@cute.jit
def take_query(ctx: Context, consumer: cutlass.Constexpr) -> None:
    """Both consumers: wait until Q has come, in the form that the products take, if the CTA has
    slots."""
    if ctx.num_steps > 0:
        ctx.memory.q_full.wait(0)
        if cutlass.const_expr(ctx.plan.packed):
            convert_query(ctx, consumer, Int32(0))


def unscale(ctx: Context, s: Any) -> None:
    """Restore the scores of Q as it was given."""
    shared = ctx.memory.row_unit.array(Float32, ROWS)
    units = [shared[row_of_thread(ctx.thread) + 8 * h] for h in range(THREAD_ROWS)]
    for i in range(cute.size(s)):
        s[i] = s[i] * units[i // 2 % THREAD_ROWS]
