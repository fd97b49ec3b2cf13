"""Masks of bits of a query's entries: which ones are sure to win, which may, and which of these do.

Bins of the scores give the cut-off (teams.py); the few entries about it are compared one by one.
If these are too many, rounds over all entries find the threshold by the scores alone: the key of
the topk-th best, however many tie. Each narrows a range of keys to one of its bins. That search is
slow, and always right.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Uint32, cute

from flashdsa.dsl import smem, warp
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.select.sort_keys import LOWEST, MAGNITUDE, key_of, step_at, step_bits
from flashdsa.kernels.indexer.sm90.prefill import teams
from flashdsa.kernels.indexer.sm90.prefill.plan import CANDIDATES, CHUNK, CHUNK_MASKS, ROUND_BINS

ROUND_BITS = ROUND_BINS.bit_length() - 1
"""Bits of a bin's number."""


class Threshold(NamedTuple):
    """Entries with a greater key win; of those with this one the first `equal`."""

    key: Int32
    equal: Int32
    cuts: cutlass.Boolean  # more entries have the key


@cute.jit
def mark_exactly(
    team: teams.Team,
    entries: teams.Entries,
    within: teams.KeyRange,
    wanted: Int32,
    cuts: cutlass.Boolean,
) -> None:
    """Mark all entries above a range of keys, and the best `wanted` in it; if nothing is to be cut,
    all scores. Starts synced, unless something is cut; ends synced."""
    threshold = Threshold(Int32(LOWEST), Int32(0), cutlass.Boolean(False))
    if cuts:
        threshold = find_threshold(team, entries, within, wanted)
    mark(team, entries, threshold)
    teams.team_sync(team)


@cute.jit
def find_threshold(
    team: teams.Team, entries: teams.Entries, allowed: teams.KeyRange, k: Int32
) -> Threshold:
    """Find the threshold of the k-th best entry in a range of keys with at least k entries. Ends
    not synced."""
    plan = team.plan
    turns = teams.Turns(team.member, plan.team_warps)
    range_ = teams.extremes(entries, allowed, turns, team.lane)
    if cutlass.const_expr(plan.team_warps > 1):
        if team.member == 0 and team.lane == 0:
            team.scratch[teams.TeamScratch.LOW] = Int32(MAGNITUDE)
            team.scratch[teams.TeamScratch.HIGH] = Int32(-MAGNITUDE - 1)
        teams.team_sync(team)
        if team.lane == 0:
            low, high = (
                team.scratch.iterator + teams.TeamScratch.LOW,
                team.scratch.iterator + teams.TeamScratch.HIGH,
            )
            cute.arch.atomic_min(low, range_.low, sem="relaxed", scope="cta")
            cute.arch.atomic_max(high, range_.high, sem="relaxed", scope="cta")
        teams.team_sync(team)
        range_ = teams.KeyRange(
            team.scratch[teams.TeamScratch.LOW], team.scratch[teams.TeamScratch.HIGH]
        )
    address = teams.address_of(team.rounds)
    left, within = k, Int32(MAGNITUDE)  # the k among the entries of the range
    while within != left and range_.low != range_.high:
        low, high = Uint32(range_.low), Uint32(range_.high)
        shift = step_bits(high - low, ROUND_BITS)
        teams.team_sync(team)  # everyone has read what the round before counted
        clear_rounds(team)
        teams.team_sync(team)
        teams.count_range(entries, range_, shift, address, turns, team.lane)
        teams.team_sync(team)
        found = teams.find_bin(team.rounds, ROUND_BINS, left, team.lane)
        left -= found.above
        within = found.within
        first, last = step_at(low, high, shift, found.bin)
        range_ = teams.KeyRange(Int32(first), Int32(last))
    return Threshold(range_.low, left, within != left)


