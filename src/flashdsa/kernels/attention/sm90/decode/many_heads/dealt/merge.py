"""Parts of 64 heads in the workspace, in the order of the consumers' registers.

A slot has a line of 16 bytes for each thread of both consumers, of eight of its values, for each
eight of them; then two fp32 a head: the part's maximum, in log2, and sum.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.fragments import exp2
from flashdsa.dsl.gmem import store2
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.results import ask_sink, factor_and_lse
from flashdsa.kernels.attention.sm90.core.softmax import LEAST
from flashdsa.kernels.attention.sm90.core.tile import ROWS
from flashdsa.kernels.attention.sm90.decode.key_rows.dealt import Math
from flashdsa.kernels.attention.sm90.decode.key_rows.lanes import (
    first_head,
    head_of,
    offset_of_head,
)
from flashdsa.kernels.attention.sm90.decode.many_heads.products import COUNT
from flashdsa.kernels.attention.sm90.decode.many_heads.softmax import LANE_HEADS
from flashdsa.kernels.attention.sm90.decode.shared.combine import first_row
from flashdsa.kernels.attention.sm90.decode.shared.context import Context
from flashdsa.kernels.attention.sm90.decode.shared.dealing import Parts
from flashdsa.kernels.attention.sm90.decode.shared.exchange import rows_of_item
from flashdsa.kernels.attention.sm90.decode.shared.parts import (
    Workspace,
    add_values,
    load_values,
    slot_of_part,
    store_values,
)
from flashdsa.kernels.attention.sm90.decode.shared.words import as_float, bits_of


def statistics_of(slot: Any, ctx: Context, head: Any) -> Any:
    """Pointer to the statistics of a head."""
    return slot + (ROWS * ctx.plan.tile.d_v // 2 + head * 2)


def own_slot(workspace: Workspace, parts: Parts) -> Any:
    """Pointer to the words of this CTA's part."""
    cta, _, _ = cute.arch.block_idx()
    return slot_of_part(workspace, parts, cta - parts.first)


@cute.jit
def store_statistics(
    ctx: Context, workspace: Workspace, parts: Parts, top: Float32, total: Float32
) -> None:
    """A thread a head: store what the merge must know."""
    store2(statistics_of(own_slot(workspace, parts), ctx, ctx.thread), bits_of(top), bits_of(total))


@cute.jit
def store_part(
    role: Math, out: cute.Tensor, factors: cute.Tensor, workspace: Workspace, parts: Parts
) -> None:
    """Store a consumer's half of O of this CTA's part, divided by the sums."""
    slot = own_slot(workspace, parts)
    thread = role.ctx.thread + role.consumer * WARPGROUP_SIZE
    store_values(slot, thread, cute.size(out), lambda i: out[i] * factors[head_of(i % COUNT)])


@cute.jit
def merge_parts(
    role: Math, out: cute.Tensor, factors: cute.Tensor, workspace: Workspace, parts: Parts
) -> None:
    """Add up all parts of an item in their order, a consumer's half of O, against their largest
    maxima; make `factors` those of the sums, and write lse.

    draw_ticket: every part is stored.
    """
    ctx, w = role.ctx, role.output
    lane = ctx.thread % WARP_SIZE
    thread = ctx.thread + role.consumer * WARPGROUP_SIZE
    tops = cute.make_rmem_tensor(LANE_HEADS, Float32)
    tops.fill(LEAST)
    for part in cutlass.range(parts.count, unroll=1):
        slot = slot_of_part(workspace, parts, part)
        for pair in cutlass.range_constexpr(LANE_HEADS // 2):
            words = load_pair(slot, ctx, lane, pair)
            for i in cutlass.range_constexpr(2):
                tops[2 * pair + i] = cute.arch.fmax(tops[2 * pair + i], as_float(words[2 * i]))
    # They are the sums from here on.
    factors.fill(0.0)
    out.fill(0.0)
    for part in cutlass.range(parts.count, unroll=1):
        slot = slot_of_part(workspace, parts, part)
        weights = []
        for pair in cutlass.range_constexpr(LANE_HEADS // 2):
            words = load_pair(slot, ctx, lane, pair)
            for i in cutlass.range_constexpr(2):
                top, total = as_float(words[2 * i]), as_float(words[2 * i + 1])
                weights.append(total * exp2(top - tops[2 * pair + i]))
                factors[2 * pair + i] = factors[2 * pair + i] + weights[-1]
        every = [weights[head_of(i % COUNT)] for i in range(cute.size(out))]
        add_values(slot, thread, out, every)
    for number in cutlass.range_constexpr(LANE_HEADS):
        head = first_head(lane) + offset_of_head(number)
        factor = Float32(0.0)
        if head < rows_of_item(w):
            asked = ask_sink(w.attn_sink, ctx.head + head, True)
            factor, lse = factor_and_lse(w.attn_sink, asked, tops[number], factors[number])
            if role.consumer == 0 and ctx.thread < 4:
                (w.lse.iterator + (first_row(w) + head)).store(lse)
        factors[number] = factor


def load_pair(slot: Any, ctx: Context, lane: Any, pair: int) -> list[Int32]:
    """Load maxima and sums of the lane's two neighbouring heads of that number."""
    return load_values(statistics_of(slot, ctx, first_head(lane) + offset_of_head(2 * pair)))
