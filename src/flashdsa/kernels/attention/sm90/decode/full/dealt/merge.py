"""Parts of 64 heads in the workspace, in the order of the consumers' registers.

A slot has a line of 16 bytes for each thread of both consumers, of eight of its values, for each
eight of them; then four fp32 a row: the part's maximum and sum, and the scale of each half of O.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.fragments import THREAD_ROWS, exp2, row_of_thread
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.consumers import Registers
from flashdsa.kernels.attention.sm90.core.softmax import LEAST, Scale, multiply_rows
from flashdsa.kernels.attention.sm90.core.tile import ROWS
from flashdsa.kernels.attention.sm90.decode.full.consumers import normalise
from flashdsa.kernels.attention.sm90.decode.shared.context import Context
from flashdsa.kernels.attention.sm90.decode.shared.dealing import Parts
from flashdsa.kernels.attention.sm90.decode.shared.parts import (
    LINE_VALUES,
    LINE_WORDS,
    Workspace,
    at_line,
    load_values,
    slot_of_part,
    store_values,
)
from flashdsa.kernels.attention.sm90.decode.shared.plan import STATISTICS
from flashdsa.kernels.attention.sm90.decode.shared.words import as_float, bits_of, from_f16


def at_statistics(slot: Any, ctx: Context, h: int) -> Any:
    """Pointer to the statistics of a row of the thread."""
    values = ROWS * ctx.plan.tile.d_v // 2
    return slot + (values + (row_of_thread(ctx.thread) + 8 * h) * STATISTICS)


@cute.jit
def store_part(
    ctx: Context,
    r: Registers,
    sums: list[Float32],
    workspace: Workspace,
    parts: Parts,
    consumer: cutlass.Constexpr,
) -> None:
    """Store this CTA's part of an item: a consumer's half of O, and what the merge must know."""
    cta, _, _ = cute.arch.block_idx()
    slot = slot_of_part(workspace, parts, cta - parts.first)
    thread = ctx.thread + consumer * WARPGROUP_SIZE
    factors, units = normalise(ctx, r.out, sums)
    multiply_rows(r.out, factors)
    store_values(slot, thread, cute.size(r.out), lambda i: r.out[i])
    if ctx.thread % 4 == 0:
        for h in cutlass.range_constexpr(THREAD_ROWS):
            to = at_statistics(slot, ctx, h)
            if cutlass.const_expr(consumer == 0):
                to.store(bits_of(r.rows.out_max[h]))
                (to + 1).store(bits_of(sums[h]))
            (to + (2 + consumer)).store(bits_of(units[h]))


@cute.jit
def merge_parts(
    ctx: Context,
    r: Registers,
    scale: Scale,
    workspace: Workspace,
    parts: Parts,
    consumer: cutlass.Constexpr,
) -> list[Float32]:
    """Add up all parts of an item in their order, a consumer's half of O, against their largest
    maxima; return the rows' sums.

    draw_ticket: every part is stored.
    """
    thread = ctx.thread + consumer * WARPGROUP_SIZE
    r.rows.out_max.fill(LEAST)
    for number in cutlass.range(parts.count, unroll=1):
        slot = slot_of_part(workspace, parts, number)
        for h in cutlass.range_constexpr(THREAD_ROWS):
            top = load_values(at_statistics(slot, ctx, h))[0]
            r.rows.out_max[h] = cute.arch.fmax(r.rows.out_max[h], as_float(top))
    r.out.fill(0.0)
    sums = [Float32(0.0) for _ in range(THREAD_ROWS)]
    for number in cutlass.range(parts.count, unroll=1):
        slot = slot_of_part(workspace, parts, number)
        weights = []
        for h in cutlass.range_constexpr(THREAD_ROWS):
            of_row = [as_float(word) for word in load_values(at_statistics(slot, ctx, h))]
            weight = of_row[1] * exp2((of_row[0] - r.rows.out_max[h]) * scale.factor)
            sums[h] = sums[h] + weight
            weights.append(weight * of_row[2 + consumer])
        for line in cutlass.range_constexpr(cute.size(r.out) // LINE_VALUES):
            words = load_values(at_line(slot, thread, line))
            for i in cutlass.range_constexpr(LINE_WORDS):
                weight = weights[i % THREAD_ROWS]
                # 0 times a part without a key may be NaN.
                word = words[i] if weight != 0.0 else Int32(0)
                at = LINE_VALUES * line + 2 * i
                low, high = from_f16(word)
                r.out[at] = r.out[at] + weight * low
                r.out[at + 1] = r.out[at + 1] + weight * high
    return sums
