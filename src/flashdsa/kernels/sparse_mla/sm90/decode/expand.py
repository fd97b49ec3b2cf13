"""Role gather for packed rows: bytes to registers, from there as f16 into the tiles.

A *part* is the 128 latent columns of a group, of the 64 keys of a tile. A thread loads 16 bytes of
each of four keys: eight threads have a key's 128, so that a warp asks for whole stretches of rows.
It holds several parts at a time: while one is expanded the next ones are on their way. The RoPE
columns stay bf16 and are copied as they are.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.cp_async import COPY_BYTES, arrive_when_copied, copy_units
from flashdsa.dsl.smem import load_words, store_words
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
from flashdsa.kernels.sparse_mla.sm90.decode.scales import (
    Factors,
    expand_word,
    factors_of_scales,
    multiply_word,
    take_power,
    take_sum,
)
from flashdsa.kernels.sparse_mla.sm90.fwd.gather import ROWS_AT_ONCE, TURNS
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
UNIT_WORDS = COPY_BYTES // 4
PART_WORDS = TURNS * UNIT_WORDS
"""Of a thread."""
TURN_BYTES = ROWS_AT_ONCE * CHUNK * BF16
"""From a thread's key in a chunk to its next one."""
WARP_ROWS = ROWS_AT_ONCE // 4
"""Keys of which a warp loads stretches at once."""
ORDER = ((0, 0), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (1, 0), (1, 1))
"""Tiles and groups of a step, in the order in which the consumers free their places."""
SECOND_TILE = len(ORDER) // 2
FREED_BY = {(0, 0): "left_free", (0, 2): "right_free", (1, 2): "right_free", (1, 0): "left_free"}
"""The first groups of the halves, and the barriers that say that their places are free."""


class Place(NamedTuple):
    """What a thread loads: a 16-byte unit of a group's 128 bytes, of keys 16 apart."""

    unit: Int32
    key: Int32  # the first


