"""A warp of role mma: Q and dO of each item, as soon as the previous item no longer needs their
bytes.

dKV's part 0 is the last to read the first half of their value dims, part 1 the other half, part 2
Q's RoPE dims; so the next item's come in two steps, while the present item's last parts go on.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.arena import Arena
from flashdsa.dsl.tma import load_box
from flashdsa.kernels.attention.sm100.bwd.context import Context, Turn
from flashdsa.kernels.attention.sm100.bwd.plan import B_H, BOX_DIMS, D_V, QUERY_STEPS


class QueryLoader(NamedTuple):
    """Fills q, q_rope and do. Signals q_full and do_full."""

    ctx: Context
    q_map: Any  # (S * H, 576), boxes of H x 64
    do_map: Any  # (S * H, 512), likewise
    present: Any  # of a group (items,) int32: bit i: query i names any row; else None


@cute.jit
def load_query(role: QueryLoader) -> None:
    """One thread: load Q's and dO's dims of this CTA, Q's before dO's."""
    ctx, plan = role.ctx, role.ctx.plan
    free, boxes = ctx.barriers("query_free"), plan.dims // BOX_DIMS
    for step in cutlass.range_constexpr(QUERY_STEPS):
        # query_free of the item before: the MMAs that read this half of Q and dO are done, and
        # reduce had copied dO before. The wait passes for the first item.
        free.wait_round(ctx.turn.items_before - 1, step)
        for name, tensor_map in (("q", role.q_map), ("do", role.do_map)):
            full = ctx.barriers(f"{name}_full")
            if cutlass.const_expr(step == 0):
                full.arrive_and_expect_tx()
            own = range(step * boxes // QUERY_STEPS, (step + 1) * boxes // QUERY_STEPS)
            rope = name == "q" and step == QUERY_STEPS - 1
            for query in cutlass.range(plan.group, unroll=1):
                load_rows(role, name, tensor_map, query, own, rope)


@cute.jit
def load_rows(
    role: QueryLoader,
    name: cutlass.Constexpr[str],
    tensor_map: Any,
    query: Int32,
    boxes: cutlass.Constexpr[range],
    rope: cutlass.Constexpr[bool],
) -> None:
    """Load a query's rows of Q or dO: boxes of 64 value dims, and the RoPE dims if asked for.

    A query of a group that names no row shares dKV's sums with others, and its Q and dO, NaN too,
    times S = 0 would be added: it is read from coordinates outside of the tensor, which gives
    zeros. So are queries past the last one.
    """
    ctx, plan = role.ctx, role.ctx.plan
    row = ctx.item * B_H + query * plan.group_heads
    if cutlass.const_expr(plan.group > 1):
        if (role.present[ctx.item] >> query) & 1 == 0:
            row = Int32(-B_H)
    first, barrier = query * (plan.group_heads * BOX_DIMS * 2), ctx.barriers(f"{name}_full").at()
    for box in cutlass.range_constexpr(boxes.start, boxes.stop):
        at = ctx.arena.bytes(name) + (first + box * (B_H * BOX_DIMS * 2))
        load_box(at, tensor_map, [ctx.cta_rank * plan.dims + box * BOX_DIMS, row], barrier)
    if cutlass.const_expr(rope):
        load_box(ctx.arena.bytes("q_rope") + first, tensor_map, [Int32(D_V), row], barrier)


def wait_until_read(arena: Arena, turn: Turn) -> None:
    """Wait, before the CTA ends, until the last commit of its MMAs has arrived; `turn` is the one
    after it."""
    arena.barriers("query_free").wait_round(turn.items_before - 1, QUERY_STEPS - 1)
