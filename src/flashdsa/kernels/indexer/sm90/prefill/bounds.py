"""What certainly wins, what may, and which of the latter does: masks of bits of a query's entries.

Bins of the scores say where the cut-off lies (window.py); the few about it are compared one by one.
"""

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from flashdsa.dsl.smem import store_words
from flashdsa.dsl.warp import lowest_bit
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.prefill.entries import (
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


@cute.jit
def mark_floor(
    team: Team,
    entries: Entries,
    floor: Float32,
    begin: Int32,
    end: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Bits of what is at least `floor`, of the chunks `begin` to `end` - 1."""
    bounds = Bounds(floor, floor, cutlass.Boolean(True))
    mark_chunks(team, entries, bounds, begin, end, False, plan)


@cute.jit
def mark_chunks(
    team: Team,
    entries: Entries,
    bounds: Bounds,
    begin: Int32,
    end: Int32,
    both: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> None:
    """Bits of what is at least `bounds.sure`, and with `both` of what is at least `bounds.maybe`,
    of the chunks `begin` to `end` - 1."""
    last = entries.count - 1
    mine = load_chunk(entries, cutlass.min(begin, last), team.lane)
    second = mine
    if cutlass.const_expr(plan.chunks_ahead == 2):
        second = load_chunk(entries, cutlass.min(begin + 1, last), team.lane)
    for chunk in cutlass.range(begin, end, unroll=1):
        ahead = cutlass.min(chunk + plan.chunks_ahead, last)
        following = load_chunk(entries, ahead, team.lane)
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
    """Count this warp's sure entries among its chunks, and those about the cut-off, of which the
    places become candidates while these have room."""
    sure = Int32(0)
    counter = team.scratch.iterator + SCRATCH_COUNT
    for word in cutlass.range(
        begin * CHUNK_MASKS + team.lane, end * CHUNK_MASKS, WARP_SIZE, unroll=1
    ):
        mask = team.masks[word]
        sure += Int32(cute.arch.popc(mask))
        rest = team.maybes[word] ^ mask
        while rest != 0:
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
    """Keys of all candidates, by all warps of the team, so that they come at the same time."""
    begin = team.member * WARP_SIZE + team.lane
    for own in cutlass.range(begin, listed, plan.team_warps * WARP_SIZE, unroll=1):
        place = team.places[own]
        word = first_word(entries, place // CHUNK) + place % CHUNK
        team.keys[own] = key_of((entries.words + word).load())


@cute.jit
def mark_candidates(team: Team, listed: Int32, wanted: Int32, plan: cutlass.Constexpr) -> None:
    """Set the bits of the best `wanted` candidates; of equal ones, of the first."""
    masks = address_of(team.masks)
    begin = team.member * WARP_SIZE + team.lane
    for own in cutlass.range(begin, listed, plan.team_warps * WARP_SIZE, unroll=1):
        key, place = team.keys[own], team.places[own]
        better = Int32(0)
        for other in cutlass.range(listed, unroll=8):
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
