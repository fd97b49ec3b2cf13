"""dKV += the rows of a part's slots: those of a key one after another, in the groups' order.

Float additions do not commute with rounding; the same order every time gives the same bits.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.warp import lowest_bit
from flashdsa.kernels.sparse_mla.sm90.bwd.slots.places import (
    LISTED,
    OUT_OF_ORDER,
    TAKEN,
    Places,
)
from flashdsa.kernels.sparse_mla.sm90.bwd.slots.plan import (
    CURSORS,
    LINE_DIMS,
    LINE_UNITS,
    ROW_WORDS,
)
from flashdsa.kernels.sparse_mla.sm90.bwd.slots.quads import NOTHING, WORDS, add_packed
from flashdsa.kernels.sparse_mla.sm90.fwd.plan import D_QK

THREADS = ROW_WORDS // WORDS
"""Of a CTA: each has four dims of the key that it sums."""
SM_CTAS = 6
"""On each streaming multiprocessor."""
AHEAD = 16
"""Loads that a thread has in flight."""
QUAD = 4
HALVES = 2
LANES, LOOKS = 16, 8
"""The last warp has so many lanes; keys that each of them looks at together."""


def dim_of(thread: Any) -> Any:
    """The first of the thread's four dims: see `plan.UNIT_WORDS`."""
    unit, half = thread // HALVES, thread % HALVES
    return unit // LINE_UNITS * LINE_DIMS + half * (LINE_DIMS // HALVES) + unit % LINE_UNITS * QUAD


@cute.jit
def add_rows(dkv: cute.Tensor, slots: cute.Tensor, key: Int32, first: Int32, count: Int32) -> None:
    """This thread's dims of a key's dKV += those of `count` rows; count > 0."""
    thread, _, _ = cute.arch.thread_idx()
    at = (dkv.iterator + (Int64(key) * D_QK + dim_of(thread))).to_llvm_ptr()
    acc = cute.make_rmem_tensor(QUAD, Float32)
    four = prims.load_ext(at, dtype=Float32, count=QUAD)
    for i in cutlass.range_constexpr(QUAD):
        acc[i] = four[i]
    line = slots.iterator + (Int64(first) * ROW_WORDS + thread * WORDS)
    for base in cutlass.range(0, count, AHEAD, unroll=1):
        got = []
        for i in cutlass.range_constexpr(AHEAD):
            row = Int64(cutlass.min(base + i, count - 1))
            source = (line + row * ROW_WORDS).to_llvm_ptr()
            got.append(prims.load_ext(source, dtype=Int32, count=WORDS))
        for i in cutlass.range_constexpr(AHEAD):
            there = base + i < count
            words = [got[i][w] if there else Int32(NOTHING[w]) for w in range(WORDS)]
            total = add_packed([acc[j] for j in range(QUAD)], words)
            for j in cutlass.range_constexpr(QUAD):
                acc[j] = total[j]
    prims.store_ext(cutlass.Vector.from_elements([acc[i] for i in range(QUAD)], Float32), at)


@cute.kernel
def sum_kernel(dkv: cute.Tensor, slots: cute.Tensor, places: Places, number: Int32, blocks: Int32):
    """A CTA a key at a time, as they come; arguments as in `launch_sums`."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    tickets = cutlass.memory.SmemAllocator().allocate_array(Int32, 2)
    listed = places.cursors[number, LISTED]
    words = places.bits.shape[1]
    ticket, turn = cta, Int32(0)
    while ticket < listed:
        if thread == 0:
            cursor = places.cursors.iterator + (CURSORS * number + TAKEN)
            taken = cute.arch.atomic_add(cursor, Int32(1), sem="relaxed", scope="gpu")
            (tickets + turn).store(num_ctas + taken)
        key, first, count = places.keys[ticket, 0], places.keys[ticket, 1], places.keys[ticket, 2]
        if thread < words:
            places.bits[key, thread] = Int32(0)
        add_rows(dkv, slots, key, first * blocks, count * blocks)
        # The ticket is there; the one before it has been read by all.
        cute.arch.sync_threads()
        ticket = (tickets + turn).load()
        turn = 1 - turn


@cute.kernel
def sum_unordered_kernel(
    dkv: cute.Tensor, slots: cute.Tensor, places: Places, number: Int32, blocks: Int32
):
    """The rows of keys out of order, in their order: each CTA those of its keys."""
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
        dkv: (S_kv, 576) fp32, added to. slots: (rows, ROW_WORDS) int32, see `quads.py`.
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
