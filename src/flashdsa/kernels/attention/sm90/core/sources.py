"""Slots of a query over two sources: the main list's, then the extra list's from a whole tile on.

So a tile's keys are of one source. A list has ids, which may each name a block of rows, or is a
range of rows.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.gmem import load_if
from flashdsa.kernels.attention.operands import MoreOperands, Operands
from flashdsa.kernels.attention.sm90.core.tile import TILES


class Source(NamedTuple):
    """Rows, and each query's list of them."""

    kv: cute.Tensor  # (rows, d_qk) bf16, or packed pages
    slots: cute.Tensor  # (S, any) int32 ids; of a range (S, 1): its first row
    lengths: cute.Tensor  # (S,) int32, or (0,): every id counts
    ends: cute.Tensor  # of a range (S,) int32; of ids (0,)


class Sources(NamedTuple):
    """Both sources; without an extra one it has no row and no slot."""

    main: Source
    extra: Source
    block_log2: Int32  # log2 of the rows that an id of the main list names


class JoinedSlots(NamedTuple):
    """A query's slots that may be valid: [0, main) and [split, end)."""

    main: Int32
    split: Int32  # main, rounded up to a tile
    end: Int32


def sources_of(main: tuple[Any, Any, Any], more: MoreOperands) -> Sources:
    """Both sources; `main`: kv, indices and topk_length."""
    extra = Source(more.extra_kv, more.extra_indices, more.extra_topk_length, more.extra_ends)
    return Sources(Source(*main, more.ends), extra, more.block_log2)


def sources_of_plan(plan: Any, x: Operands, more: Any) -> Any:
    """Both sources of a joined plan; of another one, which has no `more`, None."""
    return sources_of((x.kv, x.indices, x.topk_length), more) if plan.joined else None


def num_rows(kv: cute.Tensor) -> Any:
    """Rows of a source, or of all its pages."""
    return kv.shape[0] * kv.shape[1] if len(kv.shape) == 3 else kv.shape[0]


def end_of(slots: Any) -> Any:
    """One past the last slot that may be valid; `slots`: joined ones, or a number of slots."""
    return slots.end if isinstance(slots, JoinedSlots) else slots


@cute.jit
def count_slots(source: Source, query: Int32, block_log2: Any) -> Int32:
    """Slots of a query's list that may be valid; of a range those of rows that exist."""
    return count_lists(source, [query], block_log2)[0]


@cute.jit
def count_lists(source: Source, queries: list[Int32], block_log2: Any) -> list[Int32]:
    """Likewise of several queries, which wait for memory once."""
    counts = [Int32(source.slots.shape[1]) for _ in queries]
    if source.ends.shape[0] > 0:
        firsts = [
            cutlass.max((source.slots.iterator + query).load(), Int32(0)) for query in queries
        ]
        ends = [
            cutlass.min((source.ends.iterator + query).load(), Int32(num_rows(source.kv)))
            for query in queries
        ]
        counts = [
            cutlass.max(cutlass.max(end, Int32(0)) - first, Int32(0))
            for first, end in zip(firsts, ends, strict=True)
        ]
    else:
        if source.lengths.shape[0] > 0:
            counts = limited(counts, source.lengths, queries)
        counts = [count << block_log2 for count in counts]
    return counts


def limited(counts: list[Int32], lengths: cute.Tensor, queries: list[Int32]) -> list[Int32]:
    """Numbers of ids of several queries' lists, which end at their lengths (S,) int32."""
    given = [(lengths.iterator + query).load() for query in queries]
    return [
        cutlass.min(cutlass.max(length, Int32(0)), count)
        for length, count in zip(given, counts, strict=True)
    ]


def split_after(main: Any, keys: int) -> Any:
    """The first slot of the extra list, after so many of the main one; `keys`: of a tile."""
    return (main + keys - 1) // keys * keys


@cute.jit
def join_slots(sources: Sources, query: Int32, keys: cutlass.Constexpr) -> JoinedSlots:
    """A query's slots; `keys`: of a tile."""
    return join_lists(sources, [query], keys)[0]


@cute.jit
def join_lists(
    sources: Sources, queries: list[Int32], keys: cutlass.Constexpr
) -> list[JoinedSlots]:
    """Likewise of several queries."""
    mains = count_lists(sources.main, queries, sources.block_log2)
    splits = [split_after(main, keys) for main in mains]
    extras = count_lists(sources.extra, queries, Int32(0))
    joined = []
    for main, split, extra in zip(mains, splits, extras, strict=True):
        end = main
        if extra > 0:
            end = split + extra
        joined.append(JoinedSlots(main, split, end))
    return joined


