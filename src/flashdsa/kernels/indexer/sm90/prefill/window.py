"""Scores counted in bins while they are computed: the map to bins, from a sample, and the counts.

A window is linear and monotone: scores outside fall into the end bins. It is set once for each tile
from 128 keys, and any window is right: a bad one leaves more to the exact search. CTAs that share a
tile score the same 128 keys for it, count none of them then, and so have the same window without a
message.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.select.keys import MAGNITUDE, key_of, word_of
from flashdsa.kernels.indexer.sm90.prefill.entries import KeyRange, count, count_if
from flashdsa.kernels.indexer.sm90.prefill.memory import PrefillMemory
from flashdsa.kernels.indexer.sm90.prefill.plan import QUERY_GROUP

SCORE_BARRIER = 1
"""The named barrier of the warps that score."""
FIRST_BIN = 0x4B000000
"""Bits of 2**23, at which fp32 counts in steps of 1."""
FIRST_BIN_OFFSET = FIRST_BIN * 4 % 2**32
"""FIRST_BIN times 4, modulo 2**32."""
FARTHEST = 256.0
"""Largest distance of a window from 0, in window widths: rounding stays far below a bin."""


class Bounds(NamedTuple):
    """Scores from `sure` on win; those from `maybe` on may. Valid only if `known`."""

    maybe: Float32
    sure: Float32
    known: cutlass.Boolean


def score_sync(plan: Any) -> None:
    """Sync all warps that score; it orders their accesses to memory."""
    cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=plan.select_warps * WARP_SIZE)


@cute.jit
def take_sample(
    memory: PrefillMemory,
    words: list[Int32],
    window: cute.Tensor,
    warp: Int32,
    lane: Int32,
    writes: cutlass.Boolean,
    plan: cutlass.Constexpr,
) -> None:
    """Set a window for each of this lane's queries, from the extremes that each warp has seen. The
    second ones, so that a few neighbouring scores do not stretch it. All warps that score call,
    those without keys `sample_nothing`.

    Args:
        words: of two keys for each group of queries. window: (2 groups,) fp32, written.
        warp: among those that score. writes: for one warp, which writes the windows for ranking.
    """
    slots = memory.samples.array(Float32, 2 * plan.select_warps * plan.tile_queries)
    for group in cutlass.range_constexpr(plan.groups):
        least, most = Float32.inf, -Float32.inf
        for half in cutlass.range_constexpr(2):
            word = words[2 * group + half]
            score = word.bitcast(Float32)
            if (word & MAGNITUDE).bitcast(Float32) < Float32.inf:
                least = cutlass.min(least, score)
                most = cutlass.max(most, score)
        for step in cutlass.range_constexpr(3):
            other = QUERY_GROUP << step
            least = cutlass.min(least, cute.arch.shuffle_sync_bfly(least, other))
            most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, other))
        if lane < QUERY_GROUP:
            slot = 2 * (warp * plan.tile_queries + group * QUERY_GROUP + lane)
            slots[slot] = least
            slots[slot + 1] = most
    # The extremes of all warps are in their slots. They are overwritten after the barrier at the
    # segment's end at the earliest.
    score_sync(plan)
    windows = memory.windows.array(Float32, 2 * plan.tile_queries)
    for group in cutlass.range_constexpr(plan.groups):
        query = group * QUERY_GROUP + lane % QUERY_GROUP
        factor, offset = window_of(slots, query, plan)
        window[2 * group] = factor
        window[2 * group + 1] = offset
        if writes and lane < QUERY_GROUP:
            windows[2 * query] = factor
            windows[2 * query + 1] = offset


@cute.jit
def sample_nothing(
    memory: PrefillMemory, warp: Int32, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Same as `take_sample`, for a warp that has no keys of the sample."""
    slots = memory.samples.array(Float32, 2 * plan.select_warps * plan.tile_queries)
    if lane < plan.tile_queries:
        slots[2 * (warp * plan.tile_queries + lane)] = Float32.inf
        slots[2 * (warp * plan.tile_queries + lane) + 1] = -Float32.inf
    score_sync(plan)


@cute.jit
def window_of(slots: cute.Tensor, query: Int32, plan: cutlass.Constexpr) -> tuple[Float32, Float32]:
    """(factor, offset): score * factor + offset is 0 to 1 in the window. It is twice as wide as the
    sample without its extremes."""
    least, least2, most, most2 = Float32.inf, Float32.inf, -Float32.inf, -Float32.inf
    for warp in cutlass.range_constexpr(plan.select_warps):
        slot = 2 * (warp * plan.tile_queries + query)
        low, high = slots[slot], slots[slot + 1]
        least2 = cutlass.min(least2, cutlass.max(least, low))
        least = cutlass.min(least, low)
        most2 = cutlass.max(most2, cutlass.min(most, high))
        most = cutlass.max(most, high)
    factor = Float32(0.5) * cute.arch.rcp_approx(most2 - least2)
    offset = Float32(0.25) - least2 * factor
    right = factor > Float32(0.0) and factor < Float32.inf
    if not (right and offset > Float32(-FARTHEST) and offset < Float32(FARTHEST)):
        factor, offset = Float32(0.0), Float32(0.0)
    return factor, offset


