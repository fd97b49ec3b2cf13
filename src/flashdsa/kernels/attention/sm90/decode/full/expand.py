"""Role gather for packed rows: it copies bytes into the tiles and expands them to f16 in the tiles.

A *part* is the 128 latent columns of a group, of the 64 keys of a tile: 128 bytes of a key, which
become its rows of two chunks, 128 bytes each. The bytes are copied to where the second row will be.
A thread copies 16 bytes of each of four keys; it takes them into registers when they have come, and
writes 32 bytes of f16 for them. Eight lanes of a warp have a key's 128, so that no other warp's
bytes are written over. RoPE columns after the value stay bf16 and are copied as they are; those of
the value (`v4`) are copied to their place, and become f16 there. e2m1 have 128 bytes in two parts.

A tile's second half is on its way while the first one is expanded. Holding parts in registers until
their destinations are free was slower: such loads pass the first-level cache, which has 27 KB.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

from flashdsa.dsl.cp_async import COPY_BYTES, arrive_when_copied, copy_units
from flashdsa.dsl.pipeline import PipelineState, RingProducer
from flashdsa.dsl.row_tiles import ROWS_AT_ONCE
from flashdsa.dsl.smem import load_words, store_words
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.dsl.words import join_words, words_of
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.gather import row_of_turn, turns_of
from flashdsa.kernels.attention.sm90.core.tile import CHUNK, TILES
from flashdsa.kernels.attention.sm90.decode.full import scales as scaling
from flashdsa.kernels.attention.sm90.decode.full.gather import Before, store_masks
from flashdsa.kernels.attention.sm90.decode.full.plan import words_of_scales
from flashdsa.kernels.attention.sm90.decode.shared import context, gather
from flashdsa.kernels.attention.sm90.decode.shared.words import to_f16
from flashdsa.plan.row_tiles import ROW_BYTES
from flashdsa.problem import KV_GROUP

UNIT_WORDS = COPY_BYTES // 4
TURN_BYTES = ROWS_AT_ONCE * ROW_BYTES
"""Bytes from a thread's key in a chunk to its next one."""
WARP_ROWS = ROWS_AT_ONCE // 4
"""Keys of which a warp loads stretches at once."""
HALVES = 2
"""Halves of a tile; tile 0's low one is freed first, tile 1's high one."""
GROUPS = 2
"""Groups of a half."""
ONES = 0x7F7F7F7F
"""Four e8m0 scales of 1."""


class Half(NamedTuple):
    """Half of a tile, which is requested and expanded at once."""

    tile: Int32
    high: Int32  # 1: the high half

    @property
    def group(self) -> Int32:
        """Its first one."""
        return self.high * GROUPS


class Copies(NamedTuple):
    """Coordinates of a thread's copies: 16 of a group's 128 bytes, of keys 16 apart."""

    unit: Int32
    key: Int32  # the first


