"""Roles consumer0 and consumer1: S and P of a tile each, half of O's dims, and the results."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl import fragments, pipeline
from flashdsa.kernels.attention.sm90.core import consumers, results, softmax
from flashdsa.kernels.attention.sm90.core import tile as tiles
from flashdsa.kernels.attention.sm90.fwd.context import Context


class Consumer(NamedTuple):
    """Reads q, its tile, half of the other tile, and the other's P. Writes its P, and results."""

    ctx: Context
    out: cute.Tensor  # (S, H, 512) bf16
    lse: cute.Tensor  # (S, H) fp32
    max_logits: cute.Tensor  # (S * H,) fp32, or (0,): not asked for
    attn_sink: cute.Tensor  # (H,) fp32, or (0,): none
    scale: softmax.Scale


@cute.jit
def consume0(role: Consumer) -> None:
    """Take every step of the CTA; S of the next step is issued after this one's last product."""
    ctx = role.ctx
    tile = ctx.plan.tile
    v0, others = (
        consumers.values_of(ctx, 0, 0),
        (consumers.values_of(ctx, 1, 0), consumers.p_of(ctx, 1)),
    )
    r = consumers.new_registers(tile, with_largest=True)
    step, items = Int32(0), Int32(0)

    ctx.memory.q_full.wait_for(items)
    consumers.issue_scores(ctx, r.s, step, True, tile.low_slices + tile.high_slices)
    warpgroup.wait_group(0)
    announce_scores(ctx, step)
    more, adds = Boolean(True), Int32(0)
    while more:
        flags = ctx.flags(0)
        more = flags & tiles.LAST_STEP_OF_CTA == 0
        consumers.add_tile0(ctx, r, role.scale, v0, adds)
        adds = Int32(1)
        ctx.memory.p1_full.wait(ctx.phase(step))
        if cutlass.const_expr(not ctx.plan.joined) or flags & tiles.HALF_STEP == 0:
            step = add_others(role, r, step, items, flags, others)
        else:
            step += 1
            pipeline.arrive_warp(ctx.memory.low_free, 1, ctx.thread)
            wait_for_next_query(ctx, items, flags)
            consumers.issue_scores(ctx, r.s, step, more, tile.low_slices + tile.high_slices)
            warpgroup.wait_group(0)
        if more:
            announce_scores(ctx, step)
        if flags != 0:
            write_item(role, r, items, flags, 0)
            softmax.restart(r.rows)
            adds = Int32(0)
            items += 1


@cute.jit
def add_others(
    role: Consumer,
    r: consumers.Registers,
    step: Int32,
    items: Int32,
    flags: Int32,
    others: tuple[Any, Any],
) -> Int32:
    """Consumer 0: add the product with P of tile 1, which has come; compute S of the next step
    meanwhile, and return its number. `others`: descriptors of tile 1's values and P."""
    ctx = role.ctx
    v1, p1 = others
    more = flags & tiles.LAST_STEP_OF_CTA == 0
    consumers.issue_others(ctx, r, role.scale, 1, p1, v1)
    step += 1
    wait_for_next_query(ctx, items, flags)
    consumers.compute_next_scores(ctx, r.s, step, more)
    return step


@cute.jit
def wait_for_next_query(ctx: Context, items: Int32, flags: Int32) -> None:
    """Wait for Q of the next item after an item's last step, unless it is the CTA's."""
    if bits_of(ctx, flags) == tiles.LAST_STEP_OF_ITEM:
        ctx.memory.q_full.wait_for(items + 1)


@cute.jit
def announce_scores(ctx: Context, step: Int32) -> None:
    """All S of the step is computed: tile 1's may follow, and after the last step the next Q."""
    consumers.finish_scores(ctx, step, 0)
    if ctx.flags(0) != 0:
        pipeline.arrive_warp(ctx.memory.q_free, 0, ctx.thread)


@cute.jit
def consume1(role: Consumer) -> None:
    """Take every step of the CTA; its softmax runs during the product with P of tile 0."""
    ctx = role.ctx
    operands = (
        consumers.values_of(ctx, 0, 1),
        consumers.values_of(ctx, 1, 1),
        consumers.p_of(ctx, 0),
    )
    r = consumers.new_registers(ctx.plan.tile, with_largest=True)
    step, items = Int32(0), Int32(0)

    ctx.memory.q_full.wait_for(items)
    more, adds = Boolean(True), Int32(0)
    while more:
        consumers.wait_for_scores()
        if cutlass.const_expr(ctx.plan.joined):
            flags, more = take_either_step(role, r, step, adds, operands)
        else:
            flags, more = take_step(role, r, step, adds, operands)
        step += 1
        adds = Int32(1)
        if flags != 0:
            write_item(role, r, items, flags, 1)
            softmax.restart(r.rows)
            adds = Int32(0)
            items += 1
            if more:
                ctx.memory.q_full.wait_for(items)


