"""dKV += the rows of a part's slots: those of a key one after another, in the groups' order.

Float additions do not commute with rounding; the same order every time gives the same bits.

load                         | add
---------------------------- | ---------------------------------
a key's dKV, and first rows  |
further rows, some a stage   | dKV + a row after another
the next key's ...           | dKV is written behind the last row

Eight fp32 of dKV in twelve bytes: 11 bits each, and the exponent of the largest.

A number is off by at most 2^-10 of the largest one of its eight. All eight become NaN if one of
them is not finite.

The numbers lie one after the other in 96 bits, then the exponent. Six of them can be masked without
a shift: with the exponent of a power of two above them they are an fp32.
"""

import struct
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl import pipeline, ptx, smem, tma
from flashdsa.dsl.grids import follow_grid, launch_ctas, place_in_grid
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.warp import lowest_bit
from flashdsa.kernels.attention.sm90.bwd_per_item import plan as sizes
from flashdsa.kernels.attention.sm90.bwd_per_item import slot_offsets

NUMBERS = 8
WORDS = 3
BITS = 11
LEAST_EXPONENT = 9
"""Least exponent, biased; numbers that are smaller have the steps of this one."""
NOT_FINITE = 255
_ZERO = 1 << BITS - 1
_MASK = (1 << BITS) - 1
_MAGIC = 0x4B000000
"""Bits of 2^23: the low bits of a sum with it are the other number as an integer."""
_BIASED_ZERO = f"0f{_MAGIC + _ZERO:08X}"
_LARGEST_SCALE = 263
"""Largest scale, biased: the largest number times 2^(263 - 127 - its own exponent) is below
2^10."""
_PLACES = ((0, 0), (0, BITS), (0, 22), (1, 1), (1, 12), (1, 23), (2, 2), (2, 13))
"""The word and the bit with which each number begins; two of them end in the next word."""
_EXPONENT_BIT = 24
"""First bit of the exponent in the last word."""


def _words_of_zeros(exponent: int) -> tuple[int, ...]:
    bits = exponent << 32 * (WORDS - 1) + _EXPONENT_BIT
    for word, bit in _PLACES:
        bits |= _ZERO << 32 * word + bit
    words = (bits >> 32 * word & 0xFFFFFFFF for word in range(WORDS))
    return tuple(word - (1 << 32) if word >> 31 else word for word in words)


NOTHING = _words_of_zeros(LEAST_EXPONENT)
"""Eight zeros."""
_NOT_FINITE_WORDS = _words_of_zeros(NOT_FINITE)
"""Zeros times infinity."""


def _float_bits(value: float) -> int:
    return int.from_bytes(struct.pack(">f", value))


def pack_eight(values: list[Any]) -> list[Any]:
    """Pack eight fp32 into three words."""
    largest = "abs.f32 m, {$r0}; " + "".join(
        f"abs.f32 t, {{$r{i}}}; max.NaN.f32 m, m, t; " for i in range(1, NUMBERS)
    )
    exponent = (
        # The exponent is the largest one's after rounding, so that it is below 2^10 then too.
        f"mov.b32 e, m; add.u32 e, e, {1 << 23 - BITS + 1}; shr.u32 e, e, 23; "
        f"min.u32 e, e, {NOT_FINITE}; max.u32 e, e, {LEAST_EXPONENT}; "
        f"sub.u32 f, {_LARGEST_SCALE}, e; shl.b32 f, f, 23; mov.b32 s, f; "
    )
    numbers = "".join(
        f"fma.rn.f32 t, {{$r{i}}}, s, {_BIASED_ZERO}; mov.b32 u{i}, t; " for i in range(NUMBERS)
    )
    words = ["", "", f"shl.b32 w2, e, {_EXPONENT_BIT}; "]
    # The part of 2^23 that is not shifted out, to be subtracted.
    magics = [0] * WORDS
    for i, (word, bit) in enumerate(_PLACES):
        words[word] += f"shl.b32 f, u{i}, {bit}; add.u32 w{word}, w{word}, f; "
        magics[word] += _MAGIC << bit
        if bit + BITS > 32:
            words[word + 1] += f"shr.u32 f, u{i}, {32 - bit}; add.u32 w{word + 1}, w{word + 1}, f; "
            magics[word + 1] += _MAGIC >> 32 - bit
    first = "mov.b32 w0, 0; mov.b32 w1, 0; "
    last = f"setp.eq.u32 bad, e, {NOT_FINITE}; " + "".join(
        f"sub.u32 w{w}, w{w}, {magics[w] & 0xFFFFFFFF}; "
        f"selp.b32 {{$w{w}}}, {_NOT_FINITE_WORDS[w]}, w{w}, bad; "
        for w in range(WORDS)
    )
    registers = (
        "{ .reg .pred bad; .reg .f32 m, s, t; "
        ".reg .b32 e, f, u0, u1, u2, u3, u4, u5, u6, u7, w0, w1, w2; "
    )
    return ptx.words(
        registers + largest + exponent + numbers + first + "".join(words) + last + "}",
        WORDS,
        *values,
    )


