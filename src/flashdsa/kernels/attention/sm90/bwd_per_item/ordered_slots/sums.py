"""dKV += the rows of a part's slots: those of a key one after another, in the groups' order.

Float additions do not commute with rounding; the same order every time gives the same bits.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.warp import lowest_bit
from flashdsa.kernels.attention.sm90.bwd_per_item.ordered_slots.offsets import (
    FEW,
    LISTED,
    OUT_OF_ORDER,
    TAKEN,
    Offsets,
)
from flashdsa.kernels.attention.sm90.bwd_per_item.ordered_slots.packed8 import (
    NOTHING,
    NUMBERS,
    WORDS,
    add_packed,
)
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import (
    CURSORS,
    KEY_WORDS,
    LINE_DIMS,
    LINE_PACKS,
)

SM_CTAS = 6
"""CTAs on each streaming multiprocessor."""
AHEAD = 16
"""Rows that a thread has in flight."""
FEW_CTAS, FEW_KEYS, FEW_AHEAD = 5, 4, 4
"""CTAs on each streaming multiprocessor that sum keys of few rows, keys that each of them sums at a
time, and rows that a thread has in flight: a key's time is that of memory to answer twice, so many
are summed at once, with few registers."""
QUAD = 4
HALVES = 2
PAIR_LINES = 2
LANES, LOOKS = 8, 8
"""Lanes of the last warp; keys that each of them looks at together."""


def dim_of(thread: Any) -> Any:
    """The first dim of the thread's pack, in the order of `plan.slot_words`."""
    pack, line = thread // PAIR_LINES, thread % PAIR_LINES
    return (pack // LINE_PACKS * PAIR_LINES + line) * LINE_DIMS + pack % LINE_PACKS * QUAD


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
def add_rows(
    dkv: cute.Tensor,
    slots: cute.Tensor,
    key: Int32,
    first: Int32,
    count: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Add `count` rows to this thread's dims of a key's dKV; count > 0.

    A row's words are loaded AHEAD rows before they are added, into the registers of the words just
    added: ptxas moves successive loads after the additions, to save registers.
    """
    thread, _, _ = cute.arch.thread_idx()
    left = dkv.iterator + (Int64(key) * plan.tile.d_qk + dim_of(thread))
    halves = [(left + half * (LINE_DIMS // HALVES)).to_llvm_ptr() for half in range(HALVES)]
    acc = cute.make_rmem_tensor(NUMBERS, Float32)
    words = cute.make_rmem_tensor(AHEAD * WORDS, Int32)
    line = slots.iterator + Int64(first) * plan.slot_words
    firsts = line + thread * (WORDS - 1)
    lasts = line + (plan.slot_lasts + thread)
    # Rows fewer than AHEAD are the last ones of those in flight, like the remainder of more rows.
    missing = cutlass.max(AHEAD - count, Int32(0))
    for i in cutlass.range_constexpr(AHEAD):
        own = cutlass.max(i - missing, Int32(0)) * plan.slot_words
        load_row(words, firsts + own, lasts + own, i)
    for half in cutlass.range_constexpr(HALVES):
        four = prims.load_ext(halves[half], dtype=Float32, count=QUAD)
        for i in cutlass.range_constexpr(QUAD):
            acc[half * QUAD + i] = four[i]
    rest = count % AHEAD
    for base in cutlass.range(AHEAD, count - rest + AHEAD, AHEAD, unroll=1):
        offset = Int64(cutlass.min(base, count - AHEAD)) * plan.slot_words
        next_firsts, next_lasts = firsts + offset, lasts + offset
        for i in cutlass.range_constexpr(AHEAD):
            add_row(acc, [words[WORDS * i + w] for w in range(WORDS)])
            load_row(words, next_firsts + i * plan.slot_words, next_lasts + i * plan.slot_words, i)
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
def sum_kernel(
    dkv: cute.Tensor,
    slots: cute.Tensor,
    offsets: Offsets,
    number: Int32,
    blocks: Int32,
    plan: cutlass.Constexpr,
):
    """Sum the keys of many rows, one at a time in each CTA, as they come; arguments as in
    `launch_sums`."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    tickets = cutlass.memory.SmemAllocator().allocate_array(Int32, 2)
    listed = offsets.cursors[number, LISTED]
    words = offsets.words.shape[1]
    ticket, turn = cta, Int32(0)
    while ticket < listed:
        if thread == 0:
            cursor = offsets.cursors.iterator + (CURSORS * number + TAKEN)
            taken = cute.arch.atomic_add(cursor, Int32(1), sem="relaxed", scope="gpu")
            (tickets + turn).store(num_ctas + taken)
        key, first, count = (
            offsets.keys[ticket, 0],
            offsets.keys[ticket, 1],
            offsets.keys[ticket, 2],
        )
        if thread < words:
            offsets.words[key, thread, 0] = Int32(0)
        add_rows(dkv, slots, key, first * blocks, count * blocks, plan)
        # The ticket is written; the one before it has been read by all.
        cute.arch.sync_threads()
        ticket = (tickets + turn).load()
        turn = 1 - turn


@cute.kernel
def sum_few_kernel(
    dkv: cute.Tensor,
    slots: cute.Tensor,
    offsets: Offsets,
    number: Int32,
    blocks: Int32,
    plan: cutlass.Constexpr,
):
    """Sum the keys of few rows, some at a time in each CTA, by turns; arguments as in
    `launch_sums`."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    pack = thread % plan.packs
    listed, last = offsets.cursors[number, FEW], Int32(offsets.keys.shape[0]) - 1
    first_place = cta * FEW_KEYS + thread // plan.packs
    for place in cutlass.range(first_place, listed, num_ctas * FEW_KEYS, unroll=1):
        line = offsets.keys.iterator + Int64(last - place) * KEY_WORDS
        found = prims.load_ext(line.to_llvm_ptr(), dtype=Int32, count=KEY_WORDS)
        if pack < offsets.words.shape[1]:
            offsets.words[found[0], pack, 0] = Int32(0)
        add_few_rows(dkv, slots, found[0], (found[1] * blocks, found[2] * blocks), pack, plan)


@cute.jit
def add_few_rows(
    dkv: cute.Tensor,
    slots: cute.Tensor,
    key: Int32,
    rows: tuple[Int32, Int32],
    pack: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Same as `add_rows`, for few rows.

    Args:
        rows: the first one, and how many. pack: the thread's, of a row.
    """
    first, count = rows
    left = dkv.iterator + (Int64(key) * plan.tile.d_qk + dim_of(pack))
    halves = [(left + half * (LINE_DIMS // HALVES)).to_llvm_ptr() for half in range(HALVES)]
    acc = cute.make_rmem_tensor(NUMBERS, Float32)
    words = cute.make_rmem_tensor(FEW_AHEAD * WORDS, Int32)
    for half in cutlass.range_constexpr(HALVES):
        four = prims.load_ext(halves[half], dtype=Float32, count=QUAD)
        for i in cutlass.range_constexpr(QUAD):
            acc[half * QUAD + i] = four[i]
    for base in cutlass.range(0, count, FEW_AHEAD, unroll=1):
        for i in cutlass.range_constexpr(FEW_AHEAD):
            # Rows past the last one are the last one, and not added.
            row = Int64(first + cutlass.min(base + i, count - 1)) * plan.slot_words
            line = slots.iterator + row
            load_row(words, line + pack * (WORDS - 1), line + (plan.slot_lasts + pack), i)
        for i in cutlass.range_constexpr(FEW_AHEAD):
            there = base + i < count
            add_row(
                acc, [words[WORDS * i + w] if there else Int32(NOTHING[w]) for w in range(WORDS)]
            )
    for half in cutlass.range_constexpr(HALVES):
        of_half = [acc[half * QUAD + i] for i in range(QUAD)]
        prims.store_ext(cutlass.Vector.from_elements(of_half, Float32), halves[half])


@cute.kernel
def sum_unordered_kernel(
    dkv: cute.Tensor,
    slots: cute.Tensor,
    offsets: Offsets,
    number: Int32,
    blocks: Int32,
    plan: cutlass.Constexpr,
):
    """Sum the rows of keys out of order, in their order: each CTA those of its keys."""
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    lane = cute.arch.lane_idx() % LANES
    count = offsets.cursors[number, OUT_OF_ORDER]
    for base in cutlass.range(0, count, LOOKS * LANES, unroll=1):
        keys = []
        for look in cutlass.range_constexpr(LOOKS):
            row = base + look * LANES + lane
            keys.append(offsets.again[row] if row < count else Int32(-1))
        for look in cutlass.range_constexpr(LOOKS):
            mine = keys[look] >= 0 and keys[look] % num_ctas == cta
            found = cute.arch.vote_ballot_sync(mine) & ((1 << LANES) - 1)
            while found != 0:
                place = lowest_bit(found)
                key = cute.arch.shuffle_sync(keys[look], place)
                add_rows(dkv, slots, key, (base + look * LANES + place) * blocks, blocks, plan)
                found = found & (found - 1)


@cute.jit
def launch_sums(
    dkv: cute.Tensor,
    slots: cute.Tensor,
    offsets: Offsets,
    number: Int32,
    blocks: Int32,
    num_sms: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch on `stream`.

    Args:
        dkv: (S_kv, 576) fp32, added to. slots: (rows, plan.slot_words) int32.
        offsets: of the part `number`; its bits are cleared. blocks: row blocks of a group, each of
            which has a row for each key: row * blocks, row * blocks + 1, ...
    """
    num_ctas = num_sms * SM_CTAS
    sum_kernel(dkv, slots, offsets, number, blocks, plan).launch(
        grid=[num_ctas, 1, 1], block=[plan.packs, 1, 1], stream=stream
    )
    sum_few_kernel(dkv, slots, offsets, number, blocks, plan).launch(
        grid=[num_sms * FEW_CTAS, 1, 1], block=[plan.packs * FEW_KEYS, 1, 1], stream=stream
    )
    sum_unordered_kernel(dkv, slots, offsets, number, blocks, plan).launch(
        grid=[num_ctas, 1, 1], block=[plan.packs, 1, 1], stream=stream
    )
