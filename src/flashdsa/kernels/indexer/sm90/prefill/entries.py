"""A query's scores as words in device memory, and the passes of an exact search over them.

A word is the bits of an fp32 score, of which -0 does not occur; `NAN`, if that is NaN, which ranks
last; or `INVALID`, of a key that the query does not see, and of no key. Keys are signed: see
`key_of`, select/keys.py. The latter two words are below nothing if compared as fp32.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Uint32, cute

from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.select.keys import MAGNITUDE, between, key_of
from flashdsa.kernels.indexer.sm90.prefill.plan import CHUNK

WORDS_EACH = CHUNK // WARP_SIZE


class Entries(NamedTuple):
    """Chunks of a query in the workspace: those of the log, then those of the segment.

    Their numbers have no gap between the two: chunk `logged` is the segment's first.
    """

    words: Any  # pointer to Int32, device memory: the log's first word
    segment: Int32  # words from the log's first to the segment's first
    logged: Int32
    count: Int32  # of all chunks


class Turns(NamedTuple):
    """Chunks that a warp takes: every `step`-th one."""

    first: Int32
    step: int


@cute.jit
def first_word(entries: Entries, chunk: Int32) -> Int32:
    """Offset of a chunk's first word from the log's first."""
    index = chunk * CHUNK
    if chunk >= entries.logged:
        index += entries.segment - entries.logged * CHUNK
    return index


@cute.jit
def load_chunk(entries: Entries, chunk: Int32, lane: Int32) -> cute.Tensor:
    """This lane's words of a chunk: one of each 32."""
    return load_words(entries.words + (first_word(entries, chunk) + lane))


def load_words(at: Any) -> Any:
    """One of each 32 words of a chunk."""
    mine = cute.make_rmem_tensor(WORDS_EACH, Int32)
    for i in range(WORDS_EACH):
        mine[i] = (at + WARP_SIZE * i).load()
    return mine


def count(address: Int32, offset: int = 0) -> None:
    """Add one to a bin. The constant 1, unsigned, makes it the instruction that counts lanes."""
    cute.arch.inline_ptx(
        f"red.relaxed.cta.shared::cta.add.u32 [{{$r0}} + {offset}], 1;", read_only_args=[address]
    )


def count_if(taken: Int32, address: Int32) -> None:
    """Add one to a bin if `taken` is not 0, by a predicate and no branch."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; "
        "@p red.relaxed.cta.shared::cta.add.u32 [{$r1}], 1; }",
        read_only_args=[taken, address],
    )


class KeyRange(NamedTuple):
    """Keys that may be the threshold, both ends included."""

    low: Int32
    high: Int32


@cute.jit
def count_range(
    entries: Entries, range_: KeyRange, shift: Int32, histogram: Int32, turns: Turns, lane: Int32
) -> None:
    """Count the entries of a range of keys in its bins of 2**shift keys.

    Args:
        histogram: a shared memory address.
    """
    width = Uint32(range_.high - range_.low)
    for chunk in cutlass.range(turns.first, entries.count, turns.step, unroll=1):
        mine = load_chunk(entries, chunk, lane)
        for i in cutlass.range_constexpr(WORDS_EACH):
            key = key_of(mine[i])
            if between(key, range_.low, width):
                count(histogram + (Int32(Uint32(key - range_.low) >> Uint32(shift)) << 2))


@cute.jit
def extremes(entries: Entries, within: KeyRange, turns: Turns, lane: Int32) -> KeyRange:
    """The least and the greatest key of a range among the chunks that this warp takes."""
    low, high = Int32(MAGNITUDE), Int32(-MAGNITUDE - 1)
    width = Uint32(within.high - within.low)
    for chunk in cutlass.range(turns.first, entries.count, turns.step, unroll=1):
        mine = load_chunk(entries, chunk, lane)
        for i in cutlass.range_constexpr(WORDS_EACH):
            key = key_of(mine[i])
            if between(key, within.low, width):
                low = cutlass.min(low, key)
                high = cutlass.max(high, key)
    return KeyRange(cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max"))
