"""A query's scores as words in device memory, and the passes over them.

A word is the bits of an fp32 score, of which -0 does not occur; or `NAN`, of a score that is NaN
and ranks last; or `INVALID`, of a key that the query does not see, and of no key. `key_of` makes
signed integers of them, in the order of the scores.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.prefill.plan import CHUNK

NAN = -2
INVALID = -1
LOWEST = -(2**31) + 1
"""The key of `NAN`. That of `INVALID` is below it."""
MAGNITUDE = 0x7FFFFFFF
WORDS_EACH = CHUNK // WARP_SIZE
VECTOR = 4
VECTORS = WORDS_EACH // VECTOR
FIRST_BIN = 0x4B000000
"""Bits of 2**23, at which fp32 counts in steps of 1."""
FIRST_BIN_OFFSET = FIRST_BIN * 4 % 2**32
"""Four times that, as far as 32 bits hold it."""


class Entries(NamedTuple):
    """Chunks of words."""

    words: Any  # pointer to Int32, device memory
    first_chunk: Int32
    end_chunk: Int32


class Turns(NamedTuple):
    """Which chunks a warp takes: every `step`-th one."""

    first: Int32
    step: int


def key_of(word: Int32) -> Int32:
    """Signed integers in the order of scores."""
    return word ^ ((word >> 31) & MAGNITUDE)


def load_chunk(words: Any, chunk: Int32, lane: Int32) -> Any:
    """This lane's words of a chunk: 4 neighbouring ones of each 128."""
    mine = cute.make_rmem_tensor(WORDS_EACH, Int32)
    for v in range(VECTORS):
        at = words + (chunk * CHUNK + v * (VECTOR * WARP_SIZE) + VECTOR * lane)
        four = cute.make_tensor(at.align(16), cute.make_layout(VECTOR)).load()
        for i in range(VECTOR):
            mine[VECTOR * v + i] = four[i]
    return mine


class Window(NamedTuple):
    """A linear, monotone map of scores to bins: what lies outside falls into the end bins."""

    lowest: Float32
    factor: Float32  # bins in a unit


def window_bits(window: Window, word: Int32, plan: Any) -> Int32:
    """FIRST_BIN + the bin of a word; NaN, and what is no score, is in the first one."""
    last = FIRST_BIN + plan.bins - 1
    return cute.arch.inline_ptx(
        "{ .reg .f32 t; mov.b32 t, {$r0}; sub.f32 t, t, {$r1}; "
        "fma.rn.f32 t, t, {$r2}, 0f4B000000; max.f32 t, t, 0f4B000000; "
        f"min.f32 t, t, 0f{last:08X}; mov.b32 {{$w0}}, t; }}",
        write_only_types=[Int32],
        read_only_args=[word, window.lowest, window.factor],
    )


