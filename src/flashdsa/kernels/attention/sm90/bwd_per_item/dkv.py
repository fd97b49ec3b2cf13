"""Role dkv: dS^T Q + P^T dO of each tile, 32 dims at a time, and its addition to dKV.

Keys are M. P and dS of a tile are in registers, so that shared memory is free at once. One of two
accumulators is added while the other one's products run.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl import gmem, pipeline, ptx, swizzle, wgmma
from flashdsa.dsl.fragments import MMA_K, MMA_ROWS
from flashdsa.dsl.opaque import opaque
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.bwd_per_item import context, slot_sums, tickets
from flashdsa.kernels.attention.sm90.bwd_per_item import plan as sizes
from flashdsa.kernels.attention.sm90.core.backward import PAIR_DIMS, STEPS, four_dims
from flashdsa.kernels.attention.sm90.core.tile import BF16, CHUNK
from flashdsa.plan.row_tiles import ROW_BYTES

OF_LINE = sizes.LINE_DIMS // 2
"""fp32 of an accumulator in a thread: its line is 128 bytes of a row of dKV, which eight lanes add
in one piece."""
STEP_BYTES = MMA_K * ROW_BYTES
A_WORDS = 4
CHUNK_LINES = CHUNK // sizes.LINE_DIMS
KEYS = 2
"""Keys of a thread, 8 apart."""
PAIR_WORDS, PAIR_LASTS = 4 * sizes.LINE_PACKS, 2 * sizes.LINE_PACKS
"""Words in a row of the slots from a pair of lines to the next pair: of words 0 and 1, and of words
2."""


class Dkv(NamedTuple):
    """Reads p, ds and rows; adds to dKV. Signals scores_free, rows_free."""

    ctx: context.Context
    dkv: cute.Tensor  # (S_kv, 576) fp32; with slots (rows, plan.slot_words) int32
    offsets: Any  # with slots (groups, capacity) int32: slot row of each key of a list


class Line(NamedTuple):
    """32 dims: low words of the descriptors of their Q and dO, and bytes between their halves."""

    rows: Any
    has_v: bool
    half_bytes: int


def line_at(chunk: Any, half: int, has_v: bool = True) -> Line:
    """A half of the chunk of Q, and dO, at a shared memory address."""
    rows = wgmma.along_n(chunk + half * sizes.LINE_DIMS * BF16)
    return Line(rows, has_v, 2 * sizes.HALF_BYTES if has_v else sizes.HALF_BYTES)


@cute.jit
def load_matrix(matrix: Int32, words: cute.Tensor, thread: Int32) -> None:
    """Load this thread's words of a matrix [key][row] as wgmma takes A, for all 64 rows."""
    lane = thread % WARP_SIZE
    key = thread // WARP_SIZE * MMA_ROWS + lane % 16
    for step in cutlass.range_constexpr(STEPS):
        at = matrix + swizzle.swizzled_128(key, 2 * step + lane // 16)
        got = ptx.words(
            "ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            A_WORDS,
            at,
        )
        for i in cutlass.range_constexpr(A_WORDS):
            words[A_WORDS * step + i] = got[i]


def issue_line(acc: Any, p: Any, ds: Any, line: Line) -> None:
    """Issue acc = dS^T Q + P^T dO of 32 dims, as one group."""
    warpgroup.fence()
    rows = opaque(line.rows)
    operands = [(ds, 0)] + ([(p, sizes.HALF_BYTES)] if line.has_v else [])
    for words, place in operands:
        for step in range(STEPS):
            half, in_half = divmod(step, STEPS // 2)
            offset = place + half * line.half_bytes + in_half * STEP_BYTES
            a = [words[A_WORDS * step + i] for i in range(A_WORDS)]
            b, more = wgmma.descriptor_behind(rows, offset), bool(place or step)
            wgmma.multiply_bf16(acc, sizes.LINE_DIMS, a, b, accumulate=more, transposes=(1,))
    warpgroup.commit_group()


@cute.jit
def add_line(role: Dkv, acc: Any, at: cute.Pointer, keys: list[Int32], lane: Int32) -> None:
    """Add the accumulators to dKV of this thread's keys; a negative key has no row. The row's four
    lanes have 64 bytes of two pieces, see `core/backward.py`. They exchange with the four lanes of
    the next row, so that all eight have 128 bytes of one row, and then of the other. `at`: of row 0
    of dKV, the dim from which on the lane adds."""
    d_qk = role.ctx.plan.tile.d_qk
    is_next = lane // 4 % 2 == 1
    for h in cutlass.range_constexpr(KEYS):
        left = four_dims(acc, 0, h)
        right = four_dims(acc, 1, h)
        got = [cute.arch.shuffle_sync_bfly(left[i] if is_next else right[i], 4) for i in range(4)]
        of_row = [got[i] if is_next else left[i] for i in range(4)]
        of_next = [right[i] if is_next else got[i] for i in range(4)]
        key, next_key = keys[2 * h], keys[2 * h + 1]
        gmem.add4_if(key, at + Int64(key) * d_qk, of_row)
        gmem.add4_if(next_key, at + Int64(next_key) * d_qk, of_next)


def pack_line(acc: Any, h: int) -> list[Any]:
    """Pack this thread's pack of a line, for its key h, into words."""
    return slot_sums.pack_eight([*four_dims(acc, 0, h), *four_dims(acc, 1, h)])


@cute.jit
def store_pair(
    words: list[Any], row: list[cute.Pointer], key: Int32, pair: cutlass.Constexpr
) -> None:
    """Store this thread's packs of two lines to its row of the slots; a negative key has none.
    `words`: of both packs. `row`: addresses of this lane's words 0 and 1, and words 2, of pair 0.
    """
    firsts = row[0] + pair * PAIR_WORDS
    lasts = row[1] + pair * PAIR_LASTS
    left, right = words[:3], words[3:]
    ptx.run(
        "{ .reg .pred some; setp.ge.s32 some, {$r8}, 0; "
        "@some st.global.v4.b32 [{$r0}], {{$r2}, {$r3}, {$r4}, {$r5}}; "
        "@some st.global.v2.b32 [{$r1}], {{$r6}, {$r7}}; }",
        firsts,
        lasts,
        *left[:2],
        *right[:2],
        left[2],
        right[2],
        key,
    )


@cute.jit
def read_keys(role: Dkv, line: cute.Pointer, tiles: context.Tiles, tile: Int32) -> list[Int32]:
    """Read this thread's two keys of a tile from `line`; -1 after the list's end."""
    ctx = role.ctx
    keys = [Int32(-1)] * KEYS
    first = (
        tile * ctx.plan.tile.keys + ctx.thread // WARP_SIZE * MMA_ROWS + ctx.thread % WARP_SIZE // 4
    )
    for h in cutlass.range_constexpr(KEYS):
        if first + 8 * h < tiles.keys:
            keys[h] = (line + (first + 8 * h)).load()
    return keys


@cute.jit
def pairs_of(keys: list[Int32], lane: Int32) -> list[Int32]:
    """Rows to which this lane adds first and second, for each key: both of a pair of rows."""
    is_next = lane // 4 % 2 == 1
    pairs = []
    for key in keys:
        other = cute.arch.shuffle_sync_bfly(key, 4)
        pairs += [other if is_next else key, key if is_next else other]
    return pairs


@cute.jit
def free_chunk(role: Dkv, chunk: cutlass.Constexpr, is_last: Boolean) -> None:
    """Let the next item have a chunk of Q and dO, if this was the last tile of its item: its
    products have ended, and S and dP of the tile before them."""
    if is_last & (role.ctx.thread % WARP_SIZE == 0):
        role.ctx.memory.rows_free.arrive(chunk)


@cute.jit
def add_tile(role: Dkv, accs: Any, p: Any, ds: Any, keys: list[Int32], is_last: Boolean) -> None:
    """Add dS^T Q + P^T dO to dKV of a tile, the last one of its item or not."""
    ctx, last = role.ctx, 0
    lane = ctx.thread % WARP_SIZE
    dim = lane // 4 % 2 * PAIR_DIMS + lane % 4 * 4
    at = role.dkv.iterator + dim
    rows = ctx.memory.rows.address()
    issue_line(accs[0], p, ds, line_at(rows, 0))
    issue_line(accs[1], p, ds, line_at(rows, 1))
    for chunk in cutlass.range_constexpr(ctx.plan.tile.value_chunks - 1):
        ahead = rows + (chunk + 1) * sizes.ROWS_CHUNK_BYTES
        for i in cutlass.range_constexpr(2):
            warpgroup.wait_group(1)
            if cutlass.const_expr(i == 1):
                free_chunk(role, chunk, is_last)
            add_line(role, accs[i], at + i * sizes.LINE_DIMS, keys, lane)
            issue_line(accs[i], p, ds, line_at(ahead, i))
        at = at + CHUNK
    if cutlass.const_expr(ctx.plan.tile.has_rope):
        last = CHUNK
        for i in cutlass.range_constexpr(2):
            warpgroup.wait_group(1)
            if cutlass.const_expr(i == 1):
                free_chunk(role, ctx.plan.tile.value_chunks - 1, is_last)
            add_line(role, accs[i], at + i * sizes.LINE_DIMS, keys, lane)
            issue_line(accs[i], p, ds, line_at(rows + ctx.plan.rope_at, i, False))
    for i, in_flight in enumerate((1, 0)):
        warpgroup.wait_group(in_flight)
        if cutlass.const_expr(i == 1):
            free_chunk(role, ctx.plan.tile.chunks - 1, is_last)
        add_line(role, accs[i], at + (last + i * sizes.LINE_DIMS), keys, lane)


@cute.jit
def store_tile(role: Dkv, accs: Any, p: Any, ds: Any, keys: list[Int32], is_last: Boolean) -> None:
    """Store a tile's dS^T Q + P^T dO to the slots; keys: this thread's rows of them."""
    plan, rows = role.ctx.plan, role.ctx.memory.rows.address()
    pack, value_lines = role.ctx.thread % sizes.LINE_PACKS, plan.tile.value_chunks * CHUNK_LINES
    to = []
    for key in keys:
        row = role.dkv.iterator + Int64(key) * plan.slot_words
        to.append([row + pack * 4, row + (plan.slot_lasts + pack * 2)])
    lines = [line_at(rows + i // 2 * sizes.ROWS_CHUNK_BYTES, i % 2) for i in range(value_lines)]
    lines += [line_at(rows + plan.rope_at, i, False) for i in range(plan.lines - value_lines)]
    issue_line(accs[0], p, ds, lines[0])
    words: list[list[Any]] = [[] for _ in range(KEYS)]
    for i in cutlass.range_constexpr(plan.lines):
        if cutlass.const_expr(i + 1 < plan.lines):
            issue_line(accs[(i + 1) % 2], p, ds, lines[i + 1])
        warpgroup.wait_group(1 if i + 1 < plan.lines else 0)
        if cutlass.const_expr(i % CHUNK_LINES == 1):
            free_chunk(role, i // CHUNK_LINES, is_last)
        for h in cutlass.range_constexpr(KEYS):
            packed = pack_line(accs[i % 2], h)
            words[h] = [*words[h], *packed] if i % 2 else list(packed)
            if cutlass.const_expr(i % 2 == 1):
                store_pair(words[h], to[h], keys[h], i // 2)


@cute.jit
def dkv_all(role: Dkv) -> None:
    """Take every tile of the CTA's items."""
    ctx = role.ctx
    accs = [cute.make_rmem_tensor(OF_LINE, Float32) for _ in range(2)]
    p = cute.make_rmem_tensor(STEPS * A_WORDS, Int32)
    ds = cute.make_rmem_tensor(STEPS * A_WORDS, Int32)
    number = Int32(0)
    if cutlass.const_expr(ctx.plan.tickets):
        item, drawn = tickets.item_at(ctx, ctx.cta), Int32(0)
        while item >= 0:
            number = dkv_item(role, accs, (p, ds), item, number)
            item = tickets.next_item(ctx, drawn)
            drawn += 1
    else:
        for position in cutlass.range(ctx.cta, ctx.num_items, ctx.num_ctas, unroll=1):
            item = context.item_by_turns(ctx, position)
            number = dkv_item(role, accs, (p, ds), item, number)


@cute.jit
def dkv_item(role: Dkv, accs: Any, matrices: tuple[Any, Any], item: Int32, number: Int32) -> Int32:
    """Take every tile of an item. `matrices`: registers for P and dS. `number`: tiles of the CTA
    before this item; returned after it."""
    ctx = role.ctx
    p, ds = matrices
    tiles = context.tiles_of(ctx, item)
    line = ctx.line_of(ctx.lists.rows, item)
    if cutlass.const_expr(ctx.plan.slots):
        line = ctx.line_of(role.offsets, item)
    tile = tiles.first
    keys = read_keys(role, line, tiles, tile)
    for index in cutlass.range(tiles.count, unroll=1):
        is_last = Boolean(index + 1 == tiles.count)
        tile = context.tile_after(tile, tiles.count)
        ahead = read_keys(role, line, tiles, tile)
        # scores_full: S has been made of every chunk of Q and dO, behind role score's fences.
        ctx.memory.scores_full.wait_round(number)
        load_matrix(ctx.memory.p.address(), p, ctx.thread)
        load_matrix(ctx.memory.ds.address(), ds, ctx.thread)
        pipeline.arrive_warp(ctx.memory.scores_free, 0, ctx.thread)
        if cutlass.const_expr(ctx.plan.slots):
            block = item % ctx.row_blocks
            store_tile(role, accs, p, ds, [key * ctx.row_blocks + block for key in keys], is_last)
        else:
            add_tile(role, accs, p, ds, pairs_of(keys, ctx.thread % WARP_SIZE), is_last)
        keys = ahead
        number += 1
    return number
