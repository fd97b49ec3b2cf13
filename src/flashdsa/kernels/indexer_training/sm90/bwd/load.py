"""Context of all roles, and role load: Q of each item, keys, their numbers and gradients."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.cp_async import COPY_BYTES, arrive_when_copied, copy_units
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.pipeline import RingProducer
from flashdsa.dsl.row_tiles import ROWS_AT_ONCE, TURNS, UNITS
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.indexer_training.sm90.bwd import plan as sizes
from flashdsa.plan.row_tiles import CHUNK_BYTES, ROW_BYTES
from flashdsa.problem import INDEX_HEAD_DIM


class Lists(NamedTuple):
    """Keys that have a gradient, for each group of neighbouring queries; see `lists.py`.

    capacity is a multiple of TILE_KEYS and at least queries * topk. Rows are -1 and gradients 0
    from counts[g] to the next multiple of TILE_KEYS; those after it must not be read.
    """

    rows: cute.Tensor  # (groups, capacity) int32
    gradients: cute.Tensor  # (groups * queries, capacity) fp32: 0 where a query has none
    counts: cute.Tensor  # (groups,) int32
    present: cute.Tensor  # (groups,) int32: bit i: query i of the group has a gradient


class Context(NamedTuple):
    """One CTA's position in the launch. Its work items are cta, cta + num_ctas, ...

    Items up to `whole` are a group each; the others are parts of the groups behind them, `parts` of
    each. A CTA goes round an item's tiles; its first one is `spread` tiles after that of the
    previous CTA.
    """

    memory: Memory
    lists: Lists
    cta: Int32
    num_ctas: Int32
    num_items: Int32
    whole: Int32
    parts: Int32
    spread: Int32
    thread: Int32  # in its warpgroup

    @property
    def plan(self) -> sizes.BwdPlan:
        return self.memory.plan

    def rows_of(self, group: Int32) -> Any:
        """Pointer to the first number of the group's list."""
        return self.lists.rows.iterator + Int64(group) * self.lists.rows.shape[1]


class Item(NamedTuple):
    """A group, or a part of it: tiles `begin` to `end` of its list, from `first` on."""

    group: Int32
    part: Int32  # number among all parts; -1: all of the group
    begin: Int32
    end: Int32
    first: Int32

    @property
    def count(self) -> Any:
        return self.end - self.begin


@cute.jit
def locate_item(ctx: Context, number: Int32) -> Item:
    """The work item of that number."""
    group, part = Int32(number), Int32(-1)
    begin, share, parts = Int32(0), Int32(1), Int32(1)
    if cutlass.const_expr(not ctx.plan.ordered):
        if number >= ctx.whole:
            part = number - ctx.whole
            group, parts = ctx.whole + part // ctx.parts, Int32(ctx.parts)
            begin = part % ctx.parts
            share = begin + 1
    tiles = (ctx.lists.counts[group] + (sizes.TILE_KEYS - 1)) // sizes.TILE_KEYS
    begin, end = begin * tiles // parts, share * tiles // parts
    first = begin + ctx.cta * ctx.spread % cutlass.max(end - begin, Int32(1))
    return Item(group, part, begin, end, first)


@cute.jit
def tile_after(item: Item, tile: Int32) -> Int32:
    """The item's tile after `tile`, going round."""
    tile += 1
    if tile >= item.end:
        tile = item.begin
    return tile


ROW_UNITS = sizes.TILE_KEYS * sizes.FP32 // COPY_BYTES
"""Copies of a tile's numbers, or of the gradients of a query."""


class Loader(NamedTuple):
    """Fills q, k, gradients and rows. Signals q_full, k_full."""

    ctx: Context
    q: cute.Tensor  # (S * H, 128) bf16
    k: cute.Tensor  # (S_kv, 128) bf16


