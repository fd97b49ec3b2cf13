"""One list of ids from a query's lists over two sources, for the unions of groups of queries.

An id is a joint row: a row of the main source, or the main source's rows and a row of the extra
one.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.kernels.attention.sm90.core.sources import Sources, count_slots, join_slots, row_of
from flashdsa.kernels.attention.sm90.core.tile import Tile

THREADS = 256


class JoinedIds(NamedTuple):
    """Joint lists, written."""

    ids: cute.Tensor  # (S, most slots of both lists) int32, -1 where a slot is not valid
    lengths: cute.Tensor  # (S,) int32: slots up to the last that may be valid
    main_slots: Int32  # most slots of the main list: the extra list's begin there


@cute.kernel
def join_kernel(sources: Sources, joined: JoinedIds):
    """A query."""
    thread, _, _ = cute.arch.thread_idx()
    query, _, _ = cute.arch.block_idx()
    query = Int32(query)
    main = count_slots(sources.main, query, sources.block_log2)
    extra = count_slots(sources.extra, query, Int32(0))
    width, first = Int32(joined.ids.shape[1]), joined.main_slots
    for slot in cutlass.range(thread, width, THREADS, unroll=1):
        row = Int32(-1)
        if slot < main:
            row = row_of(sources.main, query, slot, sources.block_log2)
        if slot >= first and slot - first < extra:
            row = row_of(sources.extra, query, slot - first, Int32(0))
            if row >= 0:
                row += Int32(sources.main.kv.shape[0])
        (joined.ids.iterator + (Int64(query) * width + slot)).store(row)
    if thread == 0:
        length = first + extra if extra > 0 else main
        (joined.lengths.iterator + query).store(length)


@cute.jit
def count_joined(sources: Sources, query: Int32, _: Int32) -> Int32:
    """Slots of a query over both sources, for the order in which items are drawn."""
    return join_slots(sources, query, Tile().keys).end


@cute.jit
def launch_join(sources: Sources, joined: JoinedIds, stream: Any):
    """Launch on `stream`."""
    join_kernel(sources, joined).launch(
        grid=[joined.ids.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream
    )
