"""The keys of each query's listed blocks as bits, a window of its row at a time: a CTA a query.

Bits of a window are set in shared memory, by whoever has the block: lists may be in any order and
name a block twice. Then they are written, and counted.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.fake_tensors import WORD_ALIGNMENT, fake_tensor
from flashdsa.dsl.memory import Memory, Region
from flashdsa.hw import SM90, WARP_SIZE
from flashdsa.kernels.indexer.sm90.listed.plan import ListedPlan

TOGETHER = 8
"""Ids that a thread loads at the same time."""


class ListedMemory(Memory):
    """Regions of `ListedPlan`."""

    bits: Region
    ones: Region


@cute.kernel
def listed_kernel(
    candidates: cute.Tensor,
    starts: cute.Tensor,
    ends: cute.Tensor,
    num_keys: Int32,
    block_bits: Int32,
    bits: cute.Tensor,
    counts: cute.Tensor,
    plan: cutlass.Constexpr,
):
    """One CTA; arguments as in `launch_listed`."""
    thread, _, _ = cute.arch.thread_idx()
    query, _, _ = cute.arch.block_idx()
    memory = ListedMemory.allocate(plan)
    window, ones = memory.bits.array(Int32, plan.window_words), memory.ones.array(Int32, 1)
    start, end = Int32(0), cutlass.min(ends[query], num_keys)
    if starts.shape[0] != 0:
        start = cutlass.min(cutlass.max(starts[query], Int32(0)), num_keys)
    line = candidates.iterator + Int64(query) * candidates.shape[1]
    count, words, mine = Int32(candidates.shape[1]), Int32(bits.shape[1]), Int32(0)
    to = bits.iterator + Int64(query) * words
    if thread == 0:
        ones[0] = Int32(0)
    for first in cutlass.range(0, words, plan.window_words, unroll=1):
        here = cutlass.min(words - first, Int32(plan.window_words))
        for word in cutlass.range(thread, here, plan.threads, unroll=4):
            window[word] = Int32(0)
        cute.arch.sync_threads()  # all bits are 0
        begin = first * WARP_SIZE
        limit = cutlass.min(end, begin + plan.window_keys)
        for i in cutlass.range(thread, count, TOGETHER * plan.threads, unroll=1):
            blocks = []
            for ahead in cutlass.range_constexpr(TOGETHER):
                at = i + ahead * plan.threads
                blocks.append(load_block(line + at, at < count))
            for ahead in cutlass.range_constexpr(TOGETHER):
                set_block(window, blocks[ahead], block_bits, start, begin, limit)
        cute.arch.sync_threads()  # all bits are set
        for word in cutlass.range(thread, here, plan.threads, unroll=4):
            mask = window[word]
            (to + (first + word)).store(mask)
            mine += Int32(cute.arch.popc(mask))
        cute.arch.sync_threads()  # they have been read
    mine = Int32(cute.arch.warp_redux_sync(mine, "add"))
    if thread % WARP_SIZE == 0:
        cute.arch.atomic_add(ones.iterator, mine, sem="relaxed", scope="cta")
    cute.arch.sync_threads()  # all have added theirs
    if thread == 0:
        counts[query] = ones[0]


@cute.jit
def load_block(at: Any, is_there: cutlass.Boolean) -> Int32:
    """Load an id; -1 behind the list."""
    block = Int32(-1)
    if is_there:
        block = at.load()
    return block


@cute.jit
def set_block(
    window: cute.Tensor, block: Int32, block_bits: Int32, start: Int32, begin: Int32, end: Int32
) -> None:
    """Set the bits of a block's keys, of those that lie in `begin` to `end` - 1. window: bits of
    the keys from `begin` on. start: the key at which block 0 begins."""
    if block >= 0 and block <= (end - start) >> block_bits:
        low = start + (block << block_bits)
        high = cutlass.min(low + (Int32(1) << block_bits), end) - begin
        low = cutlass.max(low - begin, Int32(0))
        while low < high:
            upto = cutlass.min(high, (low | (WARP_SIZE - 1)) + 1)
            ones = Uint32(0xFFFFFFFF) >> Uint32(WARP_SIZE - (upto - low))
            cute.arch.inline_ptx(
                "red.relaxed.cta.shared::cta.or.b32 [{$r0}], {$r1};",
                read_only_args=[
                    window.iterator + low // WARP_SIZE,
                    Int32(ones << Uint32(low % WARP_SIZE)),
                ],
            )
            low = upto


@cute.jit
def launch_listed(
    plan: cutlass.Constexpr,
    stream: Any,
    candidates: cute.Tensor,
    starts: cute.Tensor,
    ends: cute.Tensor,
    num_keys: Int32,
    block_bits: Int32,
    bits: cute.Tensor,
    counts: cute.Tensor,
):
    """Launch on `stream`.

    Args:
        candidates: (S, n) int32 ids of blocks from each query's first key, in any order; anything
            beyond its range.
        starts: (S,) int32, or (0,): all start at row 0. ends: (S,) int32. num_keys: S_kv.
        block_bits: binary logarithm of a block's keys.
        bits: (S, words) int32, written: bit i of word w of a query is of key row 32 w + i.
        counts: (S,) int32, written: how many are 1.
    """
    listed_kernel(candidates, starts, ends, num_keys, block_bits, bits, counts, plan).launch(
        grid=[candidates.shape[0], 1, 1], block=[plan.threads, 1, 1], stream=stream
    )


def compile_listed(plan: ListedPlan) -> Any:
    """Compile `launch_listed`."""
    queries, listed, starts, words = (cute.sym_int32() for _ in range(4))
    return compile_launch(
        SM90,
        launch_listed,
        plan,
        fake_tensor(Int32, (queries, listed), WORD_ALIGNMENT),
        fake_tensor(Int32, (starts,), WORD_ALIGNMENT),
        fake_tensor(Int32, (queries,), WORD_ALIGNMENT),
        Int32(1),
        Int32(1),
        fake_tensor(Int32, (queries, words), WORD_ALIGNMENT),
        fake_tensor(Int32, (queries,), WORD_ALIGNMENT),
    )