@cute.jit
def copy_q(role: Loader, group: Int32, to: Int32, unit: Int32, own: Int32) -> None:
    """Copy this thread's part of a group's Q; zeros of a query without a gradient, or past the
    last."""
    ctx = role.ctx
    plan = ctx.plan
    present = ctx.lists.present[group]
    first = Int64(group) * plan.rows + own
    source = role.q.iterator + (first * INDEX_HEAD_DIM + unit * (COPY_BYTES // sizes.BF16))
    for block in cutlass.range_constexpr(plan.blocks):
        for turn in cutlass.range_constexpr(TURNS):
            row = block * sizes.ROWS + turn * ROWS_AT_ONCE
            none = ((present >> (row // plan.num_heads)) & 1) - 1
            at = block * sizes.BLOCK_BYTES + turn * ROWS_AT_ONCE * ROW_BYTES
            of_row = row * INDEX_HEAD_DIM * sizes.BF16
            places = [
                (at + chunk * CHUNK_BYTES, of_row + chunk * ROW_BYTES)
                for chunk in range(sizes.CHUNKS)
            ]
            copy_units(to, source, none, places)
    arrive_when_copied(ctx.memory.q_full.at())


@cute.jit
def copy_places(ctx: Context, group: Int32, tile: Int32, stage: Int32) -> None:
    """Copy this thread's part of a tile's numbers and gradients."""
    plan = ctx.plan
    first = tile * sizes.TILE_KEYS
    units = plan.queries * ROW_UNITS
    to = ctx.memory.gradients.address() + stage * plan.gradient_bytes
    for turn in cutlass.range_constexpr(-(-units // WARPGROUP_SIZE)):
        unit = turn * WARPGROUP_SIZE + ctx.thread
        if unit < units:
            line = Int64(group) * plan.queries + unit // ROW_UNITS
            place = first + unit % ROW_UNITS * (COPY_BYTES // sizes.FP32)
            gradients = ctx.lists.gradients
            at = gradients.iterator + (line * gradients.shape[1] + place)
            copy_units(to + unit * COPY_BYTES, at, Int32(0), [(0, 0)])
    if ctx.thread < ROW_UNITS:
        rows = (
            ctx.memory.rows.address()
            + stage * (sizes.TILE_KEYS * sizes.FP32)
            + ctx.thread * COPY_BYTES
        )
        of_tile = ctx.rows_of(group) + (first + ctx.thread * (COPY_BYTES // sizes.FP32))
        copy_units(rows, of_tile, Int32(0), [(0, 0)])


@cute.jit
def copy_tile(
    role: Loader,
    rows: list[Int32],
    group: Int32,
    tile: Int32,
    number: Int32,
    to: Int32,
    unit: Int32,
) -> None:
    """Copy this thread's part of the CTA's tile of that number. `to`: address of the thread's 16
    bytes of its first row in stage 0."""
    ctx = role.ctx
    ring = RingProducer(ctx.memory.k_full, ctx.memory.k_free)
    state = ring.state(number)
    # k_free[stage]: all products of the tile before in this stage are done, its numbers have been
    # read.
    ring.acquire(state)
    keys = to + state.stage * sizes.BLOCK_BYTES
    for turn in cutlass.range_constexpr(TURNS):
        source = role.k.iterator + (
            Int64(rows[turn]) * INDEX_HEAD_DIM + unit * (COPY_BYTES // sizes.BF16)
        )
        at = turn * ROWS_AT_ONCE * ROW_BYTES
        places = [(at + chunk * CHUNK_BYTES, chunk * ROW_BYTES) for chunk in range(sizes.CHUNKS)]
        copy_units(keys, source, rows[turn], places)
    copy_places(ctx, group, tile, state.stage)
    arrive_when_copied(ring.full.at(state.stage))


@cute.jit
def read_rows(line: cute.Pointer, tile: Int32) -> list[Int32]:
    """The rows of a tile that this thread copies from."""
    first = line + tile * sizes.TILE_KEYS
    return [(first + turn * ROWS_AT_ONCE).load() for turn in range(TURNS)]


@cute.jit
def load_all(role: Loader) -> None:
    """All four warps: load Q and every tile of the CTA's items."""
    ctx = role.ctx
    unit, own = ctx.thread % UNITS, ctx.thread // UNITS
    place = swizzled_128(own, unit)
    number, items = Int32(0), Int32(0)
    for index in cutlass.range(ctx.cta, ctx.num_items, ctx.num_ctas, unroll=1):
        item = locate_item(ctx, index)
        tile = item.first
        line = ctx.rows_of(item.group) + own
        if item.count > 0:
            # q_free: every product with the Q of the item before is done.
            ctx.memory.q_free.wait_round(items - 1)
            copy_q(role, item.group, ctx.memory.q.address() + place, unit, own)
            items += 1
        rows = read_rows(line, tile)
        for _ in cutlass.range(item.count, unroll=1):
            # The next tile's numbers come while this tile's stage becomes free.
            ahead_tile = tile_after(item, tile)
            ahead = read_rows(line, ahead_tile)
            copy_tile(role, rows, item.group, tile, number, ctx.memory.k.address() + place, unit)
            rows = ahead
            tile = ahead_tile
            number += 1