@cute.jit
def take_step(
    role: Consumer, r: consumers.Registers, step: Int32, adds: Int32, operands: tuple[Any, Any, Any]
) -> tuple[Int32, Boolean]:
    """Consumer 1, after consumer 0's scores: take a step; return its flags, and whether the CTA has
    one more. `adds`: 0 at an item's first step: O is not read. `operands`: descriptors of both
    tiles' values, and of P of tile 0."""
    ctx, (v0, v1, p0) = role.ctx, operands
    consumers.compute_scores(ctx, r.s, step)
    consumers.finish_scores(ctx, step, 1)
    flags = ctx.flags(1)
    more = flags & tiles.LAST_STEP_OF_CTA == 0
    if flags != 0:
        pipeline.arrive_warp(ctx.memory.q_free, 0, ctx.thread)
    ctx.memory.p0_full.wait(ctx.phase(step))
    consumers.issue_others(ctx, r, role.scale, 0, p0, v0, adds)
    consumers.add_tile1(ctx, r, role.scale, v1)
    return flags, more


@cute.jit
def take_either_step(
    role: Consumer, r: consumers.Registers, step: Int32, adds: Int32, operands: tuple[Any, Any, Any]
) -> tuple[Int32, Boolean]:
    """Likewise; the step may be an item's last one, of tile 0 only."""
    ctx, (v0, _, p0) = role.ctx, operands
    ctx.memory.masks_full.wait(ctx.phase(step), 1)
    flags = ctx.flags(1)
    if flags & tiles.HALF_STEP == 0:
        take_step(role, r, step, adds, operands)
    else:
        # All barriers complete their phases: the gather fills tile 1 with zeros. p1_full: they have
        # come, so that either consumer may free its half.
        for slice_ in cutlass.range_constexpr(ctx.plan.tile.slices):
            ctx.memory.k1_full.wait(ctx.phase(step), slice_)
        ctx.memory.p1_full.arrive()
        pipeline.arrive_warp(ctx.memory.q_free, 0, ctx.thread)
        ctx.memory.p0_full.wait(ctx.phase(step))
        consumers.issue_others(ctx, r, role.scale, 0, p0, v0, adds)
        warpgroup.wait_group(0)
        for tile in cutlass.range_constexpr(tiles.TILES):
            pipeline.arrive_warp(ctx.memory.high_free, tile, ctx.thread)
    return flags, flags & tiles.LAST_STEP_OF_CTA == 0


def bits_of(ctx: Context, flags: Int32) -> Int32:
    """Flags of a step that say what follows it."""
    return flags & ((1 << tiles.FLAG_BITS) - 1) if ctx.plan.drawn or ctx.plan.joined else flags


def number_of_item(ctx: Context, items: Int32, flags: Int32) -> Int32:
    """Number of an item, of which CTA c has c, c + CTAs, ... or those that it draws."""
    if ctx.plan.drawn:
        return flags >> ctx.plan.flag_bits
    return ctx.first_item + items * ctx.num_ctas


@cute.jit
def rows_of_item(role: Consumer, number: Int32) -> results.ItemRows:
    """The item's rows."""
    ctx = role.ctx
    row = fragments.row_of_thread(ctx.thread)
    if cutlass.const_expr(ctx.plan.group > 1):
        first = number * tiles.ROWS
        count = Int32(role.lse.shape[0]) * ctx.plan.group_heads - first
        return results.ItemRows(Int64(first), count, row % ctx.plan.group_heads, row)
    num_heads = Int32(role.lse.shape[1])
    query = number // ctx.blocks
    head = (number - query * ctx.blocks) * tiles.ROWS
    return results.ItemRows(Int64(query) * num_heads + head, num_heads - head, head + row, row)


@cute.jit
def write_item(
    role: Consumer, r: consumers.Registers, items: Int32, flags: Int32, consumer: cutlass.Constexpr
) -> None:
    """Write a consumer's half of O, divided by the rows' sums; consumer 0 writes lse and maxima.
    `items`: number that the CTA has ended before. `flags`: of the item's last step."""
    ctx = role.ctx
    item = rows_of_item(role, number_of_item(ctx, items, flags))
    asked = results.ask_sinks(role, item)
    sums = consumers.merge_sums(ctx, r.rows, role.scale, items, consumer)
    factors = results.factors_of_rows(role, r.rows, sums, item, asked, consumer)
    staged = results.staged_after_p(ctx, items, consumer)
    results.store_rows(ctx, role.out, r.out, factors, item, consumer, staged, 0)
