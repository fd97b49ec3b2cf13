"""Masks of bits of a query's entries: which ones are sure to win, which may, and which of these do.

Bins of the scores give the cut-off (window.py); the few about it are compared one by one.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from flashdsa.dsl.smem import load4, store_words
from flashdsa.dsl.warp import lowest_bit
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.prefill.entries import (
    MAGNITUDE,
    WORDS_EACH,
    Entries,
    first_word,
    key_of,
    load_chunk,
)
from flashdsa.kernels.indexer.sm90.prefill.plan import CANDIDATES, CHUNK, CHUNK_MASKS
from flashdsa.kernels.indexer.sm90.prefill.team import (
    SCRATCH_COUNT,
    SCRATCH_SURE,
    Team,
    address_of,
)
from flashdsa.kernels.indexer.sm90.prefill.window import Bounds

COMPARED = 8
"""Candidates that a lane compares its own with at the same time."""


@cute.jit
def mark_floor(
    team: Team,
    entries: Entries,
    floor: Float32,
    begin: Int32,
    end: Int32,
    ahead: Any,
    plan: cutlass.Constexpr,
) -> None:
    """Mark the entries that are at least `floor`, of the chunks `begin` to `end` - 1. ahead: see
    `mark_chunks`."""
    bounds = Bounds(floor, floor, cutlass.Boolean(True))
    mark_chunks(team, entries, bounds, begin, end, ahead, False, plan)


@cute.jit
def load_ahead(team: Team, entries: Entries, begin: Int32, plan: cutlass.Constexpr) -> Any:
    """Load this lane's words of the chunk `begin`, and of the next one if two chunks are loaded
    early; the last chunk is loaded again if no next one exists."""
    last = entries.count - 1
    chunks = [load_chunk(entries, cutlass.min(begin, last), team.lane)]
    if cutlass.const_expr(plan.chunks_ahead == 2):
        chunks.append(load_chunk(entries, cutlass.min(begin + 1, last), team.lane))
    return chunks


@cute.jit
def mark_chunks(
    team: Team,
    entries: Entries,
    bounds: Bounds,
    begin: Int32,
    end: Int32,
    ahead: Any,
    both: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> None:
    """Mark the entries that are at least `bounds.sure`, and with `both` those that are at least
    `bounds.maybe`, of the chunks `begin` to `end` - 1.

    Args:
        ahead: result of `load_ahead` for `begin`, overwritten.
    """
    last = entries.count - 1
    mine, second = ahead[0], ahead[-1]
    for chunk in cutlass.range(begin, end, unroll=1):
        following = load_chunk(entries, cutlass.min(chunk + plan.chunks_ahead, last), team.lane)
        for four in cutlass.range_constexpr(WORDS_EACH // 4):
            sures, maybes = [], []
            for i in cutlass.range_constexpr(4):
                score = mine[4 * four + i].bitcast(Float32)
                sures.append(Int32(cute.arch.vote_ballot_sync(score >= bounds.sure)))
                if cutlass.const_expr(both):
                    maybes.append(Int32(cute.arch.vote_ballot_sync(score >= bounds.maybe)))
            if team.lane == 0:
                at = 4 * (CHUNK_MASKS * chunk + 4 * four)
                store_words(address_of(team.masks) + at, sures)
                if cutlass.const_expr(both):
                    store_words(address_of(team.maybes) + at, maybes)
        for i in cutlass.range_constexpr(WORDS_EACH):
            if cutlass.const_expr(plan.chunks_ahead == 2):
                mine[i] = second[i]
            second[i] = following[i]
    cute.arch.sync_warp()


@cute.jit
def collect(team: Team, begin: Int32, end: Int32) -> None:
    """Count this warp's sure entries in its chunks, and those about the cut-off, whose indices
    become candidates while these have room. Two chunks at a time; a lane takes a word of each."""
    sure = Int32(0)
    counter = team.scratch.iterator + SCRATCH_COUNT
    for chunk in cutlass.range(begin, end, 2, unroll=1):
        word = chunk * CHUNK_MASKS + team.lane
        mask = team.masks[word]
        rest, behind = team.maybes[word] ^ mask, Int32(0)
        sure += Int32(cute.arch.popc(mask))
        if chunk + 1 < end:
            mask = team.masks[word + CHUNK_MASKS]
            behind = team.maybes[word + CHUNK_MASKS] ^ mask
            sure += Int32(cute.arch.popc(mask))
        while rest | behind != 0:
            if rest == 0:
                rest, behind, word = behind, Int32(0), word + CHUNK_MASKS
            place = word * WARP_SIZE + lowest_bit(rest)
            rest = rest & (rest - 1)
            index = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="cta")
            if index < CANDIDATES:
                team.places[index] = place
    sure = Int32(cute.arch.warp_redux_sync(sure, "add"))
    if team.lane == 0:
        total = team.scratch.iterator + SCRATCH_SURE
        cute.arch.atomic_add(total, sure, sem="relaxed", scope="cta")


@cute.jit
def load_candidates(team: Team, entries: Entries, listed: Int32, plan: cutlass.Constexpr) -> None:
    """Load the keys of all candidates, by all warps of the team, so that they come at the same
    time; then fill up to a multiple of `COMPARED` with keys below any."""
    begin = team.member * WARP_SIZE + team.lane
    padded = (listed + COMPARED - 1) // COMPARED * COMPARED
    for own in cutlass.range(begin, padded, plan.team_warps * WARP_SIZE, unroll=1):
        key = Int32(-MAGNITUDE - 1)
        if own >= listed:
            team.places[own] = Int32(0)
        else:
            place = team.places[own]
            word = first_word(entries, place // CHUNK) + place % CHUNK
            key = key_of((entries.words + word).load())
        team.keys[own] = key


@cute.jit
def mark_candidates(team: Team, listed: Int32, wanted: Int32, plan: cutlass.Constexpr) -> None:
    """Set the bits of the best `wanted` candidates; of equal ones, of the first."""
    masks = address_of(team.masks)
    begin = team.member * WARP_SIZE + team.lane
    for own in cutlass.range(begin, listed, plan.team_warps * WARP_SIZE, unroll=1):
        key, place = team.keys[own], team.places[own]
        better = Int32(0)
        for others in cutlass.range((listed + COMPARED - 1) // COMPARED, unroll=1):
            for four in cutlass.range_constexpr(COMPARED // 4):
                keys = load4(team.keys, others * (COMPARED // 4) + four)
                places = load4(team.places, others * (COMPARED // 4) + four)
                for i in cutlass.range_constexpr(4):
                    tie = keys[i] == key and places[i] < place
                    better += Int32(1) if Boolean(keys[i] > key or tie) else Int32(0)
        if better < wanted:
            set_bit(masks + 4 * (place // WARP_SIZE), Int32(1) << place % WARP_SIZE)


def set_bit(address: Int32, bit: Int32) -> None:
    """Set a bit in a word of shared memory in which other threads set bits, too."""
    cute.arch.inline_ptx(
        "red.relaxed.cta.shared::cta.or.b32 [{$r0}], {$r1};", read_only_args=[address, bit]
    )