def add_packed(total: list[Any], words: list[Any]) -> list[Any]:
    """Add the eight numbers of three words to `total`, each sum rounded once."""
    names = [f"{{$r{NUMBERS + word}}}" for word in range(WORDS)]
    parts = []
    for i, (word, bit) in enumerate(_PLACES):
        source, place = names[word], bit
        if bit + BITS > 32:
            parts.append(f"shf.r.clamp.b32 u, {names[word]}, {names[word + 1]}, {bit}; ")
            source, place = "u", 0
        elif bit + BITS > 23:
            source, place = "last", bit - 1
        # The number's lowest bit is 2^-9 with this exponent, and 2^10 of them are 2.
        power = 14 - place
        biased_zero = f"0f{_float_bits(2.0**power + 2.0):08X}"
        parts.append(
            f"and.b32 u, {source}, {_MASK << place}; or.b32 u, u, {127 + power << 23}; "
            f"mov.b32 t, u; sub.f32 t, t, {biased_zero}; fma.rn.f32 {{$w{i}}}, t, s, {{$r{i}}}; "
        )
    return ptx.numbers(
        "{ .reg .f32 s, t; .reg .b32 u, last; "
        f"shr.u32 last, {names[-1]}, 1; and.b32 u, last, {0xFF << 23}; mov.b32 s, u; "
        + "".join(parts)
        + "}",
        NUMBERS,
        *total,
        *words,
    )


SM_CTAS = 6
"""CTAs on each streaming multiprocessor that sum keys out of order."""
AHEAD = 4
"""Rows that a thread loads before it adds the first."""
QUAD = 4
HALVES = 2
PAIR_LINES = 2
LANES, LOOKS = 8, 8
"""Lanes of the last warp; keys that each of them looks at together."""


class Sums(NamedTuple):
    """The rows of a part, and where their sums go; see `launch_sums`."""

    dkv: cute.Tensor
    slots: cute.Tensor
    offsets: slot_offsets.Offsets
    number: Int32
    blocks: Int32
    zero: Int32


def dim_of(thread: Any) -> Any:
    """The first dim of the thread's pack, in the order of `plan.slot_words`."""
    pack, line = thread // PAIR_LINES, thread % PAIR_LINES
    return (
        pack // sizes.LINE_PACKS * PAIR_LINES + line
    ) * sizes.LINE_DIMS + pack % sizes.LINE_PACKS * QUAD


