"""Role gather for packed rows: bytes to registers, from there as f16 into the tiles.

A thread has half of a key's bytes of a group of 128 latent columns, 16 words, and holds two groups
at a time: while one is expanded the next ones are on their way. The RoPE columns stay bf16 and are
copied as they are.

Values are e4m3 * scale in f16: the scale's mantissa first, then its power of two, so that only the
first product rounds, to 11 bits, and not at all where the scale is a power of two.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from flashdsa.dsl.cp_async import COPY_BYTES, arrive_when_copied, copy_units
from flashdsa.dsl.smem import store_words
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.sparse_mla.sm90.decode.gather import (
    Gatherer,
    acquire,
    find_extent,
    load_query,
    read_slots,
    row_of_turn,
    write_note,
)
from flashdsa.kernels.sparse_mla.sm90.fwd.gather import ROWS_AT_ONCE, TURNS, UNITS
from flashdsa.kernels.sparse_mla.sm90.fwd.plan import (
    BF16,
    CHUNK,
    CHUNK_BYTES,
    CHUNKS,
    MASK_WORDS,
    PIECES,
    TILE_BYTES,
)
from flashdsa.problem import KV_GROUP, KV_ROPE_AT, KV_ROW_BYTES, KV_SCALES_AT

ROPE_PIECE = PIECES - 1
LEAST_EXPONENT, MOST_EXPONENT = -24, 15
"""Of a power of two in f16."""
UNIT_WORDS = COPY_BYTES // 4
UNITS_A_THREAD = UNITS // 2
"""16-byte units of a key's group that a thread expands; its neighbour has the others."""
GROUP_WORDS = UNITS_A_THREAD * UNIT_WORDS
"""Of a thread."""
ORDER = ((0, 0), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (1, 0), (1, 1))
"""Tiles and groups of a step, in the order in which the consumers free their places."""
HELD = 2
"""Groups that a thread holds."""
FREED_BY = {(0, 0): "left_free", (0, 2): "right_free", (1, 2): "right_free", (1, 0): "left_free"}
"""The first groups of the halves, and the barriers that say that their places are free."""


@cute.jit
def copy_rope(role: Gatherer, slots: list[Int32], tile: cutlass.Constexpr) -> None:
    """This thread's copies of a tile's RoPE columns, which are announced when they have come."""
    unit, number = role.ctx.thread % UNITS, role.ctx.thread // UNITS
    to = role.ctx.arena.address("k") + tile * TILE_BYTES + swizzled_128(number, unit)
    for turn in cutlass.range_constexpr(TURNS):
        row = row_of_turn(slots, tile * TURNS + turn, number)
        source = role.kv.iterator + (Int64(row) * KV_ROW_BYTES + unit * COPY_BYTES)
        at = turn * ROWS_AT_ONCE * CHUNK * BF16 + (CHUNKS - 1) * CHUNK_BYTES
        copy_units(to, source, row, [(at, KV_ROPE_AT)])
    arrive_when_copied(role.ctx.barriers(f"k{tile}_full").at(ROPE_PIECE))


@cute.jit
def row_of_key(role: Gatherer, slots: list[Int32], tile: cutlass.Constexpr) -> Int32:
    """The kv row of the key of a tile that this thread expands, negative where it is not valid."""
    key = role.ctx.thread // 2
    low = cute.arch.shuffle_sync(slots[tile * MASK_WORDS], key % WARP_SIZE)
    high = cute.arch.shuffle_sync(slots[tile * MASK_WORDS + 1], key % WARP_SIZE)
    return low if key < WARP_SIZE else high


def load_or_zero(address: Any, row: Any, offsets: Any) -> Any:
    """16 bytes at each offset from an address of device memory as words; 0 of a negative row."""
    count = len(offsets) * UNIT_WORDS
    zeros = "".join(f"mov.b32 {{$w{i}}}, 0; " for i in range(count))
    loads = "".join(
        "@valid ld.global.nc.v4.b32 {"
        + ", ".join(f"{{$w{UNIT_WORDS * n + i}}}" for i in range(UNIT_WORDS))
        + f"}}, [{{$r0}} + {offset}]; "
        for n, offset in enumerate(offsets)
    )
    return cute.arch.inline_ptx(
        "{ .reg .pred valid; setp.ge.s32 valid, {$r1}, 0; " + zeros + loads + "}",
        write_only_types=[Int32] * count,
        read_only_args=[address, row],
    )