@cute.jit
def place_of_id(source: Source, query: Int32, number: Int32, block_log2: Any) -> Any:
    """Pointer to what a slot of the list is found by: its id, or the range's first row."""
    at = Int64(query) * source.slots.shape[1]
    if source.ends.shape[0] == 0:
        at += number >> block_log2
    return source.slots.iterator + at


@cute.jit
def row_of(source: Source, found: Int32, number: Int32, block_log2: Any) -> Int32:
    """The row that a slot names, negative where invalid. `found`: what lies at `place_of_id`."""
    count = Int32(num_rows(source.kv))
    row = found
    if source.ends.shape[0] > 0:
        row = cutlass.max(found, Int32(0)) + number
    else:
        # An id whose first row does not exist may be too large to be multiplied.
        if row > (count - 1) >> block_log2:
            row = Int32(-1)
        if row >= 0:
            row = (row << block_log2) + (number & ((Int32(1) << block_log2) - 1))
            if row >= count:
                row = Int32(-1)
    return row


def read_row(source: Source, query: Int32, number: Int32, block_log2: Any) -> Any:
    """The row that a slot below the list's number names, negative where it is not valid."""
    found = place_of_id(source, query, number, block_log2).load()
    return row_of(source, found, number, block_log2)


class TileList(NamedTuple):
    """A query's list of the source of a tile."""

    first: Any  # pointer to its first id, or to the range's first row
    origin: Int32  # slot of its number 0
    end: Int32  # one past its last slot that may be valid
    block_log2: Int32  # log2 of the rows that an id names
    is_range: Int32
    rows: Int32  # of the source


@cute.jit
def list_of_tile(
    sources: Sources, query: Int32, slots: JoinedSlots, slot: Int32, end_slot: Int32
) -> TileList:
    """The list of the source of a tile, of which a slot is given, up to `end_slot`."""
    source, origin, end, log2 = sources.main, Int32(0), slots.main, sources.block_log2
    first = source.slots.iterator + Int64(query) * source.slots.shape[1]
    is_range, rows = Int32(source.ends.shape[0]), Int32(num_rows(source.kv))
    if slot >= slots.split:
        extra = sources.extra
        origin, end, log2 = slots.split, slots.end, Int32(0)
        first = extra.slots.iterator + Int64(query) * extra.slots.shape[1]
        is_range, rows = Int32(extra.ends.shape[0]), Int32(num_rows(extra.kv))
    return TileList(first, origin, cutlass.min(end, end_slot), log2, is_range, rows)


def lists_of_slots(
    sources: Sources, query: Any, joined: JoinedSlots, slots: list[Any], end_slot: Any
) -> list[TileList]:
    """The list of each of a lane's slots of a step, one for those of a tile."""
    of_tile = len(slots) // TILES
    lists = [
        list_of_tile(sources, query, joined, slots[tile * of_tile], end_slot)
        for tile in range(TILES)
    ]
    return [lists[number // of_tile] for number in range(len(slots))]


@cute.jit
def ask_listed(of: TileList, slot: Int32) -> Int32:
    """Load what a slot of the list is found by; nobody waits for it before `row_of_listed`."""
    number = (slot - of.origin) >> of.block_log2
    if of.is_range != 0:
        number = Int32(0)
    return load_if(Int32(slot < of.end), of.first + number)


@cute.jit
def row_of_listed(of: TileList, slot: Int32, found: Int32) -> Int32:
    """The row of its source that a slot names, negative where invalid. `found`: by `ask_listed`."""
    row, number = found, slot - of.origin
    if of.is_range != 0:
        row = cutlass.max(found, Int32(0)) + number
    else:
        if of.block_log2 != 0:
            # An id whose first row does not exist may be too large to be multiplied.
            if row > (of.rows - 1) >> of.block_log2:
                row = Int32(-1)
            if row >= 0:
                row = (row << of.block_log2) + (number & ((Int32(1) << of.block_log2) - 1))
        if row >= of.rows:
            row = Int32(-1)
    return row if slot < of.end else Int32(-1)


@cute.jit
def source_of_row(sources: Sources, row: Int32) -> tuple[Any, Int32]:
    """(pointer to the first row of a joint row's source, the row of it); see `join/kernel.py`."""
    first, of_source = sources.main.kv.iterator, row
    if row >= sources.main.kv.shape[0]:
        first = sources.extra.kv.iterator
        of_source = row - sources.main.kv.shape[0]
    return first, of_source


@cute.jit
def rows_of_tile(sources: Sources, slots: JoinedSlots, slot: Int32) -> Any:
    """Pointer to the first row of the source of a tile, whose first slot is given."""
    first = sources.main.kv.iterator
    if slot >= slots.split:
        first = sources.extra.kv.iterator
    return first
