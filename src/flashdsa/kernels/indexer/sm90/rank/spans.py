"""The tokens of each row, from which its entries follow."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.warp import lowest_bit
from flashdsa.kernels.indexer.schedule.work_tile import Rows, row_length


class Spans(NamedTuple):
    """Tokens of the rows, and their number in an entry."""

    ends: Rows
    starts: Any  # (B,) int32; (0,): all start at 0
    block_bits: Int32  # an entry has 1 << block_bits tokens
    score_bits: Int32  # and is read as 1 << score_bits scores


@cute.jit
def span_of(spans: Spans, row: Int32) -> tuple[Int32, Int32]:
    """(first token, number of entries) of a row; (0, 0) beyond the last one."""
    start, end = Int32(0), row_length(spans.ends, row)
    if row < spans.ends.count:
        if spans.starts.shape[0] > 0:
            start = cutlass.min(cutlass.max(spans.starts[row], start), end)
    return start, (end - start + (Int32(1) << spans.block_bits) - 1) >> spans.block_bits


@cute.jit
def long_row(spans: Spans, first: Int32, count: Int32, plan: cutlass.Constexpr) -> Int32:
    """The one among `count` rows that is longer than the others together, and has scores for as
    many CTAs; -1: none is."""
    lane, length = cute.arch.lane_idx(), Int32(0)
    if lane < count:
        _, length = span_of(spans, first + lane)
    total = cute.arch.warp_redux_sync(length, "add")
    longest = cute.arch.warp_redux_sync(length, "max")
    found = Int32(-1)
    if longest << spans.score_bits >= count * plan.part_entries and 2 * longest > total:
        found = first + lowest_bit(cute.arch.vote_ballot_sync(length == longest))
    return found