def halves_of(row: Any, pack: Any) -> list[Any]:
    """Pointers to the pack's dims of a row of dKV: four, and four behind them."""
    left = row + dim_of(pack)
    return [(left + half * (sizes.LINE_DIMS // HALVES)).to_llvm_ptr() for half in range(HALVES)]


@cute.jit
def load_dims(acc: cute.Tensor, row: Any, pack: Any) -> None:
    """Load the pack's dims of a row of dKV."""
    for half, at in enumerate(halves_of(row, pack)):
        four = prims.load_ext(at, dtype=Float32, count=QUAD)
        for i in cutlass.range_constexpr(QUAD):
            acc[half * QUAD + i] = four[i]


@cute.jit
def store_dims(acc: cute.Tensor, row: Any, pack: Any) -> None:
    """Store the pack's dims of a row of dKV."""
    for half, at in enumerate(halves_of(row, pack)):
        own = [acc[half * QUAD + i] for i in range(QUAD)]
        prims.store_ext(cutlass.Vector.from_elements(own, Float32), at)


@cute.jit
def add_rows(acc: cute.Tensor, rows: Any, count: Int32, pack: Any, plan: cutlass.Constexpr) -> None:
    """Add `count` rows, one after another, to acc: the pack's dims of a row of dKV. A row's words
    are loaded AHEAD rows before they are added, into the registers of the words just added: ptxas
    moves successive loads after the additions, to save registers. `rows`: pointer to the words of
    the first row; count > 0."""
    words = cute.make_rmem_tensor(AHEAD * WORDS, Int32)
    for i in cutlass.range_constexpr(AHEAD):
        load_row(words, i, rows, cutlass.min(Int32(i), count - 1), pack, plan)
    for base in cutlass.range(0, count, AHEAD, unroll=1):
        for i in cutlass.range_constexpr(AHEAD):
            there = base + i < count
            own = [words[WORDS * i + w] if there else Int32(NOTHING[w]) for w in range(WORDS)]
            total = add_packed([acc[j] for j in range(NUMBERS)], own)
            for j in cutlass.range_constexpr(NUMBERS):
                acc[j] = total[j]
            load_row(words, i, rows, cutlass.min(base + (AHEAD + i), count - 1), pack, plan)


@cute.jit
def load_row(
    words: cute.Tensor,
    place: cutlass.Constexpr,
    rows: Any,
    number: Int32,
    pack: Any,
    plan: cutlass.Constexpr,
) -> None:
    """Load the pack's words of a row, to index `place` of those in flight."""
    row = rows + number * plan.slot_words
    two = prims.load_ext((row + pack * (WORDS - 1)).to_llvm_ptr(), dtype=Int32, count=WORDS - 1)
    words[WORDS * place] = two[0]
    words[WORDS * place + 1] = two[1]
    words[WORDS * place + 2] = (row + (plan.slot_lasts + pack)).load()


@cute.kernel
def sum_kernel(x: Sums, plan: cutlass.Constexpr):
    """Sum the keys of many rows as CTAs draw them, then those of few by turns."""
    thread, _, _ = cute.arch.thread_idx()
    memory = Memory.begin(plan.sums)
    follow_grid()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        if thread == 0:
            load_all(x, memory, plan)
    else:
        add_all(x, memory, thread - plan.sums.role("load").threads, plan)


@cute.jit
def load_all(x: Sums, memory: Memory, plan: cutlass.Constexpr) -> None:
    """Role load, of which one thread works."""
    _, cta, num_ctas = place_in_grid()
    offsets, chunk = x.offsets, Int32(0)
    listed, ticket = offsets.cursors[x.number, slot_offsets.LISTED], Int32(cta)
    while ticket < listed:
        cursor = offsets.cursors.iterator + (sizes.CURSORS * x.number + slot_offsets.TAKEN)
        taken = cute.arch.atomic_add(cursor, Int32(1), sem="relaxed", scope="gpu")
        chunk = load_key(x, memory, slot_offsets.listed_key(offsets, ticket), chunk, plan)
        ticket = num_ctas + taken
    few, last = offsets.cursors[x.number, slot_offsets.FEW], Int32(offsets.keys.shape[0]) - 1
    rows = few_key(offsets, last, Int32(cta), few)
    for place in cutlass.range(cta, few, num_ctas, unroll=1):
        # Asked for before it is needed.
        following = few_key(offsets, last, place + num_ctas, few)
        chunk = load_key(x, memory, rows, chunk, plan)
        rows = following
    ring = pipeline.RingProducer(memory.rows_full, memory.rows_free)
    at = ring.state(chunk)
    ring.acquire(at)
    describe(memory, at.stage, Int32(0), Int32(0), Int32(0))
    # rows_full[stage]: a chunk without rows ends role add.
    ring.commit(at.stage)


def few_key(
    offsets: slot_offsets.Offsets, last: Int32, place: Int32, few: Int32
) -> slot_offsets.ListedKey:
    """The key at that place among those of few rows; any, if it has none."""
    return slot_offsets.listed_key(
        offsets, last - cutlass.max(cutlass.min(place, few - 1), Int32(0))
    )


@cute.jit
def describe(memory: Memory, stage: Int32, key: Int32, rows: Int32, ends: Int32) -> None:
    """Store a chunk's description."""
    smem.store_words(description_at(memory, stage), [key, rows, ends, Int32(0)])


def description_at(memory: Memory, stage: Int32) -> Int32:
    """The shared memory address of a stage's description."""
    return memory.chunks.address() + stage * (sizes.CHUNK_WORDS * sizes.WORD_BYTES)


@cute.jit
def load_key(
    x: Sums, memory: Memory, rows: slot_offsets.ListedKey, chunk: Int32, plan: cutlass.Constexpr
) -> Int32:
    """Load a key's dKV and rows, from that chunk on; return the number of the chunk behind them."""
    sums, ring = plan.sums, pipeline.RingProducer(memory.rows_full, memory.rows_free)
    count = rows.count * x.blocks
    before = Int32(sizes.FIRST) if x.zero == 0 else Int32(sizes.FIRST | sizes.FROM_ZERO)
    source = x.slots.iterator + Int64(rows.first * x.blocks) * plan.slot_words
    for base in cutlass.range(0, count, sums.chunk_rows, unroll=1):
        own = cutlass.min(count - base, Int32(sums.chunk_rows))
        at = ring.state(chunk)
        # rows_free[stage]: role add has read the chunk before.
        ring.acquire(at)
        ends = (before if base == 0 else Int32(0)) | (
            Int32(sizes.LAST) if base + own == count else Int32(0)
        )
        describe(memory, at.stage, rows.key, own, ends)
        size = own * sums.slot_bytes
        has_dkv = base == 0 and x.zero == 0
        head = Int32(sums.dkv_bytes) if has_dkv else Int32(0)
        # rows_full[stage]: the description, which this thread has stored, and all bytes.
        barrier = ring.expect(at.stage, size + head)
        to = memory.rows.bytes() + at.stage * sums.stage_bytes
        if has_dkv:
            dkv = x.dkv.iterator + Int64(rows.key) * plan.tile.d_qk
            tma.load_bytes(to, dkv, head, barrier)
        tma.load_bytes(to + sums.dkv_bytes, source + Int64(base) * plan.slot_words, size, barrier)
        chunk += 1
    return chunk


@cute.jit
def add_all(x: Sums, memory: Memory, thread: Int32, plan: cutlass.Constexpr) -> None:
    """Role add: a pack a thread."""
    sums, ring = plan.sums, pipeline.RingConsumer(memory.rows_full, memory.rows_free)
    # The last warp's other threads do what its last pack's thread does, and store nothing.
    pack = cutlass.min(thread, Int32(plan.packs - 1))
    acc = cute.make_rmem_tensor(NUMBERS, Float32)
    acc.fill(0.0)
    chunk, rows = Int32(0), Int32(1)
    while rows > 0:
        at = ring.state(chunk)
        ring.wait(at)
        description = smem.load_words(description_at(memory, at.stage), Int32)
        key, rows, ends = (Int32(description[i]) for i in range(sizes.CHUNK_WORDS - 1))
        stage = memory.rows.bytes() + at.stage * sums.stage_bytes
        if ends & sizes.FROM_ZERO != 0:
            acc.fill(0.0)
        elif ends & sizes.FIRST != 0:
            load_dims(acc, cute.recast_ptr(stage, dtype=Float32), pack)
        if rows > 0:
            first = cute.recast_ptr(stage + sums.dkv_bytes, dtype=Int32)
            add_rows(acc, first, rows, pack, plan)
        # Orders the reads before the copy that may overwrite the stage.
        cute.arch.fence_proxy("async.shared", space="cta")
        # rows_free[stage]: this thread has read the chunk. Each arrives for itself: racecheck does
        # not see what others did before one arrives for all.
        ring.release(at.stage)
        if ends & sizes.LAST != 0 and thread < plan.packs:
            store_dims(acc, x.dkv.iterator + Int64(key) * plan.tile.d_qk, pack)
        chunk += 1


@cute.kernel
def sum_unordered_kernel(x: Sums, plan: cutlass.Constexpr):
    """Sum the rows of keys out of order, in their order: each CTA those of its keys."""
    follow_grid()
    thread, cta, num_ctas = place_in_grid()
    lane = cute.arch.lane_idx() % LANES
    count = x.offsets.cursors[x.number, slot_offsets.OUT_OF_ORDER]
    acc = cute.make_rmem_tensor(NUMBERS, Float32)
    for base in cutlass.range(0, count, LOOKS * LANES, unroll=1):
        keys = []
        for look in cutlass.range_constexpr(LOOKS):
            row = base + look * LANES + lane
            keys.append(x.offsets.owners[row, 0] if row < count else Int32(-1))
        for look in cutlass.range_constexpr(LOOKS):
            mine = keys[look] >= 0 and keys[look] % num_ctas == cta
            found = cute.arch.vote_ballot_sync(mine) & ((1 << LANES) - 1)
            while found != 0:
                place = lowest_bit(found)
                key = cute.arch.shuffle_sync(keys[look], place)
                first = Int64((base + look * LANES + place) * x.blocks) * plan.slot_words
                dkv = x.dkv.iterator + Int64(key) * plan.tile.d_qk
                load_dims(acc, dkv, thread)
                add_rows(acc, x.slots.iterator + first, x.blocks, thread, plan)
                store_dims(acc, dkv, thread)
                found = found & (found - 1)


@cute.jit
def launch_sums(x: Sums, num_sms: Int32, plan: cutlass.Constexpr, stream: Any):
    """Launch on `stream`. `x`: dkv (S_kv, 576) fp32, added to. slots (rows, plan.slot_words) int32.
    offsets of the part `number`. blocks: row blocks of a group, each of which has a row for each
    key: row * blocks, row * blocks + 1, ... zero: 1 if all of dkv is 0, which is not read then."""
    threads, sm_ctas = plan.sums.threads, plan.sums.sm_ctas
    room: Any = {"sm_ctas": sm_ctas, "carveout": sizes.CARVEOUT}
    launch_ctas(sum_kernel(x, plan), num_sms * sm_ctas, threads, stream, use_pdl=True, **room)
    launch_ctas(sum_unordered_kernel(x, plan), num_sms * SM_CTAS, plan.packs, stream, use_pdl=True)