@cute.jit
def clear_rounds(team: teams.Team) -> None:
    """Clear the bins of a round, by the team's first warp."""
    if team.member == 0:
        for i in cutlass.range_constexpr(ROUND_BINS // WARP_SIZE):
            team.rounds[i * WARP_SIZE + team.lane] = Int32(0)


@cute.jit
def mark(team: teams.Team, entries: teams.Entries, threshold: Threshold) -> None:
    """Mark the entries that win. One warp does all, in order, if equal keys are cut."""
    plan = team.plan
    key, equal, cuts = threshold
    below = Int32(cute.arch.lanemask_lt())
    first, step = team.member, Int32(plan.team_warps)
    if cuts:
        first, step = team.member * entries.count, Int32(1)
    for chunk in cutlass.range(first, entries.count, step, unroll=1):
        mine = teams.load_chunk(entries, chunk, team.lane)
        masks = []
        for i in cutlass.range_constexpr(teams.WORDS_EACH):
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
            for four in cutlass.range_constexpr(teams.WORDS_EACH // 4):
                to = teams.address_of(team.masks) + 4 * (CHUNK_MASKS * chunk + 4 * four)
                smem.store_words(to, masks[4 * four : 4 * four + 4])


COMPARED = 8
"""Candidates that a lane compares its own with at the same time."""


@cute.jit
def mark_floor(
    team: teams.Team, entries: teams.Entries, floor: Float32, begin: Int32, end: Int32, ahead: Any
) -> None:
    """Mark the entries that are at least `floor`, of the chunks `begin` to `end` - 1. ahead: see
    `mark_chunks`."""
    bounds = teams.Bounds(floor, floor, cutlass.Boolean(True))
    mark_chunks(team, entries, bounds, begin, end, ahead, False)


@cute.jit
def load_ahead(team: teams.Team, entries: teams.Entries, begin: Int32) -> Any:
    """Load this lane's words of the chunk `begin`, and of the next one if two chunks are loaded
    early; the last chunk is loaded again if no next one exists."""
    plan = team.plan
    last = entries.count - 1
    chunks = [teams.load_chunk(entries, cutlass.min(begin, last), team.lane)]
    if cutlass.const_expr(plan.chunks_ahead == 2):
        chunks.append(teams.load_chunk(entries, cutlass.min(begin + 1, last), team.lane))
    return chunks


@cute.jit
def mark_chunks(
    team: teams.Team,
    entries: teams.Entries,
    bounds: teams.Bounds,
    begin: Int32,
    end: Int32,
    ahead: Any,
    both: cutlass.Constexpr,
) -> None:
    """Mark the entries that are at least `bounds.sure`, and with `both` those that are at least
    `bounds.maybe`, of the chunks `begin` to `end` - 1. ahead: result of `load_ahead` for `begin`,
    overwritten."""
    plan = team.plan
    last = entries.count - 1
    mine, second = ahead[0], ahead[-1]
    for chunk in cutlass.range(begin, end, unroll=1):
        following = teams.load_chunk(
            entries, cutlass.min(chunk + plan.chunks_ahead, last), team.lane
        )
        for four in cutlass.range_constexpr(teams.WORDS_EACH // 4):
            sures, maybes = [], []
            for i in cutlass.range_constexpr(4):
                score = mine[4 * four + i].bitcast(Float32)
                sures.append(Int32(cute.arch.vote_ballot_sync(score >= bounds.sure)))
                if cutlass.const_expr(both):
                    maybes.append(Int32(cute.arch.vote_ballot_sync(score >= bounds.maybe)))
            if team.lane == 0:
                at = 4 * (CHUNK_MASKS * chunk + 4 * four)
                smem.store_words(teams.address_of(team.masks) + at, sures)
                if cutlass.const_expr(both):
                    smem.store_words(teams.address_of(team.maybes) + at, maybes)
        for i in cutlass.range_constexpr(teams.WORDS_EACH):
            if cutlass.const_expr(plan.chunks_ahead == 2):
                mine[i] = second[i]
            second[i] = following[i]
    cute.arch.sync_warp()


@cute.jit
def collect(team: teams.Team, begin: Int32, end: Int32) -> None:
    """Count this warp's sure entries in its chunks, and those about the cut-off, whose indices
    become candidates while these have room. Two chunks at a time; a lane takes a word of each."""
    sure = Int32(0)
    counter = team.scratch.iterator + teams.TeamScratch.COUNT
    for chunk in cutlass.range(begin, end, 2, unroll=1):
        word = chunk * CHUNK_MASKS + team.lane
        mask = team.masks[word]
        rest, second = team.maybes[word] ^ mask, Int32(0)
        sure += Int32(cute.arch.popc(mask))
        if chunk + 1 < end:
            mask = team.masks[word + CHUNK_MASKS]
            second = team.maybes[word + CHUNK_MASKS] ^ mask
            sure += Int32(cute.arch.popc(mask))
        while rest | second != 0:
            if rest == 0:
                rest, second, word = second, Int32(0), word + CHUNK_MASKS
            entry = word * WARP_SIZE + warp.lowest_bit(rest)
            rest = rest & (rest - 1)
            index = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="cta")
            if index < CANDIDATES:
                team.indices[index] = entry
    sure = Int32(cute.arch.warp_redux_sync(sure, "add"))
    if team.lane == 0:
        total = team.scratch.iterator + teams.TeamScratch.SURE
        cute.arch.atomic_add(total, sure, sem="relaxed", scope="cta")


@cute.jit
def load_candidates(team: teams.Team, entries: teams.Entries, listed: Int32) -> None:
    """Load the keys of all candidates, by all warps of the team, so that they come at the same
    time; then fill up to a multiple of `COMPARED` with keys below any."""
    plan = team.plan
    begin = team.member * WARP_SIZE + team.lane
    padded = (listed + COMPARED - 1) // COMPARED * COMPARED
    for own in cutlass.range(begin, padded, plan.team_warps * WARP_SIZE, unroll=1):
        key = Int32(-MAGNITUDE - 1)
        if own >= listed:
            team.indices[own] = Int32(0)
        else:
            index = team.indices[own]
            word = teams.first_word(entries, index // CHUNK) + index % CHUNK
            key = key_of((entries.words + word).load())
        team.keys[own] = key


@cute.jit
def mark_candidates(team: teams.Team, listed: Int32, wanted: Int32) -> None:
    """Set the bits of the best `wanted` candidates; of equal ones, of the first."""
    plan = team.plan
    masks = teams.address_of(team.masks)
    begin = team.member * WARP_SIZE + team.lane
    for own in cutlass.range(begin, listed, plan.team_warps * WARP_SIZE, unroll=1):
        key, index = team.keys[own], team.indices[own]
        if number_of_better(team.keys, team.indices, listed, key, index) < wanted:
            set_bit(masks + 4 * (index // WARP_SIZE), Int32(1) << index % WARP_SIZE)


@cute.jit
def number_of_better(
    keys: cute.Tensor, indices: cute.Tensor, listed: Int32, key: Int32, index: Int32
) -> Int32:
    """Candidates with a greater key, or with this one and a lower index. After the last one keys
    below any fill the list up to a multiple of `COMPARED`."""
    better = Int32(0)
    for others in cutlass.range((listed + COMPARED - 1) // COMPARED, unroll=1):
        for four in cutlass.range_constexpr(COMPARED // 4):
            other_keys = smem.load4(keys, others * (COMPARED // 4) + four)
            other_indices = smem.load4(indices, others * (COMPARED // 4) + four)
            for i in cutlass.range_constexpr(4):
                tie = other_keys[i] == key and other_indices[i] < index
                better += Int32(1) if Boolean(other_keys[i] > key or tie) else Int32(0)
    return better


def set_bit(address: Int32, bit: Int32) -> None:
    """Set a bit in a word of shared memory in which other threads set bits, too."""
    cute.arch.inline_ptx(
        "red.relaxed.cta.shared::cta.or.b32 [{$r0}], {$r1};", read_only_args=[address, bit]
    )
