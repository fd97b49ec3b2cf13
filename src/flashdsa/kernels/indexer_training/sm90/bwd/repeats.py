"""Gradients of keys that a query names more than once: added in the order of its slots."""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from flashdsa.dsl.warp import lowest_bit
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer_training.sm90.bwd.slots import (
    Range,
    Shared,
    Slots,
    is_listed,
    length_of,
    place_of,
)

SLOTS_AT_ONCE = 8
"""Slots that a lane has in flight."""


@cute.jit
def add_slots(table: cute.Pointer, place: Int32, gradient: Float32, lane: Int32) -> None:
    """Add the lanes' gradients to their entries of a query's table, in the order of the lanes.

    Args:
        place: the entry's index; -1: the lane has none. All lanes call.
    """
    alike = Int32(cute.arch.match_sync(0xFFFFFFFF, place))
    left = Int32(0)
    sum_so_far = Float32(0.0)
    if place >= 0:
        left = alike
        sum_so_far = (table + place).load().bitcast(Float32)
    # Lanes of one entry have the same sum; the first of them stores it.
    while cute.arch.vote_any_sync(left != 0):
        other = cute.arch.shuffle_sync(gradient, cutlass.max(lowest_bit(left), Int32(0)))
        if left != 0:
            sum_so_far += other
        left = left & (left - 1)
    cute.arch.sync_warp()
    if place >= 0 and lowest_bit(alike) == lane:
        (table + place).store(sum_so_far.bitcast(Int32))
    cute.arch.sync_warp()


@cute.jit
def fill_table_in_order(x: Slots, shared: Shared, keys: Range, first: Int32) -> None:
    """Fill the table for queries that name a key twice: a warp for each. All threads call, and
    sync.

    The table is clear.
    """
    lane, member = x.thread % WARP_SIZE, x.thread // WARP_SIZE
    if member < x.plan.queries:
        length = length_of(x, x.first_query + member)
        line = Int64(x.first_query + member) * x.indices.shape[1]
        table = shared.table.iterator + member * x.plan.table_places
        for start in cutlass.range(0, length, SLOTS_AT_ONCE * WARP_SIZE, unroll=1):
            rows, gradients = [], []
            for i in cutlass.range_constexpr(SLOTS_AT_ONCE):
                slot = cutlass.min(start + i * WARP_SIZE + lane, length - 1)
                rows.append((x.indices.iterator + (line + slot)).load())
                gradients.append((x.gradients.iterator + (line + slot)).load())
            for i in cutlass.range_constexpr(SLOTS_AT_ONCE):
                counts = start + i * WARP_SIZE + lane < length
                place = Int32(-1)
                if is_listed(x, keys, rows[i], gradients[i].bitcast(Int32), counts):
                    place = place_of(shared, keys, rows[i]) - first
                    if place < 0 or place >= x.plan.table_places:
                        place = Int32(-1)
                add_slots(table, place, gradients[i], lane)
    cute.arch.sync_threads()
