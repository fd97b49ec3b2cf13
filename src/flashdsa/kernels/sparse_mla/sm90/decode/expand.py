"""Role gather for packed rows: their bytes land in a tile's own right half and are expanded there.

Of a tile of nine chunks [64 keys][64 columns] the bytes of latent columns 128 c to 128 c + 127 come
into chunk 4 + c, the RoPE columns into chunk 8, where they stay. Expanded to f16, group c takes
chunks 2 c and 2 c + 1; groups 2 and 3, which take what the bytes lie in, are read by all before.

Values are e4m3 * scale in f16: the scale's mantissa first, then its power of two, so that only the
first product rounds, to 11 bits, and not at all where the scale is a power of two.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from flashdsa.dsl.cp_async import COPY_BYTES, arrive_when_copied, copy_units
from flashdsa.dsl.smem import load_words, store_words
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.sparse_mla.sm90.decode.context import EXPANDED
from flashdsa.kernels.sparse_mla.sm90.decode.gather import (
    Gatherer,
    acquire,
    find_extent,
    load_query,
    prefetch_step,
    read_slots,
    rows_of_turns,
    write_note,
)
from flashdsa.kernels.sparse_mla.sm90.fwd.gather import ROWS_AT_ONCE, TURNS, UNITS
from flashdsa.kernels.sparse_mla.sm90.fwd.plan import (
    BF16,
    CHUNK,
    CHUNK_BYTES,
    CHUNKS,
    PIECES,
    TILE_BYTES,
    TILES,
)
from flashdsa.problem import KV_GROUP, KV_ROPE_AT, KV_ROW_BYTES, KV_SCALES, KV_SCALES_AT

ROPE_PIECE = PIECES - 1
FIRST_RAW = CHUNKS - 1 - KV_SCALES
"""The chunk in which the bytes of the first group lie."""
LEAST_EXPONENT, MOST_EXPONENT = -24, 15
"""Of a power of two in f16."""
UNITS_A_THREAD = UNITS // 2
"""16-byte units of a key's group that a thread expands; its neighbour has the others."""


def raw_offset(row: Any, unit: Any) -> Any:
    """Where a unit of bytes lies in its chunk: such that eight lanes read from all banks.

    Units 2 h, 2 h + 1, 4 + 2 h and 5 + 2 h are thread h's of the key; bits 1 and 2 are swapped.
    """
    swapped = (unit & 1) | ((unit & 2) << 1) | ((unit & 4) >> 1)
    return swizzled_128(row, swapped)


@cute.jit
def copy_raw(
    role: Gatherer, rows: list[Int32], unit: Int32, row_of_turn: Int32, tile: cutlass.Constexpr
) -> None:
    """This thread's copies of a tile's bytes; both kinds of pieces are announced."""
    base = role.ctx.arena.address("k") + tile * TILE_BYTES
    raw = base + FIRST_RAW * CHUNK_BYTES + raw_offset(row_of_turn, unit)
    rope = base + (CHUNKS - 1) * CHUNK_BYTES + swizzled_128(row_of_turn, unit)
    for turn in cutlass.range_constexpr(TURNS):
        row = rows[tile * TURNS + turn]
        source = role.kv.iterator + (Int64(row) * KV_ROW_BYTES + unit * COPY_BYTES)
        at = turn * ROWS_AT_ONCE * CHUNK * BF16
        groups = [(at + c * CHUNK_BYTES, c * KV_GROUP) for c in range(KV_SCALES)]
        copy_units(raw, source, row, groups)
        copy_units(rope, source, row, [(at, KV_ROPE_AT)])
    arrive_when_copied(role.ctx.barriers("raw_full").at(tile))
    arrive_when_copied(role.ctx.barriers(f"k{tile}_full").at(ROPE_PIECE))


@cute.jit
def read_scales(role: Gatherer, slots: list[Int32], tile: cutlass.Constexpr) -> list[Float32]:
    """The scales of the key that this thread expands; zeros where its slot is not valid."""
    thread = role.ctx.thread
    key = thread // 2
    lane = key % WARP_SIZE
    low = cute.arch.shuffle_sync(slots[tile * 2], lane)
    high = cute.arch.shuffle_sync(slots[tile * 2 + 1], lane)
    row = low if key < WARP_SIZE else high
    scales = [Float32(0.0) for _ in range(KV_SCALES)]
    if row >= 0:
        place = role.kv.iterator + (Int64(row) * KV_ROW_BYTES + KV_SCALES_AT)
        scales = list(
            cute.arch.inline_ptx(
                "ld.global.nc.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                write_only_types=[Float32] * KV_SCALES,
                read_only_args=[place],
            )
        )
    return scales


@cute.jit
def factors_of(scale: Float32) -> tuple[Int32, Int32]:
    """A scale as two f16, each twice in a word: its mantissa and its power of two."""
    bits = cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[scale]
    )
    exponent = ((bits >> 23) & 255) - 127
    exponent = cutlass.min(cutlass.max(exponent, Int32(LEAST_EXPONENT)), Int32(MOST_EXPONENT))
    return twice(scale * power_of_two(-exponent)), twice(power_of_two(exponent))


