"""One list of ids from a query's lists over two sources, for unions, and for the backward's lists.

An id is a joint row: a row of the main source, or the main source's rows and a row of the extra
one.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl import fake_tensors as fake
from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.grids import follow_grid, launch_ctas, place_in_grid
from flashdsa.hw import SM90
from flashdsa.kernels.attention.operands import MoreOperands
from flashdsa.kernels.attention.sm90.core.sources import Sources, count_slots, read_row, sources_of

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
    follow_grid()
    thread, query, _ = place_in_grid()
    query = Int32(query)
    main = count_slots(sources.main, query, sources.block_log2)
    extra = count_slots(sources.extra, query, Int32(0))
    width, first = Int32(joined.ids.shape[1]), joined.main_slots
    written = width
    if cutlass.const_expr(first is None):
        first = main
        written = main + extra
    for slot in cutlass.range(thread, written, THREADS, unroll=1):
        row = Int32(-1)
        if slot < main:
            row = read_row(sources.main, query, slot, sources.block_log2)
        if slot >= first and slot - first < extra:
            row = read_row(sources.extra, query, slot - first, Int32(0))
            if row >= 0:
                row += Int32(sources.main.kv.shape[0])
        (joined.ids.iterator + (Int64(query) * width + slot)).store(row)
    if thread == 0:
        length = first + extra if extra > 0 else main
        (joined.lengths.iterator + query).store(length)


@cute.jit
def launch_join(sources: Sources, joined: JoinedIds, stream: Any):
    """Launch on `stream`."""
    launch_ctas(join_kernel(sources, joined), joined.ids.shape[0], THREADS, stream, use_pdl=True)


@cute.jit
def launch_compact(stream: Any, *arguments: Any):
    """Launch on `stream`; slots of a list from its length on are not written. `arguments`: kv,
    indices, topk_length, those of `MoreOperands`, ids, lengths; the last two as in `JoinedIds`,
    written."""
    *given, ids, lengths = arguments
    sources = sources_of(tuple(given[:3]), MoreOperands(*given[3:]))
    launch_join(sources, JoinedIds(ids, lengths, None), stream)


def compile_join(plan: Any) -> Any:
    """Compile `launch_compact`."""
    del plan
    queries, d_qk, capacity = fake.symbols(3)

    def of_source() -> list[Any]:
        """Rows, the list, its lengths and its ends."""
        rows, topk, lengths, ends = fake.symbols(4)
        slots = fake.words(queries, topk), fake.words(lengths), fake.words(ends)
        return [fake.bf16(rows, d_qk), *slots]

    written = fake.words(queries, capacity), fake.words(queries)
    sources = *of_source(), *of_source(), Int32(0)
    return compile_launch(SM90, launch_compact, None, *sources, *written)
