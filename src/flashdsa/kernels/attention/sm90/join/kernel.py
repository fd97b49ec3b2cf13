"""One list of ids from a query's lists over two sources, for unions, and for the backward's lists.

An id is a joint row: a row of the main source, or the main source's rows and a row of the extra
one.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.kernels.attention.lists import SHORT_SLOTS
from flashdsa.kernels.attention.operands import MoreOperands
from flashdsa.kernels.attention.sm90.core.sources import (
    Sources,
    count_slots,
    row_of,
    sources_of,
)

THREADS = 256


class JoinedIds(NamedTuple):
    """Joint lists, written."""

    ids: cute.Tensor  # (S, most slots of both lists) int32, -1 where a slot is not valid
    lengths: cute.Tensor  # (S,) int32: slots up to the last that may be valid
    main_slots: (
        Any  # most slots of the main list: the extra list's begin there; None: after its own
    )


@cute.kernel
def join_kernel(sources: Sources, joined: JoinedIds):
    """A query."""
    thread, _, _ = cute.arch.thread_idx()
    query, _, _ = cute.arch.block_idx()
    query = Int32(query)
    main = count_slots(sources.main, query, sources.block_log2)
    extra = count_slots(sources.extra, query, Int32(0))
    width, first = Int32(joined.ids.shape[1]), joined.main_slots
    written = width
    if cutlass.const_expr(first is None):
        first = main
        # Short lists are read whole.
        if width > SHORT_SLOTS:
            written = main + extra
    for slot in cutlass.range(thread, written, THREADS, unroll=1):
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
def launch_join(sources: Sources, joined: JoinedIds, stream: Any):
    """Launch on `stream`."""
    join_kernel(sources, joined).launch(
        grid=[joined.ids.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream
    )


@cute.jit
def launch_compact(stream: Any, *arguments: Any):
    """Launch on `stream`; a long list's slots from its length on are not written.

    Args:
        arguments: kv, indices, topk_length, those of `MoreOperands`, ids, lengths; the last two as
            in `JoinedIds`, written.
    """
    *given, ids, lengths = arguments
    sources = sources_of(tuple(given[:3]), MoreOperands(*given[3:]))
    launch_join(sources, JoinedIds(ids, lengths, None), stream)