@cute.jit
def count_words(
    words: list[Int32], window: cute.Tensor, first: Int32, plan: cutlass.Constexpr
) -> None:
    """Count scores in their bins; NaN, and entries without a score, in the first one.

    Args:
        first: shared memory address of the first bin of the lane's first query, less
            FIRST_BIN_OFFSET.
    """
    for group in cutlass.range_constexpr(plan.groups):
        for half in cutlass.range_constexpr(2):
            word = words[2 * group + half]
            bits = bin_bits(word, window[2 * group], window[2 * group + 1], plan)
            count(first + (bits << 2), 4 * QUERY_GROUP * plan.bins * group)


def count_word(word: Int32, window: cute.Tensor, first: Int32, taken: Int32, plan: Any) -> None:
    """Count a score of the lane's first query if `taken` is not 0. first: as in `count_words`."""
    count_if(taken, first + (bin_bits(word, window[0], window[1], plan) << 2))


def bin_bits(word: Int32, factor: Float32, offset: Float32, plan: Any) -> Int32:
    """A word's bin in a window, plus FIRST_BIN."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 t; mov.b32 t, {$r0}; fma.rn.sat.f32 t, t, {$r1}, {$r2}; "
        "fma.rn.f32 t, t, {$r3}, 0f4B000000; mov.b32 {$w0}, t; }",
        write_only_types=[Int32],
        read_only_args=[word, factor, offset, Float32(plan.bins - 1)],
    )


@cute.jit
def bounds_of(memory: PrefillMemory, query: Int32, cut: Int32, plan: cutlass.Constexpr) -> Bounds:
    """Bounds of the bin `cut`, which has the score that cuts: half a bin wider on either side, so
    that no rounding matters."""
    windows = memory.windows.array(Float32, 2 * plan.tile_queries)
    factor, offset = windows[2 * query], windows[2 * query + 1]
    width = Float32(1.0 / (plan.bins - 1))
    width_of_score = cute.arch.rcp_approx(factor)
    maybe = (Float32(cut - 1) * width - offset) * width_of_score
    sure = (Float32(cut + 1) * width - offset) * width_of_score
    if cut == plan.bins - 1:
        sure = Float32.nan  # nothing is above
    return Bounds(maybe, sure, cut > 0 and factor > Float32(0.0))


SEARCH_BITS = 4
"""Bits of a key that one step of `keys_of_bin` finds, by half a warp."""
NO_SCORE, INFINITE = 0xFF800000 - 2**32, 0x7F800000
"""Words of the least and of the greatest score."""


@cute.jit
def keys_of_bin(
    memory: PrefillMemory, query: Int32, cut: Int32, lane: Int32, plan: cutlass.Constexpr
) -> tuple[KeyRange, cutlass.Boolean]:
    """The keys that are counted in the bin `cut` of a query's window, exactly, and whether the bin
    has scores only: the first one has NaN and entries without a score, too. All lanes call.

    Bins rise with scores, so that half of the lanes search for the bin's first key, the others for
    that of the next bin.
    """
    windows = memory.windows.array(Float32, 2 * plan.tile_queries)
    factor, offset = windows[2 * query], windows[2 * query + 1]
    points = 1 << SEARCH_BITS
    half, target = lane // points, cut + lane // points
    least = key_of(Int32(NO_SCORE))
    span = Uint32(key_of(Int32(INFINITE)) - least)
    below = Uint32(0)  # keys of lower bins, less one
    for step in cutlass.range_constexpr(32 // SEARCH_BITS):
        shift = 32 - SEARCH_BITS * (step + 1)
        at = cutlass.min(below + (Uint32(lane % points) << shift), span)
        own = bin_bits(word_of(least + Int32(at)), factor, offset, plan) - FIRST_BIN
        lower = Uint32(cute.arch.vote_ballot_sync(own < target)) >> Uint32(points * half)
        ones = cute.arch.popc(lower & Uint32(2**points - 1))
        below += Uint32(ones - 1) << shift
    last = least + Int32(below)
    low = cute.arch.shuffle_sync(last, 0) + 1
    high = cute.arch.shuffle_sync(last, points)
    if cut == plan.bins - 1:
        high = Int32(MAGNITUDE)
    return KeyRange(low, high), cut > 0 and factor > Float32(0.0)
