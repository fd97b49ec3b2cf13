"""The threshold of a query by its scores alone: the key of its topk-th best, however many tie.

Rounds over all entries narrow a range of keys to one of its bins. The search is slow, and always
right: it is for queries whose bins of `window.py` leave too many entries about the cut-off.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Uint32, cute

from flashdsa.dsl.smem import store_words
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.prefill.entries import (
    LOWEST,
    MAGNITUDE,
    WORDS_EACH,
    Entries,
    KeyRange,
    Turns,
    count_range,
    extremes,
    key_of,
    load_chunk,
)
from flashdsa.kernels.indexer.sm90.prefill.plan import CHUNK_MASKS, ROUND_BINS
from flashdsa.kernels.indexer.sm90.prefill.team import (
    SCRATCH_HIGH,
    SCRATCH_LOW,
    Team,
    address_of,
    find_bin,
    team_sync,
)


class Threshold(NamedTuple):
    """Entries with a greater key win; of those with this one the first `equal`."""

    key: Int32
    equal: Int32
    cuts: cutlass.Boolean  # more entries have the key


@cute.jit
def mark_exactly(
    team: Team,
    entries: Entries,
    within: KeyRange,
    wanted: Int32,
    cuts: cutlass.Boolean,
    plan: cutlass.Constexpr,
) -> None:
    """Mark all entries above a range of keys, and the best `wanted` in it; if nothing is to be cut,
    all scores. Starts synced, unless something is cut; ends synced."""
    threshold = Threshold(Int32(LOWEST), Int32(0), cutlass.Boolean(False))
    if cuts:
        threshold = find_threshold(team, entries, within, wanted, plan)
    mark(team, entries, threshold, plan)
    team_sync(team, plan)


@cute.jit
def find_threshold(
    team: Team, entries: Entries, allowed: KeyRange, k: Int32, plan: cutlass.Constexpr
) -> Threshold:
    """Find the threshold of the k-th best entry in a range of keys with at least k entries. Ends
    not synced."""
    turns = Turns(team.member, plan.team_warps)
    range_ = extremes(entries, allowed, turns, team.lane)
    if cutlass.const_expr(plan.team_warps > 1):
        if team.member == 0 and team.lane == 0:
            team.scratch[SCRATCH_LOW] = Int32(MAGNITUDE)
            team.scratch[SCRATCH_HIGH] = Int32(-MAGNITUDE - 1)
        team_sync(team, plan)
        if team.lane == 0:
            low, high = team.scratch.iterator + SCRATCH_LOW, team.scratch.iterator + SCRATCH_HIGH
            cute.arch.atomic_min(low, range_.low, sem="relaxed", scope="cta")
            cute.arch.atomic_max(high, range_.high, sem="relaxed", scope="cta")
        team_sync(team, plan)
        range_ = KeyRange(team.scratch[SCRATCH_LOW], team.scratch[SCRATCH_HIGH])
    address = address_of(team.rounds)
    left, within = k, Int32(MAGNITUDE)  # the k among the entries of the range
    while within != left and range_.low != range_.high:
        shift = bin_shift(range_)
        team_sync(team, plan)  # everyone has read what the round before counted
        clear_rounds(team)
        team_sync(team, plan)
        count_range(entries, range_, shift, address, turns, team.lane)
        team_sync(team, plan)
        found = find_bin(team.rounds, ROUND_BINS, left, team.lane)
        left -= found.above
        within = found.within
        range_ = narrowed(range_, shift, found.bin)
    return Threshold(range_.low, left, within != left)


@cute.jit
def clear_rounds(team: Team) -> None:
    """Clear the bins of a round, by the team's first warp."""
    if team.member == 0:
        for i in cutlass.range_constexpr(ROUND_BINS // WARP_SIZE):
            team.rounds[i * WARP_SIZE + team.lane] = Int32(0)


@cute.jit
def bin_shift(range_: KeyRange) -> Int32:
    """Right shift that turns the distance from the range's low end into a bin."""
    bits = Int32(32) - Int32(cute.arch.clz(range_.high - range_.low))
    return cutlass.max(bits - (ROUND_BINS.bit_length() - 1), Int32(0))


@cute.jit
def narrowed(range_: KeyRange, shift: Int32, bin_index: Int32) -> KeyRange:
    """The range's keys in one of its bins."""
    low = range_.low + (bin_index << shift)
    behind = Uint32(low - range_.low) + (Uint32(1) << Uint32(shift)) - Uint32(1)
    width = Uint32(range_.high - range_.low)
    last = cutlass.min(behind, width)
    return KeyRange(low, range_.low + Int32(last))


@cute.jit
def mark(team: Team, entries: Entries, threshold: Threshold, plan: cutlass.Constexpr) -> None:
    """Mark the entries that win. One warp does all, in order, if equal keys are cut."""
    key, equal, cuts = threshold
    below = Int32(cute.arch.lanemask_lt())
    first, step = team.member, Int32(plan.team_warps)
    if cuts:
        first, step = team.member * entries.count, Int32(1)
    for chunk in cutlass.range(first, entries.count, step, unroll=1):
        mine = load_chunk(entries, chunk, team.lane)
        masks = []
        for i in cutlass.range_constexpr(WORDS_EACH):
            own = key_of(mine[i])
            takes = own >= key
            if cuts:
                tie = own == key
                ties = Int32(cute.arch.vote_ballot_sync(tie))
                before = Int32(cute.arch.popc(ties & below))
                takes = own > key or (tie and before < equal)
                equal -= Int32(cute.arch.popc(ties))
            masks.append(Int32(cute.arch.vote_ballot_sync(takes)))
        if team.lane == 0:
            for four in cutlass.range_constexpr(WORDS_EACH // 4):
                to = address_of(team.masks) + 4 * (CHUNK_MASKS * chunk + 4 * four)
                store_words(to, masks[4 * four : 4 * four + 4])
