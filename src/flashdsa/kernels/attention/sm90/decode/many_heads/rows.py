"""The end of an item: its rows of O, and lse."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from flashdsa.dsl.fragments import pack
from flashdsa.dsl.gmem import store1
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.results import ask_sink, factor_and_lse
from flashdsa.kernels.attention.sm90.core.tile import ROWS
from flashdsa.kernels.attention.sm90.decode.key_rows.dealt import Math
from flashdsa.kernels.attention.sm90.decode.key_rows.lanes import (
    first_head,
    head_of,
    offset_of_head,
    reduce_keys,
)
from flashdsa.kernels.attention.sm90.decode.key_rows.plan import CONSUMERS, WARPS
from flashdsa.kernels.attention.sm90.decode.many_heads.math import Registers
from flashdsa.kernels.attention.sm90.decode.many_heads.plan import TOPS_PITCH
from flashdsa.kernels.attention.sm90.decode.many_heads.products import COUNT
from flashdsa.kernels.attention.sm90.decode.many_heads.softmax import (
    LANE_HEADS,
    load_pairs,
    state_of,
)
from flashdsa.kernels.attention.sm90.decode.shared.combine import first_row
from flashdsa.kernels.attention.sm90.decode.shared.context import meet_consumers
from flashdsa.kernels.attention.sm90.decode.shared.exchange import rows_of_item
from flashdsa.kernels.attention.sm90.decode.shared.plan import GROUP_DIMS
from flashdsa.kernels.attention.sm90.decode.shared.words import power_of_two


@cute.jit
def end_item(role: Math, r: Registers) -> None:
    """Write the item's rows and lse."""
    ctx = role.ctx
    store_sums(role, r)
    # all_read: nobody reads keys or Q any more; all sums are stored.
    meet_consumers(ctx.memory.all_read)
    if role.consumer == 0:
        store_factors(role, r)
    # factors_full: the heads' factors are stored.
    meet_consumers(ctx.memory.factors_full)
    factors = load_pairs(ctx.memory.row_unit.address(), ctx.thread % WARP_SIZE)
    write_rows(role, r.out, factors)


def sums_of(role: Math) -> cute.Tensor:
    """Each warp's sums, where its maxima of a tile were, which the consumer has read."""
    return role.ctx.memory.tops.array(Float32, CONSUMERS * WARPS * TOPS_PITCH)


@cute.jit
def store_sums(role: Math, r: Registers) -> None:
    """Store the warp's sums."""
    warp, lane = role.ctx.thread // WARP_SIZE, role.ctx.thread % WARP_SIZE
    first = (role.consumer * WARPS + warp) * TOPS_PITCH + first_head(lane)
    for number in cutlass.range_constexpr(LANE_HEADS):
        total = reduce_keys(r.heads.totals[number], lambda a, b: a + b)
        if lane < 4:
            sums_of(role)[first + offset_of_head(number)] = total


@cute.jit
def store_factors(role: Math, r: Registers) -> None:
    """A thread a head: store the factor of its O, and write its lse."""
    ctx, w = role.ctx, role.output
    head = ctx.thread
    if head < ROWS:
        exists = head < rows_of_item(w)
        asked = ask_sink(w.attn_sink, ctx.head + head, exists)
        total, factor = Float32(0.0), Float32(0.0)
        for warp in cutlass.range_constexpr(CONSUMERS * WARPS):
            total = total + sums_of(role)[warp * TOPS_PITCH + head]
        if exists:
            factor, lse = factor_and_lse(w.attn_sink, asked, state_of(ctx)[head], total)
            (w.lse.iterator + (first_row(w) + head)).store(lse)
        # Values are times a power of two.
        unit = power_of_two(-r.heads.power[0])
        ctx.memory.row_unit.array(Float32, ROWS)[head] = factor * unit


@cute.jit
def write_rows(role: Math, out: cute.Tensor, factors: Any) -> None:
    """Write a consumer's half of the item's dims: a lane has two neighbouring ones of a head, eight
    lanes 32 bytes."""
    ctx, w = role.ctx, role.output
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    dims = ctx.plan.tile.d_v
    group = role.consumer * (ctx.plan.dim_groups // CONSUMERS) + 2 * warp + lane // 16
    dim = group * GROUP_DIMS + lane // 4 % 4 * 2
    for number in cutlass.range_constexpr(LANE_HEADS):
        head = first_head(lane) + offset_of_head(number)
        if head < rows_of_item(w):
            to = w.out.iterator + (Int64(first_row(w) + head) * dims + dim)
            for block in cutlass.range_constexpr(ctx.plan.blocks):
                pair = [out[COUNT * block + i] for i in range(COUNT) if head_of(i) == number]
                word = pack(pair[0] * factors[number], pair[1] * factors[number])
                if factors[number] == 0.0:
                    word = Int32(0)  # O may be NaN
                store1(to + block * ROWS, word)