def place_of(thread: Int32) -> Place:
    """Eight neighbouring lanes have half of two keys' bytes: odd and even keys, so that what they
    write goes to all banks."""
    lane = thread % WARP_SIZE
    unit = lane % 4 + lane // 8 % 2 * 4
    return Place(unit, thread // WARP_SIZE * WARP_ROWS + lane // 4 % 2 + lane // 16 * 2)


@cute.jit
def copy_rope(role: Gatherer, slots: list[Int32], place: Place, tile: cutlass.Constexpr) -> None:
    """This thread's copies of a tile's RoPE columns, which are announced when they have come."""
    to = role.ctx.arena.address("k") + tile * TILE_BYTES + swizzled_128(place.key, place.unit)
    for turn in cutlass.range_constexpr(TURNS):
        at = turn * TURN_BYTES + (CHUNKS - 1) * CHUNK_BYTES
        row = row_of_turn(slots, tile * TURNS + turn, place.key)
        source = row_address(role, row) + place.unit * COPY_BYTES
        copy_units(to, source, row, [(at, KV_ROPE_AT)])
    arrive_when_copied(role.ctx.barriers(f"k{tile}_full").at(ROPE_PIECE))


def row_address(role: Gatherer, row: Any) -> Any:
    """Of a packed row; without meaning where it is negative."""
    return role.kv.iterator + Int64(row) * KV_ROW_BYTES


def load_or_zero(address: Any, row: Any, offset: int, words: int) -> list[Any]:
    """2 or 4 words behind an address of device memory; 0 of a negative row.

    First-level cache has no room: rows are read once.
    """
    results = ", ".join(f"{{$w{i}}}" for i in range(words))
    zeros = "".join(f"mov.b32 {{$w{i}}}, 0; " for i in range(words))
    return list(
        cute.arch.inline_ptx(
            "{ .reg .pred valid; setp.ge.s32 valid, {$r1}, 0; "
            + zeros
            + f"@valid ld.global.nc.L1::no_allocate.L2::128B.v{words}.b32 {{{results}}}, "
            f"[{{$r0}} + {offset}]; }}",
            write_only_types=[Int32] * words,
            read_only_args=[address, row],
        )
    )


def load_part(role: Gatherer, slots: list[Int32], place: Place, tile: int, group: int) -> list[Any]:
    """This thread's words of a part."""
    words = []
    for turn in range(TURNS):
        row = row_of_turn(slots, tile * TURNS + turn, place.key)
        address = row_address(role, row) + place.unit * COPY_BYTES
        words += load_or_zero(address, row, group * KV_GROUP, UNIT_WORDS)
    return words


@cute.jit
def load_scales(role: Gatherer, slots: list[Int32], tile: cutlass.Constexpr) -> list[Any]:
    """Two neighbouring scales of one of the warp's 16 keys of a tile, as words.

    Lane 2 i + j has groups 2 j and 2 j + 1 of key i of them: 4 of each turn.
    """
    lane, warp = role.ctx.thread % WARP_SIZE, role.ctx.thread // WARP_SIZE
    number = lane // 2
    key = number // WARP_ROWS * ROWS_AT_ONCE + warp * WARP_ROWS + number % WARP_ROWS
    low = cute.arch.shuffle_sync(slots[tile * MASK_WORDS], key % WARP_SIZE)
    high = cute.arch.shuffle_sync(slots[tile * MASK_WORDS + 1], key % WARP_SIZE)
    row = low if key < WARP_SIZE else high
    address = row_address(role, row) + lane % 2 * 8
    return load_or_zero(address, row, KV_SCALES_AT, 2)


@cute.jit
def write_part(
    role: Gatherer,
    words: list[Int32],
    factors: Factors,
    place: Place,
    tile: cutlass.Constexpr,
    group: cutlass.Constexpr,
) -> None:
    """A part's values to its two chunks; a unit of bytes becomes two of f16. It is announced."""
    places = places_of_part(role, place, tile, group)
    for turn in cutlass.range_constexpr(TURNS):
        nearest, rest = take_sum(factors, owner_of(place, turn, group), group % 2)
        of_unit = words[UNIT_WORDS * turn : UNIT_WORDS * (turn + 1)]
        values = [value for word in of_unit for value in expand_word(word, nearest, rest)]
        for half in cutlass.range_constexpr(2):
            to = places[half] + turn * TURN_BYTES
            store_words(to, values[UNIT_WORDS * half : UNIT_WORDS * (half + 1)])
    if factors.small:
        for turn in cutlass.range(TURNS, unroll=1):
            power = take_power(factors, owner_of(place, turn, group), group % 2)
            for half in cutlass.range_constexpr(2):
                to = places[half] + turn * TURN_BYTES
                of_sum = load_words(to, Int32)
                store_words(to, [multiply_word(of_sum[i], power) for i in range(UNIT_WORDS)])
    role.ctx.barriers(f"k{tile}_full").arrive(group)


def places_of_part(role: Gatherer, place: Place, tile: int, group: int) -> list[Any]:
    """Where the values of the thread's first key go: two units of a chunk."""
    chunk = 2 * group + place.unit // 4
    base = role.ctx.arena.address("k") + tile * TILE_BYTES + chunk * CHUNK_BYTES
    return [base + swizzled_128(place.key, place.unit % 4 * 2 + half) for half in range(2)]


def owner_of(place: Place, turn: Any, group: int) -> Any:
    """The lane that has the scales of the thread's key of a turn; see `load_scales`."""
    return (turn * WARP_ROWS + place.key % WARP_ROWS) * 2 + group // 2


@cute.jit
def gather_packed_rows(role: Gatherer) -> None:
    """All four warps: every step of the CTA."""
    ctx = role.ctx
    num_held = ctx.plan.held_parts
    warp = cute.arch.make_warp_uniform(ctx.thread // WARP_SIZE)
    lane = ctx.thread % WARP_SIZE
    place = place_of(ctx.thread)
    load_query(role)
    slots = read_slots(role, Int32(0), lane)
    scales = load_scales(role, slots, 0)
    held = [word for part in ORDER[:num_held] for word in load_part(role, slots, place, *part)]
    num_steps = find_extent(role, lane)
    for step in cutlass.range(num_steps, unroll=1):
        factors = factors_of_scales(scales)
        for n in cutlass.range_constexpr(len(ORDER)):
            tile, group = ORDER[n]
            if cutlass.const_expr(n == SECOND_TILE):
                factors = factors_of_scales(scales)
            if cutlass.const_expr(ORDER[n] in FREED_BY):
                acquire(ctx, FREED_BY[ORDER[n]], tile, step)
            if cutlass.const_expr(FREED_BY.get(ORDER[n]) == "right_free"):
                copy_rope(role, slots, place, tile)
                if warp == tile:
                    write_note(role, slots, lane, tile)
            write_part(role, held[:PART_WORDS], factors, place, tile, group)
            if cutlass.const_expr(n == 0):
                scales = load_scales(role, slots, 1)
                ahead = read_slots(role, step + 1, lane)
            if cutlass.const_expr(n == SECOND_TILE):
                scales = load_scales(role, ahead, 0)
            of_slots = ahead if cutlass.const_expr(n + num_held >= len(ORDER)) else slots
            part = ORDER[(n + num_held) % len(ORDER)]
            held = held[PART_WORDS:] + load_part(role, of_slots, place, *part)
        slots = ahead
