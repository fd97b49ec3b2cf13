"""Role math: both consumers take every stretch of the CTA, then write its rows, or a part."""

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.results import ask_sink, factor_and_lse
from flashdsa.kernels.attention.sm90.core.softmax import LEAST
from flashdsa.kernels.attention.sm90.core.tile import ROWS, TILES
from flashdsa.kernels.attention.sm90.decode.key_rows.dealt import Dealt, Math, take_extent
from flashdsa.kernels.attention.sm90.decode.key_rows.plan import CONSUMERS, WARPS
from flashdsa.kernels.attention.sm90.decode.many_heads.dealt.merge import (
    merge_parts,
    store_part,
    store_statistics,
)
from flashdsa.kernels.attention.sm90.decode.many_heads.math import (
    Registers,
    ask_query,
    take_query,
    take_step,
)
from flashdsa.kernels.attention.sm90.decode.many_heads.plan import STATE, TOPS_PITCH
from flashdsa.kernels.attention.sm90.decode.many_heads.products import COUNT
from flashdsa.kernels.attention.sm90.decode.many_heads.rows import store_sums, sums_of, write_rows
from flashdsa.kernels.attention.sm90.decode.many_heads.softmax import (
    LANE_HEADS,
    load_pairs,
    new_heads,
    restart,
    state_of,
)
from flashdsa.kernels.attention.sm90.decode.shared.combine import first_row
from flashdsa.kernels.attention.sm90.decode.shared.context import meet_consumers
from flashdsa.kernels.attention.sm90.decode.shared.dealing import (
    num_stretches,
    parts_before,
)
from flashdsa.kernels.attention.sm90.decode.shared.exchange import rows_of_item
from flashdsa.kernels.attention.sm90.decode.shared.parts import draw_ticket
from flashdsa.kernels.attention.sm90.decode.shared.words import power_of_two


@cute.jit
def take_stretches(role: Dealt, consumer: Int32) -> None:
    """Both consumers, one code: take every stretch of the CTA."""
    memory = role.memory
    out = cute.make_rmem_tensor(memory.plan.blocks * COUNT, Float32)
    s = cute.make_rmem_tensor(COUNT, Float32)
    r = Registers(s, out, new_heads())
    number, step = Int32(0), Int32(0)
    ask_stretch(role, number, consumer)
    while number < num_stretches(memory):
        # stretch_read, a phase a stretch: factors, and the maxima before, may be overwritten.
        memory.stretch_read.wait_for(number - 1)
        math = role.math(number, consumer)
        if math.ctx.thread < STATE and consumer == 0:
            state_of(math.ctx)[math.ctx.thread] = Float32(0.0)
        take_query(math, number)
        end = step * TILES + take_extent(memory, number)
        s.fill(0.0)
        out.fill(0.0)
        restart(r.heads)
        is_first = Boolean(True)
        while step * TILES < end:
            take_step(math, r, step, end - step * TILES, is_first)
            step += 1
            is_first = Boolean(False)
        end_stretch(role, r, number, consumer)
        number += 1


@cute.jit
def ask_stretch(role: Dealt, number: Int32, consumer: Int32) -> None:
    """Ask for Q of a stretch, if the CTA has it; nobody reads the one before any more."""
    if number < num_stretches(role.memory):
        # stretch_full: the stretch is stored.
        role.memory.stretch_full.wait_for(number)
        ask_query(role.math(number, consumer))


@cute.jit
def end_stretch(role: Dealt, r: Registers, number: Int32, consumer: Int32) -> None:
    """Write a consumer's half of the item's dims, if the stretch is all of it; else store a part,
    and write the rows if it is the last part that is stored."""
    memory = role.memory
    math = role.math(number, consumer)
    ctx = math.ctx
    store_sums(math, r)
    # all_read: nobody reads Q any more; all sums are stored.
    meet_consumers(memory.all_read, number)
    ask_stretch(role, number + 1, consumer)
    if consumer == 0:
        store_factors(role, math, r, number)
    # factors_full: the heads' factors are stored.
    meet_consumers(memory.factors_full, number)
    factors = cute.make_rmem_tensor(LANE_HEADS, Float32)
    loaded = load_pairs(memory.row_unit.address(), ctx.thread % WARP_SIZE)
    for i in cutlass.range_constexpr(LANE_HEADS):
        factors[i] = loaded[i]
    memory.stretch_read.arrive()
    is_complete = Boolean(True)
    parts = role.parts(number)
    if parts.count > 1:
        store_part(math, r.out, factors, role.workspace, parts)
        stored = parts_before(ctx, number)
        is_complete = draw_ticket(ctx, role.workspace, parts, stored, consumer)
        if is_complete:
            # Loaded again, as registers are few.
            parts = role.parts(number)
            merge_parts(role.math(number, consumer), r.out, factors, role.workspace, parts)
    if is_complete:
        write_rows(role.math(number, consumer), r.out, factors)


@cute.jit
def store_factors(role: Dealt, math: Math, r: Registers, number: Int32) -> None:
    """A thread a head: store the factor of its O, and write its lse, or a part's maximum and
    sum."""
    ctx, w = math.ctx, math.output
    head = ctx.thread
    if head < ROWS:
        exists = head < rows_of_item(w)
        asked = ask_sink(w.attn_sink, ctx.head + head, exists)
        top, total, factor = state_of(ctx)[head], Float32(0.0), Float32(0.0)
        for warp in cutlass.range_constexpr(CONSUMERS * WARPS):
            total = total + sums_of(math)[warp * TOPS_PITCH + head]
        parts = role.parts(number)
        if parts.count > 1:
            if total == 0.0:
                top = Float32(LEAST)
            store_statistics(ctx, role.workspace, parts, top, total)
            if total != 0.0:
                factor = cute.arch.rcp_approx(total)
        elif exists:
            factor, lse = factor_and_lse(w.attn_sink, asked, top, total)
            (w.lse.iterator + (first_row(w) + head)).store(lse)
        # Values are times a power of two.
        ctx.memory.row_unit.array(Float32, ROWS)[head] = factor * power_of_two(-r.heads.power[0])
