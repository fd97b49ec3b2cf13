"""dKV += the rows of a part's slots: those of a key one after another, in the groups' order.

Float additions do not commute with rounding; the same order every time gives the same bits.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.warp import lowest_bit
from flashdsa.kernels.attention.sm90.bwd_per_item.ordered_slots.octets import (
    NOTHING,
    NUMBERS,
    WORDS,
    add_packed,
)
from flashdsa.kernels.attention.sm90.bwd_per_item.ordered_slots.places import (
    LISTED,
    OUT_OF_ORDER,
    TAKEN,
    Places,
)
from flashdsa.kernels.attention.sm90.bwd_per_item.ordered_slots.plan import (
    CURSORS,
    LAST_WORDS,
    LINE_DIMS,
    LINE_UNITS,
    ROW_WORDS,
    UNITS,
)
from flashdsa.kernels.attention.sm90.core.tile import D_QK

THREADS = UNITS
"""Threads of a CTA: each has an octet of the key that it sums."""
SM_CTAS = 6
"""CTAs on each streaming multiprocessor."""
AHEAD = 16
"""Rows that a thread has in flight."""
QUAD = 4
HALVES = 2
PAIR_LINES = 2
LANES, LOOKS = 8, 8
"""Lanes of the last warp; keys that each of them looks at together."""


def dim_of(thread: Any) -> Any:
    """The first dim of the thread's octet, in the order of `plan.ROW_WORDS`."""
    unit, line = thread // PAIR_LINES, thread % PAIR_LINES
    return (unit // LINE_UNITS * PAIR_LINES + line) * LINE_DIMS + unit % LINE_UNITS * QUAD


@cute.jit
def load_row(words: cute.Tensor, firsts: Any, lasts: Any, place: cutlass.Constexpr) -> None:
    """Load the thread's words of a row, to index `place` of those in flight."""
    two = prims.load_ext(firsts.to_llvm_ptr(), dtype=Int32, count=WORDS - 1)
    words[WORDS * place] = two[0]
    words[WORDS * place + 1] = two[1]
    words[WORDS * place + 2] = lasts.load()


@cute.jit
def add_row(acc: cute.Tensor, words: list[Any]) -> None:
    """Add a row's eight numbers to acc."""
    total = add_packed([acc[j] for j in range(NUMBERS)], words)
    for j in cutlass.range_constexpr(NUMBERS):
        acc[j] = total[j]


@cute.jit
def add_rows(dkv: cute.Tensor, slots: cute.Tensor, key: Int32, first: Int32, count: Int32) -> None:
    """Add `count` rows to this thread's dims of a key's dKV; count > 0.

    A row's words are loaded AHEAD rows before they are added, into the registers of the words just
    added: ptxas moves successive loads after the additions, to save registers.
    """
    thread, _, _ = cute.arch.thread_idx()
    left = dkv.iterator + (Int64(key) * D_QK + dim_of(thread))
    halves = [(left + half * (LINE_DIMS // HALVES)).to_llvm_ptr() for half in range(HALVES)]
    acc = cute.make_rmem_tensor(NUMBERS, Float32)
    words = cute.make_rmem_tensor(AHEAD * WORDS, Int32)
    line = slots.iterator + Int64(first) * ROW_WORDS
    firsts = line + thread * (WORDS - 1)
    lasts = line + (LAST_WORDS + thread)
    # Rows fewer than AHEAD are the last ones of those in flight, like the remainder of more rows.
    missing = cutlass.max(AHEAD - count, Int32(0))
    for i in cutlass.range_constexpr(AHEAD):
        own = cutlass.max(i - missing, Int32(0)) * ROW_WORDS
        load_row(words, firsts + own, lasts + own, i)
    for half in cutlass.range_constexpr(HALVES):
        four = prims.load_ext(halves[half], dtype=Float32, count=QUAD)
        for i in cutlass.range_constexpr(QUAD):
            acc[half * QUAD + i] = four[i]
    rest = count % AHEAD
    for base in cutlass.range(AHEAD, count - rest + AHEAD, AHEAD, unroll=1):
        offset = Int64(cutlass.min(base, count - AHEAD)) * ROW_WORDS
        next_firsts, next_lasts = firsts + offset, lasts + offset
        for i in cutlass.range_constexpr(AHEAD):
            add_row(acc, [words[WORDS * i + w] for w in range(WORDS)])
            load_row(words, next_firsts + i * ROW_WORDS, next_lasts + i * ROW_WORDS, i)
    if rest > 0:
        for i in cutlass.range_constexpr(AHEAD):
            there = i >= AHEAD - rest
            add_row(
                acc, [words[WORDS * i + w] if there else Int32(NOTHING[w]) for w in range(WORDS)]
            )
    for half in cutlass.range_constexpr(HALVES):
        of_half = [acc[half * QUAD + i] for i in range(QUAD)]
        prims.store_ext(cutlass.Vector.from_elements(of_half, Float32), halves[half])


@cute.kernel
def sum_kernel(dkv: cute.Tensor, slots: cute.Tensor, places: Places, number: Int32, blocks: Int32):
    """Sum the keys, one at a time in each CTA, as they come; arguments as in `launch_sums`."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    tickets = cutlass.memory.SmemAllocator().allocate_array(Int32, 2)
    listed = places.cursors[number, LISTED]
    words = places.words.shape[1]
    ticket, turn = cta, Int32(0)
    while ticket < listed:
        if thread == 0:
            cursor = places.cursors.iterator + (CURSORS * number + TAKEN)
            taken = cute.arch.atomic_add(cursor, Int32(1), sem="relaxed", scope="gpu")
            (tickets + turn).store(num_ctas + taken)
        key, first, count = places.keys[ticket, 0], places.keys[ticket, 1], places.keys[ticket, 2]
        if thread < words:
            places.words[key, thread, 0] = Int32(0)
        add_rows(dkv, slots, key, first * blocks, count * blocks)
        # The ticket is written; the one before it has been read by all.
        cute.arch.sync_threads()
        ticket = (tickets + turn).load()
        turn = 1 - turn


@cute.kernel
def sum_unordered_kernel(
    dkv: cute.Tensor, slots: cute.Tensor, places: Places, number: Int32, blocks: Int32
):
    """Sum the rows of keys out of order, in their order: each CTA those of its keys."""
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    lane = cute.arch.lane_idx() % LANES
    count = places.cursors[number, OUT_OF_ORDER]
    for base in cutlass.range(0, count, LOOKS * LANES, unroll=1):
        keys = []
        for look in cutlass.range_constexpr(LOOKS):
            row = base + look * LANES + lane
            keys.append(places.again[row] if row < count else Int32(-1))
        for look in cutlass.range_constexpr(LOOKS):
            mine = keys[look] >= 0 and keys[look] % num_ctas == cta
            found = cute.arch.vote_ballot_sync(mine) & ((1 << LANES) - 1)
            while found != 0:
                place = lowest_bit(found)
                key = cute.arch.shuffle_sync(keys[look], place)
                add_rows(dkv, slots, key, (base + look * LANES + place) * blocks, blocks)
                found = found & (found - 1)


@cute.jit
def launch_sums(
    dkv: cute.Tensor,
    slots: cute.Tensor,
    places: Places,
    number: Int32,
    blocks: Int32,
    num_sms: Int32,
    stream: Any,
):
    """Launch on `stream`.

    Args:
        dkv: (S_kv, 576) fp32, added to. slots: (rows, ROW_WORDS) int32, see `plan.py`.
        places: of the part `number`; its bits are cleared. blocks: row blocks of a group, each of
            which has a row for each key: row * blocks, row * blocks + 1, ...
    """
    num_ctas = num_sms * SM_CTAS
    sum_kernel(dkv, slots, places, number, blocks).launch(
        grid=[num_ctas, 1, 1], block=[THREADS, 1, 1], stream=stream
    )
    sum_unordered_kernel(dkv, slots, places, number, blocks).launch(
        grid=[num_ctas, 1, 1], block=[THREADS, 1, 1], stream=stream
    )
