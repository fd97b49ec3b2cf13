"""Parts of few heads in the workspace, in the order of the consumers' registers.

A slot has a line of 16 bytes for each thread of both consumers, of eight of its values, for each
eight of them; then four fp32 a head, of which two are used: the part's maximum and sum.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.fragments import exp2
from flashdsa.dsl.gmem import load2, store2
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.softmax import LEAST
from flashdsa.kernels.attention.sm90.decode.few_heads.lanes import (
    first_head,
    head_of,
    offset_of_head,
)
from flashdsa.kernels.attention.sm90.decode.few_heads.math import Math
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import HEADS
from flashdsa.kernels.attention.sm90.decode.shared.context import Context
from flashdsa.kernels.attention.sm90.decode.shared.dealing import Parts
from flashdsa.kernels.attention.sm90.decode.shared.parts import (
    Workspace,
    add_values,
    slot_of_part,
    store_values,
)
from flashdsa.kernels.attention.sm90.decode.shared.plan import STATISTICS
from flashdsa.kernels.attention.sm90.decode.shared.words import as_float, bits_of


class Rows(NamedTuple):
    """A thread's values of O, and of its heads, in registers."""

    out: cute.Tensor  # 4 blocks of 64 dims, HEADS / 2 fp32 each: divided by the sums
    tops: cute.Tensor  # (HEADS / 4,) fp32: maxima
    totals: cute.Tensor  # (HEADS / 4,) fp32: sums against them


def at_statistics(slot: Any, ctx: Context, number: int) -> Any:
    """Pointer to the statistics of the lane's head of that number."""
    values = HEADS * ctx.plan.tile.d_v // 2
    head = first_head(ctx.thread % WARP_SIZE) + offset_of_head(number)
    return slot + (values + head * STATISTICS)


@cute.jit
def store_part(
    ctx: Context, rows: Rows, workspace: Workspace, parts: Parts, consumer: Int32
) -> None:
    """Store this CTA's part of an item: a consumer's half of O, and the heads' statistics."""
    cta, _, _ = cute.arch.block_idx()
    slot = slot_of_part(workspace, parts, cta - parts.first)
    thread = ctx.thread + consumer * WARPGROUP_SIZE
    store_values(slot, thread, cute.size(rows.out), lambda i: rows.out[i])
    if consumer == 0 and ctx.thread < 4:
        for number in cutlass.range_constexpr(cute.size(rows.tops)):
            top, total = rows.tops[number], rows.totals[number]
            store2(at_statistics(slot, ctx, number), bits_of(top), bits_of(total))


@cute.jit
def merge_parts(role: Math, rows: Rows, workspace: Workspace, parts: Parts) -> None:
    """Add up all parts of an item in their order, a consumer's half of O, against their largest
    maxima; divided by the sums.

    draw_ticket: every part is stored.
    """
    ctx, factor = role.ctx, role.output.scale.factor
    heads = cute.size(rows.tops)
    thread = ctx.thread + role.consumer * WARPGROUP_SIZE
    rows.tops.fill(LEAST)
    rows.totals.fill(0.0)
    for part in cutlass.range(parts.count, unroll=1):
        slot = slot_of_part(workspace, parts, part)
        for number in cutlass.range_constexpr(heads):
            top, _ = load2(at_statistics(slot, ctx, number))
            rows.tops[number] = cute.arch.fmax(rows.tops[number], as_float(top))
    rows.out.fill(0.0)
    for part in cutlass.range(parts.count, unroll=1):
        slot = slot_of_part(workspace, parts, part)
        weights = []
        for number in cutlass.range_constexpr(heads):
            top, total = load2(at_statistics(slot, ctx, number))
            weight = as_float(total) * exp2((as_float(top) - rows.tops[number]) * factor)
            rows.totals[number] = rows.totals[number] + weight
            weights.append(weight)
        every = [weights[head_of(i % (HEADS // 2))] for i in range(cute.size(rows.out))]
        add_values(slot, thread, rows.out, every)
    inverses = []
    for number in cutlass.range_constexpr(heads):
        total = rows.totals[number]
        inverses.append(cute.arch.rcp_approx(total) if total != 0.0 else Float32(0.0))
    for i in cutlass.range_constexpr(cute.size(rows.out)):
        rows.out[i] = rows.out[i] * inverses[head_of(i % (HEADS // 2))]
