"""Indices of marked entries, in their order, from the bits that mark them."""

from typing import Any

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.smem import load4, store_half_if
from flashdsa.dsl.warp import prefix_sums
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.prefill.plan import CHUNK, CHUNK_MASKS, INDEX_BYTES
from flashdsa.kernels.indexer.sm90.prefill.team import Team

STEPS = 2
"""Bits of a word between two checks whether any lane has more."""
DENSE = 28
"""Bits of a word above which all lanes take a word together, not one word a lane."""


@cute.jit
def write_indices(
    team: Team, begin: Int32, end: Int32, at: Int32, to: Any, first: Int32, what: cutlass.Constexpr
) -> None:
    """Write `first` + the index in the chunks `begin` to `end` - 1 of each of their marked entries,
    the first one at index `at`. A lane takes a word of a chunk.

    Args:
        to: "log": a pointer to Int32; "best" and "kept": an address in shared memory, of 16-bit
            words. "best": where words have many bits, a lane takes a bit of each word, and the
            maybes are overwritten.
    """
    plan = team.plan
    write = store_highest if what == "log" else store_highest_shared
    size = 1 if what == "log" else INDEX_BYTES
    for chunk in cutlass.range(begin, end, plan.chunks_written, unroll=1):
        masks, ones, most = [], [], Int32(0)
        for i in cutlass.range_constexpr(plan.chunks_written):
            mask = team.masks[cutlass.min(chunk + i, end - 1) * CHUNK_MASKS + team.lane]
            if chunk + i >= end:
                mask = Int32(0)
            masks.append(mask)
            ones.append(Int32(cute.arch.popc(mask)))
            most = cutlass.max(most, ones[i])
        most = cute.arch.warp_redux_sync(most, "max")
        firsts = []  # output index of the first marked entry of this lane's word of each
        through = prefix_sums(ones, team.lane)
        for i in cutlass.range_constexpr(plan.chunks_written):
            firsts.append(at + through[i] - ones[i])
            at += cute.arch.shuffle_sync(through[i], WARP_SIZE - 1)
        entry = first + (chunk - begin) * CHUNK
        dense = cutlass.Boolean(False)
        if cutlass.const_expr(what == "best"):
            dense = most > DENSE
        if dense:
            for i in cutlass.range_constexpr(plan.chunks_written):
                if chunk + i < end:
                    team.maybes[(chunk + i) * CHUNK_MASKS + team.lane] = firsts[i]
            cute.arch.sync_warp()  # all lanes read all of them
            words_end = cutlass.min(chunk + plan.chunks_written, end) * CHUNK_MASKS
            write_words(team, chunk * CHUNK_MASKS, words_end, to, entry)
        else:
            word, last = entry + team.lane * WARP_SIZE, []
            for i in cutlass.range_constexpr(plan.chunks_written):
                last.append(to + (firsts[i] + ones[i] - 1) * size)
            for _ in cutlass.range((most + STEPS - 1) // STEPS, unroll=1):
                for step in cutlass.range_constexpr(STEPS):
                    for i in cutlass.range_constexpr(plan.chunks_written):
                        masks[i] = write(masks[i], last[i] - step * size, word + CHUNK * i)
                for i in cutlass.range_constexpr(plan.chunks_written):
                    last[i] = last[i] - STEPS * size


@cute.jit
def write_words(team: Team, begin: Int32, end: Int32, to: Int32, first: Int32) -> None:
    """Write the same for the words `begin` to `end` - 1; a lane takes a bit of each: lanes with
    many bits of a word each would store to the same banks. The output indices of the words' first
    entries are where their maybes were.

    Args:
        first: index of the first word's first entry.
    """
    below, own = Int32(cute.arch.lanemask_lt()), Int32(1) << team.lane
    entry = first + team.lane
    for four in cutlass.range(begin // 4, end // 4, unroll=1):
        masks, firsts = load4(team.masks, four), load4(team.maybes, four)
        for i in cutlass.range_constexpr(4):
            index = firsts[i] + Int32(cute.arch.popc(masks[i] & below))
            store_half_if(masks[i] & own, to + index * INDEX_BYTES, entry + WARP_SIZE * i)
        entry += 4 * WARP_SIZE


def store_highest(rest: Int32, pointer: Any, first: Int32) -> Int32:
    """Store `first` + the position of the highest bit, if any is set; return the bits below it."""
    return _highest(rest, pointer, first, "@p st.global.b32 [{$r1}], row;")


def store_highest_shared(rest: Int32, address: Any, first: Int32) -> Int32:
    """The same to 16 bits of shared memory."""
    return _highest(rest, address, first, "cvt.u16.u32 half, row; @p st.shared.b16 [{$r1}], half;")


def _highest(rest: Int32, to: Any, first: Int32, store: str) -> Int32:
    return cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .b32 bit, row; .reg .b16 half; setp.ne.s32 p, {$r0}, 0; "
        f"bfind.u32 bit, {{$r0}}; add.s32 row, bit, {{$r2}}; {store} shl.b32 bit, 1, bit; "
        "not.b32 bit, bit; and.b32 {$w0}, {$r0}, bit; }",
        write_only_types=[Int32],
        read_only_args=[rest, to, first],
    )