def power_of_two(exponent: Any) -> Any:
    """2^exponent, of a normal number, in fp32."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};",
        write_only_types=[Float32],
        read_only_args=[(exponent + 127) << 23],
    )


def twice(value: Any) -> Any:
    """fp32 as two equal f16 in a word."""
    return cute.arch.inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


def expand_word(word: Any, mantissa: Any, power: Any) -> Any:
    """Four e4m3 times a scale, as two words of f16."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; .reg .b32 a, b; mov.b32 {low, high}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 a, low; cvt.rn.f16x2.e4m3x2 b, high; "
        "mul.rn.f16x2 a, a, {$r1}; mul.rn.f16x2 b, b, {$r1}; "
        "mul.rn.f16x2 {$w0}, a, {$r2}; mul.rn.f16x2 {$w1}, b, {$r2}; }",
        write_only_types=[Int32, Int32],
        read_only_args=[word, mantissa, power],
    )


def units_of(i: int, half: Any) -> Any:
    """This thread's i-th unit of bytes: bit 1 says whose."""
    return (i & 1) + 2 * half + 4 * (i >> 1)


def read_raw(base: Any, key: Any, half: Any, group: int) -> list[Any]:
    """This thread's bytes of a group, four units of four words."""
    chunk = base + (FIRST_RAW + group) * CHUNK_BYTES
    units = [
        load_words(chunk + raw_offset(key, units_of(i, half)), Int32) for i in range(UNITS_A_THREAD)
    ]
    return [[unit[w] for w in range(4)] for unit in units]


def write_expanded(base: Any, key: Any, half: Any, group: int, units: Any, scale: Any) -> None:
    """A group's values to its two chunks; a unit of bytes becomes two units of f16."""
    mantissa, power = factors_of(scale)
    for i, words in enumerate(units):
        values = [value for word in words for value in expand_word(word, mantissa, power)]
        chunk = base + (2 * group + (i >> 1)) * CHUNK_BYTES
        for part in range(2):
            unit = 2 * (i & 1) + 4 * half + part
            store_words(chunk + swizzled_128(key, unit), values[4 * part : 4 * part + 4])


@cute.jit
def request_tile(
    role: Gatherer,
    slots: list[Int32],
    rows: list[Int32],
    requested: Boolean,
    step: Int32,
    tile: cutlass.Constexpr,
) -> Boolean:
    """This warp's share of the tile's bytes is asked for if its right half is free by now, and was
    not before; returns whether it has been."""
    ctx = role.ctx
    if not requested:
        free = ctx.barriers("right_free").is_complete((step & 1) ^ 1, tile)
        if cute.arch.vote_all_sync(free):
            ask_for_tile(role, slots, rows, tile)
            requested = Boolean(True)
    return requested


@cute.jit
def ask_for_tile(
    role: Gatherer, slots: list[Int32], rows: list[Int32], tile: cutlass.Constexpr
) -> None:
    """The tile's bytes and its note; its right half is free."""
    thread = role.ctx.thread
    copy_raw(role, rows, thread % UNITS, thread // UNITS, tile)
    if cute.arch.make_warp_uniform(thread // WARP_SIZE) == tile:
        write_note(role, slots, thread % WARP_SIZE, tile)


@cute.jit
def expand_step(
    role: Gatherer, slots: list[Int32], rows: list[Int32], ahead: list[Int32], step: Int32
) -> None:
    """Both tiles of a step to f16; each piece is announced.

    Tile 1 is asked for as soon as it is free, which is some time in the expansion of tile 0.
    """
    ctx = role.ctx
    key, half = ctx.thread // 2, ctx.thread % 2
    warp = cute.arch.make_warp_uniform(ctx.thread // WARP_SIZE)
    scales = [read_scales(role, slots, tile) for tile in range(TILES)]
    acquire(ctx, "right_free", 0, step)
    ask_for_tile(role, slots, rows, 0)
    requested = request_tile(role, slots, rows, Boolean(False), step, 1)
    prefetch_step(role, ahead, warp, KV_ROW_BYTES)
    for tile in cutlass.range_constexpr(TILES):
        base = ctx.arena.address("k") + tile * TILE_BYTES
        full = ctx.barriers(f"k{tile}_full")
        if cutlass.const_expr(tile == 1):
            if not requested:
                acquire(ctx, "right_free", 1, step)
                ask_for_tile(role, slots, rows, 1)
        ctx.barriers("raw_full").wait(step & 1, tile)
        acquire(ctx, "left_free", tile, step)
        for group in cutlass.range_constexpr(2):
            units = read_raw(base, key, half, group)
            write_expanded(base, key, half, group, units, scales[tile][group])
            full.arrive(group)
            if cutlass.const_expr(tile == 0):
                requested = request_tile(role, slots, rows, requested, step, 1)
        third, fourth = read_raw(base, key, half, 2), read_raw(base, key, half, 3)
        # EXPANDED: all have read all bytes of the tile.
        cute.arch.barrier(barrier_id=EXPANDED, number_of_threads=WARPGROUP_SIZE)
        write_expanded(base, key, half, 2, third, scales[tile][2])
        full.arrive(2)
        write_expanded(base, key, half, 3, fourth, scales[tile][3])
        full.arrive(3)


@cute.jit
def gather_packed_rows(role: Gatherer) -> None:
    """All four warps: every step of the CTA."""
    ctx = role.ctx
    lane = ctx.thread % WARP_SIZE
    slots = read_slots(role, Int32(0), lane)
    num_steps = find_extent(role, lane)
    if num_steps > 0 and ctx.thread == 0:
        load_query(role)
    cute.arch.sync_warp()
    for step in cutlass.range(num_steps, unroll=1):
        rows = rows_of_turns(slots, ctx.thread // UNITS)
        ahead = read_slots(role, step + 1, lane)
        expand_step(role, slots, rows, ahead, step)
        slots = ahead
