"""The threshold of a query: the key of its topk-th best entry, exact, however many keys tie.

One pass counts all entries in bins of equal width between the least and the greatest of a sample.
The bin with the threshold is known then; a second pass puts its keys into shared memory, and rounds
over these, which narrow a range of keys to one of its bins, end at the threshold. Where the bin has
too many entries for that, the rounds go over all entries. A team of one or two warps does a query.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Uint32, cute

from flashdsa.dsl.arena import Arena
from flashdsa.dsl.smem import load4, store4
from flashdsa.dsl.warp import lowest_bit, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.prefill.entries import (
    MAGNITUDE,
    Entries,
    KeyRange,
    Turns,
    Window,
    count,
    count_range,
    count_window,
    extremes_of_bin,
    gather_bin,
    inside,
    sample_window,
)
from flashdsa.kernels.indexer.sm90.prefill.plan import (
    CANDIDATES,
    HISTOGRAM_BINS,
    SCRATCH_WORDS,
)

FIRST_TEAM = 2
"""The named barrier of the first team."""
SCRATCH_COUNT, SCRATCH_LOW, SCRATCH_HIGH = range(3)
BINS_READ = 4 * WARP_SIZE
"""Bins that a warp reads at once."""


class Team(NamedTuple):
    """The warps that rank a query, as one of them sees it, and the shared memory that they have."""

    number: Int32
    member: Int32  # the calling warp
    lane: Int32
    histogram: cute.Tensor  # (bins,) Int32
    candidates: cute.Tensor  # (CANDIDATES,) Int32: keys
    scratch: cute.Tensor  # (SCRATCH_WORDS,) Int32


class Threshold(NamedTuple):
    """Entries with a greater key win; of those with this one the first `equal`."""

    key: Int32
    equal: Int32
    cuts: cutlass.Boolean  # there are more of them


@cute.jit
def team_of(arena: Arena, thread: Int32, plan: cutlass.Constexpr) -> Team:
    """The calling warp's team."""
    warp = cute.arch.make_warp_uniform(thread // WARP_SIZE)
    number = warp // plan.team_warps
    histogram = arena.pointer("histogram", Int32) + number * plan.bins
    candidates = arena.pointer("candidates", Int32) + number * CANDIDATES
    scratch = arena.pointer("scratch", Int32) + number * SCRATCH_WORDS
    assert plan.bins * plan.teams == HISTOGRAM_BINS
    return Team(
        number,
        warp % plan.team_warps,
        thread % WARP_SIZE,
        cute.make_tensor(histogram, cute.make_layout(plan.bins)),
        cute.make_tensor(candidates, cute.make_layout(CANDIDATES)),
        cute.make_tensor(scratch, cute.make_layout(SCRATCH_WORDS)),
    )


@cute.jit
def team_sync(team: Team, plan: cutlass.Constexpr) -> None:
    """The team's warps wait for each other; their accesses to memory are ordered by it."""
    if cutlass.const_expr(plan.team_warps == 1):
        cute.arch.sync_warp()
    else:
        cute.arch.barrier(
            barrier_id=FIRST_TEAM + team.number, number_of_threads=plan.team_warps * WARP_SIZE
        )


@cute.jit
def clear(team: Team, plan: cutlass.Constexpr) -> None:
    """All bins 0; the caller syncs before and behind."""
    nothing = cute.make_rmem_tensor(4, Int32)
    nothing.fill(0)
    own = plan.bins // 4 // plan.team_warps // WARP_SIZE
    for i in cutlass.range_constexpr(own):
        at = (team.member * own + i) * WARP_SIZE + team.lane
        store4(team.histogram, at, nothing.load())


class Found(NamedTuple):
    """The bin that has the k-th best entry."""

    bin: Int32
    above: Int32  # entries in the bins above
    within: Int32  # entries in it


@cute.jit
def find_bin(team: Team, k: Int32, plan: cutlass.Constexpr) -> Found:
    """Of the histogram, which has at least k entries, the bin of the k-th best. All lanes get it,
    and every warp of the team finds it itself."""
    lane = team.lane
    row = Int32(plan.bins // BINS_READ - 1)
    above = Int32(0)
    counts = load4(team.histogram, row * WARP_SIZE + lane)
    mine = counts[0] + counts[1] + counts[2] + counts[3]
    total = cute.arch.warp_redux_sync(mine, "add")
    while above + total < k and row > 0:
        above += total
        row -= 1
        counts = load4(team.histogram, row * WARP_SIZE + lane)
        mine = counts[0] + counts[1] + counts[2] + counts[3]
        total = cute.arch.warp_redux_sync(mine, "add")
    # Entries above this lane's bins: those of the lanes behind it.
    above += total - prefix_sum(mine, lane)
    crosses = above < k and above + mine >= k
    place, within = Int32(3), counts[3]
    for i in cutlass.range_constexpr(3):
        if above + within < k:
            above += within
            place, within = Int32(2 - i), counts[2 - i]
    source = lowest_bit(Int32(cute.arch.vote_ballot_sync(crosses)))
    return Found(
        cute.arch.shuffle_sync(row * BINS_READ + 4 * lane + place, source),
        cute.arch.shuffle_sync(above, source),
        cute.arch.shuffle_sync(within, source),
    )


@cute.jit
def bin_shift(range_: KeyRange, plan: cutlass.Constexpr) -> Int32:
    """By how much to shift what is above the range's low end so that it names a bin."""
    bits = Int32(32) - Int32(cute.arch.clz(range_.high - range_.low))
    return cutlass.max(bits - (plan.bins.bit_length() - 1), Int32(0))


@cute.jit
def narrowed(range_: KeyRange, shift: Int32, bin_index: Int32) -> KeyRange:
    """The range's keys in one of its bins."""
    low = range_.low + (bin_index << shift)
    behind = Uint32(low - range_.low) + (Uint32(1) << Uint32(shift)) - Uint32(1)
    width = Uint32(range_.high - range_.low)
    last = cutlass.min(behind, width)
    return KeyRange(low, range_.low + Int32(last))


@cute.jit
def count_candidates(
    team: Team, listed: Int32, range_: KeyRange, shift: Int32, plan: cutlass.Constexpr
) -> None:
    """Count those of the range in its bins of 2**shift keys."""
    first = team.histogram.iterator.toint()
    begin = team.member * WARP_SIZE + team.lane
    for i in cutlass.range(begin, listed, plan.team_warps * WARP_SIZE, unroll=1):
        key = team.candidates[i]
        if inside(range_, key):
            offset = Int32(Uint32(key - range_.low) >> Uint32(shift)) << 2
            count(Int32(first) + offset)


@cute.jit
def range_of_candidates(team: Team, listed: Int32) -> KeyRange:
    """From the least to the greatest; every warp of the team finds it itself."""
    low, high = Int32(MAGNITUDE), Int32(-MAGNITUDE - 1)
    for i in cutlass.range(team.lane, listed, WARP_SIZE, unroll=1):
        low = cutlass.min(low, team.candidates[i])
        high = cutlass.max(high, team.candidates[i])
    return KeyRange(cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max"))


@cute.jit
def collect_bin(
    team: Team, entries: Entries, window: Window, found: Found, plan: cutlass.Constexpr
) -> tuple[Int32, KeyRange]:
    """(how many candidates there are, from the least to the greatest key of the bin's entries):
    the keys of the bin as candidates, or none of them if they are too many. Ends synced."""
    turns = Turns(team.member, plan.team_warps)
    listed = Int32(0)
    range_ = KeyRange(Int32(0), Int32(0))
    if found.within <= CANDIDATES:
        listed = found.within
        counter = team.scratch.iterator + SCRATCH_COUNT
        gather_bin(entries, window, found.bin, team.candidates, counter, turns, team.lane, plan)
        team_sync(team, plan)
        range_ = range_of_candidates(team, listed)
    else:
        range_ = extremes_of_bin(entries, window, found.bin, turns, team.lane, plan)
        if cutlass.const_expr(plan.team_warps > 1):
            if team.lane == 0:
                low, high = (
                    team.scratch.iterator + SCRATCH_LOW,
                    team.scratch.iterator + SCRATCH_HIGH,
                )
                cute.arch.atomic_min(low, range_.low, sem="relaxed", scope="cta")
                cute.arch.atomic_max(high, range_.high, sem="relaxed", scope="cta")
            team_sync(team, plan)
            range_ = KeyRange(team.scratch[SCRATCH_LOW], team.scratch[SCRATCH_HIGH])
    return listed, range_


@cute.jit
def find_threshold(
    team: Team, entries: Entries, sample: Entries, k: Int32, plan: cutlass.Constexpr
) -> Threshold:
    """Of the k-th best of the entries, of which at least k are scores. Ends synced.

    Args:
        sample: entries to take the bins' width from.
    """
    turns = Turns(team.member, plan.team_warps)
    window = sample_window(sample, team.lane, plan)
    team_sync(team, plan)  # the query before has been read out of what follows
    clear(team, plan)
    if team.member == 0 and team.lane == 0:
        team.scratch[SCRATCH_COUNT] = Int32(0)
        team.scratch[SCRATCH_LOW] = Int32(MAGNITUDE)
        team.scratch[SCRATCH_HIGH] = Int32(-MAGNITUDE - 1)
    team_sync(team, plan)
    address = Int32(team.histogram.iterator.toint())
    count_window(entries, window, address, turns, team.lane, plan)
    team_sync(team, plan)
    found = find_bin(team, k, plan)
    left = k - found.above  # the k among the entries of the range
    within = found.within
    listed, range_ = collect_bin(team, entries, window, found, plan)
    while within != left and range_.low != range_.high:
        shift = bin_shift(range_, plan)
        team_sync(team, plan)  # everyone has read what the round before counted
        clear(team, plan)
        team_sync(team, plan)
        if listed > 0:
            count_candidates(team, listed, range_, shift, plan)
        else:
            count_range(entries, range_, shift, address, turns, team.lane, plan)
        team_sync(team, plan)
        found = find_bin(team, left, plan)
        left -= found.above
        within = found.within
        range_ = narrowed(range_, shift, found.bin)
    team_sync(team, plan)
    return Threshold(range_.low, left, within != left)
