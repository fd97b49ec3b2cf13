"""Lists of one query with few slots: a warp sorts them in registers.

A bitmap of all rows of kv, as `union.py` has one, would take longer than the sort. Where lists have
lengths, those that are short are sorted, and the others are made by bitmaps. A sorted list that
names a row again is all out of order.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from flashdsa.dsl.gmem import store4
from flashdsa.dsl.grids import follow_grid
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.choice import SECOND, is_taken
from flashdsa.kernels.attention.delta import write_deltas
from flashdsa.kernels.attention.lists import (
    MOST_UNORDERED,
    SHORT_SLOTS,
    UNORDERED_SHIFT,
    Lists,
)
from flashdsa.kernels.attention.union_slots import Slots, length_of

WARPS = 4
SLOTS = SHORT_SLOTS // WARP_SIZE
"""Slots of a lane: in order, those of a lane follow each other."""
NO_ROW = 2**31 - 1
"""Stands for a slot that names no row, after all that do."""
WORD_ROWS = 4
"""Rows of a word of members."""
LEAST_QUERIES = 512
"""Queries from which on short lists are sorted apart. Bitmaps of fewer are one wave of CTAs, which
ends no sooner without some of them."""


@cute.jit
def is_apart(x: Slots) -> Boolean:
    """Whether the query's list is sorted although longer ones are made by bitmaps."""
    apart = Boolean(False)
    if x.indices.shape[0] >= LEAST_QUERIES:
        apart = length_of(x, x.first_query) <= SHORT_SLOTS
    return apart


@cute.kernel
def short_kernel(
    slots: tuple[cute.Tensor, cute.Tensor],
    lists: Lists,
    num_keys: Int32,
    of_delta: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    heads: Int32,
    choice: Any,
    tile_keys: cutlass.Constexpr,
    apart: cutlass.Constexpr,
):
    """Write the lists of WARPS queries, or their delta if large groups are taken; arguments as in
    `launch_prepare`, apart: see `launch_short`."""
    follow_grid()
    block, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    first, end = block * WARPS, Int32(lists.counts.shape[0])
    taken = Boolean(True)
    if cutlass.const_expr(choice is not None):
        taken = is_taken(choice, Int32(SECOND))
        if not taken and cutlass.const_expr(not apart):
            count = cutlass.min(end - first, WARPS) * heads
            write_deltas(*of_delta, first * heads, count, WARPS)
    query = first + thread // WARP_SIZE
    x = Slots(*slots, num_keys, query, 1, tile_keys)
    if cutlass.const_expr(apart):
        taken = taken and is_apart(x)
    if taken and query < end:
        sort_list(x, lists, thread % WARP_SIZE)


@cute.jit
def sort_list(x: Slots, lists: Lists, lane: Int32) -> None:
    """Write the query's list in ascending order. All lanes of one warp call."""
    query, length = x.first_query, length_of(x, x.first_query)
    line = x.indices.iterator + Int64(query) * x.indices.shape[1]
    rows, count = [], Int32(0)
    for i in cutlass.range_constexpr(SLOTS):
        slot = i * WARP_SIZE + lane
        row = (line + cutlass.min(slot, Int32(x.indices.shape[1]) - 1)).load()
        if slot >= length or row < 0 or row >= x.num_keys:
            row = Int32(NO_ROW)
        count += Int32(row != NO_ROW)
        rows.append(row)
    count = cute.arch.warp_redux_sync(count, "add")
    rows = sort_rows(rows, lane)
    unordered = Int32(MOST_UNORDERED << UNORDERED_SHIFT) if names_again(rows, lane) else Int32(0)
    fill = cute.arch.shuffle_sync(rows[0], 0)
    place = lane * SLOTS
    if place < (count + x.tile - 1) // x.tile * x.tile:
        at = Int64(query) * lists.rows.shape[1] + place
        own = [row if row != NO_ROW else fill for row in rows]
        bits = [Int32(1) if row != NO_ROW else Int32(0) for row in rows]
        words = [
            bits[i] | bits[i + 1] << 8 | bits[i + 2] << 16 | bits[i + 3] << 24
            for i in range(0, SLOTS, WORD_ROWS)
        ]
        for i in cutlass.range_constexpr(0, SLOTS, WORD_ROWS):
            store4(lists.rows.iterator + (at + i), own[i : i + WORD_ROWS])
        store4(cute.recast_ptr(lists.members.iterator + at, dtype=Int32), words)
    if lane == 0:
        lists.counts[query] = count
        lists.named[query] = count
        lists.present[query] = cutlass.min(count, Int32(1)) | unordered


@cute.jit
def names_again(rows: list[Any], lane: Int32) -> Boolean:
    """Whether a sorted list names a row again. All lanes call."""
    behind = cute.arch.shuffle_sync_down(rows[0], 1)
    again = (rows[-1] == behind) & (rows[-1] != NO_ROW) & (lane < WARP_SIZE - 1)
    for i in cutlass.range_constexpr(SLOTS - 1):
        again = again | ((rows[i] == rows[i + 1]) & (rows[i] != NO_ROW))
    return Boolean(cute.arch.vote_any_sync(again))


def sort_rows(rows: list[Any], lane: Any) -> list[Any]:
    """Sort a warp's numbers by a bitonic network: blocks twice as long from step to step.

    Number i of a lane has place lane * SLOTS + i. The first step of a merge compares the places of
    a block with those from its end on, so that lower places always get the lesser number.
    """
    size = 2
    while size <= SHORT_SLOTS:
        rows = _compare(rows, lane, size // 2, size - 1)
        distance = size // 4
        while distance:
            rows = _compare(rows, lane, distance, distance)
            distance //= 2
        size *= 2
    return rows


def _compare(rows: list[Any], lane: Any, low: int, flipped: int) -> list[Any]:
    """Compare each place with the one that has the bits `flipped` changed; that without the bit
    `low` gets the lesser number."""
    here, others = flipped % SLOTS, flipped // SLOTS
    partners = [rows[i ^ here] for i in range(SLOTS)]
    if others:
        partners = [cute.arch.shuffle_sync_bfly(one, others) for one in partners]
        is_low = lane & (low // SLOTS) == 0
        return [_lesser(a, b, is_low) for a, b in zip(rows, partners, strict=True)]
    return [
        cutlass.max(a, b) if i & low else cutlass.min(a, b)
        for i, (a, b) in enumerate(zip(rows, partners, strict=True))
    ]


@cute.jit
def _lesser(a: Int32, b: Int32, is_low: Boolean) -> Int32:
    least, most = cutlass.min(a, b), cutlass.max(a, b)
    return least if is_low else most


@cute.jit
def launch_short(
    slots: tuple[cute.Tensor, cute.Tensor],
    lists: Lists,
    num_keys: Int32,
    of_delta: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    heads: Int32,
    choice: Any,
    tile_keys: cutlass.Constexpr,
    stream: Any,
    apart: cutlass.Constexpr = False,
):
    """Launch on `stream`; arguments as in `launch_prepare`.

    Args:
        apart: only the lists of which `is_apart` says so, and no delta; False: queries have at most
            SHORT_SLOTS slots.
    """
    short_kernel(slots, lists, num_keys, of_delta, heads, choice, tile_keys, apart).launch(
        grid=[(lists.counts.shape[0] + WARPS - 1) // WARPS, 1, 1],
        block=[WARPS * WARP_SIZE, 1, 1],
        stream=stream,
        use_pdl=True,
    )
