"""A query's scores in device memory and in bins, the shared memory, and the warps that rank it.

A word is the bits of an fp32 score, of which -0 does not occur; `NAN`, if that is NaN, which ranks
last; or `INVALID`, of a key that the query does not see, and of no key. Keys are signed: see
`key_of`, select/sort_keys.py. The latter two words are below nothing if compared as fp32.

Scores are counted in bins while they are computed. A window, from a sample, maps them to bins: it
is linear and monotone, and scores outside fall into the end bins. It is set once for each tile from
128 keys, and any window is right: a bad one leaves more to the exact search. CTAs that share a tile
score the same 128 keys for it, count none of them then, and so have the same window without a
message.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from flashdsa.dsl.memory import Memory
from flashdsa.dsl.smem import load4, store4
from flashdsa.dsl.warp import lowest_bit, ones_of, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.select.sort_keys import MAGNITUDE, between, key_of, reach, word_of
from flashdsa.kernels.indexer.sm90.prefill.plan import CANDIDATES, CHUNK, QUERY_GROUP, ROUND_BINS

WORDS_EACH = CHUNK // WARP_SIZE


class Entries(NamedTuple):
    """Chunks of a query in the workspace: those of the log, then those of the segment. Their
    numbers have no gap between the two: chunk `logged` is the segment's first."""

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


class KeyRange(NamedTuple):
    """Keys that may be the threshold, both ends included."""

    low: Int32
    high: Int32


@cute.jit
def count_range(
    entries: Entries, range_: KeyRange, shift: Int32, histogram: Int32, turns: Turns, lane: Int32
) -> None:
    """Count the entries of a range of keys in its bins of 2**shift keys. histogram: a shared memory
    address."""
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


FIRST_TEAM = 2
"""The named barrier of the first team."""
BINS_READ = 4 * WARP_SIZE
"""Bins that a warp reads at once."""


class TeamScratch:
    """Words of a team's scratch. The last two, if CTAs share tiles: winners among the candidates of
    the CTAs before, and phases of messages."""

    COUNT, SURE, LOW, HIGH, WINNERS, PHASES = range(6)


class Team(NamedTuple):
    """A team, as one of its warps sees it."""

    memory: Memory
    number: Int32
    member: Int32  # the calling warp
    lane: Int32
    masks: cute.Tensor  # (plan.masks,) Int32: a bit for each entry
    maybes: cute.Tensor  # likewise
    rounds: cute.Tensor  # (ROUND_BINS,) Int32
    keys: cute.Tensor  # (CANDIDATES,) Int32, the first half of the same
    indices: cute.Tensor  # (CANDIDATES,) Int32, the second one
    scratch: cute.Tensor  # (scratch_words,) Int32

    @property
    def plan(self) -> Any:
        return self.memory.plan