def row_address(role: Gatherer, row: Any) -> Any:
    """Of a packed row; without meaning where it is negative."""
    return role.kv.iterator + Int64(row) * KV_ROW_BYTES


def load_group(role: Gatherer, row: Any, group: int) -> list[Any]:
    """This thread's words of a group: bit 1 of a unit's number says whose it is."""
    half = role.ctx.thread % 2
    offsets = [group * KV_GROUP + (unit & 1 | (unit & 2) << 1) * COPY_BYTES for unit in range(4)]
    return list(load_or_zero(row_address(role, row) + half * (2 * COPY_BYTES), row, offsets))


def load_scales(role: Gatherer, row: Any) -> list[Any]:
    """The scales of a row, as words."""
    return list(load_or_zero(row_address(role, row), row, [KV_SCALES_AT]))


def factors_of(bits: Any) -> tuple[Any, Any]:
    """A scale's bits as two f16, each twice in a word: its mantissa and its power of two."""
    exponent = ((bits >> 23) & 255) - 127
    exponent = cutlass.min(cutlass.max(exponent, Int32(LEAST_EXPONENT)), Int32(MOST_EXPONENT))
    return twice(as_float(bits) * power_of_two(-exponent)), twice(power_of_two(exponent))


def as_float(bits: Any) -> Any:
    """A word as fp32."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits]
    )


def power_of_two(exponent: Any) -> Any:
    """2^exponent, a normal number, in fp32."""
    return as_float((exponent + 127) << 23)


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


@cute.jit
def write_group(
    role: Gatherer,
    words: list[Int32],
    scale: Int32,
    tile: cutlass.Constexpr,
    group: cutlass.Constexpr,
) -> None:
    """A group's values to its two chunks; a unit of bytes becomes two of f16. It is announced.

    The two threads of a key write to units that differ in bit 2: eight lanes touch all banks.
    """
    key, half = role.ctx.thread // 2, role.ctx.thread % 2
    base = role.ctx.arena.address("k") + (tile * TILE_BYTES + 2 * group * CHUNK_BYTES)
    mantissa, power = factors_of(scale)
    for n in cutlass.range_constexpr(UNITS_A_THREAD):
        unit = words[UNIT_WORDS * n : UNIT_WORDS * (n + 1)]
        values = [value for word in unit for value in expand_word(word, mantissa, power)]
        for part in cutlass.range_constexpr(2):
            to = base + (n >> 1) * CHUNK_BYTES + swizzled_128(key, 2 * (n & 1) + 4 * half + part)
            store_words(to, values[UNIT_WORDS * part : UNIT_WORDS * (part + 1)])
    role.ctx.barriers(f"k{tile}_full").arrive(group)


@cute.jit
def gather_packed_rows(role: Gatherer) -> None:
    """All four warps: every step of the CTA."""
    ctx = role.ctx
    warp = cute.arch.make_warp_uniform(ctx.thread // WARP_SIZE)
    lane = ctx.thread % WARP_SIZE
    slots = read_slots(role, Int32(0), lane)
    row = row_of_key(role, slots, 0)
    scales = load_scales(role, row)
    held = [word for n in range(HELD) for word in load_group(role, row, ORDER[n][1])]
    num_steps = find_extent(role, lane)
    if num_steps > 0 and ctx.thread == 0:
        load_query(role)
    cute.arch.sync_warp()
    for step in cutlass.range(num_steps, unroll=1):
        ahead = read_slots(role, step + 1, lane)
        row_of_tile = [row, row_of_key(role, slots, 1)]
        scales_of_tile = [scales, load_scales(role, row_of_tile[1])]
        for n in cutlass.range_constexpr(len(ORDER)):
            tile, group = ORDER[n]
            if cutlass.const_expr(ORDER[n] in FREED_BY):
                acquire(ctx, FREED_BY[ORDER[n]], tile, step)
            if cutlass.const_expr(FREED_BY.get(ORDER[n]) == "right_free"):
                copy_rope(role, slots, tile)
                if warp == tile:
                    write_note(role, slots, lane, tile)
            write_group(role, held[:GROUP_WORDS], scales_of_tile[tile][group], tile, group)
            next_tile, next_group = ORDER[(n + HELD) % len(ORDER)]
            if cutlass.const_expr(n + HELD == len(ORDER)):
                row = row_of_key(role, ahead, 0)
                scales = load_scales(role, row)
            source = row if cutlass.const_expr(n + HELD >= len(ORDER)) else row_of_tile[next_tile]
            held = held[GROUP_WORDS:] + load_group(role, source, next_group)
        slots = ahead
