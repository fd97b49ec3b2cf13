"""What the producer tells the consumers of the pages that come: a segment is a part of a row."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.kernels.indexer.sm90.plan import SEGMENT_WORDS
from flashdsa.problem import PAGE_SIZE


class Rows(NamedTuple):
    """Where lengths come from."""

    seq_lens: Any  # (B,) int32, device memory
    count: Int32  # B
    max_length: Int32  # tokens that the block table has room for


class Segment(NamedTuple):
    """The description, a word of shared memory each."""

    row: Int32  # -1 ends the work
    first_page: Int32
    num_pages: Int32
    length: Int32  # of the row, in tokens
    teams: Int32  # clusters that share the row
    first_number: Int32  # pages of this CTA before these


@cute.jit
def row_length(rows: Rows, row: Int32) -> Int32:
    """Tokens of the row, clamped to what the block table can name; 0 beyond the last row."""
    return clamped(rows, raw_length(rows, row))


@cute.jit
def raw_length(rows: Rows, row: Int32) -> Int32:
    """What is in memory for the row; 0 beyond the last one."""
    length = Int32(0)
    if row < rows.count:
        length = rows.seq_lens[row]
    return length


def clamped(rows: Rows, length: Int32) -> Int32:
    """A length that the block table has room for."""
    return cutlass.min(cutlass.max(length, Int32(0)), rows.max_length)


@cute.jit
def pages_to_score(length: Int32, plan: cutlass.Constexpr) -> Int32:
    """Pages of a row, 0 when all its tokens are among the best without scores."""
    pages = (length + PAGE_SIZE - 1) // PAGE_SIZE
    if length <= plan.unscored_length:
        pages = Int32(0)
    return pages


def write_segment_words(segments: cute.Tensor, slot: Int32, segment: Segment) -> None:
    """Describe a segment to the consumers."""
    for word, value in enumerate(segment):
        segments[slot * SEGMENT_WORDS + word] = value


def read_segment(segments: cute.Tensor, slot: Int32) -> Segment:
    """What the producer wrote."""
    return Segment(*(segments[slot * SEGMENT_WORDS + word] for word in range(SEGMENT_WORDS)))


@cute.jit
def word_in(segments: cute.Tensor, slot: Int32, name: cutlass.Constexpr) -> Int32:
    """One word of a description, while the slot is the caller's: not kept in a register."""
    return segments[slot * SEGMENT_WORDS + Segment._fields.index(name)]


@cute.jit
def wait_for_segment(inputs: Any, number: Int32, plan: cutlass.Constexpr) -> Segment:
    """The next segment's description, once it is announced; see memory.py's Inputs."""
    state = inputs.segment_ring.state(number)
    inputs.segment_ring.wait(state)
    return read_segment(inputs.segments, state.stage)