@cute.jit
def sample_window(entries: Entries, lane: Int32, plan: cutlass.Constexpr) -> Window:
    """From the least to the greatest of 512 words that lie evenly among the entries."""
    least, most = Float32.inf, -Float32.inf
    step = (entries.end_chunk - entries.first_chunk) * (CHUNK // (VECTORS * WARP_SIZE))
    for v in cutlass.range_constexpr(VECTORS):
        offset = entries.first_chunk * CHUNK + (v * WARP_SIZE + lane) * step
        at = entries.words + offset
        four = cute.make_tensor(at.align(16), cute.make_layout(VECTOR)).load()
        for i in cutlass.range_constexpr(VECTOR):
            score = four[i].bitcast(Float32)
            magnitude = (four[i] & MAGNITUDE).bitcast(Float32)
            if magnitude < Float32.inf:
                least = cutlass.min(least, score)
                most = cutlass.max(most, score)
    least_key = cute.arch.warp_redux_sync(key_of(least.bitcast(Int32)), "min")
    most_key = cute.arch.warp_redux_sync(key_of(most.bitcast(Int32)), "max")
    least = key_of(least_key).bitcast(Float32)  # the map is its own inverse
    most = key_of(most_key).bitcast(Float32)
    factor = Float32(plan.bins - 1) / (most - least)
    if not factor < Float32.inf:
        factor = Float32(0.0)
    if not factor > Float32(0.0):
        factor = Float32(0.0)
    if not least > -Float32.inf:
        least = Float32(0.0)
    if not least < Float32.inf:
        least = Float32(0.0)
    return Window(least, factor)


def count(address: Int32) -> None:
    """Add one to a bin. The constant 1, unsigned, makes it the instruction that counts lanes."""
    cute.arch.inline_ptx(
        "red.relaxed.cta.shared::cta.add.u32 [{$r0}], 1;", read_only_args=[address]
    )


@cute.jit
def count_window(
    entries: Entries,
    window: Window,
    histogram: Int32,
    turns: Turns,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Count every entry in its bin. histogram: a shared memory address."""
    first = histogram - Int32(FIRST_BIN_OFFSET)
    for chunk in cutlass.range(
        entries.first_chunk + turns.first, entries.end_chunk, turns.step, unroll=1
    ):
        mine = load_chunk(entries.words, chunk, lane)
        for i in cutlass.range_constexpr(WORDS_EACH):
            count(first + (window_bits(window, mine[i], plan) << 2))


class KeyRange(NamedTuple):
    """Keys that may be the threshold, both ends included."""

    low: Int32
    high: Int32


def inside(range_: KeyRange, key: Int32) -> cutlass.Boolean:
    """Whether a key is in the range: a key below it wraps around to far above it."""
    return Uint32(key - range_.low) <= Uint32(range_.high - range_.low)


@cute.jit
def count_range(
    entries: Entries,
    range_: KeyRange,
    shift: Int32,
    histogram: Int32,
    turns: Turns,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Count the entries of a range of keys in its bins of 2**shift keys."""
    for chunk in cutlass.range(
        entries.first_chunk + turns.first, entries.end_chunk, turns.step, unroll=1
    ):
        mine = load_chunk(entries.words, chunk, lane)
        for i in cutlass.range_constexpr(WORDS_EACH):
            key = key_of(mine[i])
            if inside(range_, key):
                count(histogram + (Int32(Uint32(key - range_.low) >> Uint32(shift)) << 2))


@cute.jit
def gather_bin(
    entries: Entries,
    window: Window,
    bin_index: Int32,
    candidates: cute.Tensor,
    counter: Any,
    turns: Turns,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Append the keys of a bin's entries to the candidates, in any order; they have room."""
    wanted = bin_index + FIRST_BIN
    for chunk in cutlass.range(
        entries.first_chunk + turns.first, entries.end_chunk, turns.step, unroll=1
    ):
        mine = load_chunk(entries.words, chunk, lane)
        for i in cutlass.range_constexpr(WORDS_EACH):
            if window_bits(window, mine[i], plan) == wanted:
                index = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="cta")
                candidates[index] = key_of(mine[i])


@cute.jit
def extremes_of_bin(
    entries: Entries,
    window: Window,
    bin_index: Int32,
    turns: Turns,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> KeyRange:
    """The least and the greatest key of a bin's entries, of the chunks that this warp takes."""
    low, high = Int32(MAGNITUDE), Int32(-MAGNITUDE - 1)
    wanted = bin_index + FIRST_BIN
    for chunk in cutlass.range(
        entries.first_chunk + turns.first, entries.end_chunk, turns.step, unroll=1
    ):
        mine = load_chunk(entries.words, chunk, lane)
        for i in cutlass.range_constexpr(WORDS_EACH):
            if window_bits(window, mine[i], plan) == wanted:
                low = cutlass.min(low, key_of(mine[i]))
                high = cutlass.max(high, key_of(mine[i]))
    return KeyRange(cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max"))
