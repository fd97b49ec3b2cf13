"""Keys, Q and dO on their way to shared memory.

Role gather copies the rows of the lists into the tile of keys, a chunk as soon as it is free. The
warps of role high copy Q and dO of an item's 64 rows, and make delta = sum over dims of O dO of
them: O comes at the same time.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Vector, cute

from flashdsa.dsl import cp_async, gmem, row_tiles, smem, swizzle
from flashdsa.dsl.warp import sums_over_lanes
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.bwd_per_item import context, plan, tickets
from flashdsa.kernels.attention.sm90.core.backward import QUERY_ROWS, WORD_DIMS, place_of_word
from flashdsa.kernels.attention.sm90.core.softmax import LOG2_E
from flashdsa.kernels.attention.sm90.core.tile import BF16, CHUNK, ROWS
from flashdsa.plan.row_tiles import ROW_BYTES

WARPS = WARPGROUP_SIZE // WARP_SIZE
WARP_ROWS = ROWS // WARPS
"""Rows of an item that a warp copies."""
EIGHTS = WARP_ROWS // QUERY_ROWS
STAGES = 2
"""Chunks of Q, dO and O that are on their way; four are no faster."""


class Gatherer(NamedTuple):
    """Fills k. Signals k_full."""

    ctx: context.Context
    kv: cute.Tensor  # (S_kv, 576) bf16, columns in the order of `prepare.py`


@cute.jit
def copy_tile(role: Gatherer, rows: list[Int32], to: Int32, unit: Int32, number: Int32) -> None:
    """Copy this thread's part of the CTA's tile of that number."""
    ctx, tile = role.ctx, role.ctx.plan.tile
    sources = row_tiles.row_sources(role.kv, rows, unit)
    for chunk in ctx.plan.order:
        # k_free: dQ of the tile before has read the chunk, and S before it.
        if cutlass.const_expr(chunk < tile.half_chunks):
            ctx.memory.k_free_low.wait_round(number - 1, chunk)
        else:
            ctx.memory.k_free_high.wait_round(number - 1, chunk - tile.half_chunks)
        for turn in cutlass.range_constexpr(row_tiles.TURNS):
            at = chunk * tile.chunk_bytes + turn * row_tiles.ROWS_AT_ONCE * ROW_BYTES
            cp_async.copy_units(to, sources[turn], rows[turn], [(at, chunk * ROW_BYTES)])
        cp_async.arrive_when_copied(ctx.memory.k_full.at(chunk))


@cute.jit
def read_rows(ctx: context.Context, line: cute.Pointer, tile: Int32) -> list[Int32]:
    """The rows of a tile that this thread copies from."""
    first = line + tile * ctx.plan.tile.keys
    return [(first + turn * row_tiles.ROWS_AT_ONCE).load() for turn in range(row_tiles.TURNS)]


@cute.jit
def gather_item(
    role: Gatherer,
    item: Int32,
    place: tuple[Int32, Int32],
    to: Int32,
    number: Int32,
    paced: Boolean,
) -> Int32:
    """Copy every tile of an item; return the number of the CTA's tiles then. `place`: this thread's
    row, of those copied at once, and its unit. `to`: where it copies to. `paced`: whether this
    thread waits for the other CTAs."""
    ctx = role.ctx
    own, unit = place
    tiles = context.tiles_of(ctx, item)
    line = ctx.line_of(ctx.lists.rows, item) + own
    tile = tiles.first
    rows = read_rows(ctx, line, tile)
    for _ in cutlass.range(tiles.count, unroll=1):
        # The next tile's numbers come while this tile's chunks become free.
        tile = context.tile_after(tile, tiles.count)
        ahead = read_rows(ctx, line, tile)
        if cutlass.const_expr(ctx.plan.tickets):
            if paced:
                tickets.keep_pace(ctx, number)
        copy_tile(role, rows, to, unit, number)
        rows = ahead
        number += 1
    return number


@cute.jit
def gather_all(role: Gatherer) -> None:
    """All four warps: copy every tile of the CTA."""
    ctx = role.ctx
    unit, own = ctx.thread % row_tiles.UNITS, ctx.thread // row_tiles.UNITS
    to = ctx.memory.k.address() + swizzle.swizzled_128(own, unit)
    number = Int32(0)
    if cutlass.const_expr(ctx.plan.tickets):
        item, drawn = tickets.item_at(ctx, ctx.cta), Int32(0)
        paced = tickets.is_paced(ctx) & (ctx.thread == 0)
        while item >= 0:
            number = gather_item(role, item, (own, unit), to, number, paced)
            tickets.draw_item(ctx, drawn)
            item = tickets.next_item(ctx, drawn)
            drawn += 1
        if paced:
            tickets.stop_pace(ctx)
    else:
        for position in cutlass.range(ctx.cta, ctx.num_items, ctx.num_ctas, unroll=1):
            item = context.item_by_turns(ctx, position)
            number = gather_item(role, item, (own, unit), to, number, Boolean(False))


class Rows(NamedTuple):
    """Fills rows and statistics, writes delta. Signals rows_full, statistics_full."""

    ctx: context.Context
    q: cute.Tensor  # (S * H, 576) bf16
    do: cute.Tensor  # (S * H, 512) bf16
    out: cute.Tensor  # (S * H, 512) bf16
    lse: cute.Tensor  # (S * H,) fp32, natural, sinks in it
    delta: cute.Tensor  # (S * H,) fp32
    sm_scale: Float32


class Lane(NamedTuple):
    """This lane's words of an item's rows: word `lane` of each chunk of each row of the warp."""

    q: cute.Pointer
    do: cute.Pointer
    out: cute.Pointer
    to: Int32  # address of Q's word of the first row in chunk 0, not swizzled
    present: list[Int32]  # of each eight rows: whether the query names a key


@cute.jit
def copy_rows(role: Rows, item: Int32, items: Int32) -> None:
    """Copy an item's rows, a quarter of each chunk a warp and a word of each row a lane; zeros of a
    query that names no key, or is past the last. The order of columns is that of `prepare.py`.
    delta of the rows follows, a chunk later: each lane reads what it has copied itself. `items`:
    with keys, of this CTA, before this one."""
    ctx, tile = role.ctx, role.ctx.plan.tile
    present = ctx.lists.present[ctx.group_of(item)]
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    half, own = warp // 2, warp * WARP_ROWS
    to = ctx.memory.rows.address() + place_of_word(lane) + own % plan.HALF_ROWS * ROW_BYTES
    row, word = Int64(item) * ROWS + own, lane * WORD_DIMS
    of_eight = []
    for eight in cutlass.range_constexpr(EIGHTS):
        query = (own + eight * QUERY_ROWS) * ctx.plan.queries // ROWS
        of_eight.append((present >> query) & 1)
    x = Lane(
        role.q.iterator + (row * tile.d_qk + word),
        role.do.iterator + (row * tile.d_v + word),
        role.out.iterator + (row * tile.d_v + word),
        to + half * 2 * plan.HALF_BYTES,
        of_eight,
    )
    own_row = own + lane * WARP_ROWS // WARP_SIZE
    lse = role.lse[cutlass.min(item * ROWS + own_row, role.lse.shape[0] - 1)]
    totals = cute.make_rmem_tensor(WARP_ROWS, Float32)
    totals.fill(0.0)
    words = [cute.make_rmem_tensor(WARP_ROWS, Int32) for _ in range(STAGES)]
    for stage in cutlass.range_constexpr(STAGES):
        load_out(ctx, words[stage], x, Int32(stage))
    for turn in cutlass.range(tile.value_chunks // STAGES, unroll=1):
        for stage in cutlass.range_constexpr(STAGES):
            chunk = turn * STAGES + stage
            # rows_free: dKV of the item before has read the chunk, and S and dP before it.
            ctx.memory.rows_free.wait_round(items - 1, chunk)
            place, column = x.to + chunk * plan.ROWS_CHUNK_BYTES, chunk * CHUNK
            copy_chunk(x, x.q + column, place, tile.d_qk)
            copy_chunk(x, x.do + column, place + plan.HALF_BYTES, tile.d_v)
            cp_async.arrive_when_copied(ctx.memory.rows_full.at(chunk))
            cp_async.commit_copies()
            if chunk >= STAGES - 1:
                before = words[(stage + 1) % STAGES]
                cp_async.wait_for_copies(STAGES - 1)
                add_products(totals, before, x, chunk - (STAGES - 1))
                load_out(ctx, before, x, chunk + 1)
    if cutlass.const_expr(tile.has_rope):
        ctx.memory.rows_free.wait_round(items - 1, tile.value_chunks)
        # There is no dO beside these columns.
        copy_chunk(x, x.q + tile.d_v, x.to + ctx.plan.rope_at - half * plan.HALF_BYTES, tile.d_qk)
        cp_async.arrive_when_copied(ctx.memory.rows_full.at(tile.value_chunks))
        cp_async.commit_copies()
    for stage in cutlass.range_constexpr(1, STAGES):
        behind = STAGES - 1 - stage
        cp_async.wait_for_copies(behind + tile.has_rope)
        add_products(totals, words[stage], x, Int32(tile.value_chunks - 1 - behind))
    delta = sums_over_lanes([totals[i] for i in range(WARP_ROWS)], lane)
    write_statistics(role, item * ROWS, own_row, lse, delta)
    # Every thread arrives for itself, for racecheck does not see a lane arrive for the others.
    ctx.memory.statistics_full.arrive(0)


@cute.jit
def load_out(ctx: context.Context, words: cute.Tensor, x: Lane, chunk: Int32) -> None:
    """Load this lane's words of a chunk of O; none after the last chunk."""
    tile = ctx.plan.tile
    is_there = Int32(1) if chunk < tile.value_chunks else Int32(0)
    for row in cutlass.range_constexpr(WARP_ROWS):
        taken = x.present[row // QUERY_ROWS] & is_there
        words[row] = gmem.load_if(taken, x.out + chunk * CHUNK, offset=row * tile.d_v * BF16)


@cute.jit
def add_products(totals: cute.Tensor, words: cute.Tensor, x: Lane, chunk: Int32) -> None:
    """Add O dO of this lane's words of a chunk to the totals of the rows."""
    do = x.to + chunk * plan.ROWS_CHUNK_BYTES + plan.HALF_BYTES
    for row in cutlass.range_constexpr(WARP_ROWS):
        word = smem.load_float((do ^ (row % QUERY_ROWS << 4)) + row * ROW_BYTES).bitcast(Int32)
        left, right = two_floats(word), two_floats(words[row])
        totals[row] = totals[row] + left[0] * right[0] + left[1] * right[1]


@cute.jit
def write_statistics(role: Rows, first: Int32, own: Int32, lse: Float32, delta: Float32) -> None:
    """Write lse and delta of the row that this lane, and its neighbours, have. Of rows 2 i and 2 i
    + 1 of an item there are lse / ln 2 of both, then delta * sm_scale of both. `first`: the item's
    first row. `own`: the row in the item."""
    if role.ctx.thread % (WARP_SIZE // WARP_ROWS) == 0:
        to = role.ctx.memory.statistics.address() + (own // 2 * 16 + own % 2 * 4)
        smem.store_float(to, lse * Float32(LOG2_E))
        smem.store_float(to + 8, delta * role.sm_scale)
        if first + own < role.delta.shape[0]:
            role.delta[first + own] = delta


def two_floats(word: Any) -> Any:
    """Both bf16 of a word as fp32."""
    return Vector.from_elements([word], Int32).bitcast(BFloat16).to(Float32)


@cute.jit
def copy_chunk(x: Lane, source: cute.Pointer, to: Int32, dims: cutlass.Constexpr) -> None:
    """Copy 64 columns of the warp's rows of an item. `source`: this lane's word of the first row.
    `to`: its address in the first row's line. `dims`: of a row."""
    for row in cutlass.range_constexpr(WARP_ROWS):
        # The swizzle of row `row` of eight: its number into bits 4 to 6.
        place = to ^ (row % QUERY_ROWS << 4)
        none = x.present[row // QUERY_ROWS] - 1
        cp_async.copy_word(place, source, none, row * ROW_BYTES, row * dims * BF16)
