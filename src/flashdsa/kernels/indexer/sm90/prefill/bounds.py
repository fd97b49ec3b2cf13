"""What certainly wins, what may, and which of the latter does: masks of bits of a query's entries.

Bins of the scores say where the cut-off lies (window.py); the few about it are compared one by one.
"""

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from flashdsa.dsl.smem import store_words
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.prefill.entries import (
    WORDS_EACH,
    Entries,
    key_of,
    load_chunk,
)
from flashdsa.kernels.indexer.sm90.prefill.plan import CANDIDATES, CHUNK, CHUNK_MASKS
from flashdsa.kernels.indexer.sm90.prefill.team import SCRATCH_COUNT, Team, masks_address
from flashdsa.kernels.indexer.sm90.prefill.window import Bounds

BLOCK = 8
"""Words of a lane between two looks whether any is about the cut-off."""


@cute.jit
def mark_bounds(
    team: Team, entries: Entries, bounds: Bounds, begin: Int32, end: Int32, plan: cutlass.Constexpr
) -> None:
    """Masks of what is at least `bounds.sure`, of the chunks `begin` to `end` - 1. What is at least
    `bounds.maybe` besides is counted, and put among the candidates while they have room."""
    last = entries.count - 1
    mine = load_chunk(entries, cutlass.min(begin, last), team.lane)
    for chunk in cutlass.range(begin, end, unroll=1):
        following = load_chunk(entries, cutlass.min(chunk + 1, last), team.lane)
        for block in cutlass.range_constexpr(WORDS_EACH // BLOCK):
            masks, differ = [], Int32(0)
            for i in cutlass.range_constexpr(BLOCK):
                score = mine[BLOCK * block + i].bitcast(Float32)
                sure = Int32(cute.arch.vote_ballot_sync(score >= bounds.sure))
                differ |= sure ^ Int32(cute.arch.vote_ballot_sync(score >= bounds.maybe))
                masks.append(sure)
            if team.lane == 0:
                for four in cutlass.range_constexpr(BLOCK // 4):
                    words = CHUNK_MASKS * chunk + BLOCK * block + 4 * four
                    store_words(masks_address(team) + 4 * words, masks[4 * four : 4 * four + 4])
            if differ != 0:
                for i in cutlass.range_constexpr(BLOCK):
                    word = mine[BLOCK * block + i]
                    score = word.bitcast(Float32)
                    if score >= bounds.maybe and not score >= bounds.sure:
                        place = chunk * CHUNK + (BLOCK * block + i) * WARP_SIZE + team.lane
                        add_candidate(team, key_of(word), place)
        for i in cutlass.range_constexpr(WORDS_EACH):
            mine[i] = following[i]


@cute.jit
def add_candidate(team: Team, key: Int32, place: Int32) -> None:
    """Counts it; keeps it while there is room."""
    counter = team.scratch.iterator + SCRATCH_COUNT
    index = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="cta")
    if index < CANDIDATES:
        team.keys[index] = key
        team.places[index] = place


@cute.jit
def mark_candidates(team: Team, listed: Int32, wanted: Int32, plan: cutlass.Constexpr) -> None:
    """Set the bits of the best `wanted` candidates; of equal ones, of the first."""
    masks = masks_address(team)
    begin = team.member * WARP_SIZE + team.lane
    for own in cutlass.range(begin, listed, plan.team_warps * WARP_SIZE, unroll=1):
        key, place = team.keys[own], team.places[own]
        better = Int32(0)
        for other in cutlass.range(listed, unroll=2):
            ahead = team.keys[other] > key
            tie = team.keys[other] == key and team.places[other] < place
            better += Int32(1) if Boolean(ahead or tie) else Int32(0)
        if better < wanted:
            set_bit(masks + 4 * (place // WARP_SIZE), Int32(1) << place % WARP_SIZE)


def set_bit(address: Int32, bit: Int32) -> None:
    """In a word of shared memory, which other threads set bits of too."""
    cute.arch.inline_ptx(
        "red.relaxed.cta.shared::cta.or.b32 [{$r0}], {$r1};", read_only_args=[address, bit]
    )
