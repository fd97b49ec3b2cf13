"""Parts of few heads in the workspace, in the order of the consumers' registers.

A slot has a line of 16 bytes for each thread of both consumers, of eight of its values, for each
eight of them; then four fp32 a head, of which two are used: the part's maximum and sum.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.fragments import F16_KIND, exp2, pack
from flashdsa.dsl.gmem import load2, store2, store4
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.softmax import LEAST
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import HEADS
from flashdsa.kernels.attention.sm90.decode.key_rows.dealt import Math
from flashdsa.kernels.attention.sm90.decode.key_rows.lanes import (
    first_head,
    head_of,
    offset_of_head,
)
from flashdsa.kernels.attention.sm90.decode.shared.context import Context
from flashdsa.kernels.attention.sm90.decode.shared.dealing import Parts
from flashdsa.kernels.attention.sm90.decode.shared.parts import (
    LINE_VALUES,
    LINE_WORDS,
    Workspace,
    at_line,
    load_values,
    slot_of_part,
)
from flashdsa.kernels.attention.sm90.decode.shared.plan import STATISTICS
from flashdsa.kernels.attention.sm90.decode.shared.words import as_float, bits_of, from_f16


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
    for line in cutlass.range_constexpr(cute.size(rows.out) // LINE_VALUES):
        values = [rows.out[LINE_VALUES * line + i] for i in range(LINE_VALUES)]
        words = [pack(values[2 * i], values[2 * i + 1], F16_KIND) for i in range(LINE_WORDS)]
        store4(at_line(slot, thread, line), words)
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
        for line in cutlass.range_constexpr(cute.size(rows.out) // LINE_VALUES):
            words = load_values(at_line(slot, thread, line))
            for i in cutlass.range_constexpr(LINE_WORDS):
                at = LINE_VALUES * line + 2 * i
                both = from_f16(words[i])
                for odd in cutlass.range_constexpr(2):
                    weight = weights[head_of((at + odd) % (HEADS // 2))]
                    # 0 times a part without a key may be NaN.
                    value = both[odd] if weight != 0.0 else Float32(0.0)
                    rows.out[at + odd] = rows.out[at + odd] + weight * value
    inverses = []
    for number in cutlass.range_constexpr(heads):
        total = rows.totals[number]
        inverses.append(cute.arch.rcp_approx(total) if total != 0.0 else Float32(0.0))
    for i in cutlass.range_constexpr(cute.size(rows.out)):
        rows.out[i] = rows.out[i] * inverses[head_of(i % (HEADS // 2))]