@cute.jit
def team_of(memory: Memory, thread: Int32, plan: cutlass.Constexpr) -> Team:
    """The calling warp's team."""
    warp = cute.arch.make_warp_uniform(thread // WARP_SIZE)
    number = warp // plan.team_warps
    return Team(
        memory,
        number,
        warp % plan.team_warps,
        thread % WARP_SIZE,
        memory.masks.array(Int32, plan.masks, number),
        memory.maybes.array(Int32, plan.masks, number),
        memory.candidates.array(Int32, ROUND_BINS, number),
        memory.candidates.array(Int32, CANDIDATES, 2 * number),
        memory.candidates.array(Int32, CANDIDATES, 2 * number + 1),
        memory.scratch.array(Int32, plan.scratch_words, number),
    )


@cute.jit
def team_sync(team: Team) -> None:
    """Sync the team's warps; it orders their accesses to memory."""
    plan = team.plan
    if cutlass.const_expr(plan.team_warps == 1):
        cute.arch.sync_warp()
    else:
        cute.arch.barrier(
            barrier_id=FIRST_TEAM + team.number, number_of_threads=plan.team_warps * WARP_SIZE
        )


@cute.jit
def clear(team: Team, histogram: cute.Tensor, bins: cutlass.Constexpr) -> None:
    """Set all bins to 0, by all warps of the team; the caller syncs before and after."""
    plan = team.plan
    nothing = cute.make_rmem_tensor(4, Int32)
    nothing.fill(0)
    for i in cutlass.range_constexpr(bins // BINS_READ // plan.team_warps):
        at = (team.member + i * plan.team_warps) * WARP_SIZE + team.lane
        store4(histogram, at, nothing.load())


class Found(NamedTuple):
    """The bin that has the k-th best entry."""

    bin: Int32
    above: Int32  # entries in the bins above
    within: Int32  # entries in it


@cute.jit
def find_bin(histogram: cute.Tensor, bins: cutlass.Constexpr, k: Int32, lane: Int32) -> Found:
    """Find the bin of the k-th best in a histogram of at least k entries; all lanes get it."""
    totals = []
    for row in cutlass.range_constexpr(bins // BINS_READ):
        counts = load4(histogram, row * WARP_SIZE + lane)
        mine = counts[0] + counts[1] + counts[2] + counts[3]
        totals.append(Int32(cute.arch.warp_redux_sync(mine, "add")))
    row, above, so_far = Int32(0), Int32(0), Int32(0)
    for back in cutlass.range_constexpr(bins // BINS_READ - 1):
        so_far += totals[bins // BINS_READ - 1 - back]
        row += Int32(1) if so_far >= k else Int32(0)
        above = so_far if so_far < k else above
    counts = load4(histogram, row * WARP_SIZE + lane)
    mine = counts[0] + counts[1] + counts[2] + counts[3]
    # Entries above this lane's bins: those of the higher lanes.
    through = prefix_sum(mine, lane)
    above += cute.arch.shuffle_sync(through, WARP_SIZE - 1) - through
    crosses = above < k and above + mine >= k
    index, above, within = reach(counts, above, k)
    source = lowest_bit(Int32(cute.arch.vote_ballot_sync(crosses)))
    return Found(
        cute.arch.shuffle_sync(row * BINS_READ + 4 * lane + index, source),
        cute.arch.shuffle_sync(above, source),
        cute.arch.shuffle_sync(within, source),
    )


@cute.jit
def number_of_ones(team: Team, begin: Int32, end: Int32) -> Int32:
    """Ones in the masks of the words `begin` to `end` - 1; every warp counts them itself."""
    return ones_of(team.masks, begin, end, team.lane)


def address_of(array: cute.Tensor) -> Int32:
    """The array's address in shared memory."""
    return Int32(array.iterator.toint())


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
    memory: Memory,
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
def sample_nothing(memory: Memory, warp: Int32, lane: Int32, plan: cutlass.Constexpr) -> None:
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
    """Count scores in their bins; NaN, and entries without a score, in the first one. first: shared
    memory address of the first bin of the lane's first query, less FIRST_BIN_OFFSET."""
    for group in cutlass.range_constexpr(plan.groups):
        for half in cutlass.range_constexpr(2):
            word = words[2 * group + half]
            bits = bin_bits(word, window[2 * group], window[2 * group + 1], plan)
            count(first + (bits << 2), 4 * QUERY_GROUP * plan.bins * group)


def bin_bits(word: Int32, factor: Float32, offset: Float32, plan: Any) -> Int32:
    """A word's bin in a window, plus FIRST_BIN."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 t; mov.b32 t, {$r0}; fma.rn.sat.f32 t, t, {$r1}, {$r2}; "
        "fma.rn.f32 t, t, {$r3}, 0f4B000000; mov.b32 {$w0}, t; }",
        write_only_types=[Int32],
        read_only_args=[word, factor, offset, Float32(plan.bins - 1)],
    )


@cute.jit
def bounds_of(memory: Memory, query: Int32, cut: Int32, plan: cutlass.Constexpr) -> Bounds:
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
    memory: Memory, query: Int32, cut: Int32, lane: Int32, plan: cutlass.Constexpr
) -> tuple[KeyRange, cutlass.Boolean]:
    """The keys that are counted in the bin `cut` of a query's window, exactly, and whether the bin
    has scores only: the first one has NaN and entries without a score, too. All lanes call. Bins
    rise with scores, so that half of the lanes search for the bin's first key, the others for that
    of the next bin."""
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