def copies_of(thread: Int32) -> Copies:
    """Eight neighbouring lanes have half of an odd and an even key: writes use all banks."""
    lane = thread % WARP_SIZE
    unit = lane % 4 + lane // 8 % 2 * 4
    return Copies(unit, thread // WARP_SIZE * WARP_ROWS + lane // 4 % 2 + lane // 16 * 2)


@cute.jit
def copy_rope(
    role: gather.Gatherer, rows: list[Int32], sources: list[Any], copies: Copies, tile: Int32
) -> None:
    """Copy this thread's part of a tile's RoPE columns; those after the value are announced."""
    geometry = role.ctx.plan.tile
    to = role.ctx.memory.k.address() + tile * geometry.bytes + swizzled_128(copies.key, copies.unit)
    for turn in cutlass.range_constexpr(turns_of(geometry)):
        at = turn * TURN_BYTES + rope_chunk(role) * geometry.chunk_bytes
        copy_units(to, sources[turn], rows[turn], [(at, role.form.rope_at)], 128)
    if cutlass.const_expr(geometry.has_rope):
        arrive_when_copied(role.ctx.tile_full(tile).at(geometry.slices - 1))


def rope_chunk(role: gather.Gatherer) -> int:
    """The chunk of the bf16 columns."""
    return role.form.columns // CHUNK


def converts_rope(role: gather.Gatherer) -> bool:
    """Whether bf16 columns are of the value: they become f16, in the last part's last chunk."""
    return bool(role.form.rope) and not role.ctx.plan.tile.has_rope


@cute.jit
def copy_groups(
    role: gather.Gatherer, rows: list[Int32], sources: list[Any], copies: Copies, half: Half
) -> None:
    """Copy this thread's part of a half: the bytes of two groups, each to the second of its chunks.
    `rows`, `sources`: of kv, one a turn: their numbers, and addresses of the thread's 16 bytes."""
    to = bytes_of_half(role, copies, half)
    tile = role.ctx.plan.tile
    form = role.form
    # A half of e2m1 has as many bytes as a part of e4m3; a part with bf16 columns is not like the
    # others.
    in_pairs = 1 if form.fp4 else GROUPS - converts_rope(role)
    group_bytes = KV_GROUP * form.code_bytes // form.columns
    for turn in cutlass.range_constexpr(turns_of(tile)):
        at = turn * TURN_BYTES + tile.chunk_bytes
        copy_units(
            to,
            sources[turn] + half.group * group_bytes,
            rows[turn],
            [(at + 2 * i * tile.chunk_bytes, i * KV_GROUP) for i in range(in_pairs)],
            128,
        )
        if cutlass.const_expr(converts_rope(role) and not form.fp4):
            # The last part's bytes come into its first chunk: the second one has bf16 columns.
            copy_units(
                to - half.high * tile.chunk_bytes,
                sources[turn] + half.group * KV_GROUP,
                rows[turn],
                [(at + 2 * tile.chunk_bytes, KV_GROUP)],
                128,
            )
    if cutlass.const_expr(converts_rope(role)):
        if half.high == 1:
            copy_rope(role, rows, sources, copies, half.tile)
    cute.arch.cp_async_commit_group()


def bytes_at(copies: Copies) -> Any:
    """Offset of the thread's 16 bytes of its first key in a chunk, without a bank conflict."""
    return copies.key * KV_GROUP + (copies.unit ^ (copies.key % 2 * 4)) * COPY_BYTES


def bytes_of_half(role: gather.Gatherer, copies: Copies, half: Half) -> Any:
    """Address of the thread's 16 bytes of its first key in the first chunk of a half."""
    chunk, tile = 2 * half.group, role.ctx.plan.tile
    k = role.ctx.memory.k.address()
    return k + half.tile * tile.bytes + chunk * tile.chunk_bytes + bytes_at(copies)


@cute.jit
def take_part(
    role: gather.Gatherer, copies: Copies, half: Half, number: cutlass.Constexpr
) -> list[Any]:
    """Load this thread's words of a part, which it has copied. `number`: of the half's group."""
    at = bytes_of_half(role, copies, half)
    tile = role.ctx.plan.tile
    if cutlass.const_expr(converts_rope(role) and number == 1):
        at = at - half.high * tile.chunk_bytes
    words = []
    for turn in cutlass.range_constexpr(turns_of(tile)):
        unit = load_words(at + (2 * number + 1) * tile.chunk_bytes + turn * TURN_BYTES, Int32)
        words += [unit[i] for i in range(UNIT_WORDS)]
    return words


@cute.jit
def load_scales(role: gather.Gatherer, slots: list[Int32], slot: Int32) -> list[Any]:
    """Load the scales of two neighbouring parts of one of the warp's 16 keys of a tile, as words.
    Lane 2 i + j has parts 2 j and 2 j + 1 of key i of them: 4 of each turn. `slot`: the tile's
    first. Of two formats the words are as many as the longer one's."""
    lane, warp = role.ctx.thread % WARP_SIZE, role.ctx.thread // WARP_SIZE
    number = lane // 2
    key = number // WARP_ROWS * ROWS_AT_ONCE + warp * WARP_ROWS + number % WARP_ROWS
    low = cute.arch.shuffle_sync(slots[0], key % WARP_SIZE)
    high = cute.arch.shuffle_sync(slots[1], key % WARP_SIZE)
    row = low if key < WARP_SIZE else high
    if cutlass.const_expr(not role.ctx.plan.mixed):
        return load_words_of_scales(role, row, slot, lane)
    scales = [Int32(0)] * role.ctx.plan.scale_words
    if gather.has_extra_form(role, slot):
        scales = load_words_of_scales(gather.of_extra(role), row, slot, lane)
    else:
        scales = load_words_of_scales(role, row, slot, lane)
    return scales


@cute.jit
def load_words_of_scales(role: gather.Gatherer, row: Int32, slot: Int32, lane: Int32) -> list[Any]:
    """Load a lane's words of the scales of a row."""
    form, words = role.form, words_of_scales(role.form)
    address = gather.scales_address(role, row, gather.pages_of(role, slot)) + lane % 2 * (4 * words)
    # No power is missing in those of a slot without a row: see `Factors.small`.
    otherwise = ONES if form.scale == "e8m0" else 0
    found = gather.load_or(address, row, 0 if form.split else form.scales_at, words, otherwise)
    more = role.ctx.plan.scale_words - words
    return found + [Int32(0)] * more


@cute.jit
def write_part(
    role: gather.Gatherer,
    words: list[Int32],
    sums: list[Int32],
    factors: scaling.Factors,
    copies: Copies,
    half: Half,
    number: cutlass.Constexpr,
) -> None:
    """Write a part's values to its two chunks, and announce it; 16 bytes become 32 of f16."""
    addresses = addresses_of_part(role, copies, half, number)
    form = role.form
    expand = scaling.expand_by_power if form.scale == "e8m0" else scaling.expand_word
    # The last part's second chunk has the bf16 columns.
    has_rope = converts_rope(role) and number == 1
    is_coded = Boolean(True)
    if cutlass.const_expr(has_rope):
        is_coded = (half.high == 0) | (copies.unit < 4)
        if is_coded:
            write_values(role, words, sums, addresses, expand)
    else:
        write_values(role, words, sums, addresses, expand)
    if factors.small:
        for turn in cutlass.range(turns_of(role.ctx.plan.tile), unroll=1):
            owner = owner_of(copies, turn, half)
            if cutlass.const_expr(form.scale == "e8m0"):
                power = scaling.take_rest(factors, owner, form, number, copies.unit)
            else:
                power = scaling.take_power(factors, owner, number)
            if cutlass.const_expr(has_rope):
                if is_coded:
                    multiply_values(addresses, turn, power)
            else:
                multiply_values(addresses, turn, power)
    if cutlass.const_expr(has_rope):
        if half.high == 1:
            convert_rope(role, copies, half.tile)
    role.ctx.tile_full(half.tile).arrive(half.group + number)


@cute.jit
def multiply_values(addresses: list[Int32], turn: Int32, power: Int32) -> None:
    """Multiply a turn's values, which this thread has written, by a power of two."""
    for side in cutlass.range_constexpr(2):
        to = addresses[side] + turn * TURN_BYTES
        values = load_words(to, Int32)
        store_words(to, [scaling.multiply_word(values[i], power) for i in range(UNIT_WORDS)])


@cute.jit
def write_values(
    role: gather.Gatherer,
    words: list[Int32],
    factors: list[Int32],
    addresses: list[Int32],
    expand: cutlass.Constexpr,
) -> None:
    """Write a part's values: each word expanded with its turn's two factors."""
    for turn in cutlass.range_constexpr(turns_of(role.ctx.plan.tile)):
        first, second = scaling.both_of_sum(factors[turn])
        of_unit = words[UNIT_WORDS * turn : UNIT_WORDS * (turn + 1)]
        values = [value for word in of_unit for value in expand(word, first, second)]
        for side in cutlass.range_constexpr(2):
            to = addresses[side] + turn * TURN_BYTES
            store_words(to, values[UNIT_WORDS * side : UNIT_WORDS * (side + 1)])


@cute.jit
def write_half(
    role: gather.Gatherer, words: list[Int32], scales: list[Int32], copies: Copies, half: Half
) -> None:
    """Write a half's values of e2m1, and announce both parts; 16 bytes become 64 of f16. `scales`:
    two of each turn, in f16."""
    tile = role.ctx.plan.tile
    chunk = 2 * half.group + copies.unit // 2
    base = role.ctx.memory.k.address() + half.tile * tile.bytes + chunk * tile.chunk_bytes
    for turn in cutlass.range_constexpr(turns_of(tile)):
        both = scaling.both_of_sum(scales[turn])
        for i in cutlass.range_constexpr(UNIT_WORDS):
            to = base + swizzled_128(copies.key, copies.unit % 2 * 4 + i) + turn * TURN_BYTES
            values = scaling.expand_e2m1(words[UNIT_WORDS * turn + i], both[i // 2])
            if cutlass.const_expr(converts_rope(role)):
                if chunk != rope_chunk(role):
                    store_words(to, values)
            else:
                store_words(to, values)
    if cutlass.const_expr(converts_rope(role)):
        # The last chunk has the bf16 columns.
        if half.high == 1:
            convert_rope(role, copies, half.tile)
    for number in cutlass.range_constexpr(GROUPS):
        role.ctx.tile_full(half.tile).arrive(half.group + number)


@cute.jit
def convert_rope(role: gather.Gatherer, copies: Copies, tile: Int32) -> None:
    """Convert this thread's bf16 columns of a tile, which have come, to f16 in their place."""
    geometry = role.ctx.plan.tile
    at = role.ctx.memory.k.address() + tile * geometry.bytes + swizzled_128(copies.key, copies.unit)
    at = at + rope_chunk(role) * geometry.chunk_bytes
    for turn in cutlass.range_constexpr(turns_of(geometry)):
        columns = load_words(at + turn * TURN_BYTES, Int32)
        store_words(at + turn * TURN_BYTES, [to_f16(columns[i]) for i in range(UNIT_WORDS)])


def take_factors(
    role: gather.Gatherer, factors: scaling.Factors, copies: Copies, half: Half, number: int
) -> list[Any]:
    """All lanes: two factors of each of the thread's keys in a part, for its 16 columns."""
    form, taken = role.form, []
    for turn in range(turns_of(role.ctx.plan.tile)):
        owner = owner_of(copies, turn, half)
        if form.fp4:
            taken.append(scaling.take_pair(factors.scales, owner, copies.unit))
        elif form.scale == "e8m0":
            taken.append(scaling.take_first(factors, owner, form, number, copies.unit))
        else:
            taken.append(scaling.take_sum(factors, owner, number))
    return taken


def addresses_of_part(role: gather.Gatherer, copies: Copies, half: Half, number: int) -> list[Any]:
    """Addresses of the values of the thread's first key: twice 16 bytes of a chunk."""
    chunk, tile = 2 * (half.group + number) + copies.unit // 4, role.ctx.plan.tile
    base = role.ctx.memory.k.address() + half.tile * tile.bytes + chunk * tile.chunk_bytes
    return [base + swizzled_128(copies.key, copies.unit % 4 * 2 + side) for side in range(2)]


def owner_of(copies: Copies, turn: Any, half: Half) -> Any:
    """The lane that has the scales of the thread's key of a turn; see `load_scales`."""
    return (turn * WARP_ROWS + copies.key % WARP_ROWS) * 2 + half.high


def addresses_of_turns(
    role: gather.Gatherer, slots: list[Any], rows: list[Any], pages: Any, copies: Copies
) -> list[Any]:
    """Addresses of the thread's 16 bytes of its key of each turn. Where rows are looked up in
    pages, a lane does that for its own slots, and the lanes that copy a row get it from there."""
    unit = copies.unit * COPY_BYTES
    if pages is None:
        return [gather.row_address(role, row) + unit for row in rows]
    offsets = [words_of(gather.offset_in_pages(role, row, pages)) for row in slots]
    addresses = []
    for turn in range(len(rows)):
        halves = [
            row_of_turn([offset[i] for offset in offsets], turn, copies.key) for i in range(2)
        ]
        addresses.append(pages.first + join_words(*halves) + unit)
    return addresses


@cute.jit
def copy_tile(
    role: gather.Gatherer, slots: list[Int32], copies: Copies, tile: Int32, use: Int32, slot: Int32
) -> None:
    """Copy this thread's part of a tile, a half when it is free; write which keys are valid.
    `slots`: the lane's of the tile: lane, lane + 32. `use`: number of the tile's use by the CTA.
    `slot`: the tile's first."""
    ctx = role.ctx
    turns = turns_of(ctx.plan.tile)
    rows = [row_of_turn(slots, turn, copies.key) for turn in range(turns)]
    pages = gather.pages_of(role, slot)
    sources = addresses_of_turns(role, slots, rows, pages, copies)
    for number in cutlass.range_constexpr(HALVES):
        half = Half(tile, number ^ tile)
        # The consumer has read the half in the step before, and with it the masks.
        ring = RingProducer(ctx.tile_full(tile), ctx.half_free(half.high))
        ring.acquire(PipelineState(tile, ctx.phase(use)))
        copy_groups(role, rows, sources, copies, half)
    if cutlass.const_expr(ctx.plan.tile.has_rope):
        copy_rope(role, rows, sources, copies, tile)
    if ctx.thread // WARP_SIZE == tile:
        store_masks(role, slots, ctx.thread % WARP_SIZE, tile)


@cute.jit
def expand_tile(
    role: gather.Gatherer, factors: scaling.Factors, copies: Copies, tile: Int32
) -> None:
    """Expand this thread's share of a tile, as its halves come."""
    for number in cutlass.range(HALVES, unroll=1):
        half = Half(tile, number ^ tile)
        parts = 1 if role.form.fp4 else GROUPS
        sums = [take_factors(role, factors, copies, half, i) for i in range(parts)]
        if number == 0:
            cute.arch.cp_async_wait_group(1)
        else:
            cute.arch.cp_async_wait_group(0)
        for i in cutlass.range_constexpr(parts):
            words = take_part(role, copies, half, i)
            # The values overwrite bytes that other lanes of the warp have read.
            cute.arch.sync_warp()
            if cutlass.const_expr(role.form.fp4):
                write_half(role, words, sums[i], copies, half)
            else:
                write_part(role, words, sums[i], factors, copies, half, i)


@cute.jit
def gather_tile(
    role: gather.Gatherer,
    slots: list[Int32],
    next_slots: list[Int32],
    scales: list[Any],
    copies: Copies,
    tile: Int32,
    use: Int32,
    slot: Int32,
) -> list[Any]:
    """Copy and expand a tile; return the scales of the next one, whose slots are `next_slots`.
    `scales`: this tile's. Others as of `copy_tile`."""
    copy_tile(role, slots, copies, tile, use, slot)
    factors = scaling.factors_of_scales(scales[: words_of_scales(role.form)], role.form)
    following = load_scales(gather.of_first(role), next_slots, slot + role.ctx.plan.tile.keys)
    expand_tile(role, factors, copies, tile)
    return following


@cute.jit
def gather_packed_rows(role: gather.Gatherer, before: Before, asked: gather.Asked) -> Int32:
    """All four warps: gather every step of a stretch; return its tiles up to those of the last step
    with a valid slot. The code is loops, as code that runs once costs most. `asked`: result of
    `ask_ends`."""
    ctx = role.ctx
    lane = ctx.thread % WARP_SIZE
    copies = copies_of(ctx.thread)
    mask_words = ctx.plan.tile.mask_words
    slots, last = gather.slots_of_ends(role, asked, lane)
    scales = load_scales(role, slots[:mask_words], ctx.first_slot)
    num_tiles = gather.find_extent(role, last, lane)
    for step in cutlass.range(context.steps_of(num_tiles), unroll=1):
        # One list's are cheap to look at, and registers to wait in are few.
        waits = cutlass.const_expr(role.sources is not None)
        ask = gather.ask_slots if waits else gather.read_slots
        next_slots = ask(role, step + 1, lane)
        for tile in cutlass.range(cutlass.min(num_tiles - step * TILES, TILES), unroll=1):
            of_tile, of_next = slots[:mask_words], slots[mask_words:]
            if tile == 1:
                # What names the next step's rows has come while tile 0 was expanded.
                if cutlass.const_expr(waits):
                    next_slots = gather.rows_of_slots(role, step + 1, next_slots, lane)
                of_tile, of_next = slots[mask_words:], next_slots[:mask_words]
            slot = ctx.first_slot + step * ctx.plan.tile.step_keys + tile * ctx.plan.tile.keys
            use = before.use(tile, step)
            if cutlass.const_expr(ctx.plan.mixed) and gather.has_extra_form(role, slot):
                extra = gather.of_extra(role)
                scales = gather_tile(extra, of_tile, of_next, scales, copies, tile, use, slot)
            else:
                scales = gather_tile(role, of_tile, of_next, scales, copies, tile, use, slot)
        slots = next_slots
    return num_tiles
